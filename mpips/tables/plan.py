"""Plan where rows come from after a death: which memory has them, at which rounds, and which rank copies them.

A table is whole if the rows of every server can be found. Servers differ by one round at most, and each can go back by
one round, so there is a round that all of them can restore.

If as many servers go on as there were before, each keeps its rows, and a new server takes those of the dead one from
memory that outlives it (see `journal`). Otherwise each server takes the rows that now belong to it from all servers'
memory (see `mover`).

Rows of a server are in its own memory, or in its mirror's. A *memory* has a number: the server's rank in the last
generation, or `recovery.plan.copies_of(rank)` for what a rank keeps as a mirror.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from mpips.collectives.fabric.arena import SparseFile
from mpips.store.keys.key import Name
from mpips.store.roles import Layout
from mpips.tables.journal import Journal, RowsRound
from mpips.tables.messages import MakeTable
from mpips.tables.rows import arrays_of

# an empty list
NOTHING = msgspec.msgpack.encode([])


class RowsCopy(msgspec.Struct, array_like=True):
    """One server's rows of a table in one memory, and the rounds that can be restored from there.

    Attributes:
        owner: The server that the rows belong to, by its rank in the last generation.
        memory: The owner's own memory, or its mirror's.
        rounds: Newest first.
        torn: No whole round can be restored.
        pushes: Number of pushes of each worker in the newest round.
    """

    table: str
    owner: int
    memory: int
    rounds: list[RowsRound]
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
        memory: The memory they are in.
        holder: A rank that can map this memory.
        sent: The holder sends them in messages. False: the server reads them itself.
    """

    owner: int
    memory: int
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


# server of the last generation, by its rank then -> the copy of its rows of one table that is used
Owners = Mapping[int, RowsCopy]


def describe_rows(name: str, journal: Journal, owner: int, memory: int) -> RowsCopy:
    """Describe a server's rows of a table from their journal."""
    rounds = journal.available_rounds()
    return RowsCopy(name, owner, memory, rounds, journal.torn, journal.pushes_in(rounds[0].round))


def attached(file: SparseFile, entry: TableEntry) -> Journal:
    """Open the journal of a table whose server has died."""
    return Journal.attached(file, entry.places, arrays_of(entry.card), entry.capacity, entry.workers)


def in_common(owners: Owners, counts: Owners) -> dict[int, RowsCopy]:
    """Restrict the copies of a table to rounds that its counts of ids have too. They are torn if either is."""
    found = {}
    for owner in owners.keys() & counts.keys():
        rows, ids = owners[owner], counts[owner]
        both = {available.round for available in ids.rounds}
        rounds = [available for available in rows.rounds if available.round in both]
        torn = rows.torn or ids.torn or not rounds
        found[owner] = RowsCopy(rows.table, owner, rows.memory, rounds or rows.rounds, torn, rows.pushes)
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
    return {card.table_of_counts for card in cards if card.seen}


class FoundTables:
    """What all ranks together hold of the tables that all former workers know (`FoundService`).

    A table is lost if a server's rows are nowhere. Tables of counts are not named as lost, because users do not know
    them.
    """

    def __init__(
        self, layout: Layout, known: Sequence[bytes | None], held: Sequence[bytes], mapped: Sequence[Collection[int]]
    ) -> None:
        self._layout = layout
        self._mapped = mapped
        lists = [msgspec.msgpack.decode(data or NOTHING, type=list[MakeTable]) for data in known if data is not None]
        names = [{card.table for card in cards} for cards in lists]
        # as the first of the workers knows them
        self._cards = [card for card in lists[0] if all(card.table in each for each in names)] if lists else []
        copies = [msgspec.msgpack.decode(data or NOTHING, type=list[RowsCopy]) for data in held]
        self._owners = owners_of_tables(self._cards, [copy for each in copies for copy in each])
        # memory -> the rank that has described it
        self._holders = {copy.memory: rank for rank, each in enumerate(copies) for copy in each}
        servers = layout.num_servers if layout.before is None else layout.before.num_servers
        lost = {name for name, owners in self._owners.items() if len(owners) < servers}
        self.rounds: dict[Name, list[int]] = {
            name: [] if name in lost else rounds_of(owners) for name, owners in self._owners.items()
        }
        self.lost: list[Name] = [name for name in self._owners if name in lost - names_of_counts(self._cards)]

    def plan(self, rounds: Mapping[Name, int]) -> TablesPlan:
        """Plan all tables at these rounds, and where each server takes rows from."""
        layout, plans = self._layout, []
        for card in self._cards:
            owners = self._owners[card.table]
            sources = {
                rank: sources_of(layout, rank, owners, self._mapped[rank], self._holders)
                for rank in map(layout.server_rank, range(layout.num_servers))
            }
            plans.append(plan_table(layout, card, owners, rounds.get(card.table))._replace(sources=sources))
        return TablesPlan(plans)


def owners_of_tables(cards: Sequence[MakeTable], copies: Iterable[RowsCopy]) -> dict[str, dict[int, RowsCopy]]:
    """For each of these tables and each server of the last generation, choose the copy to use.

    A table and its counts of ids complete a round one after the other, so only rounds that both have are kept.
    """
    tables: dict[str, dict[int, RowsCopy]] = {card.table: {} for card in cards}
    for copy in copies:
        if (owners := tables.get(copy.table)) is not None:
            known = owners.get(copy.owner, copy)
            # A server's own memory is better than a mirror's, then a newer round than an older one.
            owners[copy.owner] = max(known, copy, key=lambda each: (each.memory == each.owner, each.rounds[0]))
    for card in cards:
        if counts := card.table_of_counts:
            tables[card.table] = tables[counts] = in_common(tables[card.table], tables[counts])
    return tables


def rounds_of(owners: Owners) -> list[int]:
    """Return the rounds at which all servers can restore a table, oldest first."""
    return sorted(set.intersection(*({available.round for available in copy.rounds} for copy in owners.values())))


def plan_table(layout: Layout, card: MakeTable, owners: Owners, round_: int | None) -> TablePlan:
    """Plan a table at a round that all servers can restore. `round_` None: at each server's newest round."""
    newest = max(copy.rounds[0].round for copy in owners.values())
    chosen = newest if round_ is None else round_
    restored = [next(available for available in copy.rounds if available.round <= chosen) for copy in owners.values()]
    updates = max(available.updates for available in restored)
    torn = any(copy.torn for copy in owners.values()) or (round_ is None and not layout.asynchronous)
    pushes = [chosen] * layout.num_workers
    if layout.asynchronous:
        most = [max(counts) for counts in zip(*(copy.pushes for copy in owners.values()))]
        slowest = min(most, default=0)
        places = range(layout.num_workers) if layout.before is None else layout.before.places
        pushes = [most[place] if 0 <= place < len(most) else slowest for place in places]
    rounds = {owner: min(chosen, copy.rounds[0].round) for owner, copy in owners.items()}
    counts = sum(available.dropped for available in restored), sum(available.refused for available in restored)
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
        owners: The copy of the table to use for each former server.
        mapped: The memories that this server can map.
        holders: Memory -> the rank that can read it and has described it.
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
    memories = [(owner, owners[owner].memory) for owner in wanted]
    return [
        RowSource(owner, memory, holders[memory], holders[memory] != rank and memory not in mapped)
        for owner, memory in memories
    ]
