"""A server's mirror in one generation: its changed units go there, and those of the servers that it mirrors come in.

`MirrorSender` sends units that have changed, whole, and lets nothing write to them until they are there.
`MirrorReceiver` takes versions of other servers' units in, and says so once they are whole.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from collectives.errors import warn
from collectives.fabric.failure import is_death
from collectives.fabric.requests import keep, send
from mpips.store.recovery.copies import (
    ALONG_BYTES,
    DATA_TAG,
    MirroredUnit,
    MirroredUnits,
    MirrorFilled,
    UnitPlace,
    UnitsGone,
    VersionSent,
    VersionsKept,
    cut,
    post,
    taken,
)
from mpips.store.recovery.inventory import dtype_names
from mpips.store.recovery.membership import mirror_of
from mpips.store.recovery.memory import arrays_of_unit, holding_of_unit
from mpips.store.roles import Layout
from mpips.store.server.unit import Unit


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
            for data in cut(arrays) if not along else ():
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
                for piece in cut(arrays):
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
