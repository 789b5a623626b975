"""The protocol of a service, which is anything that a server serves besides keys, such as tables.

A service has requests of its own and answers them when it likes: a push may be answered rounds later. It is told which
workers have left or wait for all others. It says which of its rounds wait, so that long waits end in the same way as
those of keys.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from mpips.store.transport.lines import Line

if TYPE_CHECKING:
    from mpips.collectives.fabric.arena import SparseFile
    from mpips.store.recovery.mirror import Mirror
    from mpips.store.server.late import InRounds, Late, Wait

# the line of the worker that has asked, and the token of its request
Asker = tuple[Line, int]
Answers = Sequence[tuple[Asker, msgspec.Struct]]
Payload = NDArray[np.uint8]


class Surroundings(NamedTuple):
    """What a service may use of its server in one generation."""

    workers: int
    # the number of this server, from 0
    server: int
    # how many servers the store has
    servers: int
    # None: rounds are synchronous; -1: a worker may be any number of pushes ahead of others
    staleness: int | None
    # memory of the server; if the store survives deaths, other ranks find it after the server's death
    file: SparseFile
    survives: bool
    mirror: Mirror | None
    late: Late
    # the store's lane in records
    lane: int


class Service(Protocol):
    """One service of one server in one generation."""

    # the types of its requests, as `isinstance` takes them
    requests: Any

    def waits(self, request: Any) -> bool:
        """True if a request has to wait until the mirror has everything that it needs."""

    def answer(self, worker: int, asker: Asker, request: Any, payload: Payload) -> Answers:
        """Take a worker's request. Return the answers that can be given by now, to any workers.

        Args:
            payload: The bytes that came in front of the request. They lie in the worker's memory.

        Raises:
            ValueError, TypeError, MemoryError: The worker is sent the message, and nothing has changed.
            CollectiveError: The generation ends.
        """

    def take_changed(self) -> bool:
        """True if something has changed since the last such call that ranks must know if this server dies."""

    def entries(self) -> Sequence[Any]:
        """Return records by which other ranks find the service's memory after this server's death."""

    def take_mirrored(self) -> Answers:
        """Return answers that have waited for the mirror. Called after each look at it."""

    def left(self, worker: int) -> Answers:
        """Note that a worker has left. Return answers that waited for it. Raise MismatchError if a round needs it."""

    def meets(self, worker: int) -> Answers:
        """Note that a worker waits in a barrier and pushes nothing. Return answers that waited for its pushes."""

    def all_met(self) -> None:
        """Reset the counts of how far workers are ahead, after all workers have passed a barrier."""

    @property
    def open(self) -> Sequence[InRounds]:
        """The parts of the service with open rounds, which workers may wait for."""

    def waits_to_hear(self) -> Sequence[Wait]:
        """Return the workers that wait for anything but a push, and the workers that they wait for."""

    @property
    def queued(self) -> int:
        """Number of pushes and pulls that wait."""

    def take_counts(self) -> Mapping[int, int]:
        """Return the number of bytes that each worker has pushed since the last such call."""

    def figures(self) -> tuple[Mapping[str, Sequence[int]], Mapping[str, object]]:
        """Return what the server's page shows of the service.

        These are numbers by name, which are added up over the stores of a process, and values that all stores share.
        """
