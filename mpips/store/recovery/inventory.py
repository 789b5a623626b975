"""Records of what ranks have when a generation is over: units of servers, living or dead, and keys of workers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from mpips.store.keys.key import Key


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
