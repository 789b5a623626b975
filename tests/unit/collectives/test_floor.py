"""The floor of the microbenchmarks: bytes counted rank by rank."""

import numpy as np
import pytest

from collectives.benchmark.case import FLOOR_SHARE, IN_PLACE
from collectives.call import Call, operation
from collectives.schedule.model import KINDS


@pytest.mark.parametrize("p", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("kind", KINDS)
def test_the_share_is_what_owners_read_and_write(kind: str, p: int) -> None:
    """Every owner reads its piece from the sources and writes it to the readers, except where it is there already."""
    n = 420
    call = Call(kind, n, np.dtype(np.float32), operation("sum", np.dtype(np.float32)), 0, "auto", p)
    reads = writes = 0
    for owner in range(p):
        start, stop = call.block(owner)
        if kind == "alltoall":
            reads, writes = reads + n, writes + n
            continue
        reads += (stop - start) * len(call.sources(owner))
        there = call.sources(owner) if kind == "broadcast" and kind in IN_PLACE else []
        writes += (stop - start) * len([reader for reader in call.readers(owner) if reader not in there])
    assert FLOOR_SHARE[kind](p) == pytest.approx((reads + writes) / (2 * n * p))
