"""Harness Evolution on a planted world of three faults.

python -m jaxrl.agents --system harness_evolution --config configs/agents/harness_evolution.py --workdir RUN
"""  # noqa: E501

from ml_collections import ConfigDict

from configs.agents import base


def get_config(variant: str = "") -> ConfigDict:
    """A/A, six edits, then training and the 2x2."""
    config = base.get_config(variant)
    tiny = variant == "tiny"
    config.system = system = ConfigDict()
    system.edits = 3 if tiny else 6
    config.rounds = system.get_ref("edits") + 2
    system.repeats = 2 if tiny else 4  # of a question, in each arm
    system.gated = True

    config.world = world = ConfigDict()
    world.source = "jaxrl.agents.cross_world"
    world.dev = 16 if tiny else 72
    world.held_out = 6 if tiny else 72
    world.kinds = 12  # kinds of questions
    world.hidden = 0.3  # answers that stand on the second page
    world.strict = 0.1 if tiny else 0.5  # calls that are well formed
    world.mended = 0.95  # malformed ones that are well formed the second time
    world.loop = 0.3
    world.knows = 0.6  # answers that go by the kind, on average over kinds
    world.inertia = 20.0  # examples that the base is worth in fine-tuning
    world.broken = 0.02  # episodes that fail for reasons of their own
    world.sees = "fired"  # labels that the proposer goes by: first | fired
    world.idle = 0.4 if tiny else 0.2  # proposals of nothing
    world.cheat = 0.1  # proposals to read the verifier
    return config
