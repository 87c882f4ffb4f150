"""Small forms of each kind of decoder that the config can say, for tests."""

from typing import Any

from jaxrl.model.form import ExpertsConfig


def experts(**changes: Any) -> ExpertsConfig:
    fields: dict[str, Any] = dict(
        count=4,
        per_token=2,
        hidden=12,
        shared_hidden=0,
        dense_layers=(),
        router="softmax",
        normalise=True,
        scale=1.0,
    )
    return ExpertsConfig(**{**fields, **changes})


MOE: dict[str, Any] = {"experts": experts()}
LOCAL: dict[str, Any] = {"local_layers": (1, 1, 0), "window": 3, "layers": 4}
GEMMA: dict[str, Any] = LOCAL | {
    "post_norms": True,
    "norm_offset": 1.0,
    "activation": "gelu_tanh",
    "embed_scale": 4.0,
    "attention_scale": 0.3,
    "rope_scaling": ("linear", 8.0),
}
MIMO: dict[str, Any] = {
    "layers": 4,
    "qk_norm": False,
    "local_layers": (0, 1, 1, 0),
    "window": 3,
    "local_kv_heads": 4,
    "sinks": "local",
    "value_size": 6,
    "value_scale": 0.7,
    "rope_size": 4,
    "experts": experts(router="sigmoid", dense_layers=(0,), scale=1.5),
}
FORMS = {"moe": MOE, "local": LOCAL, "gemma": GEMMA, "mimo": MIMO}
