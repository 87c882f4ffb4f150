"""GraphSkillEvo on a planted world of workflows; ``:climber`` is one strict-improvement climber.

python -m jaxrl.agents --system skill_graph --config configs/agents/skill_graph.py --workdir RUN
"""

from ml_collections import ConfigDict

from configs.agents import base


def get_config(variant: str = "") -> ConfigDict:
    """Five generations of four."""
    climber, tiny = variant == "climber", variant == "tiny"
    config = base.get_config("" if climber else variant)
    validation = 12 if tiny else 40
    config.rounds = 3 if tiny else 5
    if climber:  # as many rollouts: the first document's, then a child's and the tasks' each round
        config.rounds = (24 * validation + 300 - validation) // (validation + 15)
    config.system = system = ConfigDict()
    system.population = 1 if climber else 4
    system.tasks = 4 if tiny else 15  # of a generation
    system.operators = ("mutate_other", "mutate_graph", "cross_other", "cross_graph")
    system.climber = climber
    system.edits = 1  # of a child; falls to least_edits by a cosine
    system.least_edits = 1
    system.rounds = config.get_ref("rounds")

    config.world = world = ConfigDict()
    world.source = "jaxrl.agents.graph_world"
    world.types = 3 if tiny else 6
    world.steps = 4
    world.nodes = 8 if tiny else 12
    world.flags = 4
    world.train = 60 if tiny else 400
    world.validation = validation
    world.held_out = 20 if tiny else 400
    world.wrong = 0.3  # share of the first document's things
    world.fix = 0.8  # edits that repair what failed; 0: nobody can get better
    world.spoil = 0.2  # and that spoil another thing
    world.invalid = 0.05
    return config
