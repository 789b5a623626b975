"""Bad calls: every rank raises the same sentence, nobody hangs, and the communicator works afterwards."""

from __future__ import annotations

import re
import time
import warnings

import numpy as np
import pytest
from collectives.session import session
from collectives.transport.cards import CARDS
from mpi4py import MPI

import collectives
from collectives.errors import CollectiveError, MismatchError, StallError
from collectives.schedule import catalog
from tests.mpi.collectives.support import RANK, TAG, WORLD, P, sentence, share_nothing, still_works
from tests.mpi.sizes import only_on

ODD = P - 1  # the rank that calls otherwise


@pytest.fixture(params=["one node", "a node for each rank"])
def comm(request, monkeypatch):
    """A communicator whose ranks share memory, and one whose ranks do not."""
    if request.param != "one node":
        share_nothing(monkeypatch)
    made = WORLD.Dup()
    yield made
    made.Free()


def warmed(comm, *arrays):
    """The calls are good alone, and known: each of the arrays has been reduced on all ranks."""
    for array in arrays:
        collectives.allreduce(array, comm)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("sizes", [(4, 5), (100_000, 100_001), (7, 300_000)])
def test_lengths_differ(comm, sizes, known):
    x, y = np.ones(sizes[0]), np.ones(sizes[1])
    if known:
        warmed(comm, x, y)
    said = sentence(lambda: collectives.allreduce(y if RANK == ODD else x, comm))
    assert f"rank {ODD}: allreduce of {sizes[1]} float64" in said
    assert f"allreduce of {sizes[0]} float64" in said
    still_works(comm)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("known", [False, True])
def test_types_differ(comm, known):
    x, y = np.ones(1000, np.float32), np.ones(1000, np.int32)
    if known:
        warmed(comm, x, y)
    said = sentence(lambda: collectives.allreduce(y if RANK == ODD else x, comm))
    assert "float32" in said
    assert f"rank {ODD}: allreduce of 1000 int32" in said
    still_works(comm)


@pytest.mark.mpi(min_size=2)
def test_collectives_differ(comm):
    x = np.ones(50)
    said = sentence(lambda: (collectives.broadcast if RANK == ODD else collectives.allreduce)(x, comm))
    assert "broadcast of 50" in said
    assert "allreduce of 50" in said
    still_works(comm)


@pytest.mark.mpi(min_size=2)
def test_operations_roots_and_algorithms_differ(comm):
    x = np.ones(5000)
    assert "max" in sentence(lambda: collectives.allreduce(x, comm, op="max" if RANK == ODD else "sum"))
    assert "root 1" in sentence(lambda: collectives.broadcast(x, comm, root=int(RANK == ODD)))
    names = ("ring", "direct")
    assert "direct" in sentence(lambda: collectives.allreduce(x, comm, algorithm=names[RANK == ODD]))
    still_works(comm)


@only_on(1, 2, 3, 5)
@pytest.mark.mpi
@pytest.mark.parametrize("who", ["one rank", "all ranks"])
@pytest.mark.parametrize(
    "spoil, words",
    [
        (lambda x: x.reshape(100, 10)[:, 3:7], "not C-contiguous"),
        (lambda x: np.broadcast_to(x[:1], (400,)), "read-only|not C-contiguous"),
        (lambda x: x[:400].astype(object), "object"),
        (lambda x: [x[:400], "x"], "str"),
        (lambda x: None, "NoneType"),
        (lambda x: [x[:400], x[:300]], "size"),
        (lambda x: x[:400].astype(">f8"), "float64"),
    ],
)
def test_bad_array(comm, spoil, words, who):
    x = np.ones(1000)
    bad = who == "all ranks" or RANK == ODD
    said = sentence(lambda: collectives.allreduce(spoil(x) if bad else x[:400], comm))
    assert re.search(words, said)
    assert f"rank {0 if who == 'all ranks' else ODD}" in said
    still_works(comm)


@pytest.mark.mpi
def test_read_only(comm):
    x = np.ones(10)
    x.flags.writeable = RANK != ODD
    assert "read-only" in sentence(lambda: collectives.allreduce(x, comm))
    out = np.empty(10)
    assert collectives.allreduce(x, comm, out=out) is out
    still_works(comm)


