"""Detect a DistributedSampler that also deals samples to server processes, which never train on them."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

from mpi4py import MPI
from torch.utils.data import DistributedSampler

from mpips.store.ranks import rank, size

_warned: list[int] = []


def watch_samplers() -> None:
    """Warn once on rank 0 when a DistributedSampler is used whose `num_replicas` counts the servers of the job."""
    begin = DistributedSampler.__iter__

    def __iter__(self: DistributedSampler[Any]) -> Iterator[Any]:
        ranks = MPI.COMM_WORLD.size
        if not _warned and self.num_replicas == ranks > size():
            _warned.append(ranks)
            if rank() == 0:
                warnings.warn(
                    f"DistributedSampler(num_replicas={ranks}) deals samples to all {ranks} ranks, and only {size()} "
                    "of them train: the others' samples are never seen; give it num_replicas=mpips.size() and "
                    "rank=mpips.rank()",
                    stacklevel=2,
                )
        return begin(self)

    DistributedSampler.__iter__ = __iter__  # type: ignore[method-assign]
