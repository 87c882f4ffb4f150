"""Does freezing or replaying the router keep a mixture of experts balanced under reinforcement?

Look at: router/cv, router/cold (loads), router/drift (from the recorded routes), distance_kernel,
router/agreement and sampler/gap_mean (sampler against trainer); held-out avg@4 at the end. To see
whether a loss is the router's, put the start's back: `python -m jaxrl.restore_router`.
Expect: a free router drifts and loses balance, the faster it learns the more; frozen, it still
changes its mind as the states before it move; replaying narrows the gap, whoever moves.
Result: open on sums; `claims/x08_router_load.py` and `claims/x09_frozen_routes.py` measured it on a
problem of seconds.
"""

BASE = "configs/router.py"


def sweep() -> list[dict[str, object]]:
    """Overrides of each run."""
    return [
        {
            "phases.grpo.optimizer.freeze": freeze,
            "phases.grpo.train.routes": routes,
            "optimizer.learning_rate": rate,
            "seed": seed,
        }
        for freeze in ((), ("router/",))
        for routes in ("free", "replayed")
        for rate in (3e-4, 3e-3)
        for seed in (0, 1, 2)
    ]
