"""Takes whose groups share what their rollouts begin with, in part or not at all."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxrl.batch import Batch
from jaxrl.pool.contract import Group
from jaxrl.pool.rollout import ROUTES, Failure, Rollout
from jaxrl.train.collate import Shown, collate
from jaxrl.train.packing import Packing, Shapes
from tests.train.test_views import spoken
from tests.train.toy import group

SIZE, VOCAB, LONGEST = 4, 20, 24
SHAPES = Shapes(prefix_buckets=(4, 8), bin_buckets=(4, 8, 16, 24), bins=(1, 2, 3))


def talk(
    seed: int, number: int, sample: int, *parts: tuple[str, int], prompt: Sequence[int]
) -> Any:
    """A rollout of (kind, tokens) behind a prompt, with drawn ids and log-probs."""
    draw = np.random.default_rng([seed, number, sample])
    said = [(kind, draw.integers(1, VOCAB, length).tolist(), 0) for kind, length in parts]
    made = spoken(("P", list(prompt), -1), *said, sample=sample, group_id=number)
    drawn = -draw.random(len(made.tokens)).astype(np.float32)
    return _with(
        made,
        logp=np.where(made.logp < 0, drawn * 3, 0).astype(np.float32),
        reward=float(draw.integers(0, 2)),
        correct=bool(draw.integers(0, 2)),
        temperature=np.full(len(made.tokens), 0.8, np.float32),
        facts={ROUTES: draw.integers(0, 4, (len(made.tokens), 1, 2))},
    )


def _with(rollout: Rollout, **changes: Any) -> Rollout:
    return Rollout(**{**vars(rollout), **changes})


def mixed(seed: int = 0) -> list[Group]:
    """Eight groups of at most four: even and ragged answers, prompts that differ late, early or
    altogether, a failed rollout with a prompt of its own, missing ones, an empty answer, several
    turns with an environment's answers, and one that nobody gave anything for."""

    def made(number: int, *rollouts: tuple[Sequence[int], Sequence[tuple[str, int]]]) -> list:
        return [
            talk(seed, number, sample, *parts, prompt=prompt)
            for sample, (prompt, parts) in enumerate(rollouts)
        ]

    five, six = [1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6]
    groups = {
        1: made(1, *[(five, [("A", 4)])] * 4),
        2: made(2, *[(six, [("A", length)]) for length in (1, 8, 2, 5)]),
        3: made(3, *[([9, 8, role], [("A", 3)]) for role in (4, 4, 5, 6)]),
        4: made(4, *[([first, 2], [("A", 2)]) for first in (1, 2, 3, 4)]),
        5: made(5, *[(five, [("A", 3)])] * 3),
        6: made(6, (six, [("A", 4)]), (six, []), (six, [("I", 2), ("A", 1)])),
        7: made(
            7,
            (five, [("A", 2), ("F", 3), ("A", 2)]),
            (five, [("A", 1), ("F", 2), ("I", 1), ("A", 3), ("F", 1)]),
            ([*five, 7, 7, 7, 7, 7], [("A", 2)]),
        ),
    }
    broken = talk(seed, 5, 3, ("A", 3), prompt=[9, 9])
    groups[5].append(_with(broken, failure=Failure.INFRA, reward=None))
    return [group(number, rollouts) for number, rollouts in groups.items()]


def laid_out(
    groups: Sequence[Group],
    shapes: Shapes | None,
    *,
    slots: int = 8,
    needs: Sequence[str] = (),
    shown: Shown | None = None,
    alike: Sequence[str] = (),
    minibatches: int = 1,
) -> tuple[Batch, dict[str, float]]:
    """The take on plain rows, and on packed ones if shapes are given."""
    return collate(
        groups,
        token_buckets=(LONGEST,),
        groups_per_step=slots,
        rollouts_per_group=SIZE,
        minibatches=minibatches,
        needs=needs,
        algorithm="toy",
        shown=shown,
        packing=None if shapes is None else Packing(shapes, tuple(alike)),
    )


def uniform(groups: int, prompt: int, answers: Sequence[int], seed: int = 0) -> list[Group]:
    """Groups of one shape: answers of these lengths behind a common prompt."""
    return [
        group(
            number + 1,
            [
                talk(seed, number + 1, sample, ("A", length), prompt=range(1, prompt + 1))
                for sample, length in enumerate(answers)
            ],
        )
        for number in range(groups)
    ]
