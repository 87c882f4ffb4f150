"""What a run proposed, what it accepted and refused, and why: from its journal alone.

``write`` leaves ``report.md`` and TensorBoard curves. Beside each decision stands how often chance
would have decided so: candidates that are no better than what stands, under the same gate.
"""

from collections.abc import Sequence
from pathlib import Path

from tensorboardX import SummaryWriter

from jaxrl.agents.journal import Journal, Line, write_whole

LONGEST = 160  # characters of a reason


def _cell(text: object) -> str:
    """Untrusted text on one line, without marks that Markdown reads or signs that nobody sees."""
    words = " ".join(str(text).split())
    plain = words if len(words) <= LONGEST else words[: LONGEST - 1] + "…"
    plain = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in plain)
    return "".join(f"&#{ord(c)};" if c in "|<>&*_`[]!\\#" else c for c in plain)


def _table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    return [
        "| " + " | ".join(_cell(x).replace("&#95;", "_") for x in head) + " |",
        "|---" * len(head) + "|",
        *("| " + " | ".join(_cell(x) for x in row) + " |" for row in rows),
        "",
    ]


def _rate(line: Line) -> str:
    rate = line.asked["null"]["rate"]
    return "unmeasured" if rate is None else f"{rate:.3f}"


def _decisions(lines: Sequence[Line]) -> list[str]:
    rows = [
        (
            line.seq,
            line.asked["candidate"],
            line.asked["operator"],
            line.asked["gate"],
            "accepted" if line.asked["accepted"] else "refused",
            line.asked["reason"],
            _rate(line),
        )
        for line in lines
    ]
    head = ("line", "candidate", "operator", "gate", "verdict", "why", "by chance")
    return _table(head, rows)


def _totals(journal: Journal) -> list[str]:
    found = list(journal.of("gate"))
    rows = []
    for gate in sorted({line.asked["gate"] for line in found}):
        asked = [line.asked for line in found if line.asked["gate"] == gate]
        accepted = sum(one["accepted"] for one in asked)
        rates = [one["null"]["rate"] for one in asked]
        chance = "unmeasured" if None in rates else f"{sum(rates):.1f}"
        rows.append((gate, len(asked), accepted, len(asked) - accepted, chance))
    head = ("gate", "decisions", "accepted", "refused", "accepted if all were no better")
    return _table(head, rows)


def markdown(journal: Journal) -> str:
    """The whole report."""
    start = next(journal.of("start")).asked
    calls = list(journal.of("call"))
    roles = sorted({line.asked["role"] for line in calls})
    called = [[line for line in calls if line.asked["role"] == role] for role in roles]
    lost = list(journal.of("unanswered"))
    measures = list(journal.of("measure"))
    names = sorted({name for line in measures for name in line.asked})
    ended = any(True for _ in journal.of("end"))
    text = [
        f"# {_cell(start['config']['name'])}, seed {start['seed']}",
        "",
        f"{len(journal.lines)} lines, {'ended' if ended else 'not ended'}; last line "
        f"{journal.lines[-1].digest[:16]}.",
        "",
        "## Decisions",
        "",
        *_totals(journal),
        *_decisions(list(journal.of("gate"))),
        "## Never tried",
        "",
        *_table(("why",), [(line.asked["reason"],) for line in journal.of("refuse")]),
        "## Curves",
        "",
        *_table(
            ("round", *names),
            [
                (line.key, *(f"{line.asked[n]:.4g}" if n in line.asked else "" for n in names))
                for line in measures
            ],
        ),
        "## Calls",
        "",
        *_table(
            ("role", "calls", "tokens in", "tokens out", "cost"),
            [
                (
                    role,
                    len(lines),
                    sum(line.result["tokens_in"] for line in lines),
                    sum(line.result["tokens_out"] for line in lines),
                    f"{sum(line.result['cost'] for line in lines):.4g}",
                )
                for role, lines in zip(roles, called, strict=True)
            ]
            + [("(unanswered)", len(lost), "", "", f"{sum(x.asked['cost'] for x in lost):.4g}")]
            * bool(lost),
        ),
    ]
    return "\n".join(text)


def curves(journal: Journal, folder: Path) -> None:
    """All measures as TensorBoard scalars, in place of what an earlier process wrote there."""
    for old in folder.glob("events.out.tfevents.*"):
        old.unlink()
    with SummaryWriter(str(folder)) as writer:
        for line in journal.of("measure"):
            for name, value in line.asked.items():
                writer.add_scalar(name, value, int(line.key), walltime=line.time)


def write(journal: Journal, workdir: Path) -> Path:
    """``report.md`` and ``tb/`` under ``workdir``; the report's path."""
    path = workdir / "report.md"
    write_whole(path, markdown(journal).encode())
    curves(journal, workdir / "tb")
    return path
