"""A simulator of mixed traffic: flows that wait for each other and share links max-min fairly.

A flow starts `delay` seconds after all the flows in `after` have ended. Active flows share the links max-min fairly:
all rates grow together until a link is full. The flows over that link keep their rate, and the others grow further
(Bertsekas and Gallager, "Data Networks", section 6.5.2). Flows between the same two hosts run one after another, in
the order in which they may start, like messages on one connection. `run_flows` advances from one start or end of a
flow to the next.

`collectives.simulator.simulate` is hundreds of times faster, but it can only run one schedule. Here many collectives
and exchanges with servers overlap.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from collectives.schedule.model import NOBODY, Schedule, ScheduleStep
from collectives.simulator.topology import Topology


class Flow(NamedTuple):
    """A transfer of `nbytes` between two hosts. From a host to itself it takes no time except the delay."""

    source: int
    target: int
    nbytes: float
    after: tuple[int, ...] = ()
    delay: float = 0.0


class Traffic:
    """A list of flows under construction. The number of a flow is its index."""

    def __init__(self) -> None:
        self.flows: list[Flow] = []

    def add(self, source: int, target: int, nbytes: float, after: Sequence[int] = (), delay: float = 0.0) -> int:
        """Add a flow, and return its number."""
        self.flows.append(Flow(source, target, nbytes, tuple(after), delay))
        return len(self.flows) - 1

    def collective(
        self,
        schedule: Schedule,
        nbytes: float,
        hosts: Sequence[int],
        after: Sequence[Sequence[int]] | None = None,
        alpha: float = 0.0,
        gamma: float = 0.0,
    ) -> list[list[int]]:
        """Add a collective over ranks on `hosts`. Rank r begins when the flows in after[r] have ended.

        A rank sends when its own last step is done, even if the receiver is not ready: the receiver buffers.

        Args:
            nbytes: Bytes of each rank's vector.
            hosts: The host of each rank.
            alpha: Seconds that each message takes to start.
            gamma: Seconds to add a byte.

        Returns:
            For each rank, the flows that have to end before the rank is done.
        """
        p, lanes = schedule.p, range(len(schedule.lanes))
        begin = [list(flows) for flows in after] if after else [[] for _ in hosts]
        busy = _Busy(hosts, [[] for _ in hosts], [[] for _ in hosts], len({lane.turn for lane in schedule.lanes}) > 1)
        shares = [nbytes / len(lanes) / schedule.lanes[lane].chunks for lane in lanes]
        waits = [begin for _ in lanes]
        for steps in zip(*(schedule.steps(lane, np.arange(p)) for lane in lanes)):
            for lane, step in enumerate(steps):
                waits[lane] = self._step(step, shares[lane], waits[lane], busy, alpha, gamma)
        return [[flow for wait in waits for flow in wait[rank]] for rank in range(p)]

    def _step(
        self, step: ScheduleStep, chunk: float, wait: list[list[int]], busy: _Busy, alpha: float, gamma: float
    ) -> list[list[int]]:
        """Add one step of one lane. Return, for each rank, the flows that its next step of the lane waits for."""
        p = len(busy.hosts)
        touched: list[list[int]] = [[] for _ in range(p)]
        summed = [0.0] * p
        for number, r in enumerate(step):
            r = r.over(p)
            for source in np.flatnonzero(r.send_to != NOBODY).tolist():
                target = int(r.send_to[source])
                size = chunk * float(r.send.stop[source] - r.send.start[source])
                after = wait[source] + busy.wire[source] if busy.in_turn else wait[source]
                flow = self.add(busy.hosts[source], busy.hosts[target], size, after, alpha * (number + 1))
                touched[source].append(flow)
                touched[target].append(flow)
                busy.wire[source] = [flow]
                summed[target] += size if r.add else 0.0
        for rank in range(p):
            if gamma * summed[rank] > 0:
                host, after = busy.hosts[rank], touched[rank] + busy.processor[rank]
                touched[rank] = busy.processor[rank] = [self.add(host, host, 0.0, after, gamma * summed[rank])]
        return [flows or waiting for flows, waiting in zip(touched, wait)]


class _Busy(NamedTuple):
    """The last flows of each rank so far, while the flows of a collective are created."""

    # rank -> host
    hosts: Sequence[int]
    # rank -> the last flow that it sends, and the last flow that stands for its additions
    wire: list[list[int]]
    processor: list[list[int]]
    # True if the lanes of the schedule take turns, so that a rank sends one flow at a time
    in_turn: bool


def play_flows(schedule: Schedule, topology: Topology, nbytes: float, alpha: float = 0.0, gamma: float = 0.0) -> float:
    """Simulate one collective message by message, with one rank on each host. Return its seconds.

    Unlike in `simulate`, ranks that are ready early send early, and take their share of the links. This is for tens of
    ranks: the run time grows with the square of the number of messages.
    """
    traffic = Traffic()
    traffic.collective(schedule, nbytes, range(schedule.p), alpha=alpha, gamma=gamma)
    return float(run_flows(traffic.flows, topology).max(initial=0.0)) if traffic.flows else 0.0


def run_flows(flows: Sequence[Flow], topology: Topology) -> NDArray[np.float64]:
    """Return the time at which each flow ends, in seconds. Raise ValueError if flows wait for each other in a cycle."""
    network = _Network(flows, topology)
    ends = np.full(len(flows), np.inf)
    left = np.array([flow.nbytes for flow in flows], dtype=np.float64)
    line = _Line(flows)
    active: list[int] = []
    now = 0.0
    while line.starts or active:
        rates = network.rates(active)
        ending = now + np.min(left[active] / rates, initial=np.inf)
        then = min(ending, line.starts[0][0]) if line.starts else ending
        left[active] -= rates * (then - now)
        now = then
        done = [number for number in active if left[number] <= 1e-9 * flows[number].nbytes]
        active = [number for number in active if left[number] > 1e-9 * flows[number].nbytes]
        for number in line.ready(now, done):
            local = flows[number].nbytes == 0 or flows[number].source == flows[number].target
            (done if local else active).append(number)
        for number in done:
            ends[number] = now
            line.ended(number, now)
    if np.isinf(ends).any():
        raise ValueError(f"flows wait for each other in a circle: {np.flatnonzero(np.isinf(ends))[:10].tolist()}")
    return ends


class _Line:
    """Decides when flows start.

    A flow starts when all flows that it waits for have ended, its delay is over, and its connection is free.
    """

    def __init__(self, flows: Sequence[Flow]):
        self.flows = flows
        # number of flows that each flow still waits for
        self.waiting = [len(set(flow.after)) for flow in flows]
        # the flows that wait for each flow
        self.followers: list[list[int]] = [[] for _ in flows]
        for number, flow in enumerate(flows):
            for before in set(flow.after):
                self.followers[before].append(number)
        # heap of (time, flow) for flows that wait only for their delay
        self.starts = [(flow.delay, number) for number, flow in enumerate(flows) if not self.waiting[number]]
        heapq.heapify(self.starts)
        # (source, target) -> flows of this connection, the active one first
        self.connection: dict[tuple[int, int], deque[int]] = {}

    def ready(self, now: float, done: Sequence[int]) -> list[int]:
        """Return the flows that start now. The flows in `done` have just ended and free their connections."""
        begin = []
        for number in done:
            queue = self.connection[self.flows[number][:2]]
            queue.popleft()
            if queue:
                begin.append(queue[0])
        while self.starts and self.starts[0][0] <= now:
            number = heapq.heappop(self.starts)[1]
            source, target = self.flows[number][:2]
            if source == target or self.flows[number].nbytes == 0:
                begin.append(number)
                continue
            queue = self.connection.setdefault((source, target), deque())
            queue.append(number)
            if len(queue) == 1:
                begin.append(number)
        return begin

    def ended(self, number: int, now: float) -> None:
        """Tell the flows that wait for this one that it has ended."""
        for follower in self.followers[number]:
            self.waiting[follower] -= 1
            if not self.waiting[follower]:
                heapq.heappush(self.starts, (now + self.flows[follower].delay, follower))


class _Network:
    """The links that the flows use, and their max-min fair rates."""

    def __init__(self, flows: Sequence[Flow], topology: Topology):
        source, target = (np.array([flow[i] for flow in flows], dtype=np.int64) for i in (0, 1))
        route = np.stack(np.broadcast_arrays(*topology.route(source, target)))
        used, place = np.unique(route, return_inverse=True)
        self.route = place.reshape(route.shape)
        self.capacity = np.where(used == NOBODY, np.inf, topology.link_rates[used])

    def rates(self, active: Sequence[int]) -> NDArray[np.float64]:
        """Return the rate of each active flow, in bytes a second."""
        route = self.route[:, active]
        rate, open_ = np.zeros(len(active)), np.ones(len(active), dtype=bool)
        room = self.capacity.copy()
        while open_.any():
            count = np.bincount(route[:, open_].ravel(), minlength=len(room))
            share = np.divide(room, count, out=np.full(len(room), np.inf), where=count > 0)
            least = share.min()
            full = share <= least * (1 + 1e-12)
            held = open_ & full[route].any(axis=0)
            rate[held] = least
            room -= least * np.bincount(route[:, held].ravel(), minlength=len(room))
            open_ &= ~held
        return rate
