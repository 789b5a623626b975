"""Messages between workers and a server of another node, and between members of a client: all that is sent arrives
where it belongs, nobody waits for ever, and what is given up touches no memory of the caller."""

from __future__ import annotations

import random
import time
from collections import deque
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
from mpi4py import MPI

from collectives.fabric.requests import part
from collectives.fabric.tasks import goes_on, together
from mpips import Options
from mpips.store.keys.key import Key, Shard
from mpips.store.remote.link import Link
from mpips.store.server.sources import MessageBlocks, Receiver
from mpips.store.server.unit import Unit
from mpips.store.transport.client_sums import ClientSums
from mpips.store.transport.frames import Frame, Op
from mpips.store.transport.lines import MessageLine, any_waiting
from mpips.store.transport.pending import MessagesUnderWay, cut_bytes, member_tag
from tests.choice import first
from tests.mpi.sizes import only_on

SECONDS = 20
ROUNDS = 4
BLOCK = 1024  # elements of a shard of one message


@pytest.fixture
def comm():
    """The world, for this test alone."""
    made = MPI.COMM_WORLD.Dup()
    yield made
    part(made)


def finish(task):
    """Run a task to its end; it must not take long."""
    until = time.monotonic() + SECONDS
    while goes_on(task):
        assert time.monotonic() < until, "the task does not end"


def hearing(link, task):
    """Run a task, and hear the servers before each step, as the operations of a store do."""
    link.listen()
    for moved in task:
        yield moved
        link.listen()


# ---- inside a client