@pytest.mark.mpi
def test_unknown_names(comm):
    x = np.ones(10)
    assert "quicksort" in sentence(lambda: collectives.allreduce(x, comm, algorithm="quicksort"))
    assert "ring" in sentence(lambda: collectives.allreduce(x, comm, algorithm="quicksort"))
    assert "xor" in sentence(lambda: collectives.allreduce(x, comm, op="xor"))
    assert "gossip" in sentence(lambda: collectives.plan("gossip", x, comm))
    assert f"choose one from 0 to {P - 1}" in sentence(lambda: collectives.broadcast(x, comm, root=P))
    assert "root '0' is of type str: pass a rank's number" in sentence(lambda: collectives.reduce(x, comm, root="0"))
    assert "mean" in sentence(lambda: collectives.allreduce(np.ones(3, int), comm, op="mean"))
    still_works(comm)


@pytest.mark.mpi
@pytest.mark.parametrize("kind, vectors", [("allreduce", False), ("broadcast", False), ("allreduce", True)])
def test_the_algorithms_that_a_refusal_names_beside_the_catalog_are_those_that_serve(comm, kind, vectors):
    x = [np.ones(10), np.ones(10)] if vectors else np.ones(10)
    said = sentence(lambda: collectives.plan(kind, x, comm, algorithm="quicksort"))
    named = set(said.split("choose one of ")[1].split(", ")) - set(catalog.ALGORITHMS)
    expected = {"auto", "native"} | ({"shared_memory"} if session(comm).nodes == 1 else set())
    if kind == "allreduce":
        expected |= {"host_ring", "reg", "vector_ring"} if vectors else {"reproducible"}
    assert named == expected
    for name in sorted(named):
        collectives.plan(kind, x, comm, algorithm=name)()


@pytest.mark.mpi
def test_bcube_needs_a_power(comm):
    said = sentence(lambda: collectives.allreduce(np.ones(10), comm, algorithm=f"bcube(n={P + 1},k=2)"))
    assert str(P) in said
    still_works(comm)


@pytest.mark.mpi
def test_out_that_does_not_fit(comm):
    x = np.ones(10)
    assert "needs" in sentence(lambda: collectives.allreduce(x, comm, out=np.ones(11)))
    assert "float32" in sentence(lambda: collectives.allreduce(x, comm, out=np.ones(10, np.float32)))
    still_works(comm)


@pytest.mark.mpi(min_size=2)
def test_plans_differ(comm):
    said = sentence(lambda: collectives.plan("allreduce", np.ones(10 + (RANK == ODD)), comm))
    assert f"rank {ODD}: plan of allreduce of 11" in said
    still_works(comm)


@pytest.mark.mpi(min_size=2)
def test_one_plans_while_others_call(comm):
    x = np.ones(10)

    def run():
        if RANK == ODD:
            collectives.plan("allreduce", x, comm)
        else:
            collectives.allreduce(x, comm)

    assert "plan of" in sentence(run)
    still_works(comm)


@pytest.mark.mpi(min_size=2)
def test_no_more_cards_are_kept_than_stand_on_the_desks():
    comm = WORLD.Dup()
    home = session(comm)
    for turn in range(2 * CARDS):
        home.agree(f"turn {turn}")
    assert WORLD.allreduce(len(home.room._known) <= CARDS * P, MPI.LAND)
    comm.Free()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("algorithm", ["auto", "native", "ring", "multi_ring(rings=2)"])
