"""Names and layouts of tensors in published checkpoints, against our stacked parameters.

On disk a linear of one layer is ``[out, in]``, heads side by side; ours is ``[layer in.. out..]``
with heads apart, and a layer's experts are one array where the files hold one tensor an expert.
"""

import dataclasses
import math
import re
from collections.abc import Mapping

import jax

from jaxrl.model import adapters
from jaxrl.model.form import ModelConfig, stacks

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
TOP = {"embedding": EMBEDDING, "norm/scale": "model.norm.weight", "head/kernel": HEAD}
BLOCK = {
    "attention_norm/scale": "input_layernorm.weight",
    "attention/query/kernel": "self_attn.q_proj.weight",
    "attention/key/kernel": "self_attn.k_proj.weight",
    "attention/value/kernel": "self_attn.v_proj.weight",
    "attention/output/kernel": "self_attn.o_proj.weight",
    "attention/query_norm/scale": "self_attn.q_norm.weight",
    "attention/key_norm/scale": "self_attn.k_norm.weight",
    "attention/sink": "self_attn.attention_sink_bias",
    "mlp_norm/scale": "post_attention_layernorm.weight",
    "mlp/gate/kernel": "mlp.gate_proj.weight",
    "mlp/up/kernel": "mlp.up_proj.weight",
    "mlp/down/kernel": "mlp.down_proj.weight",
    "mlp/router/kernel": "mlp.gate.weight",
    "mlp/router/bias": "mlp.gate.e_score_correction_bias",
    "mlp/gate": "mlp.experts.{expert}.gate_proj.weight",
    "mlp/up": "mlp.experts.{expert}.up_proj.weight",
    "mlp/down": "mlp.experts.{expert}.down_proj.weight",
}
# Gemma norms what a block gives too, and calls the norm before the MLP by another name.
OTHERWISE = {
    "gemma3": {
        "attention_post_norm/scale": "post_attention_layernorm.weight",
        "mlp_norm/scale": "pre_feedforward_layernorm.weight",
        "mlp_post_norm/scale": "post_feedforward_layernorm.weight",
    },
}
# Tensors that no form has a place for and that nothing is lost by passing over: tables of rotary
# frequencies, and the layers that MiMo predicts several tokens ahead with.
IGNORED = re.compile(r"rotary_emb\.inv_freq$|^model\.mtp\.")


@dataclasses.dataclass(frozen=True)
class Slot:
    """One layer of one parameter and the tensors on disk that fill it: one, or one an expert.

    A tensor on disk is ``[prod(rows) prod(columns)]``, or ``[prod(rows)]`` without columns; in the
    parameter the columns come first where it is ``turned``.
    """

    parameter: str
    layer: int | None  # of the parameter's stack; None: it has none
    names: tuple[str, ...]
    rows: tuple[int, ...]
    columns: tuple[int, ...]
    turned: bool
    experts: bool

    @property
    def on_disk(self) -> tuple[int, ...]:
        """Shape of each of the tensors."""
        rows = (math.prod(self.rows),)
        return (*rows, math.prod(self.columns)) if self.columns else rows

    @property
    def piece(self) -> tuple[int, ...]:
        """Shape of the layer as it is read: experts if there are any, rows, columns."""
        return (*((len(self.names),) if self.experts else ()), *self.rows, *self.columns)

    @property
    def order(self) -> tuple[int, ...]:
        """The axis of ``piece`` that is each axis of the parameter's layer."""
        first = int(self.experts)
        middle = first + len(self.rows)
        rows, columns = range(first, middle), range(middle, len(self.piece))
        return (*range(first), *((*columns, *rows) if self.turned else (*rows, *columns)))


def slots(config: ModelConfig, shapes: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, list[Slot]]:
    """The slots of each parameter, by layer. ``shapes`` are those of ``transformer.shapes``.

    Raises ValueError for a parameter that the family's checkpoints have no name for.
    """
    table = {**BLOCK, **OTHERWISE.get(config.family, {})}
    held = stacks(config)
    found: dict[str, list[Slot]] = {}
    for parameter, struct in shapes.items():
        if adapters.is_adapter(parameter):
            continue
        stack, _, inner = parameter.partition("/")
        if parameter in TOP:
            found[parameter] = [_slot(parameter, None, [TOP[parameter]], struct.shape)]
        elif stack in held and inner in table:
            found[parameter] = [
                _slot(parameter, place, _names(table[inner], layer, struct.shape), struct.shape[1:])
                for place, layer in enumerate(held[stack])
            ]
        else:
            raise ValueError(
                f"{parameter} has no place in a published checkpoint of model.family="
                f"{config.family!r}"
            )
    return found


def _names(pattern: str, layer: int, shape: tuple[int, ...]) -> list[str]:
    """The tensors of one layer of a parameter."""
    count = shape[1] if "{expert}" in pattern else 1
    return [f"model.layers.{layer}.{pattern.format(expert=expert)}" for expert in range(count)]


def _slot(parameter: str, layer: int | None, names: list[str], shape: tuple[int, ...]) -> Slot:
    experts = ".experts." in names[0]
    inner = shape[1:] if experts else shape
    turned = experts or parameter.endswith("/kernel")
    inputs = 2 if parameter.endswith("attention/output/kernel") else 1
    if turned:
        columns, rows = inner[:inputs], inner[inputs:]
    else:
        rows, columns = inner[:1], inner[1:]
    return Slot(parameter, layer, tuple(names), rows, columns, turned, experts)
