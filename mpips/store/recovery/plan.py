"""Plan a recovery from what each rank holds: which pushes count, each key's round, who gives a unit to whom.

Pure data and arithmetic. The last push of a killed worker counts if its round was complete when the generation ended
(`server.loop` finishes such rounds), and that round is chosen.

Every rank brings an `Inventory`, and the same plan follows on every rank: `choose_rounds`, then `make_plan`. A round
may have ended for some keys and not for others. Where all can be put back to one, none is lost and none counts twice:
the training loop makes the others again.

Without servers all workers have the same sums. So a worker that has completed a round has the right value and state:
the lowest rank of those that have it gives them to those that have not. A worker that has just begun takes all.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

import msgspec
import numpy as np

from mpips.collectives.errors import CollectiveError
from mpips.compression import registry as compression
from mpips.compression.compressors import Compressor
from mpips.optimizers.registry import decode, decode_numbers, encode
from mpips.optimizers.schedules import Groups
from mpips.store.keys.cutting import Cards, Cutting
from mpips.store.keys.key import Key, Name, Rounds
from mpips.store.keys.sharding import Interval
from mpips.store.roles import Layout
from mpips.store.runtime.errors import LostError
from mpips.store.transport import frames
from mpips.store.transport.frames import Change, Created, UnitCard, dtype_of
from mpips.tables.plan import TableHolding, TablePlan, known_to_users, plan_tables, rounds_of_tables

SHOWN = 4


# ---- what each rank holds


class Holding(msgspec.Struct, array_like=True):
    """One unit, a copy of it, or a replica: elements [start, stop) of a key, and the rounds at which they can be had.

    It is the one record of a unit: servers' own memory, that of dead servers, mirrors and replicas bring it alike.
    """

    key: int | str
    start: int
    stop: int
    standings: list[tuple[int, int | None]]
    """The rounds at which it can be had, the newest first, each with the optimizer's step; None: no state yet."""
    torn: bool
    """Whether a change of it has broken off. A torn replica cannot be had whole; its one standing is what is there."""
    states: list[str]
    """Dtypes of the optimizer's state."""
    pushes: list[tuple[int, int]] = []
    """In an asynchronous store, of each contributor how many of its pushes are in it."""


class Shelf(msgspec.Struct, array_like=True):
    """All units of one owner: a server, by its rank in the generation before, or a worker with replicas, by its rank.

    The copies that a server keeps of others' units as their mirror are another shelf.
    """

    owner: int
    live: bool
    """Whether the owner itself says so."""
    settings: bytes
    units: list[Holding]
    changes: int = 0
    """Without servers: how many changes of settings the owner has made."""
    tables: list[TableHolding] = []

    @property
    def is_copy(self) -> bool:
        """Return whether these are copies."""
        return self.owner < 0


def copies_of(rank: int) -> int:
    """Return the owner of the shelf with the copies that this rank keeps."""
    return -1 - rank


class KeyCard(msgspec.Struct, array_like=True, frozen=True):
    """A key as a worker knows it."""

    name: int | str
    shape: tuple[int, ...]
    dtype: str

    @classmethod
    def of(cls, key: Key) -> KeyCard:
        """Return the card of a key."""
        return cls(key.name, tuple(key.shape), key.dtype.name)


class Inventory(msgspec.Struct, array_like=True):
    """All that one rank brings to the beginning of a generation."""

    shelves: list[Shelf] = []
    mapped: list[int] = []
    """Servers of the generation before whose memory it has mapped."""
    keys: list[KeyCard] | None = None
    """On a worker that was one before."""
    local: bool = True
    """On a worker: whether all servers share its node."""
    shared_cores: bool = False
    """Whether processes of its node share cores."""
    tables: list[frames.MakeTable] = []
    """On such a worker: those that it knows."""
    changes: tuple[int, int, bytes] = (0, 0, b"")
    """On a worker of servers: how many changes of settings it has begun, how many it has made, and the last one."""


def common_keys(inventories: Sequence[Inventory]) -> list[KeyCard]:
    """Return the keys that all workers know alike which were workers before, in the order of the first of them."""
    lists = [one.keys for one in inventories if one.keys is not None]
    if not lists:
        return []
    known = [{*cards} for cards in lists]
    return [card for card in lists[0] if all(card in cards for cards in known)]


def dtype_names(arrays: Sequence[Any]) -> list[str]:
    """Return the dtypes of arrays as messages hold them."""
    return [np.asarray(array).dtype.name for array in arrays]


