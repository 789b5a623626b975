"""A server is killed whose memory nobody maps: its mirror has every round that a worker has seen, bit for bit."""

from __future__ import annotations

import random

import pytest
from mpi4py import MPI

import mpips
from tests.choice import first, once
from tests.mpi.mpips import killed
from tests.mpi.mpips.killed import HINDRANCE
from tests.mpi.mpips.mirrored import Job
from tests.mpi.mpips.support import failure

WORKERS = 3
MODULE = "tests.mpi.mpips.mirrored"
jobs = pytest.mark.skipif(bool(HINDRANCE), reason=HINDRANCE)


def run(folder, job):
    """The traces of the workers that are left, once their values were seen to be right."""
    return killed.run(folder, job, WORKERS + job.servers + job.spares, MODULE)


@pytest.mark.core(1)
@jobs
@once(
    kind=["dist_sync", "mpi_sync"],
    masters=["one", "all"],
    spares=[0, 1],
    optimizer=["", "sgd", "adam"],
    when=[0.2, -3, -25],
)
def test_a_server_is_lost_with_its_memory(tmp_path, kind, masters, spares, optimizer, when):
    job = Job(kind, spares=spares, optimizer=optimizer, masters=masters, kills={"4": when})
    assert len(run(tmp_path, job)) == WORKERS


@pytest.mark.slow
@jobs
def test_without_mirrors_it_is_lost_for_good(tmp_path):
    with pytest.raises(AssertionError, match="start again from a checkpoint"):
        run(tmp_path, Job("dist_sync", spares=0, mirrors=0, kills={"4": 0.1}, clocks=(0,)))


@pytest.mark.slow
@jobs
def test_two_nodes_are_lost_one_after_the_other(tmp_path):
    job = Job("dist_sync", spares=2, steps=300, kills={"3": 0.1, "4": 0.1}, clocks=(0, 1))
    assert len(run(tmp_path, job)) == WORKERS


@pytest.mark.slow
@jobs
@first(1, seed=range(24))
def test_a_server_and_a_worker_die_at_drawn_moments(tmp_path, seed):
    choice = random.Random(seed)
    kind, optimizer = choice.choice(["mpi_sync", "dist_sync"]), choice.choice(["", "sgd", "adam"])
    masters, spares, servers = choice.choice(["one", "all"]), choice.choice([0, 1, 2]), choice.choice([2, 3])
    begin = choice.choice([0.0, 0.5]) * choice.random()
    victims = choice.sample(range(1, WORKERS), 1) + choice.sample(range(WORKERS, WORKERS + servers), 1)
    kills = {str(victim): begin + choice.random() * choice.choice([0.05, 0.5]) for victim in victims}
    if choice.random() < 0.3:
        kills[str(victims[-1])] = -choice.randrange(1, 60)
    run(tmp_path, Job(kind, servers, masters, spares, 60, optimizer, kills))


@pytest.mark.slow
def test_mirrors_need_survival_and_servers_on_two_nodes(tmp_path):
    if MPI.COMM_WORLD.size > 1:
        assert "ask for spares=0 or more" in failure(lambda: mpips.create("dist_sync", servers=1, mirrors=1))
        assert "mirrors=2 is more than 1" in failure(lambda: mpips.create("dist_sync", servers=1, mirrors=2))
    elif not HINDRANCE:
        with pytest.raises(AssertionError, match="needs servers on at least two nodes, but all 2 share one"):
            run(tmp_path, Job("dist_sync", apart=False))
