"""What each host runs for `examples.reproduce.mxnet_mpi`: push and pull of one key, timed, with the links' bytes.

python -m examples.reproduce.store_ranks REQUEST ANSWER; roles come from MPIPS_* variables, as `mpips run` sets them.
REQUEST holds {"kind", "nbytes", "repeats"}.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

import mpips
from examples.reproduce.cores import processor


def times(kv: Any, key: str, nbytes: int, repeats: int) -> dict[str, Any]:
    """Seconds of each repeat, from a barrier to the last worker's end, and the share of idle cores."""
    value = mpips.empty(nbytes // 4, np.float32)
    out = np.empty_like(value)
    value[:] = kv.rank + 1
    kv.init(key, np.zeros_like(value))
    total = kv.num_workers * (kv.num_workers + 1) / 2
    seconds, before = [], processor()
    for _ in range(repeats):
        kv.barrier()
        start = time.perf_counter()
        kv.pushpull(key, value, out)
        kv.barrier()
        seconds.append(time.perf_counter() - start)
        if not (out == total).all():
            raise ArithmeticError(f"worker {kv.rank}: the sum over workers should be {total}, but is {out[0]}")
    after = processor()
    return {"seconds": seconds, "idle": (after[0] - before[0]) / max(1, after[1] - before[1])}


def main() -> None:
    request = json.loads(Path(sys.argv[1]).read_text())
    kv = mpips.create(request["kind"])
    times(kv, "warm", 1 << 16, 1)
    answer = times(kv, "w", request["nbytes"], request["repeats"])
    if kv.rank == 0:
        Path(sys.argv[2]).write_text(json.dumps(answer))
    kv.close()


if __name__ == "__main__":
    main()
