"""ArenaFlow's memory on a planted world of queries.

python -m jaxrl.agents --system arena_memory --config configs/agents/arena_memory.py --workdir RUN
"""

from ml_collections import ConfigDict

from configs.agents import base


def get_config(variant: str = "") -> ConfigDict:
    """25 rounds of 8 queries, 16 rollouts each."""
    config = base.get_config(variant)
    tiny = variant == "tiny"
    config.rounds = 3 if tiny else 25
    config.system = system = ConfigDict()
    system.groups = 2 if tiny else 8  # queries a round
    system.rollouts = 4 if tiny else 16  # of a query
    system.held_out = 10 if tiny else 100
    system.k = 3
    system.weight = 0.2  # of the utility in retrieval
    system.recall = 8  # skills that are near enough to be scored
    system.topology = "single_elimination"  # see jaxrl/tasks/arena.py
    system.use_library = True
    system.mint = True
    system.delta = 0.8  # cosine from which a lesson replaces the nearest skill
    system.prune = True
    system.least_seen = 2 if tiny else 5  # readings before a version may be pruned
    system.margin = 0.3 if tiny else 1.645  # standard errors; 0: the published rule
    system.least_size = 3  # of the library

    config.world = world = ConfigDict()
    world.source = "jaxrl.agents.arena_world"
    world.helpful = 2 if tiny else 4  # skills of each kind at the start
    world.neutral = 2 if tiny else 4
    world.harmful = 2 if tiny else 4
    world.effect = 0.3  # on a step's chance; 0: all skills are alike
    world.base = 0.4  # chance of a step without skills
    world.use = 0.5  # chance that a rollout uses a skill in its context
    world.sight = 0.8  # chance that the judge names a step that decided
    world.noise = 0.1
    world.faithful = 0.5  # lessons that are like a skill the champion used
    world.queries = 60 if tiny else 4000
    world.held_out = 10 if tiny else 200
    world.words = 5  # of a query, and of a skill's trigger
    return config
