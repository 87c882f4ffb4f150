"""The gateway of a remote pool: a run starts it, or a person, for workers on other machines.

    python -m jaxrl.gateway --pool DIR [--host H] [--port P]

DIR is the folder ``pool`` of a run's workdir. ``pool.json`` in it says what the run is; ``key`` is
what workers need, ``evaluation_key`` what any client of OpenAI's needs to ask the newest weights
something that is not trained on. Where the gateway listens is written to ``gateway.json``; started
again, it takes the same port if it can. See ``jaxrl.pool.gateway`` for the calls.
"""

import argparse
import gc
import json
import os
import pathlib
import sys
from typing import Any

ENGINE = "gateway"  # name of the acknowledgement
QUEUED_BATCHES = 4  # answers under way, in slots of the samplers; more are told to come again
GARBAGE = 20_000  # new objects before garbage is looked for: a batch makes so many
EXPORTS = 2  # converted weights that are kept for servers
GROWING = ("vllm:", "sglang:")  # engines whose cache fills up with the answers


def source_of(task: dict[str, Any]) -> Any:
    """The task source of a run."""
    import importlib

    fields = {name: value for name, value in task.items() if name != "reward"}
    return importlib.import_module(fields.pop("source")).Source(
        fields.pop("family"), fields.pop("parameters"), **fields
    )


def tokenizer_of(run: dict[str, Any]) -> Any:
    """The tokenizer of a run, as its trainer has it."""
    from jaxrl.pool.characters import WIDTHS, train_characters
    from jaxrl.pool.published_tokenizer import PublishedTokenizer
    from jaxrl.pool.tokenizer import SentencePieceTokenizer

    pool = run["pool"]
    name = pool["tokenizer"]
    if "/" in name:
        from jaxrl.model import pretrained

        return PublishedTokenizer(pretrained.locate(name), chat=pool["chat"], system=pool["system"])
    if name in WIDTHS:
        tasks = source_of(run["task"]).tasks("train")
        texts = [text for one in tasks for text in (one.prompt, one.answer)]
        return train_characters(texts, WIDTHS[name])
    return SentencePieceTokenizer(pathlib.Path(run["folder"]) / "tokenizer.model")


def exporter(run: dict[str, Any], own_head: bool) -> Any:
    """Published weights -> a checkpoint that inference engines read, beside the pool; with a head
    of its own also where the model's is the embedding."""
    folder = pathlib.Path(run["folder"]) / "exports"

    def convert(path: str) -> str:
        import shutil

        from jaxrl.model import adapters, form, pretrained, transformer
        from jaxrl.model.versions import read_weights

        config = form.read(run["model"])
        final = folder / pathlib.Path(path).name
        if not final.exists():
            params, _ = read_weights(path, shapes=transformer.shapes(config))
            config, params = adapters.without(config), adapters.merged(params, config)
            if own_head:
                config, params = transformer.untied(config, params)
            pretrained.export_checkpoint(
                params,
                config,
                final,
                positions=max(run["sampler"]["prompt_buckets"]) + run["sampler"]["max_new_tokens"],
                shard_bytes=4 * 10**9,
                tokenizer=None,
            )
        older = sorted(folder.iterdir(), key=lambda one: one.stat().st_mtime)
        for one in older[:-EXPORTS]:
            shutil.rmtree(one)
        return str(final)

    return convert


def engine_of(run: dict[str, Any]) -> Any:
    """The engine that ``pool.engine`` names."""
    from jaxrl.pool.engines import Fleet
    from jaxrl.pool.servers import JaxrlServer, SglangServer, VllmServer
    from jaxrl.serve import KEY_VARIABLE, build_engine

    kind, _, urls = run["pool"]["engine"].partition(":")
    timeout = run["pool"]["watchdog_s"]
    if kind == "sampler":
        return build_engine(run)
    key = os.environ.get(KEY_VARIABLE, "")
    makers = {
        "serve": lambda url: JaxrlServer(url, timeout_s=timeout, convert=str, key=key),
        "sglang": lambda url: SglangServer(url, timeout_s=timeout, convert=exporter(run, False)),
        "vllm": lambda url: VllmServer(url, timeout_s=timeout, convert=exporter(run, True)),
    }
    servers = [makers[kind](url) for url in urls.split(",")]
    return servers[0] if len(servers) == 1 else Fleet(servers)


def servers_of(run: dict[str, Any]) -> int:
    """How many samplers a run has: its servers, or the one beside the gateway."""
    return len(run["pool"]["engine"].split(","))


