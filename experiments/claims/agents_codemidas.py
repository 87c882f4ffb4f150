"""CodeMidas' funnel: are sound tasks kept and planted faults dropped, and what does the re-check of
the verifier buy?

python -m experiments.claims.agents_codemidas --workdir /tmp/agents_codemidas

Twelve packages (jaxrl/agents/funnel_toys.py): four clean, three whose verifier errs at 10 % of its
boots, two that leak a compiled copy, two with a test of a private name, one that nothing passes.
Four scripted solvers: right with other private parts (twice), with one mistake, and a thief. Each
number is a share of the packages of that kind; ``through``: of the flaky ones that the reference
passed 4 of 4 times; ``reason right``: of the dropped faulty ones. ``steady`` arms have no flicker:
the re-check can buy nothing there. ``blind reviewer`` overlooks every fault.

Expect, by closed form: a verifier that errs at 10 % passes 4 of 4 with probability .656; of those,
8 gradings of two right submissions let .9^16 + .1^16 = .185 through: .12 at most with the re-check
(a mistake in the condition that flickers is seen too) and, without it, all that look mixed.
Result: as expected. 20 seeds, means with 95 % t intervals, 8 to 21 s a run on busy cores; commit
a418513, 2026-11-30. Every arm keeps all clean packages and no leaking, private or impossible one.
The reference of .667 [.554, .780] of the flaky ones passes 4 of 4. Kept of them: .667 [.554, .780]
without the re-check, .033 [-.015, .081] with it (2 of 60; exact interval .004 to .115). Their right
held-out submissions fail in .034 [.014, .053] without it, .004 [-.004, .012] with it. Reasons are
right in all drops, but for the blind reviewer (.746): a private test that nobody sees makes a task
unsolved, which waits and is not kept. Steady arms keep all, with and without the re-check.
"""

import functools

from experiments.claims import agent_runs
from experiments.claims.protocol import Claim, Outcome, main
from jaxrl.agents import drive

ARMS = {
    "funnel": ({}, {}),
    "no re-check": ({"gradings": 1}, {}),
    "blind reviewer": ({}, {"overlooked": 1.0}),
    "steady": ({}, {"flake": 0.0}),
    "steady, no re-check": ({"gradings": 1}, {"flake": 0.0}),
}
REASONS = {"leak": "leak", "private": "faulty", "impossible": "impossible", "flaky": "flaky"}


def run(quick: bool, arm: str, rate: float, seed: int) -> Outcome:
    """One pass of all packages."""
    system, world = ARMS[arm]
    config = agent_runs.settings("codemidas", seed, quick, system, world)
    done = drive.run("codemidas", config, None)
    faults: dict[str, str] = done.world.faults  # type: ignore[attr-defined]
    tasks = {
        done.shelf.get((label.rsplit("-v", 1)[0], 1)).body["source"]: told
        for label, told in done.records["funnel.json"]["tasks"].items()
    }

    def share(fault: str, good) -> float:
        found = [bool(good(told)) for name, told in tasks.items() if faults[name] == fault]
        return sum(found) / max(len(found), 1)

    kept = {fault: share(fault, lambda told: told["accepted"]) for fault in ("clean", *REASONS)}
    named = [
        told["reason"] == REASONS[faults[name]]
        for name, told in tasks.items()
        if faults[name] != "clean" and not told["accepted"]
    ]
    last = list(done.journal.of("measure"))[-1].asked
    return {
        **{f"{fault} kept": value for fault, value in kept.items()},
        "through": share("flaky", lambda told: all(told["restored"])),
        "reason right": sum(named) / max(len(named), 1),
        "wrong that pass": last["held_out/wrong_that_pass"],
        "right that fail": last["held_out/right_that_fail"],
    }


def claim(quick: bool) -> Claim:
    """Five arms."""
    shown = ["clean kept", *(f"{fault} kept" for fault in REASONS), "through", "reason right"]
    return Claim(
        name="agents_codemidas",
        arms=tuple(ARMS),
        run=functools.partial(run, quick),
        rates=(0.0,),
        choose="clean kept",
        larger=True,
        shown=(*shown, "wrong that pass", "right that fail"),
        drawn=("clean kept", "flaky kept"),
        against="funnel",
        seeds=2 if quick else 20,
    )


if __name__ == "__main__":
    main(claim, __doc__)
