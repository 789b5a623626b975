"""The sum of a few numbers, such as a loss: where NumPy's call takes longer to begin than the additions take.

A sum of p vectors of n elements is straight lines (`flat.Lines`), as a loop would take as long again. For p = 3, n = 1:

    out[0] = part0[0] + part1[0]
    out[0] = out[0] + part2[0]

All are memoryviews. Storing each sum rounds it to the elements' type: Python adds in double precision, and a float32
sum rounded from there has the same bits as one of float32 (a double has more than twice as many digits and two).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from collectives.arrays import Vector
from collectives.call import Call
from collectives.transport.flat import Lines

MOST = 3  # elements; from four on NumPy is as fast


def puts(call: Call, part: Vector, slots: Sequence[Vector]) -> Lines | None:
    """Put `part` into this rank's slot, of even and of odd operations; None where steps are faster, or the call adds
    nothing up: what is only moved keeps all its bits, and Python's numbers lose some of a NaN's."""
    if not (_adds(call) and _simple(part)):
        return None
    text = "".join(f"mine_{{p}}[{i}] = x[{i}]\n" for i in range(part.size))
    return Lines(text, {"x": part.data, **{f"mine_{p}": slot.data for p, slot in enumerate(slots)}})


def takes(call: Call, total: Vector, parts: Sequence[Sequence[Vector]]) -> Lines | None:
    """total = the sum or the mean of all ranks' parts in their order, which lie elsewhere, for even and for odd
    operations; None where NumPy is as fast, or its bits are others."""
    text = added(call, total)
    if not text:
        return None
    names: dict[str, Any] = {f"part{rank}_{p}": v.data for p, every in enumerate(parts) for rank, v in enumerate(every)}
    return Lines(text, {"out": total.data, **names})


def added(call: Call, total: Vector) -> str:
    """The lines of `takes`; "" where there are none."""
    if call.operation is None or call.p == 1 or not (_adds(call) and _simple(total)):
        return ""
    lines = []
    for i in range(total.size):
        lines += [f"out[{i}] = part0_{{p}}[{i}] + part1_{{p}}[{i}]\n"]
        lines += [f"out[{i}] = out[{i}] + part{rank}_{{p}}[{i}]\n" for rank in range(2, call.p)]
        lines += [f"out[{i}] = out[{i}] / {call.p}\n"] if call.operation.is_mean else []
    return "".join(lines)


def _adds(call: Call) -> bool:
    return call.operation is not None and call.operation.name in ("sum", "mean")


def _simple(vector: Vector) -> bool:
    """Whether Python's own numbers serve: one to three floats, of a format that memoryviews know."""
    known = vector.dtype.char in "fd" and vector.dtype.isnative and vector.flags.aligned
    return 0 < vector.size <= MOST and known
