"""Does a router keep its balance better under GVPO than under GRPO (router_freeze.py)?

Look at: router/cv, router/cold (loads), router/drift, distance_kernel, sampler/gap_mean; held-out
avg@4 at the end.
Expect: less drift than under GRPO at the same rate, as GVPO is held by its anchor; the rest alike:
frozen routers keep their loads, 30 times faster ones lose them.
Result: in part. Free routers, seeds 0, 1, 2: avg@4 65.8, 67.0, 68.6 (start 67.9, 65.2, 72.2), CV of
the loads .99, .98, 1.02. The other arms are open.
"""

BASE = "configs/router_gvpo.py"


def sweep() -> list[dict[str, object]]:
    """Overrides of each run."""
    routers: list[dict[str, object]] = [
        {"phases.gvpo.optimizer.freeze": ()},
        {"phases.gvpo.optimizer.freeze": ("router/",)},
        {"phases.gvpo.optimizer.rates": (("router/", 30.0),)},
    ]
    return [
        router | {"phases.gvpo.train.routes": routes, "seed": seed}
        for router in routers
        for routes in ("free", "replayed")
        for seed in (0, 1, 2)
    ]
