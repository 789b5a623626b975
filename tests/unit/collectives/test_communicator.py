"""A communicator's life on one rank: `collectives.communicator`."""

from __future__ import annotations

import os

import numpy as np
import pytest
from mpi4py import MPI

import collectives
from collectives import CollectiveError
from collectives.communicator import communicator
from collectives.fabric.layout import LEFT


def test_the_end_of_a_forked_child_is_not_the_end_of_its_rank():
    comm = MPI.COMM_SELF.Dup()
    home = communicator(comm)
    child = os.fork()
    if child == 0:
        home.leave()
        os._exit(0)
    os.waitpid(child, 0)
    assert home.board.memory.words[0][LEFT] == 0
    home.leave()
    assert home.board.memory.words[0][LEFT] == 1
    comm.Free()


def test_an_error_ends_it_and_renew_begins_another():
    comm = MPI.COMM_SELF.Dup()
    x = np.ones(3)
    plan = collectives.plan("allreduce", x, comm)
    home = communicator(comm)
    assert str(home.fail("a call", KeyError("why"))) == "'why'"
    sentence = "rank 0 has given up a call: KeyError: 'why'"
    for call in (lambda: collectives.allreduce(x, comm), plan, plan.start, lambda: collectives.plan("reduce", x, comm)):
        with pytest.raises(CollectiveError) as told:
            call()
        assert str(told.value) == sentence
    collectives.renew(comm)
    assert collectives.allreduce(x, comm) is x
    with pytest.raises(CollectiveError):
        plan()
    assert communicator(comm).end_error is None
    comm.Free()
