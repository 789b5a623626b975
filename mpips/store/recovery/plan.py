"""Who keeps what in the next generation, and takes it from where: the same on every rank. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from mpips.store.keys.key import Key, Name
from mpips.store.keys.sharding import Interval
from mpips.store.recovery.choice import Found, Part, Whole, find, parts_by_server
from mpips.store.recovery.inventory import Holding, Inventory, Shelf, common_keys
from mpips.store.remote.cutting import Cards, Cutting
from mpips.store.roles import Layout
from mpips.store.runtime.errors import LostError
from mpips.store.transport.frames import UnitCard, dtype_of

SHOWN = 4


class Transfer(NamedTuple):
    """Elements [start, stop) of a key become part of a new unit: those of `part`, which the rank `holder` has.
    `sent`: they go as messages, as the server cannot map them."""

    part: Part
    start: int
    stop: int
    holder: int
    sent: bool


class Filling(NamedTuple):
    """A new unit: on which rank, and from what. `adopted`: the whole unit is one that the server has already."""

    server: int
    card: UnitCard
    round: int
    torn: bool
    adopted: bool
    transfers: list[Transfer]
    pushes: list[int] | None
    """In an asynchronous store, of each contributor how many of its pushes are in it."""


class Plan(NamedTuple):
    """The next generation. `cards`: the units of each server; `fillings` has them in the same order."""

    found: Found
    keys: list[Key]
    cutting: Cutting
    cards: Cards
    fillings: list[Filling]
    holdings: dict[int, list[Holding]]
    """By the ranks that old servers had."""


def make(layout: Layout, said: Sequence[Inventory], lines: Sequence[Any]) -> Plan:
    """The plan. `said`: by rank. `lines`: to the servers; on a server anything. LostError where a key is lost."""
    cards = common_keys(said)
    keys = [Key(card.name, tuple(card.shape), dtype_of(card.dtype)) for card in cards]
    shelves = [shelf for one in said for shelf in one.shelves]
    found = find(cards, [key.size for key in keys], shelves, not layout.asynchronous)
    if found.lost:
        names = ", ".join(map(repr, found.lost[:SHOWN])) + ", ..." * (len(found.lost) > SHOWN)
        raise LostError(f"recover: all memory with parts of these keys has gone, with their hosts: {names}; "
                         "start again from a checkpoint")  # fmt: skip
    counts = _pushes(layout, found.keys, shelves) if layout.asynchronous else {}
    for key in keys:
        key.round = counts[key.name][layout.rank] if counts and layout.is_worker else found.keys[key.name].round
    if layout.asynchronous:
        found = found._replace(step=min(filter(None, (key.round for key in keys)), default=0))
    cutting = _cutting(layout, said)
    new: Cards = {server: [] for server in range(layout.num_servers)}
    stays = _stays(layout, found.keys)
    places = parts_by_server(found.keys, layout.num_workers if layout.before is None else layout.before.num_workers)
    for key in keys:
        parts = [(server, Interval(start, stop)) for server, start, stop in places[key.name]]
        cutting.cut(key, lines, new, parts if stays else None)
    holders = {shelf.owner: rank for rank, one in enumerate(said) for shelf in one.shelves}
    owners = {shelf.owner: shelf for shelf in shelves}
    fillings = [
        _filling(layout.server_rank(server), card, found, owners, holders, said, counts)
        for server, cut in new.items() for card in cut
    ]  # fmt: skip
    return Plan(found, keys, cutting, new, fillings, {owner: shelf.units for owner, shelf in owners.items()})


def _cutting(layout: Layout, said: Sequence[Inventory]) -> Cutting:
    one_node = all(one.local for one in said[: layout.num_workers])
    return Cutting(layout, one_node, not (said[0].shared_cores or layout.asynchronous))


def _stays(layout: Layout, chosen: Mapping[Name, Whole]) -> bool:
    """Whether each key stays on the servers, by their number, that it was on."""
    before = layout.before
    if before is None:
        return True
    owners = {part.owner for one in chosen.values() for part in one.parts}  # no server where a mirror's copy is used
    return before.num_servers == layout.num_servers and all(
        before.num_workers <= owner < before.num_workers + before.num_servers for owner in owners
    )


def _filling(
    rank: int, card: UnitCard, found: Found, shelves: dict[int, Shelf], holders: dict[int, int],
    said: Sequence[Inventory], counts: Mapping[Name, Sequence[int]],
) -> Filling:  # fmt: skip
    name: Name = card.key
    chosen = found.keys[name]
    transfers: list[Transfer] = []
    for part in chosen.parts:
        start, stop = max(part.start, card.start), min(part.stop, card.stop)
        if start < stop or (card.start == card.stop and not transfers):
            holder = holders[part.owner]
            sent = holder != rank and part.owner not in said[rank].mapped
            transfers.append(Transfer(part, start, max(start, stop), holder, sent))
    first = shelves[transfers[0].part.owner]
    unit = first.units[transfers[0].part.unit]
    same = len(transfers) == 1 and (unit.start, unit.stop) == (card.start, card.stop)
    adopted = same and first.live and transfers[0].holder == rank
    pushes = [counts[name][worker] for worker in card.contributors] if counts else None
    return Filling(rank, card, chosen.round, chosen.torn, adopted, transfers, pushes)


def _pushes(layout: Layout, chosen: Mapping[Name, Whole], shelves: Sequence[Shelf]) -> dict[Name, list[int]]:
    """Of each key, how many pushes count of each worker, or of its client, in an asynchronous store. Of one that was
    under way some shards may have it: it counts. A worker by which the store has grown begins with the slowest."""
    units = {shelf.owner: shelf.units for shelf in shelves}
    before, found = layout.before, {}
    assert before is not None
    for name, one in chosen.items():
        told: dict[int, int] = {}
        for part in one.parts:
            for worker, count in units[part.owner][part.unit].pushes:
                told[worker] = max(count, told.get(worker, 0))
        theirs = [
            [told[old] for old in before.in_whose_place(worker, layout.kind) if old in told]
            for worker in range(layout.num_workers)
        ]
        slowest = min(told.values(), default=0)
        found[name] = [max(counts, default=slowest) for counts in theirs]
    return found
