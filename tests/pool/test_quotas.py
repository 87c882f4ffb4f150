"""Shares of the pool by universe: what is deferred keeps its order, and nothing is lost."""

import dataclasses
import json
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrl.pool.contract import PoolError
from jaxrl.pool.durations import KEPT, Durations
from jaxrl.pool.ledger import GroupState, Live
from jaxrl.pool.openings import Openings
from jaxrl.pool.quotas import DEFERRED, Quotas
from jaxrl.pool.ranges import Ranges
from jaxrl.pool.rollout import Version
from jaxrl.tasks.contract import Task, content_hash
from tests.pool.hands import Hands, remote_pool
from tests.pool.scripted import Letters, Sums

V0 = Version(0, 0, "w0")


class Worlds(Sums):
    """Sums of several universes: so many of each."""

    def __init__(self, **counts: int) -> None:
        names = [name for name, count in counts.items() for _ in range(count)]
        self._tasks = [self._named(n, name) for n, name in enumerate(names)]

    def _named(self, n: int, name: str) -> Task:
        prompt = f"{n}+1="
        hashed = content_hash(prompt)
        return Task(f"{name}/{n}", name, "train", prompt, str(n + 1), hashed, {})


def openings(source: Worlds, quotas=(), epochs: int = 0) -> Openings:
    tasks = source.tasks("train")
    sizes: dict[str, Any] = dict(samples=2, max_prompt_tokens=16, max_attempts=3, min_group=0)
    return Openings(tasks, source, Letters(), seed=0, epochs=epochs, quotas=quotas, **sizes)


def drawn(made: Openings, full=()) -> tuple[int, str] | None:
    group = made.draw(V0, 0, Counter(), full)
    return group and (group.id, group.source)


def in_turn(source: Worlds, count: int) -> list[tuple[int, str]]:
    """The first draws without any quota."""
    made = openings(source)
    return [one for _ in range(count) if (one := drawn(made))]


# -- quotas


def test_the_first_pattern_that_is_found_is_a_universes_share():
    quotas = Quotas((("code/", 0.25), ("", 0.5)), {"code/a", "math"})
    assert quotas.full({"code/a": 1, "math": 3}, 8) == set()
    assert quotas.full({"code/a": 2, "math": 3}, 8) == {"code/a"}
    assert quotas.full({"code/a": 2, "math": 4}, 8) == {"code/a", "math"}
    assert quotas.full({"math": 0}, 1) == set()  # one is always allowed
    assert Quotas((("code/", 0.25),), {"code/a", "math"}).full({"math": 99}, 8) == set()


def test_a_pattern_that_matches_nothing_is_refused():
    with pytest.raises(ValueError, match="pool.quotas: 'cod' is the first to match no universe"):
        Quotas((("math", 0.5), ("cod", 0.5)), {"math"})


def test_a_shard_without_tasks_of_a_universe_takes_its_quota(tmp_path):
    """All trainers of a run have the same config."""
    quotas = (("rare", 0.5), ("common", 0.5))
    source = Worlds(rare=1, common=30)
    for shard in range(4):
        remote_pool(tmp_path / f"{shard}", source, shard=(shard, 4), quotas=quotas).close()
    with pytest.raises(ValueError, match="'none' is the first to match no universe"):
        remote_pool(tmp_path / "4", source, shard=(0, 4), quotas=(("none", 0.5),))


# -- deferring


def test_what_is_deferred_comes_first_once_it_may_and_in_its_order():
    source = Worlds(a=20, b=20)
    order = in_turn(source, 12)
    made, counts = openings(source), Counter()
    firsts = []
    while len(firsts) < 4:
        group = made.draw(V0, 0, counts, {"a"})
        assert group is not None and group.source == "b"
        firsts.append(group.id)
    assert firsts == [number for number, name in order if name == "b"][:4]
    waiting = [number for number, name in order if name == "a" and number < firsts[-1]]
    assert counts["deferred"] == len(waiting) > 0
    later = [drawn(made) for _ in range(len(waiting) + 2)]
    assert later == [(number, "a") for number in waiting] + order[firsts[-1] + 1 :][:2]


