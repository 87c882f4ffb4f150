"""The grammar of a graph skill: one Markdown document that a model reads as advice.

An optional H1, then exactly three H2 sections in this order: *Global Guidance* (free text), *Node
Lists* (an H3 a node, with its instructions), *Task Graphs* (an H3 a task type, with one line ``Use
when: ...`` and one list numbered 1 .. n whose items are names of nodes). Every node is used.

A document keeps its bytes: ``Document.of(text).text == text``, and a section is taken over from
another document byte by byte.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence

SECTIONS = ("Global Guidance", "Node Lists", "Task Graphs")

_H2 = re.compile(r"^## +(.*?) *$", re.MULTILINE)
_H3 = re.compile(r"^### +(.*?) *$", re.MULTILINE)
_ITEM = re.compile(r"^(\d+)\. +(.*?) *$", re.MULTILINE)
_USE = re.compile(r"^Use when:(.*)$", re.MULTILINE)


class GrammarError(ValueError):
    """A document breaks the grammar."""


@dataclasses.dataclass(frozen=True)
class Graph:
    """When a workflow is used, and its nodes in order."""

    use_when: str
    workflow: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Document:
    """The four parts of a text, whose sum it is."""

    head: str
    guidance: str
    nodes: str
    graphs: str

    @classmethod
    def of(cls, text: str) -> "Document":
        """GrammarError naming what is wrong."""
        marks = list(_H2.finditer(text))
        names = tuple(mark[1] for mark in marks)
        if names != SECTIONS:
            raise GrammarError(f"H2 sections {names}; allowed: {SECTIONS}")
        head = text[: marks[0].start()]
        if head.strip() and not re.fullmatch(r"# +\S.*", head.strip()):
            raise GrammarError(f"{head.strip()[:80]!r} before the first section; allowed: one H1")
        ends = [mark.start() for mark in marks[1:]] + [len(text)]
        parts = [text[mark.start() : end] for mark, end in zip(marks, ends, strict=True)]
        found = cls(head, *parts)
        found._check()
        return found

    @property
    def text(self) -> str:
        """The whole document."""
        return self.head + self.guidance + self.nodes + self.graphs

    @property
    def node_names(self) -> list[str]:
        """In their order."""
        return [mark[1] for mark in _H3.finditer(self.nodes)]

    def task_graphs(self) -> Mapping[str, Graph]:
        """By task type. GrammarError for a graph without its lines."""
        found: dict[str, Graph] = {}
        for name, body in _entries(self.graphs):
            use = [one.strip() for one in _USE.findall(body)]
            if name in found or len(use) != 1 or not use[0]:
                raise GrammarError(f"task type {name!r}; allowed: once, with one «Use when: ...»")
            items = _ITEM.findall(body)
            if not items or [int(n) for n, _ in items] != list(range(1, len(items) + 1)):
                raise GrammarError(f"task type {name!r}: workflow {items}; allowed: 1 .. n")
            found[name] = Graph(use[0], tuple(item for _, item in items))
        return found

    def _check(self) -> None:
        nodes = self.node_names
        if len(set(nodes)) < len(nodes):
            raise GrammarError(f"nodes {sorted({n for n in nodes if nodes.count(n) > 1})} twice")
        if _H3.search(self.guidance):
            raise GrammarError("an H3 in Global Guidance; allowed: free text")
        used = {node for graph in self.task_graphs().values() for node in graph.workflow}
        if used - set(nodes):
            raise GrammarError(f"workflows use {sorted(used - set(nodes))}, which are no nodes")
        if set(nodes) - used:
            raise GrammarError(f"no workflow uses {sorted(set(nodes) - used)}")


def _entries(section: str) -> Sequence[tuple[str, str]]:
    """(name, text) below each H3."""
    pieces = _H3.split(section)[1:]
    return list(zip(pieces[::2], pieces[1::2], strict=True))


def scoped(parent: Document, child: Document, graph: bool) -> Document:
    """The child with what it may not change put back, byte by byte: ``graph`` may change nodes and
    graphs, else only the guidance may change. GrammarError if that does not fit together."""
    if graph:
        mixed = dataclasses.replace(child, head=parent.head, guidance=parent.guidance)
    else:
        mixed = dataclasses.replace(parent, guidance=child.guidance)
    return Document.of(mixed.text)
