"""Plan a recovery from what each rank holds: which pushes count, each key's round, who gives a unit to whom.

Pure data and arithmetic. The last push of a killed worker counts if its round was complete when the generation ended
(`server.loop` finishes such rounds): then that round is chosen.

Every rank brings an `Inventory`. From all inventories every rank makes the same plan: `choose_rounds`, then
`make_plan`. A round may have ended for some keys and not for others. If all can be put back to one round, none is lost
and none counts twice: the training loop makes the pushes again.

Without servers all workers have the same sums. So a worker that has completed a round has the right values and state:
the lowest rank that has it gives them to the workers that do not. A worker that has just begun takes everything.
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
from mpips.tables import messages
from mpips.tables.plan import TableHolding, TablePlan, known_to_users, plan_tables, rounds_of_tables

# lost keys named in an error
SHOWN = 4


# ---- what each rank holds


class Holding(msgspec.Struct, array_like=True):
    """What one rank has of a unit: elements [start, stop) of a key, and the rounds at which they can be restored.

    The same record describes a server's own unit, that of a dead server, a mirror's copy, and a replica.

    Attributes:
        standings: The restorable rounds, newest first, each with the optimizer's step; None if there is no state yet.
        torn: A change of the values has broken off. A torn replica cannot be restored whole; its one standing is what
            is there.
        states: Dtypes of the optimizer's state.
        pushes: In an asynchronous store (contributor, number of its pushes in the unit).
    """

    key: int | str
    start: int
    stop: int
    standings: list[tuple[int, int | None]]
    torn: bool
    states: list[str]
    pushes: list[tuple[int, int]] = []


class Shelf(msgspec.Struct, array_like=True):
    """All units of one owner.

    An owner is a server, by its rank in the last generation, or in a store without servers a worker, by its rank. The
    copies that a rank keeps as a mirror are a shelf of their own, with the owner `copies_of(rank)`.

    Attributes:
        live: The owner itself reports the shelf. False: it is dead, and another rank reads its memory.
        settings: See `encode_settings`.
        changes: Without servers the number of changes of settings that the owner has made.
    """

    owner: int
    live: bool
    settings: bytes
    units: list[Holding]
    changes: int = 0
    tables: list[TableHolding] = []

    @property
    def is_copy(self) -> bool:
        """True if a mirror keeps these units for others."""
        return self.owner < 0


def copies_of(rank: int) -> int:
    """Return the owner number of the shelf with the copies that this rank keeps as a mirror."""
    return -1 - rank


class KeyCard(msgspec.Struct, array_like=True, frozen=True):
    """A key as a worker knows it."""

    name: int | str
    shape: tuple[int, ...]
    dtype: str

    @classmethod
    def of(cls, key: Key) -> KeyCard:
        return cls(key.name, tuple(key.shape), key.dtype.name)


class Inventory(msgspec.Struct, array_like=True):
    """All that one rank brings into a recovery.

    Attributes:
        shelves: What it has, and what it can read of dead servers.
        mapped: Servers of the last generation whose memory it has mapped.
        keys: The keys it knows; None unless it was a worker before.
        local: On a worker: all servers are on its node.
        shared_cores: Processes of its node share cores.
        tables: On a rank that was a worker before: the tables it knows.
        changes: On a worker of a store with servers: how many changes of settings it has begun, how many it has made,
            and the last one.
    """

    shelves: list[Shelf] = []
    mapped: list[int] = []
    keys: list[KeyCard] | None = None
    local: bool = True
    shared_cores: bool = False
    tables: list[messages.MakeTable] = []
    changes: tuple[int, int, bytes] = (0, 0, b"")


def common_keys(inventories: Sequence[Inventory]) -> list[KeyCard]:
    """Return the keys that all former workers know alike, in the order of the first of these workers."""
    lists = [one.keys for one in inventories if one.keys is not None]
    if not lists:
        return []
    known = [{*cards} for cards in lists]
    return [card for card in lists[0] if all(card in cards for cards in known)]


def dtype_names(arrays: Sequence[Any]) -> list[str]:
    """Return the names of arrays' dtypes, for messages."""
    return [np.asarray(array).dtype.name for array in arrays]


class _Settings(msgspec.Struct, array_like=True):
    default: bytes | None = None
    own: list[tuple[int | str, bytes]] = []
    compression: dict[str, str | int | float] | None = None


