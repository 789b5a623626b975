"""How long allreduces of tensors should take: the wire played message by message, the worker's memory beside it. Pure.

Every worker has k vectors of n bytes. `Memory` says what a byte of n costs the worker: to reduce its vectors into host
memory, to spread the result to them, to add what came in to what it holds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from collectives.simulator.topology import star
from examples.reproduce.flows import Traffic, play_flows, run_flows
from examples.reproduce.native import schedule


class Memory(NamedTuple):
    """Seconds a byte."""

    gather: float
    spread: float
    add: float


class Network(NamedTuple):
    """p hosts on one switch; rate in payload bytes a second, alpha in seconds a message."""

    p: int
    rate: float
    alpha: float


BLOCKING = "reg, blocking"
RINGS = 2
PART_BYTES = 1 << 20
"""Of `reg`."""
EXACT = (6, 10)
"""Parts of a pipeline that are played; a longer one goes on as from the first number to the second."""


def multi_ring(net: Network, nbytes: int, vectors: int, memory: Memory) -> float:
    """Reductions hide behind messages, but for the first chunk of a ring and the last (section 6.3.2, figure 9)."""
    chunk = nbytes / (RINGS * net.p)
    return chunk * (memory.gather + memory.spread) + _wire(net, f"multi_ring(rings={RINGS})", nbytes, memory.add)


def host_ring(net: Network, nbytes: int, vectors: int, memory: Memory) -> float:
    """One after the other: reduce to the host, ring, spread (section 7.3 c)."""
    return staged(net, nbytes, memory, "ring")


def vector_ring(net: Network, nbytes: int, vectors: int, memory: Memory) -> float:
    """A ring of pk members: 2 (pk - 1) steps, each a message of n / pk, a copy before it and an addition after it."""
    members = net.p * vectors
    chunk = nbytes / members
    return 2 * (members - 1) * (net.alpha + chunk / net.rate + chunk * 2 * memory.add)


def staged(net: Network, nbytes: int, memory: Memory, algorithm: str) -> float:
    """reg with the MPI's blocking call: reduce, allreduce by `algorithm`, spread."""
    return nbytes * (memory.gather + memory.spread) + _wire(net, algorithm, nbytes, memory.add)


def piped(net: Network, nbytes: int, memory: Memory, algorithm: str) -> float:
    """reg with the non-blocking call (section 7.3 d): parts of 1 MiB, two of them between the hosts at a time."""
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
