"""The loop of a server: it reads frames (small messages) from workers, lets `ServerState` work, and sends replies.

`serve` calls `Server.turn` of each store of this process again and again, until every worker has left. An exception in
a turn ends that store's generation. The server then waits until the workers begin the next generation, or close the
store.
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
# the clock for all time limits of the servers in this process, which all run in one loop
CLOCK = Clock()
# An idle server yields its core this many times before it reads the clock. On busy cores each yield may cost a time
# slice.
YIELDS = 8
SPIN_SECONDS = 1e-3
# shortest and longest sleep of an idle server, in seconds
SLEEP_SECONDS = (1e-4, 2e-3)
# A sleep lasts this share of the time for which the server has been idle. So the delay until new work is noticed is at
# most this share of the idle time.
SLEEP_SHARE = 0.02
TICK_SECONDS = 0.05
# A busy server reads the clock every BUSY_TURNS turns. An idle server, which mostly yields its core, reads it at least
# every IDLE_TURNS turns.
BUSY_TURNS, IDLE_TURNS = 256, 32
# Summing is memory-bound: beyond a few cores, extra threads only wait for memory.
MOST_THREADS = 4
# The time for which a server continues at the end of a generation.
# GRACE_SECONDS: to receive frames that are still being written.
# END_SECONDS: to finish a round that cannot be undone, if all workers have pushed to it but some still copy their data.
GRACE_SECONDS, END_SECONDS = 0.02, 1.0
# After the end of a generation a server gives up if its workers neither recover nor close for this long, or for
# timeout_seconds if that is longer.
ORPHAN_SECONDS = 300.0


def serve(servers: Sequence[Server], opened: Callable[[OpenStore], Server | None] | None = None) -> None:
    """Serve these stores, and others that their workers open, until all workers of all stores have left. Blocking.

    An idle server first yields its core. Later it sleeps, and each sleep is longer the longer the server has been idle.
    Errors that are neither a worker's fault nor the network's fault are raised.

    Args:
        opened: Makes another store that all workers have asked for. Collective with these workers. Returns None if the
            store is refused.
    """
    serving, turns, load = list(servers), 0, Load()
    # the time at which the server became idle, and the number of turns since then
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
        # Do not sleep if a worker of this node may deliver the next block of a sum at any moment. The worker mostly
        # needs less time for this than the shortest sleep takes.
        if since and now - since > SPIN_SECONDS and not any(server.is_summing for server in serving):
            time.sleep(min(max(SLEEP_SHARE * (now - since), SLEEP_SECONDS[0]), SLEEP_SECONDS[1]))


class Serving(NamedTuple):
    """A server's part in one generation."""

    state: ServerState
    requests: Requests


