"""A model of the time of tensor allreduces: messages are simulated one by one, and memory costs are added. Pure.

Every worker has k vectors of n bytes. `Memory` has the costs of the worker's memory for each of the n bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from collectives.simulator.topology import star
from examples.reproduce.flows import Traffic, play_flows, run_flows
from examples.reproduce.native import schedule


class Memory(NamedTuple):
    """Costs of a worker's memory, in seconds a byte."""

    # to reduce the vectors into host memory
    gather: float
    # to copy the result to the vectors
    spread: float
    # to add what has been received
    add: float


class Network(NamedTuple):
    """p hosts on one switch, with links of `rate` payload bytes a second. A message takes `alpha` seconds to start."""

    p: int
    rate: float
    alpha: float


BLOCKING = "reg, blocking"
RINGS = 2
# size of a part in the pipeline of `reg`
PART_BYTES = 1 << 20
# Only pipelines of up to EXACT[1] parts are simulated. In a longer one, each further part takes as long as those from
# EXACT[0] to EXACT[1].
EXACT = (6, 10)


def multi_ring(net: Network, nbytes: int, vectors: int, memory: Memory) -> float:
    """Predict multi_ring (section 6.3.2, figure 9).

    Reductions are hidden behind messages, except those of the first and the last chunk of a ring.
    """
    chunk = nbytes / (RINGS * net.p)
    return chunk * (memory.gather + memory.spread) + _wire(net, f"multi_ring(rings={RINGS})", nbytes, memory.add)


def host_ring(net: Network, nbytes: int, vectors: int, memory: Memory) -> float:
    """Predict host_ring (section 7.3 c): reduce to the host, ring, spread, one after another."""
    return staged(net, nbytes, memory, "ring")


def vector_ring(net: Network, nbytes: int, vectors: int, memory: Memory) -> float:
    """Predict vector_ring: a ring of pk members has 2 (pk - 1) steps.

    A step is a copy, a message of n / pk bytes, and an addition.
    """
    members = net.p * vectors
    chunk = nbytes / members
    return 2 * (members - 1) * (net.alpha + chunk / net.rate + chunk * 2 * memory.add)


def staged(net: Network, nbytes: int, memory: Memory, algorithm: str) -> float:
    """Predict reg with the MPI library's blocking call: reduce, allreduce by `algorithm`, spread."""
    return nbytes * (memory.gather + memory.spread) + _wire(net, algorithm, nbytes, memory.add)


def piped(net: Network, nbytes: int, memory: Memory, algorithm: str) -> float:
    """Predict reg with the non-blocking call (section 7.3 d): parts of 1 MiB, two of them on the wire at a time."""
    parts, part = max(1, nbytes // PART_BYTES), min(nbytes, PART_BYTES)
    first, second = EXACT
    ends = part * (memory.gather + memory.spread)
    if parts <= second:
        return ends + _parts(net, algorithm, parts, part, memory.add)
    begin, end = (_parts(net, algorithm, count, part, memory.add) for count in EXACT)
    return ends + end + (parts - second) * (end - begin) / (second - first)


MODELS: dict[str, Callable[[Network, int, int, Memory], float]] = {
    "multi_ring": multi_ring,
    "host_ring": host_ring,
    "vector_ring": vector_ring,
}


def _wire(net: Network, algorithm: str, nbytes: float, gamma: float) -> float:
    return play_flows(schedule(algorithm, net.p), star(net.p, net.rate), nbytes, net.alpha, gamma)


def _parts(net: Network, algorithm: str, parts: int, nbytes: float, gamma: float) -> float:
    traffic, steps = Traffic(), schedule(algorithm, net.p)
    ends: list[list[list[int]]] = []
    for number in range(parts):
        after = ends[number - 2] if number >= 2 else None
        ends.append(traffic.collective(steps, nbytes, range(net.p), after, net.alpha, gamma))
    return float(run_flows(traffic.flows, star(net.p, net.rate)).max(initial=0.0))
