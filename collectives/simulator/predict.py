"""How long one algorithm takes on one network, a ring on a fat-tree for one: by simulation, and by formula beside."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from collectives.schedule import bcube as exchange
from collectives.schedule.catalog import build
from collectives.schedule.model import Schedule, parse
from collectives.simulator.alpha_beta import FREE, Costs, LinkCost
from collectives.simulator.clocks import simulate
from collectives.simulator.cost import has_form, seconds
from collectives.simulator.topology import BCube, FatTree, Topology, bcube, fattree


@dataclass(frozen=True)
class Prediction:
    """One simulated collective; times in seconds."""

    topology: str
    collective: str
    algorithm: str
    ranks: int
    bytes: int
    seconds: float
    closed_form: float | None
    """None where there is none, or where its wires are not those of the topology."""
    busiest_link_bytes: float


def schedule_on(network: Topology, kind: str, algorithm: str, per_host: int = 1) -> Schedule:
    """The schedule that suits the network: `bcube` without parameters takes n and k from a BCube, and slots, edges and
    pods as the digits of a fat-tree, in one lane, as the host has one NIC (BML paper, section 3.3); `hierarchical`
    without `local` takes the ranks of each host."""
    name, written = parse(algorithm)
    p = network.hosts * per_host
    if name == "bcube" and not written and per_host == 1:
        if isinstance(network, FatTree):
            return exchange.over(kind, network.radices[::-1], 1, "bcube")
        if network.k > 1:
            written = {"n": network.n, "k": network.k}
    if name == "hierarchical":
        written = {"local": per_host, **written}
    return build(kind, name, p, **written)


def predict(
    network: Topology,
    kind: str,
    algorithm: str,
    nbytes: int,
    alpha: float = 0.0,
    gamma: float = 0.0,
    near: LinkCost = FREE,
    per_host: int = 1,
    progress: Callable[[float], None] | None = None,
) -> Prediction:
    """Simulate one collective; the parameters are those of `simulate`."""
    schedule = schedule_on(network, kind, algorithm, per_host)
    run = simulate(schedule, network, nbytes, alpha, gamma, near, progress=progress)
    form = None
    if _has_form(network, schedule, per_host):
        costs = Costs(LinkCost(alpha, 1 / float(network.link_rates[0])), near, gamma)
        form = seconds(kind, schedule.name, schedule.p, nbytes, costs)
    busiest = float(run.link_bytes.max(initial=0.0))
    return Prediction(network.name, kind, schedule.name, schedule.p, nbytes, run.seconds, form, busiest)


def _has_form(network: Topology, schedule: Schedule, per_host: int) -> bool:
    """The closed forms give each rank one wire into a network that never blocks, and `bcube` one for each level."""
    name = schedule.name.partition("(")[0]
    if per_host > 1 or isinstance(network.rate, tuple) or not has_form(schedule.kind, name):
        return False
    if isinstance(network, BCube) and network.k > 1:
        return schedule.name == f"bcube(n={network.n},k={network.k})" and schedule.kind == "allreduce"
    return name != "bcube"


def figure5(nbytes: int, rate: float) -> list[tuple[Prediction, float]]:
    """BML paper, figure 5: parameter server (direct) and BML on fat-tree and BCube with 16 and with 1,024 servers. With
    each prediction what the text says of it, seconds: 2(N-1)/N TF on a fat-tree for both (sections 2 and 3.3), 1/k of
    that for BML on BCube (3.2), and double BML's for the parameter server on BCube (3.3: "it will double the GST")."""
    rows = []
    for cube, tree in ((bcube(4, 2, rate), fattree(4, rate)), (bcube(32, 2, rate), fattree(16, rate))):
        flat = 2 * (tree.hosts - 1) / tree.hosts * nbytes / rate
        for network, algorithm, said in (
            (tree, "direct", flat),
            (tree, "bcube", flat),
            (cube, "direct", 2 * flat / cube.k),
            (cube, "bcube", flat / cube.k),
        ):
            rows.append((predict(network, "allreduce", algorithm, nbytes), said))
    return rows
