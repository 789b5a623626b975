"""Predicts the time of an algorithm on a topology, such as a ring on a fat-tree, by simulation and by formula (`cost`).

The simulation advances the clocks of all ranks step by step. (`schedule.model` explains steps, lanes and turns.) A
message starts when its sender and its receiver have reached the step that the message belongs to. Every message costs
both of them alpha seconds, and a rank pays the alphas of the messages of a lane one after another. The messages of one
step, of all lanes with the same turn, share the links. A message takes as long as the slowest link l on its way, and
that link takes (bytes of all messages on l) / (rate of l). Switches never block, links are full duplex, and relays in a
BCube forward messages without delay.

Then each rank adds the values that it has received in these lanes, which takes gamma seconds a byte. At the same time,
lanes of the next turn may use the wire. Ranks on the same host reach each other through memory, where each rank has an
input and an output with a rate of 1 / near.beta.

The model of shared links is exact if the messages of a step start together, as they do in all symmetric algorithms.
Otherwise the predicted time is too long rather than too short.
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
from mpips.collectives.schedule.model import NOBODY, Schedule, ScheduleStep, parse
from mpips.collectives.simulator.cost import FREE, Costs, LinkCost, closed_form, has_form
from mpips.collectives.simulator.topology import BCube, FatTree, Topology, star

# Imported for types only, because a simulation must run without MPI.
if TYPE_CHECKING:
    from mpips.collectives.call import Call
    from mpips.collectives.tuner.table import TuningTable


@dataclass(frozen=True)
class Prediction:
    """The simulated time of one collective.

    Attributes:
        bytes: The size of the vector.
        seconds: The simulated time.
        closed_form: The time by formula, in seconds. None without a formula, or if the formula assumes other links than
            the topology has.
        busiest_link_bytes: The number of bytes over the link that carries the most bytes.
    """

    topology: str
    collective: str
    algorithm: str
    ranks: int
    bytes: int
    seconds: float
    closed_form: float | None
    busiest_link_bytes: float


def schedule_on(network: Topology, kind: str, algorithm: str, per_host: int = 1) -> Schedule:
    """Return the schedule of an algorithm. Parameters that are not given are taken from the network.

    `bcube` without parameters takes n and k from a BCube. On a fat-tree it uses the slot, edge and pod of a host as its
    digits, in one lane, because a host has one NIC (BML paper, section 3.3). `hierarchical` without `local` uses the
    number of ranks on each host.
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
    """Simulate one collective. Also compute its time by formula (closed form), if the formula applies to the network.

    Args:
        network: The topology.
        kind: The collective, such as "allreduce".
        algorithm: The name of the algorithm, with or without parameters.
        nbytes: The size of the vector in bytes.
        alpha: Seconds that every message between two hosts costs its sender and its receiver, whatever its size. The
            bytes of the message cost extra: their time follows from the rates of the links.
        gamma: Seconds that a rank needs for each received byte that it adds to its own values.
        near: The cost of a message between two ranks on one host: seconds for each message and for each byte.
        per_host: The number of ranks on each host.
        progress: Called during the simulation with the share (0 to 1) that is done.

    Raises:
        ValueError: The algorithm is unknown, or does not fit the collective or the network.
    """
    schedule = schedule_on(network, kind, algorithm, per_host)
    run = simulate(schedule, network, nbytes, alpha, gamma, near, progress=progress)
    form = None
    # Closed forms assume a network that never blocks, and one wire for each rank. The form of bcube assumes that each
    # rank has a wire for each level.
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
    """Simulate figure 5 of the BML paper, and return each prediction with the seconds that the paper's text gives.

    The figure compares the parameter server (`direct`) with BML (`bcube`), on a fat-tree and on a BCube, with 16 and
    with 1,024 servers. TF is the time of all bytes over one link, and N the number of servers. The text gives
    2(N-1)/N TF for both algorithms on a fat-tree (sections 2 and 3.3), 1/k of this time for BML on a BCube (3.2), and
    twice BML's time for the parameter server on a BCube (3.3: "it will double the GST").

    Args:
        nbytes: The size of the vector in bytes.
        rate: The rate of every link, in bytes a second.
    """
    rows = []
    for cube, tree in ((BCube(4, 2, rate), FatTree(4, rate)), (BCube(32, 2, rate), FatTree(16, rate))):
        flat = 2 * (tree.hosts - 1) / tree.hosts * nbytes / rate
        for network, algorithm, paper_seconds in (
            (tree, "direct", flat),
            (tree, "bcube", flat),
            (cube, "direct", 2 * flat / cube.k),
            (cube, "bcube", flat / cube.k),
        ):
            rows.append((predict(network, "allreduce", algorithm, nbytes), paper_seconds))
    return rows


