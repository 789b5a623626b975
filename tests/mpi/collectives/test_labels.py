"""What a call is for: ranks that call the same for unlike things raise MismatchError, which names both."""

from __future__ import annotations

import numpy as np
import pytest
from mpi4py import MPI

import collectives
from collectives.api import begin
from tests.mpi.collectives.support import ODD, RANK, TOTAL, P, fresh, patient, sentence

A, B = "push of key 'a'", "push of key 'b'"
WAYS = ["one node", "a node for each rank", "nodes of two"]
several = pytest.mark.skipif(P < 2, reason="one rank agrees with itself")


def order():
    """The odd rank takes the keys the other way round."""
    return (B, A) if RANK == ODD else (A, B)


@several
@pytest.mark.parametrize("nodes", WAYS)
@pytest.mark.parametrize("n, algorithm", [(1, "auto"), (40, "auto"), (90_000, "auto"), (40, "native"), (400, "ring")])
def test_keys_in_another_order_are_a_mismatch(nodes, n, algorithm):
    if nodes == "nodes of two" and P % 2:
        pytest.skip("nodes of two need an even number of ranks")
    with fresh(nodes) as comm:
        x = {A: np.full(n, RANK + 1.0), B: np.full(n, RANK + 2.0)}
        for label in (A, B):  # both are known, and have their plans
            collectives.allreduce(x[label], comm, algorithm=algorithm, out=np.empty(n), label=label)
        heard = sentence(
            lambda: [collectives.allreduce(x[label], comm, algorithm=algorithm, label=label) for label in order()]
        )
    assert (A in heard and B in heard) or (algorithm == "native" and nodes != "one node"), heard


@several
@pytest.mark.parametrize("nodes", WAYS[:2])
@pytest.mark.parametrize("call", ["grouped", "plan", "broadcast", "vectors", "started"])
def test_every_call_has_a_label(nodes, call):
    def make(label):
        x = np.full(5, RANK + 1.0)
        if call == "grouped":
            collectives.grouped_allreduce([x, x[:0]], comm, label=label)
        elif call == "plan":
            collectives.plan("allreduce", x, comm, label=label)()
        elif call == "broadcast":
            collectives.broadcast(x, comm, label=label)
        elif call == "vectors":
            collectives.allreduce([x, x.copy()], comm, label=label)
        else:
            begin("allreduce", x, comm, label=label).wait()
        return x

    with fresh(nodes) as comm:
        expected = {"broadcast": 1.0, "vectors": 2.0 * TOTAL}.get(call, TOTAL)
        assert (make(A) == expected).all()

        def differ():
            """The root of a broadcast has sent all, and hears at its next call."""
            make(A if RANK == ODD else B)
            collectives.allreduce(np.ones(1), comm)

        heard = sentence(differ)
    assert A in heard and B in heard, heard


@several
def test_the_same_label_is_no_mismatch_and_calls_of_one_array_are_kept_apart():
    with fresh() as comm:
        x = np.full(7, RANK + 1.0)
        for label in ("", A, B, A, ""):
            x[:] = RANK + 1.0
            assert (collectives.allreduce(x, comm, label=label) == TOTAL).all()


def test_a_wait_that_is_too_long_names_the_label():
    if P < 2:
        pytest.skip("one rank waits for nobody")
    with fresh() as comm:
        collectives.allreduce(np.ones(3), comm)
        MPI.COMM_WORLD.Barrier()
        patient(comm, 30.0, 0.3)
        heard = ""
        if RANK != ODD:
            with pytest.raises(collectives.CollectiveError) as caught:
                collectives.allreduce(np.ones(3), comm, label=A)
            heard = str(caught.value)
        MPI.COMM_WORLD.Barrier()
    assert RANK == ODD or heard.startswith(A)
