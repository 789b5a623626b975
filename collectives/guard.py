"""What carries a call out, and how its ranks see first that all are in the same call."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Protocol

import numpy as np
from mpi4py import MPI

from collectives.call import Call
from collectives.session import Session
from collectives.transport.cards import Card
from collectives.watch import Watch


class Runner(Protocol):
    """What carries a call out."""

    def run(self) -> Iterator[None]:
        """The operation, in steps between which there is something to wait for."""


class Guarded:
    """A runner whose ranks first see that all are in the same call."""

    def __init__(self, home: Session, call: Call, inner: Runner):
        self._home, self._call, self.inner = home, call, inner
        self._token = 0
        self._tokens: tuple[int, ...] | None = None

    def run(self) -> Iterator[None]:
        """The operation, in steps between which there is something to wait for."""
        if self._home.watch is None:
            return self._met()
        return self._watched(self._home.watch, self._home.watch.begin(self._call.text))

    def _watched(self, watch: Watch, number: int) -> Iterator[None]:
        if self._call.algorithm == "native":
            yield from self._compare()
        yield from self.inner.run()
        watch.end(number)

    def _met(self) -> Iterator[None]:
        home = self._home
        if home.size > 1:
            room = home.room
            yield from room.caught_up()
            if not self._token or not room.readable(self._token):
                self._token = room.publish(Card(self._call.text))
            room.enter(self._token)
            yield from room.meet()
            if room.tokens_now() != self._tokens:
                self._tokens = None
                room.cards(room.tokens_now())
                self._tokens = room.tokens_now()
        yield from self.inner.run()

    def _compare(self) -> Iterator[None]:
        """Between nodes MPI's own collectives, unlike our tagged messages, end in garbage where calls differ."""
        digest = zlib.crc32(self._call.text.encode())
        both = np.array([digest, -digest], np.int64)
        request = self._home.comm.Iallreduce(MPI.IN_PLACE, both, MPI.MAX)
        while not request.Test():
            yield
        if both[0] != -both[1] and self._home.watch is not None:
            self._home.watch.agree(self._call.text)

    def free(self) -> None:
        """Give back what the inner runner holds."""
        release = getattr(self.inner, "free", None)
        if release is not None:
            release()
