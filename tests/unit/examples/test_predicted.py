"""The exchange of workers, clients and servers against what can be worked out by hand."""

import pytest

from examples.reproduce.mxnet_mpi.predicted import exchange

M = 4 * 2**20
RATE = 12.5e6  # 100 Mbit/s
TIME = M / RATE


def test_twelve_workers_of_their_own_fill_the_servers_links_in_and_out():
    """MXNet's dist_sync took 4.05 s here: each of 2 servers takes 12 x M/2 in, then gives 12 x M/2 out."""
    found = exchange(M, workers=12, servers=2, clients=12, rate=RATE)
    assert found.seconds == pytest.approx(12 * TIME)
    assert found.bound == pytest.approx(6 * TIME)


def test_sharded_masters_reach_the_bound_of_the_workers_links_when_pipelined():
    """11/6 M in and out of every worker; a prototype with 8 chunks, three in flight, took 0.72 s."""
    plain = exchange(M, 12, 2, 2, masters="all", rate=RATE)
    piped = exchange(M, 12, 2, 2, masters="all", rate=RATE, chunks=8, in_flight=3)
    assert (plain.bound, piped.bound) == pytest.approx((11 / 6 * TIME, 11 / 6 * TIME))
    assert plain.seconds == pytest.approx(22 / 6 * TIME)
    assert piped.bound <= piped.seconds <= 0.72


def test_one_master_a_client():
    """Reduce-scatter and gather 10/6 M, push M, answer M, scatter and allgather 10/6 M, one after the other."""
    found = exchange(M, 12, 2, 2, masters="one", rate=RATE)
    assert found.seconds == pytest.approx((10 / 6 + 2 + 10 / 6) * TIME)
    assert exchange(M, 12, 2, 2, masters="one", rate=RATE, chunks=8).seconds < 0.75 * found.seconds


def test_without_servers_it_is_the_collectives():
    found = exchange(M, 6, 0, 1, masters="all", rate=RATE)
    assert found.seconds == pytest.approx(10 / 6 * TIME)


@pytest.mark.parametrize("wrong", [{"clients": 5}, {"clients": 2, "masters": "some"}])
def test_what_it_cannot_do_it_says(wrong):
    with pytest.raises(ValueError, match=r"must divide|must be one or all"):
        exchange(M, 12, 2, **wrong)
