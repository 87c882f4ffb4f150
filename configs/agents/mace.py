"""MACE on a planted world of two stages.

python -m jaxrl.agents --system mace --config configs/agents/mace.py --workdir RUN
"""

from ml_collections import ConfigDict

from configs.agents import base


def get_config(variant: str = "") -> ConfigDict:
    """A calibration of 48 tasks a pair, then four rounds of 48 tasks."""
    config = base.get_config(variant)
    tiny = variant == "tiny"
    config.rounds = 3 if tiny else 5
    config.system = system = ConfigDict()
    system.coupler = "joint"  # joint | fixed | separate
    system.returns = "common"  # common (of the trace, as published) | stage (each stage's own)
    system.forms = ("guide", "checklist", "constraint")
    system.units = 2  # of a patch
    system.tokens = 120  # of a patch
    system.combinations = 2  # candidates of an operation
    system.weights = weights = ConfigDict()
    weights.relevance = 1.0
    weights.support = 1.0
    weights.conflict = 1.0
    weights.risk = 1.0
    weights.utility = 0.1
    system.conflicting = 0.3  # weight from which a conflict keeps units apart
    system.eta = 0.05  # of utilities and links
    system.kappa = 0.1  # of the bonus for rarely tried pairs
    system.calibration = 6 if tiny else 48  # tasks of round 0, each under every pair; 0: none
    system.tasks = 6 if tiny else 48  # of a later round
    system.extracted = 1 if tiny else 2  # episodes of a round that become units
    system.trial = 8 if tiny else 400  # tasks of the last trial; 0: none
    # gain that the trial must pass: 1.645 times the spread of an A/A comparison, .4 / sqrt(trial)
    system.noise = 0.033
    system.rounds = config.get_ref("rounds")
    system.held_out = 10 if tiny else 200

    config.world = world = ConfigDict()
    world.source = "jaxrl.agents.mace_world"
    world.interaction = 1.0  # of combination and form; 0: the best of each is the best pair
    world.difficulty = 0.05  # standard deviation over tasks
    world.trouble = 0.02  # and over moments
    world.cite = 0.9  # chance that a shown unit is used
    world.mistaken = 0.0  # relations that are judged wrong
    world.train = 60 if tiny else 2000
    world.held_out = 10 if tiny else 400
    return config
