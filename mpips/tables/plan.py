"""Plan where rows come from after a death: which memory has them, at which rounds, and who copies them.

A table is whole if the rows of every server can be found. Servers differ by one round at most, and each can go back by
one round, so there is a round that all of them can restore.

If as many servers go on as there were before, each keeps its rows, and a new server takes those of the dead one from
memory that outlives it (see `journal`). Otherwise each server takes the rows that now belong to it from all servers'
memory (see `transfer`).

A *shelf* is the memory that has rows: a server's own, numbered by its rank in the last generation, or what a rank keeps
as a mirror, numbered by `recovery.plan.copies_of(rank)`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from mpips.collectives.fabric.arena import SparseFile
from mpips.store.keys.key import Name
from mpips.store.roles import Layout
from mpips.store.server.service import ServiceInventory
from mpips.store.transport.frames import MakeTable
from mpips.tables import row_optimizers
from mpips.tables.admission import COUNTS
from mpips.tables.journal import Journal, Standing
from mpips.tables.rows import arrays_of

# an empty list
NOTHING = msgspec.msgpack.encode([])


class TableHolding(msgspec.Struct, array_like=True):
    """One server's rows of a table as they are on one shelf, and the rounds that can be restored from there.

    Attributes:
        owner: The server that the rows belong to, by its rank in the last generation.
        shelf: The owner's own memory, or its mirror's.
        standings: Newest round first.
        torn: No whole round can be restored.
        pushes: Number of pushes of each worker in the newest round.
    """

    table: str
    owner: int
    shelf: int
    standings: list[Standing]
    torn: bool
    pushes: list[int]


class TableEntry(msgspec.Struct, array_like=True):
    """Where a table lies in the sparse file of a server, for processes that read it after the server's death.

    Attributes:
        places: Name of an array -> its offset in the file.
        capacity: Number of rows that there are addresses for.
    """

    card: MakeTable
    places: dict[str, int]
    capacity: int
    workers: int


class RowSource(NamedTuple):
    """A place from which a server takes rows.

    Attributes:
        owner: The server that had the rows, by its rank in the last generation.
        shelf: The memory they are in.
        holder: A rank that can map this memory.
        sent: The holder sends them in messages. False: the server reads them itself.
    """

    owner: int
    shelf: int
    holder: int
    sent: bool


class TablePlan(NamedTuple):
    """A table in the next generation.

    Attributes:
        torn: No whole round of it can be restored.
        pushes: Number of pushes of each worker that are in it.
        rounds: Round of the rows of each server, by its rank in the last generation. They differ only in an
            asynchronous store.
        counts: Dropped rows and refused gradients, summed over all servers. Only the first server gets them.
        sources: Rank of a server -> where it takes its rows from; None: it keeps its own.
    """

    card: MakeTable
    round: int
    updates: int
    torn: bool
    pushes: list[int]
    rounds: Mapping[int, int]
    counts: tuple[int, int]
    sources: Mapping[int, list[RowSource] | None] = {}


# server of the last generation, by its rank then -> the holding of one table that is used for it
Owners = Mapping[int, TableHolding]


def holding_of_table(name: str, journal: Journal, owner: int, shelf: int) -> TableHolding:
    """Describe a table on a shelf from its journal."""
    standings = journal.standings()
    return TableHolding(name, owner, shelf, standings, journal.torn, journal.pushes_in(standings[0][0]))


def attached(file: SparseFile, entry: TableEntry) -> Journal:
    """Open the journal of a table whose server has died."""
    card = entry.card
    arrays = arrays_of(card.dim, np.dtype(card.dtype), row_optimizers.decode(card.optimizer, card.numbers))
    return Journal.attached(file, entry.places, arrays, entry.capacity, entry.workers)


def common_holdings(owners: Owners, counts: Owners) -> dict[int, TableHolding]:
    """Restrict the holdings of a table to rounds that its counts of ids have too. They are torn if either is."""
    found = {}
    for owner in owners.keys() & counts.keys():
        one, other = owners[owner], counts[owner]
        both = {round_ for round_, *_ in other.standings}
        standings = [standing for standing in one.standings if standing[0] in both]
        torn = one.torn or other.torn or not standings
        found[owner] = TableHolding(one.table, owner, one.shelf, standings or one.standings, torn, one.pushes)
    return found


class TablesPlan(NamedTuple):
    """All tables in the next generation (`ServicePlan`)."""

    tables: list[TablePlan]

    @property
    def cards(self) -> list[MakeTable]:
        return [table.card for table in self.tables]

    @property
    def rounds(self) -> dict[Name, int]:
        return {table.card.table: table.round for table in self.tables}

    @property
    def _known_to_users(self) -> list[TablePlan]:
        """All tables but those that count ids of others."""
        counts = names_of_counts(self.cards)
        return [table for table in self.tables if table.card.table not in counts]

    def rounds_of(self, rank: int) -> dict[Name, int]:
        """Return the round of each table; of a worker the number of its pushes that are in it."""
        return {
            table.card.table: table.pushes[rank] if rank < len(table.pushes) else table.round
            for table in self._known_to_users
        }

    @property
    def torn(self) -> list[Name]:
        return [table.card.table for table in self._known_to_users if table.torn]


def names_of_counts(cards: Iterable[MakeTable]) -> set[str]:
    """Return the names of the tables that count ids of others."""
    return {card.table + COUNTS for card in cards if card.seen}


class FoundTables:
    """What all ranks together hold of the tables that all former workers know (`FoundService`).

    A table is lost if a server's rows are nowhere. Tables of counts are not named as lost, because users do not know
    them.
    """

    def __init__(self, layout: Layout, inventories: Sequence[ServiceInventory]) -> None:
        self._layout = layout
        known = [
            msgspec.msgpack.decode(one.known or NOTHING, type=list[MakeTable])
            for one in inventories
            if one.known is not None
        ]
        names = [{card.table for card in cards} for cards in known]
        # as the first of the workers knows them
        self._cards = [card for card in known[0] if all(card.table in each for each in names)] if known else []
        held = [msgspec.msgpack.decode(one.held or NOTHING, type=list[TableHolding]) for one in inventories]
        self._owners = owners_of_tables(self._cards, [holding for holdings in held for holding in holdings])
        # shelf -> the rank that has described it
        self._holders = {holding.shelf: rank for rank, holdings in enumerate(held) for holding in holdings}
        self._mapped = [one.mapped for one in inventories]
        servers = layout.num_servers if layout.before is None else layout.before.num_servers
        self.rounds: dict[Name, list[int]] = {
            name: rounds_of(theirs) if len(theirs) == servers else [] for name, theirs in self._owners.items()
        }
        counts = names_of_counts(self._cards)
        self.lost: list[Name] = [name for name, rounds in self.rounds.items() if not rounds and name not in counts]

    def plan(self, rounds: Mapping[Name, int]) -> TablesPlan:
        """Plan all tables at these rounds, and where each server takes rows from."""
        layout, plans = self._layout, []
        for card in self._cards:
            theirs = self._owners[card.table]
            sources = {
                rank: sources_of(layout, rank, theirs, self._mapped[rank], self._holders)
                for rank in map(layout.server_rank, range(layout.num_servers))
            }
            plans.append(plan_table(layout, card, theirs, rounds.get(card.table))._replace(sources=sources))
        return TablesPlan(plans)


def owners_of_tables(
    cards: Sequence[MakeTable], holdings: Iterable[TableHolding]
) -> dict[str, dict[int, TableHolding]]:
    """For each of these tables and each server of the last generation, choose the holding to use.

    A table and its counts of ids complete a round one after the other, so only rounds that both have are kept.
    """
    found: dict[str, dict[int, TableHolding]] = {card.table: {} for card in cards}
    for holding in holdings:
        if (there := found.get(holding.table)) is None:
            continue
        known = there.get(holding.owner, holding)
        # A server's own memory is better than a mirror's, then a newer round than an older one.
        there[holding.owner] = max(known, holding, key=lambda one: (one.shelf == one.owner, one.standings[0]))
    for table in (card.table for card in cards if card.seen):
        found[table] = found[table + COUNTS] = common_holdings(found[table], found[table + COUNTS])
    return found


def rounds_of(owners: Owners) -> list[int]:
    """Return the rounds at which all servers can restore a table, oldest first."""
    return sorted(set.intersection(*({round_ for round_, *_ in one.standings} for one in owners.values())))


def plan_table(layout: Layout, card: MakeTable, owners: Owners, round_: int | None) -> TablePlan:
    """Plan a table at a round that all servers can restore. `round_` None: at each server's newest round."""
    newest = max(one.standings[0][0] for one in owners.values())
    chosen = newest if round_ is None else round_
    chosen_by = [next(it for it in one.standings if it[0] <= chosen) for one in owners.values()]
    updates = max(standing[1] for standing in chosen_by)
    torn = any(one.torn for one in owners.values()) or (round_ is None and not layout.asynchronous)
    pushes = [chosen] * layout.num_workers
    if layout.asynchronous:
        told = [max(counts) for counts in zip(*(one.pushes for one in owners.values()))]
        slowest = min(told, default=0)
        places = range(layout.num_workers) if layout.before is None else layout.before.places
        pushes = [told[place] if 0 <= place < len(told) else slowest for place in places]
    rounds = {owner: min(chosen, one.standings[0][0]) for owner, one in owners.items()}
    counts = sum(standing[2] for standing in chosen_by), sum(standing[3] for standing in chosen_by)
    return TablePlan(card, chosen, updates, torn, pushes, rounds, counts)


def sources_of(
    layout: Layout,
    rank: int,
    owners: Owners,
    mapped: Collection[int],
    holders: Mapping[int, int],
) -> list[RowSource] | None:
    """Return where the server `rank` takes the rows from that belong to it now. None: it keeps its own.

    Args:
        owners: The holding of the table to use for each former server.
        mapped: The shelves that this server can map.
        holders: Shelf -> the rank that can map it and has described it.
    """
    before = layout.before
    if before is None:
        return None
    first, count, own = before.num_workers, before.num_servers, before.origin[rank]
    wanted = range(first, first + count)
    if count == layout.num_servers:
        wanted = wanted[rank - layout.num_workers :][:1]
        if own in wanted and holders.get(own) == rank:
            return None
    shelves = [(owner, owners[owner].shelf) for owner in wanted]
    return [
        RowSource(owner, shelf, holders[shelf], holders[shelf] != rank and shelf not in mapped)
        for owner, shelf in shelves
    ]
