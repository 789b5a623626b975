"""A service: what a server serves beside keys. The rest of the server knows no more of it than this.

A service has requests of its own, and answers them when it likes: a push may be answered rounds later. It is told which
workers have left or wait for all others, and says which of its rounds wait, so that long waits end as those of keys do.
Tables (`mpips.tables`) are the only service so far.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from mpips.store.transport.frames import Answer
from mpips.store.transport.lines import Line

if TYPE_CHECKING:
    from mpips.collectives.fabric.arena import SparseFile
    from mpips.store.recovery.mirror import Mirror
    from mpips.store.server.late import InRounds, Late, Wait

Asker = tuple[Line, int]
"""Who has asked: the line of a worker, and the token of its request."""
Answers = Sequence[tuple[Asker, Answer]]
Payload = NDArray[np.uint8]


class Surroundings(NamedTuple):
    """What a service may use of its server in one generation."""

    workers: int
    server: int
    """Which of the servers it is, from 0, of this many."""
    servers: int
    staleness: int | None
    """None: rounds are synchronous; -1: a worker may be ahead of others by any number of pushes."""
    file: SparseFile
    """Memory of the server. Where the store survives deaths, others find it there."""
    survives: bool
    mirror: Mirror | None
    late: Late
    lane: int
    """The store's, of records."""


class Service(Protocol):
    """One service of one server in one generation."""

    requests: Any
    """The types of its requests, as `isinstance` takes them."""

    def waits(self, request: Any) -> bool:
        """Return whether a request is to be heard only when the mirror has what it needs."""

    def answer(self, worker: int, asker: Asker, request: Any, payload: Payload) -> Answers:
        """Take a worker's request; return what can be answered by now, to whomever it is.

        `payload`: what came in front of the request; it lies where the worker has it. ValueError, TypeError or
        MemoryError: the worker hears the sentence, and nothing has changed. CollectiveError ends the generation."""

    def take_changed(self) -> bool:
        """Return whether those who outlive this server must be told of something new, since the last such call."""

    def entries(self) -> Sequence[Any]:
        """Return where others find what it has when this server has died."""

    def take_mirrored(self) -> Answers:
        """Return the answers that have waited for the mirror; to be called after each look at it."""

    def left(self, worker: int) -> Answers:
        """A worker has left: return what can be answered without it. MismatchError where a round waits for it."""

    def meets(self, worker: int) -> Answers:
        """A worker waits for all others: return what can be answered as it pushes nothing."""

    def all_met(self) -> None:
        """Count anew how far workers are ahead, as all have waited for all."""

    @property
    def open(self) -> Sequence[InRounds]:
        """Return what has rounds that somebody may wait for."""

    def waits_to_hear(self) -> Sequence[Wait]:
        """Return who waits for anything but a push, and for whom."""

    @property
    def queued(self) -> int:
        """Return how many pushes and pulls wait."""

    def take_counts(self) -> Mapping[int, int]:
        """Return how many bytes each worker has pushed since the last such call."""

    def figures(self) -> tuple[Mapping[str, Sequence[int]], Mapping[str, object]]:
        """Return what the server's page shows of it: numbers by name, which add up over a process' stores, and words
        that all stores share."""
