"""How nobody hangs and everybody hears the same sentence, at no cost while all is well.

All waits of this package are polling loops, driven by `drive`. A wait that is short never comes here. A long one makes
`Patience` look around now and then: it keeps MPI's own messages moving, warns after ``stall_seconds`` (naming the
operation and the ranks that have not come) and raises StallError after ``timeout_seconds``.

Ranks of one node compare their calls in shared memory (`collectives.transport.room`). For ranks on several nodes there
is `Watch`: operations are numbered; a rank that has waited `SPEAK_SECONDS` tells all others, on a communicator used for
nothing else, which operation it is in. Who hears of an operation that he calls by another name answers with his own
name for it, so every rank gets all names and raises the same MismatchError.

For other packages: `agree` compares any text between all ranks (call it when something new is set up), `refuse` is what
a rank calls whose arguments are bad, and `wait` is a polled wait with warnings.

    watch = Watch(comm)                       # collective, a polled wait; keeps its own duplicate of comm
    watch.agree("init of key 3, (2, 3) float32")      # MismatchError on every rank, or on none
    watch.refuse("rank 2: key 3 is read-only")        # never returns: MismatchError here and where others agree or wait
    watch.wait(request.Test, "push of key 3")         # StallError after timeout_seconds
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import NoReturn

import numpy as np
from mpi4py import MPI

from collectives.callers import warn
from collectives.errors import CollectiveError, MismatchError, StallError
from collectives.network.drain import part

SPIN = 16
SPEAK_SECONDS = 0.05
SPIN_SECONDS = 2e-3  # a wait for another node that lasts longer sleeps between looks: cores may be shared by many ranks
NAP_SECONDS = (1e-4, 3e-4)  # the shortest and the longest sleep between two looks, in between `NAP_SHARE` of the wait
NAP_SHARE = 0.02
LOOK_SECONDS = 1e-4  # between two looks around; yields are not counted, as each may cost a slice of a busy core
LOOK_NAPS = 16  # and at least so many naps
HISTORY = 64
DIFFERENT = "the ranks call different collectives, and must call the same"
COME = ": let all call it, or name a communicator of those that do (beside a store with servers kv.layout.workers)"
LATER = "; where they come later, raise MPIPS_TIMEOUT_SECONDS"
_TAG = 1
_REFUSED = "refused: "


class Agreed(MismatchError):
    """A mismatch of which all ranks know."""


def limits() -> tuple[float, float]:
    """(stall_seconds, timeout_seconds) from MPIPS_STALL_SECONDS and MPIPS_TIMEOUT_SECONDS; a timeout of 0 is never."""
    return _seconds("MPIPS_STALL_SECONDS", 60.0), _seconds("MPIPS_TIMEOUT_SECONDS", 0.0)


def _seconds(name: str, otherwise: float) -> float:
    text = os.environ.get(name, str(otherwise))
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{name} is {text!r}: set a number of seconds") from None


def disagreement(texts: Mapping[int, str]) -> str:
    """The sentence for ranks that call with different arguments."""
    by_text: dict[str, list[int]] = {}
    for rank in sorted(texts):
        by_text.setdefault(texts[rank], []).append(rank)
    parts = "; ".join(f"{_ranks(ranks)}: {text}" for text, ranks in by_text.items())
    return f"{DIFFERENT}: {parts}"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


class Patience:
    """Called again and again during one long wait."""

    def __init__(
        self,
        what: str,
        late: Callable[[], Iterable[int]],
        stall_seconds: float,
        timeout_seconds: float,
        look: Callable[[float], None],
        sleeps: bool = False,
        cure: str = "",
    ):
        self._what, self._late, self._look, self._cure = what, late, look, cure
        self._sleeps = sleeps
        self.nap = 0.0
        """Seconds to sleep before the next look; 0: do not sleep."""
        self._stall, self._timeout = stall_seconds, timeout_seconds
        self._start = time.monotonic()
        self._warned = False

    def __call__(self) -> None:
        waited = time.monotonic() - self._start
        self._look(waited)
        if self._sleeps and waited > SPIN_SECONDS:
            self.nap = min(max(NAP_SHARE * waited, NAP_SECONDS[0]), NAP_SECONDS[1])
        if waited > self._stall and not self._warned:
            self._warned = True
            warn(self._sentence(waited))
        if 0 < self._timeout < waited:
            raise StallError(self._sentence(self._timeout))

    def _sentence(self, waited: float) -> str:
        late = list(self._late())
        missing = f": {_ranks(late)} {'have' if len(late) > 1 else 'has'} not come" if late else ""
        return f"{self._what} has waited for {waited:.3g} s{missing}{self._cure}"


def drive(steps: Iterator[None], patience: Callable[[], Patience], spins: int = SPIN) -> None:
    """Run an operation to its end: poll so many times, then give way to other processes, then look around."""
    waiting: Patience | None = None
    nap = due = 0.0
    for turns, _ in enumerate(steps, 1):
        if turns <= spins:
            continue
        if nap:
            time.sleep(nap)
        else:
            os.sched_yield()
        now = time.monotonic()
        if not due:
            due = now + LOOK_SECONDS
        elif now >= due:
            waiting = waiting or patience()
            waiting()
            nap = waiting.nap
            due = now + max(LOOK_SECONDS, LOOK_NAPS * nap)


class Arrival:
    """All ranks' first coming to a communicator: what makes something of it, as `Dup` does, blocks in MPI, and must not
    before all are there. A rank that gave up waiting has come all the same: `wait` may be called again."""

    def __init__(self, comm: MPI.Comm):
        self._what = f"the first collective on {comm.Get_name() or 'a communicator'} ({comm.size} ranks)"
        self._request = comm.Ibarrier()

    def wait(self, stall_seconds: float, timeout_seconds: float) -> None:
        """Blocking; warns after `stall_seconds`, StallError after `timeout_seconds` (0: never)."""

        def steps() -> Iterator[None]:
            while not self._request.Test():
                yield

        what = f"{self._what}, to which not all ranks have come,"
        cure = COME + (LATER if timeout_seconds else "")
        limits = stall_seconds, timeout_seconds
        drive(steps(), lambda: Patience(what, tuple, *limits, lambda waited: None, sleeps=True, cure=cure))

    def close(self) -> None:
        """MPI completes a barrier under way by itself."""


class Watch:
    """Agreement between ranks that share no memory. Making one is collective over `comm`."""

    def __init__(self, comm: MPI.Intracomm, stall_seconds: float | None = None, timeout_seconds: float | None = None):
        default = limits()
        self.stall_seconds = default[0] if stall_seconds is None else stall_seconds
        self.timeout_seconds = default[1] if timeout_seconds is None else timeout_seconds
        Arrival(comm).wait(self.stall_seconds, self.timeout_seconds)
        self.comm = comm.Dup()
        self.rank, self.size = comm.rank, comm.size
        self._fresh(0)

    def _fresh(self, sequence: int) -> None:
        self.sequence = sequence
        self._mine: dict[int, str] = {}
        self._heard: dict[int, dict[int, str]] = {}
        self._told: set[int] = set()
        self._open: set[int] = set()
        self._spoken = False
        self._gone: tuple[int, str] | None = None
        self._sends: list[tuple[MPI.Request, bytes]] = []

    def free(self) -> None:
        """Give the communicator back, unless what this rank has said on it may come later than that. Blocks nowhere:
        MPI calls this on each rank when it likes."""
        if not self._spoken:
            self.comm.Free()

    def begin(self, text: str) -> int:
        """Number the next operation; every rank must begin the same operations in the same order."""
        self.sequence += 1
        self._mine[self.sequence] = text
        self._open.add(self.sequence)
        self._forget(self.sequence - HISTORY)
        return self.sequence

    def end(self, sequence: int) -> None:
        """The operation is over on this rank."""
        self._open.discard(sequence)
        if sequence <= self.sequence - HISTORY:
            self._forget(sequence)

    def _forget(self, sequence: int) -> None:
        if sequence not in self._open:
            self._mine.pop(sequence, None)
            self._heard.pop(sequence, None)
            self._told.discard(sequence)

    def agree(self, text: str) -> None:
        """Collective, blocking: MismatchError on every rank unless all bring the same text."""
        sequence = self.begin(text)
        self._tell(sequence)
        self._hear_all(sequence)

    def refuse(self, sentence: str) -> NoReturn:
        """Tell the others why this rank cannot take part in the next operation; they raise the same sentence."""
        sequence = self.begin(_REFUSED + sentence)
        self._tell(sequence)
        self._hear_all(sequence)
        raise AssertionError("a refusal is always a mismatch")

    def object(self, sentence: str) -> NoReturn:
        """As `refuse`, for the operation that this rank is in: the others, who wait in it, raise the same sentence."""
        self._mine[self.sequence] = _REFUSED + sentence
        self._tell(self.sequence)
        self._hear_all(self.sequence)
        raise AssertionError("a refusal is always a mismatch")

    def leave(self, sentence: str) -> None:
        """Say why this rank does nothing more here, to those who wait for it in what it is in, or in what comes after
        that. Waits for nobody."""
        self._send(f"{-min(self._open, default=self.sequence + 1)}\0{sentence}")

    def wait(self, test: Callable[[], bool], what: str, late: Callable[[], Iterable[int]] = tuple) -> None:
        """Poll `test` until it is true."""

        def steps() -> Generator[None]:
            while not test():
                yield

        drive(steps(), lambda: self.patience(what, late))

    def patience(self, what: str, late: Callable[[], Iterable[int]] = tuple) -> Patience:
        return Patience(what, late, self.stall_seconds, self.timeout_seconds, self.look, sleeps=True)

    def look(self, waited: float) -> None:
        """Speak up after a while, hear what others say, and raise if it does not fit."""
        if waited > SPEAK_SECONDS:
            for sequence in sorted(self._open - self._told):
                self._tell(sequence)
        status = MPI.Status()
        while self.comm.Iprobe(MPI.ANY_SOURCE, _TAG, status):
            message = np.empty(status.Get_count(MPI.BYTE), np.uint8)
            self.comm.Recv([message, MPI.BYTE], status.Get_source(), _TAG)
            number, _, text = message.tobytes().decode().partition("\0")
            sequence = int(number)
            if sequence < 0:
                self._gone = min(self._gone or (-sequence, text), (-sequence, text))
                continue
            self._heard.setdefault(sequence, {})[status.Get_source()] = text
            if sequence in self._mine and sequence not in self._told:
                self._tell(sequence)
        self._sends = [send for send in self._sends if not send[0].Test()]
        if self._gone is not None and max(self._open, default=0) >= self._gone[0]:
            raise CollectiveError(self._gone[1])  # before comparing: who has gone agrees on no mismatch
        for sequence in sorted(self._heard):
            self._compare(sequence)

    def late(self) -> list[int]:
        """Ranks that have not said that they are in the present operation."""
        heard = self._heard.get(self.sequence, {})
        return [rank for rank in range(self.size) if rank != self.rank and rank not in heard]

    def renew(self) -> None:
        """After an error: forget what is under way, on a fresh communicator. Collective, as all ranks had the error."""
        sequence = np.array([self.sequence], np.int64)
        fresh = self.comm.Dup()
        fresh.Allreduce(MPI.IN_PLACE, sequence, MPI.MAX)
        part(self.comm)
        self.comm = fresh
        self._fresh(int(sequence[0]))

    def _tell(self, sequence: int) -> None:
        self._told.add(sequence)
        self._send(f"{sequence}\0{self._mine[sequence]}")

    def _send(self, text: str) -> None:
        self._spoken = True
        message = text.encode()
        for other in range(self.size):
            if other != self.rank:
                self._sends.append((self.comm.Isend([message, MPI.BYTE], other, _TAG), message))

    def _hear_all(self, sequence: int) -> None:
        text = self._mine[sequence]

        def complete() -> bool:
            self.look(0)
            return len(self._heard.get(sequence, ())) == self.size - 1

        self.wait(complete, text, self.late)
        self.end(sequence)
        self._compare(sequence)

    def _compare(self, sequence: int) -> None:
        heard = self._heard[sequence] if self.size > 1 else {}
        if len(heard) < self.size - 1 or sequence not in self._mine:
            return
        texts = {**heard, self.rank: self._mine[sequence]}
        if len(set(texts.values())) == 1 and not texts[0].startswith(_REFUSED):
            return
        self._flush()
        self.renew()
        refusals = [texts[rank] for rank in sorted(texts) if texts[rank].startswith(_REFUSED)]
        raise Agreed(refusals[0].removeprefix(_REFUSED) if refusals else disagreement(texts))

    def _flush(self) -> None:
        """Others still need my names for the operation, so let them go out."""
        for send, _ in self._sends:
            while not send.Test():
                self.comm.Iprobe(MPI.ANY_SOURCE, _TAG)
                os.sched_yield()
