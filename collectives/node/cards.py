"""What ranks bring to an operation: cards on their desks, each of which a token stands for.

A card holds the text of the call, a digest of it, and where the rank's arrays are. A rank that sees a token which it
does not know reads the card; so bindings need no message.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from collectives.errors import CollectiveError, MismatchError, ranks

if TYPE_CHECKING:
    from numpy.typing import NDArray

CARDS = 512
CARD_BYTES = 1024
HEAD_WORDS = 16
HEAD_BYTES = HEAD_WORDS * 8
TEXT_BYTES = CARD_BYTES - HEAD_BYTES
LAST_TOKEN = (1 << 32) - CARDS  # then tokens begin anew, each at the same place of the desk; higher ones are none
DIFFERENT = "the ranks call different collectives, and must call the same"
PLACE_WORDS = 12


class Place(NamedTuple):
    """Where one array of a rank is: five integers as `arena.Region` has them (all 0: not shared), and its address in
    the rank's own memory (0: others cannot reach it)."""

    pid: int = 0
    fd: int = 0
    inode: int = 0
    offset: int = 0
    nbytes: int = 0
    address: int = 0

    @property
    def shared(self) -> bool:
        return self.pid != 0


class Card(NamedTuple):
    """What a rank brings: which call, and for each array of it where x and where out is."""

    text: str
    places: tuple[tuple[Place, Place], ...] = ()
    digest: int = 0
    """Of the whole text, of which the card holds TEXT_BYTES."""


class Cards:
    """The cards on the desks of all ranks, of which this rank puts its own. `names`: the ranks in the user's
    communicator; `spill`: shared memory for the places of more than one array."""

    def __init__(self, desks: Sequence[NDArray[np.uint8]], rank: int, names: Sequence[int]) -> None:
        self._desks, self._rank, self.names = desks, rank, tuple(names)
        self.put = 0
        """Cards that this rank has put. One stays readable until CARDS more have been put."""
        self._known: dict[tuple[int, int], Card] = {}
        self._many: dict[int, NDArray[np.int64]] = {}

    def publish(self, card: Card, many: NDArray[np.int64] | None = None, place: Place = Place()) -> int:  # noqa: B008
        """Put a card on the desk and give back its token. The places of more than one array lie in `many`, which the
        others find at `place`."""
        token = self.put % LAST_TOKEN + 1
        self.put += 1
        whole = card.text.encode()
        raw = whole[:TEXT_BYTES]
        card = card._replace(text=raw.decode(errors="replace"), digest=digest(whole))
        words = np.zeros(HEAD_WORDS, np.uint64)
        words[:4] = token, card.digest, len(raw), len(card.places)
        if many is not None:
            words[4:10] = place
        elif card.places:
            words[4:16] = np.array(card.places[0], np.uint64).ravel()
        desk, at = self._desks[self._rank], token % CARDS * CARD_BYTES
        desk[at : at + HEAD_BYTES] = words.view(np.uint8)
        desk[at + HEAD_BYTES : at + HEAD_BYTES + len(raw)] = np.frombuffer(raw, np.uint8)
        self._many.pop(self._before(token), None)
        if many is not None:
            self._many[token] = many
        self._keep(self._rank, token, card)
        return token

    def readable(self, put: int) -> bool:
        """Whether the card that was the `put`th of this rank is still there."""
        return put > self.put - CARDS

    def read(self, rank: int, token: int, attach: Callable[[Place], NDArray[np.uint8]]) -> Card:
        """What that token of a rank stands for. CollectiveError where CARDS more have been put meanwhile."""
        known = self._known.get((rank, token))
        if known is None:
            desk, at = self._desks[rank], token % CARDS * CARD_BYTES
            words = desk[at : at + HEAD_BYTES].view(np.uint64).tolist()
            if words[0] != token:
                raise CollectiveError(f"the card of rank {self.names[rank]} has been overwritten")
            text = bytes(desk[at + HEAD_BYTES : at + HEAD_BYTES + words[2]]).decode(errors="replace")
            places = words[4:16] if words[3] == 1 else []
            if words[3] > 1:
                places = attach(Place(*words[4:10])).view(np.int64).tolist()
            known = Card(text, _pairs(places), words[1])
            self._keep(rank, token, known)
        return known

    def compare(self, cards: Sequence[Card]) -> None:
        """MismatchError, the same on all ranks, unless all cards are of the same call."""
        if any(card.digest != cards[0].digest for card in cards):
            raise MismatchError(disagreement({name: card.text for name, card in zip(self.names, cards)}))

    def _keep(self, rank: int, token: int, card: Card) -> None:
        self._known[rank, token] = card
        self._known.pop((rank, self._before(token)), None)

    @staticmethod
    def _before(token: int) -> int:
        """The token whose place on the desk this one takes."""
        return (token - 1 - CARDS) % LAST_TOKEN + 1


def _pairs(words: Sequence[int]) -> tuple[tuple[Place, Place], ...]:
    starts = range(0, len(words), PLACE_WORDS)
    return tuple((Place(*words[at : at + 6]), Place(*words[at + 6 : at + 12])) for at in starts)


def digest(text: bytes) -> int:
    """What ranks compare in place of the text."""
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def disagreement(texts: Mapping[int, str]) -> str:
    """The sentence for ranks that call with different arguments."""
    by_text: dict[str, list[int]] = {}
    for rank in sorted(texts):
        by_text.setdefault(texts[rank], []).append(rank)
    parts = "; ".join(f"{ranks(numbers)}: {text}" for text, numbers in by_text.items())
    more = " (texts that are alike here differ further on)" if len(by_text) == 1 else ""
    return f"{DIFFERENT}: {parts}{more}"
