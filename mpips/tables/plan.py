"""Plan where the rows of tables come from after a death: which memory has them, at which rounds, and who reads them.

A table is whole if some memory has the rows of every server. The rounds of the servers differ by at most one, and each
server can go back by one round. So all servers can restore a common round.

If the number of servers stays the same, each server keeps its rows, and a new server takes the rows of the dead one
from memory that outlives the dead process (see `journal`). Otherwise each server takes the rows that now belong to it
from the memory of all former servers (see `mover`).

The rows of a server are in its own memory, and perhaps also in the memory of its *mirror*, another server that keeps a
copy. Each *memory* has a number. The number of a server's own memory is the server's rank in the last generation. The
number of the copies that a rank keeps as a mirror is `recovery.plan.copies_of(rank)`.
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

# an empty list, encoded
NOTHING = msgspec.msgpack.encode([])


class RowsCopy(msgspec.Struct, array_like=True):
    """One server's rows of a table in one memory, and the rounds that can be restored from there.

    Attributes:
        owner: The server that the rows belonged to, by its rank in the last generation.
        memory: The number of the memory that has the rows.
        rounds: The rounds that can be restored, newest first.
        torn: True if no whole round can be restored.
        pushes: The number of pushes of each worker that the newest round contains.
    """

    table: str
    owner: int
    memory: int
    rounds: list[RowsRound]
    torn: bool
    pushes: list[int]


class TableEntry(msgspec.Struct, array_like=True):
    """The place of a table in the sparse file of a server, for processes that read the table after the server's death.

    Attributes:
        card: The description of the table.
        places: Name of an array -> its offset in the file.
        capacity: Number of rows for which each array has addresses.
        workers: Number of workers whose pushes the journal counts.
    """

    card: MakeTable
    places: dict[str, int]
    capacity: int
    workers: int


class RowSource(NamedTuple):
    """A memory from which a server takes rows.

    Attributes:
        owner: The server that had the rows, by its rank in the last generation.
        memory: The number of the memory that has the rows.
        holder: A rank that can map this memory.
        sent: True if the holder sends the rows in messages. False if the server reads them itself.
    """

    owner: int
    memory: int
    holder: int
    sent: bool


class TablePlan(NamedTuple):
    """A table in the next generation.

    Attributes:
        torn: True if no whole round of the table can be restored.
        pushes: The number of pushes of each worker that the table contains.
        rounds: Rank of a server in the last generation -> the round of its rows. The rounds differ only in an
            asynchronous store.
        counts: Numbers of dropped rows and of refused gradients, in the order of `RowsRound`, summed over all servers.
            Only the first server of the next generation gets them.
        sources: Rank of a server -> the memories from which it takes its rows. None if the server keeps its own rows.
        time: Time of the last update.
    """

    card: MakeTable
    round: int
    updates: int
    torn: bool
    pushes: list[int]
    rounds: Mapping[int, int]
    counts: tuple[int, ...]
    sources: Mapping[int, list[RowSource] | None] = {}
    time: int = 0


# rank of a server in the last generation -> the copy of its rows of one table that the recovery uses
Owners = Mapping[int, RowsCopy]


def describe_rows(name: str, journal: Journal, owner: int, memory: int) -> RowsCopy:
    """Describe one server's rows of a table, from the journal of the rows."""
    rounds = journal.available_rounds()
    return RowsCopy(name, owner, memory, rounds, journal.torn, journal.pushes_in(rounds[0].round))


def attached(file: SparseFile, entry: TableEntry) -> Journal:
    """Open the journal of a table whose server has died."""
    return Journal.attached(file, entry.places, arrays_of(entry.card), entry.capacity, entry.workers)


def in_common(owners: Owners, counts: Owners) -> dict[int, RowsCopy]:
    """Return the copies of a table, limited to rounds that its table of counts can also restore.

    A result is torn if the copy of the table or that of the counts is torn.
    """
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
        """All tables except the hidden tables of counts."""
        counts = names_of_counts(self.cards)
        return [table for table in self.tables if table.card.table not in counts]

    def rounds_of(self, rank: int) -> dict[Name, int]:
        """Return table -> round. On a worker the number is that of its own pushes that the table contains."""
        return {
            table.card.table: table.pushes[rank] if rank < len(table.pushes) else table.round
            for table in self._known_to_users
        }

    @property
    def torn(self) -> list[Name]:
        return [table.card.table for table in self._known_to_users if table.torn]


