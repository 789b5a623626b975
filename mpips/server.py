"""A server process: frames in, `ServerState` in the middle, frames out, until every worker has said goodbye."""

from __future__ import annotations

import logging
import os
import time
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from collectives.node import arena
from collectives.node.arena import Region
from mpips import compression, messages, optimizers
from mpips.compression import Compressor
from mpips.cores import Seat
from mpips.layout import Layout
from mpips.lines import TAG_FRAME, Line
from mpips.messages import ROUND, ROUND_AT, Coding, Frame, Op, UnitCard
from mpips.remote import Blocks, Letter, Postman
from mpips.rings import Rings
from mpips.server_state import Replies, ServerState
from mpips.sources import Compressed, Elements, Filling, Rows
from mpips.unit import Reply, Source, Unit

if TYPE_CHECKING:
    from collections.abc import Callable

AHEAD_SECONDS = 2e-3
YIELDS = 8  # before the clock is looked at; where cores are busy each may cost a slice
SPIN_SECONDS = 1e-3
SLEEP_SECONDS = (1e-4, 2e-3)  # the shortest and the longest sleep between two looks
SLEEP_SHARE = 0.02  # of the time without anything to do so far: so much later it may hear what ends that
TICK_SECONDS = 0.05
VIEWS = 4096  # least number that is kept
MOST_THREADS = 4  # more than a few cores only wait for memory
PUSH = int(Op.PUSH)
Push = tuple[int, Source, int]
"""Unit, source and priority."""


