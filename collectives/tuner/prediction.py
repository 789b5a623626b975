"""How long a call should take on this machine, by the costs in the table; it loads the simulator."""

from __future__ import annotations

from collectives.call import Call
from collectives.schedule.catalog import build
from collectives.schedule.model import parse
from collectives.simulator.alpha_beta import Costs, LinkCost
from collectives.simulator.clocks import simulate
from collectives.simulator.topology import star
from collectives.tuner.table import Table


def seconds(table: Table, call: Call, nodes: int, way: str = "") -> float | None:
    """What a call should take; None where nothing is known of its algorithm. `way` is how shared memory serves it:
    "slots", "stages", "cross_memory" or "direct"."""
    if call.p == 1:
        return 0.0
    if call.algorithm == "shared_memory":
        return _memory_seconds(table, call, way)
    far, near = (LinkCost(line.alpha, line.beta) for line in (table.far, table.near))
    try:
        return on_job(call.kind, call.algorithm, call.nbytes, call.p, nodes, Costs(far, near, table.gamma))
    except ValueError:  # native, and nodes of unlike size
        return None


def _memory_seconds(table: Table, call: Call, way: str) -> float | None:
    """An allreduce reads and writes all; the other kinds do one half of it. The number of ranks nearest in the table
    counts."""
    known = {int(key.split()[1]): line for key, line in table.memory.items() if key.split()[0] == way}
    if not known:
        return None
    line = known[min(known, key=lambda ranks: abs(ranks - call.p))]
    share = 1.0 if call.kind == "allreduce" else 0.5
    return line.alpha + share * line.beta * call.nbytes


def on_job(kind: str, algorithm: str, nbytes: int, p: int, nodes: int, costs: Costs) -> float:
    """Seconds of a call in a job of p ranks on `nodes` equal nodes: its schedule simulated on one switch between the
    nodes, each with one wire (costs.far), and memory inside them (costs.near). ValueError as `catalog.build`, and where
    p is no multiple of nodes."""
    if p % nodes:
        raise ValueError(f"{p} ranks on {nodes} nodes: every node must hold the same number of them")
    local = {"local": p // nodes} if parse(algorithm)[0] == "hierarchical" else {}
    schedule = build(kind, algorithm, p, **local)
    network = star(nodes, 1 / costs.far.beta if costs.far.beta else float("inf"))
    return simulate(schedule, network, nbytes, costs.far.alpha, costs.gamma, costs.near).seconds
