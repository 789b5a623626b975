"""Tables in files: in the checkpoints of a store, and one in a file of its own (`Table.save`, `Table.load`).

Rank 0 reads rows that the servers keep as they were at one moment, piece by piece, or gives them rows anew. A table
has a tensor for each of its arrays: `ids`, `values`, `touched` (the update that has named the row last), and what the
optimizer keeps: `state0`, `state1`, `counts`. Rows stand in any order, and belong to servers by their ids, so any
number of servers may read them. Counts of ids without a row are a table of their own; in the file of one table the
names of its tensors begin with `seen_`.

`export` writes `ids` and `values` for programs that serve, and the ids of rows that were dropped.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple, Protocol

import msgspec
import numpy as np

from collectives.errors import CollectiveError, of_caller, warn
from collectives.fabric.tasks import Task
from mpips.store.checkpoint.file import TableRecord, Tensor, TensorFile, Writer, file_name, open_writer, why
from mpips.store.keys.key import Array
from mpips.store.runtime.rendezvous import Items, attempt
from mpips.store.tables.admission import COUNTS
from mpips.store.worker.interface import FrozenRows, KnownTable, Tables
from mpips.store.worker.settings import Settings

WORD = "mpips.table"
"""The word of the metadata that says of what table a file is."""
COUNTS_WORD, COUNTS_PREFIX = "mpips.table.seen", "seen_"
"""Those of its counts of ids without a row."""
EXPORT_WORD = "mpips.export"
PIECE_BYTES = 1 << 20
LOADED_BYTES = 1 << 22


Fit = tuple[dict[str, TableRecord], TensorFile]
"""What is in a file, by the prefix of its tensors, and the file."""


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


def restore(tables: Tables, parts: Mapping[str, TableRecord], file: Readable) -> Task[None]:
    """Give the servers the rows of a file in the place of those that a table and its counts have. For rank 0.

    `parts`: by the prefix of their tensors. Until all rows have come both are torn: neither goes on without the other.
    """
    for record in parts.values():
        yield from tables.reset(record.card.table, record.updates)
    for prefix, record in parts.items():
        names = [name for name, _ in record.tensors("")]
        step = max(1, LOADED_BYTES // _row_bytes(record))
        for start in range(0, record.rows, step):
            piece = slice(start, start + step)
            yield from tables.put_rows(record.card.table, {name: file.get(prefix + name, piece) for name in names})
    for record in parts.values():
        yield from tables.end_load(record.card.table)


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
        writer, unfit = attempt(lambda: open_writer(name) if name and settings.layout.rank == 0 else None)
        if writer is not None:
            stack.callback(writer.abandon)
        meet(settings, what, [("path", name or "")], table, refusal or unfit)
        tables, counts = settings.backend.tables, _counts_of(settings, table)
        assert tables is not None
        settings.run(what, tables.at_rank_0(lambda: _written(tables, table, counts, writer), what))


def load(settings: Settings, table: KnownTable, path: object) -> None:
    """Read a table from a file. Collective; see `Table.load`."""
    what = f"load of table {table.name!r}"
    with contextlib.ExitStack() as stack:
        name, refusal = attempt(lambda: file_name(what, "path", path))
        tables, counts = settings.backend.tables, _counts_of(settings, table)
        fit, unfit = attempt(
            lambda: _fitting(table, counts, what, name, stack) if name and not settings.layout.rank else None
        )
        meet(settings, what, [("path", name or "")], table, refusal or unfit)
        assert tables is not None
        table.note_load()
        settings.run(what, tables.at_rank_0(lambda: _loaded(tables, table, fit), what))


def meet(
    settings: Settings, what: str, items: Items, table: KnownTable, refusal: BaseException | None
) -> None:  # fmt: skip
    """All workers come with the same arguments; ValueError on all where, in rounds, one has pushed more often."""
    settings.finish()
    settings.hear_refusals(what)
    told = settings.agree(what, items, refusal, noun="argument", data=b"%d" % table.round)
    for rank, theirs in enumerate(told):
        if theirs != told[0] and not settings.layout.asynchronous:
            raise of_caller(ValueError(
                f"{what}: rank 0 has pushed {int(told[0])} times and rank {rank} {int(theirs)}: call it after the same "
                "step"
            ))  # fmt: skip


def _counts_of(settings: Settings, table: KnownTable) -> KnownTable | None:
    """Return the table that counts ids which have no row yet."""
    return settings.tables[table.name + COUNTS] if table.card.seen else None


def _written(tables: Tables, table: KnownTable, counts: KnownTable | None, writer: Writer | None) -> Task[bytes]:
    assert writer is not None
    parts = [(WORD, "", table)] + ([] if counts is None else [(COUNTS_WORD, COUNTS_PREFIX, counts)])
    frozen = yield from tables.freeze([one.name for _, _, one in parts])
    records = [(word, prefix, record_of(one, frozen)) for word, prefix, one in parts]
    tensors = {name: tensor for _, prefix, record in records for name, tensor in record.tensors(prefix)}
    writer.begin(tensors, {word: msgspec.json.encode(record).decode() for word, _, record in records})
    for _, prefix, record in records:
        for piece in pieces(record, prefix, frozen):
            for name, values in (yield from read(frozen, piece)):
                writer.append(name, values)
    yield from frozen.release()
    _finish(writer)
    return b""


def _finish(writer: Writer) -> None:
    try:
        writer.finish()
    except OSError as error:
        raise ValueError(f"{writer.path} cannot be written: {why(error)}") from error


def _fitting(
    table: KnownTable, counts: KnownTable | None, what: str, path: str, stack: contextlib.ExitStack
) -> Fit:  # fmt: skip
    """Return the file, and of what table it is; ValueError where it is damaged, or of another table."""
    file = stack.enter_context(TensorFile(path))
    if WORD not in file.metadata:
        raise ValueError(f"{what}: {path} was not written by save of a table")
    try:
        records = {
            prefix: msgspec.json.decode(file.metadata[word], type=TableRecord)
            for word, prefix in ((WORD, ""), (COUNTS_WORD, COUNTS_PREFIX)) if word in file.metadata
        }  # fmt: skip
    except msgspec.MsgspecError as error:
        raise ValueError(f"{path} has a header of a table that cannot be read: {error}") from error
    see_fit(what, path, records[""], table)
    if (theirs := records[""].card.table) != table.name:
        warn(f"{what}: {path} holds table {theirs!r}, whose rows this table has from now on")
    file.see_sums(())
    if file.tensors != {name: tensor for prefix, record in records.items() for name, tensor in record.tensors(prefix)}:
        raise ValueError(f"{path} holds {sorted(file.tensors)}, and not what its header promises: save it anew")
    fit = {"": msgspec.structs.replace(records[""], card=table.card)}
    if counts is not None:
        none = TableRecord(counts.card, 0, records[""].updates)
        fit[COUNTS_PREFIX] = msgspec.structs.replace(records.get(COUNTS_PREFIX, none), card=counts.card)
    return fit, file


def _loaded(tables: Tables, table: KnownTable, fit: Fit | None) -> Task[bytes]:
    assert fit is not None
    records, file = fit
    try:
        yield from restore(tables, records, file)
    except ValueError as error:  # some rows are gone by now
        if isinstance(error, CollectiveError):
            raise
        raise CollectiveError(f"table {table.name!r} is loaded in part: {error}") from error
    return b""


# ---- for programs that serve


class _Export(msgspec.Struct):
    """Say of what an export is: rows changed by updates after `since`, all where it is 0, up to `updates`."""

    table: str
    dim: int
    dtype: str
    updates: int
    since: int


def export(settings: Settings, table: KnownTable, path: object, given: Callable[[], int]) -> int:
    """Write rows for programs that serve. Collective; see `Table.export`. `given`: returns `since`, or refuses it."""
    what = f"export of table {table.name!r}"
    with contextlib.ExitStack() as stack:
        name, refusal = attempt(lambda: file_name(what, "path", path))
        since, wrong = attempt(given)
        writer, unfit = attempt(lambda: open_writer(name) if name and settings.layout.rank == 0 else None)
        if writer is not None:
            stack.callback(writer.abandon)
        items = [("path", name or ""), ("since", str(since or None))]
        meet(settings, what, items, table, refusal or wrong or unfit)
        tables = settings.backend.tables
        assert tables is not None and since is not None
        done = settings.run(what, tables.at_rank_0(lambda: _exported(tables, table, what, writer, since), what))
        return int(done)


def _exported(tables: Tables, table: KnownTable, what: str, writer: Writer | None, since: int) -> Task[bytes]:
    assert writer is not None
    stats = yield from tables.stats(table)
    updates = min(part.updates for part in stats)
    if since and not all(since in part.exports for part in stats):
        raise ValueError(
            f"{what}: since={since} is no export of these rows, or more were dropped since then than are kept: give "
            "what the last one has returned, or export all rows (since=None)"
        )
    card, names = table.card, ["ids", "values"]
    frozen = yield from tables.freeze([table.name], since, updates)
    dropped = []
    for server in range(len(stats)):
        dropped.append(np.frombuffer((yield from frozen.dropped(table.name, server)), np.int64))
    parts = frozen.parts[table.name]
    count = sum(part.rows for part in parts)
    header = _Export(table.name, card.dim, card.dtype, updates, since)
    tensors = {"ids": Tensor(np.dtype(np.int64), (count,)), "values": Tensor(np.dtype(card.dtype), (count, card.dim)),
               "dropped": Tensor(np.dtype(np.int64), (sum(map(len, dropped)),))}  # fmt: skip
    writer.begin(tensors, {EXPORT_WORD: msgspec.json.encode(header).decode()})
    writer.append("dropped", np.concatenate(dropped))
    step = max(1, PIECE_BYTES // (8 + tensors["values"].dtype.itemsize * card.dim))
    for server, part in enumerate(parts):
        for start in range(0, part.top, step):
            arrays = yield from frozen.read(table.name, server, start, start + step, names)
            for name in names:
                writer.append(name, np.frombuffer(arrays[name], tensors[name].dtype))
    yield from frozen.release()
    _finish(writer)
    return b"%d" % updates
