"""What servers say to each other about mirrors, and the messages that carry it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Union

import msgspec
import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from collectives.network import failures

TAG, DATA_TAG = 2, 3
"""On the servers' communicator: of letters, and of what units hold."""
MESSAGE_BYTES = 4 << 20
ALONG_BYTES = 1 << 14
"""Of a unit that goes in its letter."""
Place = tuple[int | str, int, int]
"""A unit: elements [start, stop) of a key."""


class Sent(msgspec.Struct, array_like=True, tag=0):
    """A version of a unit, which comes along, or in messages behind this letter."""

    place: Place
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


class Kept(msgspec.Struct, array_like=True, tag=1):
    """The versions that the mirror has."""

    numbers: list[int]


class Gone(msgspec.Struct, array_like=True, tag=2):
    """Units that nobody will use again."""

    places: list[Place]


class Filled(msgspec.Struct, array_like=True, tag=3):
    """The mirror of who says so has all units, as far as it needs one."""


Letter = Union[Sent, Kept, Gone, Filled]  # noqa: UP007 (msgspec reads it)
_decoder: msgspec.msgpack.Decoder[Letter] = msgspec.msgpack.Decoder(Letter)  # type: ignore[arg-type]


def post(comm: MPI.Comm, letter: Letter, *servers: int) -> None:
    """Send a letter to servers, but to the dead. Does not block."""
    failures.tell(comm, msgspec.msgpack.encode(letter), servers, TAG)


def taken(comm: MPI.Comm) -> Iterator[tuple[int, Letter]]:
    """The letters that have come, and of whom. Does not block."""
    while (message := failures.received(comm, TAG)) is not None:
        yield message[0], _decoder.decode(message[1])


def cut(arrays: list[NDArray[Any]]) -> Iterator[NDArray[np.uint8]]:
    """What each message of a version holds."""
    for array in arrays:
        data = array.view(np.uint8)
        yield from (data[at : at + MESSAGE_BYTES] for at in range(0, data.size, MESSAGE_BYTES))
