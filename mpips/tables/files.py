"""Write and read tables in files: in the checkpoint of a store, or one table in its own file (`Table.save` and `load`).

To save, the servers freeze the rows as they are at one moment, and rank 0 reads them piece by piece. To load, rank 0
sends rows to the servers.

A table has a tensor for each of its arrays: `ids`, `values`, `touched` (the last update that has named the row), and
`state0`, `state1` and `counts` (the optimizer's state). With `evict_by` it also has `scores`, and with `evict_after` it
has `times` (the time of the last update that has named the row). Rows are in any order. The id decides which server a
row belongs to, so a store with any number of servers can load the file.

If a table counts updates of ids without a row, the counts are a second table. In the file of a single table the tensors
of the counts have the prefix `seen_`.

An *increment* is a file that continues an earlier one. It has the rows that were changed since the earlier file, in
`dropped` the ids of rows that were dropped since then, and all counts.

`export` writes only `ids`, `values` and `dropped`, for programs that use the rows to answer requests.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import ClassVar, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from mpips.collectives.errors import CollectiveError, warn
from mpips.collectives.fabric.tasks import Task
from mpips.store.checkpoint.file import (
    Reader,
    Tensor,
    TensorFile,
    Writer,
    file_name,
    open_writer,
    why,
)
from mpips.store.keys.arguments import check_one_round
from mpips.store.keys.key import Array
from mpips.store.keys.row_sums import Ids
from mpips.store.options import MOST
from mpips.store.runtime.rendezvous import Items, attempt
from mpips.store.worker.store import WorkerStore
from mpips.tables import eviction, row_optimizers
from mpips.tables.client import FrozenOnServers, KnownTable, RemoteTables
from mpips.tables.messages import DTYPES, MakeTable, TableStats
from mpips.tables.rows import arrays_of

# metadata key of the record that describes the table
WORD = "mpips.table"
# metadata key of the record that describes the table of counts, and the prefix of the names of its tensors
COUNTS_WORD, COUNTS_PREFIX = "mpips.table.seen", "seen_"
# metadata key of a `_Part`, which tells whether the file has all rows of the table or only the recently changed ones
PART_WORD = "mpips.table.part"
EXPORT_WORD = "mpips.export"
PIECE_BYTES = 1 << 20
LOADED_BYTES = 1 << 22
NO_IDS: Ids = np.zeros(0, np.int64)


# ---- shared by both kinds of files


class TableRecord(msgspec.Struct):
    """The description of a table in the header of a file."""

    # the message that makes the table
    card: MakeTable
    # number of rows in the file
    rows: int
    # number of updates of the table when it was saved
    updates: int
    # time of the last update (see `RowsRound`)
    time: int = 0
    noun: ClassVar[str] = "table"

    @property
    def name(self) -> str:
        return self.card.table

    def tensors(self, prefix: str | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield the names and types of the table's tensors. Raises ValueError if this process lacks the optimizer.

        Args:
            prefix: The prefix of the names. None means the prefix in the checkpoint of a store.
        """
        for name, (dtype, shape) in arrays_of(self.card).items():
            yield (table_prefix(self.name) if prefix is None else prefix) + name, Tensor(dtype, (self.rows, *shape))

    def check(self, path: str) -> None:
        """Raise ValueError if a number is out of range, or if this process does not have the optimizer."""
        label, card = f"{path}: table {self.name!r}", self.card
        if card.dtype not in DTYPES:
            raise ValueError(f"{label} is of {card.dtype}, and a table holds {', '.join(DTYPES)}: save it anew")
        for word, number, least in (("dim", card.dim, 1), ("updates", self.updates, 0), ("rows", self.rows, 0)):
            if not least <= number <= MOST:
                raise ValueError(f"{label} has {word} {number}: give one in [{least}, 2**63)")
        try:
            list(self.tensors())
        except (ValueError, TypeError, msgspec.MsgspecError) as error:
            raise ValueError(f"{label}: {error}") from error


def table_prefix(table: str) -> str:
    """Return the prefix of the names of a table's tensors in the checkpoint of a store."""
    return f"table/{table}/"