def names_of_counts(cards: Iterable[MakeTable]) -> set[str]:
    """Return the names of the hidden tables of counts that belong to these tables."""
    return {card.table_of_counts for card in cards if card.seen}


class FoundTables:
    """The tables that all former workers know, and the memories in which some rank has found their rows.

    Implements `FoundService`. A table is lost if for at least one server no memory has its rows. `lost` does not name
    tables of counts, because users do not know of them.
    """

    def __init__(
        self, layout: Layout, known: Sequence[bytes | None], held: Sequence[bytes], mapped: Sequence[Collection[int]]
    ) -> None:
        self._layout = layout
        self._mapped = mapped
        lists = [msgspec.msgpack.decode(data or NOTHING, type=list[MakeTable]) for data in known if data is not None]
        names = [{card.table for card in cards} for cards in lists]
        # the cards of the first worker, for tables that all workers know
        self._cards = [card for card in lists[0] if all(card.table in each for each in names)] if lists else []
        copies = [msgspec.msgpack.decode(data or NOTHING, type=list[RowsCopy]) for data in held]
        self._owners = owners_of_tables(self._cards, [copy for each in copies for copy in each])
        # memory -> a rank that has described it, and so can read it
        self._holders = {copy.memory: rank for rank, each in enumerate(copies) for copy in each}
        servers = layout.num_servers if layout.before is None else layout.before.num_servers
        lost = {name for name, owners in self._owners.items() if len(owners) < servers}
        self.rounds: dict[Name, list[int]] = {
            name: [] if name in lost else rounds_of(owners) for name, owners in self._owners.items()
        }
        self.lost: list[Name] = [name for name in self._owners if name in lost - names_of_counts(self._cards)]

    def plan(self, rounds: Mapping[Name, int]) -> TablesPlan:
        """Plan all tables at these rounds, with the memories from which each server takes rows."""
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
    """Choose the copy to use, for each of these tables and each server of the last generation.

    A server completes a round first in a table of counts and then in its table. So only rounds that both can restore
    are used.
    """
    tables: dict[str, dict[int, RowsCopy]] = {card.table: {} for card in cards}
    for copy in copies:
        if (owners := tables.get(copy.table)) is not None:
            known = owners.get(copy.owner, copy)
            # Prefer the server's own memory to that of a mirror. Among equals, prefer a newer round.
            owners[copy.owner] = max(known, copy, key=lambda each: (each.memory == each.owner, each.rounds[0]))
    for card in cards:
        if counts := card.table_of_counts:
            tables[card.table] = tables[counts] = in_common(tables[card.table], tables[counts])
    return tables


def rounds_of(owners: Owners) -> list[int]:
    """Return the rounds of a table that all servers can restore, oldest first."""
    return sorted(set.intersection(*({available.round for available in copy.rounds} for copy in owners.values())))


def plan_table(layout: Layout, card: MakeTable, owners: Owners, round_: int | None) -> TablePlan:
    """Plan a table at a round that all servers can restore. If `round_` is None, use each server's newest round."""
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
    counts = tuple(sum(numbers) for numbers in zip(*(available[2:-1] for available in restored)))
    time = max(available.time for available in restored)
    return TablePlan(card, chosen, updates, torn, pushes, rounds, counts, time=time)


def sources_of(
    layout: Layout,
    rank: int,
    owners: Owners,
    mapped: Collection[int],
    holders: Mapping[int, int],
) -> list[RowSource] | None:
    """Return the memories from which the server `rank` takes its rows of a table. Return None if it keeps its own rows.

    Args:
        owners: The copy of the table to use for each former server.
        mapped: The memories that this server can map.
        holders: Memory -> a rank that can read it and has described it.
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
