"""alpha, beta and gamma from measurements."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from collectives.simulator.cost import Costs, LinkCost, closed_form, fit

SIZES = 2.0 ** np.arange(3, 27)
ONE = Costs(LinkCost(1.0, 0.0), LinkCost(0.0, 0.0), 0.0)


@given(alpha=st.floats(1e-7, 1e-3), beta=st.floats(1e-11, 1e-6))
def test_a_fit_finds_the_line_it_was_given(alpha, beta):
    found = fit([(size, alpha + size * beta) for size in SIZES])
    assert found == pytest.approx((alpha, beta), rel=1e-3)


@given(st.integers(0, 23), st.floats(3, 100), st.integers(0, 10**6))
def test_one_bad_point_and_noise_move_it_little(bad, factor, seed):
    noise = 1 + 0.02 * np.random.default_rng(seed).standard_normal(len(SIZES))
    times = (5e-6 + SIZES * 2e-10) * noise
    times[bad] *= factor
    assert fit(list(zip(SIZES, times))) == pytest.approx((5e-6, 2e-10), rel=0.1)


def test_neither_number_is_negative():
    assert fit([(1e6, 1e-3), (2e6, 3e-3)]).alpha == 0
    falling = fit([(8, 2e-6), (1e6, 1e-6)])
    assert falling.beta == 0
    assert 1e-6 <= falling.alpha <= 2e-6


@pytest.mark.parametrize("points", [[], [(8, 1e-6)], [(8, 1e-6), (8, 2e-6)]])
def test_a_fit_needs_two_sizes(points):
    with pytest.raises(ValueError, match="two sizes"):
        fit(points)


def test_mg_wfbp_startup_of_the_ring():
    """Section 7 of the project's facts: 2(N-1) alpha = 90.52, 271.56, 633.64 us at N = 2, 4, 8 on 10GbE."""
    costs = Costs(LinkCost(45.26e-6, 0.0), LinkCost(0.0, 0.0), 0.0)
    found = [closed_form("allreduce", "ring", p, 4e6, costs) for p in (2, 4, 8)]
    assert found == pytest.approx([90.52e-6, 271.56e-6, 633.64e-6])


def test_hierarchical_uses_both_kinds_of_links():
    costs = Costs(far=LinkCost(10.0, 0.0), near=LinkCost(1.0, 0.0), gamma=0.0)
    assert closed_form("allreduce", "hierarchical(local=4,between=halving_doubling)", 16, 1e6, costs) == 2 * 3 + 4 * 10


@pytest.mark.parametrize(("kind", "name"), [("alltoall", "ring"), ("allreduce", "rong")])
def test_what_has_no_closed_form_is_refused(kind, name):
    with pytest.raises(ValueError, match="choose one of"):
        closed_form(kind, name, 4, 1.0, ONE)
