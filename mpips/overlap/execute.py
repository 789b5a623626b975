"""A plan, executed: what to send when a layer's gradients are there, what to wait for before a layer is computed.

The caller says when it comes to a layer, be it a model in training (exchange.py) or the benchmark's clocked iteration.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from .strategies.joint import JointPlan
from .timeline import COMPUTE, RECEIVE, SEND, Kind, Task

Compute = Callable[[int], Any]
"""Computes a layer, 1..L; blocking."""


class Handle(Protocol):
    """A message under way."""

    started: float
    ended: float
    """time.perf_counter() when its operation began and ended."""

    @property
    def done(self) -> bool: ...

    def wait(self) -> Any: ...


class Carrier(Protocol):
    """Who starts messages of layers first..last and returns at once (wire.py)."""

    @property
    def one_way(self) -> bool:
        """Whether a push brings the parameters back."""
        ...

    def push(self, first: int, last: int) -> Handle: ...

    def pull(self, first: int, last: int) -> Handle: ...


class Messages:
    """The messages of one plan, iteration after iteration.

    A group is pushed as soon as its first layer's gradients are there, the last of the group's to come. Early groups
    are pulled right behind their push, the others in layer order behind the last push.
    """

    def __init__(self, carrier: Carrier, plan: JointPlan) -> None:
        self._carrier, self.plan, self.one_way = carrier, plan, carrier.one_way
        self._last_of = dict(plan.push)
        early = plan.push[len(plan.push) - plan.early :]
        self._comes_with = {layer: group for group in plan.pull + early for layer in range(group[0], group[1] + 1)}
        self._pushes: dict[tuple[int, int], Handle] = {}
        self._awaited: dict[tuple[int, int], Handle] = {}
        self.sent: list[tuple[Kind, int, int, Handle]] = []
        """Messages of the iteration so far."""

    def begin(self) -> None:
        """A new iteration: what was pushed in the last one has come back by now."""
        for handle in self._pushes.values():
            handle.wait()
        self._pushes.clear()
        self.sent.clear()

    def ready(self, layer: int) -> None:
        """The gradients of `layer` are there, and its parameters may be overwritten."""
        last = self._last_of.get(layer)
        if last is not None:
            handle = self._start("push", layer, last)
            if self.one_way:
                self._awaited[layer, last] = handle
            else:
                self._pushes[layer, last] = handle
                if layer >= self.plan.first_early_layer:
                    self._awaited[layer, last] = self._start("pull", layer, last)
        if layer == 1:
            for group in self.plan.pull:
                self._awaited[group] = self._start("pull", *group)

    def before(self, layer: int) -> None:
        """Wait for the parameters of `layer`. Blocking; raises what made its messages fail."""
        handle = self._awaited.pop(self._comes_with[layer], None)
        if handle is not None:
            handle.wait()

    def finish(self) -> None:
        """Wait for everything under way. Blocking."""
        for under_way in (self._awaited, self._pushes):
            while under_way:
                under_way.pop(next(iter(under_way))).wait()

    def _start(self, kind: Kind, first: int, last: int) -> Handle:
        handle = self._carrier.push(first, last) if kind == "push" else self._carrier.pull(first, last)
        self.sent.append((kind, first, last, handle))
        return handle


def iteration(messages: Messages, layers: int, forward: Compute, backward: Compute) -> list[Task]:
    """One iteration, clocked; everything on the calling thread but the messages. Blocking.

    Where pushes bring the parameters back it is MG-WFBP's: forward, then backward with the pushes. Elsewhere it goes
    from the start of a backward pass to the end of the next forward pass, with the pushes and pulls between them.
    """
    clock = _Clock()
    messages.begin()

    def down() -> None:
        for layer in range(layers, 0, -1):
            with clock.computing("backward", layer):
                backward(layer)
            messages.ready(layer)

    def up() -> None:
        for layer in range(1, layers + 1):
            messages.before(layer)
            with clock.computing("forward", layer):
                forward(layer)

    for half in (up, down) if messages.one_way else (down, up):
        half()
    messages.finish()
    for kind, first, last, handle in messages.sent:
        clock.add(kind, first, last, handle.started, handle.ended, SEND if kind == "push" else RECEIVE)
    return clock.tasks


class _Clock:
    """Tasks of one iteration, in seconds since it began."""

    def __init__(self) -> None:
        self._begin = time.perf_counter()
        self.tasks: list[Task] = []

    @contextmanager
    def computing(self, kind: Kind, layer: int) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.add(kind, layer, layer, start, time.perf_counter(), COMPUTE)

    def add(self, kind: Kind, first: int, last: int, start: float, end: float, lane: str) -> None:
        self.tasks.append(Task(kind, first, last, start - self._begin, end - self._begin, lane))
