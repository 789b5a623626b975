"""The words between workers and servers: a 64-byte frame for everything, typed bodies (msgspec) for rare things.

A frame tells an operation, a unit, a round and where the payload lies: a region of node-shared memory (pid, fd, inode,
offset, nbytes) between processes of one node. Between nodes only its nbytes count, and the payload follows as
messages. Nothing is pickled.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from mpips.collectives.fabric.arena import Region

FRAME_BYTES = 64
FRAME = struct.Struct("<BBHiIIiiQQQqq")
assert FRAME.size == FRAME_BYTES
ROUND = struct.Struct("<q")
ROUND_AT = FRAME_BYTES - ROUND.size
"""Where `round` lies in a frame; all before it is the same in pushes of one region."""
NOWHERE = Region(0, 0, 0, 0, 0)
ALONG = 1
"""Flag of a PUSH whose payload follows at once."""
REFUSED, NO_MEMORY = 1, 2
"""Flags of an ANSWER that is a sentence: why a server does not do what it is asked, as there is no memory or else."""


class Op(IntEnum):
    """Operations that a frame asks for or tells. Worker to server first, then server to worker."""

    PUSH = 1
    """A contribution to a round of a unit; the payload is a region, or messages."""
    PULL = 3
    """Wants to read a unit after `round` of its own pushes."""
    RELEASE = 4
    """Has read the unit that was granted."""
    SET = 5
    """The first value of a unit, from another node: `aux` messages follow, of `nbytes` each but for the last."""
    CONTROL = 6
    """A typed body, and `aux` bytes of rows and ids in front of it; the server answers with ANSWER."""
    BYE = 7
    """The worker has finished; a server of another node answers with the same."""
    PULL_ROWS = 8
    """PULL of some rows, whose numbers (int64) are the body; between nodes."""
    WAITS = 9
    """The worker has waited long for `round` of the unit."""
    MEETS = 11
    """The worker waits for all workers, and pushes nothing until all do; stores with `staleness` or `quorum`."""
    HOLD = 10
    """Wants the unit to stay as it is once it holds `round` pushes, until RELEASE; asynchronous stores."""
    CONSUMED = 16
    """The contribution to this round has been read: the worker may overwrite it. (Between nodes; else a word tells.)
    Round 0: the first value is there."""
    CREDIT = 17
    """Send block `aux` of the contribution to this round."""
    GRANT = 18
    """The unit may be read now; it does not change until RELEASE. Between nodes its blocks follow as messages."""
    WARNING = 20
    """A round has waited for long; the body is the sentence."""
    ANSWER = 21
    """The typed answer to a CONTROL. flags: 1 where it is an error."""

    HELD = 22
    """The unit holds `round` pushes, and stays as it is until RELEASE."""


WITH_BODY = frozenset({Op.CONTROL, Op.PULL_ROWS, Op.WARNING, Op.ANSWER})
"""What is always followed by a body."""


class Coding(IntEnum):
    """Codings of a payload (the `coding` of a frame)."""

    PLAIN = 0
    """The elements, all there."""
    GROWING = 1
    """The elements, being filled block by block, as `outbox` lays them out."""
    COMPRESSED = 2
    """What the compressor of the store made of them."""
    ROWS = 3
    """Row numbers (int64, `aux` of them), then their values."""
    NOTHING = 4
    """No payload: the push counts as a round only."""


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
        """Return the fields of a packed frame."""
        return cls._make(FRAME.unpack(data))

    @property
    def region(self) -> tuple[int, ...]:
        """Return where the payload lies, as fields of `arena.Region`."""
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
    """Regions of new units of one server: one with the words of all (`arrange_words`), and one of values for each."""

    words: tuple[int, ...]
    values: list[tuple[int, ...]]


class Forget(msgspec.Struct, tag=True):
    """Units that nobody will use again."""

    units: list[int]


class Flush(msgspec.Struct, tag=True):
    """Answered when all that was pushed before has been applied, but for what `staleness` holds back. That is nothing
    where all workers have said MEETS before."""


class OpenStore(msgspec.Struct, tag=True):
    """One more store with these servers; sent by every worker. Answered before the server joins in making it, which is
    collective over all ranks."""

    kind: str
    options: dict[str, str | int | float | bool]


class SetOptimizer(msgspec.Struct, tag=True):
    """The optimizer (`mpips.optimizers.encode`) of these keys, of all where None, from now on. State begins anew."""

    optimizer: bytes
    keys: list[int | str] | None = None


class UpdateOptimizer(msgspec.Struct, tag=True):
    """Other numbers (`mpips.optimizers.encode_numbers`) of these keys' optimizers, of all where None, from the next
    round on. State is kept."""

    numbers: bytes
    keys: list[int | str] | None = None


class SetCompression(msgspec.Struct, tag=True):
    """The compressor of contributions from now on (`mpips.compression.create`)."""

    options: dict[str, str | int | float]


class GetState(msgspec.Struct, tag=True):
    """Ask for the optimizer's state of a unit: answered with StatePart."""

    unit: int