def admission_of(run: dict[str, Any]) -> Any:
    """How many attempts may be under way. Where that moves, it begins with the slots of as many
    samplers as there are servers."""
    from jaxrl.pool.admission import UNBOUNDED, Admission, Marks

    pool = run["pool"]
    grows = pool["engine"].startswith(GROWING)
    moves = {"auto": grows, "aimd": True, "fixed": False}[pool["admission"]]
    return Admission(
        floor=pool["rollouts_per_group"],
        ceiling=pool["under_way"] or UNBOUNDED,
        start=run["sampler"]["slots"] * servers_of(run),
        marks=Marks(*pool["usage_marks"]) if moves else None,
    )


def permits_of(run: dict[str, Any]) -> Any:
    """What attempts need a permit for. The task source is asked only where there is a limit."""
    from jaxrl.pool.permits import UNITS, Permits, permits_for

    limits = {unit: run["pool"][unit] for unit in UNITS}
    return permits_for(limits, source_of(run["task"])) if any(limits.values()) else Permits()


def build(folder: pathlib.Path) -> Any:
    """The gateway of the run in ``folder``, as an ASGI application."""
    from jaxrl.pool.answers import Limits
    from jaxrl.pool.attempts import Attempts
    from jaxrl.pool.dialogue import PlainDialogue, TemplateDialogue
    from jaxrl.pool.gateway import Gateway, living
    from jaxrl.pool.ledger import open_ledger
    from jaxrl.pool.segments import Spool
    from jaxrl.pool.services import EVALUATION_KEY, pool_key
    from jaxrl.serve import read_run

    run = read_run(folder)
    pool, sampler = run["pool"], run["sampler"]
    tokenizer = tokenizer_of(run)
    chat = pool["chat"] == "template"
    dialogue = TemplateDialogue(tokenizer) if chat else PlainDialogue(tokenizer)
    engine = engine_of(run)
    limits = Limits(
        run_id=run["run_id"],
        temperature=sampler["temperature"],
        max_new_tokens=sampler["max_new_tokens"],
        max_prompt_tokens=max(sampler["prompt_buckets"]),
        max_feedback_tokens=pool["max_feedback_tokens"],
        lease_s=pool["lease_s"],
        wait_s=pool["watchdog_s"],
        under_way=QUEUED_BATCHES * sampler["slots"] * servers_of(run),
        permits=permits_of(run),
    )
    ledger = open_ledger(run["ledger"], run["ledger_run"])
    spool, admission = Spool(run["spool"]), admission_of(run)
    attempts = Attempts(ledger, spool, engine, tokenizer, dialogue, limits, admission)
    told = {"task": run["task"], "harness": pool["harness"], "lease_s": pool["lease_s"]}
    gateway = Gateway(
        attempts,
        tokenizer,
        key=pool_key(folder),
        evaluation_key=pool_key(folder, EVALUATION_KEY),
        max_body_bytes=pool["max_body_bytes"],
        run=told,
    )
    return gateway.app(living(engine, attempts, folder, ENGINE, pool["poll_s"]))


def _listen(folder: pathlib.Path, host: str, port: int) -> Any:
    """The port that is asked for, else the one of before, else a free one."""
    from jaxrl.pool import serving

    before = folder / "gateway.json"
    if not port and before.exists():
        try:
            old = json.loads(before.read_text())["url"].rpartition(":")[2]
            return serving.listen(host, int(old))
        except (OSError, ValueError, KeyError):
            pass  # somebody else has it now: workers read the file again
    return serving.listen(host, port)


def main() -> None:
    """Serve until told to end."""
    asked = argparse.ArgumentParser(prog="jaxrl.gateway")
    asked.add_argument("--pool", required=True, help="folder of the pool, with pool.json")
    asked.add_argument("--host", default="127.0.0.1", help="where to listen")
    asked.add_argument("--port", type=int, default=0, help="0: the one of before, or a free one")
    told = asked.parse_args()
    from jaxrl.pool import launchers, serving

    launchers.die_with_parent()
    folder = pathlib.Path(told.pool).absolute()
    try:
        application = build(folder)
        at = _listen(folder, told.host, told.port)
        serving.announce(folder / "gateway.json", serving.url_of(at))
        # What was imported stays: to look through it for garbage costs more than all answers do.
        gc.collect()
        gc.freeze()
        gc.set_threshold(GARBAGE)
        serving.serve(application, at)
    except (ValueError, TypeError, ImportError, OSError, RuntimeError) as error:
        sys.exit(f"jaxrl.gateway: {type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
