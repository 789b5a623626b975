"""Hierarchical: sum inside each node, then each rank takes its slice between nodes, then gather inside.

Source: the two-level scheme of MPI libraries, with every rank of a node at work between nodes rather than one leader.

Steps, ranks numbered node by node, `local` ranks a node: (1) reduce-scatter inside the node by `direct`, after which
local rank i holds slice i of the node's sum; (2) the allreduce `between` of slice i among the i-th ranks of all
nodes; (3) allgather inside the node by `direct`. Each lane of `between` becomes a lane, whose chunks are `local`
slices of its chunks.

p = 4, local = 2, between ring; slices of 2 chunks; (partner, chunks) that rank 0 sends:

    (1,2-3) | (2,1) (2,0) | (1,0-1)

Cost: inside, with the node's own alpha and beta, 2(l-1) alpha + 2(l-1)/l n beta + (l-1)/l n gamma, l = local;
between, the chosen algorithm's over p/l ranks and n/l bytes.
Limits: `local` divides p; ranks of a node are neighbours. Memory: (l-1)/l n, or what `between` needs.
"""

from __future__ import annotations

from functools import partial

from mpips.collectives.schedule.model import Index, Lane, Schedule, Stage, Steps, within

KINDS = ("allreduce",)


def build(kind: str, p: int, local: int, between: Schedule, inside: tuple[Schedule, Schedule]) -> Schedule:
    """allreduce over nodes of `local` ranks; `between` is the allreduce among the p/local ranks of one slice, `inside`
    the reduce-scatter and the allgather of a node."""
    if local < 1 or p % local or between.p != p // local:
        raise ValueError(
            f"hierarchical(local={local}) with {between} between the nodes does not fit {p} ranks: every node must "
            "hold the same number of them"
        )
    scatter, gather = (schedule.lanes[0].stage for schedule in inside)
    lanes = tuple(
        Lane(local * lane.chunks, partial(_steps, local, scatter, lane, gather), lane.turn) for lane in between.lanes
    )
    return Schedule(kind, f"hierarchical(local={local},between={between.name})", p, lanes)


def _steps(local: int, scatter: Stage, between: Lane, gather: Stage, rank: Index) -> Steps:
    node, member, chunks = rank // local, rank % local, between.chunks

    def inside(i: Index) -> Index:
        return node * local + i

    def across(i: Index) -> Index:
        return i * local + member

    yield from within(scatter, member, inside, size=chunks)
    yield from within(between.stage, node, across, first=member * chunks)
    yield from within(gather, member, inside, size=chunks)