def encode_settings(groups: Groups, compressor: Compressor | None) -> bytes:
    """Encode optimizers and compression, for a ledger and for other ranks."""
    own = [(name, encode(one)) for name, one in groups.own.items()]
    default = None if groups.default is None else encode(groups.default)
    chosen = None if compressor is None else compression.options(compressor)
    return msgspec.msgpack.encode(_Settings(default, own, chosen))


def decode_settings(data: bytes) -> tuple[Groups, Compressor | None]:
    """Decode what `encode_settings` wrote."""
    found = msgspec.msgpack.decode(data, type=_Settings)
    default = None if found.default is None else decode(found.default)
    groups = Groups(default, {name: decode(one) for name, one in found.own})
    return groups, None if found.compression is None else compression.create(found.compression)


# ---- what is chosen, and what follows


class Part(NamedTuple):
    """Elements [start, stop) of a key that are taken from one unit.

    Attributes:
        owner: The owner of the unit's shelf.
        unit: Its index on the shelf.
        before: Take it as of the round before its newest.
    """

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
    """The rounds of all keys and tables in the next generation.

    Attributes:
        step: The round at which all of them stand; None if they differ.
        lost: Keys and tables of which a part is nowhere.
        tables: The rounds of tables; None: each server's newest.
    """

    keys: dict[Name, KeyChoice]
    step: int | None
    lost: list[Name]
    tables: Mapping[Name, int | None]


class Transfer(NamedTuple):
    """Elements [start, stop) of a key that become part of a new unit.

    Attributes:
        part: Where they come from.
        holder: The rank that can read them.
        sent: The holder sends them in messages. False: the new server reads them itself.
    """

    part: Part
    start: int
    stop: int
    holder: int
    sent: bool


class UnitPlan(NamedTuple):
    """A new unit, its server's rank, and where its values come from.

    Attributes:
        adopted: The server has the whole unit already, and keeps its memory.
        pushes: In an asynchronous store the number of each contributor's pushes in it.
    """

    server: int
    card: UnitCard
    round: int
    torn: bool
    adopted: bool
    transfers: list[Transfer]
    pushes: list[int] | None


class ReplicaPlan(NamedTuple):
    """A key in a store without servers.

    Attributes:
        root: The worker that gives it to the others.
        step: The optimizer's step; None if there is no state yet.
        states: Dtypes of the optimizer's state.
        holders: The workers that have it at this round already.
        everybody: All workers have it, and nothing has to travel.
    """

    root: int
    round: int
    step: int | None
    states: list[str]
    holders: list[int]
    everybody: bool


@dataclass
class RecoveryPlan:
    """The next generation, as computed from the inventories of all ranks. It is the same on every rank, but for `rank`.

    Attributes:
        cards: The units of each server; `units` lists them in the same order.
        replicas: In a store without servers what `units` is in others.
        rank: The rank that has made this plan.
        holdings: Owner of a shelf -> its units.
    """

    inventories: Sequence[Inventory]
    choice: Choice
    keys: list[Key] = field(default_factory=list)
    cutting: Cutting | None = None
    cards: Cards = field(default_factory=dict)
    units: list[UnitPlan] = field(default_factory=list)
    replicas: dict[Name, ReplicaPlan] = field(default_factory=dict)
    tables: list[TablePlan] = field(default_factory=list)
    rank: int = 0
    holdings: dict[int, list[Holding]] = field(default_factory=dict)

    def holding(self, transfer: Transfer) -> Holding:
        """Return the old unit that a transfer takes from."""
        return self.holdings[transfer.part.owner][transfer.part.unit]

    @property
    def rounds(self) -> Rounds:
        """The rounds at which keys and tables stand.

        In an asynchronous store, the number of this worker's pushes that are in them.
        """
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
        """The shelf whose settings count: that of the owner with the most changes, and of these the lowest."""
        own = [shelf for one in self.inventories for shelf in one.shelves if not shelf.is_copy]
        return max(own, key=lambda shelf: (shelf.changes, -shelf.owner), default=None)

    def settings(self) -> tuple[Groups, Compressor | None]:
        """Return optimizers and compression as they were before `change`."""
        shelf = self.best_settings
        return (Groups(), None) if shelf is None else decode_settings(shelf.settings)

    @property
    def change(self) -> Change | None:
        """The last change of settings that was begun, if no worker knows that it is complete, else None.

        Servers make it again.
        """
        begun, _, last = self._last_change()
        if not last or max(one.changes[1] for one in self.inventories) >= begun:
            return None
        return frames.decode_request(last)  # type: ignore[return-value]

    def settings_after(self, refusals: Sequence[str]) -> tuple[Groups, Compressor | None, tuple[int, int, bytes]]:
        """Return optimizers and compression after `change`, unless the servers have refused it.

        Also return the numbers of changes begun and made, and the last one, as in `Inventory.changes`.

        Raises CollectiveError if some servers have refused it and others have not.
        """
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
    """A server's message to all once its units are filled. Other ranks send an empty one.

    Attributes:
        where: Where its units lie.
        refusal: Why it refuses the change of settings that was interrupted by the end of the generation, or "".
    """

    where: Created | None = None
    refusal: str = ""


