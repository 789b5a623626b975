"""What compression has kept back, to the file and back: of each worker, or of each client, by itself.

Where as many load as have saved, each gets back its own. Otherwise sender i of n gets the sum of those numbered i,
i + n, i + 2n, ...: nothing that was kept back is lost, and nothing is sent twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpips.store.checkpoint.file import residual_dtype
from mpips.store.checkpoint.source import Stored, from_worker, senders
from mpips.store.keys.key import Key
from mpips.store.roles import Layout
from mpips.store.runtime.tasks import Task

Array = NDArray[Any]


def compressible(dtype: np.dtype | str) -> bool:
    """Whether pushes of keys of this dtype are compressed."""
    return np.dtype(dtype).kind not in "iub"


def gathered(layout: Layout, stored: Stored, keys: Sequence[Key]) -> Task[list[list[Array]]]:
    """Return the residuals of float keys, an array a key, of each sender; on worker 0 only (elsewhere: nothing).
    Collective."""
    mine = yield from stored.residuals(keys)
    ends = np.cumsum([key.size for key in keys])[:-1]
    parts = [np.zeros(key.size) for key in keys] if mine is None else np.split(mine, ends)
    kept = [part.astype(residual_dtype(key.dtype.name)) for key, part in zip(keys, parts, strict=True)]
    found = []
    for group in senders(layout):
        arrays = kept if group[0] == layout.rank else [np.empty_like(array) for array in kept]
        if group[0]:
            from_worker(layout, group[0], [key.name for key in keys], arrays, "save")
        found.append(arrays)
    return found if layout.rank == 0 else []


def given_back(
    layout: Layout, stored: Stored, keys: Sequence[Key], saved: Sequence[Sequence[Array]], groups: int
) -> Task[None]:
    """Give each sender what is its own of `saved` (worker 0's count; an array a key), which `groups` senders had.
    Collective."""
    group = next(number for number, ranks in enumerate(senders(layout)) if layout.rank in ranks)
    mine = [np.zeros(key.size) for key in keys]
    for number in range(groups):
        arrays = saved[number]
        from_worker(layout, 0, [key.name for key in keys], arrays)
        if number % len(senders(layout)) == group:
            for total, array in zip(mine, arrays, strict=True):
                total += array
    yield from stored.put_residuals(keys, mine)
