"""Workers whose collectives belong together see that they make the same call, in the same order.

A collective of two keys of equal size and dtype would succeed and sum what does not belong together. Where workers
share a node, each notes its call beforehand and all compare the notes afterwards (`Roll`), which costs no message;
between nodes they compare a checksum beforehand, because there MPI's collectives of unequal sizes end in garbage.
"""

from __future__ import annotations

import zlib
from collections.abc import Generator

import msgspec
import numpy as np
from mpi4py import MPI

from mpips import meet
from mpips.arguments import Name
from mpips.roll import Roll


class Card(msgspec.Struct, array_like=True):
    """What a worker calls, or why it cannot."""

    what: str
    keys: list[Name]
    """The keys that it is yet to use in this call, the present one first."""
    pushes: bool
    refusal: str = ""


class Agreement:
    """The calls of the workers of `comm`, from worker `first` on, in program order. Making it is collective."""

    def __init__(self, comm: MPI.Comm, first: int, one_node: bool) -> None:
        self._comm, self._first = comm, first
        self._roll = Roll(comm) if one_node else None
        self.calls = 0
        """Calls that this worker has said, the same as all have."""

    @property
    def one_node(self) -> bool:
        """Whether calls are noted before and compared after; else they are compared before."""
        return self._roll is not None

    def note(self, text: str) -> None:
        """On one node: what this worker calls next."""
        assert self._roll is not None
        self.calls += 1
        self._roll.note(text)

    def noted(self) -> bool:
        """On one node: whether all have made the same call; to be asked when it is over."""
        assert self._roll is not None
        return self._roll.agrees()

    def same(self, text: str) -> Generator[None, None, bool]:
        """Between nodes: whether all call the same next."""
        self.calls += 1
        digest = zlib.crc32(text.encode())
        extremes = np.array([digest, -digest], np.int64)
        request = self._comm.Iallreduce(MPI.IN_PLACE, extremes, MPI.MAX)
        while not request.Test():
            yield
        return bool(extremes[0] == -extremes[1])

    def explain(self, card: Card, fallback: str) -> tuple[str, list[Card]]:
        """The sentence about a call that cannot be made, or that differs, and what each worker called.

        Collective, blocking; `fallback` where all called the same.
        """
        told = meet.exchange(self._comm, msgspec.msgpack.encode(card), card.what)
        cards = [msgspec.msgpack.decode(data, type=Card) for data in told]
        refusals = [other.refusal for other in cards if other.refusal]
        if refusals:
            return refusals[0], cards
        calls = [f"{other.what} of key {other.keys[0]!r}" if other.keys else other.what for other in cards]
        if len(set(calls)) == 1:
            return fallback, cards
        texts = "; ".join(f"rank {self._first + index}: {call}" for index, call in enumerate(calls))
        return f"workers that sum together must make the same calls in the same order, but {texts}", cards