class StatePart(msgspec.Struct, tag=True):
    """The optimizer's state of a unit: its step and its arrays, as bytes in their dtype."""

    step: int
    dtypes: list[str]
    arrays: list[bytes]


class GetVersions(msgspec.Struct, tag=True):
    """Ask how many pushes units of an asynchronous store hold: answered with Versions, at once."""

    units: list[int]


class Versions(msgspec.Struct, tag=True):
    """The numbers of pushes that the units of a GetVersions hold."""

    counts: list[int]


class PutState(msgspec.Struct, tag=True):
    """Replace the optimizer's state of units, of each by one of `states`."""

    units: list[int]
    states: list[StatePart]


class SetTorn(msgspec.Struct, tag=True):
    """Values of these units are about to be overwritten, or all of them have been (not `torn`)."""

    units: list[int]
    torn: bool


class TakeSnapshot(msgspec.Struct, tag=True):
    """Freeze values and states of units under a number; answered with Snapshotted."""

    number: int
    units: list[int]


class Snapshotted(msgspec.Struct, tag=True):
    """For each unit that was frozen: its round, the optimizer's step, and the dtypes of its state arrays."""

    units: list[tuple[int, int, list[str]]]


class ReadSnapshot(msgspec.Struct, tag=True):
    """Elements [start, stop) of a frozen unit's values (slot -1) or of state array `slot`; answered with Bytes."""

    number: int
    unit: int
    slot: int
    start: int
    stop: int


class Bytes(msgspec.Struct, tag=True):
    """Elements of an array, as bytes in its dtype."""

    data: bytes


class DropSnapshot(msgspec.Struct, tag=True):
    """Let what was frozen under this number go."""

    number: int


class MakeTable(msgspec.Struct, tag=True):
    """A new table: rows of `dim` values of a dtype, their first values, and their optimizer by name and numbers.

    Rows that no update has named for `evict` updates are dropped, and those longest not named where all servers
    together have more than `limit`; 0: none. An id gets a row with the update that is the `seen`-th to name it, or by
    `chance`; `seen` above 0: the table of counts has been made."""

    table: str
    dim: int
    dtype: str
    key: int
    bound: float
    optimizer: str
    numbers: bytes
    evict: int = 0
    limit: int = 0
    seen: int = 0
    chance: float = 1.0


class UpdateTable(msgspec.Struct, tag=True):
    """Other numbers of a table's optimizer, from the next update on. State is kept."""

    table: str
    numbers: bytes


class PushRows(msgspec.Struct, tag=True):
    """A worker's contribution to the next round of a table: gradients of so many ids, each once, then the ids.

    Answered with RoomGranted once the one before it has been applied: then the worker may overwrite that. `refusals`:
    how many refused rounds the worker has heard of; where there were more, the answer is RoundRefused."""

    table: str
    count: int
    refusals: int = 0


class AskForRoom(msgspec.Struct, tag=True):
    """Ask for memory for rows of the next push's ids: RoomGranted once `round` own pushes count, or RoundRefused."""

    table: str
    round: int
    ids: bytes
    refusals: int = 0


TableRound = tuple[str, int, int]
"""The name of a table, a round of it, and which refusal it is that drops this, from 1 on."""


class RefuseRound(msgspec.Struct, tag=True):
    """Drop all pushes of a table that are not applied yet, from this round on, as a server has no memory for it.

    `refusals`: so many rounds were refused by then. Servers tell all who wait, `why`, or have pushed to it. `step`:
    what is dropped together, this round among it."""

    table: str
    round: int
    refusals: int
    why: str
    step: list[TableRound] = []


class WaitForTable(msgspec.Struct, tag=True):
    """Say that the worker has waited long for `round` of a table. Nothing is answered."""

    table: str
    round: int
    refusals: int = 0


class PullRows(msgspec.Struct, tag=True):
    """Ask for rows of so many ids, each once, after `round` of the worker's own pushes. `shared`: in front of the ids
    there is room, where the server writes the rows before it answers; else they are the answer, Bytes."""

    table: str
    round: int
    count: int
    shared: bool
    refusals: int = 0


class LocateTable(msgspec.Struct, tag=True):
    """Ask where a worker of the node reads rows of a table in place: answered with TablePlaces."""

    table: str


class TablePlaces(msgspec.Struct, tag=True):
    """The region of a server's sparse file, the offsets of a table's arrays there, and for how many rows they are."""

    file: tuple[int, ...]
    places: dict[str, int]
    capacity: int


class FreezeTables(msgspec.Struct, tag=True):
    """Freeze the rows of tables under a number that updates after `since` have named: answered with FrozenTables.

    `export`: of so many updates, with the ids of rows dropped after `since`; those of later ones are kept for the next.
    """

    number: int
    tables: list[str]
    since: int = 0
    export: int = -1


class FrozenTable(msgspec.Struct, array_like=True):
    """A table that was frozen, on one server: its rows, which lie before position `top`, and the updates made."""

    rows: int
    top: int
    updates: int


