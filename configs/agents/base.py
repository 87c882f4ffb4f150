"""Every field of an agents' run. A system's file starts from here, and says what its system and its
world are; ``get_config("tiny")`` is for seconds.
"""

from ml_collections import ConfigDict

VARIANTS = ("", "tiny")


def get_config(variant: str = "") -> ConfigDict:
    """The base configuration. Raises ValueError for an unknown variant."""
    if variant not in VARIANTS:
        raise ValueError(f"config variant {variant!r} is unknown; allowed: {VARIANTS}")
    config = ConfigDict()
    config.seed = 0  # of everything: tasks, episodes, proposals
    config.rounds = 5
    # exchanges of labels by which each decision's rate of chance is measured; 0: unmeasured
    config.null_draws = 20 if variant == "tiny" else 500

    config.system = ConfigDict()  # fields of the system's dataclass
    # source: the module that holds the World; besides it, fields of its dataclass
    config.world = ConfigDict()

    config.port = port = ConfigDict()  # how a language model is reached
    # scripted (by the world) | replay | tiny (a model that jaxrl trained acts; scripts do the rest)
    # | served (as tiny, but behind `url`: jaxrl's gateway, say) | http (a model that reads JSON)
    port.kind = "scripted"
    port.path = ""  # replay: the folder of a run; tiny: what `generator` is called with
    port.generator = ""  # tiny: package.module:function -> (Generator, Tokenizer) of pool.contract
    port.url = ""  # served, http: an OpenAI-compatible endpoint, up to /v1
    port.model = ""
    port.api_key_variable = ""  # environment variable that holds the key; "": none is sent
    port.spending = spending = ConfigDict()  # in one currency
    spending.cap = 1.0  # of a run, over all its starts
    spending.per_million_in = 0.0  # tokens
    spending.per_million_out = 0.0
    port.max_tokens = 1024  # of a reply
    port.temperature = 0.7
    port.attempts = 5  # of a call
    port.backoff_s = 1.0  # before the second attempt; doubles
    port.timeout_s = 120.0
    return config
