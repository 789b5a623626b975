"""Copies that a server keeps of other servers' units: the last two complete versions of each, and their messages.

The older version's memory is that of the next one. So what is cut off while it comes leaves a whole version.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Union

import msgspec
import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from collectives.errors import warn
from collectives.fabric import requests
from collectives.fabric.failure import is_death
from collectives.fabric.requests import keep, send
from mpips.store.recovery.membership import Before, mirror_of
from mpips.store.recovery.memory import arrays_of_unit, holding_of_unit
from mpips.store.recovery.plan import Holding, Shelf, copies_of, dtype_names
from mpips.store.recovery.undo import Version
from mpips.store.roles import Layout
from mpips.store.server.unit import Unit
from mpips.store.transport.frames import dtype_of
from mpips.store.transport.pending import cut_bytes

Array = NDArray[Any]
VERSIONS = 2


class MirroredUnit:
    """The versions of one unit."""

    def __init__(self) -> None:
        self.versions: list[Version] = []
        """The newest first."""
        self.torn = False
        self.generation = -1
        """The last one in which a version has come."""
        self._spare: list[Array] = []

    def room(self, sent: VersionSent) -> list[Array]:
        """Memory for a version that is about to come."""
        old, self._spare = self.versions.pop().arrays if len(self.versions) == VERSIONS else self._spare, []
        size = sent.place[2] - sent.place[1]
        fits = [array.dtype.name for array in old] == sent.dtypes
        return old if fits else [np.empty(size, dtype_of(name)) for name in sent.dtypes]

    def came(self, sent: VersionSent, arrays: list[Array], generation: int) -> None:
        """It is there."""
        old = self.versions[:1]
        if old and not (sent.continues and old[0].round == sent.round - 1):
            self._spare = old.pop().arrays
        self.versions = [Version(sent.round, sent.step, arrays, sent.pushes), *old]
        self.torn, self.generation = sent.torn, generation

    def holding(self, place: UnitPlace) -> Holding:
        """Return what this is for those who begin the next generation."""
        key, start, stop = place
        states = max((dtype_names(version.arrays[1:]) for version in self.versions), key=len)
        standings = [(one.round, one.step) for one in self.versions]
        return Holding(key, start, stop, standings, self.torn, states, list(self.versions[0].pushes))


class MirroredUnits:
    """All that one server keeps for others, from generation to generation.

    When a generation begins, the copies of the one before stay until all servers have sent their units anew: nothing
    that they stand for is changed before.
    """

    def __init__(self) -> None:
        self._copies: dict[UnitPlace, MirroredUnit] = {}

    def of(self, place: UnitPlace) -> MirroredUnit:
        """Return the copy of a unit."""
        return self._copies.setdefault(place, MirroredUnit())

    def forget(self, places: Iterable[UnitPlace]) -> None:
        """Units that nobody will use again."""
        for place in places:
            self._copies.pop(place, None)

    def begin(self, rounds: Mapping[int | str, int] | None) -> None:
        """A generation begins in which keys stand at these rounds, where rounds count (not None): what is of another
        one is not of its history."""
        for place, copy in list(self._copies.items()):
            if rounds is not None:
                copy.versions = [one for one in copy.versions if one.round == rounds.get(place[0])]
            if not copy.versions:
                del self._copies[place]

    def filled(self, generation: int) -> None:
        """All servers have sent their units in this generation: what is older may go."""
        self._copies = {place: copy for place, copy in self._copies.items() if copy.generation >= generation}

    def shelves(self, before: Before | None, rank: int) -> list[Shelf]:
        """Return what is whole here, on the rank that this server had, where a server has died."""
        if before is None or not any(0 <= lost - before.num_workers < before.num_servers for lost in before.lost):
            return []
        units = [copy.holding(place) for place, copy in self._whole()]
        return [Shelf(copies_of(rank), False, b"", units)] if units else []

    def arrays_of(self, index: int, before: bool) -> list[Array]:
        """Return values and state of a unit on the shelf; `before`: as they were a round before."""
        return self._whole()[index][1].versions[int(before)].arrays

    def _whole(self) -> Sequence[tuple[UnitPlace, MirroredUnit]]:
        return [(place, copy) for place, copy in self._copies.items() if copy.versions]


TAG, DATA_TAG = 2, 3
"""On the servers' communicator: of letters, and of what units hold."""
MESSAGE_BYTES = 4 << 20
ALONG_BYTES = 1 << 14
"""Of a unit that goes in its letter."""
UnitPlace = tuple[int | str, int, int]
"""A unit: elements [start, stop) of a key."""


class VersionSent(msgspec.Struct, array_like=True, tag=0):
    """A version of a unit, which comes along, or in messages behind this letter."""

    place: UnitPlace
    number: int
    """Of this version; the mirror names it when it has all."""
    round: int
    step: int | None
    continues: bool
    """Whether the version of the round before may still be had."""
    torn: bool
    dtypes: list[str]
    """Of values and state."""
    along: list[bytes]
    pushes: list[tuple[int, int]] = []
    """See `Holding.pushes`."""


