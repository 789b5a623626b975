"""The mirror of a server: another server, on another node, that keeps a second copy of each of its units.

A unit that has changed is sent to the mirror as a whole. It must not change again until it has arrived at the mirror.
The mirror keeps the last two complete versions of each unit, and receives the next version into the memory of the older
one. So if a version arrives only in part, a complete version is left. Services, such as tables, send their own copies
(`ServiceMirror`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import NamedTuple, Union

import msgspec
import numpy as np
from mpi4py import MPI

from mpips.collectives.errors import warn
from mpips.collectives.fabric import requests
from mpips.collectives.fabric.failure import is_death
from mpips.collectives.fabric.requests import cut_bytes
from mpips.store.keys.key import Array
from mpips.store.recovery.membership import Before, mirror_of
from mpips.store.recovery.memory import arrays_of_unit, describe_unit
from mpips.store.recovery.plan import OwnerInventory, UnitCopy, copies_of, dtype_names
from mpips.store.recovery.undo import AvailableRound, Version
from mpips.store.roles import Layout
from mpips.store.server.service import ServiceCopies
from mpips.store.server.unit import Unit, UnitMirror
from mpips.store.transport.frames import dtype_of

VERSIONS = 2
# tags on the servers' communicator: for messages between mirrors, and for the arrays of units
TAG, DATA_TAG = 2, 3
MESSAGE_BYTES = 4 << 20
# A unit of at most this size is sent within the message that announces it.
SMALL_BYTES = 1 << 14
# No further unit is sent while this many bytes are on their way.
UNDER_WAY_BYTES = 64 << 20
# elements [start, stop) of a key
UnitPlace = tuple[int | str, int, int]


# ---- messages between mirrors


class VersionSent(msgspec.Struct, array_like=True, tag=0):
    """Message: a version of a unit. Its arrays follow in other messages, unless they are small.

    Attributes:
        number: The number of this version, which the mirror repeats in its acknowledgement.
        unit: Describes the unit. The first of its `rounds` is the round of this version. If `rounds` has a second
            round, the mirror can still use the previous version.
        dtypes: Dtypes of values and state.
        data: Values and state if they are small, otherwise empty.
    """

    number: int
    unit: UnitCopy
    dtypes: list[str]
    data: list[bytes]


class VersionsKept(msgspec.Struct, array_like=True, tag=1):
    """Message: the mirror has these versions."""

    numbers: list[int]


class UnitsGone(msgspec.Struct, array_like=True, tag=2):
    """Message: these units will not be used again."""

    places: list[UnitPlace]


class MirrorFilled(msgspec.Struct, array_like=True, tag=3):
    """Message: the sender's mirror has all of the sender's units, or the sender needs no mirror."""


Message = Union[VersionSent, VersionsKept, UnitsGone, MirrorFilled]  # noqa: UP007 (msgspec reads it)
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)  # type: ignore[arg-type]


# ---- what a mirror keeps


class MirroredUnit:
    """The last two versions of one unit."""

    def __init__(self) -> None:
        # newest first
        self.versions: list[Version] = []
        self.torn = False
        # the last generation in which a version has arrived
        self.generation = -1
        # memory of a dropped version, to be reused for the next version
        self._spare: list[Array] = []

    def allocate(self, sent: VersionSent) -> list[Array]:
        """Return memory for a version that is about to arrive: the memory of the older version, if its size fits."""
        old, self._spare = self.versions.pop().arrays if len(self.versions) == VERSIONS else self._spare, []
        size = sent.unit.stop - sent.unit.start
        fits = [array.dtype.name for array in old] == sent.dtypes
        return old if fits else [np.empty(size, dtype_of(name)) for name in sent.dtypes]

    def add_version(self, sent: VersionSent, arrays: list[Array], generation: int) -> None:
        """Keep a version that has arrived completely."""
        (round_, step), *before = sent.unit.rounds
        old = self.versions[:1]
        if old and not (before and old[0].round == round_ - 1):
            self._spare = old.pop().arrays
        self.versions = [Version(round_, step, arrays, sent.unit.pushes), *old]
        self.torn, self.generation = sent.unit.torn, generation


class MirroredUnits:
    """The copies of other servers' units that one server keeps as their mirror. The copies outlive a generation.

    When a generation begins, the copies of the last generation are kept until all servers have sent their units again.
    Until then the units themselves do not change.

    Args:
        services: Name of a service -> the copies of the service.
    """

    def __init__(self, services: Mapping[str, ServiceCopies] | None = None) -> None:
        self._copies: dict[UnitPlace, MirroredUnit] = {}
        self.services = services or {}

    def of(self, place: UnitPlace) -> MirroredUnit:
        """Return the copy of a unit. If there is none, make an empty copy."""
        return self._copies.setdefault(place, MirroredUnit())

    def forget(self, places: Iterable[UnitPlace]) -> None:
        """Drop units that nobody will use again."""
        for place in places:
            self._copies.pop(place, None)

    def begin(self, rounds: Mapping[int | str, int] | None) -> None:
        """Begin a generation at these rounds of keys. In an asynchronous store `rounds` is None.

        Drop versions of other rounds: if the store has gone back, they contain pushes that no longer count.
        """
        for place, copy in list(self._copies.items()):
            if rounds is not None:
                copy.versions = [version for version in copy.versions if version.round == rounds.get(place[0])]
            if not copy.versions:
                del self._copies[place]

    def drop_before(self, generation: int) -> None:
        """Drop copies of earlier generations, because all servers have sent their units in this generation."""
        self._copies = {place: copy for place, copy in self._copies.items() if copy.generation >= generation}
        for copies in self.services.values():
            copies.drop_before(generation)

    def owners(self, before: Before | None, rank: int) -> list[OwnerInventory]:
        """If a server has died, return one inventory of all complete copies. `rank` is this server's former rank."""
        if before is None or not before.lost_servers:
            return []
        units = []
        for (key, start, stop), copy in self._whole():
            states = max((dtype_names(version.arrays[1:]) for version in copy.versions), key=len)
            rounds = [AvailableRound(version.round, version.step) for version in copy.versions]
            units.append(UnitCopy(key, start, stop, rounds, copy.torn, states, list(copy.versions[0].pushes)))
        return [OwnerInventory(copies_of(rank), False, b"", units)] if units else []

    def arrays_of(self, index: int, before: bool) -> list[Array]:
        """Return the values and optimizer state of one of the units that `owners` lists.

        Args:
            index: The index of the unit in that list.
            before: True for the version before the newest.
        """
        return self._whole()[index][1].versions[int(before)].arrays

    def _whole(self) -> list[tuple[UnitPlace, MirroredUnit]]:
        return [(place, copy) for place, copy in self._copies.items() if copy.versions]


