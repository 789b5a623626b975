"""Hierarchical: sum inside each node, then sum each rank's slice between nodes, then gather inside each node.

Source: the two-level scheme of MPI libraries. In MPI libraries, one leader of each node communicates with the other
nodes. In this schedule all ranks of a node do.

Steps, with ranks numbered node by node and `local` ranks on each node: (1) a reduce-scatter inside the node by
`direct`, after which local rank i holds slice i of the node's sum; (2) the allreduce `between` of slice i among the
i-th ranks of all nodes; (3) an allgather inside the node by `direct`. Each lane of `between` with c chunks becomes a
lane of `local` slices of c chunks each.

p = 4, local = 2, `between` is a ring, so slices have 2 chunks; the (partner, chunks) that rank 0 sends:

    (1,2-3) | (2,1) (2,0) | (1,0-1)

Cost, l = local: inside the nodes 2(l-1) alpha + 2(l-1)/l n beta + (l-1)/l n gamma, with the alpha and beta of messages
inside a node; between the nodes, the cost of the chosen algorithm over p/l ranks and n/l bytes.
Limits: `local` divides p, and the ranks of a node have adjacent numbers.
Memory: (l-1)/l n, or the memory of `between` if that is more.
"""

from __future__ import annotations

from functools import partial

from mpips.collectives.schedule.model import Index, Lane, Schedule, Stage, Steps, in_group

KINDS = ("allreduce",)


def build(kind: str, p: int, local: int, between: Schedule, inside: tuple[Schedule, Schedule]) -> Schedule:
    """Build an allreduce over nodes of `local` ranks.

    Args:
        kind: "allreduce".
        p: The number of ranks.
        local: The number of ranks on each node.
        between: The allreduce among the p/local ranks that hold the same slice.
        inside: The reduce-scatter and the allgather among the ranks of a node.
    """
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

    yield from in_group(scatter, member, inside, size=chunks)
    yield from in_group(between.stage, node, across, first=member * chunks)
    yield from in_group(gather, member, inside, size=chunks)
