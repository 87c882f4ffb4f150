"""``config.json`` of published families, read into the ``model`` section.

A field that is absent means what ``transformers`` takes it for. Both of its spellings of rotary
positions are read (``rope_parameters`` of version 5, ``rope_theta`` and ``rope_scaling`` before),
and of MiMo's both the keys on the hub and those of ``transformers``. Whatever a form cannot compute
is refused by name.
"""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from etils import epath

from jaxrl.model.form import PLAIN, ModelConfig

CONFIG = "config.json"
# model_type -> (our family, the class that transformers builds)
ARCHITECTURES = {
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
    "llama": ("llama", "LlamaForCausalLM"),
    "qwen3_moe": ("qwen3_moe", "Qwen3MoeForCausalLM"),
    "gemma3_text": ("gemma3", "Gemma3ForCausalLM"),
    "mimo_v2_flash": ("mimo_v2", "MiMoV2FlashForCausalLM"),
}
# Fields of config.json with the only value that is computed; null or absent means that value too.
DEMANDS: dict[str, dict[str, Any]] = {
    "qwen3": {"hidden_act": "silu", "use_sliding_window": False},
    "llama": {"hidden_act": "silu", "mlp_bias": False},
    "qwen3_moe": {"hidden_act": "silu", "use_sliding_window": False},
    "gemma3": {
        "hidden_activation": "gelu_pytorch_tanh",
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "use_bidirectional_attention": False,
    },
    "mimo_v2": {
        "hidden_act": "silu",
        "n_group": 1,
        "topk_group": 1,
        "n_shared_experts": 0,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "add_full_attention_sink_bias": False,
        "add_swa_attention_sink_bias": True,
    },
}
EVERYWHERE: dict[str, Any] = {"attention_bias": False, "quantization_config": None}
ROPE_FIELDS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
ROPE_TYPES = {"default": 0, "linear": 1, "llama3": 4}  # how many of these numbers each takes
LOCAL, GLOBAL = "sliding_attention", "full_attention"
GEMMA_PERIOD = 6  # every sixth layer of Gemma 3 sees everything, if the file does not say otherwise
MIMO_PARTIAL = 0.334  # of a head's numbers turn, if the file does not say otherwise
DENSE = {**PLAIN, "experts": {"count": 0}}
MOST_LAYERS = 10_000  # a number beyond is no model, and would only cost memory to refuse
RUN_FIELDS = (
    "dtype",
    "param_dtype",
    "remat",
    "kernels",
    "score_chunk_positions",
    "score_remat",
    "outputs",
    "adapter",
)


