"""What the samples of a group are asked: ids of each prompt, and which prompts are refused."""

from collections.abc import Sequence

from jaxrl.pool.contract import PoolError, Question, Questions, Tokenizer


def prompt_ids(
    source: Questions, tokenizer: Tokenizer, task: Question, samples: int
) -> list[list[int]]:
    """The ids of each sample's prompt; each text is encoded once. PoolError if the source cannot
    tell them."""
    texts: Sequence[str] = [task.prompt] * samples
    if source.grouped:
        try:
            texts = source.prompts(task, samples)
        except Exception as error:
            raise PoolError(
                f"the prompts of task {task.key!r} failed: {type(error).__name__}: {error}"
            ) from error
    if len(texts) != samples:
        raise PoolError(
            f"task {task.key!r} has {len(texts)} prompts for {samples} samples; one each"
        )
    ids = {text: tokenizer.prompt(text) for text in dict.fromkeys(texts)}
    return [ids[text] for text in texts]


def refusal(prompts: Sequence[Sequence[int]], longest: int) -> str | None:
    """The count of what is wrong with a group's prompts: one without a token, or one over the
    limit, which is never cut. None if nothing is."""
    lengths = [len(prompt) for prompt in prompts]
    if not min(lengths):
        return "rejected_empty"
    return "rejected_long" if max(lengths) > longest else None
