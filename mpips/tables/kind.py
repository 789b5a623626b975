"""Register tables as a kind of service of a store (`store.server.service`).

A *service* is anything that servers keep besides keys. The functions of this module find tables in a server's old
memory after a death.
"""

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
    """Encode descriptions of all rows that this rank can read after a death.

    These are the rows of this server itself, the rows of dead servers on this node, and the copies that this server
    keeps as a mirror of other servers.
    """
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
    """Return table -> journal, for all tables of a server whose memory this rank has mapped."""
    file, data = old.read(rank)
    entries = msgspec.msgpack.decode(data or NOTHING, type=list[TableEntry])
    return {entry.card.table: attached(file, entry) for entry in entries}


def _journal(old: OldMemory, source: RowSource, table: str) -> Journal:
    """Return the journal of a table's rows in the memory of `source`. The caller must not change the journal."""
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
