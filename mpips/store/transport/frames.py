"""The messages between workers and servers: a 64-byte frame for everything, typed bodies (msgspec) for rare things.

A frame gives an operation, a unit, a round and the place of the payload. Between processes of one node the place is a
region of shared memory (pid, fd, inode, offset, nbytes). Between nodes only its nbytes count, and the payload follows
as messages. Nothing is pickled.
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
# where `round` lies in a frame; everything before it is the same in all pushes of one region
ROUND_AT = FRAME_BYTES - ROUND.size
NOWHERE = Region(0, 0, 0, 0, 0)
# flag of a PUSH whose payload follows at once
ALONG = 1
# flags of an ANSWER that is an error message: the server refuses the request, or has no memory for it
REFUSED, NO_MEMORY = 1, 2


class Op(IntEnum):
    """The operation of a frame. First those from a worker to a server, then those from a server to a worker."""

    # A contribution to a round of a unit. The payload is a region, or follows as messages.
    PUSH = 1
    # The worker wants to read a unit after `round` of its own pushes.
    PULL = 3
    # The worker has read the unit that was granted or held.
    RELEASE = 4
    # The first value of a unit, from another node: `aux` messages follow, each of `nbytes`, the last one perhaps
    # shorter.
    SET = 5
    # A request: a typed body, with `aux` bytes of rows and ids in front of it. The server answers with ANSWER.
    CONTROL = 6
    # The worker has finished. A server of another node answers with the same.
    BYE = 7
    # PULL of some rows, between nodes. The body has their numbers (int64).
    PULL_ROWS = 8
    # The worker has waited long for `round` of the unit.
    WAITS = 9
    # The worker is in a barrier, and pushes nothing until all workers are. In stores with `staleness` or `quorum`.
    MEETS = 11
    # The worker wants the unit to stay unchanged, from the moment it has `round` pushes in it until RELEASE. In
    # asynchronous stores.
    HOLD = 10
    # The contribution to this round has been read, so the worker may overwrite it. Only sent between nodes; on a node
    # the worker reads a counter in shared memory instead. Round 0: the first value has arrived.
    CONSUMED = 16
    # The server is ready to receive block `aux` of the worker's contribution to this round.
    CREDIT = 17
    # The unit may be read now, and does not change until RELEASE. Between nodes its blocks follow as messages.
    GRANT = 18
    # A round has waited for long. The body is the text of a warning.
    WARNING = 20
    # The answer to a CONTROL. Its body is typed, or with the flag REFUSED or NO_MEMORY an error message.
    ANSWER = 21

    # The unit has `round` pushes in it, and does not change until RELEASE.
    HELD = 22


# operations that are always followed by a body
WITH_BODY = frozenset({Op.CONTROL, Op.PULL_ROWS, Op.WARNING, Op.ANSWER})


class Coding(IntEnum):
    """The coding of a payload."""

    # the elements, complete
    PLAIN = 0
    # the elements in an `outbox`, which is being filled block by block
    GROWING = 1
    # the elements, encoded by the store's compressor
    COMPRESSED = 2
    # row numbers (int64), then the values of these rows
    ROWS = 3
    # no payload: the push only counts as a round
    NOTHING = 4


class Frame(NamedTuple):
    """A frame, unpacked."""

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
    """The description of a unit, for its server."""

    number: int
    key: int | str
    dtype: str
    start: int
    stop: int
    row_elements: int
    block_elements: int
    contributors: tuple[int, ...]


class Create(msgspec.Struct, tag=True):
    """Make units. Answered with Created once their memory is there."""

    units: list[UnitCard]


class Created(msgspec.Struct, tag=True):
    """Where one server keeps new units: a region of words for all (`arrange_words`), and one of values for each."""

    words: tuple[int, ...]
    values: list[tuple[int, ...]]


class Forget(msgspec.Struct, tag=True):
    """Forget units that nobody will use again."""

    units: list[int]


class Flush(msgspec.Struct, tag=True):
    """Answered when everything pushed before has been applied, except what `staleness` holds back.

    If all workers have said MEETS before, nothing is held back.
    """


class OpenStore(msgspec.Struct, tag=True):
    """Make another store with these servers. Sent by every worker.

    Answered before the server joins in making it, which is collective over all ranks.
    """

    kind: str
    options: dict[str, str | int | float | bool]


class SetOptimizer(msgspec.Struct, tag=True):
    """Use this optimizer (`mpips.optimizers.encode`) for these keys (None: all) from now on, with new state."""

    optimizer: bytes
    keys: list[int | str] | None = None


class UpdateOptimizer(msgspec.Struct, tag=True):
    """Change hyperparameters of these keys' optimizers (None: of all keys) from the next round on.

    `numbers` comes from `mpips.optimizers.encode_numbers`. The optimizers' state is kept.
    """

    numbers: bytes
    keys: list[int | str] | None = None


class SetCompression(msgspec.Struct, tag=True):
    """Decode contributions with this compressor from now on. `options` are those of `mpips.compression.create`."""

    options: dict[str, str | int | float]


class GetState(msgspec.Struct, tag=True):
    """Ask for the optimizer state of a unit. Answered with StatePart."""

    unit: int


class StatePart(msgspec.Struct, tag=True):
    """The optimizer state of a unit: its step and its arrays, as bytes in their dtypes."""

    step: int
    dtypes: list[str]
    arrays: list[bytes]


class GetVersions(msgspec.Struct, tag=True):
    """Ask how many pushes units of an asynchronous store have in them. Answered with Versions, at once."""

    units: list[int]


class Versions(msgspec.Struct, tag=True):
    """The number of pushes in each unit of a GetVersions."""

    counts: list[int]


class PutState(msgspec.Struct, tag=True):
    """Replace the optimizer state of each unit by the one of `states` at the same index."""

    units: list[int]
    states: list[StatePart]


class SetTorn(msgspec.Struct, tag=True):
    """Note that values of units are about to be overwritten (`torn`), or that all of them have been (not `torn`)."""

    units: list[int]
    torn: bool


class TakeSnapshot(msgspec.Struct, tag=True):
    """Freeze values and states of units under a number. Answered with Snapshotted."""

    number: int
    units: list[int]


class Snapshotted(msgspec.Struct, tag=True):
    """The frozen units: for each its round, the optimizer's step, and the dtypes of its state arrays."""

    units: list[tuple[int, int, list[str]]]


