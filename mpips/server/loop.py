"""The loop of a server: frames in, `State` in the middle, frames out, until every worker has said goodbye.

`serve` gives each store of this process its turn. What a turn raises ends that store's epoch; the server then waits
until the workers begin the next one, or close.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence

import numpy as np

from collectives.errors import CollectiveError, StallError
from mpips.layout import Layout
from mpips.runtime.cores import Seat
from mpips.runtime.epoch import Epoch
from mpips.server.late import Gossip, Late
from mpips.server.requests import Requests
from mpips.server.sources import Filling, Pushes
from mpips.server.state import State
from mpips.server.unit import Replies, Unit
from mpips.transport.channel import MessageLine, knocked
from mpips.transport.connect import connect
from mpips.transport.frames import ROUND, ROUND_AT, Frame, Op, OpenStore
from mpips.transport.line import Line
from mpips.transport.receiver import FirstValue, Receiver
from mpips.transport.ring import Rings

YIELDS = 8
"""Before the clock is looked at; where cores are busy each may cost a slice."""
SPIN_SECONDS = 1e-3
SLEEP_SECONDS = (1e-4, 2e-3)
"""The shortest and the longest sleep between two looks."""
SLEEP_SHARE = 0.02
"""Of the time without anything to do so far: so much later it may hear what ends that."""
TICK_SECONDS = 0.05
BUSY_TURNS = 256
"""Turns of a busy server after which it looks at the clock."""
MOST_THREADS = 4
"""More than a few cores only wait for memory."""
GRACE_SECONDS, END_SECONDS = 0.02, 1.0
"""At the end of an epoch: for frames that are being written; for a round that is complete and still being filled."""
PUSH = int(Op.PUSH)


def serve(servers: Sequence[Server], opened: Callable[[OpenStore], Server | None] | None = None) -> None:
    """Serve these stores, and others that their workers open, until all workers of all stores have left. Blocking.

    `opened` makes one more store, collectively with all workers, which have asked for it; None where it cannot be.
    Raises what is neither a worker's fault nor the network's.
    """
    here, idle, turns = list(servers), _Idle(), 0
    while here:
        worked = False
        for server in here:
            worked |= server.turn()
        turns += 1
        if worked and turns % BUSY_TURNS:
            idle.over()
            continue
        if not (now := idle.look(worked)):
            continue
        for server in list(here):
            server.tick(now)
            if opened is not None and (asked := server.opens()) and (more := opened(asked)):
                here.append(more)
            if server.finished:
                here.remove(server)
                server.close()
        idle.rest(now, any(server.hot for server in here))


class _Idle:
    """The rest of a loop that has nothing to do: it gives way, and then sleeps, the longer the longer it has waited."""

    def __init__(self) -> None:
        self._since, self._spins = 0.0, 0

    def over(self) -> None:
        """Something was done."""
        self._since, self._spins = 0.0, 0

    def look(self, worked: bool) -> float:
        """The time, where it is to be looked at; else 0."""
        if worked:
            self.over()
            return time.monotonic()
        self._spins += 1
        os.sched_yield()
        if self._spins < YIELDS:
            return 0.0
        now = time.monotonic()
        self._since = self._since or now
        return now

    def rest(self, now: float, hot: bool) -> None:
        """Sleep a little, unless something may go on at any moment (`hot`)."""
        if self._since and now - self._since > SPIN_SECONDS and not hot:
            time.sleep(min(max(SLEEP_SHARE * (now - self._since), SLEEP_SECONDS[0]), SLEEP_SECONDS[1]))


def _threads(layout: Layout, cores: int) -> int:
    """Cores for a long sum: workers wait meanwhile, so the servers of a node share all that this one may use."""
    servers = range(layout.num_workers, layout.num_workers + layout.num_servers)
    here = sum(layout.same_node(layout.rank, server) for server in servers)
    return max(1, min(MOST_THREADS, cores // here))


class Server:
    """One store on one server rank. `lines` and `rings` as `connect` gave them."""

    def __init__(self, layout: Layout, lines: list[Line], rings: Rings | None, seat: Seat, epoch: Epoch) -> None:
        options = layout.options
        self.layout, self.epoch = layout, epoch
        remote = [worker for worker, line in enumerate(lines) if not line.local]
        self._state = State(
            layout.asynchronous, options.staleness, remote, Late(options.stall_seconds, options.timeout_seconds),
            _threads(layout, len(seat.before)), seat.step_aside, seat.shared,
        )  # fmt: skip
        self._requests = Requests(self._state)
        self._handlers: dict[int, Callable[[int, Frame], None]] = {
            Op.PULL: self._pull, Op.PULL_ROWS: self._pull_rows, Op.RELEASE: self._release, Op.SET: self._set,
            Op.CONTROL: self._control, Op.WAITS: self._waits, Op.BYE: self._bye,
        }  # fmt: skip
        self._begin(lines, rings)

    def _begin(self, lines: list[Line], rings: Rings | None) -> None:
        """Begin an epoch with these lines."""
        self._lines, self._rings = lines, rings
        self._remote = [line for line in lines if isinstance(line, MessageLine)]
        self._receiver = Receiver(self.layout.world, self.layout.options.chunks_in_flight)
        # From another worker on for every server, so that not all use the link of the same worker first.
        first = (self.layout.rank - self.layout.num_workers) * len(lines) // self.layout.num_servers
        self._callers = [*enumerate(lines)][first:] + [*enumerate(lines)][:first]
        self._firsts: list[tuple[Unit, int, FirstValue]] = []
        self._pushes = Pushes(self._state.units, self._receiver, self._requests)
        assert self.layout.servers is not None
        self._gossip = Gossip(self.layout.servers, self._state.late)
        self._flag = self.epoch.flag
        self._over = 0.0
        """When the epoch ended."""
        self._next_tick = 0.0
        self._units_changed()

    @property
    def finished(self) -> bool:
        """Whether every worker has left."""
        return not self._callers

    @property
    def hot(self) -> bool:
        """Whether a worker of this node may let a sum go on at any moment: to sleep would cost more than the wait."""
        return bool(self._state.ready) and not self._remote

    def opens(self) -> OpenStore | None:
        """One more store, if all workers have asked for it since it was last so."""
        asked = self._requests.opening
        if len(asked) < self.layout.num_workers:
            return None
        first = asked[0]
        asked.clear()
        return first

    def close(self) -> None:
        """Every worker has left: end with all ranks of the store. Blocking."""
        if not self._over:
            self.epoch.wait(lambda: self._receiver.done(self._lines), "close")
        self.epoch.close()

    # ---- turns

    def turn(self) -> bool:
        """One look at everything; whether anything was done. What it raises ends the epoch."""
        if self._over:
            return self._next_epoch()
        try:
            return self._turn()
        except Exception as error:
            self._end(error)
            return True

    def _turn(self) -> bool:
        if self._flag[0]:
            self.epoch.look()
        rings, remote, state = self._rings, self._remote, self._state
        heard = (rings is not None and rings.rung()) or (bool(remote) and knocked(remote))
        heard = heard and self._listen()
        worked, replies = state.work()
        if replies:
            self._send(replies)
        if self._requests.waiting and state.quiet and self._requests.answer_all():
            self._units_changed()
        if remote:
            for unit, worker in self._receiver.delivered():
                state.released(unit, worker)
            if self._firsts:
                self._firsts = [first for first in self._firsts if not self._stored(*first)]
        return heard or worked

    def tick(self, now: float) -> None:
        """Called while there is time, at `now`: look for long waits, and at the epoch, now and then."""
        if self._over or self.finished:
            return
        for _, line in self._callers:
            line.flush()  # nobody rings when there is room again
        self._requests.snapshots.copy_next()
        if now < self._next_tick:
            return
        self._next_tick = now + TICK_SECONDS
        try:
            self.epoch.look()
            self._gossip.tick()
            self._send(self._state.tick(now))
        except Exception as error:
            self._end(error)

    # ---- in

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

    def _pull(self, worker: int, frame: Frame) -> None:
        self._send(self._state.pulled(frame.unit, worker, frame.round))

    def _pull_rows(self, worker: int, frame: Frame) -> None:
        rows = np.frombuffer(self._lines[worker].body(frame), np.int64)
        self._send(self._state.pulled(frame.unit, worker, frame.round, rows))

    def _release(self, worker: int, frame: Frame) -> None:
        self._state.released(frame.unit, worker)

    def _waits(self, worker: int, frame: Frame) -> None:
        self._state.waits(frame.unit, worker, frame.round)

    def _set(self, worker: int, frame: Frame) -> None:
        unit = self._state.units[frame.unit]
        self._firsts.append((unit, worker, self._receiver.first(unit, worker)))

    def _stored(self, unit: Unit, worker: int, first: FirstValue) -> bool:
        """Whether a first value is there; then its worker hears of it."""
        if not first.done():
            return False
        unit.torn = False
        self._lines[worker].post(Op.CONSUMED, unit.number)
        return True

    def _bye(self, worker: int, frame: Frame) -> None:
        self._callers = [caller for caller in self._callers if caller[0] != worker]
        if not self._lines[worker].local:
            self._lines[worker].post(Op.BYE)
        self._send(self._state.left(worker))

    # ---- out

    def _send(self, replies: Replies) -> None:
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

    def _control(self, worker: int, frame: Frame) -> None:
        if self._requests.heard(worker, self._lines[worker], frame):
            self._units_changed()

    def _units_changed(self) -> None:
        units = self._state.units
        self._receiver.buffers.limit = sum(unit.stored.nbytes for unit in units.values())
        self._pushes.keep(units)

    # ---- the end of an epoch

    def _end(self, error: Exception) -> None:
        """End the epoch, for all ranks, because of an error of this one; or learn that another has ended it."""
        raised = self.epoch.end(f"server rank {self.layout.rank}", error)
        if not isinstance(raised, CollectiveError):
            raise raised
        self.at_end()

    def at_end(self) -> None:
        """The epoch is over: finish rounds to which all have contributed, drop all else, and say that this server reads
        no worker's memory any more. Blocks for a moment."""
        now = time.monotonic()
        grace, until = now + GRACE_SECONDS, now + END_SECONDS
        while now < grace or (self._state.ready and now < until):
            self._hear_pushes()
            if self._state.finish():
                until = now + END_SECONDS
            time.sleep(SLEEP_SECONDS[0])
            now = time.monotonic()
        self._state.abandon()
        if self._rings is not None:
            self._rings.stop()
        self._receiver.stop(self._lines)
        self._requests.drop()
        self._over = now

    def _hear_pushes(self) -> None:
        """Take in what workers of this node pushed before they knew of the end."""
        for worker, line in self._callers:
            for data in line.read() if line.local else ():
                if data[0] == PUSH:
                    unit, index, source, _ = self._pushes.new(worker, line, data)
                    if type(source) is Filling:
                        source.begin(ROUND.unpack_from(data, ROUND_AT)[0])
                    unit.push(index, source)
                    if not unit.missing:
                        self._state.ready[unit.number] = unit

    def _next_epoch(self) -> bool:
        """Begin the next epoch as soon as the workers do; whether they have, or have closed the store."""
        waited, limit = time.monotonic() - self._over, self.epoch.limits.timeout_seconds
        if not self.epoch.asked():
            if 0 < limit < waited:
                raise StallError(f"the epoch is over, and no worker has called recover() or close() for {limit:.3g} s")
            return False
        if self.epoch.renew():
            self.recovered(*connect(self.layout, self.epoch))
        else:
            self._callers = []
        return True

    def recovered(self, lines: list[Line], rings: Rings | None) -> None:
        """The next epoch has begun, with these lines: rounds count on from the last complete one."""
        self._state.recover()
        self._begin(lines, rings)
