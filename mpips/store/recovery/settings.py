"""Optimizers and compression of a server as bytes, for its ledger and for the others."""

from __future__ import annotations

import msgspec

from mpips.compression import registry as compression
from mpips.compression.base import Compressor
from mpips.optimizers.groups import Groups
from mpips.optimizers.registry import decode, encode
from mpips.store.keys.key import Name


class _Settings(msgspec.Struct, array_like=True):
    default: bytes | None = None
    own: list[tuple[int | str, bytes]] = []
    compression: dict[str, str | int | float] | None = None


def encode_settings(groups: Groups, compressor: Compressor | None) -> bytes:
    """Settings of a server as bytes."""
    own: list[tuple[Name, bytes]] = [(name, encode(one)) for name, one in groups.own.items()]
    default = None if groups.default is None else encode(groups.default)
    chosen = None if compressor is None else compression.options(compressor)
    return msgspec.msgpack.encode(_Settings(default, own, chosen))


def decode_settings(data: bytes) -> tuple[Groups, Compressor | None]:
    """What `encode_settings` was given."""
    said = msgspec.msgpack.decode(data, type=_Settings)
    default = None if said.default is None else decode(said.default)
    groups = Groups(default, {name: decode(one) for name, one in said.own})
    return groups, None if said.compression is None else compression.create(said.compression)
