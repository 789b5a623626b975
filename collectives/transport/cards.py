"""What ranks bring to an operation: cards on their desks, each of which a token stands for.

A card holds a digest and a text of the call, and where the rank's arrays are. Who sees a token that he does not know
reads the card; so bindings need no message.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from collectives.errors import CollectiveError
from collectives.node.arena import Region

if TYPE_CHECKING:
    from numpy.typing import NDArray

CARDS = 512
CARD_BYTES = 512
HEAD_WORDS = 16
HEAD_BYTES = HEAD_WORDS * 8
TEXT_BYTES = CARD_BYTES - HEAD_BYTES
CARDS_AT = 4096
CARDS_END = CARDS_AT + CARDS * CARD_BYTES
NOWHERE = Region(0, 0, 0, 0, 0)
REFUSED, WITHDRAWN, STALLED = 1, 2, 3


class Card(NamedTuple):
    """What a rank brings to an operation: which call, and where its arrays are (NOWHERE: memory of its own)."""

    text: str
    refused: int = 0
    """Why there is no operation: REFUSED, or WITHDRAWN by a rank that had waited too long or was interrupted."""
    x: Region = NOWHERE
    out: Region = NOWHERE
    x_at: int = 0
    """The address of x in the rank's own memory, where others can reach it (`reach`); else 0."""
    out_at: int = 0


class Cards:
    """The cards on the desks of all ranks, of which this rank puts its own. `names`: the ranks in the user's
    communicator."""

    def __init__(self, desks: Sequence[NDArray[np.uint8]], rank: int, names: Sequence[int]):
        self.desks, self.rank, self.names = desks, rank, tuple(names)
        self.last_token = 0
        """The youngest card's."""
        self.spent = -CARDS
        """What is brought at once brings a token above this one."""
        self._held = False
        self._known: dict[tuple[int, int], Card] = {}

    def publish(self, card: Card) -> int:
        """Put a card on the desk and give back its token. The card stays readable until CARDS more have been put."""
        self.last_token += 1
        token = self.last_token
        raw = card.text.encode()
        text = raw[:TEXT_BYTES]
        words = np.zeros(HEAD_WORDS, np.uint64)
        words[:4] = token, zlib.crc32(raw), card.refused, len(text)
        words[4:9], words[9:14], words[14:16] = card.x, card.out, (card.x_at, card.out_at)
        at = CARDS_AT + token % CARDS * CARD_BYTES
        desk = self.desks[self.rank]
        desk[at : at + HEAD_BYTES] = words.view(np.uint8)
        desk[at + HEAD_BYTES : at + HEAD_BYTES + len(text)] = np.frombuffer(text, np.uint8)
        self._keep(self.rank, token, card)
        self.hold(self._held)
        return token

    @property
    def held(self) -> bool:
        """Whether nothing may be brought at once, as something else comes first."""
        return self._held

    def hold(self, held: bool) -> None:
        """From here on, or not, or see anew whether that is so."""
        self._held = held
        self.spent = sys.maxsize if self.held else self.last_token - CARDS

    def _keep(self, rank: int, token: int, card: Card) -> None:
        self._known[rank, token] = card
        self._known.pop((rank, token - CARDS), None)

    def readable(self, token: int) -> bool:
        """Whether a card that this rank has put is still there (a token of -CARDS never is)."""
        return token > self.last_token - CARDS

    def card(self, rank: int, token: int) -> Card:
        """What that token of a rank stands for. CollectiveError where CARDS more have been put meanwhile."""
        known = self._known.get((rank, token))
        if known is None:
            at = CARDS_AT + token % CARDS * CARD_BYTES
            desk = self.desks[rank]
            words = desk[at : at + HEAD_BYTES].view(np.uint64)
            if words[0] != token:
                raise CollectiveError(f"the card of rank {self.names[rank]} has been overwritten")
            numbers = [int(word) for word in words]
            text = bytes(desk[at + HEAD_BYTES : at + HEAD_BYTES + numbers[3]]).decode(errors="replace")
            regions = Region(*numbers[4:9]), Region(*numbers[9:14])
            known = Card(text, numbers[2], *regions, *numbers[14:16])
            self._keep(rank, token, known)
        return known