class FrozenTables(msgspec.Struct, tag=True):
    """The tables of a FreezeTables, in their order."""

    tables: list[FrozenTable]


class ReadTable(msgspec.Struct, tag=True):
    """Ask for the frozen rows that lie at [start, stop) on this server; what lies before was read. Answer: PutRows.

    `arrays`: which; all where empty."""

    number: int
    table: str
    start: int
    stop: int
    arrays: list[str] = []


class ReadDropped(msgspec.Struct, tag=True):
    """Ask for the ids of a frozen table that were dropped: answered with Bytes."""

    number: int
    table: str


class ThawTables(msgspec.Struct, tag=True):
    """Let the rows that were frozen under this number go."""

    number: int


class ResetTable(msgspec.Struct, tag=True):
    """Forget all rows of a table, which counts so many updates from now on."""

    table: str
    updates: int


class EndLoad(msgspec.Struct, tag=True):
    """All rows of a table that was reset have been put."""

    table: str


class PutRows(msgspec.Struct, tag=True):
    """Set rows of a table: all its arrays by name, as bytes."""

    table: str
    arrays: dict[str, bytes]


class GetTableStats(msgspec.Struct, tag=True):
    """Ask what a table holds on this server after `round` of the worker's own pushes: answered with TableStats."""

    table: str
    round: int = 0
    refusals: int = 0


class TableStats(msgspec.Struct, tag=True):
    """A table on one server: rows, the position before which they lie, and their bytes with state and index.

    Then updates made, rows dropped, gradients of ids that got no row, and exports from which the next may go on."""

    rows: int
    top: int
    nbytes: int
    updates: int
    evicted: int
    refused: int
    exports: list[int]


class RoomGranted(msgspec.Struct, tag=True):
    """Say how many ids the worker may push next without asking for room."""

    ids: int


class RoundRefused(msgspec.Struct, tag=True):
    """Say that a round of a table does not count, and why; `refusals`: which refusal that is, from 1 on. `step`: what
    is dropped with it and itself; nothing yet where the answer is to AskForRoom."""

    round: int
    refusals: int
    why: str
    step: list[TableRound] = []


class RequestDone(msgspec.Struct, tag=True):
    """It has been done."""


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
    | MakeTable
    | PushRows
    | PullRows
    | UpdateTable
    | GetTableStats
    | FreezeTables
    | ReadTable
    | ReadDropped
    | ThawTables
    | ResetTable
    | PutRows
    | EndLoad
    | AskForRoom
    | RefuseRound
    | LocateTable
    | WaitForTable
)
Answer = (
    Created
    | StatePart
    | Snapshotted
    | Bytes
    | Versions
    | TableStats
    | FrozenTables
    | PutRows
    | RequestDone
    | RoomGranted
    | RoundRefused
    | TablePlaces
)

TableRequest = (
    MakeTable
    | UpdateTable
    | PushRows
    | PullRows
    | GetTableStats
    | FreezeTables
    | ReadTable
    | ReadDropped
    | ThawTables
    | ResetTable
    | PutRows
    | EndLoad
    | AskForRoom
    | RefuseRound
    | LocateTable
    | WaitForTable
)
"""What a worker asks of tables, which have rounds of their own."""

Change = SetOptimizer | UpdateOptimizer | SetCompression
"""What workers set for all of them."""

encode = msgspec.msgpack.Encoder().encode
decode_request = msgspec.msgpack.Decoder(Request).decode
decode_answer = msgspec.msgpack.Decoder(Answer).decode


def ids_in(payload: NDArray[np.uint8], count: int, row_bytes: int) -> NDArray[np.int64]:
    """Return so many ids that stand behind their rows."""
    return payload[ids_at(count, row_bytes) :][: 8 * count].view(np.int64)


def ids_at(count: int, row_bytes: int) -> int:
    """Return how many bytes behind the beginning of so many rows their ids stand."""
    return -(-count * row_bytes // 8) * 8


def arrange(cards: Sequence[UnitCard], itemsizes: Sequence[int]) -> tuple[list[int], int]:
    """Return where values of units lie in memory for all of them: the first byte of each, and bytes in all. They start
    on cache lines."""
    values, byte = [], 0
    for card, itemsize in zip(cards, itemsizes, strict=True):
        values.append(byte)
        byte += -(-(card.stop - card.start) * itemsize // 64) * 64
    return values, max(byte, 64)


def arrange_words(cards: Sequence[UnitCard]) -> tuple[list[int], int]:
    """Return where words of units lie in their region: the first of each, and words in all. A unit has one word of
    progress and one per contributor; they start on cache lines."""
    words, word = [], 0
    for card in cards:
        words.append(word)
        word += -(-(1 + len(card.contributors)) // 8) * 8
    return words, word


def dtype_of(name: str) -> np.dtype:
    """Return the dtype of that name; bfloat16 and its like need the package ml_dtypes."""
    try:
        return np.dtype(name)
    except TypeError:
        import ml_dtypes

        return np.dtype(getattr(ml_dtypes, name))
