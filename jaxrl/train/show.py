"""What people look at: rollouts with the advantage of each token, and experts' loads as a picture.

TensorBoard shows Markdown without colours of its own, so runs of tokens of one advantage carry a
square there; the page in ``samples/<step>.html`` has every token on its colour.
"""

import html
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np

from jaxrl.pool.contract import Group

Tokens = list[tuple[str, float]]  # text and advantage

_CELL = 12  # pixels of an expert's side
_PAGE = """<!doctype html><meta charset="utf-8"><title>{title}</title>
<style>body{{font:14px sans-serif}}pre{{white-space:pre-wrap}}</style>
<h1>{title}</h1>
<p>Green raises a token's log-prob, red lowers it; the strongest is {top:.3g}.</p>
"""


def acted(
    groups: Sequence[Group],
    shown: Mapping[str, np.ndarray],
    decode: Callable[[Sequence[int]], str],
    limit: int,
) -> list[Tokens | None]:
    """The sampled tokens of the first rollouts with their advantages; None of one that is not
    among the ``shown`` rows, such as one that was refused."""
    rows = list(range(len(shown["tokens"])))
    found: list[Tokens | None] = []
    for rollout in [rollout for group in groups for rollout in group.rollouts][:limit]:
        ids = rollout.tokens.astype(np.int64)
        fits = (row for row in rows if np.array_equal(shown["tokens"][row][: len(ids)], ids))
        row = next(fits, None)
        if row is None:
            found.append(None)
            continue
        rows.remove(row)  # the same answer twice is two rows
        places = np.flatnonzero(shown["acted"][row])
        advantage = shown["advantage"][row]
        found.append(
            [(decode([int(shown["tokens"][row][i])]), float(advantage[i])) for i in places]
        )
    return found


def marked(tokens: Tokens) -> list[tuple[str, str]]:
    """(mark, text) of each run of tokens of one advantage: a square and the number."""
    runs = []
    for advantage, members in groupby(tokens, key=lambda token: round(token[1], 3)):
        square = "🟩" if advantage > 0 else "🟥" if advantage < 0 else "⬜"
        runs.append((f"{square}{advantage:+.3g} ", "".join(text for text, _ in members)))
    return runs


def page(title: str, rows: Sequence[Mapping[str, Any]], tokens: Sequence[Tokens | None]) -> str:
    """An HTML page of samples (``prompt``, ``response``, ``reward``), each token coloured."""
    top = max([abs(a) for each in tokens if each for _, a in each], default=0.0)
    parts = [_PAGE.format(title=html.escape(title), top=top)]
    for row, each in zip(rows, tokens, strict=True):
        reward = "none" if row["reward"] is None else f"{row['reward']:.3g}"
        parts.append(f"<h2>reward {reward}</h2><pre>{html.escape(row['prompt'])}</pre><pre>")
        if each is None:
            parts.append(html.escape(row["response"]))
        for text, advantage in each or ():
            colour = "0,160,0" if advantage > 0 else "220,0,0"
            strength = abs(advantage) / top if top else 0.0
            parts.append(
                f'<span title="{advantage:+.4g}" style="background:rgba({colour},{strength:.2f})">'
                f"{html.escape(text)}</span>"
            )
        parts.append("</pre>\n")
    return "".join(parts)


def loads_picture(count: np.ndarray) -> np.ndarray:
    """uint8 [height, width, 3]: a row of squares for each layer, a square for each expert; the
    darkest has the most routes of its layer, and an even load is in the middle of the scale."""
    import matplotlib  # slow to load, and dense models have no such picture

    share = count / np.maximum(count.sum(-1, keepdims=True), 1)
    scale = np.clip(share * count.shape[-1] / 2, 0, 1)
    colours = matplotlib.colormaps["viridis_r"](scale)[..., :3]
    large = colours.repeat(_CELL, axis=0).repeat(_CELL, axis=1)
    return (255 * large).astype(np.uint8)
