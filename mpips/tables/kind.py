"""Tables as a kind of service of a store (`store.server.service`): for workers, servers, mirrors and recoveries."""

from __future__ import annotations

from functools import partial

import msgspec

from mpips.store.recovery.plan import copies_of
from mpips.store.roles import Layout
from mpips.store.server.service import OldMemory, ServiceKind
from mpips.tables.files import TableRecord
from mpips.tables.journal import Journal
from mpips.tables.mirror import MirroredTables
from mpips.tables.mover import RowMover
from mpips.tables.plan import NOTHING, FoundTables, RowSource, TableEntry, TablesPlan, attached, describe_rows
from mpips.tables.service import ServerTables
from mpips.tables.worker import WorkerTables


def _describe(old: OldMemory) -> bytes:
    """Describe this server's own rows, those of dead servers, and the copies that it keeps, encoded."""
    copies = [] if old.service is None else old.service.describe()
    for rank in old.described:
        for name, journal in _journals(old, rank).items():
            copies.append(describe_rows(name, journal, rank, rank))
    if old.copies is not None:
        copies += old.copies.describe(old.before.num_workers, old.before.num_servers, copies_of(old.rank))
    return msgspec.msgpack.encode(copies) if copies else b""


def _move(plan: TablesPlan, layout: Layout, old: OldMemory, service: ServerTables | None) -> RowMover:
    return RowMover(plan.tables, layout.world, partial(_journal, old), service)


def _decode_records(data: bytes) -> list[TableRecord]:
    return msgspec.json.decode(data, type=list[TableRecord])


def _journals(old: OldMemory, rank: int) -> dict[str, Journal]:
    """Open the journals of the tables of a server whose memory is mapped."""
    file, data = old.read(rank)
    entries = msgspec.msgpack.decode(data or NOTHING, type=list[TableEntry])
    return {entry.card.table: attached(file, entry) for entry in entries}


def _journal(old: OldMemory, source: RowSource, table: str) -> Journal:
    """Return the journal of a server's rows of a table. The caller must not change it."""
    journal: Journal
    if source.memory < 0:
        journal = old.copies.journal(table, source.owner - old.before.num_workers, old.before.num_servers)
    elif source.memory == old.rank:
        journal = old.service.journal(table)
    else:
        journal = _journals(old, source.memory)[table]
    return journal


TABLES = ServiceKind(
    ServerTables.name, WorkerTables, _decode_records, ServerTables.of, MirroredTables, _describe, FoundTables, _move
)