# ---- the choice of rounds

# a shelf, the index of a unit of a key on it, and this unit
Candidate = tuple[Shelf, int, Holding]


def choose_rounds(
    inventories: Sequence[Inventory], synchronous: bool, replicas: bool = False, servers: int = 0
) -> Choice:
    """Choose the round of each key and table that all workers know, and from whose memory each key comes.

    A key is torn if no whole round of it can be restored.

    Args:
        replicas: The store has no servers. A torn replica is then not whole.
        servers: Number of servers in the last generation. Each of them has rows of every table.
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
    """Choose the round of each key. Also return the round of all keys together, or None if they differ.

    In a synchronous store all keys stand at one round if they can: the lowest of their newest rounds. If keys that were
    never pushed prevent that, they are left out and stay at round 0. If it is still not possible, and in an
    asynchronous store, each key stands at its own newest round.

    Args:
        available: For each key the rounds at which it can be restored whole, at least one.
    """
    newest = {name: max(rounds) for name, rounds in available.items()}
    for names in (list(newest), [name for name, round_ in newest.items() if round_]):
        common = min((newest[name] for name in names), default=0)
        if synchronous and all(common in available[name] for name in names):
            return newest | dict.fromkeys(names, common), common
    return newest, None


def _candidates(sizes: Mapping[Name, int], shelves: Sequence[Shelf]) -> dict[Name, list[Candidate]]:
    """Return the units of each key. Copies of mirrors are among them only if servers' own memory does not suffice."""
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
    """Return the rounds at which a key can be restored whole."""
    rounds = {round_ for _, _, holding in candidates for round_, _ in holding.standings}
    return [round_ for round_ in rounds if _cover(size, candidates, round_) is not None]


# Units with a larger value are preferred: its owner lives, it is not a mirror's copy, number of the owner's changes of
# settings, its round.
Goodness = tuple[bool, bool, int, int]


def _cover(size: int, candidates: Sequence[Candidate], round_: int | None) -> list[Part] | None:
    """Choose units that make up a whole key at this round. Return None if they do not.

    `round_` None takes each unit at its newest round.
    """
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
    """Yield each unit that can be restored at this round, with its goodness."""
    for shelf, index, holding in candidates:
        for number, (standing, _) in enumerate(holding.standings[: 1 if round_ is None else None]):
            if round_ is None or standing == round_:
                goodness = shelf.live, not shelf.is_copy, shelf.changes, standing
                yield Part(shelf.owner, index, number > 0, holding.start, holding.stop), goodness


# ---- the plan


def make_plan(
    layout: Layout, inventories: Sequence[Inventory], choice: Choice, lines: Sequence[Any] = ()
) -> RecoveryPlan:
    """Make the plan. Raises LostError if a part of any key or table is lost.

    Args:
        inventories: One for each rank, in order.
        lines: A worker's lines to the servers. On other ranks None for each server.
    """
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
    """Return (changes of settings, optimizer's step, dtypes of state) that an owner has of a key at the chosen round.

    None if the owner does not have the key at this round.
    """
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
    """Return which part of a key each server had before. Adjacent parts on a server are joined."""
    first = layout.num_workers if layout.before is None else layout.before.num_workers
    found: list[tuple[int, Interval]] = []
    for part in chosen.parts:
        server, start = part.owner - first, part.start
        if found and found[-1][0] == server and found[-1][1].stop == start:
            start = found.pop()[1].start
        found.append((server, Interval(start, part.stop)))
    return found


def _keys_stay(layout: Layout, chosen: Mapping[Name, KeyChoice]) -> bool:
    """True if each key stays on the servers that had it, by their numbers.

    False if the number of servers has changed, or a mirror's copy is used.
    """
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
    """Return for each key the number of pushes that count of each worker, or of its client, in an asynchronous store.

    A push that was under way may have reached only some shards. It counts. A worker by which the store has grown begins
    with the count of the slowest.
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
