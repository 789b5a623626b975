"""Collectives over arrays: one schedule proved, costed, and executed over messages and over node-shared memory."""

from collectives.arena import empty
from collectives.errors import CollectiveError, MismatchError, StallError
from collectives.plan import Plan, allgather, allreduce, alltoall, broadcast, plan, reduce, reduce_scatter

__all__ = [
    "allreduce",
    "reduce_scatter",
    "allgather",
    "broadcast",
    "reduce",
    "alltoall",
    "plan",
    "Plan",
    "empty",
    "CollectiveError",
    "MismatchError",
    "StallError",
]
