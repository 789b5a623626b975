"""Meetings of workers: everybody learns everybody's bytes, or all raise the same sentence.

Meetings are numbered, and each rank says which one it is in, to rank 0, which tells everybody how it ended. So a rank
that gives up fails that meeting for those who come late to it, and all are together again in the next one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from collectives.errors import CollectiveError, StallError
from mpips.meet import Pause

if TYPE_CHECKING:
    from mpi4py import MPI

FIRST_TAG, TAGS = 1024, 30000  # below what MPI promises, above what else is sent between workers
ANSWER_SECONDS = 1.0  # who has waited too long asks rank 0, which may know more

_numbers = [0]


def fresh_number(comm: MPI.Comm) -> int:
    """A number that no two members of `comm` had in common before. Collective.

    What was sent in a call that was given up stays behind, and MPI may give a later communicator the same context.
    """
    from mpi4py import MPI

    highest = np.array(_numbers, np.int64)
    comm.Allreduce(MPI.IN_PLACE, highest, MPI.MAX)
    _numbers[0] = int(highest[0]) + 1
    return _numbers[0]


class _Word(msgspec.Struct, array_like=True):
    """To rank 0: what a rank brings to a meeting. From rank 0: what all have brought. Or why the meeting failed."""

    store: int
    meeting: int
    data: list[bytes]
    failure: str = ""
    timed_out: bool = False


class Meetings:
    """One worker's end. Making it is collective over `comm`, the workers from number `first` on."""

    def __init__(self, comm: MPI.Comm, stall_seconds: float, timeout_seconds: float, first: int = 0) -> None:
        self._comm, self._rank, self._size, self._first = comm, comm.Get_rank(), comm.Get_size(), first
        self._stall, self._timeout = stall_seconds, timeout_seconds
        self._store, self._number = fresh_number(comm), 0
        self._tag = FIRST_TAG + self._store % TAGS
        self._heard: dict[int, dict[int, _Word]] = {}
        """What ranks have said of each meeting that is not over here."""
        self._sends: list[tuple[MPI.Request, bytes]] = []

    def exchange(
        self, payload: bytes, what: str, look: Callable[[float], None] | None = None, *,
        stall_seconds: float | None = None, timeout_seconds: float | None = None, number: int = 0,
    ) -> list[bytes]:  # fmt: skip
        """Everybody's payload, in rank order. Collective, blocking; `look` as in `Pause`. `number`: of the meeting, in
        ascending order, where not all are held; else one more than the last."""
        self._number = number or self._number + 1
        limits = (
            self._stall if stall_seconds is None else stall_seconds,
            self._timeout if timeout_seconds is None else timeout_seconds,
        )
        pause = Pause(lambda: self._waiting(what), *limits, look)
        try:
            if self._rank:
                self._tell(self._word([payload]))
            while (end := self._end(payload)) is None:
                pause()
        except BaseException as error:
            self._give_up(what, error)
            late = self._answer(payload) if isinstance(error, StallError) else None
            if late is None:
                raise
            end = late
        if end.failure:
            raise (StallError if end.timed_out else CollectiveError)(end.failure)
        return end.data

    def refuse(self, what: str, error: BaseException, number: int = 0) -> None:
        """Fail a meeting for all others, without waiting for them; the caller raises `error` by itself."""
        self._number = number or self._number + 1
        self._give_up(what, error, range(self._size))

    def failure(self, number: int) -> str:
        """Why somebody has refused a meeting, before this worker comes to it; "" where nobody has."""
        self._number = max(self._number, number)
        self._listen()
        return next((word.failure for word in self._heard.get(number, {}).values() if word.failure), "")

    # ---- inside

    def _word(self, data: list[bytes], failure: str = "", timed_out: bool = False) -> _Word:
        return _Word(self._store, self._number, data, failure, timed_out)

    def _give_up(self, what: str, error: BaseException, to: Iterable[int] = ()) -> None:
        raised = isinstance(error, (CollectiveError, ValueError, TypeError))
        text = str(error) if raised else f"rank {self._first + self._rank} has given up {what}"
        self._tell(self._word([], text, isinstance(error, StallError)), to)

    def _waiting(self, what: str) -> str:
        if self._rank:
            return f"rank {self._first + self._rank} waits for the other {self._size - 1} ranks in {what}: it"
        there = self._heard.get(self._number, {})
        absent = [self._first + rank for rank in range(1, self._size) if rank not in there]
        return f"rank {self._first} waits for ranks {absent} in {what}: it"

    def _answer(self, payload: bytes) -> _Word | None:
        """How the meeting has ended in spite of this rank's giving up, if it has."""
        until = time.monotonic() + ANSWER_SECONDS
        while self._rank and time.monotonic() < until:
            if (end := self._end(payload)) is not None:
                return end
            time.sleep(1e-3)
        return None

    def _end(self, payload: bytes) -> _Word | None:
        """How the present meeting has ended; None where it has not."""
        self._listen()
        heard = self._heard.get(self._number, {})
        if self._rank:
            return heard.get(0)
        end = next((word for word in heard.values() if word.failure), None)
        if end is None and len(heard) == self._size - 1:
            end = self._word([payload, *(heard[rank].data[0] for rank in range(1, self._size))])
        if end is not None:
            self._tell(end)
        return end

    def _tell(self, word: _Word, to: Iterable[int] = ()) -> None:
        """To these; else to rank 0, from rank 0 to all."""
        data = msgspec.msgpack.encode(word)
        self._sends = [send for send in self._sends if not send[0].Test()]
        for other in to or ((0,) if self._rank else range(self._size)):
            if other != self._rank:
                self._sends.append((self._comm.Isend(data, other, self._tag), data))

    def _listen(self) -> None:
        from mpi4py import MPI

        status = MPI.Status()
        while self._comm.Iprobe(MPI.ANY_SOURCE, self._tag, status):
            data = bytearray(status.Get_count(MPI.BYTE))
            self._comm.Recv([data, MPI.BYTE], status.Get_source(), self._tag)
            word = msgspec.msgpack.decode(data, type=_Word)
            if word.store == self._store and word.meeting >= self._number:
                self._heard.setdefault(word.meeting, {})[status.Get_source()] = word
        for over in [number for number in self._heard if number < self._number]:
            del self._heard[over]
