"""What goes between one server and its workers in one generation: frames in, which become events of `State`; replies
out."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

import numpy as np

from collectives.errors import CollectiveError
from mpips.store.roles import Layout
from mpips.store.server.late import Gossip
from mpips.store.server.sources import Filling, Pushes, Settings
from mpips.store.server.state import State
from mpips.store.server.unit import Replies, Unit
from mpips.store.transport.channel import MessageLine, knocked
from mpips.store.transport.frames import ROUND, ROUND_AT, Frame, Op
from mpips.store.transport.line import Line
from mpips.store.transport.receiver import FirstValue, Receiver
from mpips.store.transport.ring import Rings

PUSH = int(Op.PUSH)


class Answers(Settings, Protocol):
    """What answers rare requests, and knows how pushes are compressed: `requests.Requests`."""

    def heard(self, worker: int, line: Line, frame: Frame) -> bool: ...

    def answer_all(self) -> bool: ...


class Traffic:
    """The lines of one server, in one generation; `lines` and `rings` as `connect` gave them."""

    def __init__(
        self, layout: Layout, lines: list[Line], rings: Rings | None, state: State, requests: Answers
    ) -> None:
        self._lines, self._rings, self._state, self._requests = lines, rings, state, requests
        self.remote = [line for line in lines if isinstance(line, MessageLine)]
        """To workers of other nodes."""
        self._receiver = Receiver(layout.world, layout.options.chunks_in_flight)
        # From another worker on for every server, so that not all use the link of the same worker first.
        first = (layout.rank - layout.num_workers) * len(lines) // layout.num_servers
        self._callers = [*enumerate(lines)][first:] + [*enumerate(lines)][:first]
        self._firsts: list[tuple[Unit, int, FirstValue]] = []
        self._pushes = Pushes(state.units, self._receiver, requests)
        assert layout.servers is not None
        self._gossip = Gossip(layout.servers, state.late)
        self._handlers: dict[int, Callable[[int, Frame], None]] = {
            Op.PULL: self._pull, Op.PULL_ROWS: self._pull_rows, Op.RELEASE: self._release, Op.SET: self._set,
            Op.CONTROL: self._control, Op.WAITS: self._waits, Op.BYE: self._bye,
        }  # fmt: skip
        self._units_changed()

    @property
    def over(self) -> bool:
        """Whether every worker has left."""
        return not self._callers

    # ---- in

    def hear(self) -> bool:
        """Take in what workers have said, if there is anything; whether there was."""
        if (self._rings is not None and self._rings.rung()) or (self.remote and knocked(self.remote)):
            return self._listen()
        return False

    def _listen(self) -> bool:
        heard = False
        known, new, pushed = self._pushes.known, self._pushes.new, self._state.pushed
        for worker, line in self._callers:
            if line.waiting():
                heard = True
                for data in line.read():
                    if data[0] == PUSH:
                        unit, index, source, priority = known.get(data[:ROUND_AT]) or new(worker, line, data)
                        if type(source) is Filling:
                            source.begin(ROUND.unpack_from(data, ROUND_AT)[0])
                        pushed(unit, index, source, priority, time.monotonic())
                    else:
                        frame = Frame.of(data)
                        self._handlers[frame.op](worker, frame)
        return heard

    def hear_last(self) -> None:
        """The generation is over: take in what workers of this node had pushed before they knew."""
        known = self._pushes.known
        for worker, line in self._callers:
            for data in line.read() if line.local else ():
                if data[0] != PUSH or Frame.of(data).unit not in self._state.units:
                    continue
                unit, index, source, _ = known.get(data[:ROUND_AT]) or self._pushes.new(worker, line, data)
                if type(source) is Filling:
                    source.begin(ROUND.unpack_from(data, ROUND_AT)[0])
                with suppress(CollectiveError):  # another worker, who has left, does not push to this round
                    self._state.pushed(unit, index, source, 0, time.monotonic())

    def arrived(self) -> None:
        """See what messages from and to other nodes have come and gone; to be called where there are `remote` lines."""
        for unit, worker in self._receiver.delivered():
            self._state.released(unit, worker)
        if self._firsts:
            self._firsts = [first for first in self._firsts if not self._stored(*first)]

    def _pull(self, worker: int, frame: Frame) -> None:
        self.send(self._state.pulled(frame.unit, worker, frame.round))

    def _pull_rows(self, worker: int, frame: Frame) -> None:
        rows = np.frombuffer(self._lines[worker].body(frame), np.int64)
        self.send(self._state.pulled(frame.unit, worker, frame.round, rows))

    def _release(self, worker: int, frame: Frame) -> None:
        self._state.released(frame.unit, worker)

    def _waits(self, worker: int, frame: Frame) -> None:
        self._state.waits(frame.unit, worker, frame.round)

    def _set(self, worker: int, frame: Frame) -> None:
        unit = self._state.units[frame.unit]
        unit.thaw()
        self._firsts.append((unit, worker, self._receiver.first(unit, worker)))

    def _stored(self, unit: Unit, worker: int, first: FirstValue) -> bool:
        """Whether a first value is there; then its worker hears of it."""
        if not first.done():
            return False
        self._lines[worker].post(Op.CONSUMED, unit.number)
        return True

    def _control(self, worker: int, frame: Frame) -> None:
        if self._requests.heard(worker, self._lines[worker], frame):
            self._units_changed()

    def _bye(self, worker: int, frame: Frame) -> None:
        self._callers = [caller for caller in self._callers if caller[0] != worker]
        if not self._lines[worker].local:
            self._lines[worker].post(Op.BYE)
        self.send(self._state.left(worker))

    # ---- out

    def send(self, replies: Replies) -> None:
        """Tell workers what they must hear."""
        logged = ""
        for reply in replies:
            if reply.worker in self._state.gone:
                continue  # it hears nothing more
            line = self._lines[reply.worker]
            if reply.text:
                if reply.text != logged:  # once, whoever hears it
                    logged = reply.text
                    logging.getLogger(__name__).warning("%s", logged)
                line.post_body(reply.text.encode(), Op[reply.what], reply.unit, reply.round)
            elif reply.what == "GRANT" and not line.local:
                self._receiver.ship(self._state.units[reply.unit], reply.worker, reply.rows)
            else:
                line.post(Op[reply.what], reply.unit, reply.round)

    def answer(self) -> None:
        """All that was pushed has been applied: answer requests that have waited for it."""
        if self._requests.answer_all():
            self._units_changed()

    def flush(self) -> None:
        """Send what found no room before: nobody rings when there is room again."""
        for _, line in self._callers:
            line.flush()

    def tick(self, now: float) -> None:
        """Look for waits that are too long, here and through other servers. StallError or MismatchError where one will
        not end."""
        self._gossip.tick()
        self.send(self._state.tick(now))

    def _units_changed(self) -> None:
        units = self._state.units
        self._receiver.buffers.limit = sum(unit.stored.nbytes for unit in units.values())
        self._pushes.keep(units)

    # ---- the end

    def done(self) -> bool:
        """Whether everything sent has been taken."""
        return self._receiver.done(self._lines)

    def stop(self) -> None:
        """The generation is over: read no worker's memory any more, and say so. Blocks for a moment between nodes."""
        if self._rings is not None:
            self._rings.stop()
        self._receiver.stop(self._lines)
