"""Plans of both directions: exact within their family, never worse than two separate optima."""

from __future__ import annotations

from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpips.overlap import PARTITIONS, JointPlan, Problem, joint, makespan, timeline
from mpips.overlap.problem import Link

from .problems import check_cover, partitions, random_problem

LINKS: tuple[Link, ...] = ("shared", "duplex")


def enumerated(push: Problem, pull: Problem, link: Link) -> float:
    """The least time over every push partition, every number of early groups and every partition of the rest."""
    best = np.inf
    for groups in partitions(push.layers):
        for early in range(len(groups) + 1):
            rest = groups[-early][0] - 1 if early else push.layers
            for later in partitions(rest):
                best = min(best, timeline.end(timeline.both(push, pull, JointPlan(groups, early, later), link)))
    return best


def is_no_worse(push: Problem, pull: Problem, plan: JointPlan, link: Link) -> None:
    """The plan takes no longer than two separate optima."""
    separate = makespan(push, PARTITIONS["optimal"](push)) + makespan(pull, PARTITIONS["optimal"](pull))
    assert timeline.end(timeline.both(push, pull, plan, link)) <= separate * (1 + 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("link", LINKS)
def test_equals_enumeration(link: Link) -> None:
    rng = np.random.default_rng(7)
    for _ in range(60):
        layers = int(rng.integers(1, 6))
        push, pull = random_problem(rng, layers), random_problem(rng, layers)
        plan = joint.plan(push, pull, link)
        found = timeline.end(timeline.both(push, pull, plan, link))
        assert found == pytest.approx(enumerated(push, pull, link), rel=1e-9)


@pytest.mark.parametrize("link", LINKS)
def test_messages_without_startup_and_layers_without_compute(link: Link) -> None:
    rng = np.random.default_rng(5)
    for _ in range(300):
        layers = int(rng.integers(1, 8))
        push, pull = random_problem(rng, layers), random_problem(rng, layers)
        push = push._replace(startup=0.0, compute=push.compute * rng.choice([0.0, 1.0], layers))
        is_no_worse(push, pull, joint.plan(push, pull, link), link)


@given(st.integers(0, 2**32 - 1), st.integers(1, 60), st.sampled_from(LINKS))
@settings(max_examples=60)
def test_never_worse_than_two_separate_optima(seed: int, layers: int, link: Link) -> None:
    rng = np.random.default_rng(seed)
    push, pull = random_problem(rng, layers), random_problem(rng, layers)
    plan = joint.plan(push, pull, link)
    check_cover(plan.push, layers)
    if plan.pull:
        check_cover(plan.pull, plan.first_early_layer - 1)
    is_no_worse(push, pull, plan, link)


def test_in_order_plans_add_up_whatever_the_link() -> None:
    rng = np.random.default_rng(3)
    push, pull = random_problem(rng, 5), random_problem(rng, 5)
    for first, second, link in product(partitions(5), partitions(5), LINKS):
        end = timeline.end(timeline.both(push, pull, JointPlan(first, 0, second), link))
        assert end == pytest.approx(makespan(push, first) + makespan(pull, second))


@pytest.mark.parametrize("link", LINKS)
def test_tasks_respect_the_job(link: Link) -> None:
    """No layer is pushed before its gradients exist, pulled before it is pushed, computed before it is pulled; no lane
    does two things at once."""
    rng = np.random.default_rng(11)
    for _ in range(50):
        layers = int(rng.integers(1, 15))
        push, pull = random_problem(rng, layers), random_problem(rng, layers)
        tasks = timeline.both(push, pull, joint.plan(push, pull, link), link)
        moments = {(t.kind, layer): t for t in tasks for layer in range(t.first, t.last + 1)}
        slack = 1e-9 * timeline.end(tasks)
        for layer in range(1, layers + 1):
            order = [moments[kind, layer] for kind in ("backward", "push", "pull", "forward")]
            assert all(a.end <= b.start + slack for a, b in pairwise(order))
        for lane in {t.lane for t in tasks}:
            row = sorted((t for t in tasks if t.lane == lane), key=lambda t: (t.start, t.end))
            assert all(a.end <= b.start + slack for a, b in pairwise(row))


def test_problems_of_different_models_are_refused() -> None:
    rng = np.random.default_rng(0)
    with pytest.raises(ValueError, match="push has 3 layers and the pull 4"):
        joint.plan(random_problem(rng, 3), random_problem(rng, 4), "shared")