@given(st.lists(st.sets(st.sampled_from("abc")), max_size=40), st.integers(0, 30))
def test_nothing_is_drawn_twice_or_lost_and_resuming_changes_nothing(turns, at):
    """Random universes are full at each draw; the state is written out and read in at some point,
    by a ledger that holds what was opened."""
    source = Worlds(a=5, b=5, c=5)
    one, other = openings(source, epochs=2), openings(source, epochs=2)
    opened: list[tuple[int, str]] = []
    for turn, full in enumerate(turns):
        if turn == at:
            resumed = openings(source, epochs=2)
            resumed.restore(json.loads(json.dumps(one.state())))
            held = {number for number, _ in opened}
            resumed.follow(Ranges(), held, max(held, default=-1) + 1)
            one = resumed
        found = drawn(one, full)
        assert found == drawn(other, full)
        if found is not None:
            assert found[1] not in full
            opened.append(found)
    while (found := drawn(one)) is not None:
        opened.append(found)
    assert one.ended and sorted(opened) == in_turn(source, 30)


@given(st.lists(st.sets(st.sampled_from("abc")), max_size=40), st.integers(0, 30))
def test_what_was_deferred_after_the_checkpoint_is_drawn_after_a_crash(turns, at):
    """The ledger is ahead of the checkpoint, which knows nothing of what was deferred since."""
    source = Worlds(a=5, b=5, c=5)
    one = openings(source, epochs=2)
    state, opened = one.state(), list[tuple[int, str]]()
    for turn, full in enumerate(turns):
        state = json.loads(json.dumps(one.state())) if turn == at else state
        if (found := drawn(one, full)) is not None:
            opened.append(found)
    resumed = openings(source, epochs=2)
    resumed.restore(state)
    held = {number for number, _ in opened}
    resumed.follow(Ranges(), held, max(held, default=-1) + 1)
    while (found := drawn(resumed)) is not None:
        opened.append(found)
    assert sorted(opened) == in_turn(source, 30)


class Lengthy(Worlds):
    """The prompts of ``a`` are too long."""

    def _named(self, n: int, name: str) -> Task:
        task = super()._named(n, name)
        return dataclasses.replace(task, prompt="9" * 17) if name == "a" else task


def test_what_nobody_could_use_since_the_checkpoint_is_passed_over_again():
    source = Lengthy(a=4, b=4)
    made, resumed = openings(source), openings(source)
    resumed.restore(json.loads(json.dumps(made.state())))
    held = {found[0] for _ in range(20) if (found := drawn(made))}
    resumed.follow(Ranges(), held, max(held) + 1)
    assert drawn(resumed) == drawn(made)


def test_a_universe_without_a_usable_prompt_does_not_hide_one_that_is_full():
    """Its prompts are passed over as often as there are, while those of the other wait."""
    made = openings(Lengthy(a=3, b=3))
    assert drawn(made, {"b"}) is None
    assert drawn(made) is not None
    with pytest.raises(PoolError, match="none of 3 prompts can be used"):
        drawn(openings(Lengthy(a=3)))


def test_a_deferred_draw_stays_what_it_was_though_probabilities_move():
    source = Worlds(a=5, b=5)
    made = openings(source)
    made.draws.weigh({"a": 0.5, "b": 0.5})
    groups = [made.draw(V0, 0, Counter(), {"a"}) for _ in range(3)]
    deferred = [number for number, *_ in made.state()["deferred"]]
    assert all(group and group.source == "b" for group in groups) and deferred
    made.draws.weigh({"a": 0.0, "b": 1.0})
    again = made.draw(V0, 0, Counter())
    assert again is not None and (again.id, again.source) == (deferred[0], "a")
    assert again.facts == {"task_probability": 0.1}  # as when it was drawn


def test_with_as_many_deferred_as_may_be_nothing_more_is_drawn():
    made, counts = openings(Worlds(a=3, b=0)), Counter()
    assert made.draw(V0, 0, counts, {"a"}) is None
    assert counts["deferred"] == DEFERRED and not made.ended
    assert made.draw(V0, 0, counts, {"a"}) is None and counts["deferred"] == DEFERRED
    assert drawn(made) == (0, "a")


def test_a_state_of_before_there_were_quotas_is_read():
    source = Worlds(a=3, b=3)
    made = openings(source)
    old = made.state()
    del old["deferred"], old["durations"]
    openings(source).restore(json.loads(json.dumps(old)))


# -- durations


