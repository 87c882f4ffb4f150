"""Which tokens are shared, which bins they fall into, and that every token has one place."""

import dataclasses

import numpy as np
import pytest

from jaxrl.batch import ACTION
from jaxrl.pool.rollout import ROUTES
from jaxrl.train.packing import Shapes, common, fitted
from tests.train.talks import LONGEST, SHAPES, SIZE, laid_out, mixed, talk, uniform
from tests.train.toy import group


def shapes(prefix, tokens, bins=()):
    return Shapes(prefix_buckets=prefix, bin_buckets=tokens, bins=bins)


def test_a_row_by_hand():
    """Prompt 1 2 3 in a prefix of 4, answers of 3, 2 and 1 tokens in two bins of 3."""
    groups = uniform(1, 3, (2, 3, 1))
    batch, counts = laid_out(groups, shapes((4,), (3,), (2,)), slots=1)
    a, b, c = (rollout.tokens[3:].tolist() for rollout in groups[0].rollouts)
    packed = batch.packed
    assert packed is not None and (packed.prefix, packed.bins) == (4, 2)
    np.testing.assert_array_equal(packed.tokens, [[0, 1, 2, 3, *b, *a, *c]])
    np.testing.assert_array_equal(packed.position, [[0, 0, 1, 2, 3, 4, 5, 3, 4, 3]])
    np.testing.assert_array_equal(packed.segment, [[0, 1, 1, 1, 3, 3, 3, 2, 2, 4]])
    own = [[0, 0, 1, 2, 27, 28, 29, 3, 4, 51]]  # rows of 24 tokens one after another
    np.testing.assert_array_equal(packed.source, own)
    wanted = np.full((4, LONGEST), -1)
    wanted[:3, :3] = [1, 2, 3]
    wanted[0, 3:5], wanted[1, 3:6], wanted[2, 3] = [7, 8], [4, 5, 6], 9
    np.testing.assert_array_equal(packed.place, wanted)
    assert counts["packed"] == 1 and counts["positions"] == 10
    assert counts["held_frac"] == pytest.approx(0.9)


@pytest.mark.parametrize("seed", range(3))
def test_every_token_of_a_valid_rollout_has_one_place(seed):
    """At its place stands the token itself, at its position; nothing stands anywhere else."""
    batch, _ = laid_out(mixed(seed), SHAPES)
    packed = batch.packed
    assert packed is not None
    mine = (batch.segment > 0) & np.asarray(batch.valid)[:, None]
    np.testing.assert_array_equal(packed.place >= 0, mine)
    rows, columns = np.nonzero(mine)
    groups, places = rows // SIZE, np.asarray(packed.place)[rows, columns]
    np.testing.assert_array_equal(packed.tokens[groups, places], batch.tokens[rows, columns])
    np.testing.assert_array_equal(packed.position[groups, places], columns)
    found = np.zeros(packed.segment.shape, int)
    np.add.at(found, (groups, places), 1)
    np.testing.assert_array_equal(found > 0, packed.segment > 0)
    assert (found[:, packed.prefix :] <= 1).all()  # a rest is nobody else's
    np.testing.assert_array_equal(batch.kind[rows, columns] == ACTION, batch.acted[mine])
    trained = batch.acted[rows, columns]
    assert (places[trained] >= packed.prefix).all()
    held = packed.segment > 0
    slot, column = np.divmod(packed.source, LONGEST)
    row = np.arange(len(held))[:, None] * SIZE + slot
    np.testing.assert_array_equal(batch.tokens[row, column][held], packed.tokens[held])


def test_segments_are_whole_and_in_order_inside_one_bin():
    batch, _ = laid_out(mixed(), SHAPES)
    packed = batch.packed
    assert packed is not None
    rests = packed.segment[:, packed.prefix :].reshape(8, packed.bins, -1)
    after = packed.position[:, packed.prefix :].reshape(rests.shape)
    for group_, bins in enumerate(rests):
        for segment in np.unique(bins[bins > 0]):
            (bin_,) = np.unique(np.nonzero(bins == segment)[0])
            places = np.flatnonzero(bins[bin_] == segment)
            np.testing.assert_array_equal(np.diff(places), 1)
            np.testing.assert_array_equal(np.diff(after[group_, bin_, places]), 1)
            shared = (packed.segment[group_, : packed.prefix] > 0).sum()
            assert after[group_, bin_, places[0]] == shared


def members(*rollouts):
    return dict(enumerate(rollouts))


