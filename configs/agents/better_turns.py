"""Better Turns: five layers of looking at policies, from teacher-forced text to closed loop.

python -m jaxrl.agents --system better_turns --config configs/agents/better_turns.py --workdir RUN

A model that jaxrl trained: see experiments/claims/agents_better_turns_model.py.
"""

from ml_collections import ConfigDict

from configs.agents import base


def get_config(variant: str = "") -> ConfigDict:
    """Three scripted policies: texts that are right at once, calls that take long."""
    config = base.get_config(variant)
    tiny = variant == "tiny"
    config.rounds = 3
    config.system = system = ConfigDict()
    system.conversations = 20 if tiny else 100  # that a choice between policies is made on
    system.held_out = 10 if tiny else 200
    system.chosen_by = "L4"

    config.world = world = ConfigDict()
    world.source = "jaxrl.agents.layers_world"
    world.steps = 3  # look-ups of a conversation; 1: no error has consequences
    # name, right texts, right calls, wrong calls that nothing tells of
    world.policies = (
        ("early", 1.0, 0.389, 0.5),
        ("late", 1.0, 0.933, 0.5),
        ("wordy", 1.0, 0.1, 0.5),
    )
    world.actor = "scripted"  # scripted | model
    world.retries = 2  # after an error
    world.flip = 0.0  # judgements that are wrong
    return config
