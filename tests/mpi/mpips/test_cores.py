"""Where a store has more processes than cores, each has a core of its own until it closes the store."""

import os

import pytest

from mpips.store.roles import spread
from tests.mpi.mpips.support import WORLD, run


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("bound", [False, True])
def test_processes_that_share_cores_have_one_each_until_they_close(bound):
    before = os.sched_getaffinity(0)
    if bound and WORLD.rank == WORLD.size - 1:
        os.sched_setaffinity(0, {min(before)})
    mine = os.sched_getaffinity(0)
    seen = run("dist_sync", lambda kv: os.sched_getaffinity(0), servers=1)
    after = os.sched_getaffinity(0)
    os.sched_setaffinity(0, before)
    assert after == mine
    every = WORLD.allgather(frozenset(mine))
    wanted = spread(every)
    assert seen is None or seen == ({wanted[WORLD.rank]} if wanted else mine)
