"""Plans by name. Looked at again: another one only where it is worth it, messages measured again only where needed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpips.overlap import STRATEGIES, LinearNetwork, Profile, create_profile, plan, planner, plans
from mpips.overlap.planner import to_execute
from mpips.overlap.problem import Link

LAYERS = 12
LINKS: tuple[Link | None, ...] = (None, "shared", "duplex")


def job(compute_s: float) -> Profile:
    """Equal layers that compute so many seconds each; a startup and a layer's bytes take 4 ms each."""
    times = [compute_s] * LAYERS
    return create_profile(list("abcdefghijkl"), [1000] * LAYERS, times, times, LinearNetwork(4e-3, 1e-6, 4), 4e-3, 1e6)


def test_a_plan_says_its_groups_and_what_they_cost() -> None:
    profile = job(1e-3)
    found = {each.strategy: each for each in plans(profile, direction="both", link="duplex")}
    assert set(found) == set(STRATEGIES)
    assert found["single"].push == found["single"].pull == ((1, LAYERS),)
    assert found["single"].hidden_share == 0.0
    assert found["joint"].iteration_s == min(each.iteration_s for each in found.values())
    with pytest.raises(ValueError, match="strategy 'fast' is unknown; known are single, "):
        plan(profile, "fast")


@pytest.mark.parametrize("link", LINKS)
def test_slower_layers_bring_another_plan(link: Link | None) -> None:
    before, after = job(1e-6), job(1e-2)
    groups = to_execute(before, "auto", link)
    assert len(groups.push) < LAYERS
    measured = before.with_compute(np.full(LAYERS, 1e-2), np.full(LAYERS, 1e-2))
    assert measured == after
    found = planner.better(measured, groups, "auto", link)
    assert len(found.push) > len(groups.push)
    assert planner.predicted_s(measured, found, link) < (1 - planner.GAIN) * planner.predicted_s(measured, groups, link)


@given(st.integers(0, 2**32 - 1), st.sampled_from(LINKS), st.sampled_from(STRATEGIES))
@settings(max_examples=60)
def test_a_plan_never_changes_for_little(seed: int, link: Link | None, strategy: str) -> None:
    rng = np.random.default_rng(seed)
    profile = job(10 ** rng.uniform(-5, -2))
    groups = to_execute(profile, strategy, link)
    noisy = profile.with_compute(rng.uniform(1e-4, 1e-3, LAYERS), rng.uniform(1e-4, 1e-3, LAYERS))
    found = planner.better(noisy, groups, strategy, link)
    saved = planner.predicted_s(noisy, groups, link) - planner.predicted_s(noisy, found, link)
    assert found == groups or saved >= planner.GAIN * planner.predicted_s(noisy, groups, link)


@pytest.mark.parametrize("link", LINKS)
def test_waits_unlike_the_prediction_tell_of_a_drifted_network(link: Link | None) -> None:
    profile = job(1e-3)
    groups = to_execute(profile, "auto", link)
    waited = planner.predicted_s(profile, groups, link) - profile.forward_s - profile.backward_s
    assert not planner.network_drifted(profile, groups, link, waited)
    assert planner.network_drifted(profile, groups, link, 3 * waited + 0.1)
    slower = profile.with_network((5e-2, 1e-6), (5e-2, 1e-6), 4)
    assert planner.network_drifted(slower, groups, link, waited)
