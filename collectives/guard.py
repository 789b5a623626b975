"""What carries a call out, and how its ranks see first that all are in the same call."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Protocol

import numpy as np
from mpi4py import MPI

from collectives.call import Call
from collectives.network.native import NativePlan
from collectives.session import Session
from collectives.started import HELD
from collectives.transport import flat
from collectives.transport.cards import Card
from collectives.transport.flat import Usual
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
        self.quick: Usual | None = None
        """Carries the call out at once, where that is possible and the others bring what they always bring."""

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
        room = self._home.room
        if self._home.size > 1:
            yield from room.caught_up()
            if not self._token or not room.readable(self._token):
                self._token = room.publish(Card(self._call.text))
            room.enter(self._token)
        yield from self.met()

    def met(self) -> Iterator[None]:
        """The steps after this rank has entered."""
        room = self._home.room
        if self._home.size > 1:
            yield from room.meet()
            if room.tokens_now() != self._tokens:
                self._tokens = self.quick = None
                room.cards(room.tokens_now())
                self._tokens = room.tokens_now()
        yield from self.inner.run()
        steps = self.inner.blocking() if isinstance(self.inner, NativePlan) else ()
        if steps and self._tokens and self.quick is None:
            takes = flat.loop("takes", (steps, steps))
            self.quick = room.usual(self._token, self._tokens, takes=takes)

    def afresh(self) -> Iterator[None]:
        """Begin with another card."""
        return HELD if self._home.room.held else self._met()

    def break_off(self, error: BaseException) -> None:
        """This rank leaves as it entered: who leaves the session takes back its entry (`Session.leave`)."""

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