class VersionsKept(msgspec.Struct, array_like=True, tag=1):
    """The versions that the mirror has."""

    numbers: list[int]


class UnitsGone(msgspec.Struct, array_like=True, tag=2):
    """Units that nobody will use again."""

    places: list[UnitPlace]


class MirrorFilled(msgspec.Struct, array_like=True, tag=3):
    """The mirror of who says so has all units, as far as it needs one."""


Letter = Union[VersionSent, VersionsKept, UnitsGone, MirrorFilled]  # noqa: UP007 (msgspec reads it)
_decoder: msgspec.msgpack.Decoder[Letter] = msgspec.msgpack.Decoder(Letter)  # type: ignore[arg-type]


def post(comm: MPI.Comm, letter: Letter, *servers: int) -> None:
    """Send a letter to servers, but to the dead. Does not block."""
    requests.tell(comm, msgspec.msgpack.encode(letter), servers, TAG)


def taken(comm: MPI.Comm) -> Iterator[tuple[int, Letter]]:
    """The letters that have come, and of whom. Does not block."""
    while (message := requests.received(comm, TAG)) is not None:
        yield message[0], _decoder.decode(message[1])


class Mirror:
    """Both ends, on one server."""

    def __init__(self, layout: Layout, copies: MirroredUnits, generation: int) -> None:
        assert layout.servers is not None
        self._comm, self._copies, self._generation = layout.servers, copies, generation
        nodes = [layout.nodes[layout.server_rank(server)] for server in range(layout.num_servers)]
        mine = layout.rank - layout.num_workers
        mirror = mirror_of(mine, nodes)
        self._sending = None if mirror is None else MirrorSender(self._comm, mirror, layout.asynchronous)
        self._keeping = MirrorReceiver(self._comm, copies, generation)
        self._others = [server for server in range(layout.num_servers) if server != mine]
        self._unfilled = set(range(layout.num_servers))
        """Servers whose units are not all with their mirror yet."""
        self._told = False
        self._mine = mine
        if mirror is None and mine == 0:
            warn("mirrors=1, but all servers that are left share one node: another loss of a node loses what is stored")

    @property
    def quiet(self) -> bool:
        """Return whether the mirror has everything."""
        return self._sending is None or self._sending.quiet

    def changed(self, unit: Unit) -> None:
        """What the unit holds has changed: nothing more is written to it until it is `mirrored`."""
        if self._sending is not None:
            self._sending.changed(unit)

    def forget(self, units: Iterable[Unit]) -> None:
        """Units that nobody will use again."""
        if self._sending is not None:
            self._sending.forget(units)

    def turn(self) -> bool:
        """Take in what has come, and send what is due; whether anything was done."""
        worked = self._hear()
        if self._sending is not None:
            worked |= self._sending.turn()
        if not self._told and self.quiet:
            self._told = True
            post(self._comm, MirrorFilled(), *self._others)
            self._filled(self._mine)
        return worked

    def stop(self) -> None:
        """The generation is over: nobody waits for the mirror any more, and what is not whole here does not count."""
        self._hear()
        self._keeping.stop()
        if self._sending is not None:
            self._sending.stop()

    def _hear(self) -> bool:
        worked = False
        for server, letter in taken(self._comm):
            worked = True
            if isinstance(letter, VersionSent):
                self._keeping.take(server, letter)
            elif isinstance(letter, VersionsKept):
                if self._sending is not None:
                    self._sending.kept(letter.numbers)
            elif isinstance(letter, UnitsGone):
                self._copies.forget(letter.places)
            else:
                self._filled(server)
        return self._keeping.turn() or worked

    def _filled(self, server: int) -> None:
        self._unfilled.discard(server)
        if not self._unfilled:
            self._copies.filled(self._generation)


UNDER_WAY_BYTES = 64 << 20
"""At this many bytes under way no other unit goes."""


class UnderWay(NamedTuple):
    """A version that the mirror has not said to have."""

    unit: Unit
    nbytes: int
    requests: list[MPI.Request]


def place_of(unit: Unit) -> UnitPlace:
    """Return what a unit is for its mirror."""
    return unit.key, unit.start, unit.start + unit.stored.size