class _Settings(msgspec.Struct, array_like=True):
    default: bytes | None = None
    own: list[tuple[int | str, bytes]] = []
    compression: dict[str, str | int | float] | None = None


def encode_settings(groups: Groups, compressor: Compressor | None) -> bytes:
    """Return optimizers and compression as bytes, for a ledger and for other ranks."""
    own = [(name, encode(one)) for name, one in groups.own.items()]
    default = None if groups.default is None else encode(groups.default)
    chosen = None if compressor is None else compression.options(compressor)
    return msgspec.msgpack.encode(_Settings(default, own, chosen))


def decode_settings(data: bytes) -> tuple[Groups, Compressor | None]:
    """Return what `encode_settings` was given."""
    found = msgspec.msgpack.decode(data, type=_Settings)
    default = None if found.default is None else decode(found.default)
    groups = Groups(default, {name: decode(one) for name, one in found.own})
    return groups, None if found.compression is None else compression.create(found.compression)


# ---- what is chosen, and what follows


class Part(NamedTuple):
    """Say which elements [start, stop) of a key come from one unit, or from a copy of it.

    `unit`: its place on the shelf of the `owner`. `before`: as it was a round before."""

    owner: int
    unit: int
    before: bool
    start: int
    stop: int


class KeyChoice(NamedTuple):
    """The round of a key in the next generation, and the parts that it is made of."""

    round: int
    torn: bool
    parts: list[Part]


class Choice(NamedTuple):
    """All keys in the next generation: at one step of training where they could be put there. `lost`: keys of which
    something is nowhere."""

    keys: dict[Name, KeyChoice]
    step: int | None
    lost: list[Name]
    tables: Mapping[Name, int | None]
    """The rounds of tables; None: each server's newest."""


class Transfer(NamedTuple):
    """Elements [start, stop) of a key become part of a new unit: those of `part`, which the rank `holder` has.
    `sent`: they go as messages, as the server cannot map them."""

    part: Part
    start: int
    stop: int
    holder: int
    sent: bool


class UnitPlan(NamedTuple):
    """A new unit: on which rank, and from what. `adopted`: the whole unit is one that the server has already."""

    server: int
    card: UnitCard
    round: int
    torn: bool
    adopted: bool
    transfers: list[Transfer]
    pushes: list[int] | None
    """In an asynchronous store, of each contributor how many of its pushes are in it."""


class ReplicaPlan(NamedTuple):
    """A key of a store without servers: at which round and step it stands, and the worker `root` that gives it."""

    root: int
    round: int
    step: int | None
    """The optimizer's; None: it has no state yet."""
    states: list[str]
    holders: list[int]
    """Workers that have it so; the others take it."""
    everybody: bool
    """Whether all workers are holders, and nothing has to travel."""


@dataclass
class RecoveryPlan:
    """The next generation, as it follows from what all ranks have said. The same on every rank."""

    inventories: Sequence[Inventory]
    choice: Choice
    keys: list[Key] = field(default_factory=list)
    cutting: Cutting | None = None
    cards: Cards = field(default_factory=dict)
    """The units of each server; `units` has them in the same order."""
    units: list[UnitPlan] = field(default_factory=list)
    replicas: dict[Name, ReplicaPlan] = field(default_factory=dict)
    """In the place of units where no servers are."""
    tables: list[TablePlan] = field(default_factory=list)
    rank: int = 0
    """Of the one that has made this plan; all else is the same on all."""
    holdings: dict[int, list[Holding]] = field(default_factory=dict)
    """By the ranks that old servers had; copies of a server, by -1 - its rank."""

    def holding(self, transfer: Transfer) -> Holding:
        """Return the old unit that a transfer takes from."""
        return self.holdings[transfer.part.owner][transfer.part.unit]

    @property
    def rounds(self) -> Rounds:
        """At which round keys stand; in an asynchronous store, how many pushes of this worker are in them."""
        rounds = Rounds({key.name: key.round for key in self.keys})
        torn = [name for name, chosen in self.choice.keys.items() if chosen.torn]
        for table in known_to_users(self.tables):
            rounds[table.card.table] = table.pushes[self.rank] if self.rank < len(table.pushes) else table.round
            torn += [table.card.table] * table.torn
        rounds.torn = tuple(torn)
        rounds.step = self.choice.step
        return rounds

    # ---- optimizers and compression

    @property
    def best_settings(self) -> Shelf | None:
        """The shelf whose settings count: of the owner that has made most changes, the lowest of these."""
        own = [shelf for one in self.inventories for shelf in one.shelves if not shelf.is_copy]
        return max(own, key=lambda shelf: (shelf.changes, -shelf.owner), default=None)

    def settings(self) -> tuple[Groups, Compressor | None]:
        """Return optimizers and compression, before `change`."""
        shelf = self.best_settings
        return (Groups(), None) if shelf is None else decode_settings(shelf.settings)

    @property
    def change(self) -> Change | None:
        """A change of settings that no worker knows to be made everywhere: servers make it once more."""
        begun, _, last = self._last_change()
        if not last or max(one.changes[1] for one in self.inventories) >= begun:
            return None
        return frames.decode_request(last)  # type: ignore[return-value]

    def settings_after(self, refusals: Sequence[str]) -> tuple[Groups, Compressor | None, tuple[int, int, bytes]]:
        """Return settings with that change, if the servers have not refused it; and how many changes workers have begun
        and made, with the last one."""
        groups, compressor = self.settings()
        begun, made, last = self._last_change()
        change = self.change
        if change is None:
            return groups, compressor, (begun, begun, last)
        if all(refusals):
            return groups, compressor, (made, made, b"")
        if any(refusals):
            raise CollectiveError(f"servers differ: {next(filter(None, refusals))}; others have done it")
        if isinstance(change, frames.SetOptimizer):
            groups.set(decode(change.optimizer), change.keys)
        elif isinstance(change, frames.UpdateOptimizer):
            with suppress(ValueError, TypeError):
                groups.update(decode_numbers(change.numbers), change.keys)
        else:
            compressor = compression.create(change.options)
        return groups, compressor, (begun, begun, last)

    def _last_change(self) -> tuple[int, int, bytes]:
        return max((one.changes for one in self.inventories), key=lambda changes: changes[0])


