"""Operations that have been started: steps that are taken beside compute, in the order in which they were started."""

from __future__ import annotations

import time
from collections.abc import Iterator

from collectives.communicator import Communicator

LOOK_SECONDS = 1e-3  # between two looks for the end of the generation of a rank that tests what it has started
MOST_BESIDE = 1.0  # seconds between two looks that count as waiting: a rank that computes for longer does not wait


class Started:
    """A started run of a plan: `what` is the call, `arrays` are those that must stay while it is under way. Those that
    are `exclusive` take turns; others run beside them."""

    def __init__(self, what: str, steps: Iterator[None], exclusive: bool, arrays: object = None) -> None:
        self.what, self.exclusive, self.done = what, exclusive, False
        self.waited = 0.0
        """Seconds through which this rank has tested it in vain."""
        self._arrays = arrays
        self._steps = steps
        self._looked = 0.0

    def step(self) -> None:
        """Move it, as far as it goes without waiting."""
        self.done = next(self._steps, self) is self

    def due(self) -> bool:
        """Whether to look for the end of the generation again."""
        now = time.monotonic()
        since = now - self._looked
        if since < LOOK_SECONDS:
            return False
        if self._looked:
            self.waited += min(since, MOST_BESIDE)
        self._looked = now
        return True


def begin(home: Communicator, operation: Started) -> None:
    """Begin an operation: it moves until there is something to wait for."""
    home.started.append(operation)
    home.hold()
    advance(home)


def advance(home: Communicator) -> None:
    """Move all that has been started, as far as it goes without waiting."""
    taken = False
    for operation in list(home.started):
        if operation.exclusive and taken:
            continue
        with home.failing(operation.what):
            operation.step()
        if operation.done:
            home.started.remove(operation)
            home.hold()
        else:
            taken = taken or operation.exclusive


def agree(home: Communicator, text: str) -> None:
    """`Communicator.agree`, behind what has been started: the words of a node serve one operation at a time."""
    if home.control is not None or not home.started:
        home.agree(text)
        return
    operation = Started(text, home.board.agreed(text), True)
    with home.failing(text):
        begin(home, operation)
        finish(home, operation)


def finish(home: Communicator, operation: Started) -> None:
    """Run until `operation`, and with it what it has to wait for, is done. Blocking."""

    def steps() -> Iterator[None]:
        while not operation.done:
            advance(home)
            yield

    home.run(steps(), operation.what)
