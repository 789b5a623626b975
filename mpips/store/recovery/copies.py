"""Copies that a server keeps of other servers' units: the last two complete versions of each, and their messages.

The older version's memory is that of the next one. So what is cut off while it comes leaves a whole version.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Union

import msgspec
import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from collectives.fabric import requests
from mpips.store.recovery.inventory import Holding, Shelf, copies_of, dtype_names
from mpips.store.recovery.membership import Before
from mpips.store.recovery.undo import Version
from mpips.store.transport.frames import dtype_of

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


def cut(arrays: list[NDArray[Any]]) -> Iterator[NDArray[np.uint8]]:
    """Return what each message of a version holds."""
    for array in arrays:
        data = array.view(np.uint8)
        yield from (data[at : at + MESSAGE_BYTES] for at in range(0, data.size, MESSAGE_BYTES))
