"""A DistributedSampler whose num_replicas counts servers gets a warning, once."""

from __future__ import annotations

import warnings

import pytest
from torch.utils.data import DataLoader, DistributedSampler

import mpips
from mpips.torch import samplers
from tests.mpi.torch.support import WORLD


def warned(num_replicas: int) -> list[str]:
    sampler = DistributedSampler(range(12), num_replicas=num_replicas, rank=0, shuffle=False)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        assert list(DataLoader(sampler.dataset, sampler=sampler, batch_size=None)) == list(range(0, 12, num_replicas))
    return [str(one.message) for one in found if "DistributedSampler" in str(one.message)]


def test_samples_that_servers_get_are_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    mpips.create("mpi_sync").close()  # the newest store decides what trains: here all ranks, without servers
    assert (mpips.rank(), mpips.size()) == (WORLD.rank, WORLD.size)
    assert not warned(WORLD.size)
    monkeypatch.setattr(samplers, "_warned", [])
    monkeypatch.setattr(samplers, "size", lambda: WORLD.size - 1)  # as with a server
    monkeypatch.setattr(samplers, "rank", lambda: 0)
    if WORLD.size > 1:
        assert not warned(WORLD.size - 1)
    first, second = warned(WORLD.size), warned(WORLD.size)
    assert len(first) == 1 and not second
    assert f"only {WORLD.size - 1} of them train" in first[0] and "num_replicas=mpips.size()" in first[0]
