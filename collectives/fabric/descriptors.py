"""What ranks bring to an operation: descriptors in shared memory, each of which a token stands for.

A descriptor holds the text of the call, a digest of it, and where the rank's arrays are. A rank that sees a token which
it does not know reads the descriptor; so bindings need no message.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from collectives.errors import CollectiveError, MismatchError, ranks

if TYPE_CHECKING:
    from numpy.typing import NDArray

DESCRIPTORS = 512
DESCRIPTOR_BYTES = 1024
HEAD_WORDS = 16
HEAD_BYTES = HEAD_WORDS * 8
TEXT_BYTES = DESCRIPTOR_BYTES - HEAD_BYTES
LAST_TOKEN = (1 << 32) - DESCRIPTORS  # then tokens begin anew, each at the same place of the area; higher ones are none
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


class Descriptor(NamedTuple):
    """What a rank brings: which call, and for each array of it where x and where out is."""

    text: str
    places: tuple[tuple[Place, Place], ...] = ()
    digest: int = 0
    """Of the whole text, of which the descriptor holds TEXT_BYTES."""


class Descriptors:
    """The descriptors in the areas of all ranks, of which this rank puts its own. `names`: the ranks in the user's
    communicator; `spill`: shared memory for the places of more than one array."""

    def __init__(self, areas: Sequence[NDArray[np.uint8]], rank: int, names: Sequence[int]) -> None:
        self._areas, self._rank, self.names = areas, rank, tuple(names)
        self.put = 0
        """Descriptors that this rank has put. One stays readable until DESCRIPTORS more have been put."""
        self._known: dict[tuple[int, int], Descriptor] = {}
        self._many: dict[int, NDArray[np.int64]] = {}

    def publish(self, descriptor: Descriptor, many: NDArray[np.int64] | None = None, place: Place = Place()) -> int:  # noqa: B008
        """Put a descriptor there and give back its token. The places of more than one array lie in `many`, which the
        others find at `place`."""
        token = self.put % LAST_TOKEN + 1
        self.put += 1
        whole = descriptor.text.encode()
        raw = whole[:TEXT_BYTES]
        descriptor = descriptor._replace(text=raw.decode(errors="replace"), digest=digest(whole))
        words = np.zeros(HEAD_WORDS, np.uint64)
        words[:4] = token, descriptor.digest, len(raw), len(descriptor.places)
        if many is not None:
            words[4:10] = place
        elif descriptor.places:
            words[4:16] = np.array(descriptor.places[0], np.uint64).ravel()
        area, at = self._areas[self._rank], token % DESCRIPTORS * DESCRIPTOR_BYTES
        area[at : at + HEAD_BYTES] = words.view(np.uint8)
        area[at + HEAD_BYTES : at + HEAD_BYTES + len(raw)] = np.frombuffer(raw, np.uint8)
        self._many.pop(self._before(token), None)
        if many is not None:
            self._many[token] = many
        self._keep(self._rank, token, descriptor)
        return token

    def readable(self, put: int) -> bool:
        """Whether the descriptor that was the `put`th of this rank is still there."""
        return put > self.put - DESCRIPTORS

    def read(self, rank: int, token: int, attach: Callable[[Place], NDArray[np.uint8]]) -> Descriptor:
        """What that token of a rank stands for. CollectiveError where DESCRIPTORS more have been put meanwhile."""
        known = self._known.get((rank, token))
        if known is None:
            area, at = self._areas[rank], token % DESCRIPTORS * DESCRIPTOR_BYTES
            words = area[at : at + HEAD_BYTES].view(np.uint64).tolist()
            if words[0] != token:
                raise CollectiveError(f"the descriptor of rank {self.names[rank]} has been overwritten")
            text = bytes(area[at + HEAD_BYTES : at + HEAD_BYTES + words[2]]).decode(errors="replace")
            places = words[4:16] if words[3] == 1 else []
            if words[3] > 1:
                places = attach(Place(*words[4:10])).view(np.int64).tolist()
            known = Descriptor(text, _pairs(places), words[1])
            self._keep(rank, token, known)
        return known

    def compare(self, descriptors: Sequence[Descriptor]) -> None:
        """MismatchError, the same on all ranks, unless all descriptors are of the same call."""
        if any(descriptor.digest != descriptors[0].digest for descriptor in descriptors):
            texts = {name: descriptor.text for name, descriptor in zip(self.names, descriptors)}
            raise MismatchError(disagreement(texts))

    def _keep(self, rank: int, token: int, descriptor: Descriptor) -> None:
        self._known[rank, token] = descriptor
        self._known.pop((rank, self._before(token)), None)

    @staticmethod
    def _before(token: int) -> int:
        """The token whose place this one takes."""
        return (token - 1 - DESCRIPTORS) % LAST_TOKEN + 1


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
