"""Plan a recovery: which pushes count, from which round each key continues, and which rank gives units to which server.

Pure data and arithmetic. Every rank contributes an `Inventory`, a list of what it holds and can read. From the
inventories of all ranks, every rank computes the same plan: `choose_rounds`, then `make_plan`.

When a generation ends, a round may be complete for some keys and not for others. If possible, all keys are restored to
one common round. Then no push is lost and no push counts twice, because the training loop repeats the pushes after that
round. The last push of a killed worker counts if its round was complete when the generation ended. Servers finish such
rounds (`server.loop`), so that round is chosen.

In a store without servers all workers have the same sums. So every worker that has completed a round has the right
values and state. The lowest such rank sends them to the workers that lack them, such as new workers.

An *owner* is whatever holds units: a server, a worker of a store without servers, or the copies that a server keeps as
the mirror of others. A unit or key is *torn* if its values belong to no complete round.
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
from mpips.store.recovery.undo import AvailableRound
from mpips.store.roles import Layout
from mpips.store.runtime.errors import LostError
from mpips.store.server.service import FoundService, ServicePlan
from mpips.store.transport import frames
from mpips.store.transport.frames import Change, Created, UnitCard, dtype_of

# maximum number of lost keys that an error message names
SHOWN = 4


# ---- what each rank holds


class UnitCopy(msgspec.Struct, array_like=True):
    """A unit in the memory of one owner: elements [start, stop) of a key, and the rounds at which they can be restored.

    Attributes:
        rounds: Newest first. A torn replica (a worker's copy of a key) also lists its rounds, although they are not
            complete.
        torn: True if a change of the values was interrupted.
        states: Dtypes of the optimizer's state.
        pushes: In an asynchronous store: (contributor, number of its pushes in the unit).
    """

    key: int | str
    start: int
    stop: int
    rounds: list[AvailableRound]
    torn: bool
    states: list[str]
    pushes: list[tuple[int, int]] = []


class OwnerInventory(msgspec.Struct, array_like=True):
    """All units in the memory of one owner: a server, a worker of a store without servers, or a mirror.

    Attributes:
        owner: The rank of the server or worker in the last generation. The copies that a rank keeps as a mirror are an
            owner of their own, with the number `copies_of(rank)`.
        live: True if the owner itself reports this. False if it is dead and another rank reads its memory.
        settings: See `encode_settings`.
        changes: In a store without servers, the number of changes of settings that the owner has made.
    """

    owner: int
    live: bool
    settings: bytes
    units: list[UnitCopy]
    changes: int = 0

    @property
    def is_mirror(self) -> bool:
        """True if these units are copies that a mirror keeps."""
        return self.owner < 0


def copies_of(rank: int) -> int:
    """Return the owner number of the copies that a rank keeps as a mirror."""
    return -1 - rank


class KeyCard(msgspec.Struct, array_like=True, frozen=True):
    """The name, shape and dtype of a key, as a worker knows them."""

    name: int | str
    shape: tuple[int, ...]
    dtype: str

    @classmethod
    def of(cls, key: Key) -> KeyCard:
        return cls(key.name, tuple(key.shape), key.dtype.name)


class Inventory(msgspec.Struct, array_like=True):
    """Everything that one rank contributes to a recovery.

    Attributes:
        owners: The inventory of this rank's own units, and those of dead servers whose memory it can read.
        mapped: Servers of the last generation whose memory this rank has mapped.
        keys: The keys that this rank knows; None unless it was a worker in the last generation.
        local: True unless this rank is a worker and some servers are on other nodes.
        shared_cores: True if processes of its node share cores.
        known: Name of a service -> what this rank knows of the service; empty unless it was a worker in the last
            generation.
        held: Name of a service -> what this rank can read of the service (`ServiceKind.describe`).
        changes: On a worker of a store with servers: the number of changes of settings that it has begun, the number of
            those that are complete, and the last change.
    """

    owners: list[OwnerInventory] = []
    mapped: list[int] = []
    keys: list[KeyCard] | None = None
    local: bool = True
    shared_cores: bool = False
    known: dict[str, bytes] = {}
    held: dict[str, bytes] = {}
    changes: tuple[int, int, bytes] = (0, 0, b"")


def common_keys(inventories: Sequence[Inventory]) -> list[KeyCard]:
    """Return the keys that all workers of the last generation know, in the order of the first of these workers.

    A key counts only if all these workers know it with the same shape and dtype.
    """
    lists = [inventory.keys for inventory in inventories if inventory.keys is not None]
    known = [{*cards} for cards in lists]
    return [card for card in lists[0] if all(card in cards for cards in known)] if lists else []


def dtype_names(arrays: Sequence[Any]) -> list[str]:
    """Return the names of arrays' dtypes, for messages between ranks."""
    return [np.asarray(array).dtype.name for array in arrays]


class _Settings(msgspec.Struct, array_like=True):
    default: bytes | None = None
    own: list[tuple[int | str, bytes]] = []
    compression: dict[str, str | int | float] | None = None


def encode_settings(groups: Groups, compressor: Compressor | None) -> bytes:
    """Encode optimizers and compression, for a server's ledger and for other ranks."""
    own = [(name, encode(optimizer)) for name, optimizer in groups.own.items()]
    default = None if groups.default is None else encode(groups.default)
    options = None if compressor is None else compression.options(compressor)
    return msgspec.msgpack.encode(_Settings(default, own, options))


def decode_settings(data: bytes) -> tuple[Groups, Compressor | None]:
    """Decode what `encode_settings` wrote."""
    settings = msgspec.msgpack.decode(data, type=_Settings)
    default = None if settings.default is None else decode(settings.default)
    groups = Groups(default, {name: decode(optimizer) for name, optimizer in settings.own})
    return groups, None if settings.compression is None else compression.create(settings.compression)


# ---- the choice of rounds, and the plan that follows from it


class UnitSlice(NamedTuple):
    """Elements [start, stop) of a key, taken from a unit of an owner.

    Attributes:
        owner: The number of the owner.
        unit: The index of the unit in the owner's inventory.
        before: True to take the elements as they were one round before the unit's newest round.
    """

    owner: int
    unit: int
    before: bool
    start: int
    stop: int


class KeyChoice(NamedTuple):
    """The round of a key in the next generation, and the slices of old units that make up the key."""

    round: int
    torn: bool
    slices: list[UnitSlice]


class Choice(NamedTuple):
    """The rounds of all keys, and of all collections of services, in the next generation.

    Attributes:
        step: The common round of all keys and collections that were ever pushed; None if their rounds differ.
        lost: Keys and collections with a part that no rank has.
        rounds: Name of a key or collection -> its round, for all that can be restored completely. Empty in an
            asynchronous store.
    """

    keys: dict[Name, KeyChoice]
    step: int | None
    lost: list[Name]
    rounds: Mapping[Name, int]


class UnitSource(NamedTuple):
    """Where elements of a new unit come from.

    Attributes:
        slice: The elements, and the old unit that they are taken from.
        holder: The rank that can read the old unit.
        sent: True if the holder sends the elements in messages. False if the new server reads them itself.
    """

    slice: UnitSlice
    holder: int
    sent: bool


class UnitPlan(NamedTuple):
    """A new unit, its server's rank, and where its values come from.

    Attributes:
        adopted: True if the server has the whole unit already. The unit then stays in its old memory.
        pushes: In an asynchronous store: the number of each contributor's pushes that are in the unit.
    """

    server: int
    card: UnitCard
    round: int
    torn: bool
    adopted: bool
    sources: list[UnitSource]
    pushes: list[int] | None


class ReplicaPlan(NamedTuple):
    """The plan for one key in a store without servers. Every worker has a replica of the key.

    Attributes:
        root: The worker that sends the key to the other workers.
        step: The optimizer's step; None if there is no state yet.
        states: Dtypes of the optimizer's state.
        holders: The workers that have the key at this round already.
        everybody: True if all workers have the key at this round, so that nothing has to be sent.
    """

    root: int
    round: int
    step: int | None
    states: list[str]
    holders: list[int]
    everybody: bool


@dataclass
class RecoveryPlan:
    """The plan of the next generation, computed from the inventories of all ranks.

    It is equal on all ranks except `rank`.

    Attributes:
        cards: The units of each server; `units` lists them in the same order.
        replicas: In a store without servers: the plan of each key. There `units` is empty.
        rank: The rank that has made this plan.
        copies: Number of an owner -> the owner's units.
        services: Name of a service -> its plan.
    """

    inventories: Sequence[Inventory]
    choice: Choice
    keys: list[Key] = field(default_factory=list)
    cutting: Cutting | None = None
    cards: Cards = field(default_factory=dict)
    units: list[UnitPlan] = field(default_factory=list)
    replicas: dict[Name, ReplicaPlan] = field(default_factory=dict)
    services: dict[str, ServicePlan] = field(default_factory=dict)
    rank: int = 0
    copies: dict[int, list[UnitCopy]] = field(default_factory=dict)

    def copy_of(self, source: UnitSource) -> UnitCopy:
        """Return the old unit that a source takes from."""
        return self.copies[source.slice.owner][source.slice.unit]

    @property
    def rounds(self) -> Rounds:
        """The rounds of all keys, and of all collections of services.

        In an asynchronous store, these are the numbers of this worker's pushes that count.
        """
        rounds = Rounds({key.name: key.round for key in self.keys})
        torn = [name for name, chosen in self.choice.keys.items() if chosen.torn]
        for service in self.services.values():
            rounds.update(service.rounds_of(self.rank))
            torn += service.torn
        rounds.torn = tuple(torn)
        rounds.step = self.choice.step
        return rounds

    # ---- optimizers and compression

    @property
    def best_settings(self) -> OwnerInventory | None:
        """The owner whose settings are used: the owner with the most changes, and among equals, the lowest rank."""
        own = [owner for inventory in self.inventories for owner in inventory.owners if not owner.is_mirror]
        return max(own, key=lambda owner: (owner.changes, -owner.owner), default=None)

    def settings(self) -> tuple[Groups, Compressor | None]:
        """Return optimizers and compression as they were before `change`."""
        best = self.best_settings
        return (Groups(), None) if best is None else decode_settings(best.settings)

    @property
    def change(self) -> Change | None:
        """The last change of settings that was begun, if no worker knows that it is complete; otherwise None.

        The servers make this change again.
        """
        begun, _, last = self._last_change()
        if not last or max(inventory.changes[1] for inventory in self.inventories) >= begun:
            return None
        return frames.decode_request(last)  # type: ignore[return-value]

    def settings_after(self, refusals: Sequence[str]) -> tuple[Groups, Compressor | None, tuple[int, int, bytes]]:
        """Return optimizers and compression after `change`, or before it if all servers have refused it.

        Also return the numbers of changes begun and made, and the last change, as in `Inventory.changes`.

        Args:
            refusals: For each server, the reason why it has refused the change, or "".

        Raises:
            CollectiveError: Some servers have refused the change and others have not.
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
        return max((inventory.changes for inventory in self.inventories), key=lambda changes: changes[0])


class ServerReady(msgspec.Struct, array_like=True):
    """The message that a server sends to all ranks once its units are filled. Other ranks send an empty message.

    Attributes:
        where: The places of the server's units in its memory.
        refusal: The reason why the server refuses the change of settings that the end of the last generation
            interrupted, or "".
    """

    where: Created | None = None
    refusal: str = ""


# ---- the choice of rounds


class OldUnit(NamedTuple):
    """An old unit of a key that some rank can read, and its owner."""

    owner: OwnerInventory
    # its index in the owner's inventory
    number: int
    copy: UnitCopy


def choose_rounds(
    inventories: Sequence[Inventory],
    synchronous: bool,
    replicas: bool = False,
    services: Collection[FoundService] = (),
) -> Choice:
    """Choose the round of each key and collection (such as a table), and the owners from which each key is taken.

    A key for which no complete round can be restored is marked as torn.

    Args:
        replicas: True if the store has no servers. Torn replicas are then not used for complete rounds.
    """
    sizes = {card.name: prod(card.shape) for card in common_keys(inventories)}
    units = _old_units(sizes, [owner for inventory in inventories for owner in inventory.owners])
    whole: dict[Name, list[OldUnit]] = {}
    available: dict[Name, Sequence[int]] = {}
    if synchronous:
        for name, every in units.items():
            whole[name] = [unit for unit in every if not (replicas and unit.copy.torn)]
            available[name] = _whole_rounds(sizes[name], whole[name])
        for service in services:
            available |= service.rounds
    rounds, step = common_round({name: each for name, each in available.items() if each}, synchronous)
    keys: dict[Name, KeyChoice] = {}
    for name, every in units.items():
        if name in rounds:
            round_, torn = rounds[name], any(unit.copy.torn for unit in whole[name])
            slices = _cover(sizes[name], whole[name], round_)
        else:
            round_ = max((unit.copy.rounds[0].round for unit in every), default=0)
            torn = synchronous or any(unit.copy.torn for unit in every)
            slices = _cover(sizes[name], every, None)
        if slices is not None:
            keys[name] = KeyChoice(round_, torn, slices)
    together = synchronous and len(rounds) == len(available)
    lost = [name for name in units if name not in keys] + [name for service in services for name in service.lost]
    return Choice(keys, step if together else None, lost, rounds)


def common_round(available: Mapping[Name, Collection[int]], synchronous: bool) -> tuple[dict[Name, int], int | None]:
    """Choose the round of each key. Also return the common round of all keys, or None if their rounds differ.

    In a synchronous store all keys get a common round if possible: the lowest of their newest rounds. If keys that were
    never pushed prevent this, these keys stay at round 0, and the other keys get a common round. If that is not
    possible either, or if the store is asynchronous, each key gets its own newest round.

    Args:
        available: For each key, the rounds at which the whole key can be restored; at least one round.
    """
    newest = {name: max(rounds) for name, rounds in available.items()}
    for names in (list(newest), [name for name, round_ in newest.items() if round_]):
        common = min((newest[name] for name in names), default=0)
        if synchronous and all(common in available[name] for name in names):
            return newest | dict.fromkeys(names, common), common
    return newest, None


def _old_units(sizes: Mapping[Name, int], owners: Sequence[OwnerInventory]) -> dict[Name, list[OldUnit]]:
    """Return the old units of each key. Copies of mirrors are included only if the servers' own memory lacks a part."""
    own: dict[Name, list[OldUnit]] = {name: [] for name in sizes}
    mirrored: dict[Name, list[OldUnit]] = {name: [] for name in sizes}
    for owner in owners:
        for index, copy in enumerate(owner.units):
            if copy.key in sizes:
                (mirrored if owner.is_mirror else own)[copy.key].append(OldUnit(owner, index, copy))
    return {
        name: units if _cover(sizes[name], units, None) is not None else units + mirrored[name]
        for name, units in own.items()
    }


def _whole_rounds(size: int, units: Sequence[OldUnit]) -> list[int]:
    """Return the rounds at which the whole key can be restored."""
    rounds = {available.round for unit in units for available in unit.copy.rounds}
    return [round_ for round_ in rounds if _cover(size, units, round_) is not None]


# Of several units with the same elements, the one with the largest tuple is used: (the owner lives, the owner is not a
# mirror, number of changes of settings that the owner has made, round).
Preference = tuple[bool, bool, int, int]


def _cover(size: int, units: Sequence[OldUnit], round_: int | None) -> list[UnitSlice] | None:
    """Choose slices of units that make up a whole key at this round. Return None if that is impossible.

    If `round_` is None, take each unit at its newest round.
    """
    fit = sorted(_at_round(units, round_), key=lambda each: (each[0].start, each[0].stop))
    if not size:
        return [max(fit, key=lambda each: each[1])[0]] if fit else None
    slices: list[UnitSlice] = []
    at = 0
    while at < size:
        covering = [each for each in fit if each[0].start <= at < each[0].stop]
        if not covering:
            return None
        best, _ = max(covering, key=lambda each: (each[1], each[0].stop))
        slices.append(best._replace(start=at))
        at = best.stop
    return slices


def _at_round(units: Sequence[OldUnit], round_: int | None) -> Iterable[tuple[UnitSlice, Preference]]:
    """For each unit that can be restored at this round, yield a slice with the whole unit, and its preference.

    If `round_` is None, take each unit at its newest round.
    """
    for owner, index, copy in units:
        for number, available in enumerate(copy.rounds[: 1 if round_ is None else None]):
            if round_ is None or available.round == round_:
                preference = owner.live, not owner.is_mirror, owner.changes, available.round
                yield UnitSlice(owner.owner, index, number > 0, copy.start, copy.stop), preference


# ---- the plan


def make_plan(
    layout: Layout,
    inventories: Sequence[Inventory],
    choice: Choice,
    lines: Sequence[Any] = (),
    services: Mapping[str, FoundService] | None = None,
) -> RecoveryPlan:
    """Make the plan. Raise LostError if a part of any key or collection is lost.

    Args:
        inventories: The inventories of all ranks, in the order of ranks.
        lines: A worker's connections to the servers. On other ranks a None for each server.
    """
    if choice.lost:
        names = ", ".join(map(repr, choice.lost[:SHOWN])) + ", ..." * (len(choice.lost) > SHOWN)
        raise LostError(
            f"recover: nobody has all parts of {names} any more, because hosts were lost with their memory; "
            "start again from a checkpoint"
        )
    keys = [Key(card.name, tuple(card.shape), dtype_of(card.dtype)) for card in common_keys(inventories)]
    for key in keys:
        key.round = choice.keys[key.name].round
    if layout.num_servers:
        planned = {name: service.plan(choice.rounds) for name, service in (services or {}).items()}
        return _plan_units(layout, inventories, choice, keys, lines, planned)
    return RecoveryPlan(inventories, choice, keys, replicas=_plan_replicas(layout, inventories, choice))


def _owners(inventories: Sequence[Inventory]) -> dict[int, OwnerInventory]:
    return {owner.owner: owner for inventory in inventories for owner in inventory.owners}


def _plan_replicas(layout: Layout, inventories: Sequence[Inventory], choice: Choice) -> dict[Name, ReplicaPlan]:
    owners = _owners(inventories)
    plans = {}
    for name, chosen in choice.keys.items():
        root = chosen.slices[0].owner
        versions = {owner: _replica_version(inventory, name, chosen) for owner, inventory in owners.items()}
        version = versions[root]
        assert version is not None
        _, step, states = version
        holders = [owner for owner, other in versions.items() if other == version]
        everybody = len(holders) == layout.num_workers and not chosen.torn
        plans[name] = ReplicaPlan(root, chosen.round, step, states, holders, everybody)
    return plans


def _replica_version(owner: OwnerInventory, name: Name, chosen: KeyChoice) -> tuple[int, int | None, list[str]] | None:
    """Return (number of changes of settings, optimizer's step, dtypes of state) of an owner's key at the chosen round.

    Return None if the owner does not have the key at this round.
    """
    for copy in owner.units:
        for available in copy.rounds if copy.key == name else ():
            if available.round == chosen.round and copy.torn == chosen.torn:
                return owner.changes, available.step, [] if available.step is None else copy.states
    return None


def _plan_units(
    layout: Layout,
    inventories: Sequence[Inventory],
    choice: Choice,
    keys: list[Key],
    lines: Sequence[Any],
    services: dict[str, ServicePlan],
) -> RecoveryPlan:
    owners = _owners(inventories)
    counts = _count_pushes(layout, choice.keys, owners) if layout.asynchronous else {}
    if layout.asynchronous and layout.is_worker:
        for key in keys:
            key.round = counts[key.name][layout.rank]
    one_node = all(inventory.local for inventory in inventories[: layout.num_workers])
    cutting = Cutting(layout, one_node, not (inventories[0].shared_cores or layout.asynchronous))
    cards: Cards = {server: [] for server in range(layout.num_servers)}
    stays = _keys_stay(layout, choice.keys)
    for key in keys:
        cutting.cut(key, lines, cards, _intervals_by_server(layout, choice.keys[key.name]) if stays else None)
    holders = {owner.owner: rank for rank, inventory in enumerate(inventories) for owner in inventory.owners}
    units = [
        _plan_unit(layout.server_rank(server), card, choice.keys[card.key], owners, holders, inventories, counts)
        for server, cut in cards.items()
        for card in cut
    ]
    copies = {number: owner.units for number, owner in owners.items()}
    plan = RecoveryPlan(
        inventories, choice, keys, cutting, cards, units, services=services, rank=layout.rank, copies=copies
    )
    if layout.asynchronous:
        plan.choice = choice._replace(step=min(filter(None, plan.rounds.values()), default=0))
    return plan


def _plan_unit(
    rank: int,
    card: UnitCard,
    chosen: KeyChoice,
    owners: Mapping[int, OwnerInventory],
    holders: Mapping[int, int],
    inventories: Sequence[Inventory],
    counts: Mapping[Name, Sequence[int]],
) -> UnitPlan:
    """Plan one new unit.

    Args:
        rank: The server of the new unit.
        chosen: The choice for the unit's key.
        holders: Number of an owner -> the rank that can read the owner's memory.
        counts: In an asynchronous store: name of a key -> the number of pushes of each worker that count.
    """
    sources: list[UnitSource] = []
    for piece in chosen.slices:
        start, stop = max(piece.start, card.start), min(piece.stop, card.stop)
        if start < stop or (card.start == card.stop and not sources):
            holder = holders[piece.owner]
            sent = holder != rank and piece.owner not in inventories[rank].mapped
            sources.append(UnitSource(piece._replace(start=start, stop=max(start, stop)), holder, sent))
    first = sources[0]
    owner = owners[first.slice.owner]
    old = owner.units[first.slice.unit]
    same = len(sources) == 1 and (old.start, old.stop) == (card.start, card.stop)
    adopted = same and owner.live and first.holder == rank
    pushes = [counts[card.key][worker] for worker in card.contributors] if counts else None
    return UnitPlan(rank, card, chosen.round, chosen.torn, adopted, sources, pushes)


def _intervals_by_server(layout: Layout, chosen: KeyChoice) -> list[tuple[int, Interval]]:
    """Return (server, interval) for each interval of a key that a server had in the last generation.

    Adjacent intervals of a server are joined.
    """
    first = layout.num_workers if layout.before is None else layout.before.num_workers
    intervals: list[tuple[int, Interval]] = []
    for piece in chosen.slices:
        server, start = piece.owner - first, piece.start
        if intervals and intervals[-1][0] == server and intervals[-1][1].stop == start:
            start = intervals.pop()[1].start
        intervals.append((server, Interval(start, piece.stop)))
    return intervals


def _keys_stay(layout: Layout, chosen: Mapping[Name, KeyChoice]) -> bool:
    """True if each key stays on servers with the same numbers as in the last generation.

    False if the number of servers has changed, or if a mirror's copy is used.
    """
    before = layout.before
    if before is None:
        return True
    owners = {piece.owner for choice in chosen.values() for piece in choice.slices}
    return before.num_servers == layout.num_servers and all(
        before.num_workers <= owner < before.num_workers + before.num_servers for owner in owners
    )


def _count_pushes(
    layout: Layout, chosen: Mapping[Name, KeyChoice], owners: Mapping[int, OwnerInventory]
) -> dict[Name, list[int]]:
    """For each key of an asynchronous store, return the number of pushes of each worker, or of its client, that count.

    A push counts even if it has reached only some servers when the generation ended. An additional worker, which was
    added when the store grew, begins with the count of the slowest worker.
    """
    before, counts = layout.before, {}
    assert before is not None
    for name, choice in chosen.items():
        # contributor of the last generation -> number of its pushes
        pushes: dict[int, int] = {}
        for piece in choice.slices:
            for worker, count in owners[piece.owner].units[piece.unit].pushes:
                pushes[worker] = max(count, pushes.get(worker, 0))
        continued = [
            [pushes[old] for old in before.in_whose_place(worker, layout.kind) if old in pushes]
            for worker in range(layout.num_workers)
        ]
        slowest = min(pushes.values(), default=0)
        counts[name] = [max(each, default=slowest) for each in continued]
    return counts
