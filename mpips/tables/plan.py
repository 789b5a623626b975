"""Plan whence the rows of a dead server come: which memory has them, at which rounds, and who copies them.

A table is whole where the rows of every server are there. Servers differ by one round at most, and each can go back by
one, so there is a round that all can have. Where as many servers go on as there were, each keeps its rows; who takes a
dead one's place takes its rows from memory that outlives it (`tables.journal`). Otherwise each takes from all what
belongs to it (`transfer`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

import msgspec
import numpy as np

from mpips.collectives.fabric.arena import SparseFile
from mpips.store.keys.key import Name
from mpips.store.roles import Layout
from mpips.store.transport.frames import MakeTable
from mpips.tables import row_optimizers
from mpips.tables.admission import COUNTS
from mpips.tables.journal import Journal, Standing
from mpips.tables.rows import arrays_of


class TableHolding(msgspec.Struct, array_like=True):
    """A table on one server, the `owner` by its rank, and the rounds at which its rows can be had."""

    table: str
    owner: int
    shelf: int
    """Whose memory it is: the owner's, or that of its mirror; see `recovery.plan.Shelf`."""
    standings: list[Standing]
    """The newest round first."""
    torn: bool
    pushes: list[int]
    """Of each worker how many pushes are in the newest."""


class TableEntry(msgspec.Struct, array_like=True):
    """Say where a table of a server lies that may have died: offsets of arrays in its sparse file."""

    card: MakeTable
    places: dict[str, int]
    capacity: int
    workers: int


class RowSource(NamedTuple):
    """Whence a server takes rows that the server `owner` had before, by its rank then: from a shelf that the rank
    `holder` reaches. `sent`: they come as messages."""

    owner: int
    shelf: int
    holder: int
    sent: bool


class TablePlan(NamedTuple):
    """A table in the next generation. `pushes`: of each worker how many are in it."""

    card: MakeTable
    round: int
    updates: int
    torn: bool
    pushes: list[int]
    rounds: Mapping[int, int]
    """Of each server before, by its rank then, the round of its rows: in an asynchronous store each its own."""
    counts: tuple[int, int]
    """Of all servers: dropped rows, and refused gradients. The first server has them from now on."""
    sources: Mapping[int, list[RowSource] | None] = {}
    """Whence each server takes its rows, by its rank; None: it keeps its own."""


class TableShelf(Protocol):
    """What one owner has of tables, as `recovery.plan` knows it."""

    @property
    def owner(self) -> int: ...
    @property
    def live(self) -> bool: ...
    @property
    def tables(self) -> Sequence[TableHolding]: ...


class TableInventory(Protocol):
    """What one rank brings, as `recovery.plan` knows it. `keys`: None on a rank that was no worker before."""

    @property
    def keys(self) -> object: ...
    @property
    def tables(self) -> Sequence[MakeTable]: ...
    @property
    def mapped(self) -> Sequence[int]: ...
    @property
    def shelves(self) -> Sequence[TableShelf]: ...


Owners = Mapping[int, TableHolding]
"""What each server of the generation before, by its rank then, has of one table."""


def holding_of_table(name: str, journal: Journal, owner: int, shelf: int) -> TableHolding:
    """Return what a journal says of a table."""
    standings = journal.standings()
    return TableHolding(name, owner, shelf, standings, journal.torn, journal.pushes_in(standings[0][0]))


def attached(file: SparseFile, entry: TableEntry) -> Journal:
    """Return the journal of a table whose server has died."""
    card = entry.card
    arrays = arrays_of(card.dim, np.dtype(card.dtype), row_optimizers.decode(card.optimizer, card.numbers))
    return Journal.attached(file, entry.places, arrays, entry.capacity, entry.workers)


def common_holdings(owners: Owners, counts: Owners) -> dict[int, TableHolding]:
    """Return what servers have of a table and its counts of ids at the same rounds; torn where either is."""
    found = {}
    for owner in owners.keys() & counts.keys():
        one, other = owners[owner], counts[owner]
        both = {round_ for round_, *_ in other.standings}
        standings = [standing for standing in one.standings if standing[0] in both]
        torn = one.torn or other.torn or not standings
        found[owner] = TableHolding(one.table, owner, one.shelf, standings or one.standings, torn, one.pushes)
    return found


def common_tables(inventories: Sequence[TableInventory]) -> list[MakeTable]:
    """Return the tables that all workers know which were workers before, as the first of them knows them."""
    lists = [one.tables for one in inventories if one.keys is not None]
    known = [{card.table for card in cards} for cards in lists]
    return [card for card in lists[0] if all(card.table in names for names in known)] if lists else []


def owners_of_tables(inventories: Sequence[TableInventory]) -> dict[str, dict[int, TableHolding]]:
    """Return of each such table what every server of the generation before has, by its rank then.

    A table and its counts of ids close a round one after the other: they are put at rounds that both have."""
    cards = common_tables(inventories)
    found: dict[str, dict[int, TableHolding]] = {card.table: {} for card in cards}
    for holding in (holding for one in inventories for shelf in one.shelves for holding in shelf.tables):
        if (there := found.get(holding.table)) is None:
            continue
        known = there.get(holding.owner, holding)
        there[holding.owner] = max(known, holding, key=lambda one: (one.shelf == one.owner, one.standings[0]))
    for table in (card.table for card in cards if card.seen):
        found[table] = found[table + COUNTS] = common_holdings(found[table], found[table + COUNTS])
    return found


def known_to_users(plans: Sequence[TablePlan]) -> list[TablePlan]:
    """Return all tables but those that count the ids of others."""
    counts = _names_of_counts(plan.card for plan in plans)
    return [plan for plan in plans if plan.card.table not in counts]


def _names_of_counts(cards: Iterable[MakeTable]) -> set[str]:
    return {card.table + COUNTS for card in cards if card.seen}


def rounds_of_tables(inventories: Sequence[TableInventory], servers: int) -> tuple[dict[Name, list[int]], list[str]]:
    """Return the rounds at which each table can be had, and the tables of which one of so many servers' rows are
    nowhere, as users know them. These have no rounds."""
    owners = owners_of_tables(inventories)
    lost = [name for name, theirs in owners.items() if len(theirs) < servers]
    counts = _names_of_counts(common_tables(inventories))
    rounds: dict[Name, list[int]] = {name: [] if name in lost else rounds_of(theirs) for name, theirs in owners.items()}
    return rounds, [name for name in lost if name not in counts]


def rounds_of(owners: Owners) -> list[int]:
    """Return the rounds at which all servers can have a table."""
    return sorted(set.intersection(*({round_ for round_, *_ in one.standings} for one in owners.values())))


def plan_table(layout: Layout, card: MakeTable, owners: Owners, round_: int | None) -> TablePlan:
    """Return a table at a round that all can have, where None at each server's newest."""
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
    """Return all tables at these rounds, and whence each server takes rows. `holders`: see `sources_of`."""
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
    """Return whence the server `rank` takes the rows that belong to it now; None where it keeps its own.

    `live`: those servers before that live, by their ranks then. `mapped`: those whose memory it reaches. `holders`: of
    each shelf the rank that reaches it, and says what is there."""
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
