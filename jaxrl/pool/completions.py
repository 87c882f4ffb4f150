"""What a pool makes of a completion: is it what was asked for, and what else does it tell."""

import numpy as np

from jaxrl.pool.contract import Completion, PoolError, Request
from jaxrl.pool.rollout import ROUTES, StopReason


def check_end(tokens: np.ndarray, reason: StopReason, request: Request) -> None:
    """PoolError unless a stopped response ends with its sampled terminator and no other one has
    any."""
    stops = [place for place, token in enumerate(tokens.tolist()) if token in request.stop_ids]
    expected = {StopReason.STOP: [len(tokens) - 1], StopReason.LENGTH: []}
    if reason not in expected:
        raise PoolError(f"group {request.group}: stop reason {reason!r}; allowed: stop, length")
    if stops != expected[reason] or len(tokens) > request.max_new_tokens:
        raise PoolError(
            f"group {request.group} sample {request.sample}: ids {tokens.tolist()} do not fit "
            f"stop reason {reason.value!r} with stop ids {sorted(request.stop_ids)} "
            f"and at most {request.max_new_tokens} tokens"
        )


def route_facts(completion: Completion, answered: int) -> dict[str, np.ndarray]:
    """The recorded routes, a fact of each token; nobody chose any for the ``answered`` tokens that
    the environment added."""
    if completion.routes is None:
        return {}
    unknown = ((0, answered), *((0, 0),) * (completion.routes.ndim - 1))
    return {ROUTES: np.pad(completion.routes, unknown, constant_values=-1)}
