"""The plan of a recovery: at which round each key stands, and from whose memory each unit comes. Pure.

Every rank brings an `Inventory`; the same plan follows on every rank. A round may have ended for some keys and not for
others. Where all can be put back to one, none is lost and none counts twice: the training loop makes the others again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from mpips.store.keys.key import Key, Name
from mpips.store.keys.sharding import Interval
from mpips.store.remote.setup import Cards, Cutting
from mpips.store.roles import Layout
from mpips.store.runtime.errors import LostError
from mpips.store.transport.frames import UnitCard, dtype_of


def copies_of(rank: int) -> int:
    """The owner of the shelf with the copies that this rank keeps."""
    return -1 - rank


class Holding(msgspec.Struct, array_like=True):
    """What is there of a unit: elements [start, stop) of a key."""

    key: int | str
    start: int
    stop: int
    standings: list[tuple[int, int | None]]
    """The rounds at which it can be had, the newest first, each with the optimizer's step; None: no state yet."""
    torn: bool
    states: list[str]
    """Dtypes of the optimizer's state."""
    pushes: list[tuple[int, int]] = []
    """In an asynchronous store, of each contributor how many of its pushes are in it."""


class Shelf(msgspec.Struct, array_like=True):
    """What is there of a server, and who it was in the generation before. `live`: who says so is that server itself.
    The copies that it keeps of others' units as their mirror are another shelf."""

    owner: int
    live: bool
    settings: bytes
    units: list[Holding]

    @property
    def is_copy(self) -> bool:
        """Whether these are copies."""
        return self.owner < 0


class KeyCard(msgspec.Struct, array_like=True):
    """A key as a worker knows it."""

    name: int | str
    shape: tuple[int, ...]
    dtype: str

    @classmethod
    def of(cls, key: Key) -> KeyCard:
        """The card of a key."""
        return cls(key.name, tuple(key.shape), key.dtype.name)


class Inventory(msgspec.Struct, array_like=True):
    """What one rank brings to the beginning of a generation."""

    shelves: list[Shelf]
    mapped: list[int]
    """Servers of the generation before whose memory it has mapped."""
    keys: list[KeyCard] | None = None
    """On a worker that was one before."""
    local: bool = True
    """On a worker: whether all servers share its node."""
    shared_cores: bool = False
    """Whether processes of its node share cores."""
    changes: tuple[int, int, bytes] = (0, 0, b"")
    """On a worker: how many changes of settings it has begun, how many it has made, and the last one."""


def common_keys(said: Sequence[Inventory]) -> list[KeyCard]:
    """The keys that all workers know which were workers before, in the order of the first of them."""
    lists = [one.keys for one in said if one.keys is not None]
    if not lists:
        return []
    known = [{card.name for card in cards} for cards in lists]
    return [card for card in lists[0] if all(card.name in names for names in known)]


def dtype_names(arrays: Sequence[Any]) -> list[str]:
    """Dtypes of arrays as messages hold them."""
    return [np.asarray(array).dtype.name for array in arrays]


class Chosen(NamedTuple):
    """The round of each key, and that of all of them together, if there is one."""

    rounds: dict[Name, int]
    step: int | None


def choose(available: Mapping[Name, Collection[int]], synchronous: bool) -> Chosen:
    """From the rounds at which each key can be had whole, one at least, to the one at which it is to stand.

    In a synchronous store all keys stand at one round where they can: the lowest of their newest ones. Keys that were
    never pushed do not hinder that. Else each stands at its own newest.
    """
    newest = {name: max(rounds) for name, rounds in available.items()}
    for names in (list(newest), [name for name, round_ in newest.items() if round_]):
        common = min((newest[name] for name in names), default=0)
        if synchronous and all(common in available[name] for name in names):
            return Chosen(newest | dict.fromkeys(names, common), common)
    return Chosen(newest, None)


class Part(NamedTuple):
    """Elements [start, stop) of a key from a unit of an old server, or a copy of it: its place on the shelf of the
    `owner`, as it is, or as it was a round `before`."""

    owner: int
    unit: int
    before: bool
    start: int
    stop: int


class KeyPlan(NamedTuple):
    """A key in the next generation, and the parts that it is made of."""

    round: int
    torn: bool
    parts: list[Part]


class Found(NamedTuple):
    """All keys in the next generation: at one step of training where they could be put there. `lost`: keys of which
    something is nowhere."""

    keys: dict[Name, KeyPlan]
    step: int | None
    lost: list[Name]


Place = tuple[Shelf, int, Holding]


