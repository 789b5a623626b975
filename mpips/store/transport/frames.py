"""The messages between workers and servers: a 64-byte frame for each, and a typed body (msgspec) for rare requests.

A *unit* is a part of a key that one server keeps. The workers that push to a unit, its *contributors*, stay the same.
A *payload* is the data of a push or a pull.

A frame has an operation, a unit, a round and the place of the payload. Within a node the place is a region of shared
memory (pid, fd, inode, offset, nbytes). Between nodes only nbytes is used, and the payload follows as MPI messages.
Nothing is pickled.
"""

from __future__ import annotations

import functools
import operator
import struct
from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import msgspec
import numpy as np

from mpips.collectives.fabric.arena import Region

FRAME_BYTES = 64
FRAME = struct.Struct("<BBHiIIiiQQQqq")
assert FRAME.size == FRAME_BYTES
ROUND = struct.Struct("<q")
# offset of `round` in a frame; the bytes before it are equal in all pushes of one region with one priority
ROUND_AT = FRAME_BYTES - ROUND.size
NOWHERE = Region(0, 0, 0, 0, 0)
# flag of a PUSH: the worker sends the payload at once, without waiting for CREDIT
ALONG = 1
# flags of an ANSWER with an error message: the server refuses the request, or lacks the memory for it
REFUSED, NO_MEMORY = 1, 2


class Op(IntEnum):
    """The operation of a frame.

    Workers send operations with numbers below 16. Servers send those from 16 on, and BYE.
    """

    # A contribution to a round of a unit. The payload is in a region of shared memory, or follows as messages.
    PUSH = 1
    # The worker wants to read a unit once the unit contains the worker's first `round` pushes.
    PULL = 3
    # The worker has read a unit after GRANT or HELD, so the server may change the unit again.
    RELEASE = 4
    # The first value of a unit, from a worker on another node. `aux` messages of `nbytes` each follow. The last one may
    # be shorter.
    SET = 5
    # A request. The body is `aux` bytes of rows and ids, then the typed request. The server answers with ANSWER.
    CONTROL = 6
    # The worker has finished. A server of another node answers with BYE.
    BYE = 7
    # A PULL of some rows of a unit, between nodes. The body has the row numbers (int64).
    PULL_ROWS = 8
    # The worker has waited long for `round` of the unit.
    WAITS = 9
    # The worker waits in a barrier, and pushes nothing until all workers have come. Sent in stores with `staleness` or
    # `quorum`.
    MEETS = 11
    # The worker wants the unit to stay unchanged until RELEASE, as soon as the unit contains `round` pushes. Sent in
    # asynchronous stores.
    HOLD = 10
    # The server has read the contribution to this round, so the worker may overwrite it. Sent only between nodes;
    # within a node the worker reads a counter in shared memory instead. Round 0: the first value has arrived.
    CONSUMED = 16
    # The server is ready to receive block `aux` of the worker's contribution to this round.
    CREDIT = 17
    # The worker may now read the unit, which does not change until RELEASE. Between nodes the unit's blocks follow as
    # messages.
    GRANT = 18
    # A round has waited for a long time. The body is the text of a warning.
    WARNING = 20
    # The answer to a CONTROL. The body is typed. With the flag REFUSED or NO_MEMORY the body is an error message.
    ANSWER = 21

    # The unit contains `round` pushes, and does not change until RELEASE.
    HELD = 22


# operations that are always followed by a body
WITH_BODY = frozenset({Op.CONTROL, Op.PULL_ROWS, Op.WARNING, Op.ANSWER})


class Coding(IntEnum):
    """The encoding of a payload."""

    # all elements of the unit
    PLAIN = 0
    # all elements of the unit, in an `outbox` that the worker is still filling block by block
    GROWING = 1
    # the elements, encoded by the store's compressor
    COMPRESSED = 2
    # row numbers (int64), then the values of the rows
    ROWS = 3
    # no payload: the push contributes nothing, and only completes the round
    NOTHING = 4


class Frame(NamedTuple):
    """The fields of a frame."""

    op: int
    flags: int
    coding: int
    priority: int
    unit: int
    aux: int
    pid: int
    fd: int
    inode: int
    offset: int
    nbytes: int
    token: int
    round: int

    @classmethod
    def of(cls, data: bytes) -> Frame:
        """Unpack a frame."""
        return cls._make(FRAME.unpack(data))

    @property
    def region(self) -> tuple[int, ...]:
        """The place of the payload, as fields of `arena.Region`."""
        return self[6:11]


class UnitCard(msgspec.Struct, array_like=True):
    """The description of a unit that a worker sends to the server which will keep the unit."""

    number: int
    key: int | str
    dtype: str
    start: int
    stop: int
    row_elements: int
    block_elements: int
    # the workers that push to the unit
    contributors: tuple[int, ...]


class Create(msgspec.Struct, tag=True):
    """Make units. The server answers with Created once the units have memory."""

    units: list[UnitCard]


class Created(msgspec.Struct, tag=True):
    """The memory in which one server keeps new units."""

    # one region with the words of all units (`arrange_words`)
    words: tuple[int, ...]
    # for each unit, the region with its values
    values: list[tuple[int, ...]]


class Forget(msgspec.Struct, tag=True):
    """Remove units and free their memory. Sent when no worker uses the units any more."""

    units: list[int]


class Flush(msgspec.Struct, tag=True):
    """Wait for earlier pushes. The server answers once it has applied them, except those that `staleness` holds back.

    If all workers have sent MEETS first, `staleness` does not hold back any push.
    """


