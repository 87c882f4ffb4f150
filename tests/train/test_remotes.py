"""The fields of a remote pool: what is refused, what is warned of, and what helpers are told."""

import dataclasses
import json
import types
from typing import Any, cast

import pytest
from etils import epath

from jaxrl.gateway import admission_of, permits_of
from jaxrl.pool.contract import PoolError
from jaxrl.pool.permits import Permits
from jaxrl.train import remotes, rounds, settings
from tests.train.test_settings import config, last


def phase(algorithm: dict[str, Any] | None = None, **pool: Any):
    made = config()
    made.pool.update({"kind": "remote", "gateway": "http://127.0.0.1:9", "launcher": "none"} | pool)
    return dataclasses.replace(last(made), algorithm=algorithm or {"name": "grpo"})


@pytest.mark.parametrize(
    ("pool", "match"),
    [
        ({"ledger": "mysql://x"}, "pool.ledger='mysql://x'; allowed: 'sqlite', or postgresql://"),
        ({"staleness": -1}, "pool.staleness=-1 is too small; allowed: >= 0"),
        (
            {"over_age": "ignore"},
            "pool.over_age='ignore' is unknown; allowed: drop, wait",
        ),
        ({"lease_s": 0.0}, "pool.lease_s=0.0 is too small"),
        ({"max_attempts": 0}, "pool.max_attempts=0 is too small"),
        ({"min_group": 99}, "pool.min_group=99; allowed: 0 .all. to pool.rollouts_per_group=4"),
        ({"engine": "vllm"}, "pool.engine='vllm'; allowed: 'sampler', or serve:, vllm: or sglang:"),
        ({"engine": "sampler:x"}, "pool.engine='sampler:x'"),
        ({"launcher": "slurm"}, "pool.launcher='slurm' is unknown"),
        (
            {"publish_every_steps": 2},
            "allowed with pool.kind='remote': 1 to pool.staleness",
        ),
        ({"publish_every_steps": 0, "staleness": 3}, "pool.publish_every_steps=0"),
        ({"admission": "free"}, "pool.admission='free' is unknown; allowed: auto, aimd, fixed"),
        ({"under_way": 3}, "pool.under_way=3; allowed: 0 .no bound., or at least .*_group=4"),
        ({"usage_marks": (0.7, 0.9)}, "pool.usage_marks=.0.7, 0.9.; allowed: target, trim and"),
        ({"usage_marks": (0.9, 0.8, 0.7)}, "pool.usage_marks=.0.9, 0.8, 0.7.; allowed"),
        ({"sandboxes": -1}, "pool.sandboxes=-1 is too small; allowed: >= 0"),
        ({"judge_calls": -1}, "pool.judge_calls=-1 is too small; allowed: >= 0"),
        ({"spool_bytes": -1}, "pool.spool_bytes=-1 is too small; allowed: >= 0"),
        (
            {"spool_bytes": 9, "kind": "local"},
            "pool.spool_bytes=9 with pool.kind='local'; allowed: 0",
        ),
        ({"quotas": (("(", 0.5),)}, "pool.quotas has .*0.5. .missing"),
        ({"quotas": (("code", 0.0),)}, "pool.quotas has .'code', 0.0.; allowed: pairs"),
        ({"quotas": ("code",)}, "pool.quotas has 'code' .too many"),
        ({"quotas": ((b"code", 0.5),)}, "pool.quotas has .b'code', 0.5.; allowed: pairs"),
        ({"quotas": None}, "pool.quotas=None; allowed: pairs"),
        ({"usage_marks": (0.7, "0.8", 0.9)}, "pool.usage_marks=.0.7, '0.8', 0.9.; allowed"),
        ({"usage_marks": None}, "pool.usage_marks=None; allowed: target"),
        ({"judge_calls": None}, "pool.judge_calls=None; allowed: a number >= 0"),
        ({"spool_bytes": True}, "pool.spool_bytes=True; allowed: a number >= 0"),
        ({"under_way": None}, "pool.under_way=None; allowed: a number >= 0"),
        ({"quotas": (("code", None),)}, "pool.quotas has .'code', None.; allowed: pairs"),
        ({"quotas": (("code", (0.5,)),)}, "pool.quotas has .'code', .0.5,..; allowed: pairs"),
    ],
)
def test_a_field_is_refused_by_name(pool, match):
    with pytest.raises(ValueError, match=match):
        phase(**pool)


def test_weights_may_be_rare_where_samples_may_be_old():
    assert phase(publish_every_steps=4, staleness=3).pool.staleness == 3


