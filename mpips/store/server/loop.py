"""The loop of a server: frames in and out (`WorkerTraffic`), `ServerState` between them, until every worker has left.

`serve` gives each store of this process its turns. An exception in a turn ends that store's generation. The server then
waits until the workers begin the next generation, or close the store.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Container, Sequence
from contextlib import suppress
from typing import NamedTuple

import numpy as np

from mpips.collectives import log
from mpips.collectives.clock import Clock
from mpips.collectives.errors import CollectiveError, StallError
from mpips.collectives.fabric import arena
from mpips.collectives.fabric.arena import SparseFile
from mpips.compression import Compressor
from mpips.optimizers import Groups
from mpips.store.keys.key import Array, Name
from mpips.store.recovery.memory import LastGeneration, Ledger, NodeMemory, UnitMemory, arrays_of_unit, describe_unit
from mpips.store.recovery.mirror import Mirror, MirroredUnits
from mpips.store.recovery.plan import Inventory, OwnerInventory, RecoveryPlan, ServerReady, UnitSlice, encode_settings
from mpips.store.recovery.recover import Member, former_rank, make_units, recover
from mpips.store.roles import CorePinning, Layout
from mpips.store.runtime.generation import Generation
from mpips.store.server.late import Gossip, Late
from mpips.store.server.load import Load
from mpips.store.server.quorum import Quorum, QuorumState
from mpips.store.server.reduce import Reduce
from mpips.store.server.requests import Requests
from mpips.store.server.service import OldMemory, Service, Surroundings
from mpips.store.server.sources import FillingOutbox, Pushes, Receiver
from mpips.store.server.state import AsynchronousState, ServerState, SynchronousState
from mpips.store.server.unit import Replies, UnknownError
from mpips.store.services import KINDS
from mpips.store.transport.frames import ROUND, ROUND_AT, Frame, Op, OpenStore
from mpips.store.transport.lines import Line, MessageLine, Rings, any_waiting

LOG = log.get("mpips.store")
PUSH = int(Op.PUSH)
# the clock for all time limits of this process' servers, which one loop turns
CLOCK = Clock()
# How often an idle server yields its core before it reads the clock. On busy cores each yield may cost a time slice.
YIELDS = 8
SPIN_SECONDS = 1e-3
# the shortest and the longest sleep between two looks
SLEEP_SECONDS = (1e-4, 2e-3)
# A sleep lasts this share of the idle time before it, so what ends the idle time is noticed at most that much later.
SLEEP_SHARE = 0.02
TICK_SECONDS = 0.05
# number of turns after which a busy server looks at the clock, and an idle one, which mostly yields its core
BUSY_TURNS, IDLE_TURNS = 256, 32
# Summing is memory-bound: beyond a few cores, extra threads only wait for memory.
MOST_THREADS = 4
# How long a server goes on at the end of a generation: for frames that are being written, and for a round that is
# complete but still being filled and cannot be undone.
GRACE_SECONDS, END_SECONDS = 0.02, 1.0
# A server ends when its workers have done nothing for this long after the end of a generation, or for timeout_seconds
# if that is longer.
ORPHAN_SECONDS = 300.0


def serve(servers: Sequence[Server], opened: Callable[[OpenStore], Server | None] | None = None) -> None:
    """Serve these stores, and others that their workers open, until all workers of all stores have left. Blocking.

    A server that has nothing to do yields its core, and then sleeps, the longer the longer it has been idle. Errors
    that are neither a worker's fault nor the network's are raised.

    Args:
        opened: Makes another store that all workers have asked for, collectively with them. Returns None if it is
            refused.
    """
    serving, turns, load = list(servers), 0, Load()
    # when the server began to be idle, and how often it has looked since
    since, spins = 0.0, 0
    while serving:
        worked = False
        for server in serving:
            worked |= server.turn()
        turns += 1
        if worked:
            since, spins = 0.0, 0
            if turns % BUSY_TURNS:
                continue
            now = CLOCK.seconds()
        else:
            spins += 1
            os.sched_yield()
            if spins < YIELDS and turns % IDLE_TURNS:
                continue
            now = CLOCK.seconds()
            since = since or now
        if now >= load.due:
            load.write(now, [server.counted for server in serving])
        for server in list(serving):
            server.tick(now)
            if opened is not None and (asked := server.take_opening()) and (more := opened(asked)):
                serving.append(more)
            if server.finished:
                serving.remove(server)
                server.close()
        # Do not sleep if a worker of this node may complete a block of a sum at any moment: a sleep is longer than that
        # wait.
        if since and now - since > SPIN_SECONDS and not any(server.is_summing for server in serving):
            time.sleep(min(max(SLEEP_SHARE * (now - since), SLEEP_SECONDS[0]), SLEEP_SECONDS[1]))


class Serving(NamedTuple):
    """A server's part in one generation."""

    state: ServerState
    requests: Requests


