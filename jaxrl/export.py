"""The last weights of a run, or its best, as a published checkpoint.

    python -m jaxrl.export --workdir RUN --to DIR [--best] [--tokenizer DIR | --adapters]

DIR is then what ``transformers`` and inference engines load: config.json, safetensors, and the
tokenizer's files. Adapters are merged into the kernels that they are beside. With ``--adapters``
they alone are written, for ``train.adapters`` and ``scorers.teacher.weights`` of other runs over
the same base.
"""

import json
import pathlib
import sys
import tempfile
from typing import Any

from absl import app, flags

# A process of its own asks for one door only; the tests import several.
_WORKDIR = flags.DEFINE_string("workdir", None, "of the run", allow_override=True)
_TO = flags.DEFINE_string(
    "to", None, "the directory to write; it must not exist", allow_override=True
)
_TOKENIZER = flags.DEFINE_string(
    "tokenizer",
    "",
    "a directory with tokenizer files to copy along, and with the config.json that they came with: "
    "its special tokens and positions are taken over; empty: the one of the run, if it is one",
)
_ADAPTERS = flags.DEFINE_bool("adapters", False, "write the adapters alone, without their base")
_BEST = flags.DEFINE_bool("best", False, "those with the best held-out avg@k, not the newest")
_SHARD_MB = flags.DEFINE_integer("shard_mb", 4000, "longest file of weights", lower_bound=1)


def export(workdir: str, to: str, *, tokenizer: str, shard_bytes: int, best: bool = False) -> str:
    """Write the newest or best published weights of a run to ``to``; returns their name.

    Raises ValueError if the run has none, or its model cannot be exported.
    """
    from etils import epath

    from jaxrl.model import adapters, pretrained
    from jaxrl.pool import gguf_tokenizer

    held, config, params, newest = _published(workdir, best)
    own = held["pool"]["tokenizer"]
    with tempfile.TemporaryDirectory() as unpacked:
        if not tokenizer and "/" in own:
            found = pretrained.locate(own)
            if found.suffix == ".gguf":
                gguf_tokenizer.unpack(found, pathlib.Path(unpacked))
                found = epath.Path(unpacked)
            tokenizer = str(found if found.is_dir() else found.parent)
        pretrained.export_checkpoint(
            adapters.merged(params, config),
            adapters.without(config),
            to,
            positions=max(held["train"]["token_buckets"]),
            shard_bytes=shard_bytes,
            tokenizer=tokenizer or None,
        )
    return epath.Path(newest).name


def export_adapters(workdir: str, to: str, *, best: bool = False) -> str:
    """Write the adapters of a run's newest or best published weights to ``to``, without their
    base; returns the weights' name. Raises ValueError if the run has none."""
    from etils import epath

    from jaxrl.model import adapters, versions

    _, config, params, newest = _published(workdir, best)
    at = versions.read_manifest(newest)
    adapters.write_alone(to, params, config, epoch=at["epoch"], step=at["step"])
    return epath.Path(newest).name


def _published(workdir: str, best: bool) -> tuple[dict[str, Any], Any, Any, str]:
    """A run's config, its model's form, its newest or best published weights, and where they
    are."""
    from etils import epath

    from jaxrl.model import form, transformer
    from jaxrl.model.versions import read_weights
    from jaxrl.train.workdir import Workdir

    root = epath.Path(workdir)
    if not (root / "config.json").exists():
        raise ValueError(f"{root} is no run: config.json is missing")
    held = json.loads((root / "config.json").read_text())
    if not (versions := Workdir(root).published()):
        raise ValueError(f"{root / 'weights'} holds no published version")
    chosen, told = versions[-1], Workdir(root).best()
    if best:
        if told is None:
            raise ValueError(f"{root / 'best.json'} is missing; allowed: without --best")
        chosen = (told["epoch"], told["step"])
    newest = Workdir(root).weights(*chosen)
    config = form.read(held["model"])
    params, _ = read_weights(newest, shapes=transformer.shapes(config))
    return held, config, params, str(newest)


def main(argv: list[str]) -> None:
    """Export. What was refused ends with one message and exit code 1."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    to = str(_TO.value)
    try:
        shard_bytes = _SHARD_MB.value * 1_000_000
        run, tokenizer = str(_WORKDIR.value), _TOKENIZER.value
        if _ADAPTERS.value:
            name = export_adapters(run, to, best=_BEST.value)
        else:
            name = export(run, to, tokenizer=tokenizer, shard_bytes=shard_bytes, best=_BEST.value)
    except (ValueError, TypeError, KeyError, OSError) as error:
        sys.exit(f"jaxrl.export: {type(error).__name__}: {error}")
    print(f"{name} of {_WORKDIR.value} is now {to}")


if __name__ == "__main__":
    flags.mark_flags_as_required(["workdir", "to"])
    app.run(main)