class Placed(msgspec.Struct, array_like=True):
    """A server's word to all when it is filled; of other ranks nothing. It says where its units lie, and why it refuses
    the change of settings that the end of the generation interrupted."""

    where: Created | None = None
    refusal: str = ""


# ---- the choice of rounds

Candidate = tuple[Shelf, int, Holding]
"""A unit of a key, and its place on a shelf."""


def choose_rounds(
    inventories: Sequence[Inventory], synchronous: bool, replicas: bool = False, servers: int = 0
) -> Choice:
    """Return the round of each key and table that all workers know, and from whose memory a key comes. `servers`: of
    the generation before, each of which has rows of every table.

    A torn key is one of which no whole round is there. `replicas`: without servers, where a torn one is not whole.
    """
    sizes = {card.name: prod(card.shape) for card in common_keys(inventories)}
    found = _candidates(sizes, [shelf for one in inventories for shelf in one.shelves])
    whole = {
        name: [one for one in there if not (replicas and one[2].torn)] for name, there in found.items() if synchronous
    }
    available = {name: _whole_rounds(sizes[name], there) for name, there in whole.items()}
    tables, lost_tables = rounds_of_tables(inventories, servers)
    if synchronous:
        available |= tables
    rounds, step = common_round({name: rounds for name, rounds in available.items() if rounds}, synchronous)
    keys: dict[Name, KeyChoice] = {}
    for name, there in found.items():
        if name in rounds:
            round_, torn = rounds[name], any(holding.torn for _, _, holding in whole[name])
            parts = _cover(sizes[name], whole[name], round_)
        else:
            round_ = max((holding.standings[0][0] for _, _, holding in there), default=0)
            torn = synchronous or any(holding.torn for _, _, holding in there)
            parts = _cover(sizes[name], there, None)
        if parts is not None:
            keys[name] = KeyChoice(round_, torn, parts)
    together = synchronous and len(rounds) == len(found) + len(tables)
    lost = [*(name for name in found if name not in keys), *lost_tables]
    return Choice(keys, step if together else None, lost, {name: rounds.get(name) for name in tables})


def common_round(available: Mapping[Name, Collection[int]], synchronous: bool) -> tuple[dict[Name, int], int | None]:
    """Return the round of each key, and that of all of them together, if there is one. `available`: the rounds at which
    each key can be had whole, one at least.

    In a synchronous store all keys stand at one round where they can: the lowest of their newest ones. Keys that were
    never pushed do not hinder that. Else each stands at its own newest.
    """
    newest = {name: max(rounds) for name, rounds in available.items()}
    for names in (list(newest), [name for name, round_ in newest.items() if round_]):
        common = min((newest[name] for name in names), default=0)
        if synchronous and all(common in available[name] for name in names):
            return newest | dict.fromkeys(names, common), common
    return newest, None


