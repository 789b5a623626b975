"""From what ranks have to what keys hold in the next generation: the round of each, and from whose memory. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from mpips.store.keys.key import Name
from mpips.store.recovery.inventory import Holding, KeyCard, Shelf
from mpips.store.recovery.rounds import choose


class Part(NamedTuple):
    """Elements [start, stop) of a key from a unit of an old server, or a copy of it: its place on the shelf of the
    `owner`, as it is, or as it was a round `before`."""

    owner: int
    unit: int
    before: bool
    start: int
    stop: int


class Whole(NamedTuple):
    """A key in the next generation, and the parts that it is made of."""

    round: int
    torn: bool
    parts: list[Part]


class Found(NamedTuple):
    """All keys in the next generation: at one step of training where they could be put there. `lost`: keys of which
    something is nowhere."""

    keys: dict[Name, Whole]
    step: int | None
    lost: list[Name]


Place = tuple[Shelf, int, Holding]


def find(cards: Sequence[KeyCard], sizes: Sequence[int], shelves: Sequence[Shelf], synchronous: bool) -> Found:
    """What each key is to hold. A torn key is one of which no whole round is there."""
    size_of = dict(zip([card.name for card in cards], sizes, strict=True))
    places = _places(size_of, shelves)
    whole = {name: _rounds(size_of[name], places[name]) for name in places if synchronous}
    chosen = choose({name: rounds for name, rounds in whole.items() if rounds}, synchronous)
    keys: dict[Name, Whole] = {}
    for name, there in places.items():
        if name in chosen.rounds:
            round_ = chosen.rounds[name]
            parts, torn = _cover(size_of[name], there, round_), any(holding.torn for _, _, holding in there)
        else:
            round_ = max((holding.standings[0][0] for _, _, holding in there), default=0)
            parts = _cover(size_of[name], there, None)
            torn = synchronous or any(holding.torn for _, _, holding in there)
        if parts is not None:
            keys[name] = Whole(round_, torn, parts)
    step = chosen.step if len(chosen.rounds) == len(places) else None
    return Found(keys, step if synchronous else None, [name for name in places if name not in keys])


def parts_by_server(chosen: Mapping[Name, Whole], first_server: int) -> dict[Name, list[tuple[int, int, int]]]:
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
