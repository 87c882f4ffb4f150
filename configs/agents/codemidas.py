"""CodeMidas' funnel on twelve small packages with planted faults, or on real ones.

python -m jaxrl.agents --system codemidas --config configs/agents/codemidas.py --workdir RUN

``:packages`` takes pure Python packages from the environment (the extra ``test`` has them).
"""

from ml_collections import ConfigDict

from configs.agents import base

VARIANTS = ("", "tiny", "packages")


def get_config(variant: str = "") -> ConfigDict:
    """Numbers of the source: 2 runs without, 4 with the reference, 4 attempts."""
    if variant not in VARIANTS:
        raise ValueError(f"config variant {variant!r} is unknown; allowed: {VARIANTS}")
    tiny, real = variant == "tiny", variant == "packages"
    config = base.get_config("tiny" if tiny else "")
    config.rounds = 1 if tiny else 3 if real else 4
    config.system = system = ConfigDict()
    system.packages = 3  # a round
    system.least_tests = 4
    system.stripped_runs = 2
    system.restored_runs = 2 if tiny else 4
    system.attempts = 2 if tiny else 4
    # of each attempt; 1: a verifier that flickers is not looked for. One that errs at 10 % is found
    # by 8 gradings of two right submissions in 81 of 100, if 4 runs of the reference let it through
    system.gradings = 2 if tiny else 8
    system.held_out = 2 if tiny else 8  # submissions

    config.world = world = ConfigDict()
    world.source = "jaxrl.agents.funnel_world"
    world.packages = ("webcolors", "toolz", "inflection") if real else ()
    faults = ["clean"] * 4 + ["flaky"] * 3 + ["leak"] * 2 + ["private"] * 2 + ["impossible"]
    world.planted = ("clean", "flaky", "leak") if tiny else tuple(faults)
    world.tasks = 3 if real else 1  # of each package
    world.flake = 0.5 if tiny else 0.1  # of flaky ones; 0: none is
    world.solver = "variants"  # variants | rate | model
    world.rate = 0.5  # of right submissions, with solver "rate"
    world.overlooked = 0.0  # faults that a reviewer does not see
    return config