class RowsPiece(NamedTuple):
    """The rows at positions [start, stop) of one server's part of a table."""

    frozen: FrozenOnServers
    record: TableRecord
    prefix: str
    server: int
    start: int
    stop: int
    nbytes: int

    def read(self) -> Task[list[tuple[str, Array]]]:
        """Read the rows from their server. Return pairs of a tensor's name and the values to append to the tensor."""
        arrays = yield from self.frozen.read(self.record.name, self.server, self.start, self.stop)
        kinds = self.record.tensors("")
        return [(self.prefix + name, np.frombuffer(arrays[name], tensor.dtype)) for name, tensor in kinds]


def record_of(table: KnownTable, frozen: FrozenOnServers) -> TableRecord:
    """Return the description of a frozen table for the header of a file."""
    parts = frozen.parts[table.name]
    rows, updates = sum(part.rows for part in parts), max(part.updates for part in parts)
    return TableRecord(table.card, rows, updates, max(part.time for part in parts))


def pieces(record: TableRecord, prefix: str, frozen: FrozenOnServers) -> Iterator[RowsPiece]:
    """Yield all rows of a frozen table, server by server, in pieces of about PIECE_BYTES.

    The names of the table's tensors in the file begin with `prefix`.
    """
    row_bytes = _row_bytes(record)
    step = max(1, PIECE_BYTES // row_bytes)
    for server, part in enumerate(frozen.parts[record.name]):
        for start in range(0, part.top, step):
            stop = min(start + step, part.top)
            yield RowsPiece(frozen, record, prefix, server, start, stop, (stop - start) * row_bytes)


class FilePart(NamedTuple):
    """The part of a load that comes from one file: the file, and the tables to read from it.

    Attributes:
        records: Prefix of the names of a table's tensors in the file -> description of the table.
        file: The open file.
        later: Sorted ids that later files contain or drop. Their rows in this file are skipped.
        absent: Names of tensors that the file lacks, because the table that was saved had other options.
    """

    records: Mapping[str, TableRecord]
    file: Reader | TensorFile
    later: Ids = NO_IDS
    absent: Collection[str] = ()


def part_of(
    file: Reader | TensorFile, records: Mapping[str, TableRecord], cards: Mapping[str, MakeTable], later: Ids = NO_IDS
) -> FilePart:
    """Return the part of a file to load into existing tables.

    Args:
        records: Prefix of the names of a table's tensors in the file -> description of the table in the file.
        cards: The same prefixes -> description of the table that exists now, which may have other options.
        later: As in `FilePart`.
    """
    absent = {
        prefix + name
        for prefix, record in records.items()
        for name in arrays_of(cards[prefix]).keys() - arrays_of(record.card).keys()
    }
    chosen = {prefix: msgspec.structs.replace(record, card=cards[prefix]) for prefix, record in records.items()}
    return FilePart(chosen, file, later, absent)


def restore(tables: RemoteTables, parts: Sequence[FilePart]) -> Task[None]:
    """Replace all rows of some tables by the rows of one or more files. Called on rank 0.

    A checkpoint of a store is one file with all its tables. A saved table is one file, and possibly increments after
    it. Such files have one table, and its table of counts if it has one.

    While rows arrive, the servers mark the tables as torn, that is, incomplete. So if a failure interrupts the load,
    the recovery does not use the incomplete tables.

    Args:
        parts: The part to read from each file, the newest file last. `records` of the last part must contain every
            table to replace, because the numbers and times of their updates are taken from the last part.
    """
    loaded = eviction.now()
    for record in parts[-1].records.values():
        time = record.time or loaded if record.card.evict_after else 0
        yield from tables.reset(record.name, record.updates, time)
    for records, file, later, absent in parts:
        for prefix, record in records.items():
            tensors = dict(record.tensors(""))
            step = max(1, LOADED_BYTES // _row_bytes(record))
            for start in range(0, record.rows, step):
                here = slice(start, min(start + step, record.rows))
                arrays = {name: file.get(prefix + name, here) for name in tensors if prefix + name not in absent}
                for name in (name for name in tensors if prefix + name in absent):
                    # If the file lacks scores, the scores of its rows begin at 0. If it lacks times, the rows count as
                    # updated now.
                    value = loaded if name == "times" else 0
                    arrays[name] = np.full(here.stop - start, value, tensors[name].dtype)
                wanted = ~_are_among(arrays["ids"], later)
                yield from tables.put_rows(record.name, {name: array[wanted] for name, array in arrays.items()})
    for record in parts[-1].records.values():
        yield from tables.end_load(record.name)


def _are_among(ids: Ids, others: Ids) -> NDArray[np.bool_]:
    """Return a mask of the ids that are also in `others`, which is sorted."""
    if not len(others):
        return np.zeros(len(ids), bool)
    return others[np.minimum(np.searchsorted(others, ids), len(others) - 1)] == ids


def check_fit(what: str, path: str, record: TableRecord, table: KnownTable) -> None:
    """Raise ValueError if the rows of a file do not fit a table, because dim, dtype, optimizer or scores differ."""
    for field in ("dim", "dtype", "optimizer", "evict_by"):
        in_file, in_table = getattr(record.card, field), getattr(table.card, field)
        if in_file != in_table and eviction.AGE not in (in_file, in_table):
            raise ValueError(f"{what}: {path} has {field} {in_file}, and the table {in_table}: make it as it was saved")
    saved, here = (row_optimizers.fixed(card.optimizer, card.numbers) for card in (record.card, table.card))
    if saved != here:
        raise ValueError(
            f"{what}: {path} has state of {record.card.optimizer} with {saved}, and the table has {here}: make it as "
            "it was saved"
        )


def _row_bytes(record: TableRecord) -> int:
    return sum(tensor.dtype.itemsize * math.prod(tensor.shape[1:]) for _, tensor in record.tensors(""))


# ---- one table in a file


class _Part(msgspec.Struct):
    """The part of a table's rows that is in a file.

    Attributes:
        since: Number of an update. The file has only rows that later updates have changed. 0 means all rows.
        updates: Number of updates of the table when the file was written.
        rows: Number of rows of the whole table when the file was written.
    """

    since: int
    updates: int
    rows: int


def save(store: WorkerStore, tables: RemoteTables, table: KnownTable, path: object, given: Callable[[], int]) -> int:
    """Write a table to a file; see `Table.save`. Collective.

    `given` checks the caller's argument `since`, and returns it or raises an error.
    """
    what = f"save of table {table.name!r}"
    counts = _counts_of(tables, table)
    return _with_writer(
        store,
        tables,
        what,
        table,
        path,
        given,
        lambda writer, since: _written(tables, table, counts, what, writer, since),
    )


def load(store: WorkerStore, tables: RemoteTables, table: KnownTable, paths: Sequence[object]) -> None:
    """Read a table from a file and its increments; see `Table.load`. Collective."""
    what = f"load of table {table.name!r}"
    with contextlib.ExitStack() as stack:
        names, refusal = attempt(lambda: [file_name(what, "path", path) for path in paths])
        counts = _counts_of(tables, table)
        parts, unfit = attempt(
            lambda: _fitting(table, counts, what, names, stack) if names and not store.layout.rank else None
        )
        meet(store, what, [("path", ", ".join(names or []))], table, refusal or unfit)
        table.note_load()
        store.run(what, tables.at_rank_0(lambda: _loaded(tables, table, parts), what))


def _with_writer(
    store: WorkerStore,
    tables: RemoteTables,
    what: str,
    table: KnownTable,
    path: object,
    given: Callable[[], int],
    write: Callable[[Writer, int], Task[bytes]],
) -> int:
    """Let rank 0 write a file of rows. Collective. Return the number of updates that `write` returns.

    Args:
        given: Checks the caller's argument `since`, and returns it or raises an error. If it raises on one worker, all
            workers raise.
        write: Called on rank 0 with the open file and `since`. Returns the number of updates, as text.
    """
    with contextlib.ExitStack() as stack:
        name, refusal = attempt(lambda: file_name(what, "path", path))
        since, wrong = attempt(given)
        opened, unfit = attempt(lambda: open_writer(name) if name and store.layout.rank == 0 else None)
        if opened is not None:
            stack.callback(opened.abandon)
        items = [("path", name or ""), ("since", str(since or None))]
        meet(store, what, items, table, refusal or wrong or unfit)
        assert since is not None

        def written() -> Task[bytes]:
            assert opened is not None
            return write(opened, since)

        return int(store.run(what, tables.at_rank_0(written, what)))


def meet(store: WorkerStore, what: str, items: Items, table: KnownTable, refusal: BaseException | None) -> None:
    """Wait for all workers and check that their arguments agree.

    If a worker has an error (`refusal`), all workers raise it. In a synchronous store all workers raise ValueError if
    one has pushed more often than another.
    """
    store.finish()
    store.agree_on_refusals(what)
    rounds = store.agree(what, items, refusal, noun="argument", data=b"%d" % table.round)
    if not store.layout.asynchronous:
        check_one_round(what, [table], [[int(round_)] for round_ in rounds])


def _counts_of(tables: RemoteTables, table: KnownTable) -> KnownTable | None:
    """Return the table that counts updates of ids without a row, or None if `table` has no such table."""
    return tables.known.get(table.card.table_of_counts)


def _written(
    tables: RemoteTables, table: KnownTable, counts: KnownTable | None, what: str, writer: Writer, since: int
) -> Task[bytes]:
    stats = yield from tables.stats(table)
    updates = _check_since(what, stats, since)
    frozen = [(WORD, "", table, (yield from tables.freeze([table.name], since, updates)))]
    if counts is not None:
        frozen.append((COUNTS_WORD, COUNTS_PREFIX, counts, (yield from tables.freeze([counts.name]))))
    records = [(word, prefix, record_of(each, rows)) for word, prefix, each, rows in frozen]
    tensors = {name: tensor for _, prefix, record in records for name, tensor in record.tensors(prefix)}
    part = _Part(since, updates, sum(server.rows for server in stats))
    metadata = {word: msgspec.json.encode(record).decode() for word, _, record in records}
    dropped = yield from _dropped(frozen[0][3], table)
    if since:
        tensors["dropped"] = Tensor(dropped.dtype, dropped.shape)
    writer.begin(tensors, {**metadata, PART_WORD: msgspec.json.encode(part).decode()})
    if since:
        writer.append("dropped", dropped)
    for (_, prefix, record), (*_, rows) in zip(records, frozen, strict=True):
        for piece in pieces(record, prefix, rows):
            for name, values in (yield from piece.read()):
                writer.append(name, values)
        yield from rows.release()
    _finish(writer)
    return b"%d" % updates


def _check_since(what: str, stats: Sequence[TableStats], since: int) -> int:
    """Return the table's number of updates.

    Raise ValueError if a server no longer knows which rows were dropped after `since`, or wrote no file at `since`.
    """
    if since and not all(since in part.exports for part in stats):
        raise ValueError(
            f"{what}: since={since}: no file of these rows was written then, or more were dropped since than are kept: "
            "give what the last one has returned, or write all rows (since=None)"
        )
    return min(part.updates for part in stats)


def _dropped(frozen: FrozenOnServers, table: KnownTable) -> Task[Ids]:
    """Return the dropped ids of a frozen table, from all servers."""
    parts = [NO_IDS]
    for server in range(len(frozen.parts[table.name])):
        parts.append(np.frombuffer((yield from frozen.dropped(table.name, server)), np.int64))
    return np.concatenate(parts)


def _finish(writer: Writer) -> None:
    try:
        writer.finish()
    except OSError as error:
        raise ValueError(f"{writer.path} cannot be written: {why(error)}") from error


def _fitting(
    table: KnownTable, counts: KnownTable | None, what: str, paths: Sequence[str], stack: contextlib.ExitStack
) -> list[FilePart]:
    """Open the files of a table. Return the part to read from each file.

    Raises ValueError if a file is damaged, does not fit the table, or does not continue the file before it.
    """
    opened = [_opened(table, what, path, stack) for path in paths]
    before: _Part | None = None
    for _, file, part in opened:
        if part.since != (0 if before is None else before.updates):
            expected = "all rows" if before is None else f"the changes since update {before.updates}"
            holds = f"the changes since update {part.since}" if part.since else "all rows"
            raise ValueError(
                f"{what}: {file.path} holds {holds}, and {expected} must come here: give the file of all rows, then "
                "every increment in its order"
            )
        before = part
    parts: list[FilePart] = []
    later, rows = NO_IDS, 0
    # Go from the last file to the first, because a file's rows are skipped if later files have their ids.
    for records, file, part in reversed(opened):
        chosen, cards = {"": records[""]}, {"": table.card}
        if counts is not None and not parts:
            none = TableRecord(counts.card, 0, records[""].updates)
            chosen[COUNTS_PREFIX], cards[COUNTS_PREFIX] = records.get(COUNTS_PREFIX, none), counts.card
        parts.insert(0, part_of(file, chosen, cards, later))
        step = PIECE_BYTES // 8
        for start in range(0, records[""].rows if len(opened) > 1 else 0, step):
            rows += int(np.count_nonzero(~_are_among(file.get("ids", slice(start, start + step)), later)))
        if part.since:
            later = np.unique(np.concatenate([later, file.get("ids"), file.get("dropped")]))
    if before is not None and len(opened) > 1 and rows != before.rows:
        raise ValueError(f"{what}: the files hold {rows} rows, and the table had {before.rows}: give those of one job")
    return parts


def _opened(
    table: KnownTable, what: str, path: str, stack: contextlib.ExitStack
) -> tuple[dict[str, TableRecord], TensorFile, _Part]:
    """Open one file of a table and check its header.

    Return a dict (prefix of tensor names -> the record of its table), the open file, and the part of the rows that the
    file has.
    """
    file = stack.enter_context(TensorFile(path))
    if WORD not in file.metadata:
        raise ValueError(f"{what}: {path} was not written by save of a table")
    try:
        records = {
            prefix: msgspec.json.decode(file.metadata[word], type=TableRecord)
            for word, prefix in ((WORD, ""), (COUNTS_WORD, COUNTS_PREFIX))
            if word in file.metadata
        }
        whole = _Part(0, records[""].updates, records[""].rows)
        part = msgspec.json.decode(file.metadata[PART_WORD], type=_Part) if PART_WORD in file.metadata else whole
    except msgspec.MsgspecError as error:
        raise ValueError(f"{path} has a header of a table that cannot be read: {error}") from error
    check_fit(what, path, records[""], table)
    if (theirs := records[""].card.table) != table.name:
        warn(f"{what}: {path} holds table {theirs!r}, whose rows this table has from now on")
    file.check_sums(())
    promised = {name: tensor for prefix, record in records.items() for name, tensor in record.tensors(prefix)}
    if part.since and "dropped" in file.tensors:
        promised["dropped"] = Tensor(np.dtype(np.int64), file.tensors["dropped"].shape[:1])
    if file.tensors != promised or ("dropped" in promised) != bool(part.since):
        raise ValueError(f"{path} holds {sorted(file.tensors)}, and not what its header promises: save it anew")
    return records, file, part


def _loaded(tables: RemoteTables, table: KnownTable, parts: Sequence[FilePart] | None) -> Task[bytes]:
    assert parts is not None
    try:
        yield from restore(tables, parts)
    except ValueError as error:
        # Some rows have been dropped, so the error must end the generation. A ValueError would not end it.
        if isinstance(error, CollectiveError):
            raise
        raise CollectiveError(f"table {table.name!r} is loaded in part: {error}") from error
    return b""


# ---- exports, for programs that serve the model


class _Export(msgspec.Struct):
    """Header of an export."""

    table: str
    dim: int
    dtype: str
    # number of updates of the table when the file was written
    updates: int
    # number of an update; the file has only the rows that later updates have changed; 0: all rows
    since: int


def export(store: WorkerStore, tables: RemoteTables, table: KnownTable, path: object, given: Callable[[], int]) -> int:
    """Write rows for programs that use them to answer requests; see `Table.export`. Collective.

    `given` checks the caller's argument `since`, and returns it or raises an error.
    """
    what = f"export of table {table.name!r}"
    return _with_writer(
        store, tables, what, table, path, given, lambda writer, since: _exported(tables, table, what, writer, since)
    )


def _exported(tables: RemoteTables, table: KnownTable, what: str, writer: Writer, since: int) -> Task[bytes]:
    stats = yield from tables.stats(table)
    updates = _check_since(what, stats, since)
    card, names = table.card, ["ids", "values"]
    frozen = yield from tables.freeze([table.name], since, updates)
    dropped = yield from _dropped(frozen, table)
    parts = frozen.parts[table.name]
    count = sum(part.rows for part in parts)
    header = _Export(table.name, card.dim, card.dtype, updates, since)
    tensors = {
        "ids": Tensor(np.dtype(np.int64), (count,)),
        "values": Tensor(np.dtype(card.dtype), (count, card.dim)),
        "dropped": Tensor(dropped.dtype, dropped.shape),
    }
    writer.begin(tensors, {EXPORT_WORD: msgspec.json.encode(header).decode()})
    writer.append("dropped", dropped)
    step = max(1, PIECE_BYTES // (8 + tensors["values"].dtype.itemsize * card.dim))
    for server, part in enumerate(parts):
        for start in range(0, part.top, step):
            arrays = yield from frozen.read(table.name, server, start, start + step, names)
            for name in names:
                writer.append(name, np.frombuffer(arrays[name], tensors[name].dtype))
    yield from frozen.release()
    _finish(writer)
    return b"%d" % updates