def _candidates(sizes: Mapping[Name, int], shelves: Sequence[Shelf]) -> dict[Name, list[Candidate]]:
    """Return the units of each key: copies of mirrors only where servers' own memory is not all there."""
    own: dict[Name, list[Candidate]] = {name: [] for name in sizes}
    copies: dict[Name, list[Candidate]] = {name: [] for name in sizes}
    for shelf in shelves:
        for index, holding in enumerate(shelf.units):
            if holding.key in sizes:
                (copies if shelf.is_copy else own)[holding.key].append((shelf, index, holding))
    return {
        name: there if _cover(sizes[name], there, None) is not None else there + copies[name]
        for name, there in own.items()
    }


def _whole_rounds(size: int, candidates: Sequence[Candidate]) -> list[int]:
    """Return the rounds at which a key can be had whole."""
    rounds = {round_ for _, _, holding in candidates for round_, _ in holding.standings}
    return [round_ for round_ in rounds if _cover(size, candidates, round_) is not None]


Goodness = tuple[bool, bool, int, int]
"""Of a unit that may be taken: its owner lives, it is not a copy, its owner's changes of settings, it is new."""


def _cover(size: int, candidates: Sequence[Candidate], round_: int | None) -> list[Part] | None:
    """Return units that make up a whole key at this round, or, where None, each at its newest; None where they do
    not."""
    fit = sorted(_at_round(candidates, round_), key=lambda each: (each[0].start, each[0].stop))
    if not size:
        return [max(fit, key=lambda each: each[1])[0]] if fit else None
    parts: list[Part] = []
    at = 0
    while at < size:
        here = [each for each in fit if each[0].start <= at < each[0].stop]
        if not here:
            return None
        part, _ = max(here, key=lambda each: (each[1], each[0].stop))
        parts.append(part._replace(start=at))
        at = part.stop
    return parts


def _at_round(candidates: Sequence[Candidate], round_: int | None) -> Iterable[tuple[Part, Goodness]]:
    """Yield each unit that can stand at this round, and how good it is."""
    for shelf, index, holding in candidates:
        for number, (standing, _) in enumerate(holding.standings[: 1 if round_ is None else None]):
            if round_ is None or standing == round_:
                goodness = shelf.live, not shelf.is_copy, shelf.changes, standing
                yield Part(shelf.owner, index, number > 0, holding.start, holding.stop), goodness


# ---- the plan


def make_plan(
    layout: Layout, inventories: Sequence[Inventory], choice: Choice, lines: Sequence[Any] = ()
) -> RecoveryPlan:
    """Return the plan. `inventories`: by rank. `lines`: to the servers; on a server None. LostError where a key is
    lost."""
    if choice.lost:
        names = ", ".join(map(repr, choice.lost[:SHOWN])) + ", ..." * (len(choice.lost) > SHOWN)
        raise LostError(
            f"recover: all memory with parts of these keys or tables has gone, with their hosts: {names}; "
            "start again from a checkpoint"
        )
    keys = [Key(card.name, tuple(card.shape), dtype_of(card.dtype)) for card in common_keys(inventories)]
    for key in keys:
        key.round = choice.keys[key.name].round
    if layout.num_servers:
        return _plan_units(layout, inventories, choice, keys, lines)
    return RecoveryPlan(inventories, choice, keys, replicas=_plan_replicas(layout, inventories, choice))


def _plan_replicas(layout: Layout, inventories: Sequence[Inventory], choice: Choice) -> dict[Name, ReplicaPlan]:
    shelves = {shelf.owner: shelf for one in inventories for shelf in one.shelves}
    found = {}
    for name, chosen in choice.keys.items():
        root = chosen.parts[0].owner
        stands = {owner: _replica_stand(shelf, name, chosen) for owner, shelf in shelves.items()}
        stand = stands[root]
        assert stand is not None
        _, step, states = stand
        holders = [owner for owner, other in stands.items() if other == stand]
        everybody = len(holders) == layout.num_workers and not chosen.torn
        found[name] = ReplicaPlan(root, chosen.round, step, states, holders, everybody)
    return found


def _replica_stand(shelf: Shelf, name: Name, chosen: KeyChoice) -> tuple[int, int | None, list[str]] | None:
    """Return changes of settings, optimizer's step and state with which an owner has a key at the chosen round; None
    where it has not."""
    for holding in shelf.units:
        for round_, step in holding.standings if holding.key == name else ():
            if round_ == chosen.round and holding.torn == chosen.torn:
                return shelf.changes, step, [] if step is None else holding.states
    return None