def test_what_is_expected_is_what_a_task_took_else_its_universe_else_all():
    known = Durations()
    assert known.expected("code", "a") == 0.0
    known.learn("code", "a", 8.0)
    known.learn("math", "b", 2.0)
    known.learn("math", "c", 0.0)  # no clock was read
    assert known.expected("code", "a") == pytest.approx(8.0)
    assert known.expected("code", "new") == pytest.approx(8.0)
    assert known.expected("unseen", "new") == pytest.approx(4.0)  # the geometric mean
    for _ in range(60):
        known.learn("code", "a", 1.0)
    assert known.expected("code", "a") == pytest.approx(1.0, rel=1e-3)
    again = Durations()
    again.restore(json.loads(json.dumps(known.state())))
    assert again.state() == known.state()
    assert again.expected("math", "b") == known.expected("math", "b")


def test_so_many_tasks_are_remembered():
    known = Durations()
    for n in range(KEPT + 1):
        known.learn("u", str(n), 1.0 + n)
        known.learn("u", "0", 1.0)  # seen again and again
    assert len(known.state()["tasks"]) == KEPT
    assert "0" in known.state()["tasks"] and "1" not in known.state()["tasks"]


# -- a whole pool


def test_a_universe_holds_no_more_than_its_share_and_all_are_trained_on(tmp_path):
    """At most half of those that are sampled are ``slow``, and what was deferred comes, too."""
    source, seen = Worlds(slow=9, quick=3), []
    settings: dict[str, Any] = dict(staleness=1, quotas=(("slow", 0.5),), epochs=1)
    pool = remote_pool(tmp_path, source, over_age="wait", **settings)
    pool.publish(V0, "w")

    def look(lease):
        opened = [g.source for g in pool._ledger.live() if g.state == "open"]
        seen.append(opened.count("slow"))

    with Hands(tmp_path, source, trouble=look, threads=3):
        manifests = []
        for step in range(6):
            _, manifest = pool.take(2, step)
            manifests.append(manifest)
            pool.publish(Version(0, step + 1, "w"), "w")
            pool.commit(step)
    assert max(seen) == 2  # half of (K + 1) B = 4
    taken = sorted(number for manifest in manifests for number, _ in manifest.groups)
    assert taken == list(range(12))
    assert sum(manifest.counts["deferred"] for manifest in manifests) > 0
    pool.close()


def test_a_pool_goes_on_with_what_was_deferred(tmp_path):
    """The trainer is killed after a checkpoint: what waited then waits on, and comes."""
    source = Worlds(slow=6, quick=6)
    settings: dict[str, Any] = dict(staleness=1, quotas=(("slow", 0.25),), epochs=1)
    settings |= dict(over_age="wait")  # who drops may lose what is too old a second time
    pool = remote_pool(tmp_path, source, **settings)
    pool.publish(V0, "w")
    with Hands(tmp_path, source, trouble=lambda lease: "lost" if lease.source == "slow" else None):
        _, first = pool.take(2, 0)
        pool.commit(0)
        state = json.loads(json.dumps(pool.state()))
        pool.close()
    assert state["deferred"] and state["durations"]["universes"].keys() == {"quick"}
    again = remote_pool(tmp_path, source, **settings)
    again.restore(state)
    again.publish(Version(1, 1, "w"), "w")
    with Hands(tmp_path, source, threads=2):
        rest = []
        for step in range(1, 6):
            rest += [number for number, _ in again.take(2, step)[1].groups]
            again.publish(Version(1, step + 1, "w"), "w")
            again.commit(step)
    assert sorted([number for number, _ in first.groups] + rest) == list(range(12))
    assert again.state()["deferred"] == []
    again.close()


def live(number: int, source: str, state: GroupState, worked: float) -> Live:
    """A group as a ledger tells of it."""
    values: dict[str, Any] = dict(step=None, dispatched=0, oldest=0, youngest=0, slots={})
    values |= dict(generation=0, reissued=0, seconds=99.0, content_hash=f"{number}")
    return Live(id=number, source=source, state=state, worked=worked, **values)


def test_a_group_is_opened_with_what_its_universe_took():
    """Each group teaches once, when it is READY; those that are not do not."""
    made = openings(Worlds(a=3, b=3))
    ready = live(0, "a", GroupState.READY, 6.0)
    made.learn([ready, live(1, "b", GroupState.OPEN, 50.0)])
    made.learn([dataclasses.replace(ready, worked=7.0), live(2, "b", GroupState.READY, 2.0)])
    groups = [made.draw(V0, 0, Counter()) for _ in range(6)]
    expected = {group.source: group.expected for group in groups if group}
    assert expected == pytest.approx({"a": 6.0, "b": 2.0})
