"""What workers tell each other beside the servers, in messages that nobody reads while all is well.

A worker looks for them when a wait has become long and when all meet. Three things are told:

- *A call that cannot be made.* Where a worker's arguments do not even tell which keys it means, the others wait for
  keys that it cannot know. It tells the number of its call; the others answer with the keys of their call of that
  number, and it refuses those on the servers, so that the others' rounds fail with its sentence.
- *A warning*: something went wrong here on which nobody waits.
- *What a worker waits for.* If every worker waits and for each there is another that has not come to what it waits
  for, none can ever go on, since who waits in a call makes no other: keys were used in another order. All workers see
  the same, and each refuses what the others miss of it, so that all raise one sentence. Statements may be old: for a
  worker to go on after its statement, the one it waits for must go on before, so nobody has gone on first. Who gives
  up waiting takes its statement back.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from mpi4py import MPI

from collectives.errors import MismatchError, StallError, warn
from collectives.network.drain import part
from mpips import arguments
from mpips.arguments import Name
from mpips.meet import Pause
from mpips.meetings import Meetings

RECENT = 64  # calls whose keys are remembered
SPEAK_SECONDS = 0.1
ANSWER_SECONDS = 1.0  # a bad call waits so long for the others' answers, and, if need be, again before the next call
TAG = 1
STUCK = "the workers wait for one another, and must use the keys in the same order: "


class Refused(msgspec.Struct, tag=True, array_like=True):
    """This worker's call of that number cannot be made."""

    call: int
    sentence: str


class Keys(msgspec.Struct, tag=True, array_like=True):
    """The answer: the keys of the sender's call of that number; none where it waits elsewhere before it."""

    call: int
    names: list[Name]


class Warned(msgspec.Struct, tag=True, array_like=True):
    """Something that the others should know."""

    sentence: str


class Waits(msgspec.Struct, tag=True, array_like=True):
    """The sender waits until all workers have pushed `needs` so often, or until all have come to a meeting."""

    text: str
    needs: dict[Name, int]
    meeting: int
    """Number of the meeting that it waits in; 0: none."""
    rounds: dict[Name, int]
    """How often it has pushed each key."""
    meetings: int
    """How many meetings it has come to."""


class Waited(msgspec.Struct, tag=True, array_like=True):
    """The sender has given up what it said that it waits for."""


Message = Refused | Keys | Warned | Waits | Waited
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Message).decode


def stuck(waits: Mapping[int, Waits]) -> bool:
    """Whether each of these workers waits for another of them that has not come to what it waits for."""

    def lacks(one: Waits, other: Waits) -> bool:
        return other.meetings < one.meeting or any(other.rounds.get(name, 0) < n for name, n in one.needs.items())

    return all(any(lacks(one, other) for other in waits.values() if other is not one) for one in waits.values())


def verdict(waits: Mapping[int, Waits]) -> str:
    """The sentence for workers that are stuck."""
    return STUCK + "; ".join(
        f"{one.text}{f' (round {max(one.needs.values())})' if one.needs else ''}" for _, one in sorted(waits.items())
    )