def _plan_units(
    layout: Layout, inventories: Sequence[Inventory], choice: Choice, keys: list[Key], lines: Sequence[Any]
) -> RecoveryPlan:
    shelves = {shelf.owner: shelf for one in inventories for shelf in one.shelves}
    counts = _count_pushes(layout, choice.keys, shelves) if layout.asynchronous else {}
    if layout.asynchronous:
        for key in keys:
            if layout.is_worker:
                key.round = counts[key.name][layout.rank]
    one_node = all(one.local for one in inventories[: layout.num_workers])
    cutting = Cutting(layout, one_node, not (inventories[0].shared_cores or layout.asynchronous))
    cards: Cards = {server: [] for server in range(layout.num_servers)}
    stays = _keys_stay(layout, choice.keys)
    for key in keys:
        cutting.cut(key, lines, cards, _parts_by_server(layout, choice.keys[key.name]) if stays else None)
    holders = {shelf.owner: rank for rank, one in enumerate(inventories) for shelf in one.shelves}
    units = [
        _plan_unit(layout.server_rank(server), card, choice.keys[card.key], shelves, holders, inventories, counts)
        for server, cut in cards.items()
        for card in cut
    ]
    holdings = {owner: shelf.units for owner, shelf in shelves.items()}
    tables = plan_tables(layout, inventories, choice.tables, holders)
    if layout.asynchronous:
        mine = [key.round for key in keys] + [table.pushes[layout.rank] for table in tables if layout.is_worker]
        choice = choice._replace(step=min(filter(None, mine), default=0))
    return RecoveryPlan(
        inventories, choice, keys, cutting, cards, units, holdings=holdings, tables=tables, rank=layout.rank
    )


def _plan_unit(
    rank: int,
    card: UnitCard,
    chosen: KeyChoice,
    shelves: Mapping[int, Shelf],
    holders: Mapping[int, int],
    inventories: Sequence[Inventory],
    counts: Mapping[Name, Sequence[int]],
) -> UnitPlan:
    transfers: list[Transfer] = []
    for part in chosen.parts:
        start, stop = max(part.start, card.start), min(part.stop, card.stop)
        if start < stop or (card.start == card.stop and not transfers):
            holder = holders[part.owner]
            sent = holder != rank and part.owner not in inventories[rank].mapped
            transfers.append(Transfer(part, start, max(start, stop), holder, sent))
    first = shelves[transfers[0].part.owner]
    unit = first.units[transfers[0].part.unit]
    same = len(transfers) == 1 and (unit.start, unit.stop) == (card.start, card.stop)
    adopted = same and first.live and transfers[0].holder == rank
    pushes = [counts[card.key][worker] for worker in card.contributors] if counts else None
    return UnitPlan(rank, card, chosen.round, chosen.torn, adopted, transfers, pushes)


def _parts_by_server(layout: Layout, chosen: KeyChoice) -> list[tuple[int, Interval]]:
    """Return where a key lay before, by servers; what lies side by side on a server as one."""
    first = layout.num_workers if layout.before is None else layout.before.num_workers
    found: list[tuple[int, Interval]] = []
    for part in chosen.parts:
        server, start = part.owner - first, part.start
        if found and found[-1][0] == server and found[-1][1].stop == start:
            start = found.pop()[1].start
        found.append((server, Interval(start, part.stop)))
    return found


def _keys_stay(layout: Layout, chosen: Mapping[Name, KeyChoice]) -> bool:
    """Return whether each key stays on the servers, by their number, that it was on.

    It does not where a server has gone, or a mirror's copy is used."""
    before = layout.before
    if before is None:
        return True
    owners = {part.owner for one in chosen.values() for part in one.parts}
    return before.num_servers == layout.num_servers and all(
        before.num_workers <= owner < before.num_workers + before.num_servers for owner in owners
    )


def _count_pushes(
    layout: Layout, chosen: Mapping[Name, KeyChoice], shelves: Mapping[int, Shelf]
) -> dict[Name, list[int]]:
    """Return for each key how many pushes count of each worker, or of its client, in an asynchronous store.

    Of a push that was under way some shards may have it: it counts. A worker by which the store has grown begins with
    the slowest.
    """
    before, found = layout.before, {}
    assert before is not None
    for name, one in chosen.items():
        told: dict[int, int] = {}
        for part in one.parts:
            for worker, count in shelves[part.owner].units[part.unit].pushes:
                told[worker] = max(count, told.get(worker, 0))
        theirs = [
            [told[old] for old in before.in_whose_place(worker, layout.kind) if old in told]
            for worker in range(layout.num_workers)
        ]
        slowest = min(told.values(), default=0)
        found[name] = [max(counts, default=slowest) for counts in theirs]
    return found