@pytest.mark.parametrize("size", [1, 5, 1000, 40_000])
def test_sums_inside_a_client(comm, size):
    rank, ranks, sums = comm.rank, comm.size, ClientSums(comm)
    x = np.random.default_rng(rank).integers(0, 1000, size).astype(np.float64)
    every = [np.random.default_rng(other).integers(0, 1000, size).astype(np.float64) for other in range(ranks)]
    cuts = [size * i // ranks for i in range(ranks + 1)]
    slice_, total = np.empty(cuts[rank + 1] - cuts[rank]), np.empty(size) if rank == 0 else None
    first, gathered = (every[0].copy() if rank == 0 else np.zeros(size)), np.zeros(size)
    gathered[cuts[rank] : cuts[rank + 1]] = rank
    tasks = [
        sums.reduce_scatter(x, slice_, cuts, member_tag(0, 0)),
        sums.reduce_to_first(x, total, member_tag(1, 0)),
        sums.broadcast(first, member_tag(2, 0)),
        sums.allgather(gathered, cuts, member_tag(3, 0)),
    ]
    random.Random(rank).shuffle(tasks)  # with tags of their own they may go on in any order
    finish(together(tasks))
    assert np.array_equal(slice_, sum(every)[cuts[rank] : cuts[rank + 1]])
    assert total is None or np.array_equal(total, sum(every))
    assert np.array_equal(first, every[0])
    assert all((gathered[a:b] == other).all() for other, (a, b) in enumerate(pairwise(cuts)))


@pytest.mark.slow
@only_on(2, 3)
def test_a_sum_that_is_given_up_writes_nothing_any_more(comm):
    sums, out = ClientSums(comm), np.zeros(100_000)
    if comm.rank:
        task = sums.spread(out, member_tag(0, 0))
        goes_on(task)
        sums.stop(MessagesUnderWay())
    comm.Barrier()
    if comm.rank == 0:
        task = ClientSums(comm).spread(np.ones(100_000), member_tag(0, 0))
        goes_on(task)
    comm.Barrier()
    time.sleep(0.05)
    comm.Iprobe()
    assert not out.any()


def test_nobody_waits_for_what_was_seen_to_be_over_before(comm):
    """An interrupt may come between MPI's word that a message is over and the note of it."""
    rank, under_way, data = comm.rank, MessagesUnderWay(), [np.empty(5) for _ in range(3)]
    receives = [comm.Irecv(x, rank, tag) for tag, x in enumerate(data)]
    sends = [comm.Isend(np.ones(5), rank, tag) for tag in range(2)]
    under_way.begin(receives[:2], sends)
    under_way.begin(receives[2:])
    MPI.Request.Waitall(receives[:2] + sends)
    assert under_way.pending() == 1
    comm.Send(np.ones(5), rank, 2)
    assert under_way.stop(SECONDS)


# ---- between workers and a server


class Server:
    """The last rank: sums rounds of units of which the workers push all, in the order of the workers."""

    def __init__(self, comm, units, limit=None):
        self.comm, self.units = comm, {unit.number: unit for unit in units}
        self.lines = [MessageLine(comm, worker) for worker in range(comm.size - 1)]
        self.receiver = Receiver(comm, 2)
        self.receiver.buffers.limit = sum(unit.stored.nbytes for unit in units) if limit is None else limit
        self.queues = {unit.number: [deque() for _ in self.lines] for unit in units}
        self.first = []
        self.rounds = dict.fromkeys(self.units, 0)
        self.left = len(self.lines)

    def serve(self):
        until = time.monotonic() + SECONDS
        while self.left:
            assert time.monotonic() < until, f"stuck at {self.rounds}"
            self.turn()
        while not self.receiver.done(self.lines):
            assert time.monotonic() < until

    def turn(self):
        if any_waiting(self.lines):
            for worker, line in enumerate(self.lines):
                for data in line.read():
                    self.heard(worker, line, Frame.of(data))
        for unit in self.units.values():
            self.sum(unit)
        for item in [item for item in self.first if item[0]()]:
            self.first.remove(item)
            item[1].post(Op.CONSUMED, item[2])
        self.receiver.delivered()

    def heard(self, worker, line, frame):
        unit = self.units.get(frame.unit)
        if frame.op == Op.PUSH:
            self.queues[frame.unit][worker].append(MessageBlocks(self.receiver, line, worker, unit, frame))
        elif frame.op == Op.SET:
            self.first.append((self.receiver.first(unit, worker), line, unit.number))
        elif frame.op == Op.PULL:
            self.receiver.ship(unit, worker)
        elif frame.op == Op.BYE:
            self.left -= 1

    def sum(self, unit):
        queues = self.queues[unit.number]
        while all(queues) and queues[unit.part][0].ready(unit.block):
            start, stop = unit.bounds(unit.block)
            values = queues[unit.part][0].part(unit.block, start, stop)
            unit.stored[start:stop] = values if not unit.part else unit.stored[start:stop] + values
            unit.part = (unit.part + 1) % len(queues)
            unit.block += not unit.part
            if unit.block == unit.blocks:
                unit.block = 0
                self.rounds[unit.number] += 1
                for queue, line in zip(queues, self.lines):
                    queue.popleft()
                    line.post(Op.CONSUMED, unit.number, self.rounds[unit.number])


def units_of(comm, blocks):
    """One key in shards of so many blocks each: its units on the server, or None and the key on a worker."""
    workers, starts = tuple(range(comm.size - 1)), np.cumsum([0, *blocks]) * BLOCK
    if comm.rank == comm.size - 1:
        sizes = np.diff(starts)
        return [Unit(n, "w", np.zeros(size), [0] * (1 + len(workers)), workers, BLOCK) for n, size in enumerate(sizes)]
    shards = [
        Shard(number, 0, int(start), int(stop), None, workers, BLOCK, count)
        for number, ((start, stop), count) in enumerate(zip(pairwise(starts), blocks))
    ]
    return Key("w", (int(starts[-1]),), np.dtype(float), shards=shards, pushes=shards)


def link_of(comm, key):
    layout = SimpleNamespace(
        world=comm,
        rank=comm.rank,
        num_servers=1,
        num_workers=comm.size - 1,
        groups=lambda: [[rank] for rank in range(comm.size - 1)],
        server_rank=lambda server: comm.size - 1 + server,
        options=Options(servers=1, chunk_bytes=8 * BLOCK, chunks_in_flight=2),
    )
    link = Link(layout, [MessageLine(comm, comm.size - 1)])
    for shard in key.shards:
        shard.line = link.lines[0]
    link.add(key)
    return link


def pushed(rank, round_, size):
    return np.random.default_rng([rank, round_]).integers(0, 1000, size).astype(float)


@only_on(3, 4)
@first(2, seed=range(6))
def test_shards_pushed_in_any_order_by_each_worker_are_summed(comm, seed):
    """As in clients, which sum a later part first when it comes first. Buffers at the server are next to none."""
    blocks = [1, 1, 3, 1, 1, 1, 2, 1, 1][: 4 + seed]
    made = units_of(comm, blocks)
    if comm.rank == comm.size - 1:
        server = Server(comm, made, limit=0)
        server.serve()
        want = sum(pushed(rank, ROUNDS, sum(blocks) * BLOCK) for rank in range(comm.size - 1))
        assert np.array_equal(np.concatenate([unit.stored for unit in made]), want)
        return
    link, order = link_of(comm, made), random.Random(100 * seed + comm.rank)
    for round_ in range(1, ROUNDS + 1):
        values = pushed(comm.rank, round_, made.size)
        tasks = [
            link.sender.send(made, shard, values[shard.start : shard.stop].view(np.uint8), round_, 0)
            for shard in made.shards
        ]
        order.shuffle(tasks)
        finish(hearing(link, one_after_another(tasks, order)))
        values[...] = -1  # it may be overwritten now
    link.goodbye()


def one_after_another(tasks, order):
    """Begin them one by one, some steps apart."""
    running = []
    while tasks or running:
        if tasks and order.random() < 0.5:
            running.append(tasks.pop())
        running = [task for task in running if goes_on(task)]
        yield


@only_on(2, 3)
def test_first_values_come_beside_all_else(comm):
    """Of several workers at once, larger than all buffers of the server."""
    workers, size = comm.size - 1, 200_000
    cards = [(worker, workers + worker) for worker in range(workers)]
    if comm.rank == workers:
        units = [Unit(number, "w", np.zeros(size), [0] * 2, (0,), 30_000) for number in range(2 * workers)]
        Server(comm, units, limit=0).serve()
        assert all((unit.stored == unit.number + 1).all() for unit in units)
        return
    numbers = cards[comm.rank]
    shards = [Shard(n, 0, i * size, (i + 1) * size, None, (0,), 30_000, 7) for i, n in enumerate(numbers)]
    key = Key("w", (2 * size,), np.dtype(float), shards=shards, pushes=shards)
    link = link_of(comm, key)
    finish(link.set_first_values([(key, np.repeat(np.array(numbers, float) + 1, size))]))
    link.goodbye()


@only_on(2)
def test_what_is_given_up_touches_no_memory_of_the_caller(comm):
    size = 1 << 20
    if comm.rank == 1:
        unit = Unit(0, "w", np.ones(size), [0] * 2, (0,), size // 4)
        server = Server(comm, [unit])
        comm.recv(source=0, tag=9)
        server.receiver.ship(unit, 0)
        comm.Barrier()
        server.receiver.stop(server.lines)
        return
    shards = [Shard(0, 0, 0, size, None, (0,), size // 4, 4)]
    key = Key("w", (size,), np.dtype(float), shards=shards, pushes=shards)
    link, out = link_of(comm, key), np.zeros(size)
    link.sender.receive(shards[0], cut_bytes(out, 8 * shards[0].block_elements))
    link.quiesce()
    comm.send(None, 1, 9)
    comm.Barrier()
    until = time.monotonic() + 0.3
    while time.monotonic() < until:
        comm.Iprobe()
    assert not out.any()


@only_on(2)
def test_who_gives_up_a_push_waits_until_its_server_has_it_and_no_longer(comm):
    """The server hears that the generation is over, and takes in what is on its way, without counting it."""
    size = 1 << 20
    if comm.rank == 1:
        unit = Unit(0, "w", np.zeros(size), [0] * 2, (0,), size)
        server = Server(comm, [unit])
        time.sleep(0.2)
        server.receiver.stop(server.lines)
        assert not unit.stored.any()
        return
    shards = [Shard(0, 0, 0, size, None, (0,), size, 1)]
    key = Key("w", (size,), np.dtype(float), shards=shards, pushes=shards)
    link, values = link_of(comm, key), np.ones(size)
    assert goes_on(link.sender.send(key, shards[0], values.view(np.uint8), 1, 0))
    start = time.monotonic()
    link.quiesce()
    assert time.monotonic() - start < 20