def test_what_is_shared_ends_before_what_is_trained_on_or_scored():
    same = [talk(0, 1, s, ("A", 3), prompt=[1, 2, 3]) for s in (0, 0)]
    assert (same[0].tokens == same[1].tokens).all() and common(members(*same), ()) == 3
    told = [talk(0, 1, s, ("F", 2), ("A", 1), prompt=[1, 2]) for s in (0, 0)]
    assert common(members(*told), ()) == 2  # feedback may be scored
    put = [talk(0, 1, s, ("I", 2), ("A", 1), prompt=[1, 2]) for s in (0, 0)]
    assert common(members(*put), ()) == 4
    assert common(members(*same, talk(0, 1, 2, ("A", 3), prompt=[1, 2, 4])), ()) == 2
    assert common(members(*same, talk(0, 1, 2, ("A", 3), prompt=[1])), ()) == 1
    assert common(members(*same, talk(0, 1, 2, ("A", 3), prompt=[5, 2, 3])), ()) == 0
    assert common(members(talk(0, 1, 2, prompt=[1, 2, 3])), ()) == 3 and common({}, ()) == 0


def test_what_is_shared_ends_where_facts_differ_that_must_be_alike():
    one = talk(0, 1, 0, ("A", 3), prompt=[1, 2, 3])
    routes = one.facts[ROUTES].copy()
    other = dataclasses.replace(one, sample=1, facts={ROUTES: routes})
    assert common(members(one, other), (ROUTES,)) == 3
    routes[2, 0, 1] += 1
    assert common(members(one, other), (ROUTES,)) == 2
    assert common(members(one, other), ()) == 3


def test_the_longest_goes_first_into_the_first_bin_with_room():
    assert fitted({0: 2, 1: 7, 2: 3, 3: 5, 4: 1, 5: 4}, 8) == [[1, 4], [3, 2], [5, 0]]
    assert fitted({3: 8, 1: 8}, 8) == [[1], [3]] and fitted({}, 8) == [[]]


def test_the_smallest_shape_that_holds_the_take_is_taken():
    def shape(groups, config):
        packed = laid_out(groups, config, slots=len(groups))[0].packed
        assert packed is not None
        size = (packed.tokens.shape[1] - packed.prefix) // packed.bins
        return packed.prefix, packed.bins, size

    even = uniform(2, 5, (6, 6, 6, 6))
    assert shape(even, shapes((8,), (6, 12, 24), (1, 2))) == (8, 4, 6)  # as many places: the least
    assert shape(even, shapes((8,), (8, 12), (2,))) == (8, 2, 12)  # 24, and 4 * 8 would be 32
    assert shape(even, shapes((4, 8), (8,))) == (4, 4, 8)  # the prompt's end fits into the bins
    assert shape(even, shapes((2, 8), (8,))) == (8, 4, 8)  # 9 tokens of a rest would not
    ragged = [*even, *uniform(1, 5, (1, 1, 1, 6), seed=1)]
    ragged[2] = dataclasses.replace(ragged[2], id=9, rollouts=())
    assert shape(ragged, shapes((8,), (6,), (2, 3))) == (8, 4, 6)  # the fullest group decides
    alone = uniform(1, 5, (1, 1, 1, 6))
    assert shape(alone, shapes((8,), (6,), (2, 3))) == (8, 2, 6)
    assert shape([group(1, [])], shapes((8, 16), (6, 8), (2, 3))) == (8, 2, 6)
    nothing = uniform(1, 3, (2, 3, 1))
    assert shape(nothing, shapes((0,), (6,))) == (0, 4, 6)  # packed, nothing shared


def test_a_rest_longer_than_any_bin_leaves_plain_rows():
    batch, counts = laid_out(mixed(), shapes((8,), (4,)))
    assert batch.packed is None and counts["packed"] == 0
    assert counts["positions"] == 8 * SIZE * LONGEST
    usable = (batch.segment > 0) & np.asarray(batch.valid)[:, None]
    assert counts["held_frac"] == pytest.approx(usable.sum() / counts["positions"])


def test_without_packing_nothing_is_added():
    batch, counts = laid_out(mixed(), None)
    assert batch.packed is None and "packed" not in counts


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (((8, 4), (4,)), r"train.packing.prefix_buckets=\(8, 4\); allowed: increasing"),
        (((8,), (0, 4)), r"train.packing.bin_buckets=\(0, 4\); allowed: .* >= 1"),
        (((-1,), (4,)), r"prefix_buckets=\(-1,\); allowed: increasing numbers >= 0"),
        (((8,), (4,), (2, 2)), r"train.packing.bins=\(2, 2\)"),
    ],
)
def test_shapes_that_cannot_be_are_refused_by_name(fields, words):
    with pytest.raises(ValueError, match=words):
        shapes(*fields)
