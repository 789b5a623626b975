"""Predict how long an algorithm takes on a topology by simulating it, a ring on a fat-tree for one.

The simulation keeps the clocks of all ranks, step by step, vectorised. A message starts when both its ends have reached
the step it belongs to. Every message costs its two ends alpha, one after the other within a lane. The messages of one
step, of all lanes of one turn, share the links: one that crosses links l takes the largest (bytes of all messages on l)
/ (rate of l). Switches never block, links are full duplex, and relays in a BCube pass messages on as they come. Then
the rank adds what came in, gamma a byte, for all those lanes together; while it does, lanes of the next turn may be on
the wire. Ranks that share a host reach each other through memory, where each rank has a way in and a way out of rate
1 / near.beta.

Sharing is exact where the messages of a step start together, as they do in all symmetric algorithms, and otherwise on
the safe side.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mpips.collectives.schedule import bcube
from mpips.collectives.schedule.catalog import build
from mpips.collectives.schedule.model import NOBODY, Schedule, Step, parse
from mpips.collectives.simulator.cost import FREE, Costs, LinkCost, closed_form, has_form
from mpips.collectives.simulator.topology import BCube, FatTree, Topology, star

if TYPE_CHECKING:  # a simulation loads no MPI
    from mpips.collectives.call import Call
    from mpips.collectives.tuner.table import TuningTable


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
    """Return the schedule that suits the network.

    `bcube` without parameters takes n and k from a BCube, and slots, edges and pods as the digits of a fat-tree, in one
    lane, as the host has one NIC (BML paper, section 3.3). `hierarchical` without `local` takes the ranks of each host.
    """
    name, written = parse(algorithm)
    p = network.hosts * per_host
    if name == "bcube" and not written and per_host == 1:
        if isinstance(network, FatTree):
            return bcube.over(kind, network.radices[::-1], 1, "bcube")
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
    # closed forms give each rank one wire into a network that never blocks, and `bcube` one for each level
    name = schedule.name.partition("(")[0]
    if isinstance(network, BCube) and network.k > 1:
        fits = schedule.name == f"bcube(n={network.n},k={network.k})" and kind == "allreduce"
    else:
        fits = name != "bcube"
    if fits and per_host == 1 and not isinstance(network.rate, tuple) and has_form(kind, name):
        costs = Costs(LinkCost(alpha, 1 / float(network.link_rates[0])), near, gamma)
        form = closed_form(kind, schedule.name, schedule.p, nbytes, costs)
    busiest = float(run.link_bytes.max(initial=0.0))
    return Prediction(network.name, kind, schedule.name, schedule.p, nbytes, run.seconds, form, busiest)


def figure5(nbytes: int, rate: float) -> list[tuple[Prediction, float]]:
    """BML paper, figure 5: parameter server (direct) and BML on fat-tree and BCube with 16 and with 1,024 servers. With
    each prediction what the text says of it, seconds: 2(N-1)/N TF on a fat-tree for both (sections 2 and 3.3), 1/k of
    that for BML on BCube (3.2), and double BML's for the parameter server on BCube (3.3: "it will double the GST")."""
    rows = []
    for cube, tree in ((BCube(4, 2, rate), FatTree(4, rate)), (BCube(32, 2, rate), FatTree(16, rate))):
        flat = 2 * (tree.hosts - 1) / tree.hosts * nbytes / rate
        for network, algorithm, said in (
            (tree, "direct", flat),
            (tree, "bcube", flat),
            (cube, "direct", 2 * flat / cube.k),
            (cube, "bcube", flat / cube.k),
        ):
            rows.append((predict(network, "allreduce", algorithm, nbytes), said))
    return rows


Reals = NDArray[np.float64]
Places = NDArray[np.int64]


@dataclass(frozen=True)
class Run:
    """The result of a simulation."""

    seconds: float
    """When the last rank is done."""
    clocks: Reals
    """When each rank is done, seconds."""
    link_bytes: Reals
    """Bytes over each link of the topology."""


