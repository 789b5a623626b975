"""Workers are killed, at any moment, and the parameters are those of an undisturbed run with the same membership, bit
for bit."""

from __future__ import annotations

import random

import pytest

from tests.choice import first, once
from tests.mpi.mpips.killed import pytestmark, run  # noqa: F401  (jobs, where they survive deaths)
from tests.mpi.mpips.survivor import Job

STEPS = 1500
"""They mostly take longer than until the first death."""


@pytest.mark.core(1)
@once(spares=[0, 1], optimizer=["", "sgd", "adam"], apart=[False, True])
def test_a_worker_dies(tmp_path, spares, optimizer, apart):
    job = Job(spares=spares, steps=STEPS, optimizer=optimizer, kills={"1": 0.2}, apart=apart)
    traces = run(tmp_path, job, 3 + spares)
    # On a busy machine the worker may die before the others have begun.
    assert len(traces) == 2 + spares and max(size for trace in traces for _, size in trace) in (3, 2 + min(spares, 1))


@pytest.mark.slow
@first(3, late=["worker", "spare"], servers=[2, 0], again=[0.35, 0.15, 0.02, 0.05, 0.1, 0.25, 0.3, 0.4])
def test_a_worker_dies_at_once_and_another_while_the_others_recover(tmp_path, late, servers, again):
    """One of the others is late each time: in `create`, or in an attempt to recover, when all others are through."""
    ranks = 4 + servers
    kills = {"1": 0.0, "2": again}
    job = Job("dist_sync", servers, spares=1, steps=STEPS, kills=kills, late=ranks - 1 if late == "spare" else 0)
    assert len(run(tmp_path, job, ranks)) == 2


@pytest.mark.slow
@first(1, kind=["mpi_sync", "dist_sync"], spares=[1, 0])
def test_a_worker_dies_on_a_node_without_servers(tmp_path, kind, spares):
    job = Job(kind, 2, spares=spares, steps=STEPS, optimizer="sgd", kills={"1": 0.2}, apart=True)
    assert len(run(tmp_path, job, 4 + spares)) == 1 + spares


@pytest.mark.slow
@first(1, seed=range(24))
def test_ranks_die_at_drawn_moments(tmp_path, seed):
    choice = random.Random(seed)
    workers, spares = choice.choice([(3, 0), (2, 2), (4, 1)])
    victims = choice.sample(range(1, workers + spares), 2)
    begin = choice.choice([0.0, 0.5]) * choice.random()
    kills = {str(victim): begin + choice.random() * choice.choice([0.05, 0.5]) for victim in victims}
    kind, optimizer = choice.choice(["mpi_sync", "dist_sync"]), choice.choice(["", "sgd", "adam"])
    run(tmp_path, Job(kind, spares=spares, optimizer=optimizer, kills=kills, apart=seed % 3 == 2), workers + spares)


@pytest.mark.core(1)
@first(
    2,
    **{
        "kind, servers, masters, spares, apart": [
            ("dist_sync", 2, "one", 2, False),
            ("mpi_sync", 0, "one", 1, False),
            ("mpi_sync", 2, "all", 1, False),
            ("mpi_sync", 0, "one", 1, True),
            ("dist_sync", 2, "one", 1, True),
        ]
    },
)
def test_spares_become_workers_and_then_one_dies(tmp_path, kind, servers, masters, spares, apart):
    job = Job(kind, servers, masters, spares, STEPS, "sgd", {"1": 0.2}, 5, (1,), apart)
    traces = run(tmp_path, job, 2 + servers + spares)
    assert [size for _, size in traces[0]] == [2, 2 + spares, 1 + spares] and len(traces) == 1 + spares


@pytest.mark.full
@pytest.mark.parametrize("seed", range(24))
def test_ranks_die_while_spares_join(tmp_path, seed):
    choice = random.Random(seed)
    kind, servers, spares = choice.choice(["mpi_sync", "dist_sync"]), choice.choice([0, 2]), choice.choice([1, 2])
    ranks = 2 + servers + spares
    kills = {str(rank): choice.random() * choice.choice([0.05, 0.3]) for rank in choice.sample(range(1, ranks), 2)}
    if servers and kills.keys() == {"2", "3"}:  # no server might be left
        del kills["2"]
    grow = choice.choice([1, 30, 300])
    run(tmp_path, Job(kind, servers, "one", spares, STEPS, choice.choice(["sgd", "adam"]), kills, grow), ranks)


KINDS = [("dist_sync", "one"), ("mpi_sync", "one"), ("mpi_sync", "all")]


@pytest.mark.core(1)
@once(kind=KINDS, spares=[0, 1], optimizer=["", "sgd", "adam"])
def test_a_server_dies(tmp_path, kind, spares, optimizer):
    job = Job(kind[0], 2, kind[1], spares, STEPS, optimizer, {"4": 0.2})
    traces = run(tmp_path, job, 5 + spares)
    assert [size for trace in traces for _, size in trace] == [3] * 3


@pytest.mark.slow
@first(1, seed=range(30))
def test_workers_servers_and_spares_die_at_drawn_moments(tmp_path, seed):
    choice = random.Random(seed)
    (kind, masters), spares = choice.choice(KINDS), choice.choice([0, 1, 2])
    victims = choice.sample(range(1, 5 + spares), 2)
    while spares == 0 and set(victims) == {3, 4}:  # no server would be left
        victims = choice.sample(range(1, 5), 2)
    kills = {str(victim): choice.random() * choice.choice([0.05, 0.5]) for victim in victims}
    optimizer = choice.choice(["", "sgd", "adam"])
    run(tmp_path, Job(kind, 2, spares=spares, optimizer=optimizer, masters=masters, kills=kills), 5 + spares)
