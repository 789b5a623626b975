"""A worker's end of the lines to the servers: what it hears, what has failed, and rare questions."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from typing import Any

from collectives.errors import CollectiveError, StallError
from mpips import messages
from mpips.keys import Failure, Key, Part
from mpips.layout import Layout
from mpips.lines import TAG_FRAME, Line
from mpips.messages import Frame, Op
from mpips.payloads import Payloads

Task = Generator[bool | None, None, None]
GOODBYE_SECONDS = 5.0  # a server that has ended says nothing any more
EVENTS = 256  # bad calls remembered


class Hearing:
    """Lines to all servers and the keys behind them. One thread."""

    def __init__(self, layout: Layout, lines: list[Line]) -> None:
        self._layout, self.lines = layout, lines
        self._names: dict[int | str, Key] = {}
        self._parts: dict[int, tuple[Key, Part]] = {}
        self.all_local = all(line.local for line in lines)
        self._answers: dict[int, tuple[bytes, bool]] = {}
        self._tokens = 0
        self._left = False
        self._events: deque[str] = deque(maxlen=EVENTS)
        self._payloads = Payloads(layout, self.check, self.listen, self.withdraw)
        self.warn: Callable[[str], None] = lambda text: None

    def add(self, key: Key) -> None:
        self._names[key.name] = key
        for part in key.parts:
            self._parts[part.number] = key, part
            self._payloads.stored(part.server, (part.stop - part.start) * key.dtype.itemsize)

    def remove(self, key: Key) -> None:
        del self._names[key.name]
        for part in key.parts:
            del self._parts[part.number]
            self._payloads.stored(part.server, -(part.stop - part.start) * key.dtype.itemsize)

    def abandon(self, key: Key) -> None:
        """Give up a key that could not be made. Where a server still asks for its first value, it gets nothing."""
        if self._names.pop(key.name, None) is not None:
            for part in key.parts:
                self._payloads.stored(part.server, -(part.stop - part.start) * key.dtype.itemsize)

    def key(self, name: int | str) -> Key | None:
        """The key of that name."""
        return self._names.get(name)

    def part(self, number: int) -> Part:
        """The unit of that number."""
        return self._parts[number][1]

    def for_each_key(self, do: Callable[[Key], None]) -> None:
        for key in self._names.values():
            do(key)

    # ---- frames from servers

    def listen(self) -> None:
        """Take in what servers have said."""
        # One look at MPI for all servers of other nodes: each costs as much as everything else here.
        heard = not self.all_local and self._layout.world.Iprobe(tag=TAG_FRAME)
        for line in self.lines:
            if (heard or line.local) and line.waiting():
                for data in line.read():
                    self._hear(line, Frame.of(data))

    def _hear(self, line: Line, frame: Frame) -> None:
        if frame.op == Op.ANSWER:
            self._answers[frame.token] = line.body(frame), bool(frame.flags)
            return
        text = line.body(frame).decode() if frame.op in (Op.FAILED, Op.WARNING) else ""
        if frame.unit not in self._parts:
            return  # forgotten
        key, part = self._parts[frame.unit]
        if frame.op == Op.CONSUMED:
            part.told = max(part.told, frame.round)
            if not frame.round:
                part.granted = True
        elif frame.op == Op.GRANT:
            if part.given_up:
                part.given_up -= 1
            else:
                part.granted = True
        elif frame.op == Op.CREDIT:
            part.credits.append(frame.aux)
            if frame.round != part.sending:
                self._payloads.decline(part)
        elif frame.op == Op.FAILED:
            part.failed = max(part.failed, frame.round)
            text, _, event = text.partition("\0")
            failure, known = Failure(text, event, bool(frame.flags)), event in self._events
            if known:
                key.excuse = failure
            if known or (frame.round <= key.raised and not frame.flags):
                key.excused = max(key.excused, frame.round)
            if frame.round > key.excused:
                key.failed.setdefault(frame.round, failure)
        elif frame.op == Op.WARNING:
            self.warn(text)

    def check(self, key: Key, since: int = 0) -> None:
        """Raise what made rounds of the key fail, once: the first failure stands for all rounds so far, those that will
        yet be heard to have failed too, or the next call would raise or not as it happens. Who is about to contribute
        to a round raises only where one `since` that has failed: for what failed before, it still comes to its own, or
        others would wait for it."""
        self.listen()
        if key.failed:
            rounds = sorted(round_ for round_ in key.failed if round_ <= key.round)
            if any(round_ >= since or key.failed[round_].timed_out for round_ in rounds):
                failure = key.failed[rounds[0]]
                key.excused, key.excuse = max(key.excused, rounds[-1]), failure
                key.raised = key.round
                for round_ in rounds:
                    del key.failed[round_]
                self._raised(failure.event)
                raise (StallError if failure.timed_out else CollectiveError)(failure.text)

    def _raised(self, event: str) -> None:
        """What else fails because of the same bad call is known."""
        if event:
            self._events.append(event)
            for key in self._names.values():
                for round_ in [round_ for round_, failure in key.failed.items() if failure.event == event]:
                    key.excused, key.excuse = max(key.excused, round_), key.failed.pop(round_)

    # ---- rounds

    def begin(self, key: Key, alone: bool = True) -> int:
        """Count the next push of the key and return its round. A worker that acts `alone` raises here what has already
        made the round fail; in a client all go through the collectives first."""
        key.round += 1
        if alone and key.failed and key.round in key.failed:
            self._refuse(key, key.round, key.pushes, key.failed[key.round])
            self.check(key)
        return key.round

    def drained(self, key: Key, round_: int, parts: Sequence[Part], alone: bool = True) -> Task:
        """Wait until the servers have read this worker's contributions up to `round_`; `alone` as in `begin`."""
        for part in parts:
            while part.consumed() < round_:
                if alone:
                    self.check(key, key.round)
                else:
                    self.listen()
                yield False

    def refuse(self, key: Key, sentence: str, event: str) -> None:
        """Tell the servers that this worker cannot contribute to the key's round, which then fails for all others; the
        caller raises by itself."""
        self._excuse(key, key.round, key.pushes, Failure(sentence, event, False))

    def withdrawing(self, key: Key, round_: int, parts: Sequence[Part], push: Task) -> Task:
        """Run a push of these parts; where it breaks off, the others do not wait for what it has not come to."""
        try:
            yield from push
        except BaseException as error:
            self.break_off(key, round_, parts, error)
            raise

    def break_off(self, key: Key, round_: int, parts: Sequence[Part], error: BaseException) -> None:
        """Withdraw from those of these parts to which this worker has neither contributed nor refused to."""
        left = [part for part in parts if part.said != round_]
        if left:
            self.withdraw(key, round_, left, error)

    def withdraw(self, key: Key, round_: int, parts: Sequence[Part], error: BaseException | None = None) -> None:
        """Contribute nothing to a round of these parts, as it has failed elsewhere or `error` is raised here: the
        others are told the same, or that this worker has given up."""
        why = self._why(key, round_, error)
        if error is None:
            self._refuse(key, round_, parts, why)
        else:
            self._excuse(key, round_, parts, why)

    def _why(self, key: Key, round_: int, error: BaseException | None) -> Failure:
        """What the others are told of a contribution that will not come."""
        if round_ in key.failed:
            return key.failed[round_]
        if key.excuse is not None and (error is None or key.excuse.text == str(error)):
            return key.excuse
        if isinstance(error, CollectiveError):
            return Failure(str(error), "", isinstance(error, StallError))
        text = f"key {key.name!r}: rank {self._layout.rank} has given up its push of round {round_}"
        return Failure(text, "", False)

    def _excuse(self, key: Key, round_: int, parts: Sequence[Part], why: Failure) -> None:
        """Make a round fail for all others."""
        key.failed.pop(round_, None)
        key.excused, key.excuse = round_, why
        self._refuse(key, round_, parts, why)

    def _refuse(self, key: Key, round_: int, parts: Sequence[Part], why: Failure) -> None:
        if self._left:
            return  # the servers have failed what waited for this worker
        body = f"{why.text}\0{why.event}".encode()
        for part in parts:
            part.said = round_
            part.line.post_body(body, Op.REFUSE, part.number, round_)

    # ---- rare things

    def order(self, server: int, request: Any) -> int:
        """Tell one server something typed; the token that its answer will have."""
        self._tokens += 1
        self.lines[server].post_body(messages.encode(request), Op.CONTROL, token=self._tokens)
        return self._tokens

    def request(self, server: int, request: Any) -> Generator[bool | None, None, Any]:
        """Ask one server something typed and return its answer; ValueError with the server's sentence if it refuses."""
        token = self.order(server, request)
        while token not in self._answers:
            self.listen()
            yield False
        data, failed = self._answers.pop(token)
        if failed:
            raise ValueError(data.decode())
        return messages.decode_answer(data)

    def goodbye(self) -> None:
        """Tell all servers that this worker has finished, and take in what those of other nodes have still said.

        Whatever stayed would be found by the next store: MPI gives a communicator's number to another one.
        """
        self._left = True
        for line in self.lines:
            line.post(Op.BYE)
        talking = [line for line in self.lines if not line.local]
        until = time.monotonic() + GOODBYE_SECONDS
        while talking and time.monotonic() < until:
            talking = [line for line in talking if not self._last_words(line)]
            time.sleep(1e-4)

    @staticmethod
    def _last_words(line: Line) -> bool:
        """Read what there is; whether the server has said goodbye."""
        frames = [Frame.of(data) for data in line.read()]
        for frame in frames:
            if frame.op in (Op.ANSWER, Op.FAILED, Op.WARNING):
                line.body(frame)
        return any(frame.op == Op.BYE for frame in frames)