class ReadSnapshot(msgspec.Struct, tag=True):
    """Ask for elements [start, stop) of a frozen unit's values (slot -1) or of a state array. Answered with Bytes."""

    number: int
    unit: int
    slot: int
    start: int
    stop: int


class Bytes(msgspec.Struct, tag=True):
    """Elements of an array, as bytes in its dtype."""

    data: bytes


class DropSnapshot(msgspec.Struct, tag=True):
    """Drop what was frozen under this number."""

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

# settings that hold for all workers
Change = SetOptimizer | UpdateOptimizer | SetCompression

encode = msgspec.msgpack.Encoder().encode
decode_request = msgspec.msgpack.Decoder(Request).decode
decode_answer = msgspec.msgpack.Decoder(Answer).decode


def request_decoder(others: Iterable[Any]) -> Callable[[memoryview], Any]:
    """Return a function that decodes the requests of the store and those of its services.

    Args:
        others: For each service the type, or the union of types, of its requests.
    """
    return msgspec.msgpack.Decoder(functools.reduce(operator.or_, others, Request)).decode


def arrange(cards: Sequence[UnitCard], itemsizes: Sequence[int]) -> tuple[list[int], int]:
    """Lay out the values of units in one piece of memory. Return the first byte of each, and the total of bytes.

    Each begins on a cache line.
    """
    values, byte = [], 0
    for card, itemsize in zip(cards, itemsizes, strict=True):
        values.append(byte)
        byte += -(-(card.stop - card.start) * itemsize // 64) * 64
    return values, max(byte, 64)


def arrange_words(cards: Sequence[UnitCard]) -> tuple[list[int], int]:
    """Lay out the words of units in one region. Return the first word of each, and the total of words.

    A unit has a progress word and a word for each contributor. Each unit begins on a cache line.
    """
    words, word = [], 0
    for card in cards:
        words.append(word)
        word += -(-(1 + len(card.contributors)) // 8) * 8
    return words, word


def dtype_of(name: str) -> np.dtype:
    """Return the dtype of a name. bfloat16 and the like need the package ml_dtypes."""
    try:
        return np.dtype(name)
    except TypeError:
        import ml_dtypes

        return np.dtype(getattr(ml_dtypes, name))