class Server(Member[None]):
    """One store on one server rank. It serves after `begin` or `rebuild`.

    `memory` is what this rank kept of other ranks' memory while it was a spare.
    """

    def __init__(
        self, layout: Layout, seat: CorePinning, generation: Generation, memory: NodeMemory | None = None
    ) -> None:
        super().__init__(layout, generation, memory)
        if layout.survives:
            arena.in_one_segment()
        # the memory of services
        self._file = SparseFile()
        self._ledger = Ledger(self._file) if layout.survives else None
        self.ledger = None if self._ledger is None else self._ledger.region
        self._units = UnitMemory(self._ledger)
        self._shared_cores = seat.shared
        # Workers wait during a long sum, so the servers of a node share all cores that this process may use.
        every = range(layout.num_workers, layout.num_workers + layout.num_servers)
        on_node = sum(layout.same_node(layout.rank, server) for server in every)
        threads = max(1, min(MOST_THREADS, seat.usable // on_node))
        self._reduce = Reduce(threads, seat.step_aside, seat.shared)
        kinds = KINDS if layout.options.mirrors else ()
        self._copies = MirroredUnits({kind.name: kind.make_copies(self._file) for kind in kinds})
        self._last_serving: LastGeneration[Serving] = LastGeneration()
        self._now = self._serving([])

    def _serving(
        self, lines: Sequence[Line], groups: Groups | None = None, compressor: Compressor | None = None
    ) -> Serving:
        """Make this server's part in the present generation, without units."""
        layout, number = self.layout, self.generation.number
        options = layout.options
        self._mirror = Mirror(layout, self._copies, number) if options.mirrors and lines else None
        remote = [worker for worker, line in enumerate(lines) if not line.local]
        late = Late(options.stall_seconds, options.timeout_seconds)
        rest = remote, late, self._reduce, groups, self._mirror, compressor
        state: ServerState
        if not layout.asynchronous:
            state = SynchronousState(*rest)
        elif options.quorum < 0:
            state = AsynchronousState(options.staleness, *rest)
        else:
            state = QuorumState(Quorum(options.quorum, options.grace_seconds), *rest)
        state.lane = layout.lane
        mirrors = {} if self._mirror is None else self._mirror.services
        services = {}
        for kind in KINDS:
            services[kind.name] = kind.make(
                Surroundings(
                    layout.num_workers,
                    layout.rank - layout.num_workers,
                    layout.num_servers,
                    options.staleness if layout.asynchronous else None,
                    self._file,
                    layout.survives,
                    mirrors.get(kind.name),
                    late,
                    layout.lane,
                )
            )
        name = f"server rank {layout.rank}"
        return Serving(state, Requests(state, name, self._units, number, services))

    def begin(self) -> None:
        """Begin the store's first generation. Collective over its workers and servers, blocking."""
        lines, rings, _ = self.connect()
        self.memory = self.new_memory
        serving = self._serving(lines)
        serving.requests.publish()
        self._serve(lines, rings, serving)
        LOG.info("the server has begun, for %d workers", len(lines))

    def _serve(self, lines: list[Line], rings: Rings | None, serving: Serving) -> None:
        """Begin to serve a generation over these lines."""
        self._now = serving
        self._state, self._requests = serving.state, serving.requests
        self._traffic = WorkerTraffic(self.layout, lines, rings, self._state, self._requests)
        self._flag = self.generation.flag
        self._next_tick = 0.0
        self._ended: float | None = None
        self._closed = False

    @property
    def finished(self) -> bool:
        """True if every worker has left."""
        return self._closed or self._traffic.over

    @property
    def counted(self) -> tuple[ServerState, Collection[Service]]:
        """The state and services that count the pushes of the present generation, for the server's page."""
        return self._state, self._requests.services.values()

    @property
    def is_summing(self) -> bool:
        """True if a sum waits for a block that a worker of this node may complete at any moment."""
        return bool(self._state.ready) and not self._traffic.remote

    def take_opening(self) -> OpenStore | None:
        """Return a store that all workers have asked to open since the last such call, or None."""
        asked = self._requests.opening
        if len(asked) < self.layout.num_workers:
            return None
        first = asked[0]
        asked.clear()
        return first

    def close(self) -> None:
        """End together with all ranks of the store, after every worker has left. Blocking."""
        if self._ended is None:
            # A message that fails to arrive now never will: there is nothing to wait for.
            with suppress(CollectiveError):
                self.generation.wait(self._traffic.done, "close")
        self.generation.close()

    # ---- turns

    def turn(self) -> bool:
        """Look at everything once. True if anything was done. An exception ends the generation."""
        if self._ended is not None:
            return not self._closed and self._next_generation()
        try:
            return self._turn()
        except Exception as error:
            self._end(error)
            return True

    def _turn(self) -> bool:
        if self._flag[0]:
            self.generation.look()
        traffic, state = self._traffic, self._state
        heard = traffic.read_frames()
        if self._mirror is not None:
            heard |= self._mirror.turn()
            self._requests.post_mirrored()
        worked, replies = state.work()
        if replies:
            traffic.send(replies)
        if self._requests.waiting and state.quiet:
            traffic.answer_waiting()
        if traffic.remote:
            traffic.note_arrivals()
        return heard or worked

    def tick(self, now: float) -> None:
        """Do periodic work, called while there is time: look for long waits and at the generation. `now`: seconds."""
        if self._ended is not None or self.finished:
            return
        try:
            self._traffic.flush()
            self._requests.copy_next()
            self._state.wake(now)
            if now > self._next_tick:
                self._next_tick = now + TICK_SECONDS
                self.generation.look()
                self._traffic.tick(now)
        except Exception as error:
            self._end(error)

    # ---- the end of a generation

    def _end(self, error: Exception) -> None:
        """End the generation for all ranks because of an error of this one, or learn that another rank has ended it."""
        raised = self.generation.end(f"server rank {self.layout.rank}", error)
        if not isinstance(raised, CollectiveError):
            raise raised
        self.at_end()

    def at_end(self) -> None:
        """End this server's part in a generation that is over. Blocks for a moment.

        Rounds to which all have contributed are finished, and everything else is dropped. Then the workers are told
        that this server no longer reads their memory.
        """
        if self._mirror is not None:
            self._mirror.stop()
        now = CLOCK.seconds()
        grace, until = now + GRACE_SECONDS, now + END_SECONDS
        while now < grace or (self._state.ready and now < until and self._ledger is None):
            self._traffic.read_last_frames()
            if self._state.finish():
                until = now + END_SECONDS
            time.sleep(SLEEP_SECONDS[0])
            now = CLOCK.seconds()
        self._state.abandon()
        self._traffic.stop()
        self._requests.drop()
        self._ended = now

    def _next_generation(self) -> bool:
        """Begin the next generation once the workers do. True if they have begun it or closed the store.

        StallError if no worker comes for long.
        """
        assert self._ended is not None
        if not self.generation.barrier.is_due():
            limit = self.generation.limits.timeout_seconds
            if limit and CLOCK.seconds() - self._ended > max(limit, ORPHAN_SECONDS):
                raise StallError("the generation is over, and no worker has called recover() or close()")
            return False
        self._closed = recover(self.generation, lambda: self) is None
        return True

    # ---- the next generation: this server as a `recovery.recover.Member`

    def take_inventory(self, known: Container[Name] = ()) -> Inventory:
        """Add the units that this server holds, and its copies of other servers' units."""
        layout, number = self.layout, self.generation.number
        old = self._last_serving.get_or_save(number, self._now)
        if self._ledger is not None:
            self._ledger.attempt(number)
        inventory = super().take_inventory(known)
        inventory.shared_cores = self._shared_cores
        if (rank := former_rank(layout)) >= 0:
            settings = encode_settings(old.state.optimizers, old.state.compressor)
            units = [describe_unit(unit, layout.asynchronous) for unit in old.state.units.values()]
            inventory.owners.append(OwnerInventory(rank, True, settings, units))
            inventory.owners += self._copies.owners(layout.before, rank)
        return inventory

    def old_service(self, name: str) -> OldMemory:
        """Add the service of this server, and the copies that it keeps of others if a server has died."""
        old = super().old_service(name)
        service = self._last_serving.get_or_save(self.generation.number, self._now).requests.services[name]
        copies = self._copies.services.get(name) if old.before.lost_servers else None
        return old._replace(service=service, copies=copies)

    def read_old(self, piece: UnitSlice) -> list[Array]:
        """Return an old unit of this server, of one that it mirrors, or of one whose memory is mapped."""
        if piece.owner < 0:
            return self._copies.arrays_of(piece.unit, piece.before)
        if piece.owner == former_rank(self.layout):
            return arrays_of_unit(self._old_units[piece.unit], piece.before)
        return super().read_old(piece)

    def move(self, plan: RecoveryPlan) -> ServerReady:
        """Make this server's units, fill them from old memory on this and other ranks, and send what others need."""
        layout, number = self.layout, self.generation.number
        groups, compressor = plan.settings()
        self._next = serving = self._serving(self.connection.lines, groups, compressor)
        services = serving.requests.services
        self._old_units = [*self._last_serving.get_or_save(number, self._now).state.units.values()]
        units, where = make_units(plan, layout.rank, self._units, groups, self._old_units)
        for name, planned in plan.services.items():
            services[name].restore(planned, self.old_service(name), layout.rank)
        self.run_movers(plan, units, self._old_units, services)
        for unit in units:
            serving.state.create(unit)
            serving.state.changed(unit)
        for name, planned in plan.services.items():
            services[name].begin(planned)
        self._plan = plan
        LOG.info("%d unit%s moved, %d byte%s", len(units), "s"[: len(units) != 1], self.nbytes, "s"[: self.nbytes != 1])
        return ServerReady(where, serving.requests.repeat_change(plan.change))

    def rebuild(self, plan: RecoveryPlan, ready: Sequence[ServerReady]) -> None:
        """Serve the new units over the new lines."""
        lines, rings, _ = self.connection
        self._serve(lines, rings, self._next)

    def commit(self) -> None:
        """Free the memory of the old generation after the next one has begun."""
        super().commit()
        self._last_serving.forget()
        self._old_units = []
        rounds = None if self.layout.asynchronous else self._plan.rounds
        self._copies.begin(rounds)
        for name, copies in self._copies.services.items():
            planned = self._plan.services.get(name)
            copies.begin(None if rounds is None else planned.rounds if planned else {})


class WorkerTraffic:
    """The lines of one server in one generation. Frames become events of its state, and replies go out.

    `lines` and `rings` are those that `connect` returned.
    """

    def __init__(
        self, layout: Layout, lines: list[Line], rings: Rings | None, state: ServerState, requests: Requests
    ) -> None:
        self._lines = lines
        self._rings = rings
        self._state = state
        self._requests = requests
        # lines to workers of other nodes
        self.remote = [line for line in lines if isinstance(line, MessageLine)]
        self._receiver = Receiver(layout.world, layout.options.chunks_in_flight)
        # Each server begins with another worker, so that they do not all use the link of the same worker first.
        first = (layout.rank - layout.num_workers) * len(lines) // layout.num_servers
        self._callers = [*enumerate(lines)][first:] + [*enumerate(lines)][:first]
        # first values on their way: (a test whether all have arrived, unit, the line of their worker)
        self._firsts: list[tuple[Callable[[], bool], int, Line]] = []
        self._pushes = Pushes(state, self._receiver, layout.options.quorum >= 0)
        assert layout.servers is not None
        self._gossip = Gossip(layout.servers, state.late)
        self._units_changed()

    @property
    def over(self) -> bool:
        """True if every worker has left."""
        return not self._callers

    # ---- in

    def read_frames(self) -> bool:
        """Take in frames from workers. True if there were any."""
        if not ((self._rings is not None and self._rings.any_written()) or (self.remote and any_waiting(self.remote))):
            return False
        heard, now = False, 0.0
        for worker, line in self._callers:
            if line.waiting():
                now = now or CLOCK.seconds()
                heard = True
                try:
                    self._read(worker, line, now)
                # A frame has no answer that could carry the error, so end the generation, which tells all workers.
                except UnknownError as error:
                    raise CollectiveError(
                        f"{error}, and rank {worker} names it: make keys on all workers, and use none that was "
                        "forgotten"
                    ) from None
        return heard

    def _read(self, worker: int, line: Line, now: float) -> None:
        """Take in the frames of one worker. `now`: seconds."""
        known, new, pushed = self._pushes.known, self._pushes.new, self._state.pushed
        for data in line.read():
            if data[0] == PUSH:
                unit, index, source, priority = known.get(data[:ROUND_AT]) or new(worker, line, data)
                if type(source) is FillingOutbox:
                    source.begin(ROUND.unpack_from(data, ROUND_AT)[0])
                pushed(unit, index, source, priority, now)
            else:
                self._handle(worker, line, Frame.of(data))

    def _handle(self, worker: int, line: Line, frame: Frame) -> None:
        """Handle a frame that is not a push."""
        state, unit = self._state, frame.unit
        match frame.op:
            case Op.PULL:
                self.send(state.pulled(unit, worker, frame.round))
            case Op.HOLD:
                self.send(state.hold(unit, worker, frame.round))
            case Op.RELEASE:
                state.released(unit, worker)
            case Op.PULL_ROWS:
                rows = np.frombuffer(line.body(frame), np.int64)
                self.send(state.pulled(unit, worker, frame.round, rows))
            case Op.SET:
                state.units[unit].thaw()
                self._firsts.append((self._receiver.first(state.units[unit], worker), unit, line))
            case Op.CONTROL:
                if self._requests.answer(worker, line, frame):
                    self._units_changed()
            case Op.WAITS:
                state.waits(unit, worker, frame.round)
            case Op.MEETS:
                self.send(state.meets(worker))
                self._requests.meets(worker)
            case Op.BYE:
                self._callers = [caller for caller in self._callers if caller[0] != worker]
                if not line.local:
                    line.post(Op.BYE)
                self.send(state.left(worker))
                self._requests.left(worker)
            case _:
                raise UnknownError(f"there is no operation {frame.op} of a server")

    def read_last_frames(self) -> None:
        """Take in what workers of this node pushed before they knew that the generation is over."""
        known = self._pushes.known
        for worker, line in self._callers:
            for data in line.read() if line.local else ():
                if data[0] != PUSH or Frame.of(data).unit not in self._state.units:
                    continue
                # MismatchError: a worker that has left cannot push to this round any more. The push is dropped.
                with suppress(CollectiveError, UnknownError):
                    unit, index, source, _ = known.get(data[:ROUND_AT]) or self._pushes.new(worker, line, data)
                    if type(source) is FillingOutbox:
                        source.begin(ROUND.unpack_from(data, ROUND_AT)[0])
                    self._state.pushed(unit, index, source, 0, CLOCK.seconds())

    def note_arrivals(self) -> None:
        """Handle messages from and to other nodes that have arrived. Called only if there are `remote` lines."""
        for unit, worker in self._receiver.delivered():
            self._state.released(unit, worker)
        for first in self._firsts[:]:
            is_there, unit, line = first
            if is_there():
                self._firsts.remove(first)
                line.post(Op.CONSUMED, unit)

    # ---- out

    def send(self, replies: Replies) -> None:
        logged = ""
        for reply in replies:
            if reply.worker in self._state.gone:
                # The worker has left, and reads no messages any more.
                continue
            line = self._lines[reply.worker]
            if reply.text:
                # Log a warning once, however many workers it is sent to.
                if reply.text != logged:
                    logged = reply.text
                    LOG.warning("%s", logged)
                line.post_body(reply.text.encode(), Op[reply.what], reply.unit, reply.round)
            elif reply.what == "GRANT" and not line.local:
                self._receiver.ship(self._state.units[reply.unit], reply.worker, reply.rows)
            else:
                line.post(Op[reply.what], reply.unit, reply.round)

    def answer_waiting(self) -> None:
        """Answer requests that had to wait until all pushes were applied. Called once they are."""
        if len(self._state.meeting | self._state.gone) == len(self._lines):
            self._state.all_met()
            self._requests.all_met()
        if self._requests.answer_all():
            self._units_changed()

    def flush(self) -> None:
        """Send frames that found no room in a ring before. Workers do not signal when a ring has room again."""
        for _, line in self._callers:
            line.flush()

    def tick(self, now: float) -> None:
        """Look for waits that are too long, at this server and through others.

        StallError or MismatchError if one will not end.
        """
        self._gossip.tick()
        self.send(self._requests.tick(now))

    def _units_changed(self) -> None:
        units = self._state.units
        self._receiver.buffers.limit = sum(unit.stored.nbytes for unit in units.values())
        self._pushes.forget_others()

    # ---- the end

    def done(self) -> bool:
        """True if MPI has completed all sends to the workers."""
        return self._receiver.done(self._lines)

    def stop(self) -> None:
        """Stop reading workers' memory at the end of a generation, and tell them.

        Between nodes it blocks for a moment.
        """
        if self._rings is not None:
            self._rings.stop()
        self._receiver.stop(self._lines)