class MirrorSender:
    """The sender of units to the mirror, server `mirror` of `comm`."""

    def __init__(self, comm: MPI.Comm, mirror: int, asynchronous: bool) -> None:
        self._comm, self._mirror, self._asynchronous = comm, mirror, asynchronous
        self._due: deque[Unit] = deque()
        self._under_way: dict[int, UnderWay] = {}
        """By numbers of versions, in order."""
        self._latest: dict[int, int] = {}
        """By numbers of units, the version that is to come; 0 where it is not sent yet."""
        self._number = self._nbytes = 0
        self._over = False

    @property
    def quiet(self) -> bool:
        """Return whether the mirror has everything."""
        return not self._due and not self._under_way

    def changed(self, unit: Unit) -> None:
        """The unit is to be sent; until the mirror has it, it is not `mirrored`."""
        if not self._over and self._latest.get(unit.number) != 0:
            unit.mirrored = False
            self._latest[unit.number] = 0
            self._due.append(unit)

    def kept(self, numbers: Iterable[int]) -> None:
        """The mirror has these versions."""
        for number in numbers:
            gone = self._under_way.pop(number, None)
            if gone is None:
                continue
            self._nbytes -= gone.nbytes
            keep(gone.requests)
            if self._latest.get(gone.unit.number) == number:
                del self._latest[gone.unit.number]
                gone.unit.mirrored = True

    def turn(self) -> bool:
        """Send what there is room for; whether anything was sent."""
        worked = False
        while self._due and (not self._nbytes or self._nbytes < UNDER_WAY_BYTES):
            self._send(self._due.popleft())
            worked = True
        return worked

    def forget(self, units: Iterable[Unit]) -> None:
        """Units that nobody will use again."""
        gone = list(units)
        self._due = deque(unit for unit in self._due if unit not in gone)
        for unit in gone:
            self._latest.pop(unit.number, None)
            unit.mirrored = True
        post(self._comm, UnitsGone([place_of(unit) for unit in gone]), self._mirror)

    def stop(self) -> None:
        """The generation is over: nobody waits for the mirror any more."""
        self._over = True
        for unit in (*self._due, *(gone.unit for gone in self._under_way.values())):
            unit.mirrored = True
        keep(request for gone in self._under_way.values() for request in gone.requests)
        self._due.clear()
        self._under_way.clear()

    def _send(self, unit: Unit) -> None:
        told = holding_of_unit(unit, self._asynchronous)
        (round_, step), *before = told.standings
        arrays = arrays_of_unit(unit, False)
        nbytes = sum(array.nbytes for array in arrays)
        along = [array.tobytes() for array in arrays] if nbytes <= ALONG_BYTES else []
        self._number += 1
        self._latest[unit.number] = self._number
        sent = VersionSent(
            place_of(unit), self._number, round_, step, bool(before), unit.torn, dtype_names(arrays), along, told.pushes
        )
        post(self._comm, sent, self._mirror)
        requests = []
        try:
            for array in arrays if not along else ():
                for data in cut_bytes(array, MESSAGE_BYTES):
                    requests.append(send(self._comm, data, self._mirror, DATA_TAG))
        except MPI.Exception as error:
            if not is_death(error):
                raise
        self._under_way[self._number] = UnderWay(unit, nbytes, requests)
        self._nbytes += nbytes


class Coming(NamedTuple):
    """A version that is not whole yet."""

    server: int
    sent: VersionSent
    copy: MirroredUnit
    arrays: list[NDArray[Any]]
    requests: list[MPI.Request]


class MirrorReceiver:
    """The receiver of versions from servers of `comm` in this generation."""

    def __init__(self, comm: MPI.Comm, copies: MirroredUnits, generation: int) -> None:
        self._comm, self._copies, self._generation = comm, copies, generation
        self._coming: list[Coming] = []

    def take(self, server: int, sent: VersionSent) -> None:
        """A version comes."""
        copy = self._copies.of(sent.place)
        arrays = copy.room(sent)
        requests: list[MPI.Request] = []
        if sent.along:
            for array, data in zip(arrays, sent.along, strict=True):
                array.view(np.uint8)[...] = np.frombuffer(data, np.uint8)
        else:
            try:
                for array in arrays:
                    for piece in cut_bytes(array, MESSAGE_BYTES):
                        requests.append(self._comm.Irecv(piece, server, DATA_TAG))
            except MPI.Exception as error:
                if not is_death(error):
                    raise
                keep(requests)
                return
        self._coming.append(Coming(server, sent, copy, arrays, requests))

    def turn(self) -> bool:
        """See what is whole by now, and tell its servers; whether anything is."""
        whole: dict[int, list[int]] = {}
        rest = []
        for coming in self._coming:
            if (there := _there(coming.requests)) is None:
                continue
            if not there:
                rest.append(coming)
                continue
            coming.copy.came(coming.sent, coming.arrays, self._generation)
            whole.setdefault(coming.server, []).append(coming.sent.number)
        self._coming = rest
        for server, numbers in whole.items():
            post(self._comm, VersionsKept(numbers), server)
        return bool(whole)

    def stop(self) -> None:
        """The generation is over: what is not whole does not count."""
        for coming in self._coming:
            keep(coming.requests)
        self._coming = []


def _there(requests: list[MPI.Request]) -> bool | None:
    """Return whether all has come; None where the sender has died before."""
    try:
        return bool(MPI.Request.Testall(requests))
    except MPI.Exception:
        keep(requests)
        return None
