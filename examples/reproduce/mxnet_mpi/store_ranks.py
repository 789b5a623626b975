"""The program of each host for `examples.reproduce.mxnet_mpi`: times push and pull of one key of the store.

python -m examples.reproduce.mxnet_mpi.store_ranks REQUEST ANSWER
Roles come from MPIPS_* variables, which `mpips run` sets.
REQUEST holds {"kind", "nbytes", "repeats"}.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

import mpips
from examples.reproduce import rank
from examples.reproduce.cores import idle_share, processor


def times(kv: Any, key: str, nbytes: int, repeats: int) -> dict[str, Any]:
    """Time `repeats` pushpulls of a new key, from a barrier to the end of the last worker. Results are checked.

    Return {"seconds": those of each repeat, "idle": the share of the cores that was idle}. Collective over the workers.
    """
    value = mpips.empty(nbytes // 4, np.float32)
    out = np.empty_like(value)
    kv.init(key, np.zeros_like(value))
    seconds, before = [], processor()
    for number in range(1, repeats + 1):
        # No two rounds push the same values.
        value[:] = kv.rank + number
        total = sum(worker + number for worker in range(kv.num_workers))
        kv.barrier()
        start = time.perf_counter()
        kv.pushpull(key, value, out)
        kv.barrier()
        seconds.append(time.perf_counter() - start)
        if not (out == total).all():
            raise ArithmeticError(f"worker {kv.rank}: the sum over workers should be {total}, but is {out[0]}")
    after = processor()
    return {"seconds": seconds, "idle": idle_share(before, after)}


def main() -> None:
    asked = rank.request()
    kv = mpips.create(asked["kind"])
    times(kv, "warm", 1 << 16, 1)
    found = times(kv, "w", asked["nbytes"], asked["repeats"])
    if kv.rank == 0:
        rank.answer(found)
    kv.close()


if __name__ == "__main__":
    main()
