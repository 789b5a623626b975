"""Which server mirrors which: the next one in a ring that is on another node. Pure."""

from __future__ import annotations

from collections.abc import Sequence


def mirror_of(server: int, nodes: Sequence[int]) -> int | None:
    """The server that keeps the copies of this one; None where all share a node. `nodes`: of each server."""
    count = len(nodes)
    following = ((server + step) % count for step in range(1, count))
    return next((other for other in following if nodes[other] != nodes[server]), None)


def refusal(mirrors: int, spares: int, nodes: Sequence[int]) -> str:
    """Why servers on these nodes can have no mirrors, where they are asked for; "" where they can."""
    if mirrors and spares < 0:
        return f"mirrors={mirrors} and spares={spares}: a death ends the store all the same; ask for spares=0 or more"
    if not mirrors or len(set(nodes)) > 1:
        return ""
    there = "this store has no servers"
    if nodes:
        there = f"all {len(nodes)} share one" if len(nodes) > 1 else "there is one server"
    start = "start one on another host, or leave it out"
    return f"mirrors={mirrors} needs servers on at least two nodes, but {there}: {start}"
