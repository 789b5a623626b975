"""The MPI's own collectives: how many elements one call of MPI takes."""

from __future__ import annotations

import numpy as np
import pytest
from mpi4py import MPI

from collectives import arrays
from collectives.call import Call, find_reduction
from collectives.fabric.requests import NativeCollectives
from collectives.network import native

COMM = MPI.COMM_WORLD
INT = 1 << 12  # as if an int of C ended here


@pytest.mark.mpi
@pytest.mark.parametrize(
    "kind, dtype", [("broadcast", "float64"), ("broadcast", "complex128"), ("allreduce", "float64")]
)
def test_no_call_counts_further_than_an_int(monkeypatch, kind, dtype):
    monkeypatch.setattr(native, "MOST_ELEMENTS", INT // 8)
    monkeypatch.setattr(native, "MOST_BYTES", INT - 1)
    n = INT // 8 * 3
    x = np.full(n, 1.0 + COMM.rank).astype(dtype)
    call = Call(
        kind, n, x.dtype, find_reduction("sum", x.dtype) if kind == "allreduce" else None, 0, "native", COMM.size
    )
    plan = native.NativePlan(NativeCollectives(COMM), call, *[arrays.flat(x, "x", True)] * 2, met=True)
    buffers = [arguments[int(kind == "allreduce")] for _, arguments in plan._row]
    plan.enter()
    assert sum(vector.nbytes for vector, _ in buffers) == x.nbytes
    assert max(vector.size for vector, _ in buffers) < INT
    for _ in plan.run():
        pass
    assert (x == (1 if kind == "broadcast" else COMM.size * (COMM.size + 1) // 2)).all()


@pytest.mark.parametrize("kind", ["allgather", "alltoall"])
def test_what_an_int_cannot_count_in_bytes_is_not_taken(kind):
    most, dtype = (2**31 - 1) // 16, np.dtype("complex128")
    assert native.why_not(Call(kind, most, dtype, None, 0, "native", 2)) is None
    assert f"at most {most} complex128" in native.why_not(Call(kind, most + 1, dtype, None, 0, "native", 2))
