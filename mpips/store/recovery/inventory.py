"""Records of what ranks hold when a generation is over: units of servers, living or dead, replicas, keys, settings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from mpips.compression import registry as compression
from mpips.compression.base import Compressor
from mpips.optimizers.registry import decode, encode
from mpips.optimizers.schedules import Groups
from mpips.store.keys.key import Key


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
    changes: tuple[int, int, bytes] = (0, 0, b"")
    """On a worker of servers: how many changes of settings it has begun, how many it has made, and the last one."""


def common_keys(said: Sequence[Inventory]) -> list[KeyCard]:
    """Return the keys that all workers know alike which were workers before, in the order of the first of them."""
    lists = [one.keys for one in said if one.keys is not None]
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
    said = msgspec.msgpack.decode(data, type=_Settings)
    default = None if said.default is None else decode(said.default)
    groups = Groups(default, {name: decode(one) for name, one in said.own})
    return groups, None if said.compression is None else compression.create(said.compression)