class OpenStore(msgspec.Struct, tag=True):
    """Create another store with these servers. Every worker sends this request.

    The server first answers, and then takes part in the creation of the store, which is collective over all ranks.
    """

    kind: str
    options: dict[str, str | int | float | bool]


class SetOptimizer(msgspec.Struct, tag=True):
    """Use an optimizer with fresh state for the keys from now on."""

    # encoded by `mpips.optimizers.encode`
    optimizer: bytes
    # None: all keys
    keys: list[int | str] | None = None


class UpdateOptimizer(msgspec.Struct, tag=True):
    """Change hyperparameters of the keys' optimizers from the next round on. The optimizers keep their state."""

    # the new hyperparameters, encoded by `mpips.optimizers.encode_numbers`
    numbers: bytes
    # None: all keys
    keys: list[int | str] | None = None


class SetCompression(msgspec.Struct, tag=True):
    """Decode contributions with this compressor from now on. `options` are arguments of `mpips.compression.create`."""

    options: dict[str, str | int | float]


class GetState(msgspec.Struct, tag=True):
    """Ask for the optimizer state of a unit. The server answers with StatePart."""

    unit: int


class StatePart(msgspec.Struct, tag=True):
    """The optimizer state of a unit: the step, and for each state array its dtype and its bytes."""

    step: int
    dtypes: list[str]
    arrays: list[bytes]


class GetVersions(msgspec.Struct, tag=True):
    """Ask for the number of pushes in each of these units of an asynchronous store.

    The server answers at once, with Versions.
    """

    units: list[int]


class Versions(msgspec.Struct, tag=True):
    """The number of pushes that each unit of a GetVersions contains."""

    counts: list[int]


class PutState(msgspec.Struct, tag=True):
    """Replace the optimizer states of units: `states[i]` is the new state of `units[i]`."""

    units: list[int]
    states: list[StatePart]


class SetTorn(msgspec.Struct, tag=True):
    """Mark units as torn, because a worker begins to overwrite their values, or as whole, because it has finished.

    If a failure leaves a unit torn, its values must be loaded from a checkpoint.
    """

    units: list[int]
    torn: bool


class TakeSnapshot(msgspec.Struct, tag=True):
    """Make a snapshot of values and states of units, and keep it under a number.

    The server answers with Snapshotted.
    """

    number: int
    units: list[int]


class Snapshotted(msgspec.Struct, tag=True):
    """The units in a new snapshot."""

    # for each unit: its round, the optimizer's step, and the dtypes of its state arrays
    units: list[tuple[int, int, list[str]]]


class ReadSnapshot(msgspec.Struct, tag=True):
    """Ask for elements [start, stop) of a unit's values (slot -1) or of a state array. The server answers with Bytes.

    `number` is the number of the snapshot.
    """

    number: int
    unit: int
    slot: int
    start: int
    stop: int


class Bytes(msgspec.Struct, tag=True):
    """Elements of an array, as bytes."""

    data: bytes


class DropSnapshot(msgspec.Struct, tag=True):
    """Drop the snapshot with this number."""

    number: int


class RequestDone(msgspec.Struct, tag=True):
    """The request has been carried out."""


Request = (
    Create
    | Forget
    | Flush
    | OpenStore
    | SetOptimizer
    | UpdateOptimizer
    | SetCompression
    | GetState
    | PutState
    | SetTorn
    | TakeSnapshot
    | ReadSnapshot
    | DropSnapshot
    | GetVersions
)
Answer = Created | StatePart | Snapshotted | Bytes | Versions | RequestDone

# requests that change a setting for all workers
Change = SetOptimizer | UpdateOptimizer | SetCompression

encode = msgspec.msgpack.Encoder().encode
decode_request = msgspec.msgpack.Decoder(Request).decode
decode_answer = msgspec.msgpack.Decoder(Answer).decode


def request_decoder(others: Iterable[Any]) -> Callable[[memoryview], Any]:
    """Return a function that decodes the requests of the store and of its services.

    Args:
        others: For each service, the type of its requests, which may be a union of types.
    """
    return msgspec.msgpack.Decoder(functools.reduce(operator.or_, others, Request)).decode


def arrange(cards: Sequence[UnitCard], itemsizes: Sequence[int]) -> tuple[list[int], int]:
    """Lay out the values of units in one piece of memory. Return each unit's offset and the total size, in bytes.

    Each unit begins on a cache line.
    """
    values, byte = [], 0
    for card, itemsize in zip(cards, itemsizes, strict=True):
        values.append(byte)
        byte += -(-(card.stop - card.start) * itemsize // 64) * 64
    return values, max(byte, 64)


def arrange_words(cards: Sequence[UnitCard]) -> tuple[list[int], int]:
    """Lay out the words of units in one region. Return the index of each unit's first word, and the number of words.

    Words are 8-byte counters that show workers how far a server has progressed. A unit has one progress word, and one
    word for each contributor. Each unit begins on a cache line.
    """
    words, word = [], 0
    for card in cards:
        words.append(word)
        word += -(-(1 + len(card.contributors)) // 8) * 8
    return words, word


def dtype_of(name: str) -> np.dtype:
    """Return the dtype with this name. For bfloat16 and similar dtypes import the package ml_dtypes."""
    try:
        return np.dtype(name)
    except TypeError:
        import ml_dtypes

        return np.dtype(getattr(ml_dtypes, name))
