r"""Does freezing or replaying the router keep a mixture of experts balanced under reinforcement?

Look at: router/cv, router/cold (loads), router/drift (from the recorded routes), distance_kernel,
router/agreement and sampler/gap_mean (sampler against trainer); held-out avg@4 at the end.
Expect: a free router drifts and loses balance, the faster it learns the more; frozen, it still
changes its mind as the states before it move; replaying narrows the gap, whoever moves.
Arms: free and frozen routers, free and replayed routes, at two rates of the whole model (at 3e-3
the policy itself is lost, whatever the routes); and free routers that alone learn 30 times faster.
router_freeze_gvpo.py has them under GVPO.

To see whether what a free run lost is its routers', put those of the warm start back once it ended,
and measure (the summary's ``held_out.before``; the steps taken do not matter):

    python -m jaxrl.restore_router --from RUN/phases/sft \
        --into RUN/weights/v=0-400 --to RUN/restored
    python -m jaxrl.launch --config configs/router.py --workdir RUN/measured --config.seed=SEED \
        --config.phases.sft.train.steps=1 --config.train.steps=1 \
        --config.phases.grpo.train.start=RUN/restored

Result: three seeds at 9ea61c7, 2026-12-01, rate 3e-4 (the numbers of each in turn, loads of the
last 10 of 100 takes; the warm start had held-out avg@4 67.9, 65.2 and 72.2 %):

    routers 30 times faster   avg@4 51.7, 41.2, 34.8 %   CV 1.65, 1.43, 1.40   cold 48, 53, 48 %
    the same, replayed        52.0, 48.7, 41.4 %         1.69, 1.68, 1.46      37, 48, 53 %
    free, the model's rate    69.6, 69.3, 66.8 %         .95, .99, 1.04        17, 15, 28 %
    the same, replayed        71.6, 70.4, 71.7 %         1.03, .96, 1.07       18, 15, 18 %
    frozen                    69.0, 66.9, 69.6 %         .98, .98, 1.13        14, 12, 24 %
    the same, replayed        72.1, 68.8, 72.9 %         .99, .99, 1.10        18, 12, 22 %

Routers that learn faster lose balance and task, in each seed, and following the recorded routes
does not save them. With the warm start's routers put back the policies of the first row have 61.4,
57.8 and 58.0 %: of what was lost 60, 69 and 62 % was the routers'. At the model's own rate a frozen
router is no better than a free one (68.5 and 68.6 % in the mean, the warm start 68.4): neither
loses its balance, and frozen ones still choose anew at 1.4 % of the places as the states before
them move (free 1.4 %). Following the recorded routes is better in each seed, free or frozen (71.2
and 71.3 %), by 1.1 to 4.9 points, though the gap between sampler and trainer is 0 here, both being
float32. Rate 1e-3 did not run; at 3e-3 the policy itself is lost (reward 0, CV 2.8 and 3.7;
e1c5355, seed 0). The first arm of seed 0 had 44.4 % at 2ec39b4; why it differs was not looked into.
Six seeds on a problem of seconds:
`claims/x08_router_load.py`, `claims/x09_frozen_routes.py`.
"""

BASE = "configs/router.py"


def sweep() -> list[dict[str, object]]:
    """Overrides of each run."""

    def plain(rate: float) -> list[dict[str, object]]:
        return [
            {
                "phases.grpo.optimizer.freeze": freeze,
                "phases.grpo.train.routes": routes,
                "optimizer.learning_rate": rate,
            }
            for freeze in ((), ("router/",))
            for routes in ("free", "replayed")
        ]

    fast: list[dict[str, object]] = [
        {
            "phases.grpo.optimizer.rates": (("router/", 30.0),),
            "phases.grpo.train.routes": routes,
            "optimizer.learning_rate": 3e-4,
        }
        for routes in ("free", "replayed")
    ]
    # Whole seeds first, so that a sweep that is cut short compares arms.
    return [
        arm | {"seed": seed}
        for arms in ([*fast, *plain(3e-4)], plain(1e-3))
        for seed in (0, 1, 2)
        for arm in arms
    ]
