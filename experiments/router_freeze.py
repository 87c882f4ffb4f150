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

Result: seed 0, rate 3e-4, from the same warm start (coefficient of variation of the loads .95,
9 % of the experts cold, reward .73): routers that learn 30 times faster lose balance and task (CV
1.79, 49 % cold, reward .47, held-out avg@4 44.4 %), and following the recorded routes does not save
them (1.77, 43 %, .57, 46.8 %). At the model's own rate nothing is lost: free CV .98, 16 % cold,
avg@4 70.9 %; replayed 1.03, 18 %, 66.4 %; frozen .97, 17 % (after 80 of its 100 steps), where
router/drift is 1.7 % though no router moved (free 1.5 %). At 3e-3 the policy itself is lost (reward
0, CV 2.8 and 3.7). The gap between sampler and trainer is 0 here, both being float32. e1c5355,
2026-11-30; the other arms and seeds are open. Six seeds on a problem of seconds:
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
