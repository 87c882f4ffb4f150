"""The limit of what may be under way: its laws on random traces, and a loop with an engine."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrl.pool.admission import BURST, CUT, GROWTH, Admission, Marks, Move, unbounded, youngest
from jaxrl.pool.pressure import Pressure

MARKS = Marks(0.7, 0.8, 0.9)
CALM = Pressure(0.1, 0, 0)

usages = st.one_of(st.floats(0, 1), st.sampled_from([0.7, 0.8, 0.9]))
servers = st.lists(
    st.one_of(
        st.none(), st.builds(Pressure, usages, st.sampled_from([0, 0, 0, 3]), st.integers(0, 3))
    ),
    min_size=2,
    max_size=2,
)
traces = st.lists(st.tuples(servers, st.integers(0, 300), st.integers(0, 300)), max_size=40)


@given(traces, st.integers(1, 20), st.integers(0, 200), st.integers(1, 200))
def test_the_laws_of_the_limit(trace, floor, more, start):
    """Never below the floor nor above the ceiling; cut at a preemption or the hard mark, trimmed at
    the trim mark, grown only where there is demand and room, and slowly."""
    ceiling = floor + more
    admission = Admission(floor, ceiling, start, MARKS)
    counted: dict[int, int] = {}  # what each server had counted
    for told, under_way, most in trace:
        before = admission.limit
        move = admission.look(told, under_way, most)
        after, known = admission.limit, [one for one in told if one is not None]
        new = 0
        for place, one in enumerate(told):
            if one is not None:
                last = counted.get(place, one.preempted)
                new += one.preempted - last if one.preempted >= last else one.preempted
                counted[place] = one.preempted
        assert floor <= after <= ceiling
        if not known:
            assert (after, move) == (before, Move.HELD)
            continue
        usage = max(one.usage for one in known)
        if new or usage >= MARKS.hard:
            assert after <= max(floor, math.ceil(CUT * min(before + 1, under_way)))
            assert move is (Move.CUT if after < before or under_way > after else Move.HELD)
        elif usage >= MARKS.trim:
            assert move in (Move.TRIMMED, Move.HELD) and after <= before
            if under_way <= before:
                aimed = MARKS.target / usage * min(before + 1, under_way)
                assert after <= max(floor, math.ceil(aimed))
        else:
            assert after >= before and (move is Move.GREW) == (after > before)
            if after > before:
                assert usage < MARKS.target and not any(one.waiting for one in known)
                assert max(under_way, most) >= before
                assert after <= min(GROWTH * (before + 1), before + 1 + BURST)


@given(st.integers(1, 8), st.integers(1, 60))
def test_growth_compounds_to_no_more_than_a_quarter_a_look(floor, looks):
    admission = Admission(floor, 10**6, floor, MARKS)
    for _ in range(looks):
        admission.look([CALM], admission.limit)
    assert admission.limit <= floor * GROWTH**looks
    assert admission.limit <= floor + BURST * looks
    assert looks < 4 or admission.limit > floor  # from 1, too


def test_without_demand_or_with_a_queue_nothing_grows():
    admission = Admission(4, 100, 20, MARKS)
    assert admission.look([CALM], 19) is Move.HELD
    assert admission.look([CALM], 5, most=20) is Move.GREW  # they came up to it meanwhile
    assert admission.look([CALM._replace(waiting=1)], 25) is Move.HELD
    assert admission.look([CALM, Pressure(0.75, 0, 0)], 25) is Move.HELD
    assert admission.limit == 25


def test_a_server_that_tells_nothing_leaves_the_limit_and_is_counted():
    admission = Admission(4, 100, 20, MARKS)
    assert admission.look([None, None], 20) is Move.HELD
    assert admission.look([None, CALM], 20) is Move.GREW
    assert admission.counts["untold"] == 2 and admission.limit == 25


def test_preemptions_are_counted_from_the_first_look_and_through_restarts():
    admission = Admission(1, 100, 100, MARKS)
    assert admission.look([Pressure(0.5, 0, 900)], 100) is Move.GREW or admission.limit == 100
    assert admission.look([Pressure(0.5, 0, 900)], 50) is Move.HELD
    assert admission.look([Pressure(0.5, 0, 901)], 100) is Move.CUT
    assert admission.look([Pressure(0.5, 0, 2)], 100) is Move.CUT  # started again, and 2 since
    assert admission.told.preempted == 3


def test_while_attempts_end_after_a_trim_the_same_load_trims_no_further():
    admission = Admission(1, 100, 40, MARKS)
    assert admission.look([Pressure(0.85, 0, 0)], 40) is Move.TRIMMED and admission.limit == 32
    assert admission.look([Pressure(0.85, 0, 0)], 36) is Move.HELD and admission.limit == 32
    assert admission.look([Pressure(0.85, 0, 0)], 32) is Move.TRIMMED and admission.limit == 26


def test_an_overload_at_the_floor_still_ends_what_is_over_it():
    admission = Admission(4, 100, 5, MARKS)
    assert admission.look([Pressure(0.85, 0, 0)], 5) is Move.TRIMMED
    assert admission.look([Pressure(0.85, 0, 0)], 5) is Move.HELD  # they drain
    assert admission.look([Pressure(0.95, 0, 0)], 5) is Move.CUT
    assert admission.look([Pressure(0.95, 0, 0)], 4) is Move.HELD
    assert admission.limit == 4


@given(st.integers(20, 2000), st.integers(1, 400), st.integers(1, 16))
def test_with_an_engine_it_settles_below_the_hard_mark(capacity, start, floor):
    """An engine that holds so many attempts, and as much demand as there can be: after at most 100
    looks four fifths of it stay in use or less, and never again as much as the hard mark."""
    admission = Admission(floor, 10**6, start, MARKS)
    under_way, preempted, usages = 0, 0, []
    for _ in range(160):
        under_way = admission.limit
        preempted += max(under_way - capacity, 0)
        usages.append(min(under_way / capacity, 1.0))
        admission.look([Pressure(usages[-1], 0, preempted)], under_way)
    settled = usages[100:]
    if floor < 0.5 * capacity:
        assert 0.5 <= min(settled) and max(settled) < MARKS.hard


def test_without_marks_the_limit_is_the_ceiling():
    fixed = Admission(4, 64, 8, None)
    assert fixed.look([Pressure(1.0, 9, 9)], 64) is Move.HELD and fixed.limit == 64
    assert fixed.bounds and not fixed.adapts
    assert not unbounded().bounds


def test_what_no_limit_can_be_is_refused():
    with pytest.raises(ValueError, match="floor=5, ceiling=4; allowed: 1 <= floor <= ceiling"):
        Admission(5, 4, 4, None)
    with pytest.raises(ValueError, match="allowed: 0 < target <= trim <= hard <= 1"):
        Marks(0.8, 0.7, 0.9)


orders = st.dictionaries(
    st.integers(0, 200), st.tuples(st.integers(0, 2), st.integers(0, 12)), max_size=60
)


@given(orders, st.integers(1, 60))
def test_the_youngest_groups_go_whole_and_no_older_one_before_them(order, limit):
    gone = set(youngest(order, limit))
    kept = set(order) - gone
    groups = {order[name] for name in gone}
    assert not groups & {order[name] for name in kept}
    assert all(group > max((order[name] for name in kept), default=(-1,)) for group in groups)
    sizes = [list(order.values()).count(group) for group in sorted(set(order.values()))]
    if sizes and sizes[0] <= limit:  # as it is where the limit holds a group
        assert len(kept) <= limit
        assert kept or not order
    if gone:  # one group fewer would not have done
        assert len(kept) + sum(order[name] == min(groups) for name in gone) > limit
