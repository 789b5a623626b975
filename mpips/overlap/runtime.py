"""A plan, executed: what to send when a layer's gradients are there, what to wait for before a layer is computed.

The caller says when it comes to a layer, be it a model in training (exchange.py) or the benchmark's clocked iteration.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from .messages import Carrier, Message
from .problem import Group, JointPlan
from .timeline import COMPUTE, RECEIVE, SEND, Kind, Task

POLL_SECONDS = 5e-4
Compute = Callable[[int], Any]
"""Computes a layer, 1..L; blocking."""


class Sent(NamedTuple):
    """A push from its start until it was taken in."""

    push: Message
    taken: Message

    @property
    def started(self) -> float:
        return self.push.started

    @property
    def ended(self) -> float:
        return self.taken.ended

    @property
    def done(self) -> bool:
        return self.taken.done

    def wait(self) -> None:
        """Until both have ended. Blocking."""
        self.push.wait()
        self.taken.wait()


def wait_asleep(message: Message) -> None:
    """Wait without moving any message: that is left to the communication thread, as beside compute."""
    while not message.done:
        time.sleep(POLL_SECONDS)
    message.wait()


class Execution:
    """One plan's messages, iteration after iteration; `wait` is how to wait for one (None: its own way).

    A group is pushed as soon as its first layer's gradients are there, the last of the group's to come. Early groups
    are pulled right behind their push, the others in layer order behind the last push.
    """

    def __init__(self, carrier: Carrier, plan: JointPlan, wait: Callable[[Message], object] | None = None) -> None:
        self._wait: Callable[[Message], object] = wait or (lambda message: message.wait())
        self._carrier, self.plan, self.one_way = carrier, plan, carrier.one_way
        self._last_of = dict(plan.push)
        early = plan.push[len(plan.push) - plan.early :]
        self._comes_with = {layer: group for group in plan.pull + early for layer in range(group[0], group[1] + 1)}
        self._pushes: dict[Group, Message] = {}
        self._awaited: dict[Group, Message] = {}
        self.sent: list[tuple[Kind, int, int, Message]] = []
        """Messages of the iteration so far."""

    def begin(self) -> None:
        """A new iteration: what was pushed in the last one has come back by now."""
        for message in self._pushes.values():
            self._wait(message)
        self._pushes.clear()
        self.sent.clear()

    def ready(self, layer: int) -> None:
        """The gradients of `layer` are there, and its parameters may be overwritten."""
        last = self._last_of.get(layer)
        if last is not None:
            message = self._push(layer, last)
            if self.one_way:
                self._awaited[layer, last] = message
            else:
                self._pushes[layer, last] = message
                if layer >= self.plan.first_early_layer:
                    self._awaited[layer, last] = self._pull(layer, last, early=True)
        if layer == 1:
            for group in self.plan.pull:
                self._awaited[group] = self._pull(*group)

    def before(self, layer: int) -> None:
        """Wait for the parameters of `layer`. Blocking; raises what made its messages fail."""
        message = self._awaited.pop(self._comes_with[layer], None)
        if message is not None:
            self._wait(message)

    def finish(self) -> None:
        """Wait for everything under way. Blocking."""
        for under_way in (self._awaited, self._pushes):
            while under_way:
                self._wait(under_way.pop(next(iter(under_way))))

    def _push(self, first: int, last: int) -> Message:
        message = self._carrier.push(first, last)
        if not self.one_way:
            message = Sent(message, self._carrier.taken(first, last, message))
        self.sent.append(("push", first, last, message))
        return message

    def _pull(self, first: int, last: int, early: bool = False) -> Message:
        message = self._carrier.pull(first, last, early)
        self.sent.append(("pull", first, last, message))
        return message


def iteration(execution: Execution, layers: int, forward: Compute, backward: Compute) -> list[Task]:
    """One iteration, clocked; everything on the calling thread but the messages. Blocking.

    Where pushes bring the parameters back it is MG-WFBP's: forward, then backward with the pushes. Elsewhere it goes
    from the start of a backward pass to the end of the next forward pass, with the pushes and pulls between them.
    """
    clock = _Clock()
    execution.begin()

    def down() -> None:
        for layer in range(layers, 0, -1):
            with clock.computing("backward", layer):
                backward(layer)
            execution.ready(layer)

    def up() -> None:
        for layer in range(1, layers + 1):
            execution.before(layer)
            with clock.computing("forward", layer):
                forward(layer)

    for half in (up, down) if execution.one_way else (down, up):
        half()
    execution.finish()
    return [*clock.tasks, *sent_tasks(execution.sent, clock.begin)]


def sent_tasks(sent: Iterable[tuple[Kind, int, int, Message]], begin: float = 0.0) -> Iterator[Task]:
    """Ended messages as tasks, in seconds from `begin`.

    A message may be started while the one before it is on its way, or a pull while the servers lack its push. It is
    counted from that one's end: until then it waited.
    """
    before: dict[Kind, float] = {"push": 0.0, "pull": 0.0}
    pushed: dict[Group, float] = {}
    for kind, first, last, message in sent:
        waited = max(before[kind], pushed.get((first, last), 0.0) if kind == "pull" else 0.0)
        start = min(max(message.started, waited), message.ended)
        before[kind] = max(before[kind], message.ended)
        if kind == "push":
            pushed[first, last] = message.ended
        yield Task(kind, first, last, start - begin, message.ended - begin, SEND if kind == "push" else RECEIVE)


class _Clock:
    """Tasks of one iteration, in seconds since it began."""

    def __init__(self) -> None:
        self.begin = time.perf_counter()
        self.tasks: list[Task] = []

    @contextmanager
    def computing(self, kind: Kind, layer: int) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.add(kind, layer, layer, start, time.perf_counter(), COMPUTE)

    def add(self, kind: Kind, first: int, last: int, start: float, end: float, lane: str) -> None:
        self.tasks.append(Task(kind, first, last, start - self.begin, end - self.begin, lane))
