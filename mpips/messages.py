"""What workers and servers say to each other: a 64-byte frame for everything, typed bodies (msgspec) for rare things.

A frame tells an operation, a unit, a round and where the payload lies: a region of node-shared memory (pid, fd, inode,
offset, nbytes) between processes of one node; between nodes only its nbytes count, and the payload follows as
messages. Nothing is pickled.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

import msgspec
import numpy as np

FRAME_BYTES = 64
FRAME = struct.Struct("<BBHiIIiiQQQqq")
assert FRAME.size == FRAME_BYTES
ROUND = struct.Struct("<q")
ROUND_AT = FRAME_BYTES - ROUND.size  # where `round` lies in a frame; all before it is the same in pushes of one region


class Op(IntEnum):
    """What a frame asks for or tells. Worker to server first, then server to worker."""

    PUSH = 1
    """Contribution to a round of a unit; the payload is a region, or messages."""
    REFUSE = 2
    """The worker cannot contribute to this round, or withdraws what it has contributed; the body is the sentence."""
    PULL = 3
    """Wants to read a unit after `round` of its own pushes."""
    RELEASE = 4
    """Has read the unit that was granted, or waits for its grant no more; that comes all the same."""
    SET = 5
    """The first value of a unit; like PUSH."""
    CONTROL = 6
    """A typed body; the server answers with ANSWER."""
    BYE = 7
    """The worker has finished; a server of another node answers with the same."""
    PULL_ROWS = 8
    """PULL of some rows, whose numbers (int64) are the body; between nodes."""
    CONSUMED = 16
    """The contribution to this round has been read: the worker may overwrite it. (Between nodes; else a word tells.)"""
    CREDIT = 17
    """Send block `aux` of the contribution to this round."""
    GRANT = 18
    """The unit may be read now; it does not change until RELEASE. Between nodes its blocks follow as messages."""
    FAILED = 19
    """A round has failed; the body is the sentence. flags: 1 where a wait took too long."""
    WARNING = 20
    """A round waits for long; the body is the sentence."""
    ANSWER = 21
    """The typed answer to a CONTROL. flags: 1 where it is an error."""


class Coding(IntEnum):
    """How a payload is to be read (the `coding` of a frame)."""

    PLAIN = 0
    """The elements, all there."""
    GROWING = 1
    """The elements, being filled block by block, as `mpips.outbox` lays them out."""
    COMPRESSED = 2
    """What the compressor of the store made of them."""
    ROWS = 3
    """Row numbers (int64, `aux` of them), then their values."""


class Frame(NamedTuple):
    """One frame, unpacked."""

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
        """The fields of a packed frame."""
        return cls._make(FRAME.unpack(data))

    @property
    def region(self) -> tuple[int, ...]:
        """Where the payload lies, as fields of `arena.Region`."""
        return self[6:11]


class UnitCard(msgspec.Struct, array_like=True):
    """A unit as the server is told of it."""

    number: int
    key: int | str
    dtype: str
    start: int
    stop: int
    row_elements: int
    block_elements: int
    contributors: tuple[int, ...]


class Create(msgspec.Struct, tag=True):
    """New units; answered with Created once their memory is there."""

    units: list[UnitCard]


class Created(msgspec.Struct, tag=True):
    """Where the new units of one server lie: a region of words and a region of values, see `arrange`."""

    words: tuple[int, ...]
    values: tuple[int, ...]


class Forget(msgspec.Struct, tag=True):
    """Units that nobody will use again."""

    units: list[int]


class Flush(msgspec.Struct, tag=True):
    """Answered when all that was pushed before has been applied, but for what staleness holds back."""


class SetOptimizer(msgspec.Struct, tag=True):
    """The optimizer of all units from now on (`mpips.optimizers.encode`)."""

    optimizer: bytes


class SetCompression(msgspec.Struct, tag=True):
    """How compressed contributions are to be read (`mpips.compression.create`)."""

    options: dict[str, str | int | float]


class GetState(msgspec.Struct, tag=True):
    """Ask for the optimizer's state of a unit: answered with StatePart."""

    unit: int


class StatePart(msgspec.Struct, tag=True):
    """The optimizer's state of a unit: its step and its arrays, as bytes in their dtype."""

    step: int
    dtypes: list[str]
    arrays: list[bytes]


class PutState(msgspec.Struct, tag=True):
    """Replace the optimizer's state of a unit."""

    unit: int
    state: StatePart


class Done(msgspec.Struct, tag=True):
    """It has been done."""


Request = Create | Forget | Flush | SetOptimizer | SetCompression | GetState | PutState
Answer = Created | StatePart | Done

encode = msgspec.msgpack.Encoder().encode
decode_request = msgspec.msgpack.Decoder(Request).decode
decode_answer = msgspec.msgpack.Decoder(Answer).decode


def arrange(cards: list[UnitCard], itemsizes: list[int]) -> tuple[list[int], int, list[int], int]:
    """Where units lie in their regions: (first word of each, words in all, first byte of each, bytes in all).

    A unit has one word of progress and one word per contributor; words and values start on cache lines.
    """
    words, values, word, byte = [], [], 0, 0
    for card, itemsize in zip(cards, itemsizes, strict=True):
        words.append(word)
        values.append(byte)
        word += -(-(1 + len(card.contributors)) // 8) * 8
        byte += -(-(card.stop - card.start) * itemsize // 64) * 64
    return words, word, values, max(byte, 64)


def dtype_of(name: str) -> np.dtype:
    """The dtype of that name; bfloat16 and its like need the package ml_dtypes."""
    try:
        return np.dtype(name)
    except TypeError:
        import ml_dtypes

        return np.dtype(getattr(ml_dtypes, name))
