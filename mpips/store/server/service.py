"""The protocol of a service, which is anything that a server serves besides keys.

A service has *collections*, which have names and rounds as keys have. The store knows services by the classes here
alone; `mpips.store.services` lists them.

In a generation a server has one `Service` of each `ServiceKind`. The service has requests of its own and answers them
when it likes: a push may be answered rounds later. It is told which workers have left or wait for all others. It says
which of its rounds wait, so that long waits end in the same way as those of keys.

In a recovery each kind says what every rank holds (`describe`), finds from that which rounds can be restored (`find`),
plans them (`FoundService.plan`), and moves its bytes (`move`). What it says is bytes to everybody else.
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
    # the service's connection to the mirror of this server, as `ServiceCopies.connect` has made it
    mirror: Any
    late: Late
    # the store's lane in records
    lane: int


class Service(Protocol):
    """One service of one server in one generation."""

    # the name of its kind
    name: str
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

    def ledger_entry(self) -> bytes:
        """Return what other ranks need to find the service's memory after this server's death. b"" if it is empty."""

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

    # ---- the beginning of a generation

    def restore(self, plan: Any, old: OldMemory, rank: int) -> None:
        """Take over what stays on this server, which has this rank now. Make room for what will be moved to it."""

    def begin(self, plan: Any) -> None:
        """Begin the generation at the rounds of the plan. Everything has been moved."""


# ---- mirrors


class ServiceMirror(Protocol):
    """The connection of one service to its copy on the server's mirror, in one generation."""

    @property
    def quiet(self) -> bool:
        """True if the mirror has everything."""

    def turn(self) -> bool:
        """Take in what has come, and send what there is room for. Return True if anything was done."""

    def stop(self) -> None:
        """End with the generation. Nothing waits for the mirror any more."""


class ServiceCopies(Protocol):
    """The copies that one server keeps of other servers' services as their mirror, from generation to generation."""

    def connect(self, comm: MPI.Intracomm, mirror: int | None, generation: int) -> ServiceMirror:
        """Connect this server's service to its mirror (None: it has none), and these copies to their servers."""

    def begin(self, rounds: Mapping[Name, int] | None) -> None:
        """Begin a generation at these rounds, and drop copies that cannot go there. None: stay at the newest."""

    def drop_before(self, generation: int) -> None:
        """Drop the copies of earlier generations, because all servers have sent everything again."""


# ---- recovery


class OldMemory(NamedTuple):
    """What one rank can read of a service as it was in the last generation."""

    # the ranks of the last generation
    before: Before
    # the rank that this one had then; -1 if it was neither worker nor server
    rank: int
    # rank of a server whose memory is mapped here -> its sparse file, and its service's `ledger_entry`
    read: Callable[[int], tuple[SparseFile, bytes]]
    # the dead servers whose memory this rank describes for all others
    described: Collection[int]
    # the service, if this rank was a server
    service: Any = None
    # what it keeps as a mirror, if a server has died
    copies: Any = None


class ServicePlan(Protocol):
    """What becomes of a service in the next generation. The same on every rank."""

    @property
    def rounds(self) -> Mapping[Name, int]:
        """The round of each collection that the service has on servers."""

    def rounds_of(self, rank: int) -> Mapping[Name, int]:
        """Return the round of each collection that users know; of a worker the number of its pushes that count."""

    @property
    def torn(self) -> Sequence[Name]:
        """The collections of which no whole round can be restored."""


class FoundService(Protocol):
    """What all ranks together hold of a service."""

    @property
    def rounds(self) -> Mapping[Name, Sequence[int]]:
        """For each collection the rounds at which it can be restored; none if it is lost."""

    @property
    def lost(self) -> Sequence[Name]:
        """The lost collections that users know."""

    def plan(self, rounds: Mapping[Name, int]) -> ServicePlan:
        """Plan the next generation at these rounds. Other collections stay at each server's newest round."""


class ServiceMover(Protocol):
    """The bytes of a service that one rank sends, copies and receives in a recovery."""

    # what has been sent and received
    nbytes: int
    # sends that are not complete
    under_way: list[MPI.Request]

    def is_over(self) -> bool:
        """Work for a moment. True when everything has been sent and received."""


class ServiceKind(NamedTuple):
    """A kind of service: how its objects are made, and its part in a recovery.

    Attributes:
        make_worker: Makes a worker's part in the service (`WorkerService`), which lasts as long as its store.
        decode_records: Decodes what the header of a checkpoint says of the service, in JSON, to `CollectionRecord`s.
            MsgspecError if it is damaged.
        make: Makes the service of a server for one generation, empty.
        make_copies: Makes what a server keeps of others as their mirror, empty. It lies in the file.
        describe: Returns what a rank can read, for all ranks: b"" if that is nothing.
        find: Finds out what all ranks hold together. Its arguments after the layout have an entry for each rank: what
            the rank knows as a worker of the last generation (None if it was none), what `describe` has returned there,
            and the servers of the last generation whose memory it has mapped.
        move: Begins to move what a plan says. The last argument is the new service of this rank, if it is a server.
    """

    name: str
    make_worker: Callable[[Layout, ServerLink, Setup], Any]
    decode_records: Callable[[bytes], Sequence[Any]]
    make: Callable[[Surroundings], Service]
    make_copies: Callable[[SparseFile], ServiceCopies]
    describe: Callable[[OldMemory], bytes]
    find: Callable[[Layout, Sequence[bytes | None], Sequence[bytes], Sequence[Collection[int]]], FoundService]
    move: Callable[[Any, Layout, OldMemory, Any], ServiceMover]
