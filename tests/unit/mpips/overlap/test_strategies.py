"""Every strategy is a partition; the optimum equals enumeration; the papers' algorithms do what they say."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given

from mpips.overlap import PARTITIONS, Problem, check_groups, makespan
from mpips.overlap.problem import from_ends, message_times
from mpips.overlap.strategies import ibatch

from .problems import partitions, problems, random_problem


def all_makespans(problem: Problem) -> np.ndarray:
    """Of all 2^(L-1) partitions at once, by the push's own recurrence over layers (not by the code under test)."""
    layers = problem.layers
    masks = np.arange(1 << (layers - 1))
    ready = np.cumsum(problem.compute[::-1])[::-1]
    end, gathered = np.zeros(len(masks)), np.zeros(len(masks))
    for layer in range(layers - 1, -1, -1):
        gathered = gathered + problem.transfer[layer]
        cut = np.ones(len(masks), bool) if layer == 0 else (masks >> (layer - 1) & 1).astype(bool)
        end = np.where(cut, np.maximum(end, ready[layer]) + problem.startup + gathered, end)
        gathered = np.where(cut, 0.0, gathered)
    return end


@pytest.mark.parametrize("layers", range(1, 13))
def test_optimal_equals_enumeration(layers: int) -> None:
    rng = np.random.default_rng(layers)
    for _ in range(300):
        problem = random_problem(rng, layers)
        found = makespan(problem, PARTITIONS["optimal"](problem))
        assert found == pytest.approx(all_makespans(problem).min(), rel=1e-12)


@given(problems(max_layers=120))
def test_strategies_are_partitions_and_never_beat_the_optimum(problem: Problem) -> None:
    least = makespan(problem, PARTITIONS["optimal"](problem))
    for name, partition in PARTITIONS.items():
        groups = check_groups(partition(problem), problem.layers)
        assert makespan(problem, groups) >= least * (1 - 1e-12), name


@given(problems())
def test_strategies_do_not_write_to_the_problem(problem: Problem) -> None:
    before = problem.compute.copy(), problem.transfer.copy()
    for partition in PARTITIONS.values():
        partition(problem)
    np.testing.assert_array_equal(problem.compute, before[0])
    np.testing.assert_array_equal(problem.transfer, before[1])


def test_merged_follows_equation_27_on_a_worked_example() -> None:
    # Layers 1..4 of 1 s backward each are ready at 4, 3, 2, 1; a = 2, transfers 0.5, so alone a message takes 2.5.
    # l = 4: layer 3 is ready at 2, tau_c[4] = 1, 2 - 1 < a: merge. l = 3 (now 4 and 3, 3 s): tau_c = 2, layer 2 ready
    # at 3, 3 - 2 < a: merge. l = 2: tau_c = 3, layer 1 ready at 4, 4 - 3 < a: merge. One group: 4 + 2 + 4 x 0.5 = 8.
    problem = Problem.of([1, 1, 1, 1], 2.0, [0.5] * 4)
    assert PARTITIONS["merged"](problem) == ((1, 4),)
    # A layer 1 of 4 s is ready at 7, after layers 2..4 could be out (3 + 3.5 = 6.5): it is sent by itself.
    patient = Problem.of([4, 1, 1, 1], 2.0, [0.5] * 4)
    assert PARTITIONS["merged"](patient) == ((1, 1), (2, 4))


def test_merged_is_not_always_optimal() -> None:
    """Theorem 1 claims it is: the counterexample found by enumeration stands here for the optimality gap."""
    rng = np.random.default_rng(0)
    found = [random_problem(rng, 6) for _ in range(300)]
    losses = [makespan(p, PARTITIONS["merged"](p)) / all_makespans(p).min() for p in found]
    assert max(losses) > 1.01
    assert np.median(losses) < 1.01


def test_layers_that_hide_are_not_merged() -> None:
    problem = Problem.of([1.0] * 10, 0.1, [0.2] * 10)
    assert PARTITIONS["optimal"](problem) == PARTITIONS["layerwise"](problem) == PARTITIONS["merged"](problem)


def test_startups_that_dominate_merge_everything() -> None:
    problem = Problem.of([0.01] * 10, 5.0, [0.2] * 10)
    assert PARTITIONS["optimal"](problem) == PARTITIONS["merged"](problem) == ((1, 10),)


@given(problems())
def test_ibatch_batches_overlap_as_equation_5_asks_wherever_possible(problem: Problem) -> None:
    """Algorithm 1: a batch after the second could not be shorter and still exceed the compute before it."""
    if problem.layers < 2:
        return
    groups = ibatch.forward(problem)
    times = message_times(problem, groups)
    for k in range(1, len(groups) - 1):
        before = problem.compute[groups[k - 1][0] - 1 : groups[k - 1][1]].sum()
        assert times[k] > before or times[k] == pytest.approx(before)
        first, last = groups[k]
        if last > first:
            shorter = message_times(problem, from_ends([first - 1, last - 1, problem.layers]))[1] if first > 1 else 0
            assert shorter <= before * (1 + 1e-9)


@given(problems())
def test_ibatch_takes_the_better_of_its_two_algorithms(problem: Problem) -> None:
    if problem.layers < 2:
        assert ibatch.partition(problem) == ((1, 1),)
        return
    both = [makespan(problem, check_groups(f(problem), problem.layers)) for f in (ibatch.forward, ibatch.backward)]
    assert makespan(problem, ibatch.partition(problem)) == min(both)


def test_ibatch_time_is_equation_4_where_equation_5_holds() -> None:
    problem = Problem.of([2, 1, 1, 1, 3, 1], 0.5, [0.5, 1.0, 1.5, 2.0, 3.0, 4.0])
    for groups in partitions(problem.layers):
        times = message_times(problem, groups)
        compute = [problem.compute[first - 1 : last].sum() for first, last in groups]
        if all(times[k + 1] > compute[k] for k in range(len(groups) - 1)):
            assert makespan(problem, groups) == pytest.approx(times.sum() + compute[-1])
