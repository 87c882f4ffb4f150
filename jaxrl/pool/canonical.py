"""The text of a rollout in the tokens of a model that reads other ones. No jax here.

Two models agree on a text, not on its tokens: each is asked about the tokens that its own tokenizer
makes of the text, the canonical ones. That is a fair question only where the text is all there is.
"""

import dataclasses

from jaxrl.pool.contract import Tokenizer
from jaxrl.pool.rollout import ACTION, PROMPT, Rollout, StopReason
from jaxrl.pool.tokenizer import NO_TEXT


@dataclasses.dataclass(frozen=True)
class Retold:
    """A rollout's prompt and response in another model's tokens, and the response's length."""

    prompt: list[int]
    response: list[int]  # with the end of text if the rollout has it
    length: int  # characters of the response


def retell(rollout: Rollout, own: Tokenizer, other: Tokenizer) -> Retold | None:
    """The rollout as ``other`` reads it; ``own`` is the tokenizer that it was sampled in.

    None where the two models would not speak of one text: the response is empty, is more than one
    piece of text (a tool spoke in between), has tokens without text, does not come back from
    ``other``'s tokens as it was, or was sampled in other tokens than ``own`` makes of it. Both
    sides have the end of the text (eos) if the rollout stopped by itself, else neither.
    """
    acted, ended = rollout.kind == ACTION, rollout.stop_reason is StopReason.STOP
    asked = rollout.tokens[rollout.kind == PROMPT].tolist()
    said = rollout.tokens[acted].tolist()
    if not acted[len(asked) : len(asked) + len(said)].all():
        return None
    question, text = own.question(asked), own.decode(said)
    kept = own.prompt(question) == asked and own.encode(text) == said[: len(said) - ended]
    if not text or not kept or NO_TEXT in question + text:
        return None
    prompt, response = other.prompt(question), other.encode(text)
    if not prompt or (other.question(prompt), other.decode(response)) != (question, text):
        return None
    return Retold(prompt, response + [other.eos_id] * ended, len(text))
