"""Messages between workers and a server of another node, and between members of a client, that are given up: nobody
waits for ever, and they touch no memory of the caller."""

from __future__ import annotations

import time
from types import SimpleNamespace

import numpy as np
import pytest
from mpi4py import MPI

from collectives.fabric.requests import close_collectively, cut_bytes
from collectives.fabric.tasks import advance
from mpips import Options
from mpips.store.keys.key import Key, Shard
from mpips.store.remote.link import ServerLink
from mpips.store.server.sources import Receiver
from mpips.store.server.unit import Unit
from mpips.store.transport.client_sums import ClientSums
from mpips.store.transport.lines import MessageLine
from mpips.store.transport.pending import MessagesUnderWay, member_tag
from tests.mpi.sizes import only_on

SECONDS = 20


@pytest.fixture
def comm():
    """The world, for this test alone."""
    made = MPI.COMM_WORLD.Dup()
    yield made
    close_collectively(made)


@pytest.mark.slow
@only_on(2, 3)
def test_a_sum_that_is_given_up_writes_nothing_any_more(comm):
    sums, out = ClientSums(comm), np.zeros(100_000)
    if comm.rank:
        task = sums.spread(out, member_tag(0, 0))
        advance(task)
        sums.stop(MessagesUnderWay())
    comm.Barrier()
    if comm.rank == 0:
        task = ClientSums(comm).spread(np.ones(100_000), member_tag(0, 0))
        advance(task)
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


def server_and_link(comm, size, blocks):
    """Of a key in one shard: on rank 1 its unit, what receives it and its lines; on rank 0 the key and its link."""
    if comm.rank == 1:
        receiver = Receiver(comm, 2)
        receiver.buffers.limit = 8 * size
        return Unit(0, "w", np.ones(size), [0] * 2, (0,), size // blocks), receiver, [MessageLine(comm, 0)]
    shards = [Shard(0, 0, 0, size, None, (0,), size // blocks, blocks)]
    key = Key("w", (size,), np.dtype(float), shards=shards, pushes=shards)
    layout = SimpleNamespace(
        world=comm,
        rank=0,
        num_servers=1,
        num_workers=1,
        groups=lambda: [[0]],
        server_rank=lambda server: 1,
        options=Options(servers=1, chunk_bytes=8192, chunks_in_flight=2),
    )
    link = ServerLink(layout, [MessageLine(comm, 1)])
    shards[0].line = link.lines[0]
    link.add(key)
    return key, link


@only_on(2)
def test_what_is_given_up_touches_no_memory_of_the_caller(comm):
    made = server_and_link(comm, 1 << 20, 4)
    if comm.rank == 1:
        unit, receiver, lines = made
        comm.recv(source=0, tag=9)
        receiver.ship(unit, 0)
        comm.Barrier()
        receiver.stop(lines)
        return
    (key, link), out = made, np.zeros(1 << 20)
    link.sender.receive(key.shards[0], cut_bytes(out, 8 * key.shards[0].block_elements))
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
    made = server_and_link(comm, 1 << 20, 1)
    if comm.rank == 1:
        unit, receiver, lines = made
        time.sleep(0.2)
        receiver.stop(lines)
        assert (unit.stored == 1).all()
        return
    (key, link), values = made, np.full(1 << 20, 2.0)
    assert advance(link.sender.send(key, key.shards[0], values.view(np.uint8), 1, 0))
    start = time.monotonic()
    link.quiesce()
    assert time.monotonic() - start < 20
