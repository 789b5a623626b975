"""Multi-ring: r rings that take turns, so that a rank adds for one ring while another ring is on the wire.

Source: MXNET-MPI paper, section 6.3.2 and figure 9.

Steps: each of the r lanes is a `ring` over 1/r of the vector. Step s of lane l+1 uses the wire after step s of lane l,
while lane l adds. A single ring leaves the wire idle while it adds, because its next message is the sum.

p = 3, r = 2; time goes to the right; a and b are messages of the two lanes, A and B their sums:

    wire:  a0 b0 a1 b1 a2 b2 a3 b3        a0, a1: reduce-scatter; a2, a3: allgather
    sums:     A0 B0 A1 B1

Cost, where a step of a lane takes w = alpha + n/(rp) beta for its message and g = n/(rp) gamma for its sum: if g <= w,
all sums are hidden behind messages of other rings, and the cost is 2(p-1) r w. Otherwise the sums dominate, and the
cost is (p-1) r g + ((p-2) r + 2) w.
Limits: any p, 1 <= r <= MOST_LANES. Memory: one chunk, n/(r p), for each lane.
"""

from __future__ import annotations

from dataclasses import replace

from mpips.collectives.schedule.model import MOST_LANES, Schedule

KINDS = ("allreduce",)


def build(kind: str, p: int, single: Schedule, rings: int = 2) -> Schedule:
    """Build an allreduce over `rings` rings of p ranks that take turns. `single` is the schedule of one ring."""
    if not 1 <= rings <= MOST_LANES:
        raise ValueError(f"multi_ring needs 1 to {MOST_LANES} rings, not {rings}")
    lanes = tuple(replace(single.lanes[0], turn=turn) for turn in range(rings))
    return Schedule(kind, f"multi_ring(rings={rings})", p, lanes)
