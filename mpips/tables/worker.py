"""The tables of a store on a worker, as a service of the store (`worker.interface`).

A *service* is anything that servers keep besides keys. Each table is a *collection* of this service.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from mpips.collectives.fabric.tasks import Task
from mpips.store.checkpoint.file import Reader
from mpips.store.keys.key import Name
from mpips.store.remote.link import ServerLink
from mpips.store.remote.setup import Setup
from mpips.store.roles import Layout
from mpips.tables import files
from mpips.tables.client import FrozenOnServers, KnownTable, RemoteTables
from mpips.tables.files import RowsPiece, TableRecord, check_fit, part_of, record_of, table_prefix
from mpips.tables.initial import FirstValues
from mpips.tables.plan import TablesPlan


class WorkerTables:
    """All tables of a store, on one worker."""

    name = "tables"

    def __init__(self, layout: Layout, link: ServerLink, setup: Setup) -> None:
        self.client = RemoteTables(layout, link, setup)

    @property
    def collections(self) -> Mapping[str, KnownTable]:
        return self.client.known

    def refusals(self) -> bytes:
        return msgspec.msgpack.encode([table.refusals for table in self.client.known.values()])

    def learn_refusals(self, refusals: Sequence[bytes]) -> Task[None]:
        counts = [msgspec.msgpack.decode(data, type=list[int]) for data in refusals]
        for table, known in zip(self.client.known.values(), zip(*counts)):
            if table.refusals < max(known):
                # Ask the servers about the next round. They answer with the refusal, which raises RoomError.
                yield from self.client.stats(table, ahead=1)

    def tell_wait(self, names: Sequence[Name]) -> None:
        self.client.tell_wait([table for table in self.client.known.values() if table.name in names])

    def describe(self, known: Container[Name]) -> bytes:
        cards = [table.card for table in self.client.known.values() if table.name in known]
        return msgspec.msgpack.encode(cards) if cards else b""

    def renew(self) -> None:
        self.client.renew()

    def begin(self, plan: TablesPlan | None, rounds: Mapping[Name, int]) -> None:
        """Begin a generation with the tables of the plan at these rounds. `Table` objects keep their `KnownTable`."""
        before, self.client.known = self.client.known, {}
        for card in [] if plan is None else plan.cards:
            table = self.client.known[card.table] = before.get(card.table) or KnownTable(card)
            table.card, table.round = card, rounds.get(card.table, 0)
            table.refusals, table.room = 0, {}

    # ---- checkpoints

    def freeze(self) -> Task[SavedTables]:
        frozen = yield from self.client.freeze(list(self.client.known))
        return SavedTables(frozen, [record_of(table, frozen) for table in self.client.known.values()])

    def check_records(self, path: str, records: Sequence[TableRecord]) -> None:
        """Raise ValueError if a checkpoint lacks a table of the store, or if a table does not fit.

        A checkpoint that was saved without `admit=seen(...)` has no counts. Then `load` lets the table count from 0.
        """
        by_name = {record.name: record for record in records}
        for record in records:
            # This raises if the program has not registered the function of a table's first values.
            FirstValues(record.card)
        counts = {table.card.table_of_counts for table in self.client.known.values()}
        for table in self.client.known.values():
            if table.name not in by_name:
                if table.name in counts:
                    continue
                raise ValueError(f"{path} has no table {table.name!r}, which the store has: save it too, by kv.save")
            check_fit("load", path, by_name[table.name], table)

    def load(self, reader: Reader | None, records: Sequence[TableRecord]) -> Task[list[str]]:
        records = self._with_own_counts(records)
        new = [record for record in records if record.name not in self.client.known]
        for record in new:
            yield from self.client.make(record.card)
        for record in records:
            self.client.known[record.name].note_load()

        def rows() -> Task[bytes]:
            assert reader is not None
            counts = {record.card.table_of_counts for record in records}
            for card in (record.card for record in records if record.name not in counts):
                parts = {
                    table_prefix(each.name): each for each in records if each.name in (card.table, card.table_of_counts)
                }
                cards = {prefix: self.client.known[each.name].card for prefix, each in parts.items()}
                yield from files.restore(self.client, [part_of(reader, parts, cards)])
            return b""

        yield from self.client.at_rank_0(rows, "load")
        return [record.name for record in new]

    def _with_own_counts(self, records: Sequence[TableRecord]) -> list[TableRecord]:
        """Return a file's records, with a record of counts for exactly those tables that have counts in this store.

        A table that was saved without counts gets a record without rows. Counts come before their table, because
        servers make them in this order.
        """
        in_file = {record.name: record for record in records}
        counts_in_file = {record.card.table_of_counts for record in records}
        found = []
        for record in records:
            if record.name in counts_in_file:
                continue
            known = self.client.known.get(record.name)
            counts = (record if known is None else known).card.table_of_counts
            if counts in in_file:
                found.append(in_file[counts])
            elif known is not None and counts:
                found.append(TableRecord(self.client.known[counts].card, 0, record.updates, record.time))
            found.append(record)
        return found


@dataclass
class SavedTables:
    """All tables of a store as they were at one moment, for a checkpoint."""

    frozen: FrozenOnServers
    records: list[TableRecord]

    def pieces(self) -> Iterator[RowsPiece]:
        """Yield the rows of all tables in pieces, table by table."""
        for record in self.records:
            yield from files.pieces(record, table_prefix(record.name), self.frozen)

    def release(self) -> Task[None]:
        """Let the servers drop the frozen rows."""
        yield from self.frozen.release()
