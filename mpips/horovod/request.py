"""A request is one rank's part in a named operation, as the others learn of it; its handle stays on this rank."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import msgspec
from torch import Tensor

from collectives.errors import CollectiveError


class HorovodInternalError(CollectiveError):
    """An operation has failed, on all ranks of its process set."""


class Request(msgspec.Struct, array_like=True):
    """One rank's part in an operation, as the others learn of it."""

    kind: str
    name: str
    dtypes: list[str]
    shapes: list[list[int]]
    op: int = 0
    prescale: float = 1.0
    postscale: float = 1.0
    root: int = 0
    splits: list[int] = []

    def __str__(self) -> str:
        return f"{self.kind} {self.name!r}"


class Handle:
    """An operation under way on this rank: the tensors it takes, and what has come of it."""

    def __init__(
        self, request: Request, tensors: Sequence[Tensor], deliver: Callable[[list[Tensor]], object],
        waiting: Callable[[], AbstractContextManager[None]],
    ) -> None:  # fmt: skip
        self.request, self.tensors, self._deliver, self._waiting = request, list(tensors), deliver, waiting
        self.received: list[int] = []
        """Rows that an alltoall has brought from each rank."""
        self._done = threading.Event()
        self._result: object = None
        self._error: BaseException | None = None

    def poll(self) -> bool:
        """Return whether it has ended."""
        return self._done.is_set()

    def end(self, results: list[Tensor] | object, error: BaseException | None = None) -> None:
        """Note what has come of it."""
        if error is None and isinstance(results, list):
            results = self._deliver(results)
        self._result, self._error = results, error
        self._done.set()

    def wait(self) -> object:
        """Wait until it has ended; return its result, or raise its error. Blocking."""
        if not self._done.is_set():
            with self._waiting():
                self._done.wait()
        if self._error is not None:
            raise HorovodInternalError(str(self._error)) from None
        return self._result
