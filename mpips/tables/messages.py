"""The messages between workers and servers about tables: rows, memory for new rows, and rows for files.

Servers may *refuse* a round of a table if they lack memory for new rows. Requests that concern a round have a field
`refusals`: the number of the table's refused rounds that the worker knows of. If servers have refused more rounds, the
answer is RoundRefused, so that the worker learns of the other refusals.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import ml_dtypes  # noqa: F401  (NumPy then knows bfloat16 by name)
import msgspec
import numpy as np
from numpy.typing import NDArray

from mpips.store.transport.frames import Bytes, RequestDone

# suffix of the name of the hidden table that counts updates of ids without a row
COUNTS = "/seen"
# dtypes of values
DTYPES = ("float16", "bfloat16", "float32", "float64")


class TableOptions(NamedTuple):
    """The arguments of `KVStore.table` except the name.

    The values are either those that the program passes, or the plain values to which `make` converts them.
    """

    dim: Any
    dtype: Any
    init: Any
    optimizer: Any
    seed: Any
    admit: Any
    evict: Any
    limit: Any
    evict_by: Any = None
    evict_after: Any = None
    rounding: Any = "nearest"


class MakeTable(msgspec.Struct, tag=True):
    """Make a table."""

    table: str
    # number of values in a row
    dim: int
    dtype: str
    # the key and the spread for the first values of rows (see `initial`)
    key: int
    bound: float
    # name and encoded hyperparameters of the optimizer
    optimizer: str
    numbers: bytes
    # Drop a row when the last `evict` updates have not named it. 0: never.
    evict: int = 0
    # If all servers together have more rows than this, drop some, in the order `evict_by`. 0: no limit.
    limit: int = 0
    # If above 0, an id gets a row with the `seen`-th update that names it. The table of counts must already exist.
    seen: int = 0
    # the probability with which an update that names an id gives the id a row
    chance: float = 1.0
    # the rows that `limit` drops first: "age" (their last update is the oldest), "count" (the fewest updates have named
    # them) or "score" (the program has given them the smallest scores)
    evict_by: str = "age"
    # Drop a row this many microseconds after its last update. 0: never.
    evict_after: int = 0
    # the rule of first values (`initial.Init`): its name, and the mean; the spread is `bound`
    init: str = "uniform"
    mean: float = 0.0
    # True if rows of float16 or bfloat16 are rounded at random (see `halves`), False if they are rounded to nearest
    stochastic: bool = False

    @property
    def table_of_counts(self) -> str:
        """The name of the hidden table that counts updates of ids without a row, or "" if the table needs none."""
        return self.table + COUNTS if self.seen else ""


class UpdateTable(msgspec.Struct, tag=True):
    """Change hyperparameters of a table's optimizer from the next update on. The optimizer keeps its state."""

    table: str
    numbers: bytes


class PushRows(msgspec.Struct, tag=True, omit_defaults=True):
    """A worker's contribution to the next round of a table: gradients of `count` different ids, then the ids.

    If the table evicts by score, a score (float64) for each id follows. The server answers with RoomGranted once the
    worker's previous push has been applied. Then the worker may overwrite the arrays of the previous push.
    """

    table: str
    count: int
    refusals: int = 0
    # True if the rows become these values, instead of being updated with these gradients
    sets: bool = False
    # time on the worker's wall clock, in microseconds since 1970; 0 if the table does not use it
    time: int = 0


class RemoveRows(msgspec.Struct, tag=True):
    """A worker's contribution to a round that removes the rows of these ids (int64, as bytes).

    The server answers as to PushRows.
    """

    table: str
    ids: bytes
    refusals: int = 0
    time: int = 0


class AskForRoom(msgspec.Struct, tag=True):
    """Ask for memory for the rows of the worker's next push, which has these ids (int64, as bytes).

    The server answers with RoomGranted or RoundRefused, once the first `round` pushes of the worker have been applied.
    """

    table: str
    round: int
    ids: bytes
    refusals: int = 0


# (name of a table, number of a refused round, number of this refusal, counted from 1)
TableRound = tuple[str, int, int]


class RefuseRound(msgspec.Struct, tag=True):
    """Drop all pushes of a table that are not applied yet, because a server lacks memory for round `round`.

    The server sends the reason `why` to the workers that wait for the round or have pushed to it. `refusals` is the
    number of refused rounds, including this one. `step` lists each pair of a table and a round that is dropped together
    with this one, including this one.
    """

    table: str
    round: int
    refusals: int
    why: str
    step: list[TableRound] = []


class WaitForTable(msgspec.Struct, tag=True):
    """Note that the worker has waited long for `round` of a table. The server does not answer."""

    table: str
    round: int
    refusals: int = 0


class PullRows(msgspec.Struct, tag=True):
    """Ask for the rows of `count` different ids, after the first `round` pushes of the worker.

    If `shared` is True, worker and server share memory. The server then writes the rows into the memory in front of the
    ids and answers with RequestDone. Otherwise it answers with Bytes, which has the rows.
    """

    table: str
    round: int
    count: int
    shared: bool
    refusals: int = 0
    # if `shared`: the offset of the rows in the payload, in bytes
    rows_at: int = 0


class PullTables(msgspec.Struct, tag=True):
    """Several pulls in one message. Their ids follow one another at the end of the payload, in the order of `pulls`.

    The server answers with TablesPulled, once each of the pulls can be answered.
    """

    pulls: list[PullRows]