class Server(Member[None]):
    """One store on one server rank. `begin` or `rebuild` must be called before the first turn.

    Args:
        memory: The memory of this node's servers, which this rank mapped while it was a spare.
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
        """Make this server's part in the current generation, without units."""
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
                    options.check_finite,
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
        """Begin to serve a generation over these connections."""
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
        """The state and services of the current generation, whose pushes `Load` counts."""
        return self._state, self._requests.services.values()

    @property
    def is_summing(self) -> bool:
        """True if a sum waits for a block that a worker of this node may complete at any moment."""
        return bool(self._state.ready) and not self._traffic.remote

    def take_opening(self) -> OpenStore | None:
        """Return the store that all workers have asked to open since the last call, or None."""
        asked = self._requests.opening
        if len(asked) < self.layout.num_workers:
            return None
        first = asked[0]
        asked.clear()
        return first

    def close(self) -> None:
        """Close the store together with all of its ranks, after every worker has left. Blocking."""
        if self._ended is None:
            # If a message cannot be delivered now, it never will be. So ignore the error.
            with suppress(CollectiveError):
                self.generation.wait(self._traffic.done, "close")
        self.generation.close()

    # ---- turns

    def turn(self) -> bool:
        """Read messages, work, and send replies once.

        Return True if anything was done. An exception ends the generation.
        """
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
        """Do periodic work: check for long waits, and whether the generation has ended. `now`: seconds of `CLOCK`."""
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
        """End the generation for all ranks because of an error on this rank, or because another rank has ended it."""
        raised = self.generation.end(f"server rank {self.layout.rank}", error)
        if not isinstance(raised, CollectiveError):
            raise raised
        self.at_end()

    def at_end(self) -> None:
        """End this server's part in a generation that is over. Blocks for a moment.

        Finish rounds to which all workers have contributed, and discard all other pushes. Then tell the workers that
        this server no longer reads their memory.
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
        """Begin the next generation once the workers do.

        Return True once the workers have begun it or closed the store.

        Raise StallError if no worker has called recover() or close() for a long time.
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
        """Return this rank's inventory for a recovery, with its own units, and the copies that it keeps as a mirror."""
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
        """Return what this rank can read of a service's old content.

        This includes the server's own service and, if a server has died, the copies that this server keeps as a mirror.
        """
        old = super().old_service(name)
        service = self._last_serving.get_or_save(self.generation.number, self._now).requests.services[name]
        copies = self._copies.services.get(name) if old.before.lost_servers else None
        return old._replace(service=service, copies=copies)

    def read_old(self, piece: UnitSlice) -> list[Array]:
        """Return the values and state of an old unit, which this rank can read in one of three places.

        Either the unit was this server's own, or this server keeps a copy of it as a mirror, or the unit's server ran
        on this node.
        """
        if piece.owner < 0:
            return self._copies.arrays_of(piece.unit, piece.before)
        if piece.owner == former_rank(self.layout):
            return arrays_of_unit(self._old_units[piece.unit], piece.before)
        return super().read_old(piece)

    def move(self, plan: RecoveryPlan) -> ServerReady:
        """Make this server's units and fill them from old memory of this and other ranks.

        Send what other servers need.
        """
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
        """Begin to serve the new units to the newly connected workers."""
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
    """The messages between one server and its workers in one generation.

    For each frame from a worker, call the server's `state` or `requests`, and send the replies.

    Args:
        lines: The connection to each worker, as `connect` has returned it.
        rings: The queues in shared memory that the workers of this node write to, also from `connect`.
    """

    def __init__(
        self, layout: Layout, lines: list[Line], rings: Rings | None, state: ServerState, requests: Requests
    ) -> None:
        self._lines = lines
        self._rings = rings
        self._state = state
        self._requests = requests
        # connections to workers of other nodes
        self.remote = [line for line in lines if isinstance(line, MessageLine)]
        self._receiver = Receiver(layout.world, layout.options.chunks_in_flight)
        # Each server begins with a different worker. Otherwise all servers would use the network link of the same
        # worker first.
        first = (layout.rank - layout.num_workers) * len(lines) // layout.num_servers
        self._callers = [*enumerate(lines)][first:] + [*enumerate(lines)][:first]
        # first values that are arriving: (function that returns True once all have arrived, unit, line of the sender)
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
        """Read and handle frames from workers. Return True if any had arrived."""
        if not ((self._rings is not None and self._rings.any_written()) or (self.remote and any_waiting(self.remote))):
            return False
        heard = False
        # Only a store with a quorum needs the time at which a push arrives.
        now = CLOCK.seconds() if self._pushes.wholly else 0.0
        known, new, pushed = self._pushes.known, self._pushes.new, self._state.pushed
        try:
            for worker, line in self._callers:
                if not line.waiting():
                    continue
                heard = True
                for data in line.read():
                    if data[0] == PUSH:
                        unit, index, source, priority = known.get(data[:ROUND_AT]) or new(worker, line, data)
                        if type(source) is FillingOutbox:
                            source.begin(ROUND.unpack_from(data, ROUND_AT)[0])
                        pushed(unit, index, source, priority, now)
                    else:
                        self._handle(worker, line, Frame.of(data))
        # No answer to a frame could report this error. So end the generation, because then all workers get the error.
        except UnknownError as error:
            raise CollectiveError(
                f"{error}, and rank {worker} names it: make keys on all workers, and use none that was forgotten"
            ) from None
        return heard

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
        """Read what workers of this node pushed before they knew that the generation was over."""
        known = self._pushes.known
        for worker, line in self._callers:
            for data in line.read() if line.local else ():
                if data[0] != PUSH or Frame.of(data).unit not in self._state.units:
                    continue
                # Drop the push if it raises MismatchError, because another worker, which has left, can no longer push
                # to the round.
                with suppress(CollectiveError, UnknownError):
                    unit, index, source, _ = known.get(data[:ROUND_AT]) or self._pushes.new(worker, line, data)
                    if type(source) is FillingOutbox:
                        source.begin(ROUND.unpack_from(data, ROUND_AT)[0])
                    self._state.pushed(unit, index, source, 0, CLOCK.seconds())

    def note_arrivals(self) -> None:
        """Handle transfers from and to other nodes that have completed. Called only if there are `remote` lines."""
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
                # The worker has left, and no longer reads messages.
                continue
            line = self._lines[reply.worker]
            if reply.text:
                # Log a warning only once, even if it is sent to several workers.
                if reply.text != logged:
                    logged = reply.text
                    LOG.warning("%s", logged)
                line.post_body(reply.text.encode(), Op[reply.what], reply.unit, reply.round)
            elif reply.what == "GRANT" and not line.local:
                self._receiver.ship(self._state.units[reply.unit], reply.worker, reply.rows)
            else:
                line.post(Op[reply.what], reply.unit, reply.round)

    def answer_waiting(self) -> None:
        """Answer requests that had to wait until all pushes were applied. Called when all pushes have been applied."""
        if len(self._state.meeting | self._state.gone) == len(self._lines):
            self._state.all_met()
            self._requests.all_met()
        if self._requests.answer_all():
            self._units_changed()

    def flush(self) -> None:
        """Send frames that did not fit into a ring before.

        Called again and again, because workers do not signal free room.
        """
        for _, line in self._callers:
            line.flush()

    def tick(self, now: float) -> None:
        """Check for waits that are too long, at this server and at others.

        Raise StallError or MismatchError if a wait will not end.
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
        """Stop reading workers' memory at the end of a generation, and tell the workers.

        Blocks for a moment if there are workers on other nodes.
        """
        if self._rings is not None:
            self._rings.stop()
        self._receiver.stop(self._lines)