def find(cards: Sequence[KeyCard], sizes: Sequence[int], shelves: Sequence[Shelf], synchronous: bool) -> Found:
    """What each key is to hold. A torn key is one of which no whole round is there."""
    size_of = dict(zip([card.name for card in cards], sizes, strict=True))
    places = _places(size_of, shelves)
    whole = {name: _rounds(size_of[name], places[name]) for name in places if synchronous}
    chosen = choose({name: rounds for name, rounds in whole.items() if rounds}, synchronous)
    keys: dict[Name, KeyPlan] = {}
    for name, there in places.items():
        if name in chosen.rounds:
            round_ = chosen.rounds[name]
            parts, torn = _cover(size_of[name], there, round_), any(holding.torn for _, _, holding in there)
        else:
            round_ = max((holding.standings[0][0] for _, _, holding in there), default=0)
            parts = _cover(size_of[name], there, None)
            torn = synchronous or any(holding.torn for _, _, holding in there)
        if parts is not None:
            keys[name] = KeyPlan(round_, torn, parts)
    step = chosen.step if len(chosen.rounds) == len(places) else None
    return Found(keys, step if synchronous else None, [name for name in places if name not in keys])


def parts_by_server(chosen: Mapping[Name, KeyPlan], first_server: int) -> dict[Name, list[tuple[int, int, int]]]:
    """Where keys lay before: (server, start, stop), what lies side by side on a server as one."""
    found = {}
    for name, one in chosen.items():
        joined: list[tuple[int, int, int]] = []
        for part in one.parts:
            server = part.owner - first_server
            if joined and joined[-1][0] == server and joined[-1][2] == part.start:
                joined[-1] = server, joined[-1][1], part.stop
            else:
                joined.append((server, part.start, part.stop))
        found[name] = joined
    return found


def _places(size_of: Mapping[Name, int], shelves: Sequence[Shelf]) -> dict[Name, list[Place]]:
    """What there is of each key: copies of mirrors only where servers' own memory is not all there."""
    own: dict[Name, list[Place]] = {name: [] for name in size_of}
    copies: dict[Name, list[Place]] = {name: [] for name in size_of}
    for shelf in shelves:
        for index, holding in enumerate(shelf.units):
            if holding.key in size_of:
                (copies if shelf.is_copy else own)[holding.key].append((shelf, index, holding))
    return {
        name: there if _cover(size_of[name], there, None) is not None else there + copies[name]
        for name, there in own.items()
    }


def _rounds(size: int, places: Sequence[Place]) -> list[int]:
    """The rounds at which a key can be had whole."""
    rounds = {round_ for _, _, holding in places for round_, _ in holding.standings}
    return [round_ for round_ in rounds if _cover(size, places, round_) is not None]


def _cover(size: int, places: Sequence[Place], round_: int | None) -> list[Part] | None:
    """Units that make up a whole key at this round, or, where None, each at its newest; None where they do not."""
    fit = sorted(_at_round(places, round_), key=lambda each: (each[0].start, each[0].stop))
    if not size:
        return [fit[0][0]] if fit else None
    parts: list[Part] = []
    at = 0
    while at < size:
        here = [each for each in fit if each[0].start <= at < each[0].stop]
        if not here:
            return None
        part, _ = max(here, key=lambda each: (each[1], each[0].stop))
        parts.append(Part(part.owner, part.unit, part.before, at, part.stop))
        at = part.stop
    return parts


def _at_round(places: Sequence[Place], round_: int | None) -> Iterable[tuple[Part, tuple[bool, bool, int]]]:
    """Each unit that can stand at this round, and how good it is: its server lives, it is not a copy, it is new."""
    for shelf, index, holding in places:
        for number, (standing, _) in enumerate(holding.standings[: 1 if round_ is None else None]):
            if round_ is None or standing == round_:
                goodness = shelf.live, not shelf.is_copy, standing
                yield Part(shelf.owner, index, number > 0, holding.start, holding.stop), goodness


SHOWN = 4


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


class RecoveryPlan(NamedTuple):
    """The next generation. `cards`: the units of each server; `fillings` has them in the same order."""

    found: Found
    keys: list[Key]
    cutting: Cutting
    cards: Cards
    fillings: list[UnitPlan]
    holdings: dict[int, list[Holding]]
    """By the ranks that old servers had."""


def make(layout: Layout, said: Sequence[Inventory], lines: Sequence[Any]) -> RecoveryPlan:
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
    return RecoveryPlan(found, keys, cutting, new, fillings, {owner: shelf.units for owner, shelf in owners.items()})


def _cutting(layout: Layout, said: Sequence[Inventory]) -> Cutting:
    one_node = all(one.local for one in said[: layout.num_workers])
    return Cutting(layout, one_node, not (said[0].shared_cores or layout.asynchronous))


def _stays(layout: Layout, chosen: Mapping[Name, KeyPlan]) -> bool:
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
) -> UnitPlan:  # fmt: skip
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
    return UnitPlan(rank, card, chosen.round, chosen.torn, adopted, transfers, pushes)


def _pushes(layout: Layout, chosen: Mapping[Name, KeyPlan], shelves: Sequence[Shelf]) -> dict[Name, list[int]]:
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