Reals = NDArray[np.float64]
Places = NDArray[np.int64]


@dataclass(frozen=True)
class SimulatedRun:
    """The result of a simulation.

    Attributes:
        seconds: The time at which the last rank is done.
        clocks: The time at which each rank is done, in seconds.
        link_bytes: The number of bytes over each link of the topology.
    """

    seconds: float
    clocks: Reals
    link_bytes: Reals


def simulate(
    schedule: Schedule,
    topology: Topology,
    nbytes: int,
    alpha: float = 0.0,
    gamma: float = 0.0,
    near: LinkCost = FREE,
    itemsize: int = 4,
    progress: Callable[[float], None] | None = None,
) -> SimulatedRun:
    """Simulate a schedule on the hosts of a topology. Each host has p / hosts ranks, numbered host by host.

    Args:
        schedule: The schedule.
        topology: The network with the rates of its links.
        nbytes: The size of the vector in bytes.
        alpha: Seconds that every message between two hosts costs its sender and its receiver, whatever its size. The
            bytes of the message cost extra: their time follows from the rates of the links.
        gamma: Seconds that a rank needs for each received byte that it adds to its own values.
        near: The cost of a message between two ranks on one host: seconds for each message and for each byte.
        itemsize: Bytes of an element. Chunks consist of whole elements.
        progress: Called during the simulation with the share (0 to 1) that is done.

    Raises:
        ValueError: The number of ranks is not a multiple of the number of hosts.
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
    return SimulatedRun(float(clocks.max()), clocks, cluster.carried[: len(topology.link_rates)])


@dataclass
class _LaneClock:
    """The clock of a lane: the byte at which each of its chunks begins, and the time at which each rank is ready."""

    index: int
    turn: int
    offsets: Places
    ready: Reals


class _Message(NamedTuple):
    """All messages of one round: rank source[i] sends nbytes[i] bytes to rank target[i]."""

    source: Places
    target: Places
    nbytes: Places
    add: bool


class _Cluster:
    """The state of a simulation: links, clocks of wires and processors, and the routes between ranks."""

    def __init__(self, schedule: Schedule, topology: Topology, costs: Costs, nbytes: int, itemsize: int):
        p = schedule.p
        self.ranks = np.arange(p)
        self.topology = topology
        self.costs = costs
        # the number of ranks on each host
        self.share = p // topology.hosts
        # The rates of all links: the links of the topology, then an output to memory for each rank, then an input from
        # memory for each rank.
        memory = np.full(2 * p, 1 / costs.near.beta if costs.near.beta else np.inf)
        self.rates = np.concatenate([topology.link_rates, memory])
        # the number of bytes that each link has carried so far
        self.carried = np.zeros(len(self.rates))
        # for each rank, the times until which its processor, its output and its input are busy
        self.processor = np.zeros(p)
        self.wire_out = np.zeros(p)
        self.wire_in = np.zeros(p)
        self.in_turn = len({lane.turn for lane in schedule.lanes}) > 1
        self.routes = _Routes(self._route, limit=64 << 20)
        self.lanes = []
        for i, lane in enumerate(schedule.lanes):
            offsets = np.minimum(nbytes, schedule.offsets(-(-nbytes // itemsize), i) * itemsize)
            self.lanes.append(_LaneClock(i, lane.turn, offsets, np.zeros(p)))

    def play(self, lanes: list[_LaneClock], steps: list[ScheduleStep]) -> None:
        """Advance the clocks by one step of `lanes`, which all have the same turn."""
        load = np.zeros(len(self.rates))
        for lane, step in zip(lanes, steps):
            for message in self._messages(lane, step):
                for link, crossing in self.routes(message):
                    load += np.bincount(link, message.nbytes[crossing], len(load))
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

    def _exchange(self, lane: _LaneClock, step: ScheduleStep, busy: Reals, added: Reals) -> Reals:
        """Return for each rank the time at which it has sent and received all messages of a step of a lane.

        Args:
            lane: The lane.
            step: The step.
            busy: For each link, the time that it takes to carry all messages of this turn.
            added: The number of bytes that each rank must add. This method adds the bytes of this step.
        """
        alphas_out, alphas_in = np.zeros(len(self.ranks)), np.zeros(len(self.ranks))
        done = lane.ready.copy()
        for m in self._messages(lane, step):
            source, target = m.source, m.target
            alpha = np.where(source // self.share == target // self.share, self.costs.near.alpha, self.costs.far.alpha)
            alphas_out[source] += alpha
            alphas_in[target] += alpha
            start = np.maximum(lane.ready[source], lane.ready[target])
            if self.in_turn:
                np.maximum(start, np.maximum(self.wire_out[source], self.wire_in[target]), out=start)
            time = np.zeros(len(source))
            for link, crossing in self.routes(m):
                time[crossing] = np.maximum(time[crossing], busy[link])
            end = start + np.maximum(alphas_out[source], alphas_in[target]) + time
            done[source] = np.maximum(done[source], end)
            done[target] = np.maximum(done[target], end)
            if self.in_turn:
                self.wire_out[source], self.wire_in[target] = end, end
            if m.add:
                added[target] += m.nbytes
        return done

    def _messages(self, lane: _LaneClock, step: ScheduleStep) -> Iterator[_Message]:
        for r in step:
            r = r.over(len(self.ranks))
            source = self.ranks if (r.send_to != NOBODY).all() else np.flatnonzero(r.send_to != NOBODY)
            nbytes = lane.offsets[r.send.stop[source]] - lane.offsets[r.send.start[source]]
            yield _Message(source, r.send_to[source], nbytes, r.add)

    def _route(self, source: Places, target: Places) -> list[tuple[Places, Any]]:
        """Return the routes of several messages: for each hop a pair (links, messages).

        `messages` has the index of each message that crosses a link in this hop, and `links` has that link.
        """
        source_host, target_host = source // self.share, target // self.share
        links = list(self.topology.route(source_host, target_host))
        ways = len(self.topology.link_rates)
        if self.share > 1:
            links += [np.where(source_host == target_host, ways + source, NOBODY)]
            links += [np.where(source_host == target_host, ways + len(self.ranks) + target, NOBODY)]
        hops: list[tuple[Places, Any]] = []
        for link in links:
            crossed = link != NOBODY
            if crossed.all():
                hops.append((link, slice(None)))
            elif crossed.any():
                crossing = np.flatnonzero(crossed)
                hops.append((link[crossing], crossing))
        return hops


class _Routes:
    """A cache of routes, up to `limit` bytes. It saves time because most algorithms repeat a few sets of partners."""

    def __init__(self, find: Callable[[Places, Places], list[tuple[Places, Any]]], limit: int):
        self.find = find
        self.room = limit
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
    """Return the seconds that a call should take, or None if the table has no measurements of its algorithm.

    Args:
        table: The costs of this machine.
        call: The call.
        nodes: The number of nodes of the job.
        way: How a call through shared memory moves data: "slots", "stages", "cross_memory" or "direct".
    """
    if call.p == 1:
        return 0.0
    if call.algorithm == "shared_memory":
        known = {int(key.split()[1]): line for key, line in table.memory.items() if key.split()[0] == way}
        if not known:
            return None
        line = known[min(known, key=lambda ranks: abs(ranks - call.p))]
        # The table has the cost of an allreduce. All other kinds are assumed to read and write half as much.
        share = 1.0 if call.kind == "allreduce" else 0.5
        return line.alpha + share * line.beta * call.nbytes
    far, near = (LinkCost(line.alpha, line.beta) for line in (table.far, table.near))
    try:
        return simulate_on_job(call.kind, call.algorithm, call.nbytes, call.p, nodes, Costs(far, near, table.gamma))
    except ValueError:
        # The call is "native", which has no schedule, or the nodes have different numbers of ranks.
        return None


def simulate_on_job(kind: str, algorithm: str, nbytes: int, p: int, nodes: int, costs: Costs) -> float:
    """Return the simulated seconds of a call in a job of p ranks on `nodes` equal nodes.

    One switch connects the nodes, with one wire to each node (costs.far). Ranks of a node share memory (costs.near).

    Raises:
        ValueError: p is not a multiple of `nodes`, or `catalog.build` refuses the algorithm.
    """
    if p % nodes:
        raise ValueError(f"{p} ranks on {nodes} nodes: every node must hold the same number of them")
    local = {"local": p // nodes} if parse(algorithm)[0] == "hierarchical" else {}
    schedule = build(kind, algorithm, p, **local)
    network = star(nodes, 1 / costs.far.beta if costs.far.beta else float("inf"))
    return simulate(schedule, network, nbytes, costs.far.alpha, costs.gamma, costs.near).seconds
