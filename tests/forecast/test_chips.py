"""Slices by name, their ports, and the three counted times, by hand."""

import pytest

from jaxrl.forecast import chips, times
from jaxrl.forecast.program import Collective, Counted
from jaxrl.forecast.times import Place


def grid(*extents: int) -> list[Place]:
    places = [()]
    for extent in extents:
        places = [(*place, i) for place in places for i in range(extent)]
    return [Place(place, 0) for place in places]


@pytest.mark.parametrize(
    ("name", "devices", "told"),
    [
        ("v5e:2x2", 4, "v5e:2x2"),
        ("v5p:8x8x16", 1024, "v5p:8x8x16"),
        ("v7x:2x2x2", 16, "tpu7x:2x2x2"),  # two devices a chip
        ("v6e:4x4*2", 32, "v6e:4x4*2"),
    ],
)
def test_a_slice_is_read(name, devices, told):
    found = chips.read_slice(name)
    assert (found.devices, found.name) == (devices, told)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("v9:2x2", "'v9:2x2'.*'v9' is unknown.*v5e, v5p, v6e, tpu7x"),
        ("v5p:2x2", "'v5p:2x2'.*extents 2x2; allowed for v5p: 3"),
        ("v5e:0x2", "'v5e:0x2'.*at least 1"),
        ("v5e", "'v5e'.*allowed: <chip>:<extents>"),
        ("v5e:2x2*0", "'v5e:2x2.0'.*0 slices"),
    ],
)
def test_a_slice_that_is_none_is_refused(name, words):
    with pytest.raises(ValueError, match=words):
        chips.read_slice(name)


def test_ports_are_two_where_a_dimension_closes_to_a_ring():
    cube, board = chips.read_slice("v5p:2x2x4"), chips.read_slice("v5e:2x2")
    whole = [place.coordinates for place in grid(2, 2, 4)]
    assert chips.links(cube, whole) == 1 + 1 + 2
    assert chips.links(cube, [(0, 0, z) for z in range(4)]) == 2
    assert chips.links(cube, [(0, 0, 0), (0, 0, 1)]) == 1  # a part of the ring
    assert chips.links(board, [place.coordinates for place in grid(2, 2)]) == 2


@pytest.mark.parametrize(
    ("kind", "sent"),
    [
        ("all-gather", 75.0),
        ("all-reduce", 150.0),
        ("reduce-scatter", 300.0),
        ("all-to-all", 75.0),
        ("collective-permute", 100.0),
    ],
)
def test_bytes_sent_for_a_result_of_a_hundred_bytes_in_a_group_of_four(kind, sent):
    assert times.sent(kind, 100.0, 4, 2) == sent
    assert times.sent(kind, 100.0, 1, 1) == 0.0


def test_the_longest_of_three_times():
    board = chips.read_slice("v5e:2x2")
    gather = Collective("all-gather", ((0, 1, 2, 3),), 2.0, 8e9, "x")
    counted = Counted(hbm_bytes=819e9 / 4, collectives=[gather])
    found = times.times(197e12 / 8, counted, board, grid(2, 2))
    assert found.compute == 0.125 and found.hbm == 0.25
    assert found.interconnect == pytest.approx(6e9 / (2 * 50e9))  # two ports
    assert (found.longest, found.bound) == (0.25, "hbm")
    assert found.together == pytest.approx(0.435)


def test_a_permutation_goes_around_all_that_it_links():
    board = chips.read_slice("v5e:2x2")
    ring = Collective("collective-permute", ((0, 1), (1, 3), (3, 2), (2, 0)), 1.0, 1e9, "x")
    assert times.collective_seconds(ring, board, grid(2, 2)) == pytest.approx(1e9 / 100e9)


def test_a_group_on_two_slices_goes_over_the_network_too():
    pair = chips.read_slice("v5e:2x2*2")
    places = grid(2, 2) + [Place(place.coordinates, 1) for place in grid(2, 2)]
    reduce = Collective("all-reduce", (tuple(range(8)),), 1.0, 8e8, "x")
    inside = 2 * 0.75 * 8e8 / 100e9
    across = 2 * 0.5 * 8e8 / 4 / 3.125e9
    assert times.collective_seconds(reduce, pair, places) == pytest.approx(inside + across)