class Fields:
    """``config.json`` field by field. Raises ValueError naming the field, its value and what is
    allowed."""

    def __init__(self, held: Mapping[str, Any], where: str) -> None:
        self.held = held
        self.where = where

    def refuse(self, field: str, value: Any, allowed: str) -> ValueError:
        """The error to raise."""
        return ValueError(f"{self.where}: {field}={value!r}; allowed: {allowed}")

    def value(self, *names: str) -> Any:
        """Of the first of these names that is there; None if none is."""
        return next((self.held[name] for name in names if self.held.get(name) is not None), None)

    def whole(self, *names: str, default: int | None = None, least: int = 1) -> int:
        """A whole number."""
        value = self.value(*names)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.refuse(names[0], value, f"a whole number >= {least}")
        return value

    def real(self, *names: str, default: float | None = None) -> float:
        """A finite number above 0."""
        value = self.value(*names)
        value = default if value is None else value
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1e300:
            return float(value)
        raise self.refuse(names[0], value, "a number above 0")

    def flag(self, name: str, *, default: bool) -> bool:
        """True or False."""
        value = self.value(name)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise self.refuse(name, value, "true or false")
        return value

    def only(self, name: str, allowed: Any) -> None:
        """Refuse any value but the one that is computed."""
        value = self.value(name)
        if value is not None and value != allowed:
            raise self.refuse(name, value, repr(allowed))

    def marks(
        self, names: Sequence[str], layers: int, words: Mapping[Any, int]
    ) -> list[int] | None:
        """A list with one word a layer as 0 or 1, under the first of the names that is there."""
        for name in names:
            held = self.value(name)
            if held is None:
                continue
            right = isinstance(held, list) and len(held) == layers
            if not right or any(isinstance(x, dict | list) or x not in words for x in held):
                raise self.refuse(name, held, f"{layers} of {list(words)}")
            return [words[x] for x in held]
        return None

    def rope(
        self, kind: str, theta: tuple[str, float], share: float
    ) -> tuple[float, tuple[Any, ...], float]:
        """(theta, scaling, share of a head that turns) of the layers of a kind; ``theta`` is the
        older key and its default."""
        held, scaling = self.value("rope_parameters") or {}, self.value("rope_scaling") or {}
        for name, value in (("rope_parameters", held), ("rope_scaling", scaling)):
            if not isinstance(value, dict):
                raise self.refuse(name, value, "a mapping")
        nested = GLOBAL in held or LOCAL in held
        own = (held.get(kind) or {}) if nested else held
        if not isinstance(own, dict):
            raise self.refuse(f"rope_parameters.{kind}", own, "a mapping")
        if kind == GLOBAL:  # the older key, where it is said, says it for these layers
            own = {**own, "rope_type": None, **scaling} if nested and scaling else scaling or own
        elif not nested:
            own = {}
        inner = Fields({**self.held, **own}, self.where)
        word = own.get("rope_type") or own.get("type") or "default"
        if word not in ROPE_TYPES:
            raise self.refuse("rope_scaling.rope_type", word, ", ".join(map(repr, ROPE_TYPES)))
        numbers: list[float] = [inner.real(field) for field in ROPE_FIELDS[: ROPE_TYPES[word]]]
        if len(numbers) == len(ROPE_FIELDS):
            numbers[-1] = int(numbers[-1])  # positions
        turned = inner.real("partial_rotary_factor", default=share)
        base = inner.real("rope_theta" if "rope_theta" in own else theta[0], default=theta[1])
        return base, ("none" if word == "default" else word, *numbers), turned


