"""The reproduction of tensor allreduces without a lab: its models, and what they say about the paper's factors."""

from __future__ import annotations

import pytest

from examples.reproduce.tensor import __main__ as tensor
from examples.reproduce.tensor.model import MODELS, Memory, Network, piped, staged

FREE = Memory(0.0, 0.0, 0.0)
MEMORY = Memory(4e-10, 4e-10, 2e-10)
MIB = 1 << 20


@pytest.mark.parametrize("p", tensor.HOSTS)
def test_without_latency_and_memory_rings_take_the_bound(p: int) -> None:
    net = Network(p, 25e6, 0.0)
    bound = 2 * (p - 1) / p * 16 * MIB / net.rate
    for name in ("multi_ring", "host_ring"):
        assert MODELS[name](net, 16 * MIB, 2, FREE) == pytest.approx(bound, rel=1e-6)
    assert MODELS["vector_ring"](net, 16 * MIB, 2, FREE) == pytest.approx(bound * (2 * p - 1) / (2 * p - 2), rel=1e-6)


def test_a_tree_takes_longer_than_a_ring_and_a_pipe_of_rings_as_long() -> None:
    net = Network(8, 25e6, 0.0)
    ring = MODELS["multi_ring"](net, 16 * MIB, 2, FREE)
    assert piped(net, 16 * MIB, FREE, "ring") == pytest.approx(ring, rel=0.02)
    assert 2 * ring < piped(net, 16 * MIB, FREE, "binomial") <= staged(net, 16 * MIB, FREE, "binomial")


def test_a_long_pipe_goes_on_as_it_began() -> None:
    net = Network(4, 25e6, 1e-4)
    some, more = (piped(net, n * MIB, MEMORY, "binomial") for n in (10, 20))
    assert piped(net, 30 * MIB, MEMORY, "binomial") - more == pytest.approx(more - some, rel=0.02)


def test_hiding_reductions_counts_on_fast_links_only() -> None:
    slow, fast = (Network(8, rate, 0.0) for rate in (25e6, tensor.PAPER_RATE))
    gain = [MODELS["host_ring"](net, 64 * MIB, 2, MEMORY) / MODELS["multi_ring"](net, 64 * MIB, 2, MEMORY)
            for net in (slow, fast)]  # fmt: skip
    assert gain[0] < 1.05 < 1.5 < gain[1]