def _threads(layout: Layout, cores: int) -> int:
    """Cores for a long sum: workers wait meanwhile, so the servers of a node share all that this one may use."""
    servers = range(layout.num_workers, layout.num_workers + layout.num_servers)
    here = sum(layout.same_node(layout.rank, server) for server in servers)
    return max(1, min(MOST_THREADS, cores // here))


class Server:
    """The loop of one server rank."""

    def __init__(self, layout: Layout, lines: list[Line], rings: Rings | None, seat: Seat) -> None:
        from mpi4py import MPI

        self._anybody = MPI.ANY_SOURCE
        options = layout.options
        self._layout, self._lines, self._rings = layout, lines, rings
        remote = [worker for worker, line in enumerate(lines) if not line.local]
        self._remote = remote
        self._state = ServerState(
            range(layout.num_workers), layout.asynchronous, options.staleness, options.stall_seconds,
            options.timeout_seconds, remote, _threads(layout, len(seat.before)), seat.step_aside, seat.shared,
        )  # fmt: skip
        self._postman = Postman(layout.world, options.chunks_in_flight)
        self._compressor: Compressor | None = None
        # From another worker on for every server, so that not all use the link of the same worker first.
        first = (layout.rank - layout.num_workers) * len(lines) // layout.num_servers
        self._callers = [*enumerate(lines)][first:] + [*enumerate(lines)][:first]
        self._views: dict[tuple[int, ...], NDArray[Any]] = {}
        self._most_views = VIEWS
        self._deferred: list[tuple[int, int, messages.Request]] = []
        self._pushes: dict[bytes, Push] = {}
        """By frames, but for the round."""
        self._handlers: dict[int, Callable[[int, Frame], Replies]] = {
            Op.REFUSE: self._refuse, Op.PULL: self._pull, Op.PULL_ROWS: self._pull_rows,
            Op.RELEASE: self._release, Op.SET: self._set, Op.CONTROL: self._control, Op.BYE: self._bye,
        }  # fmt: skip

    def serve(self) -> None:
        """Blocking: returns when every worker has left."""
        state, rings = self._state, self._rings
        idle_since = 0.0
        spins = 0
        next_tick = time.monotonic() + TICK_SECONDS
        while self._callers:
            heard = (rings is not None and rings.rung()) or self._knocked()
            heard = heard and self._listen()
            worked, replies = state.work(idle_since > 0 and time.monotonic() - idle_since > AHEAD_SECONDS)
            if replies:
                self._send(replies)
            if self._deferred and state.quiet:
                self._answer_deferred()
            if self._remote:
                for unit, worker in self._postman.delivered():
                    state.released(unit, worker)
            if heard or worked:
                idle_since, spins = 0.0, 0
                continue
            spins += 1
            os.sched_yield()
            if spins < YIELDS:
                continue
            for _, line in self._callers:
                line.flush()  # nobody rings when he has made room
            now = time.monotonic()
            if not idle_since:
                idle_since = now
            if now > next_tick:
                next_tick = now + TICK_SECONDS
                self._send(state.tick(now))
            if now - idle_since > SPIN_SECONDS and (self._remote or not state.ready):
                time.sleep(min(max(SLEEP_SHARE * (now - idle_since), SLEEP_SECONDS[0]), SLEEP_SECONDS[1]))
        self._postman.finish(self._lines)

    # ---- in

    def _knocked(self) -> bool:
        """Whether a worker of another node has sent a frame; one look for all of them."""
        return bool(self._remote) and self._layout.world.Iprobe(self._anybody, TAG_FRAME)

    def _listen(self) -> bool:
        heard = False
        for worker, line in self._callers:
            if line.waiting():
                heard = True
                for data in line.read():
                    replies: Replies | None
                    if data[0] == PUSH:
                        number, source, priority = self._pushes.get(data[:ROUND_AT]) or self._new_push(worker, data)
                        if type(source) is Filling:
                            source.begin(ROUND.unpack_from(data, ROUND_AT)[0])
                        replies = self._state.pushed(number, worker, source, priority, time.monotonic())
                    else:
                        frame = Frame.of(data)
                        replies = self._handlers[frame.op](worker, frame)
                    if replies:
                        self._send(replies)
        return heard

    def _new_push(self, worker: int, data: bytes) -> Push:
        """What a frame pushes; kept where the same region may be pushed again."""
        frame = Frame.of(data)
        push = frame.unit, self._source(worker, frame, self._state.units[frame.unit]), frame.priority
        if type(push[1]) in (Elements, Filling):
            if len(self._pushes) >= self._most_views:
                self._pushes.clear()
            self._pushes[data[:ROUND_AT]] = push
        return push

    def _refuse(self, worker: int, frame: Frame) -> Replies:
        sentence = self._lines[worker].body(frame).decode()
        return self._state.refused(frame.unit, worker, sentence, frame.round, time.monotonic())

    def _pull(self, worker: int, frame: Frame) -> Replies:
        return self._state.pulled(frame.unit, worker, frame.round)

    def _pull_rows(self, worker: int, frame: Frame) -> Replies:
        rows = np.frombuffer(self._lines[worker].body(frame), np.int64)
        return self._state.pulled(frame.unit, worker, frame.round, rows)

    def _release(self, worker: int, frame: Frame) -> Replies:
        return self._state.released(frame.unit, worker)

    def _set(self, worker: int, frame: Frame) -> Replies:
        self._state.set(frame.unit, worker, self._source(worker, frame, self._state.units[frame.unit]))
        return []

    def _bye(self, worker: int, frame: Frame) -> Replies:
        self._callers = [caller for caller in self._callers if caller[0] != worker]
        if not self._lines[worker].local:
            self._lines[worker].post(Op.BYE)
        return self._state.left(worker)

    def _source(self, worker: int, frame: Frame, unit: Unit) -> Source:
        line = self._lines[worker]
        if frame.coding == Coding.PLAIN and not line.local:
            return Blocks(self._postman, line, worker, unit, frame)
        if not line.local:
            return Letter(self._postman, line, worker, unit, frame, self._reader(frame, unit))
        payload = self._view(frame)
        if frame.coding == Coding.GROWING:
            return Filling(payload, unit.blocks, unit.block_elements, unit.stored.dtype)
        if frame.coding == Coding.PLAIN:
            return Elements(payload.view(unit.stored.dtype))
        return self._reader(frame, unit)(payload)

    def _reader(self, frame: Frame, unit: Unit) -> Callable[[NDArray[np.uint8]], Source]:
        """What makes a source of a coded payload, whenever it is read: with the compressor of when it was pushed."""
        if frame.coding == Coding.ROWS:
            shape = (unit.stored.size // max(1, unit.row_elements), unit.row_elements)
            return lambda payload: Rows(payload, frame.aux, shape, unit.stored.dtype)
        compressor = self._compressor
        assert compressor is not None
        return lambda payload: Compressed(payload, compressor)

    def _view(self, frame: Frame) -> NDArray[np.uint8]:
        """The payload's bytes; the same region is mapped and touched once."""
        key = frame.region
        view = self._views.get(key)
        if view is None:
            if len(self._views) >= self._most_views:
                self._views.clear()
            view = self._views[key] = arena.attach(Region(*key))
        return view

    # ---- out

    def _send(self, replies: list[Reply]) -> None:
        logged = ""
        for reply in replies:
            if reply.worker in self._state.gone:
                continue  # it hears nothing more; a later store would
            line = self._lines[reply.worker]
            if reply.text:
                if reply.what == "WARNING" and reply.text != logged:  # once, whoever hears it
                    logged = reply.text
                    logging.getLogger(__name__).warning("%s", logged)
                line.post_body(
                    reply.text.encode(), Op[reply.what], reply.unit, reply.round, flags=int(reply.timed_out)
                )
            elif reply.what == "GRANT" and not line.local:
                unit = self._state.units[reply.unit]
                self._postman.ship(unit, reply.worker, reply.rows)
            else:
                line.post(Op[reply.what], reply.unit, reply.round)

    # ---- rare requests

    def _control(self, worker: int, frame: Frame) -> Replies:
        """Settings count from the next push on, so they wait until everything pushed before has been applied. What
        concerns no push is answered at once: others may push only after it."""
        request = messages.decode_request(self._lines[worker].body(frame))
        match request:
            case messages.Create():
                at_once = True
            case messages.Forget(units):
                at_once = self._state.idle(units)
            case _:
                at_once = False
        if at_once:
            self._reply(worker, frame.token, request)
        else:
            self._deferred.append((worker, frame.token, request))
        return []

    def _answer_deferred(self) -> None:
        for worker, token, request in self._deferred:
            self._reply(worker, token, request)
        self._deferred.clear()

    def _reply(self, worker: int, token: int, request: messages.Request) -> None:
        line = self._lines[worker]
        try:
            answer: Any = self._answer(request)
        except (ValueError, TypeError, MemoryError) as error:
            line.post_body(str(error).encode(), Op.ANSWER, token=token, flags=1)
        else:
            line.post_body(messages.encode(answer), Op.ANSWER, token=token)

    def _answer(self, request: messages.Request) -> messages.Answer:
        match request:
            case messages.Create(units):
                return self._create(units)
            case messages.Forget(units):
                self._state.forget(units)
                self._make_room()
                self._pushes = {frame: push for frame, push in self._pushes.items() if push[0] in self._state.units}
            case messages.SetOptimizer(data):
                self._state.set_optimizer(optimizers.decode(data))
            case messages.SetCompression(options):
                self._compressor = compression.create(options)
            case messages.GetState(number):
                unit = self._state.units[number]
                arrays = list(unit.state or ())
                return messages.StatePart(unit.step, [a.dtype.name for a in arrays], [a.tobytes() for a in arrays])
            case messages.PutState(number, state):
                self._put_state(self._state.units[number], state)
        return messages.Done()

    def _put_state(self, unit: Unit, part: messages.StatePart) -> None:
        if self._state.optimizer is None:
            raise ValueError("load_optimizer_states needs an optimizer; call set_optimizer first")
        if not part.arrays and not part.step:
            unit.state, unit.step = None, 0
            return
        state = self._state.optimizer.init(unit.stored)
        given = [np.frombuffer(data, dtype) for data, dtype in zip(part.arrays, part.dtypes, strict=True)]
        if [a.shape for a in given] != [a.shape for a in state]:
            unfit = f"the saved state does not fit {self._state.optimizer!r}"
            raise ValueError(f"key {unit.key!r}: {unfit}: set the optimizer that it was saved of")
        for array, values in zip(state, given, strict=True):
            array[...] = values
        unit.state, unit.step = state, part.step

    def _create(self, cards: list[UnitCard]) -> messages.Created:
        itemsizes = [messages.dtype_of(card.dtype).itemsize for card in cards]
        first_words, words, first_bytes, nbytes = messages.arrange(cards, itemsizes)
        word_memory = arena.empty(max(words, 8), np.uint64)
        word_memory[...] = 0
        memory = arena.empty(nbytes, np.uint8)
        for card, itemsize, word, byte in zip(cards, itemsizes, first_words, first_bytes, strict=True):
            size = card.stop - card.start
            stored = memory[byte : byte + size * itemsize].view(messages.dtype_of(card.dtype))
            mine = memoryview(word_memory[word : word + 1 + len(card.contributors)])  # type: ignore[arg-type]
            self._state.create(
                Unit(card.number, card.key, stored, mine, card.contributors, card.block_elements, card.row_elements)
            )
        self._make_room()
        word_region, region = arena.locate(word_memory), arena.locate(memory)
        assert word_region is not None
        assert region is not None
        return messages.Created(tuple(word_region), tuple(region))

    def _make_room(self) -> None:
        units = self._state.units.values()
        self._postman.buffers.limit = sum(unit.stored.nbytes for unit in units)
        self._most_views = max(VIEWS, 2 * sum(len(unit.contributors) for unit in units))
