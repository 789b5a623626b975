"""One iteration of a plan, really: compute on the calling thread, messages under way beside it, everything clocked.

A group is sent as soon as the gradients of its first layer are there, the last of the group's to come; a layer is
computed as soon as its group has arrived. What a message does is up to the caller, who returns a handle with `wait()`
for it, such as the store's `ipushpull` and `ipull`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from .stage import Groups
from .timeline import COMPUTE, SEND, Kind, Task

Compute = Callable[[int], Any]
"""Computes a layer, 1..L; blocking."""


class Handle(Protocol):
    """A message under way."""

    done: bool
    started: float
    ended: float
    """time.perf_counter() when its operation began and ended."""

    def wait(self) -> Any: ...


Send = Callable[[int, int], Handle]
"""Starts the message of layers first..last and returns at once."""


class Clock:
    """Tasks of one iteration, in seconds since it began."""

    def __init__(self) -> None:
        self.begin = time.perf_counter()
        self.tasks: list[Task] = []

    @contextmanager
    def computing(self, kind: Kind, layer: int) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.add(kind, layer, layer, start, time.perf_counter(), COMPUTE)

    def add(self, kind: Kind, first: int, last: int, start: float, end: float, lane: str = SEND) -> None:
        self.tasks.append(Task(kind, first, last, start - self.begin, end - self.begin, lane))

    def finish(self, kind: Kind, sent: dict[tuple[int, int], Handle]) -> list[Task]:
        """Wait for all messages and add them."""
        for (first, last), handle in sent.items():
            handle.wait()
            self.add(kind, first, last, handle.started, handle.ended)
        return self.tasks


def push_iteration(groups: Groups, forward: Compute, backward: Compute, send: Send) -> list[Task]:
    """Forward, then backward with the pushes of its gradients; returns when all have arrived. Blocking."""
    clock, layers = Clock(), groups[-1][1]
    for layer in range(1, layers + 1):
        with clock.computing("forward", layer):
            forward(layer)
    complete = dict(groups)
    sent: dict[tuple[int, int], Handle] = {}
    for layer in range(layers, 0, -1):
        with clock.computing("backward", layer):
            backward(layer)
        if layer in complete:
            sent[layer, complete[layer]] = send(layer, complete[layer])
    return clock.finish("push", sent)


def pull_iteration(groups: Groups, forward: Compute, backward: Compute, fetch: Send) -> list[Task]:
    """Pulls in layer order with the forward pass over what they bring, then the backward pass. Blocking."""
    clock, layers = Clock(), groups[-1][1]
    sent = {group: fetch(*group) for group in groups}
    for group, handle in sent.items():
        handle.wait()
        for layer in range(group[0], group[1] + 1):
            with clock.computing("forward", layer):
                forward(layer)
    for layer in range(layers, 0, -1):
        with clock.computing("backward", layer):
            backward(layer)
    return clock.finish("pull", sent)