class Talk:
    """One worker's end. Making it is collective over `workers`.

    `rounds()`: how often each key was pushed here. `refuse(key, count, sentence, event)`: fail this worker's rounds of
    a key up to `count` (0: the next one) for all others; what fails by one event is raised once. `independent`: no call
    of a worker waits for another worker. `waits_for(worker)`: whether this one is in a call that needs that one.
    """

    def __init__(
        self, workers: MPI.Comm, meetings: Meetings, rounds: Callable[[], dict[Name, int]],
        refuse: Callable[[Name, int, str, str], None], independent: bool, waits_for: Callable[[int], bool],
        stall_seconds: float, timeout_seconds: float,
    ) -> None:  # fmt: skip
        self._gatherings = meetings
        self._rank, self._size = workers.Get_rank(), workers.Get_size()
        self._comm = workers.Dup() if self._size > 1 else None
        self._rounds, self._refuse, self._independent, self._waits_for = rounds, refuse, independent, waits_for
        self._looking = threading.Lock()
        self._stall, self._timeout = stall_seconds, timeout_seconds
        self.calls = 0
        """Pushes so far, one of several keys counted once."""
        self.recent: list[Any] = [()] * RECENT
        """The keys of call c at c % RECENT, as the caller named them; () where they were bad."""
        self.debt: Refused | None = None
        """A bad call whose keys are not all known yet: to be settled before the next call."""
        self._answers: dict[int, list[Name]] = {}
        self._asked: list[tuple[int, Refused]] = []
        self._meetings = 0
        self._meeting = False
        self._waits: dict[int, Waits] = {}
        self._verdict = ""
        self._found = ""
        """What this worker last found by itself when all were stuck."""
        self._sends: list[tuple[MPI.Request, bytes]] = []

    def free(self) -> None:
        """Collective."""
        if self._comm is not None:
            self.look()
            part(self._comm)

    # ---- bad calls

    def event(self) -> str:
        """The name of this worker's present call."""
        return f"rank {self._rank} call {self.calls}"

    def warn(self, sentence: str) -> None:
        """Let the others know, when they look."""
        self._tell(Warned(sentence))

    def refused(self, sentence: str) -> None:
        """The present push, counted already, cannot be made, and its keys are not known."""
        if self._comm is not None:
            self.debt, self._answers = Refused(self.calls, sentence), {}
            self._tell(self.debt)
            self.settle(ANSWER_SECONDS)

    def settle(self, limit: float = math.inf) -> None:
        """Wait, at most so many seconds, for the others' answers to a bad call, and refuse the keys that they name."""
        debt = self.debt
        if debt is None:
            return
        what = f"rank {self._rank}: telling the others of a bad call: {debt.sentence}"
        pause = Pause(lambda: what, self._stall, self._timeout, lambda waited: self.look())
        while len(self._answers) < self._size - 1:
            if pause.waited > limit:
                return
            pause()
        self.debt = None
        told = sorted({name for answer in self._answers.values() for name in answer}, key=str)
        self.calls -= not told  # the others had no such call
        for name in told:
            self._refuse(name, 0, debt.sentence, self.event())

    def leave(self) -> None:
        """This worker closes the store: it waits for answers to a bad call for ANSWER_SECONDS at most. Who is not in
        that call yet hears from the servers that this worker has left."""
        self.settle(ANSWER_SECONDS)
        self.debt = None

    # ---- waiting

    def waiting(self, text: str, needs: Callable[[], dict[Name, int]] | None) -> Callable[[float], None]:
        """What to call now and then during one wait; `needs` as in `Waits`, None where it may end by itself."""

        def look(waited: float) -> None:
            if waited > SPEAK_SECONDS and needs is not None and self._rank not in self._waits and self._comm:
                meeting = self._meetings if self._meeting else 0
                mine = Waits(text, needs(), meeting, self._rounds(), self._meetings)
                self._waits[self._rank] = mine
                self._tell(mine)
                self._judge()  # the others may have spoken first
            self.look()

        return look

    def ended(self, error: BaseException | None = None) -> None:
        """The wait is over. Where the others found that all are stuck, this worker finds it too before it goes on. Who
        has may have said again that it waits, before it heard that the wait has failed: nobody answers that."""
        if str(error).startswith(STUCK) and str(error) != self._found:
            pause = Pause(lambda: "", math.inf, 0.0, lambda waited: self.look())
            while self._rank in self._waits and pause.waited < ANSWER_SECONDS:
                pause()
        spoken = self._waits.pop(self._rank, None) is not None
        if spoken and error is not None and (isinstance(error, StallError) or not isinstance(error, Exception)):
            self._tell(Waited())

    def meet(self, payload: bytes, what: str, stall_seconds: float, timeout_seconds: float) -> list[bytes]:
        """Everybody's payload, in rank order. Collective over the workers, blocking. `heed` must follow, but where all
        go their ways after it."""
        self.settle()
        self._meetings += 1
        self._meeting, self._verdict = True, ""
        given_up: BaseException | None = None
        try:
            look = self.waiting(f"rank {self._rank}: {what} (meeting {self._meetings})", dict)
            told = self._gatherings.exchange(
                payload, what, look, stall_seconds=stall_seconds, timeout_seconds=timeout_seconds
            )
        except BaseException as error:
            given_up = error
            raise
        finally:
            self._meeting = False
            self.ended(given_up)
        self.look()
        return told

    def heed(self) -> None:
        """MismatchError where the others had to be freed of a wait for this worker before they could come to the last
        meeting."""
        if self._verdict:
            raise MismatchError(self._verdict)

    def absent(self, what: str, error: BaseException) -> None:
        """This worker has come to the next meeting, and raises `error` instead of taking part: so will the others."""
        self._meetings += 1
        self._gatherings.refuse(what, error)

    # ---- messages

    def look(self) -> None:
        """Hear what the others say, unless another thread does so now."""
        if self._comm is not None and self._looking.acquire(blocking=False):
            try:
                self._look(self._comm)
            finally:
                self._looking.release()

    def _look(self, comm: MPI.Comm) -> None:
        status = MPI.Status()
        while comm.Iprobe(MPI.ANY_SOURCE, TAG, status):
            data = bytearray(status.Get_count(MPI.BYTE))
            comm.Recv([data, MPI.BYTE], status.Get_source(), TAG)
            self._hear(status.Get_source(), _decode(data))
        self._answer()
        for send in [send for send in self._sends if send[0].Test()]:
            self._sends.remove(send)  # in place: another thread may add one meanwhile

    def _tell(self, message: Message, to: int | None = None) -> None:
        if self._comm is None:
            return
        data = _encode(message)
        for other in range(self._size) if to is None else (to,):
            if other != self._rank:
                self._sends.append((self._comm.Isend([data, MPI.BYTE], other, TAG), data))

    def _hear(self, source: int, message: Message) -> None:
        match message:
            case Refused():
                self._asked.append((source, message))
                if self._independent:
                    warn(message.sentence)
            case Keys(call, names):
                if self.debt is not None and self.debt.call == call:
                    self._answers[source] = names
            case Warned(sentence):
                warn(sentence)
            case Waits():
                self._waits[source] = message
                self._judge()
            case Waited():
                self._waits.pop(source, None)

    def _answer(self) -> None:
        """Tell those who made a bad call which keys they should have named, once this worker has come so far."""
        left = []
        for source, refused in self._asked:
            call = refused.call
            if call <= self.calls:
                self._tell(Keys(call, _names(self.recent[call % RECENT]) if self.calls - call < RECENT else []), source)
            elif self._meeting or self._waits_for(source):
                self._tell(Keys(call, []), source)
                if not self._independent:
                    warn(refused.sentence)
            else:
                left.append((source, refused))
        self._asked = left

    def _judge(self) -> None:
        """See whether nobody can go on, when all have said what they wait for."""
        if len(self._waits) == self._size and stuck(self._waits):
            self._go_on()

    def _go_on(self) -> None:
        """Nobody can go on: refuse what the others wait for, so that all raise."""
        waits = dict(sorted(self._waits.items()))
        sentence = self._found = verdict(waits)
        self._waits.clear()
        if waits[self._rank].meeting:
            self._verdict = sentence
        for name in sorted({name for one in waits.values() for name in one.needs}, key=str):
            self._refuse(name, max(one.rounds.get(name, 0) for one in waits.values()), sentence, sentence)


def _names(key: Any) -> list[Name]:
    return arguments.names(key) if key != () else []
