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

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple, Protocol

import msgspec

from mpips.collectives.fabric.arena import SparseFile
from mpips.store.keys.key import Name
from mpips.store.roles import Layout
from mpips.tables.journal import Journal, Standing
from mpips.tables.messages import MakeTable
from mpips.tables.rows import arrays_of


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


class TableShelf(Protocol):
    """One shelf, as far as tables need it; see `recovery.plan.Shelf`."""

    @property
    def owner(self) -> int: ...
    @property
    def live(self) -> bool: ...
    @property
    def tables(self) -> Sequence[TableHolding]: ...


class TableInventory(Protocol):
    """What one rank brings into a recovery, as far as tables need it; see `recovery.plan`.

    `keys` is None on a rank that was not a worker before.
    """

    @property
    def keys(self) -> object: ...
    @property
    def tables(self) -> Sequence[MakeTable]: ...
    @property
    def mapped(self) -> Sequence[int]: ...
    @property
    def shelves(self) -> Sequence[TableShelf]: ...


# the copy of one table that each server of the last generation has, by the server's rank then
# server of the last generation, by its rank then -> the holding of one table that is used for it
Owners = Mapping[int, TableHolding]


def holding_of_table(name: str, journal: Journal, owner: int, shelf: int) -> TableHolding:
    """Describe a table on a shelf from its journal."""
    standings = journal.standings()
    return TableHolding(name, owner, shelf, standings, journal.torn, journal.pushes_in(standings[0][0]))


def attached(file: SparseFile, entry: TableEntry) -> Journal:
    """Open the journal of a table whose server has died."""
    return Journal.attached(file, entry.places, arrays_of(entry.card), entry.capacity, entry.workers)


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


def common_tables(inventories: Sequence[TableInventory]) -> list[MakeTable]:
    """Return the tables that all former workers know.

    Their cards are taken from the first of these workers.
    """
    lists = [one.tables for one in inventories if one.keys is not None]
    known = [{card.table for card in cards} for cards in lists]
    return [card for card in lists[0] if all(card.table in names for names in known)] if lists else []


def owners_of_tables(inventories: Sequence[TableInventory]) -> dict[str, dict[int, TableHolding]]:
    """For each of the common tables and each server of the last generation, choose the holding to use.

    A table and its counts of ids complete a round one after the other, so only rounds that both have are kept.
    """
    cards = common_tables(inventories)
    found: dict[str, dict[int, TableHolding]] = {card.table: {} for card in cards}
    for holding in (holding for one in inventories for shelf in one.shelves for holding in shelf.tables):
        if (there := found.get(holding.table)) is None:
            continue
        known = there.get(holding.owner, holding)
        # A server's own memory is better than a mirror's, then a newer round than an older one.
        there[holding.owner] = max(known, holding, key=lambda one: (one.shelf == one.owner, one.standings[0]))
    for card in cards:
        if counts := card.table_of_counts:
            found[card.table] = found[counts] = common_holdings(found[card.table], found[counts])
    return found


def known_to_users(plans: Sequence[TablePlan]) -> list[TablePlan]:
    """Leave out the tables that count ids of others."""
    counts = {plan.card.table_of_counts for plan in plans}
    return [plan for plan in plans if plan.card.table not in counts]


def rounds_of_tables(inventories: Sequence[TableInventory], servers: int) -> tuple[dict[Name, list[int]], list[str]]:
    """Return the rounds at which each table can be restored, and the names of lost tables.

    A table is lost if any of the `servers` servers' rows are nowhere. It has no rounds. Tables of counts are not among
    the names.
    """
    owners = owners_of_tables(inventories)
    lost = [name for name, theirs in owners.items() if len(theirs) < servers]
    counts = {card.table_of_counts for card in common_tables(inventories)}
    rounds: dict[Name, list[int]] = {name: [] if name in lost else rounds_of(theirs) for name, theirs in owners.items()}
    return rounds, [name for name in lost if name not in counts]


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


def plan_tables(
    layout: Layout, inventories: Sequence[TableInventory], rounds: Mapping[Name, int | None], holders: Mapping[int, int]
) -> list[TablePlan]:
    """Plan all tables at these rounds, and where each server takes rows from. For `holders` see `sources_of`."""
    owners = owners_of_tables(inventories)
    live = {shelf.owner for one in inventories for shelf in one.shelves if shelf.live}
    plans = []
    for card in common_tables(inventories):
        theirs = owners[card.table]
        sources = {
            rank: sources_of(layout, rank, theirs, live, inventories[rank].mapped, holders)
            for rank in map(layout.server_rank, range(layout.num_servers))
        }
        plans.append(plan_table(layout, card, theirs, rounds[card.table])._replace(sources=sources))
    return plans


def sources_of(
    layout: Layout,
    rank: int,
    owners: Owners,
    live: Collection[int],
    mapped: Collection[int],
    holders: Mapping[int, int],
) -> list[RowSource] | None:
    """Return where the server `rank` takes the rows from that belong to it now. None: it keeps its own.

    Args:
        owners: The holding of the table to use for each former server.
        live: The former servers that live, by their ranks then.
        mapped: The shelves that this server can map.
        holders: Shelf -> the rank that can map it and has listed its contents.
    """
    before = layout.before
    if before is None:
        return None
    first, count, own = before.num_workers, before.num_servers, before.origin[rank]
    wanted = range(first, first + count)
    if count == layout.num_servers:
        wanted = wanted[rank - layout.num_workers :][:1]
        if own in live and own in wanted:
            return None
    shelves = [(owner, owners[owner].shelf) for owner in wanted]
    return [
        RowSource(owner, shelf, holders[shelf], holders[shelf] != rank and shelf not in mapped)
        for owner, shelf in shelves
    ]
