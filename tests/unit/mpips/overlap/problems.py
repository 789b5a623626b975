"""Random problems and every partition of them, for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from hypothesis import strategies as st

from mpips.overlap import Problem, Profile, RingNetwork, create_profile
from mpips.overlap.problem import Groups, from_ends


def partitions(layers: int) -> Iterator[Groups]:
    """All 2^(layers - 1) partitions; the empty one for no layers."""
    if layers == 0:
        yield ()
        return
    for mask in range(1 << (layers - 1)):
        yield from_ends([i + 1 for i in range(layers - 1) if mask >> i & 1] + [layers])


def check_cover(groups: Groups, layers: int) -> Groups:
    """Return the groups. They must be contiguous, in order, and cover 1..layers."""
    assert [layer for first, last in groups for layer in range(first, last + 1)] == list(range(1, layers + 1)), groups
    assert all(first <= last for first, last in groups), groups
    return groups


def random_problem(rng: np.random.Generator, layers: int) -> Problem:
    """All regimes: messages and startups from negligible to dominant, sometimes exactly nothing or all alike."""
    compute, transfer = rng.exponential(size=layers), rng.exponential(size=layers) * 10 ** rng.uniform(-2, 1)
    startup = rng.choice([0.0, 10 ** rng.uniform(-3, 1)])
    if rng.random() < 0.1:
        compute, transfer = np.ceil(compute), np.ceil(transfer)
    if rng.random() < 0.05:
        compute[rng.integers(layers)] = 0.0
    return Problem.of(compute, startup, transfer)


@st.composite
def problems(draw: st.DrawFn, max_layers: int = 40) -> Problem:
    layers = draw(st.integers(1, max_layers))
    return random_problem(np.random.default_rng(draw(st.integers(0, 2**32 - 1))), layers)


def random_profile(seed: int, layers: int) -> Profile:
    rng = np.random.default_rng(seed)
    return create_profile(
        [f"layer{i}" for i in range(1, layers + 1)],
        rng.integers(1, 10**6, layers).tolist(),
        rng.exponential(1e-3, layers).tolist(),
        rng.exponential(2e-3, layers).tolist(),
        RingNetwork(1e-5 * 10 ** rng.uniform(0, 1), 1e-9, 1e-10),
        float(rng.exponential(1e-3)),
        float(10 ** rng.uniform(8, 10)),
    )
