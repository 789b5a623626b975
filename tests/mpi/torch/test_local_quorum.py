"""LocalSGD with a quorum: who is in time makes the round, who comes late counts less in the next one, nobody waits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from mpi4py import MPI

import mpips
import mpips.torch
from mpips.training.local import OUTER
from tests.mpi.torch.local_sgd import local, loss_of
from tests.mpi.torch.support import batch, far, heard, network

WORLD = MPI.COMM_WORLD
ASYNC = {"kind": "dist_async", "servers": 1}


@pytest.mark.parametrize("more", [{}, {"by_tokens": True}, {"fragments": 2, "delay": 1}], ids=str)
@pytest.mark.mpi(min_size=3)
def test_a_quorum_of_all_has_the_bits_of_a_synchronous_store(more: dict[str, Any]) -> None:
    models = []
    for options in ({"servers": 1}, {**ASYNC, "quorum": WORLD.size - 1, "grace_seconds": 1}):
        model = network()
        try:
            trainer = mpips.torch.LocalSGD(model, torch.optim.SGD(model.parameters(), 0.1), every=4, **more, **options)
        except SystemExit:
            continue
        rank = trainer.store.rank
        for step in range(1, 13):
            trainer.zero_grad()
            loss_of(model, batch(step, rank=rank)).backward()
            trainer.step(**({"tokens": 10 + step * rank} if more.get("by_tokens") else {}))
        trainer.share()
        trainer.close()
        models.append(model)
    assert not models or far(models[0], models[1]) == 0


@pytest.mark.parametrize("outer", ["nesterov", "average"])
@pytest.mark.mpi(min_size=4)
def test_a_late_client_holds_nobody_up_and_counts_less(outer: str) -> None:
    """The last worker begins its first exchange when the others have made two; then the others make their third."""
    model, workers = network(), WORLD.size - 1
    options = {**ASYNC, "quorum": workers - 1, "every": 2, "by_tokens": True}
    try:
        trainer = mpips.torch.LocalSGD(model, torch.optim.SGD(model.parameters(), 0.1), outer, **options)
    except SystemExit:
        return
    rank, last = trainer.store.rank, workers - 1

    def step() -> None:
        trainer.zero_grad()
        loss_of(model, batch(trainer.steps + 1, rank=rank)).backward()
        trainer.step(tokens=1 + rank)

    seen = []
    for number in range(1, 7 if rank < last else 3):
        if rank < last and number == 5:
            WORLD.send(None, last)
            WORLD.recv(source=last)
        if rank == last and number == 2:
            for other in range(last):
                WORLD.recv(source=other)
        step()
        seen.append(np.concatenate([p.detach().numpy().ravel() for p in model.parameters()]).copy())
    if rank == last:
        for other in range(last):
            WORLD.send(None, other)
    trainer.share()
    trainer.close()
    centers = rounds_of(workers, outer)
    assert np.abs(seen[1] - centers[1 if rank < last else 2]).max() < 1e-14  # the late one has the present centre
    assert rank == last or np.abs(seen[5] - centers[3]).max() < 1e-14
    shared = np.concatenate([p.detach().numpy().ravel() for p in model.parameters()])
    assert np.abs(shared - centers[3]).max() < 1e-14


def rounds_of(workers: int, outer: str) -> list[np.ndarray]:
    """Return the centre after each of the three rounds, by one process. Worker w counts by 2 (1 + w) tokens."""
    optimizer, flat = OUTER[outer], torch.nn.utils.parameters_to_vector
    center = flat(network().parameters()).detach().numpy().copy()
    centers, state, late = [center.copy()], OUTER[outer].init(center), None
    for round_ in range(1, 4):
        changes, weights = [], []
        for rank in range(workers if round_ == 1 else workers - 1):
            model = network()
            torch.nn.utils.vector_to_parameters(torch.from_numpy(center.copy()), model.parameters())
            inner = torch.optim.SGD(model.parameters(), 0.1)
            for number in (2 * round_ - 1, 2 * round_):
                inner.zero_grad()
                loss_of(model, batch(number, rank=rank)).backward()
                inner.step()
            changes.append(center - flat(model.parameters()).detach().numpy())
            weights.append(2.0 * (1 + rank))
        if round_ == 1:
            late = changes.pop(), weights.pop()
        if round_ == 3:
            assert late is not None
            changes.append(late[0])
            weights.append(late[1] / 3)
        mean = sum(weight * change for weight, change in zip(weights, changes)) / sum(weights)
        optimizer.update(center, mean, state, round_)
        centers.append(center.copy())
    return centers


BAD = [
    ({"quorum": 0}, "quorum=0 closes no round"),
    ({"quorum": 1, "kind": "dist_sync"}, "quorum=1 in a store of kind dist_sync, whose rounds take all clients"),
    ({"quorum": 1, "servers": 0}, "needs a server (servers=0)"),
]


@pytest.mark.parametrize("wrong, sentence", BAD)
@pytest.mark.mpi(min_size=3)
def test_what_cannot_be_is_said_on_all_ranks(wrong: dict[str, Any], sentence: str) -> None:
    for everywhere in (True, False):
        options = {**ASYNC, "quorum": 1, **(wrong if everywhere or WORLD.rank == 1 else {})}
        said = heard(lambda options=options: local(options, every=4))
        assert sentence in said or (not everywhere and "rank" in said), said
        assert len(set(WORLD.allgather(said))) == 1


@pytest.mark.mpi(min_size=3)
def test_elastic_averaging_takes_no_quorum() -> None:
    try:
        kv = mpips.create("dist_async", servers=1, quorum=1)
    except SystemExit:
        return
    kv.init("w", np.zeros(3))
    said = heard(lambda: kv.set_optimizer(mpips.optimizers.Elastic1(0.5)))
    kv.close()
    assert "takes no mean of gradients, and a store with quorum=1 gives one: give an optimizer of gradients" in said
