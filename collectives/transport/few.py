"""The sum of a few numbers, such as a loss: where NumPy's call takes longer to begin than the additions take.

A sum of p vectors of n elements is compiled to straight lines, as a loop would take as long again. For p = 3, n = 1:

    def add(total, part0, part1, part2):
        total[0] = part0[0] + part1[0]
        total[0] = total[0] + part2[0]

All are memoryviews. Storing each sum rounds it to the elements' type: Python adds in double precision, and a float32
sum rounded from there has the same bits as one of float32 (a double has more than twice as many digits and two).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from collectives.arrays import Vector
from collectives.call import Call
from collectives.transport.program import Step

MOST = 3  # elements; from four on NumPy is as fast


def serves(call: Call, total: Vector) -> bool:
    """Whether `step` can take the place of NumPy's reductions of `call` into `total`."""
    sums = call.operation is not None and call.operation.name in ("sum", "mean")
    return sums and call.p > 1 and 0 < total.size <= MOST and call.dtype.char in "fd" and total.flags.aligned


def step(call: Call, parts: Sequence[Vector], total: Vector) -> Step:
    """total = the sum or the mean of all parts in their order, of which none but the first may be `total` itself."""
    assert call.operation is not None
    return _adder(len(parts), total.size, call.operation.is_mean), (total.data, *(part.data for part in parts))


@cache
def _adder(p: int, n: int, mean: bool) -> Callable[..., None]:
    lines = [f"def add(total, {', '.join(f'part{rank}' for rank in range(p))}):"]
    for i in range(n):
        sums = [f"part0[{i}] + part1[{i}]", *(f"total[{i}] + part{rank}[{i}]" for rank in range(2, p))]
        lines += [f"    total[{i}] = {one}" for one in [*sums, *([f"total[{i}] / {p}"] if mean else [])]]
    made: dict[str, Any] = {}
    exec("\n".join(lines), made)
    add: Callable[..., None] = made["add"]
    return add