def test_age_without_a_bound_on_the_ratio_is_warned_of():
    bare = phase({"name": "bare"}, staleness=2)
    with pytest.warns(UserWarning, match="pool.staleness=2 with algorithm 'bare', which bounds no"):
        remotes.warn_of_age(bare)


@pytest.mark.parametrize(
    ("staleness", "algorithm"),
    [
        (0, {"name": "bare"}),
        (2, {"name": "grpo", "mismatch": "truncate"}),
        (2, {"name": "rloo", "mismatch_cap": 2.0}),
    ],
)
def test_nothing_else_is_warned_of(staleness, algorithm, recwarn):
    remotes.warn_of_age(phase(algorithm, staleness=staleness))
    assert not recwarn.list


def test_a_ledger_is_refused_in_a_bucket():
    parts: Any = None
    with pytest.raises(ValueError, match="pool.local_dir=''.*a folder on a local disk"):
        remotes.open_remote(
            phase(), parts, epath.Path("gs://bucket/run/pool"), "run", keep=None, annotate=None
        )


@pytest.mark.parametrize(
    ("pool", "adapts", "limit", "bounds"),
    [
        ({}, False, 2**31 - 1, False),  # as it was before there were limits
        ({"engine": "serve:http://a"}, False, 2**31 - 1, False),
        ({"under_way": 64}, False, 64, True),
        ({"engine": "vllm:http://a,http://b"}, True, 32, False),  # the slots of two samplers
        ({"engine": "sglang:http://a", "under_way": 12}, True, 12, True),
        ({"engine": "vllm:http://a", "admission": "fixed", "under_way": 64}, False, 64, True),
        ({"engine": "serve:http://a", "admission": "aimd"}, True, 16, False),
    ],
)
def test_what_grows_with_its_answers_is_admitted_by_its_load(pool, adapts, limit, bounds):
    run = json.loads(json.dumps(remotes.described(phase(**pool), "p", "run", "ledger", "spool")))
    made = admission_of(run)
    assert (made.adapts, made.limit, made.bounds) == (adapts, limit, bounds)


def test_helpers_are_told_what_they_need_as_json(tmp_path):
    told = remotes.described(phase(), str(tmp_path), "run", "ledger", "spool")
    again = json.loads(json.dumps(told))
    assert again["model"]["width"] == 32 and again["task"]["reward"] == "exact"
    assert again["pool"]["lease_s"] == 60.0 and again["sampler"]["temperature"] == 1.0
    assert set(again["mesh"].values()) == {1}


def test_permits_are_those_that_the_source_needs():
    from tests.pool.test_permits import Contest, Costly

    asked = phase(judge_calls=3, spool_bytes=9)
    assert remotes.rules_of(asked, Costly(1)).permits == Permits(spool_bytes=9, judge_calls=3)
    assert remotes.rules_of(asked, Contest(1)).permits == Permits(spool_bytes=9)
    assert remotes.rules_of(phase(), Costly(1)).permits == Permits()
    with pytest.raises(ValueError, match="pool.sandboxes=1; allowed: 0 .no verdict of tests.pool"):
        remotes.rules_of(phase(sandboxes=1), Costly(1))
    run = json.loads(json.dumps(remotes.described(phase(), "p", "run", "ledger", "spool")))
    assert permits_of(run) == Permits()
    limited = phase(kind="local", judge_calls=1, sandboxes=1).pool
    assert (limited.judge_calls, limited.sandboxes) == (1, 1)  # within any limit


def test_a_limit_that_nobody_needs_is_refused_before_the_first_phase(tmp_path):
    made = config()
    made.pool.judge_calls = 2
    with pytest.raises(ValueError, match="pool.judge_calls=2; allowed: 0 .no verdict of jaxrl.tas"):
        rounds.assemble(settings.phases(made), epath.Path(tmp_path))


def test_a_pool_whose_gateway_others_started_is_opened_without_helpers(tmp_path):
    from tests.pool.scripted import Letters, Sums

    parts = cast(Any, types.SimpleNamespace(tokenizer=Letters(), source=Sums(8)))
    asked = phase(watchdog_s=0.2)
    pool = remotes.open_remote(asked, parts, epath.Path(tmp_path), "run", keep=None, annotate=None)
    with pytest.raises(PoolError, match="no weights were published"):
        pool.take(2, 0)
    assert (tmp_path / "ledger" / "late.sqlite").exists()
    pool.close()
