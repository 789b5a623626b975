"""Simulates a synchronous push and pull of a store: the least time that the links allow.

Every worker and server has a host of its own. `examples.reproduce.flows` simulates the messages. Nothing here runs MPI.

The exchange is cut into chunks, and a worker has `in_flight` of them under way. For each chunk:

    masters="one"  The client reduces to its first worker, the master. The master pushes to every server its part. A
                   server answers when it has the parts of all clients. The master broadcasts inside the client.
    masters="all"  The client runs a reduce-scatter. Every worker pushes its slice to every server and gets the answers.
                   The client runs an allgather.

With as many clients as workers, both are dist_sync. Without servers, only the collectives remain.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from collectives.schedule import catalog
from collectives.schedule.model import NOBODY
from collectives.simulator.topology import Topology, star
from examples.reproduce.flows import Traffic, run_flows


class Exchange(NamedTuple):
    """The time of an exchange, in seconds. `bound` is that of the fullest link alone: its bytes over its rate."""

    seconds: float
    bound: float


def exchange(
    nbytes: float,
    workers: int,
    servers: int,
    clients: int,
    masters: str = "one",
    rate: float = 12.5e6,
    chunks: int = 1,
    in_flight: int = 4,
    inside: str = "direct",
    alpha: float = 0.0,
    topology: Topology | None = None,
) -> Exchange:
    """Simulate one synchronisation.

    Args:
        nbytes: Bytes of a worker's gradient.
        workers: Number of workers, which are the first hosts.
        servers: Number of servers, which are the next hosts.
        clients: Number of clients into which the workers are divided. It must divide their number.
        masters: "one" or "all", see the module.
        rate: Bytes a second of each link of a star, if no topology is given.
        chunks: Chunks into which the exchange is cut.
        in_flight: Chunks that a worker has under way.
        inside: The catalogue's algorithm for the collectives of a client. "ring" replaces it for those that it lacks.
        alpha: Seconds that each message takes to start.
        topology: The network. Default: a star.

    Raises:
        ValueError: If the clients are not equal or a name is unknown.
    """
    if workers % clients or masters not in ("one", "all"):
        raise ValueError(f"clients={clients} must divide workers={workers}, and masters={masters!r} must be one or all")
    network = topology or star(workers + servers, rate)
    members = workers // clients
    rooms = [list(range(c * members, (c + 1) * members)) for c in range(clients)]
    post = list(range(workers, workers + servers))
    traffic = Traffic()
    done: list[list[list[int]]] = [[[] for _ in range(workers)] for _ in range(in_flight)]
    chunk = _Chunk(traffic, rooms, post, nbytes / chunks, inside, alpha)
    for number in range(chunks):
        begin = done[number % in_flight]
        done[number % in_flight] = chunk.one(begin) if masters == "one" else chunk.all(begin)
    return Exchange(float(run_flows(traffic.flows, network).max(initial=0.0)), _bound(traffic, network))


class _Chunk(NamedTuple):
    """Adds the flows of one chunk after another to the traffic.

    `begin` and the results have, for each worker, the flows that the worker has to wait for.
    """

    traffic: Traffic
    rooms: list[list[int]]
    servers: list[int]
    nbytes: float
    inside: str
    alpha: float

    def one(self, begin: list[list[int]]) -> list[list[int]]:
        reduced = self._collective("reduce", begin)
        answers = self._served([(room[0],) for room in self.rooms], reduced, self.nbytes)
        return self._collective("broadcast", [answers.get(w, begin[w]) for w in range(len(begin))])

    def all(self, begin: list[list[int]]) -> list[list[int]]:
        scattered = self._collective("reduce_scatter", begin)
        answers = self._served(self.rooms, scattered, self.nbytes / len(self.rooms[0]))
        return self._collective("allgather", [answers[w] for w in range(len(begin))])

    def _collective(self, kind: str, begin: list[list[int]]) -> list[list[int]]:
        algorithm = self.inside if self.inside in catalog.names(kind) else "ring"
        end = list(begin)
        for room in self.rooms:
            schedule = catalog.build(kind, algorithm, len(room))
            found = self.traffic.collective(schedule, self.nbytes, room, [begin[w] for w in room], self.alpha)
            for worker, flows in zip(room, found):
                end[worker] = flows
        return end

    def _served(self, masters: list, ready: list[list[int]], slice_bytes: float) -> dict[int, list[int]]:
        """Add the pushes to the servers and the servers' answers. Return worker -> the answers that it waits for.

        Member i of every client pushes its slice, cut evenly over the servers. A server answers all these members when
        it has received a part from each of them.
        """
        if not self.servers:
            return {worker: ready[worker] for owners in masters for worker in owners}
        answers: dict[int, list[int]] = {}
        part = slice_bytes / len(self.servers)
        for owners in zip(*masters):
            for server in self.servers:
                pushed = [self.traffic.add(w, server, part, ready[w], self.alpha) for w in owners]
                for worker in owners:
                    answer = self.traffic.add(server, worker, part, pushed, self.alpha)
                    answers.setdefault(worker, []).append(answer)
        return answers


def _bound(traffic: Traffic, network: Topology) -> float:
    source, target = (np.array([flow[end] for flow in traffic.flows], dtype=np.int64) for end in (0, 1))
    nbytes = np.array([flow.nbytes for flow in traffic.flows])
    load = np.zeros(len(network.link_rates))
    for link in network.route(source, target):
        used = np.flatnonzero(link != NOBODY)
        np.add.at(load, link[used], nbytes[used])
    return float((load / network.link_rates).max(initial=0.0))
