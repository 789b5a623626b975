"""Tables in files: in the checkpoints of a store, and one in a file of its own (`Table.save`, `Table.load`).

Rank 0 reads rows that the servers keep as they were at one moment, piece by piece, or gives them rows anew. A table
has a tensor for each of its arrays: `ids`, `values`, and what the optimizer keeps: `state0`, `state1`, `counts`. Rows
stand in any order, and belong to servers by their ids, so any number of servers may read them.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from collectives.errors import CollectiveError, of_caller
from collectives.fabric.tasks import Task
from mpips.store.checkpoint.file import TableRecord, TensorFile, Writer, file_name, why
from mpips.store.runtime.rendezvous import attempt
from mpips.store.worker.interface import FrozenRows, KnownTable, Tables
from mpips.store.worker.settings import Settings

Array = NDArray[Any]
WORD = "mpips.table"
"""The word of the metadata that says of what table a file is."""
PIECE_BYTES = 1 << 20
LOADED_BYTES = 1 << 22


class Readable(Protocol):
    """An open file."""

    path: str

    def get(self, name: str, rows: slice | None = None) -> Array:
        """Return rows of a tensor."""


# ---- what both kinds of files share


class RowsPiece(NamedTuple):
    """Rows that lie at [start, stop) on a server."""

    record: TableRecord
    prefix: str
    server: int
    start: int
    stop: int
    nbytes: int


def record_of(table: KnownTable, frozen: FrozenRows) -> TableRecord:
    """Return what a file says of a frozen table."""
    parts = frozen.parts[table.name]
    return TableRecord(table.card, sum(part.rows for part in parts), max(part.updates for part in parts))


def pieces(record: TableRecord, prefix: str, frozen: FrozenRows) -> Iterator[RowsPiece]:
    """Return all of a frozen table, the tensors of which have names with this prefix."""
    row_bytes = _row_bytes(record)
    step = max(1, PIECE_BYTES // row_bytes)
    for server, part in enumerate(frozen.parts[record.card.table]):
        for start in range(0, part.top, step):
            stop = min(start + step, part.top)
            yield RowsPiece(record, prefix, server, start, stop, (stop - start) * row_bytes)


def read(frozen: FrozenRows, piece: RowsPiece) -> Task[list[tuple[str, Array]]]:
    """Return what a piece adds to tensors, by their names."""
    arrays = yield from frozen.read(piece.record.card.table, piece.server, piece.start, piece.stop)
    kinds = piece.record.tensors("")
    return [(piece.prefix + name, np.frombuffer(arrays[name], tensor.dtype)) for name, tensor in kinds]


def restore(tables: Tables, record: TableRecord, file: Readable, prefix: str) -> Task[None]:
    """Give the servers the rows of a file in the place of those that the table has. For rank 0."""
    table, names = record.card.table, [name for name, _ in record.tensors("")]
    yield from tables.reset(table, record.updates)
    step = max(1, LOADED_BYTES // _row_bytes(record))
    for start in range(0, record.rows, step):
        piece = slice(start, start + step)
        yield from tables.put(table, {name: file.get(prefix + name, piece) for name in names})


def see_fit(what: str, path: str, record: TableRecord, table: KnownTable) -> None:
    """ValueError where rows of a file are not of the kind that the table has."""
    for word in ("dim", "dtype", "optimizer"):
        theirs, ours = getattr(record.card, word), getattr(table.card, word)
        if theirs != ours:
            raise ValueError(f"{what}: {path} has {word} {theirs}, and the table {ours}: make it as it was saved")


def _row_bytes(record: TableRecord) -> int:
    return sum(tensor.dtype.itemsize * math.prod(tensor.shape[1:]) for _, tensor in record.tensors(""))


# ---- one table in a file


def save(settings: Settings, table: KnownTable, path: object) -> None:
    """Write a table into a file. Collective; see `Table.save`."""
    what = f"save of table {table.name!r}"
    with contextlib.ExitStack() as stack:
        name, refusal = attempt(lambda: file_name(what, "path", path))
        writer, unfit = attempt(lambda: _opened(name) if name and settings.layout.rank == 0 else None)
        if writer is not None:
            stack.callback(writer.abandon)
        _meet(settings, what, name, table, refusal or unfit)
        tables = settings.backend.tables
        assert tables is not None
        settings.run(what, tables.at_rank_0(lambda: _written(tables, table, writer), what))


def load(settings: Settings, table: KnownTable, path: object) -> None:
    """Read a table from a file. Collective; see `Table.load`."""
    what = f"load of table {table.name!r}"
    with contextlib.ExitStack() as stack:
        name, refusal = attempt(lambda: file_name(what, "path", path))
        fit, unfit = attempt(lambda: _fitting(table, what, name, stack) if name and not settings.layout.rank else None)
        _meet(settings, what, name, table, refusal or unfit)
        tables = settings.backend.tables
        assert tables is not None
        settings.run(what, tables.at_rank_0(lambda: _loaded(tables, fit), what))


def _meet(
    settings: Settings, what: str, name: str | None, table: KnownTable, refusal: BaseException | None
) -> None:  # fmt: skip
    """All workers come with the same path; ValueError on all where, in rounds, one has pushed more often."""
    settings.finish()
    told = settings.agree(what, [("path", name or "")], refusal, noun="argument", data=b"%d" % table.round)
    for rank, theirs in enumerate(told):
        if theirs != told[0] and not settings.layout.asynchronous:
            raise of_caller(ValueError(
                f"{what}: rank 0 has pushed {int(told[0])} times and rank {rank} {int(theirs)}: call it after the same "
                "step"
            ))  # fmt: skip


def _opened(path: str) -> Writer:
    try:
        return Writer(path)
    except OSError as error:
        raise ValueError(f"{path} cannot be written: {why(error)}") from error


def _written(tables: Tables, table: KnownTable, writer: Writer | None) -> Task[bytes]:
    assert writer is not None
    frozen = yield from tables.freeze([table.name])
    record = record_of(table, frozen)
    writer.begin(dict(record.tensors("")), {WORD: msgspec.json.encode(record).decode()})
    for piece in pieces(record, "", frozen):
        for name, values in (yield from read(frozen, piece)):
            writer.append(name, values)
    yield from frozen.release()
    try:
        writer.finish()
    except OSError as error:
        raise ValueError(f"{writer.path} cannot be written: {why(error)}") from error
    return b""


def _fitting(
    table: KnownTable, what: str, path: str, stack: contextlib.ExitStack
) -> tuple[TableRecord, TensorFile]:  # fmt: skip
    """Return the file, and of what table it is; ValueError where it is damaged, or of another table."""
    file = stack.enter_context(TensorFile(path))
    if WORD not in file.metadata:
        raise ValueError(f"{what}: {path} was not written by save of a table")
    try:
        record = msgspec.json.decode(file.metadata[WORD], type=TableRecord)
    except msgspec.MsgspecError as error:
        raise ValueError(f"{path} has a header of a table that cannot be read: {error}") from error
    see_fit(what, path, record, table)
    file.see_sums(())
    if file.tensors != dict(record.tensors("")):
        raise ValueError(f"{path} holds {sorted(file.tensors)}, and not what its header promises: save it anew")
    return msgspec.structs.replace(record, card=table.card), file


def _loaded(tables: Tables, fit: tuple[TableRecord, TensorFile] | None) -> Task[bytes]:
    assert fit is not None
    try:
        yield from restore(tables, fit[0], fit[1], "")
    except ValueError as error:  # some rows are gone by now
        if isinstance(error, CollectiveError):
            raise
        raise CollectiveError(f"table {fit[0].card.table!r} is loaded in part: {error}") from error
    return b""
