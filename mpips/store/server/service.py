"""The protocol of a service, that is, something that servers keep besides keys. Tables are the only service.

A service consists of *collections*. A collection has a name and is pushed to in rounds, as a key is. A service may also
have internal collections, which users do not see. The store uses services only through the classes in this module;
`mpips.store.services` lists the services.

In each generation (the time between two failures) a server has one `Service` of each `ServiceKind`. A service has its
own types of requests and may answer late: several rounds may pass before it answers a push. The server tells its
services which workers have left, and which wait for all other workers. A service reports which of its rounds are
waiting, so that a long wait for a service ends in the same way as one for a key.

In a recovery each kind of service describes what a rank holds (`describe`), computes from the descriptions of all ranks
which rounds can be restored (`find`), plans them (`FoundService.plan`), and moves the bytes (`move`). Only the service
itself can read its descriptions.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgspec
import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from mpips.store.keys.key import Name
from mpips.store.recovery.membership import Before
from mpips.store.transport.lines import Line

if TYPE_CHECKING:
    from mpips.collectives.fabric.arena import SparseFile
    from mpips.store.remote.link import ServerLink
    from mpips.store.remote.setup import Setup
    from mpips.store.roles import Layout
    from mpips.store.server.late import InRounds, Late, Wait

# (the line to the worker that has sent a request, the token of the request); a line is a connection to one worker
Asker = tuple[Line, int]
Answers = Sequence[tuple[Asker, msgspec.Struct]]
Payload = NDArray[np.uint8]


class Surroundings(NamedTuple):
    """What a server gives to a service in one generation."""

    workers: int
    # the number of this server, from 0
    server: int
    # number of servers of the store
    servers: int
    # number of pushes by which a worker may be ahead of other workers; -1: no limit; None: rounds are synchronous
    staleness: int | None
    # memory for the service; if the store survives deaths, other ranks can read this memory after the server's death
    file: SparseFile
    survives: bool
    # the service's connection to the mirror of this server, as `ServiceCopies.connect` has made it
    mirror: Any
    late: Late
    # the number of the store in timing records
    lane: int
    # True to end the generation if an update makes NaN or infinity (the option `check_finite`)
    checks_finite: bool


class Service(Protocol):
    """One service of one server in one generation."""

    # the name of its `ServiceKind`
    name: str
    # the types of its requests, in the form of the second argument of `isinstance`
    requests: Any

    def waits(self, request: Any) -> bool:
        """True if a request must wait until the server's mirror has all data that the request concerns."""

    def answer(self, worker: int, asker: Asker, request: Any, payload: Payload) -> Answers:
        """Handle a worker's request. Return all answers that can be given now, to this worker or others.

        Args:
            payload: The bytes that precede the request in its message. They are in the worker's memory.

        Raises:
            ValueError, TypeError, MemoryError: The request is refused, and nothing has changed. The server sends the
                text of the exception to the worker.
            CollectiveError: A failure that ends the generation.
        """

    def take_changed(self) -> bool:
        """True if, since the last call, something has changed that other ranks need after this server's death."""

    def ledger_entry(self) -> bytes:
        """Return the data with which other ranks can find the service's memory after this server's death.

        Return b"" while the service is empty.
        """

    def take_mirrored(self) -> Answers:
        """Return the answers that no longer have to wait for the mirror. Called after each check of the mirror."""

    def left(self, worker: int) -> Answers:
        """Note that a worker has left. Return answers that waited for this worker.

        Raise MismatchError if a round needs a push of this worker.
        """

    def meets(self, worker: int) -> Answers:
        """Note that a worker waits in a barrier and pushes nothing. Return answers that waited for its pushes."""

    def all_met(self) -> None:
        """Count from 0 again how far each worker is ahead, because all workers have passed a barrier."""

    @property
    def open(self) -> Sequence[InRounds]:
        """The parts of the service that have an open round. Workers may be waiting for these rounds."""

    def waits_to_hear(self) -> Sequence[Wait]:
        """Return which workers wait for something other than a push, and for which workers they wait."""

    @property
    def queued(self) -> int:
        """Number of pushes and pulls that wait."""

    def take_counts(self) -> Mapping[int, int]:
        """Return the number of bytes that each worker has pushed since the last call."""

    def figures(self) -> tuple[Mapping[str, Sequence[int]], Mapping[str, object]]:
        """Return the service's figures for the server's page, the file that other processes read.

        The first mapping has numbers by name, which are summed over all stores of the process. The values of the second
        mapping are the same in all stores of the process.
        """

    # ---- the beginning of a generation

    def restore(self, plan: Any, old: OldMemory, rank: int) -> None:
        """Take over the content that stays on this server, and make room for the content that will be moved to it.

        Args:
            rank: The server's rank in the new generation.
        """

    def begin(self, plan: Any) -> None:
        """Begin the generation at the rounds of the plan. Called after everything has been moved."""


