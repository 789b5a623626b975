"""Which operations may run now: those that no earlier conflicting one holds back, the highest priority first. Pure.

An operation names what it reads and what it mutates (MXNET-MPI, section 3.1: `Engine.push(fn, read, mutate)`). Two
operations conflict where one mutates what the other reads or mutates; conflicting operations run in program order, all
others in any order. Priority only chooses among those that may run: it never overtakes a dependency.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(eq=False)
class _Node(Generic[T]):
    item: T
    order: tuple[float, int]
    """Ascending: higher priority first, then program order."""
    reads: frozenset[Hashable]
    mutates: frozenset[Hashable]
    blockers: set[_Node[T]] = field(default_factory=set)
    dependents: list[_Node[T]] = field(default_factory=list)


@dataclass
class _Variable(Generic[T]):
    """What was added last for one variable: its writer, and the readers since."""

    writer: _Node[T] | None = None
    readers: list[_Node[T]] = field(default_factory=list)


class Tracker(Generic[T]):
    """Operations that were added and not yet removed. Not thread-safe; items are compared by identity."""

    def __init__(self) -> None:
        self.nodes: dict[int, _Node[T]] = {}
        """By the identity of their items; for whoever asks often whether there are any."""
        self._variables: dict[Hashable, _Variable[T]] = {}
        self._ready: list[_Node[T]] = []
        self._count = 0

    def __len__(self) -> int:
        return len(self.nodes)

    def add(
        self, item: T, reads: Iterable[Hashable] = (), mutates: Iterable[Hashable] = (), priority: float = 0
    ) -> None:
        """The next operation in program order. A variable both read and mutated counts as mutated."""
        written = frozenset(mutates)
        node = _Node(item, (-priority, self._count), frozenset(reads) - written, written)
        self._count += 1
        self.nodes[id(item)] = node
        for name in node.reads:
            variable = self._variables.setdefault(name, _Variable())
            self._block(node, variable.writer)
            variable.readers.append(node)
        for name in node.mutates:
            variable = self._variables.setdefault(name, _Variable())
            for earlier in (variable.writer, *variable.readers):
                self._block(node, earlier)
            variable.writer, variable.readers = node, []
        if not node.blockers:
            insort(self._ready, node, key=lambda other: other.order)

    def items(self) -> list[T]:
        """All of them, in program order."""
        return [node.item for node in self.nodes.values()]

    def clear(self) -> None:
        """Forget them all."""
        self.nodes.clear()
        self._variables.clear()
        self._ready.clear()

    def ready(self) -> list[T]:
        """Operations that nothing holds back, in the order in which they should be given attention."""
        return [node.item for node in self._ready]

    def remove(self, item: T) -> None:
        """A ready operation has ended: what waited for it may go on. KeyError if unknown, ValueError if not ready."""
        node = self.nodes[id(item)]
        if node.blockers:
            raise ValueError(f"{item!r} cannot have ended: it waits for {len(node.blockers)} operations before it")
        del self.nodes[id(item)]
        self._ready.remove(node)
        for later in node.dependents:
            later.blockers.remove(node)
            if not later.blockers:
                insort(self._ready, later, key=lambda other: other.order)
        for name in node.reads | node.mutates:
            self._forget(name, node)

    def behind(self, item: T, through: Iterable[Hashable]) -> list[T]:
        """Operations that wait for `item`, directly, because of one of the variables `through`; in program order."""
        names = frozenset(through)
        later = [node for node in self.nodes[id(item)].dependents if names & (node.reads | node.mutates)]
        return [node.item for node in sorted(later, key=lambda node: node.order[1])]

    @staticmethod
    def _block(node: _Node[T], earlier: _Node[T] | None) -> None:
        if earlier is not None and earlier is not node and earlier not in node.blockers:
            node.blockers.add(earlier)
            earlier.dependents.append(node)

    def _forget(self, name: Hashable, node: _Node[T]) -> None:
        variable = self._variables[name]
        if variable.writer is node:
            variable.writer = None
        elif node in variable.readers:
            variable.readers.remove(node)
        if variable.writer is None and not variable.readers:
            del self._variables[name]
