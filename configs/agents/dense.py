"""DENSE's feedback, and others, under the REFIT protocol on a planted terminal.

python -m jaxrl.agents --system dense --config configs/agents/dense.py --workdir RUN
"""

from ml_collections import ConfigDict

from configs.agents import base


def get_config(variant: str = "") -> ConfigDict:
    """Three rounds of 40 old attempts, each with three receivers for every method."""
    config = base.get_config(variant)
    tiny = variant == "tiny"
    config.rounds = 1 if tiny else 3
    config.null_draws = 20 if tiny else 100
    config.system = system = ConfigDict()
    system.tasks = 3 if tiny else 40  # a round, of each split
    system.repeats = 1 if tiny else 3  # receivers of an old attempt
    # none | raw | flat | verdict | dense | dense_no_parent_rule
    system.methods = ("none", "raw", "flat", "verdict", "dense", "dense_no_parent_rule")
    system.last = 3  # steps of the raw log

    config.world = world = ConfigDict()
    world.source = "jaxrl.agents.feedback_world"
    world.tasks = 8 if tiny else 200
    world.held_out = 8 if tiny else 200
    world.routes = (3, 4)  # to each output; one works
    world.budget = 3  # actions; 7: everything passes without feedback
    world.trap = 0.25  # dead routes that end well and write nothing
    world.misgroup = 0.5 if tiny else 0.05  # parts whose end is one step off
    world.credulous = 0.0  # readers that take a good exit for what was asked
    return config
