"""Calls that all workers make together: they ask for the same, or all raise the same sentence."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeVar

import msgspec

from collectives.errors import CollectiveError, MismatchError, StallError, of_caller
from mpips.arguments import Name
from mpips.layout import Layout
from mpips.talk import Talk

T = TypeVar("T")


class _Signature(msgspec.Struct, array_like=True):
    """What a worker brings to a meeting: what it asks for, or why it cannot."""

    items: list[tuple[Name, str]]
    refusal: str = ""
    data: bytes = b""


class Assembly:
    """The meetings of all workers of a store. `before(what)` is called before each, and may raise ValueError too.

    `withdraws`: where `before` has waited too long on one rank, it raises the same on those who come late.
    """

    def __init__(self, layout: Layout, talk: Talk, before: Callable[[str], None], withdraws: bool) -> None:
        self._layout, self._talk, self._before, self._withdraws = layout, talk, before, withdraws

    def attempt(self, make: Callable[[], T]) -> tuple[T | None, str]:
        """What `make` returns, or the sentence of its error, to be told to everybody."""
        try:
            return make(), ""
        except (ValueError, TypeError) as error:
            return None, f"{type(error).__name__}: rank {self._layout.rank}: {error}"

    def agree(
        self, what: str, items: list[tuple[Name, str]], refusal: str = "", noun: str = "key", data: bytes = b""
    ) -> list[bytes]:
        """Collective, blocking; everybody's data. ValueError or TypeError on every worker where one refuses or asks for
        anything else. `noun`: what the items are, in that sentence."""
        options = self._layout.options
        mine = _Signature([(what, ""), *items], refusal, data)
        try:
            self._before(what)
        except MismatchError:
            raise
        except BaseException as error:
            if not (self._withdraws and isinstance(error, StallError)):
                self._talk.absent(what, error)
            raise
        told = self._meet(what, mine, options.stall_seconds, options.timeout_seconds)
        self._talk.heed()
        return _agreed(what, told, noun)

    def farewell(self) -> None:
        """Meet until all workers close the store; the others hear of it meanwhile where they wait for this one."""
        while True:
            try:
                self._before("close")
            except MismatchError:
                continue  # others were in a call that cannot be made any more, and know it now
            except CollectiveError:
                if self._withdraws:
                    continue  # all have heard it, or will, and compare anew
                # else, after a wait that was given up, there is nothing left to compare on
            try:
                _agreed("close", self._meet("close", _Signature([("close", "")]), math.inf, 0.0))
                return  # also if others had to be freed of a wait before: they go too
            except (ValueError, TypeError, CollectiveError):
                continue

    def _meet(
        self, what: str, mine: _Signature, stall_seconds: float, timeout_seconds: float
    ) -> list[_Signature]:
        told = self._talk.meet(msgspec.msgpack.encode(mine), what, stall_seconds, timeout_seconds)
        return [msgspec.msgpack.decode(data, type=_Signature) for data in told]


def _agreed(what: str, everyone: list[_Signature], noun: str = "key") -> list[bytes]:
    """Everybody's data; ValueError or TypeError where one refuses or asks for anything else."""
    first = everyone[0]
    for rank, other in enumerate(everyone):
        if other.items[0] != first.items[0]:
            raise of_caller(ValueError(_difference(what, first.items, rank, other.items, noun)))
    for other in everyone:
        if other.refusal:
            kind, _, sentence = other.refusal.partition(": ")
            sentence = f"{what}: {sentence}".replace(f": {what}: ", ": ", 1)  # what a call may have said itself
            raise of_caller((TypeError if kind == "TypeError" else ValueError)(sentence))
    for rank, other in enumerate(everyone):
        if other.items != first.items:
            raise of_caller(ValueError(_difference(what, first.items, rank, other.items, noun)))
    return [other.data for other in everyone]


def _difference(
    what: str, first: list[tuple[Name, str]], rank: int, other: list[tuple[Name, str]], noun: str
) -> str:
    """The sentence about the first thing in which two workers' calls differ."""
    if first[0] != other[0]:
        return f"rank 0 calls {first[0][0]}, rank {rank} calls {other[0][0]}: all workers make this call together"
    for mine, theirs in zip(first[1:], other[1:]):
        if mine[0] != theirs[0]:
            return f"{what}: rank 0 gives {noun} {mine[0]!r}, rank {rank} {noun} {theirs[0]!r} in its place"
        if mine[1] != theirs[1]:
            return f"{what}: {noun} {mine[0]!r} is {mine[1]} on rank 0 and {theirs[1]} on rank {rank}"
    return f"{what}: rank 0 gives {len(first) - 1} {noun}s, rank {rank} gives {len(other) - 1}"