class HasRows(msgspec.Struct, tag=True):
    """Ask which of these ids (int64, as bytes) have a row, after the first `round` pushes of the worker.

    The server answers with Bytes, which has one byte for each id: 1 if the id has a row.
    """

    table: str
    round: int
    ids: bytes
    refusals: int = 0


class LocateTable(msgspec.Struct, tag=True):
    """Ask for the memory in which a worker on this node can read rows of a table.

    The server answers with TablePlaces.
    """

    table: str


class TablePlaces(msgspec.Struct, tag=True):
    """The memory of a table's rows on one server."""

    # the region of the server's sparse file
    file: tuple[int, ...]
    # name of an array -> its offset in the file
    places: dict[str, int]
    # number of rows for which each array has addresses
    capacity: int


class FreezeTables(msgspec.Struct, tag=True):
    """Keep a copy of tables as they are now, under the number `number`. The server answers with FrozenTables.

    The copy has the rows that updates after `since` have named. For an export or an increment, `export` is the number
    of updates that the file will contain. The copy then also has the ids of rows that were dropped after `since`, and
    the server remembers ids dropped later for the next file. Otherwise `export` is -1.
    """

    number: int
    tables: list[str]
    since: int = 0
    export: int = -1


class FrozenTable(msgspec.Struct, array_like=True):
    """The size of a frozen table on one server."""

    # number of rows in the copy
    rows: int
    # all rows are at positions before this one
    top: int
    # number of updates of the table
    updates: int
    # time of the last update (see `RowsRound`)
    time: int = 0


class FrozenTables(msgspec.Struct, tag=True):
    """The sizes of the tables of a FreezeTables, in the order of that request."""

    tables: list[FrozenTable]


class ReadTable(msgspec.Struct, tag=True):
    """Ask for the frozen rows at positions [start, stop) on this server. The server answers with PutRows.

    Positions must be read in ascending order. `arrays` names the arrays to send; if empty, all are sent.
    """

    number: int
    table: str
    start: int
    stop: int
    arrays: list[str] = []


class ReadDropped(msgspec.Struct, tag=True):
    """Ask for the dropped ids of a frozen table. The server answers with Bytes."""

    number: int
    table: str


class ThawTables(msgspec.Struct, tag=True):
    """Drop the copies that were frozen under this number."""

    number: int


class ResetTable(msgspec.Struct, tag=True):
    """Drop all rows of a table, and set the number and the time of its updates. A load begins with this request."""

    table: str
    updates: int
    time: int = 0


class EndLoad(msgspec.Struct, tag=True):
    """Note that a load is complete: the server has all rows that follow a ResetTable."""

    table: str


class PutRows(msgspec.Struct, tag=True):
    """Set rows of a table. `arrays` has the values of these rows for each array of the table, by name, as bytes."""

    table: str
    arrays: dict[str, bytes]


class GetTableStats(msgspec.Struct, tag=True):
    """Ask for a table's figures on this server.

    The server answers with TableStats after the worker's first `round` pushes.
    """

    table: str
    round: int = 0
    refusals: int = 0


class TableStats(msgspec.Struct, tag=True):
    """A table's figures on one server."""

    # number of rows
    rows: int
    # all rows are at positions before this one
    top: int
    # memory of the rows, their optimizer state and the index, in bytes
    nbytes: int
    # number of updates
    updates: int
    # number of rows dropped by `evict`, `evict_after` and `limit`
    evicted: int
    # number of gradients that were dropped because their id got no row
    refused: int
    # numbers of updates that the next export or increment may pass as `since`
    exports: list[int]
    # the part of `evicted` that `evict_after` has dropped, and the part that `limit` has dropped
    expired: int = 0
    excess: int = 0
    # number of rows that the program has removed
    removed: int = 0


class RoomGranted(msgspec.Struct, tag=True):
    """The number of ids that the worker's next push may contain without asking for memory first."""

    ids: int


class RoundRefused(msgspec.Struct, tag=True):
    """The answer that a round of a table does not count, and the reason `why`.

    `refusals` is the number of this refusal, counted from 1. `step` lists all rounds of tables that are dropped
    together. It is empty if the server itself refuses, in its answer to AskForRoom.
    """

    round: int
    refusals: int
    why: str
    step: list[TableRound] = []


class TablesPulled(msgspec.Struct, tag=True):
    """The answers to the pulls of a PullTables, in the order of `pulls`."""

    answers: list[Bytes | RequestDone | RoundRefused]


TableRequest = (
    MakeTable
    | UpdateTable
    | PushRows
    | RemoveRows
    | PullRows
    | HasRows
    | PullTables
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
TableAnswer = (
    TableStats | FrozenTables | PutRows | RoomGranted | RoundRefused | TablePlaces | TablesPulled | Bytes | RequestDone
)

decode_answer = msgspec.msgpack.Decoder(TableAnswer).decode


def ids_in(payload: NDArray[np.uint8], count: int, row_bytes: int) -> NDArray[np.int64]:
    """Return the `count` ids in a payload. They come after `count` rows of `row_bytes` bytes."""
    return payload[ids_at(count, row_bytes) :][: 8 * count].view(np.int64)


def scores_in(payload: NDArray[np.uint8], count: int, row_bytes: int) -> NDArray[np.float64]:
    """Return the `count` scores in a payload. They come after the ids."""
    return payload[ids_at(count, row_bytes) + 8 * count :][: 8 * count].view(np.float64)


def ids_at(count: int, row_bytes: int) -> int:
    """Return the offset of the ids after `count` rows, in bytes. Ids are aligned to 8 bytes."""
    return -(-count * row_bytes // 8) * 8
