"""Designer-RSI on a planted world of requests.

python -m jaxrl.agents --system designer_rsi --config configs/agents/designer_rsi.py --workdir RUN
"""

from ml_collections import ConfigDict

from configs.agents import base


def get_config(variant: str = "") -> ConfigDict:
    """Five rounds of 300 requests."""
    config = base.get_config(variant)
    tiny = variant == "tiny"
    config.rounds = 2 if tiny else 5
    config.system = system = ConfigDict()
    system.requests = 40 if tiny else 300  # a round
    system.held_out = 40 if tiny else 300
    system.tau = 0.6  # a score below it is a failure
    system.k = 3  # skills in context
    system.least_similarity = 0.6
    system.k_min = 3  # occurrences that mint
    system.m = 2  # failures that deepen
    system.rewrite_after = 2  # rejections
    system.failures = 2 if tiny else 4  # requests of a gate that failed
    system.successes = 1 if tiny else 4  # and that went well
    system.contexts = 1 if tiny else 3  # of a request
    system.min_won = 1  # the published rule; its null acceptance stands in the report
    system.most = 2 if tiny else 24  # skills that are deepened a round
    system.widen = True
    system.deepen = True
    system.gated = True

    config.world = world = ConfigDict()
    world.source = "jaxrl.agents.skills_world"
    world.subtasks = 6 if tiny else 24
    world.requests = 200 if tiny else 4000
    world.held_out = 40 if tiny else 1000
    world.alone = 0.74  # chance of a step without a skill
    world.follow = 0.98  # chance that a skill's step is followed
    world.trouble = 0.04  # most that a moment takes from every step
    world.faulty = 0.35  # documented skills with a wrong step
    world.corruption = 0.35  # candidates with a spoilt step; 0: a gate buys nothing
    world.careless = 0.3  # edits that overlook the context
    world.relabel = 0.0
    world.flip = 0.05  # judgements that are wrong
    world.tie = 0.1  # and that are none
    return config
