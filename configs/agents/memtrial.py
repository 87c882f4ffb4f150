"""MemTrial on a planted market.

python -m jaxrl.agents --system memtrial --config configs/agents/memtrial.py --workdir RUN
"""

from ml_collections import ConfigDict

from configs.agents import base


def get_config(variant: str = "") -> ConfigDict:
    """120 dates with 12 memories."""
    config = base.get_config(variant)
    tiny = variant == "tiny"
    config.rounds = 12 if tiny else 120  # dates
    config.null_draws = 20 if tiny else 100
    config.system = system = ConfigDict()
    system.k = 4  # memories of a date
    system.learner = "auto"  # identity | content | auto
    system.warm_up = 3 if tiny else 12  # dates on which the reference acts
    system.min_dates = 3 if tiny else 10  # scored ones before the gate may open
    system.level = 0.05  # of each look at it
    system.scale = 4.0  # of the pull towards the reference
    system.reference = 0.9  # its share to begin with
    system.every = 6 if tiny else 60  # dates between two measurements on held-out dates

    config.world = world = ConfigDict()
    world.source = "jaxrl.agents.memory_world"
    world.dates = 12 if tiny else 120
    world.held_out = 4 if tiny else 40
    world.memories = 4 if tiny else 12  # a quarter useful, a quarter misleading
    world.beta = 0.5 if tiny else 0.25  # tilt of a draft by a memory; 0: memories do nothing
    world.informed = 1.0 if tiny else 0.7  # dates on which a useful or misleading one is so
    world.lasting = 0  # dates after which it is drawn anew which are useful; 0: never
    world.telling = 0.8  # texts that have the word of their kind
    world.tremble = 0.02  # of the hand that drafts
    world.broken = 0.05 if tiny else 0.0  # drafts that fail
    world.aversion = 3.0
    world.cost = 0.0015  # of turnover
    return config