# ---- mirrors


class ServiceMirror(Protocol):
    """The connection of one service to its copy on the server's mirror, in one generation."""

    @property
    def quiet(self) -> bool:
        """True if the mirror has received everything."""

    def turn(self) -> bool:
        """Receive what has arrived, and send as much as there is room for. Return True if anything was done."""

    def stop(self) -> None:
        """Close the connection, because the generation has ended.

        What has not been sent yet is dropped. The server drops the requests that waited for the mirror as well.
        """


class ServiceCopies(Protocol):
    """The copies of other servers' services that a server keeps as their mirror. The copies outlive a generation."""

    def connect(self, comm: MPI.Intracomm, mirror: int | None, generation: int) -> ServiceMirror:
        """Connect this server's service to its mirror, and these copies to the servers that they copy.

        Args:
            comm: All servers.
            mirror: The rank of the mirror in `comm`, or None if this server has no mirror.
        """

    def begin(self, rounds: Mapping[Name, int] | None) -> None:
        """Begin a generation at these rounds, and drop copies of other rounds.

        If `rounds` is None, keep all newest rounds.
        """

    def drop_before(self, generation: int) -> None:
        """Drop the copies of earlier generations, because all servers have sent everything again in this one."""


# ---- recovery


class OldMemory(NamedTuple):
    """What one rank can read of a service's content at the end of the last generation."""

    # the ranks of the last generation
    before: Before
    # this process's rank in the last generation; -1 if it was neither a worker nor a server
    rank: int
    # rank of a server whose memory this process has mapped -> its sparse file, and its service's `ledger_entry`
    read: Callable[[int], tuple[SparseFile, bytes]]
    # the dead servers whose memory this rank describes to all other ranks
    described: Collection[int]
    # the service, if this rank was a server
    service: Any = None
    # the copies that this rank keeps as a mirror, if a server has died
    copies: Any = None


class ServicePlan(Protocol):
    """The plan for a service in the next generation. Every rank has the same plan."""

    @property
    def rounds(self) -> Mapping[Name, int]:
        """Collection -> the round at which it begins in the next generation. Includes internal collections."""

    def rounds_of(self, rank: int) -> Mapping[Name, int]:
        """Return collection -> the round from which `rank` continues, without internal collections.

        A worker continues from the number of its own pushes that the restored values contain. Its later pushes are
        lost. Any other rank continues from the round of the collection.
        """

    @property
    def torn(self) -> Sequence[Name]:
        """The collections for which no complete round can be restored."""


class FoundService(Protocol):
    """The content of a service that all ranks together hold."""

    @property
    def rounds(self) -> Mapping[Name, Sequence[int]]:
        """Collection -> the rounds that can be restored. A lost collection has an empty sequence."""

    @property
    def lost(self) -> Sequence[Name]:
        """The lost collections, except internal ones."""

    def plan(self, rounds: Mapping[Name, int]) -> ServicePlan:
        """Plan the next generation. Collections that `rounds` does not name keep the newest round of each server."""


class ServiceMover(Protocol):
    """The bytes of a service that one rank sends, copies and receives in a recovery."""

    # number of bytes sent and received
    nbytes: int
    # send requests that MPI has not completed
    under_way: list[MPI.Request]

    def is_over(self) -> bool:
        """Advance the transfers for a moment. Return True once everything has been sent and received."""


class ServiceKind(NamedTuple):
    """A kind of service: the functions that make its objects, and that do its part in a recovery.

    Attributes:
        make_worker: Makes a worker's part in the service (`WorkerService`), which lasts as long as its store.
        decode_records: Decodes the service's JSON in the header of a checkpoint to `CollectionRecord`s. Raises
            MsgspecError if the JSON is damaged.
        make: Makes an empty service of one server for one generation.
        make_copies: Makes the empty container for copies that a server keeps as a mirror. The copies are in the file.
        describe: Describes, for all ranks, what this rank can read. Returns b"" if it can read nothing.
        find: Combines the descriptions of all ranks. Each argument after the layout has one entry per rank: what the
            rank knows as a worker of the last generation (None if it was not a worker), what `describe` returned on it,
            and the servers of the last generation whose memory it has mapped.
        move: Starts the transfers of a plan. The last argument is the new service of this rank, if it is a server.
    """

    name: str
    make_worker: Callable[[Layout, ServerLink, Setup], Any]
    decode_records: Callable[[bytes], Sequence[Any]]
    make: Callable[[Surroundings], Service]
    make_copies: Callable[[SparseFile], ServiceCopies]
    describe: Callable[[OldMemory], bytes]
    find: Callable[[Layout, Sequence[bytes | None], Sequence[bytes], Sequence[Collection[int]]], FoundService]
    move: Callable[[Any, Layout, OldMemory, Any], ServiceMover]
