"""A server's end towards its mirror: units that have changed go there, whole, and do not change until they are there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from mpi4py import MPI

from collectives.network.failures import is_death, send
from collectives.network.requests import keep
from mpips.store.recovery.inventory import dtype_names
from mpips.store.recovery.memory.units import at, holding
from mpips.store.recovery.mirrors.letters import ALONG_BYTES, DATA_TAG, Gone, Place, Sent, cut, post
from mpips.store.server.unit import Unit

UNDER_WAY_BYTES = 64 << 20
"""At this many bytes under way no other unit goes."""


class UnderWay(NamedTuple):
    """A version that the mirror has not said to have."""

    unit: Unit
    nbytes: int
    requests: list[MPI.Request]


def place_of(unit: Unit) -> Place:
    """What a unit is for its mirror."""
    return unit.key, unit.start, unit.start + unit.stored.size


class Sending:
    """What goes to the mirror, server `mirror` of `comm`."""

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
        """Whether the mirror has everything."""
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
        post(self._comm, Gone([place_of(unit) for unit in gone]), self._mirror)

    def stop(self) -> None:
        """The generation is over: nobody waits for the mirror any more."""
        self._over = True
        for unit in (*self._due, *(gone.unit for gone in self._under_way.values())):
            unit.mirrored = True
        keep(request for gone in self._under_way.values() for request in gone.requests)
        self._due.clear()
        self._under_way.clear()

    def _send(self, unit: Unit) -> None:
        told = holding(unit, self._asynchronous)
        (round_, step), *before = told.standings
        arrays = at(unit, False)
        nbytes = sum(array.nbytes for array in arrays)
        along = [array.tobytes() for array in arrays] if nbytes <= ALONG_BYTES else []
        self._number += 1
        self._latest[unit.number] = self._number
        dtypes = dtype_names(arrays)
        sent = Sent(place_of(unit), self._number, round_, step, bool(before), unit.torn, dtypes, along, told.pushes)
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
