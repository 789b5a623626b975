"""What compression has kept back, to the file and back: of each worker, or of each client, by itself.

Where as many load as have saved, each gets back its own. Otherwise sender i of n gets the sum of those numbered i,
i + n, i + 2n, ...: nothing that was kept back is lost, and nothing is sent twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

import collectives
from mpips.checkpoint.file import residual_dtype
from mpips.checkpoint.source import Stored, from_worker_0, senders
from mpips.keys.key import Key
from mpips.layout import Layout
from mpips.runtime.tasks import Task

Array = NDArray[Any]


def compressible(dtype: np.dtype | str) -> bool:
    """Whether pushes of keys of this dtype are compressed."""
    return np.dtype(dtype).kind not in "iub"


def gathered(layout: Layout, stored: Stored, key: Key) -> Task[list[Array]]:
    """A float key's residuals, one array of each sender; on worker 0 only (elsewhere: nothing). Collective."""
    mine = yield from stored.residuals([key])
    dtype = residual_dtype(key.dtype.name)
    kept = np.zeros(key.size, dtype) if mine is None else mine.astype(dtype)
    found = []
    for group in senders(layout):
        array = kept if group[0] == layout.rank else np.empty(key.size, dtype)
        if group[0]:
            collectives.broadcast(array, layout.workers, root=group[0], label=f"save of key {key.name!r}")
        found.append(array)
    return found if layout.rank == 0 else []


def given_back(layout: Layout, stored: Stored, key: Key, saved: Sequence[Array], groups: int) -> Task[None]:
    """Give each sender what is its own of `saved` (worker 0's count), which `groups` senders had. Collective."""
    group = next(number for number, ranks in enumerate(senders(layout)) if layout.rank in ranks)
    mine = np.zeros(key.size)
    for number in range(groups):
        array = saved[number] if layout.rank == 0 else np.empty(key.size, residual_dtype(key.dtype.name))
        from_worker_0(layout, key.name, [array])
        if number % len(senders(layout)) == group:
            mine += array
    yield from stored.put_residuals([key], [mine])
