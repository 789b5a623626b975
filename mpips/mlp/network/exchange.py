"""What a network asks of the ranks that hold its other slices, and whom it tells how far a step is: the protocols."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

LayerHook = Callable[[int], object]
"""Called with the number of a layer, from 0."""


class Pending(Protocol):
    """A sum on its way."""

    def wait(self) -> None:
        """Return when the array holds the sum."""


class Exchange(Protocol):
    """What the ranks that share one model do together."""

    parts: int
    part: int

    def gather(self, full: Any) -> None:
        """Fill (neurons, samples): every rank has written its `interval` of rows and receives the others'."""

    def sum(self, array: Any) -> None:
        """Replace a forward array by its sum over the ranks."""

    def start_sum(self, array: Any) -> Pending:
        """Begin to replace a backward array by its sum over the ranks; it may not be touched before `wait`."""


class Alone:
    """The exchange of a rank that holds the whole model: nothing moves, and nothing may ask for it."""

    parts = 1
    part = 0

    def gather(self, full: Any) -> None:
        raise AssertionError("a whole model gathers nothing")

    def sum(self, array: Any) -> None:
        raise AssertionError("a whole model sums nothing")

    def start_sum(self, array: Any) -> Pending:
        raise AssertionError("a whole model sums nothing")


class Progress(Protocol):
    """Who sends while a step computes."""

    def gradient(self, layer: int) -> None:
        """The gradients of a layer are there; its parameters may still be needed."""

    def poll(self) -> None:
        """Look after what is on its way. Called several times a millisecond of the backward pass."""
