"""MiMo-V2.6's graders on look-up tasks with a hole, under three harnesses.

python -m jaxrl.agents --system mimo_graders --config configs/agents/mimo_graders.py --workdir RUN
"""

from ml_collections import ConfigDict

from configs.agents import base


def get_config(variant: str = "") -> ConfigDict:
    """Sixty rounds of five groups of 16."""
    config = base.get_config(variant)
    tiny = variant == "tiny"
    config.rounds = 3 if tiny else 60
    config.system = system = ConfigDict()
    system.groups = 2 if tiny else 5  # a round
    system.size = 4 if tiny else 16  # rollouts of a group
    system.rate = 4.0
    system.shared = 0.5  # share of a step that all harnesses have in common
    system.graded = True  # off: the verdict alone
    system.cap = 1.5  # on the factor that makes up for grades below 1
    system.rejudge = "suspected"  # none: suspicion is enough | suspected | all: every pass
    system.orders = 2  # in which a group is graded
    system.most_order_gap = 0.15
    system.most_length_premium = 0.1
    system.rubrics = True
    system.pairs = 3 if tiny else 4  # documented pairs that a rubric is tried on
    system.min_won = 3
    system.training = ("json", "react")
    system.unseen = ("code",)  # measured only
    system.every = 1 if tiny else 10  # rounds between measurements
    system.held_out = 4 if tiny else 40  # tasks of one

    config.world = world = ConfigDict()
    world.source = "jaxrl.agents.graders_world"
    world.tasks = 40 if tiny else 400
    world.held_out = 8 if tiny else 100
    world.skill = 0.8  # of clean and ugly passes; exploits always pass
    world.open_file = True  # off: there is nothing to exploit
    world.tool_faults = 0.02  # episodes that the environment breaks
    world.actor = "scripted"  # scripted | model
    world.noise = 0.05  # of a grade
    world.missed = 0.1  # exploits that are not suspected
    world.false_flags = 0.05  # honest passes that are
    world.false_clean = 0.0  # clean ones that are
    world.order_bias = 0.0  # added to the last grade of a group, and less before
    world.length_bias = 0.0  # added for every 1000 characters
    world.bad_rubrics = 0.5  # that prefer what is long
    return config
