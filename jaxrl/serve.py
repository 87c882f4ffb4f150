"""The sampler behind HTTP: an engine for gateways on other machines.

    [JAXRL_SERVE_KEY=...] python -m jaxrl.serve --pool DIR [--host H] [--port P]

DIR is the folder ``pool`` of a run's workdir, whose pool.json says what the model is. Weights come
from the gateway, by version. See ``jaxrl.pool.serving`` for the calls.
"""

import argparse
import json
import os
import pathlib
import sys
from typing import Any

KEY_VARIABLE = "JAXRL_SERVE_KEY"

# What a run says of itself: where things are, and sections of its config.
PLACES = ("run_id", "seed", "ledger", "ledger_run", "spool", "folder")
SECTIONS = ("mesh", "model", "task", "pool", "sampler")


def read_run(folder: pathlib.Path) -> dict[str, Any]:
    """What a run says of itself in ``pool.json``; lists as tuples, as configs have them. ValueError
    if there is none, or naming what it lacks."""
    path = folder / "pool.json"

    def hardened(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: hardened(inner) for name, inner in value.items()}
        return tuple(hardened(inner) for inner in value) if isinstance(value, list) else value

    try:
        run = hardened(json.loads(path.read_text()))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    if lacking := [name for name in (*PLACES, *SECTIONS) if name not in run]:
        raise ValueError(f"{path} lacks {', '.join(lacking)}")
    return run


def build_engine(run: dict[str, Any]) -> Any:
    """The sampler of a run, in a thread that batches requests."""
    from jaxrl import mesh
    from jaxrl.model import form, policy
    from jaxrl.model.sampler import Sampler
    from jaxrl.pool.engines import Batching

    sampler = run["sampler"]
    where = mesh.make_mesh(run["mesh"])
    generator = Sampler(
        policy.build(form.read(run["model"]), where, mesh.Rules()),
        where,
        seed=run["seed"],
        slots=sampler["slots"],
        prompt_buckets=sampler["prompt_buckets"],
        max_new_tokens=sampler["max_new_tokens"],
        samples_per_prompt=run["pool"]["rollouts_per_group"],
        record_routes=sampler["record_routes"],
    )
    return Batching(
        generator,
        chunk_tokens=run["pool"]["chunk_tokens"],
        room=max(sampler["prompt_buckets"]),
        slots=sampler["slots"],
    )


def main() -> None:
    """Serve until told to end."""
    asked = argparse.ArgumentParser(prog="jaxrl.serve")
    asked.add_argument("--pool", required=True, help="folder of the pool, with pool.json")
    asked.add_argument("--host", default="127.0.0.1", help="where to listen; others need a key")
    asked.add_argument("--port", type=int, default=8901, help="0: a free one")
    told = asked.parse_args()
    from jaxrl.pool import launchers, serving

    launchers.die_with_parent()
    key = os.environ.get(KEY_VARIABLE, "")
    if told.host not in serving.LOOPBACK and not key:
        sys.exit(f"jaxrl.serve: --host={told.host} without {KEY_VARIABLE}; allowed: a key")
    try:
        run = read_run(pathlib.Path(told.pool))
        engine = build_engine(run)
        at = serving.listen(told.host, told.port)
        print(serving.url_of(at), flush=True)
        service = serving.EngineService(engine, key, run["pool"]["max_body_bytes"])
        serving.serve(service.app(), at)
    except (ValueError, TypeError, OSError) as error:
        sys.exit(f"jaxrl.serve: {type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
