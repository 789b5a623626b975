"""The messages between workers and servers that concern tables: rows, rounds with room for them, and files."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from mpips.store.transport.frames import Bytes, RequestDone

# suffix of the name of a hidden table that counts updates
COUNTS = "/seen"
# dtypes of values
DTYPES = ("float32", "float64")


class TableOptions(NamedTuple):
    """The arguments of `KVStore.table` besides the name: as a program gives them, or checked and in plain form."""

    dim: Any
    dtype: Any
    init: Any
    optimizer: Any
    seed: Any
    admit: Any
    evict: Any
    limit: Any


class MakeTable(msgspec.Struct, tag=True):
    """Make a table: rows of `dim` values of a dtype, the rule of their first values, and their optimizer.

    `key` and `bound` give the first values. A row is dropped when `evict` updates have not named it (0: never). If all
    servers together have more than `limit` rows, those not named for longest are dropped (0: no limit). An id gets a
    row with the `seen`-th update that names it, or with probability `chance`. With `seen` above 0, the table that
    counts ids must have been made before.
    """

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

    @property
    def table_of_counts(self) -> str:
        """The hidden table that counts the updates that name an id without a row; "" if there is none."""
        return self.table + COUNTS if self.seen else ""


class UpdateTable(msgspec.Struct, tag=True):
    """Change hyperparameters of a table's optimizer from the next update on. The optimizer's state is kept."""

    table: str
    numbers: bytes


class PushRows(msgspec.Struct, tag=True):
    """A worker's contribution to the next round of a table: gradients of `count` different ids, then the ids.

    Answered with RoomGranted once the worker's previous push has been applied, so that the worker may overwrite the
    arrays of that push. `refusals` is the number of refused rounds that the worker knows of. If there were more, the
    answer is RoundRefused.
    """

    table: str
    count: int
    refusals: int = 0


class AskForRoom(msgspec.Struct, tag=True):
    """Ask for memory for rows of the next push.

    Answered with RoomGranted once `round` own pushes count, or RoundRefused.
    """

    table: str
    round: int
    ids: bytes
    refusals: int = 0


# name of a table, a round of it, and the number of the refusal that drops this round, from 1 on
TableRound = tuple[str, int, int]


class RefuseRound(msgspec.Struct, tag=True):
    """Drop all pushes of a table from this round on that are not applied yet, because a server has no memory for it.

    Servers tell the workers that wait for the round, or have pushed to it, the reason `why`. `refusals` is the number
    of refused rounds, including this one. `step` lists the rounds that are dropped together, this one among them.
    """

    table: str
    round: int
    refusals: int
    why: str
    step: list[TableRound] = []


class WaitForTable(msgspec.Struct, tag=True):
    """Note that the worker has waited long for `round` of a table. Not answered."""

    table: str
    round: int
    refusals: int = 0


class PullRows(msgspec.Struct, tag=True):
    """Ask for rows of `count` different ids after `round` of the worker's own pushes.

    With `shared` there is room in front of the ids, and the server writes the rows there before it answers. Otherwise
    the rows are the answer, Bytes.
    """

    table: str
    round: int
    count: int
    shared: bool
    refusals: int = 0


class LocateTable(msgspec.Struct, tag=True):
    """Ask where a worker of the node can read rows of a table in place. Answered with TablePlaces."""

    table: str


class TablePlaces(msgspec.Struct, tag=True):
    """The region of a server's sparse file, the offsets of a table's arrays in it, and their capacity in rows."""

    file: tuple[int, ...]
    places: dict[str, int]
    capacity: int


class FreezeTables(msgspec.Struct, tag=True):
    """Freeze, under a number, the rows of tables that updates after `since` have named. Answered with FrozenTables.

    `export` is the number of updates that an export contains. It also gets the ids of rows that were dropped after
    `since`; ids dropped later are kept for the next export. -1: this is no export.
    """

    number: int
    tables: list[str]
    since: int = 0
    export: int = -1


class FrozenTable(msgspec.Struct, array_like=True):
    """A frozen table on one server: the number of its rows, which lie before position `top`, and of updates made."""

    rows: int
    top: int
    updates: int


class FrozenTables(msgspec.Struct, tag=True):
    """The tables of a FreezeTables, in the same order."""

    tables: list[FrozenTable]


class ReadTable(msgspec.Struct, tag=True):
    """Ask for the frozen rows at [start, stop) on this server. Earlier ones must have been read. Answered with PutRows.

    `arrays` names the arrays to send. Empty: all.
    """

    number: int
    table: str
    start: int
    stop: int
    arrays: list[str] = []


class ReadDropped(msgspec.Struct, tag=True):
    """Ask for the ids of a frozen table that were dropped. Answered with Bytes."""

    number: int
    table: str


class ThawTables(msgspec.Struct, tag=True):
    """Drop what was frozen under this number."""

    number: int


class ResetTable(msgspec.Struct, tag=True):
    """Forget all rows of a table, and set its number of updates."""

    table: str
    updates: int


class EndLoad(msgspec.Struct, tag=True):
    """Note that all rows of a table have been put after a ResetTable."""

    table: str


class PutRows(msgspec.Struct, tag=True):
    """Set rows of a table. `arrays` maps the name of each array of the table to the new rows' part of it, as bytes."""

    table: str
    arrays: dict[str, bytes]


class GetTableStats(msgspec.Struct, tag=True):
    """Ask for a table's figures on this server after `round` of the worker's own pushes. Answered with TableStats."""

    table: str
    round: int = 0
    refusals: int = 0


class TableStats(msgspec.Struct, tag=True):
    """A table's figures on one server.

    `rows` lie before position `top`. `nbytes` includes state and index. `updates` were made, and `evicted` rows
    dropped. `refused` gradients belonged to ids that got no row. The next export may be relative to any of `exports`.
    """

    rows: int
    top: int
    nbytes: int
    updates: int
    evicted: int
    refused: int
    exports: list[int]


class RoomGranted(msgspec.Struct, tag=True):
    """The number of new ids that the worker may push next without asking for room."""

    ids: int


class RoundRefused(msgspec.Struct, tag=True):
    """A round of a table that does not count, and the reason `why`.

    `refusals` is the number of this refusal, from 1 on. `step` lists the rounds that are dropped together. It is empty
    in an answer to AskForRoom.
    """

    round: int
    refusals: int
    why: str
    step: list[TableRound] = []


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
TableAnswer = TableStats | FrozenTables | PutRows | RoomGranted | RoundRefused | TablePlaces | Bytes | RequestDone

decode_answer = msgspec.msgpack.Decoder(TableAnswer).decode


def ids_in(payload: NDArray[np.uint8], count: int, row_bytes: int) -> NDArray[np.int64]:
    """Return the `count` ids that follow their rows in a payload."""
    return payload[ids_at(count, row_bytes) :][: 8 * count].view(np.int64)


def ids_at(count: int, row_bytes: int) -> int:
    """Return where the ids begin behind `count` rows, in bytes."""
    return -(-count * row_bytes // 8) * 8