def read_config(held: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The fields of ``model`` that a ``config.json`` says: the form, not how a run computes it.

    Raises ValueError naming the field, its value and what is allowed.
    """
    fields = Fields(held, where)
    kind = held.get("model_type")
    if not isinstance(kind, str) or kind not in ARCHITECTURES:
        raise fields.refuse("model_type", kind, ", ".join(ARCHITECTURES))
    family, architecture = ARCHITECTURES[kind]
    named = fields.value("architectures")
    if named is not None and named != [architecture]:
        raise fields.refuse("architectures", named, repr([architecture]))
    for name, allowed in {**EVERYWHERE, **DEMANDS[family]}.items():
        fields.only(name, allowed)
    shared = _shared(fields, family)
    return {**shared, **READERS[family](fields, shared)}


def _shared(fields: Fields, family: str) -> dict[str, Any]:
    """What all families say in the same words, and plain values of the rest."""
    layers = fields.whole("num_hidden_layers")
    if layers > MOST_LAYERS:
        raise fields.refuse("num_hidden_layers", layers, f"at most {MOST_LAYERS}")
    heads, width = fields.whole("num_attention_heads"), fields.whole("hidden_size")
    head_size = 128 if family == "qwen3" else max(1, width // heads)  # where the file says nothing
    return {
        "family": family,
        "vocab_size": fields.whole("vocab_size"),
        "layers": layers,
        "width": width,
        "heads": heads,
        "kv_heads": fields.whole("num_key_value_heads", default=heads),
        "head_size": fields.whole("head_dim", default=head_size),
        "hidden": fields.whole("intermediate_size"),
        "norm_epsilon": fields.real("rms_norm_eps", "layernorm_epsilon", default=1e-6),
        "tied_head": fields.flag("tie_word_embeddings", default=family == "gemma3"),
        **DENSE,
        "qk_norm": family in ("qwen3", "qwen3_moe", "gemma3"),
    }


def _global_rope(fields: Fields) -> dict[str, Any]:
    """Rotary positions that are the same in all layers."""
    theta, scaling, share = fields.rope(GLOBAL, ("rope_theta", 10_000.0), 1.0)
    if share != 1:
        raise fields.refuse("partial_rotary_factor", share, "1.0")
    return {"rope_theta": theta, "rope_scaling": scaling}


def _dense(fields: Fields, shared: dict[str, Any]) -> dict[str, Any]:
    """Qwen3 and Llama."""
    if any(fields.marks(["layer_types"], shared["layers"], {GLOBAL: 0, LOCAL: 1}) or ()):
        raise fields.refuse("layer_types", fields.value("layer_types"), f"all {GLOBAL!r}")
    return _global_rope(fields)


def _qwen3_moe(fields: Fields, shared: dict[str, Any]) -> dict[str, Any]:
    layers, every = shared["layers"], fields.whole("decoder_sparse_step", default=1)
    plain = fields.value("mlp_only_layers") or []
    if not isinstance(plain, list) or not all(type(x) is int and 0 <= x < layers for x in plain):
        raise fields.refuse("mlp_only_layers", plain, f"layers, 0 to {layers - 1}")
    dense = tuple(i for i in range(layers) if i in plain or (i + 1) % every)
    return {
        **_global_rope(fields),
        "experts": {
            "count": fields.whole("num_local_experts", "num_experts", default=128),
            "per_token": fields.whole("num_experts_per_tok", default=8),
            "hidden": fields.whole("moe_intermediate_size", default=768),
            "shared_hidden": 0,
            "dense_layers": dense,
            "router": "softmax",
            "normalise": fields.flag("norm_topk_prob", default=False),
            "scale": 1.0,
        },
    }


def _gemma3(fields: Fields, shared: dict[str, Any]) -> dict[str, Any]:
    layers, size = shared["layers"], fields.whole("head_dim", default=256)
    period = fields.whole("sliding_window_pattern", default=GEMMA_PERIOD)
    local = fields.marks(["layer_types"], layers, {GLOBAL: 0, LOCAL: 1})
    theta, scaling, share = fields.rope(GLOBAL, ("rope_theta", 1_000_000.0), 1.0)
    near, near_scaling, near_share = fields.rope(LOCAL, ("rope_local_base_freq", 10_000.0), 1.0)
    if near_scaling != ("none",):
        raise fields.refuse(f"rope_parameters.{LOCAL}.rope_type", near_scaling[0], "'default'")
    if (share, near_share) != (1, 1):
        raise fields.refuse("partial_rotary_factor", (share, near_share), "1.0")
    scalar = fields.real("query_pre_attn_scalar", default=256)
    return {
        "head_size": size,
        "norm_offset": 1.0,
        "post_norms": True,
        "activation": "gelu_tanh",
        "embed_scale": math.sqrt(shared["width"]),
        "attention_scale": 0.0 if scalar == size else scalar**-0.5,
        "rope_theta": theta,
        "rope_scaling": scaling,
        "local_layers": shortest(local or [int((i + 1) % period > 0) for i in range(layers)]),
        "window": fields.whole("sliding_window", default=4096),
        "local_rope_theta": near,
    }


def _mimo_v2(fields: Fields, shared: dict[str, Any]) -> dict[str, Any]:
    layers, size = shared["layers"], fields.whole("head_dim", default=192)
    value = fields.whole("v_head_dim", default=128)
    for name, allowed in (
        ("swa_head_dim", size),
        ("swa_v_head_dim", value),
        ("swa_num_attention_heads", shared["heads"]),
        ("swa_num_key_value_heads", 2 * shared["kv_heads"]),
    ):
        fields.only(name, allowed)
    local = fields.marks(
        ["layer_types", "hybrid_layer_pattern"], layers, {GLOBAL: 0, LOCAL: 1, 0: 0, 1: 1}
    )
    sparse = fields.marks(
        ["mlp_layer_types", "moe_layer_freq"], layers, {"dense": 0, "sparse": 1, 0: 0, 1: 1}
    )
    # Said to be null the factor is 1; not said at all it is the published model's.
    unscaled = 1.0 if "attention_value_scale" in fields.held else 0.707
    # The hub counts the tokens before the query, transformers the query too.
    before = fields.value("sliding_window_size")
    window = fields.whole("sliding_window", default=129)
    theta, scaling, share = fields.rope(GLOBAL, ("rope_theta", 5_000_000.0), MIMO_PARTIAL)
    near, near_scaling, near_share = fields.rope(LOCAL, ("swa_rope_theta", 10_000.0), MIMO_PARTIAL)
    if scaling != ("none",) or near_scaling != ("none",):
        raise fields.refuse("rope_parameters.rope_type", (scaling[0], near_scaling[0]), "'default'")
    if share != near_share:
        raise fields.refuse("partial_rotary_factor", (share, near_share), "the same in all layers")
    return {
        "norm_epsilon": fields.real("rms_norm_eps", "layernorm_epsilon", default=1e-5),
        "head_size": size,
        "value_size": value,
        "value_scale": fields.real("attention_value_scale", default=unscaled),
        "rope_size": int(size * share),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "local_layers": shortest(local or [int(i > 0 and (i + 1) % 6 > 0) for i in range(layers)]),
        "window": window if before is None else fields.whole("sliding_window_size") + 1,
        "local_rope_theta": near,
        "local_kv_heads": 2 * shared["kv_heads"],
        "sinks": "local",
        "experts": {
            "count": fields.whole("n_routed_experts", "num_local_experts", default=256),
            "per_token": fields.whole("num_experts_per_tok", default=8),
            "hidden": fields.whole("moe_intermediate_size", default=2048),
            "shared_hidden": 0,
            "dense_layers": (0,)
            if sparse is None
            else tuple(i for i, held in enumerate(sparse) if not held),
            "router": "sigmoid",
            "normalise": fields.flag("norm_topk_prob", default=True),
            "scale": fields.real("routed_scaling_factor", default=1.0),
        },
    }


READERS = {
    "qwen3": _dense,
    "llama": _dense,
    "qwen3_moe": _qwen3_moe,
    "gemma3": _gemma3,
    "mimo_v2": _mimo_v2,
}


def shortest(pattern: Sequence[int]) -> tuple[int, ...]:
    """The shortest beginning that gives the pattern when it is repeated over its length."""
    count = len(pattern)
    size = next(
        n for n in range(1, count + 1) if all(pattern[i] == pattern[i % n] for i in range(count))
    )
    return tuple(pattern[:size])


def canonical(fields: Mapping[str, Any]) -> dict[str, Any]:
    """A form with everything said outright: no 0 that stands for another field, no pattern that is
    repeated, and nothing of what is not computed. Two of them are equal if the forms are."""
    made = {name: value for name, value in fields.items() if name not in RUN_FIELDS}
    layers, size = made["layers"], made["head_size"]
    pattern = made.pop("local_layers")
    made["local_layers"] = tuple(pattern[i % len(pattern)] for i in range(layers))
    made["value_size"] = made["value_size"] or size
    made["rope_size"] = made["rope_size"] or size
    made["attention_scale"] = made["attention_scale"] or size**-0.5
    made["local_kv_heads"] = made["local_kv_heads"] or made["kv_heads"]
    made["rope_scaling"] = tuple(made["rope_scaling"])
    if not any(made["local_layers"]):
        for name in ("window", "local_rope_theta", "local_kv_heads"):
            del made[name]
        made["sinks"] = "none" if made["sinks"] == "local" else made["sinks"]
    experts = dict(made.pop("experts"))
    if not experts["count"]:
        return {**made, "experts.count": 0}
    for name in ("count", "per_token", "hidden", "shared_hidden", "router", "normalise", "scale"):
        made[f"experts.{name}"] = experts[name]
    made["experts.dense_layers"] = tuple(sorted(experts["dense_layers"]))
    if len(made["experts.dense_layers"]) == 0:
        del made["hidden"]  # no layer has a dense block
    return made


def differing(published: Mapping[str, Any], own: Mapping[str, Any]) -> list[str]:
    """Every field of ``model`` in which two forms differ, with both values."""
    found, ours = canonical(published), canonical(own)

    def same(a: Any, b: Any) -> bool:
        if isinstance(a, float) and isinstance(b, int | float):
            return math.isclose(a, b, rel_tol=1e-6)
        return a == b

    return [
        f"model.{name}={ours.get(name)!r}, the checkpoint's is {found.get(name)!r}"
        for name in sorted({*found, *ours})
        if not same(found.get(name), ours.get(name))
    ]


def load_json(path: epath.Path) -> dict[str, Any]:
    """A mapping from a JSON file. ValueError if it is none."""
    try:
        held = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(held, dict):
        raise ValueError(f"{path} must hold a mapping, not a {type(held).__name__}")
    return held


def fields_of(config: ModelConfig) -> dict[str, Any]:
    """A model's record as the mapping that ``canonical`` reads."""
    return {**vars(config), "experts": vars(config.experts)}