def simulate(
    schedule: Schedule,
    topology: Topology,
    nbytes: int,
    alpha: float = 0.0,
    gamma: float = 0.0,
    near: LinkCost = FREE,
    itemsize: int = 4,
    progress: Callable[[float], None] | None = None,
) -> Run:
    """Run `schedule` over the hosts of `topology`, as many ranks on each as p / hosts gives, numbered host by host.

    The vector has nbytes bytes, in elements of `itemsize`. alpha, in seconds, counts between hosts, near.alpha and
    near.beta inside; the links' rates are the topology's; gamma in seconds a byte. `progress` is told the share that is
    done. ValueError where the ranks do not fill the hosts.
    """
    if schedule.p % topology.hosts:
        raise ValueError(f"{schedule} does not fill {topology.name}: p must be a multiple of {topology.hosts} hosts")
    cluster = _Cluster(schedule, topology, Costs(LinkCost(alpha, 0.0), near, gamma), nbytes, itemsize)
    turn = operator.attrgetter("turn")
    turns = [list(lanes) for _, lanes in groupby(sorted(cluster.lanes, key=turn), key=turn)]
    steps = [[schedule.steps(lane.index, cluster.ranks) for lane in lanes] for lanes in turns]
    total = sum(1 for _ in schedule.steps(turns[0][0].index, 0))
    for number in range(total):
        for lanes, texts in zip(turns, steps):
            cluster.play(lanes, [next(text) for text in texts])
        if progress:
            progress((number + 1) / total)
    clocks = np.max([lane.ready for lane in cluster.lanes], axis=0, initial=0.0)
    return Run(float(clocks.max()), clocks, cluster.carried[: len(topology.link_rates)])


@dataclass
class _LaneClock:
    """A lane while it runs: where its chunks begin, in bytes, and when each rank may start its next step."""

    index: int
    turn: int
    offsets: Places
    ready: Reals


class _Message(NamedTuple):
    """All messages of one round: rank `source[i]` sends nbytes[i] to rank target[i]."""

    source: Places
    target: Places
    nbytes: Places
    add: bool