@pytest.mark.parametrize("vectors", [False, True])
def test_plans_go_on_after_ranks_have_differed(comm, algorithm, vectors):
    """Rank 0 is in the plan, with messages under way and others started, when it hears that the rest is not."""
    x, y, z = np.empty(6 * P), np.ones(5), np.ones(7)
    plan = collectives.plan("allreduce", [x] if vectors else x, comm, algorithm=algorithm)
    other = collectives.plan("allreduce", z, comm, algorithm=algorithm)
    plan()
    said = sentence(lambda: plan() if RANK == 0 else collectives.allreduce(y, comm))
    assert "allreduce of 5" in said
    for _ in range(3):
        x[:] = RANK + 1
        z[:] = 1
        other.start()
        plan()
        other.wait()
        assert WORLD.allreduce(bool((x == P * (P + 1) // 2).all() and (z == P).all()), MPI.LAND)
    still_works(comm)


NAMED = re.compile(rf": ranks? (\d+, )*{ODD} (has|have) not come")  # others may be slow too


def comes_when_told():
    """Wait until all others have said so, for half a minute at most."""
    until = time.monotonic() + 30
    for rank in range(P):
        while rank != ODD and not WORLD.Iprobe(rank, TAG) and time.monotonic() < until:
            time.sleep(0.01)
        if rank != ODD and WORLD.Iprobe(rank, TAG):
            WORLD.Recv(bytearray(1), rank, TAG)


@only_on(2, 4)
def test_a_rank_that_does_not_come(comm):
    """The others raise errors naming it; when it comes at last, it hears why they left."""
    x = np.ones(10)
    collectives.allreduce(x, comm)
    home = session(comm)
    if home.watch is not None:
        home.watch.timeout_seconds = 0.2
    home.timeout_seconds = 0.2
    if RANK == ODD:
        comes_when_told()
    error = ""
    try:
        collectives.allreduce(x, comm)
    except CollectiveError as caught:
        error = str(caught)
    if RANK != ODD:
        WORLD.Send(b"1", ODD, TAG)
    said = WORLD.allgather(error)
    assert all(NAMED.search(words) for words in said[:ODD]), said
    if home.watch is None:
        home.timeout_seconds = 0
        assert NAMED.search(said[ODD])
        still_works(comm)
    else:
        with pytest.raises(CollectiveError):  # it stays unusable: messages may be under way
            collectives.allreduce(np.ones(5), comm)


@only_on(2, 4)
def test_a_rank_that_comes_while_the_others_give_up():
    """Rank 0 has begun to take back its entry: it goes on with the others, and all have the result."""
    comm = WORLD.Dup()
    x = np.ones(10)
    collectives.allreduce(x, comm)
    home = session(comm)
    if RANK == 0:
        home.timeout_seconds = 0.2
        publish = home.room.publish

        def slowly(card):
            for other in range(1, P):
                WORLD.Send(b"1", other, TAG)
            while not home.room.complete():
                time.sleep(0.001)
            return publish(card)

        home.room.publish = slowly
    else:
        WORLD.Recv(bytearray(1), 0, TAG)
    collectives.allreduce(x, comm)
    assert WORLD.allreduce(bool((x == P * P).all()), MPI.LAND)
    if RANK == 0:
        home.room.publish, home.timeout_seconds = publish, 0
    still_works(comm)
    comm.Free()


@only_on(2, 4)
def test_a_stall_is_told(comm):
    x = np.ones(10)
    collectives.allreduce(x, comm)
    home = session(comm)
    home.stall_seconds = 0.5
    if home.watch is not None:
        home.watch.stall_seconds = 0.5
    texts = []

    def heard(message, *_):
        texts.append(str(message))
        if len(texts) == 1:
            WORLD.Send(b"1", ODD, TAG)

    if RANK == ODD:
        comes_when_told()
        collectives.allreduce(x, comm)
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.showwarning = heard
            collectives.allreduce(x, comm)
    assert RANK == ODD or NAMED.search(texts[0]), texts
    assert WORLD.allreduce(bool((x == P * P).all()), MPI.LAND)


@only_on(2, 4)
def test_a_rank_that_is_late_for_the_first_collective(comm):
    """The others hear, at their own line, that they wait, raise StallError with what to do; they may call again, and go
    on when it comes."""
    if RANK == ODD:
        comes_when_told()
    else:
        with pytest.MonkeyPatch.context() as environment:
            environment.setenv("MPIPS_STALL_SECONDS", "0.1")
            environment.setenv("MPIPS_TIMEOUT_SECONDS", "0.3")
            with pytest.warns(RuntimeWarning, match="not all ranks") as warned, pytest.raises(StallError) as raised:
                collectives.allreduce(np.ones(10), comm)
        assert re.search(r"waited.* name a communicator .* raise MPIPS_TIMEOUT_SECONDS", str(raised.value))
        assert [warning.filename for warning in warned] == [__file__]
        WORLD.Send(b"1", ODD, TAG)
    still_works(comm)


@pytest.mark.parametrize(
    "arguments",
    [
        {"kind": "allreduce", "op": "summ"},
        {"kind": "allreduce", "algorithm": "rung"},
        {"kind": "allreduced"},
        {"kind": "broadcast", "root": P},
        {"kind": "allreduce", "dtype": "complex64"},
    ],
)
def test_a_refusal_shows_one_traceback(comm, arguments):
    given = dict(arguments)
    x = np.ones(4, given.pop("dtype", "float32"))
    error = None
    try:
        collectives.plan(x=x, comm=comm, **given)
    except MismatchError as caught:
        error = caught
    alone = error is not None and (error.__suppress_context__ or error.__context__ is None)
    assert WORLD.allreduce(alone, MPI.LAND), error.__context__ if error else "no error"
    still_works(comm)


@pytest.mark.mpi
@only_on(1, 2, 3)
@pytest.mark.parametrize("n", [1, 3])
def test_a_few_numbers_that_lie_askew_are_summed(n):
    x = np.zeros(8 * n + 1, np.uint8)[1:].view(np.float64)
    x[:] = 1
    collectives.allreduce(x, WORLD)
    assert (x == P).all()
