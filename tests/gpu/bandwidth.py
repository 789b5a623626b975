"""The fused kernel beside copies of a card: `python -m tests.gpu.bandwidth rows.json [MIB]`.

On the card: out = the sum of k vectors, which reads k vectors and writes one, beside a copy from one place of its
memory to another. `ASKED` of the copy's bytes a second are asked. Over the bus, as an allreduce launches it: a chunk
that has come and the vectors are read, and the sum is written to host memory, beside two copies at once of as many
bytes, one each way. Nothing is asked there.

A turn is some launches between two events. Kernel and copy take turns, and medians count.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from collectives.tensor import cuda_kernels as kernels

ASKED = 0.9
CASES = [("float32", 2), ("float32", 3), ("float32", 5), ("float64", 3), ("float16", 3), ("bfloat16", 3), ("int8", 3)]
BYTES = 256 << 20  # of a vector: several times what any card caches
TURNS, LAUNCHES = 9, 20
DEFAULT = 4  # cudaMemcpyDefault: the addresses say which way


def size_of(dtype: str) -> int:
    """Return the bytes of an element."""
    return np.dtype(getattr(ml_dtypes, dtype) if dtype == "bfloat16" else dtype).itemsize


def milliseconds(launch: Callable[[], None], launches: int) -> float:
    """Return the time of one launch on the current stream."""
    import cupy as cp

    begin, end = cp.cuda.Event(), cp.cuda.Event()
    begin.record()
    for _ in range(launches):
        launch()
    end.record()
    end.synchronize()
    return float(cp.cuda.get_elapsed_time(begin, end)) / launches


def in_turns(*launches: Callable[[], None]) -> list[float]:
    """Return the median milliseconds of each, after one turn to warm up."""
    turns = [[milliseconds(launch, LAUNCHES) for launch in launches] for _ in range(1 + TURNS)]
    return [statistics.median(times) for times in zip(*turns[1:])]


def kernel(dtype: str, parts: list[int], out: int, n: int) -> Callable[[], None]:
    """Return what launches the sum of n elements at these addresses."""
    import cupy as cp

    compiled = cp.RawKernel(kernels.source("add", dtype, len(parts)), kernels.name("add", dtype, len(parts)))
    blocks, threads = kernels.grid(n)
    return lambda: compiled((blocks,), (threads,), (*parts, out, n))


def on_the_card(dtype: str, count: int, nbytes: int) -> dict[str, Any]:
    """Return the row of a sum of vectors in the card's memory."""
    import cupy as cp

    vectors = [cp.zeros(nbytes, cp.uint8) for _ in range(count + 1)]
    *parts, out = (vector.data.ptr for vector in vectors)
    stream = cp.cuda.get_current_stream().ptr
    summed, copied = in_turns(
        kernel(dtype, parts, out, nbytes // size_of(dtype)),
        lambda: cp.cuda.runtime.memcpyAsync(out, parts[0], nbytes, DEFAULT, stream),
    )
    return row("on the card", dtype, count, summed, copied, (count + 1) * nbytes, 2 * nbytes, ASKED)


def over_the_bus(dtype: str, count: int, nbytes: int) -> dict[str, Any]:
    """Return the row of a sum of a chunk on the host and vectors on the card, into host memory."""
    import cupy as cp

    vectors = [cp.zeros(nbytes, cp.uint8) for _ in range(count)]
    came, out = (cp.cuda.alloc_pinned_memory(nbytes) for _ in range(2))
    main, other = cp.cuda.get_current_stream(), cp.cuda.Stream(non_blocking=True)

    def copy_both_ways() -> None:
        other.wait_event(main.record())
        cp.cuda.runtime.memcpyAsync(vectors[0].data.ptr, came.ptr, nbytes, DEFAULT, main.ptr)
        cp.cuda.runtime.memcpyAsync(out.ptr, vectors[-1].data.ptr, nbytes, DEFAULT, other.ptr)
        main.wait_event(other.record())

    parts = [came.ptr, *(vector.data.ptr for vector in vectors)]
    summed, copied = in_turns(kernel(dtype, parts, out.ptr, nbytes // size_of(dtype)), copy_both_ways)
    return row("over the bus", dtype, count + 1, summed, copied, 2 * nbytes, 2 * nbytes, None)


def row(
    where: str,
    dtype: str,
    vectors: int,
    summed_ms: float,
    copied_ms: float,
    summed: int,
    copied: int,
    asked: float | None,
) -> dict[str, Any]:
    """Return a result: both rates in 10^9 bytes a second, and the kernel's share of the copy's."""
    rates = summed / summed_ms / 1e6, copied / copied_ms / 1e6
    share = rates[0] / rates[1]
    return {
        "where": where,
        "dtype": dtype,
        "vectors": vectors,
        "ms": summed_ms,
        "GB/s": rates[0],
        "copy GB/s": rates[1],
        "share": share,
        "asked": asked,
        "ok": asked is None or share >= asked,
    }


def main() -> None:
    """Command line."""
    nbytes = int(sys.argv[2]) << 20 if len(sys.argv) > 2 else BYTES
    rows = [on_the_card(dtype, count, nbytes) for dtype, count in CASES]
    rows += [over_the_bus(dtype, count, nbytes // 8) for dtype, count in (("float32", 2), ("float16", 2))]
    Path(sys.argv[1]).write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