class _Cluster:
    """Links, clocks of wires and processors, and the routes between ranks."""

    def __init__(self, schedule: Schedule, topology: Topology, costs: Costs, nbytes: int, itemsize: int):
        p = schedule.p
        self.ranks = np.arange(p)
        self.topology, self.costs = topology, costs
        self.share = p // topology.hosts
        memory = np.full(2 * p, 1 / costs.near.beta if costs.near.beta else np.inf)
        self.rates = np.concatenate([topology.link_rates, memory])
        self.carried = np.zeros(len(self.rates))
        self.processor, self.wire_out, self.wire_in = np.zeros(p), np.zeros(p), np.zeros(p)
        self.in_turn = len({lane.turn for lane in schedule.lanes}) > 1
        self.routes = _Routes(self._route, limit=64 << 20)
        self.lanes = []
        for i, lane in enumerate(schedule.lanes):
            offsets = np.minimum(nbytes, schedule.offsets(-(-nbytes // itemsize), i) * itemsize)
            self.lanes.append(_LaneClock(i, lane.turn, offsets, np.zeros(p)))

    def play(self, lanes: list[_LaneClock], steps: list[Step]) -> None:
        """Advance the clocks by one step of the lanes of one turn."""
        load = np.zeros(len(self.rates))
        for lane, step in zip(lanes, steps):
            for message in self._messages(lane, step):
                for link, which in self.routes(message):
                    load += np.bincount(link, message.nbytes[which], len(load))
        self.carried += load
        busy = np.divide(load, self.rates)
        added, done = np.zeros(len(self.ranks)), np.zeros(len(self.ranks))
        for lane, step in zip(lanes, steps):
            lane.ready = self._exchange(lane, step, busy, added)
            np.maximum(done, lane.ready, out=done)
        if added.any():
            adding = added > 0
            done = np.where(adding, np.maximum(done, self.processor) + added * self.costs.gamma, done)
            self.processor = np.where(adding, done, self.processor)
            for lane in lanes:
                lane.ready = np.where(adding, done, lane.ready)

    def _exchange(self, lane: _LaneClock, step: Step, busy: Reals, added: Reals) -> Reals:
        """Return when each rank has sent and received all of the step; what it must add is counted up in `added`."""
        out, come = np.zeros(len(self.ranks)), np.zeros(len(self.ranks))
        done = lane.ready.copy()
        for m in self._messages(lane, step):
            source, target = m.source, m.target
            alpha = np.where(source // self.share == target // self.share, self.costs.near.alpha, self.costs.far.alpha)
            out[source] += alpha
            come[target] += alpha
            start = np.maximum(lane.ready[source], lane.ready[target])
            if self.in_turn:
                np.maximum(start, np.maximum(self.wire_out[source], self.wire_in[target]), out=start)
            time = np.zeros(len(source))
            for link, which in self.routes(m):
                time[which] = np.maximum(time[which], busy[link])
            end = start + np.maximum(out[source], come[target]) + time
            done[source] = np.maximum(done[source], end)
            done[target] = np.maximum(done[target], end)
            if self.in_turn:
                self.wire_out[source], self.wire_in[target] = end, end
            if m.add:
                added[target] += m.nbytes
        return done

    def _messages(self, lane: _LaneClock, step: Step) -> Iterator[_Message]:
        for r in step:
            r = r.over(len(self.ranks))
            source = self.ranks if (r.send_to != NOBODY).all() else np.flatnonzero(r.send_to != NOBODY)
            nbytes = lane.offsets[r.send.stop[source]] - lane.offsets[r.send.start[source]]
            yield _Message(source, r.send_to[source], nbytes, r.add)

    def _route(self, source: Places, target: Places) -> list[tuple[Places, Any]]:
        """Yield (links, which messages cross them), hop by hop; `which` is a slice where all do."""
        here, there = source // self.share, target // self.share
        links = list(self.topology.route(here, there))
        ways = len(self.topology.link_rates)
        if self.share > 1:
            links += [np.where(here == there, ways + source, NOBODY)]
            links += [np.where(here == there, ways + len(self.ranks) + target, NOBODY)]
        hops: list[tuple[Places, Any]] = []
        for link in links:
            crossed = link != NOBODY
            if crossed.all():
                hops.append((link, slice(None)))
            elif crossed.any():
                which = np.flatnonzero(crossed)
                hops.append((link[which], which))
        return hops


class _Routes:
    """Remembers the routes of rounds seen before: most algorithms repeat a few patterns of partners."""

    def __init__(self, find: Callable[[Places, Places], list[tuple[Places, Any]]], limit: int):
        self.find, self.room = find, limit
        self.known: dict[tuple[bytes, int], list[tuple[Places, Any]]] = {}

    def __call__(self, message: _Message) -> list[tuple[Places, Any]]:
        key = (message.target.tobytes(), hash(message.source.tobytes()))
        hops = self.known.get(key)
        if hops is None:
            hops = self.find(message.source, message.target)
            size = len(key[0]) + sum(link.nbytes for link, _ in hops)
            if size <= self.room:
                self.room -= size
                self.known[key] = hops
        return hops


def predict_seconds(table: TuningTable, call: Call, nodes: int, way: str = "") -> float | None:
    """Return what a call should take; None where nothing is known of its algorithm. `way` is how shared memory serves
    it: "slots", "stages", "cross_memory" or "direct"."""
    if call.p == 1:
        return 0.0
    if call.algorithm == "shared_memory":
        known = {int(key.split()[1]): line for key, line in table.memory.items() if key.split()[0] == way}
        if not known:
            return None
        line = known[min(known, key=lambda ranks: abs(ranks - call.p))]
        share = 1.0 if call.kind == "allreduce" else 0.5  # of reading and writing all
        return line.alpha + share * line.beta * call.nbytes
    far, near = (LinkCost(line.alpha, line.beta) for line in (table.far, table.near))
    try:
        return simulate_on_job(call.kind, call.algorithm, call.nbytes, call.p, nodes, Costs(far, near, table.gamma))
    except ValueError:  # native, and nodes of unlike size
        return None


def simulate_on_job(kind: str, algorithm: str, nbytes: int, p: int, nodes: int, costs: Costs) -> float:
    """Return seconds of a call in a job of p ranks on `nodes` equal nodes.

    Its schedule is simulated on one switch between the nodes, each with one wire (costs.far), and memory inside them
    (costs.near). ValueError as `catalog.build`, and where p is no multiple of nodes.
    """
    if p % nodes:
        raise ValueError(f"{p} ranks on {nodes} nodes: every node must hold the same number of them")
    local = {"local": p // nodes} if parse(algorithm)[0] == "hierarchical" else {}
    schedule = build(kind, algorithm, p, **local)
    network = star(nodes, 1 / costs.far.beta if costs.far.beta else float("inf"))
    return simulate(schedule, network, nbytes, costs.far.alpha, costs.gamma, costs.near).seconds