# ---- messages to the mirror, and from the servers that this one mirrors


class UnderWay(NamedTuple):
    """A version that was sent, and that the mirror has not acknowledged yet."""

    unit: Unit
    nbytes: int
    requests: list[MPI.Request]


class Coming(NamedTuple):
    """A version that has not arrived completely yet."""

    server: int
    sent: VersionSent
    copy: MirroredUnit
    arrays: list[Array]
    requests: list[MPI.Request]


class Mirror(UnitMirror):
    """The copies that one server sends to its mirror, and the copies that it keeps for others, in one generation."""

    def __init__(self, layout: Layout, copies: MirroredUnits, generation: int) -> None:
        assert layout.servers is not None
        self._comm = layout.servers
        self._copies = copies
        self._generation = generation
        self._asynchronous = layout.asynchronous
        nodes = [layout.nodes[layout.server_rank(server)] for server in range(layout.num_servers)]
        self._server = layout.rank - layout.num_workers
        # the server that mirrors this one; None if all servers share a node
        self._mirror = mirror_of(self._server, nodes)
        # servers whose mirror does not have all of their units yet
        self._unfilled = set(range(layout.num_servers))
        # True once this server has told the other servers that its mirror has all of its units
        self._announced = False
        self._over = False
        self._due: deque[Unit] = deque()
        # number of a version -> the version, in the order of sending
        self._under_way: dict[int, UnderWay] = {}
        # number of a unit -> the number of the version that the mirror must acknowledge; 0 if it is not sent yet
        self._latest: dict[int, int] = {}
        self._number = 0
        self._nbytes = 0
        self._coming: list[Coming] = []
        # name of a service -> its connection to the mirror
        self.services = {
            name: kept.connect(layout.servers, self._mirror, generation) for name, kept in copies.services.items()
        }
        if self._mirror is None and self._server == 0:
            warn("mirrors=1, but all servers that are left share one node: another loss of a node loses what is stored")

    @property
    def quiet(self) -> bool:
        """True if the mirror has every unit as it is now."""
        return not self._due and not self._under_way

    def changed(self, unit: Unit) -> None:
        """Send a unit that has changed. The unit must not be written again until `unit.mirrored` is True."""
        if self._mirror is not None and not self._over and self._latest.get(unit.number) != 0:
            unit.mirrored = False
            self._latest[unit.number] = 0
            self._due.append(unit)

    def forget(self, units: Iterable[Unit]) -> None:
        """Drop units that nobody will use again, on this server and on its mirror."""
        if self._mirror is None:
            return
        gone = list(units)
        self._due = deque(unit for unit in self._due if unit not in gone)
        for unit in gone:
            self._latest.pop(unit.number, None)
            unit.mirrored = True
        places = [(unit.key, unit.start, unit.start + unit.stored.size) for unit in gone]
        self._post(UnitsGone(places), self._mirror)

    def turn(self) -> bool:
        """Receive what has arrived, and send as much as there is room for. Return True if anything was done."""
        worked = self._hear()
        for service in self.services.values():
            worked |= service.turn()
        # If no other unit is on its way, a unit of any size is sent.
        while self._due and (not self._nbytes or self._nbytes < UNDER_WAY_BYTES):
            self._send(self._due.popleft())
            worked = True
        if not self._announced and self.quiet and all(service.quiet for service in self.services.values()):
            self._announced = True
            self._post(MirrorFilled(), *(server for server in range(self._comm.size) if server != self._server))
            self._note_filled(self._server)
        return worked

    def stop(self) -> None:
        """Stop at the end of the generation. From now on nothing waits for the mirror.

        Versions that have arrived only in part are dropped.
        """
        self._hear()
        for service in self.services.values():
            service.stop()
        self._over = True
        for unit in (*self._due, *(sent.unit for sent in self._under_way.values())):
            unit.mirrored = True
        for under_way in [sent.requests for sent in self._under_way.values()] + [
            coming.requests for coming in self._coming
        ]:
            requests.keep_until_complete(under_way)
        self._due.clear()
        self._under_way.clear()
        self._coming.clear()

    def _post(self, message: Message, *servers: int) -> None:
        """Send a message to servers, without blocking. Dead servers are skipped."""
        requests.send_to_all(self._comm, msgspec.msgpack.encode(message), servers, TAG)

    def _hear(self) -> bool:
        worked = False
        while (received := requests.receive_next(self._comm, TAG)) is not None:
            worked = True
            server, message = received[0], _decoder.decode(received[1])
            if isinstance(message, VersionSent):
                self._receive(server, message)
            elif isinstance(message, VersionsKept):
                self._note_kept(message.numbers)
            elif isinstance(message, UnitsGone):
                self._copies.forget(message.places)
            else:
                self._note_filled(server)
        return self._keep_whole() or worked

    # ---- messages to the mirror

    def _send(self, unit: Unit) -> None:
        assert self._mirror is not None
        arrays = arrays_of_unit(unit, False)
        nbytes = sum(array.nbytes for array in arrays)
        data = [array.tobytes() for array in arrays] if nbytes <= SMALL_BYTES else []
        self._number += 1
        self._latest[unit.number] = self._number
        copy = describe_unit(unit, self._asynchronous)
        self._post(VersionSent(self._number, copy, dtype_names(arrays), data), self._mirror)
        under_way: list[MPI.Request] = []
        try:
            for array in arrays if not data else ():
                for piece in cut_bytes(array, MESSAGE_BYTES):
                    under_way.append(requests.send(self._comm, piece, self._mirror, DATA_TAG))
        except MPI.Exception as error:
            if not is_death(error):
                raise
        self._under_way[self._number] = UnderWay(unit, nbytes, under_way)
        self._nbytes += nbytes

    def _note_kept(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            sent = self._under_way.pop(number, None)
            if sent is None:
                continue
            self._nbytes -= sent.nbytes
            requests.keep_until_complete(sent.requests)
            # If the numbers differ, the unit has changed again. It then waits until the later version is acknowledged.
            if self._latest.get(sent.unit.number) == number:
                del self._latest[sent.unit.number]
                sent.unit.mirrored = True

    def _note_filled(self, server: int) -> None:
        """Note that a server's mirror has all of its units."""
        self._unfilled.discard(server)
        if not self._unfilled:
            self._copies.drop_before(self._generation)

    # ---- messages from servers that this one mirrors

    def _receive(self, server: int, sent: VersionSent) -> None:
        copy = self._copies.of((sent.unit.key, sent.unit.start, sent.unit.stop))
        arrays = copy.allocate(sent)
        coming: list[MPI.Request] = []
        if sent.data:
            for array, data in zip(arrays, sent.data, strict=True):
                array.view(np.uint8)[...] = np.frombuffer(data, np.uint8)
        else:
            try:
                for array in arrays:
                    for piece in cut_bytes(array, MESSAGE_BYTES):
                        coming.append(self._comm.Irecv(piece, server, DATA_TAG))
            except MPI.Exception as error:
                if not is_death(error):
                    raise
                requests.keep_until_complete(coming)
                return
        self._coming.append(Coming(server, sent, copy, arrays, coming))

    def _keep_whole(self) -> bool:
        """Keep the versions that have arrived completely, and acknowledge them. Return True if there were any."""
        whole: dict[int, list[int]] = {}
        rest = []
        for coming in self._coming:
            try:
                is_complete = MPI.Request.Testall(coming.requests)
            except MPI.Exception:
                # the sender has died
                requests.keep_until_complete(coming.requests)
                continue
            if not is_complete:
                rest.append(coming)
                continue
            coming.copy.add_version(coming.sent, coming.arrays, self._generation)
            whole.setdefault(coming.server, []).append(coming.sent.number)
        self._coming = rest
        for server, numbers in whole.items():
            self._post(VersionsKept(numbers), server)
        return bool(whole)
