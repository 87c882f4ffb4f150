"""The last weights of a run as a published checkpoint.

    python -m jaxrl.export --workdir RUN --to DIR [--tokenizer DIR | --adapters]

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

_WORKDIR = flags.DEFINE_string("workdir", None, "of the run")
_TO = flags.DEFINE_string("to", None, "the directory to write; it must not exist")
_TOKENIZER = flags.DEFINE_string(
    "tokenizer",
    "",
    "a directory with tokenizer files to copy along, and with the config.json that they came with: "
    "its special tokens and positions are taken over; empty: the one of the run, if it is one",
)
_ADAPTERS = flags.DEFINE_bool("adapters", False, "write the adapters alone, without their base")
_SHARD_MB = flags.DEFINE_integer("shard_mb", 4000, "longest file of weights", lower_bound=1)


def export(workdir: str, to: str, *, tokenizer: str, shard_bytes: int) -> str:
    """Write the newest published weights of a run to ``to``; returns their name.

    Raises ValueError if the run has none, or its model cannot be exported.
    """
    from etils import epath

    from jaxrl.model import adapters, pretrained
    from jaxrl.pool import gguf_tokenizer

    held, config, params, newest = _newest(workdir)
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


def export_adapters(workdir: str, to: str) -> str:
    """Write the adapters of a run's newest published weights, without their base, to ``to``;
    returns the weights' name. Raises ValueError if the run has none."""
    from etils import epath

    from jaxrl.model import adapters, versions

    _, config, params, newest = _newest(workdir)
    at = versions.read_manifest(newest)
    adapters.write_alone(to, params, config, epoch=at["epoch"], step=at["step"])
    return epath.Path(newest).name


def _newest(workdir: str) -> tuple[dict[str, Any], Any, Any, str]:
    """A run's config, its model's form, its newest published weights, and where they are."""
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
    newest = Workdir(root).weights(*versions[-1])
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
            name = export_adapters(run, to)
        else:
            name = export(run, to, tokenizer=tokenizer, shard_bytes=shard_bytes)
    except (ValueError, TypeError, KeyError, OSError) as error:
        sys.exit(f"jaxrl.export: {type(error).__name__}: {error}")
    print(f"{name} of {_WORKDIR.value} is now {to}")


if __name__ == "__main__":
    flags.mark_flags_as_required(["workdir", "to"])
    app.run(main)
