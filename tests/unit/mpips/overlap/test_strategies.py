"""One direction: the one makespan of pushes and pulls, the optimum by enumeration, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given

from mpips.overlap import PARTITIONS, Problem, makespan, timeline

from .problems import check_cover, partitions, problems, random_problem


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
    before = problem.compute.copy(), problem.transfer.copy()
    least = makespan(problem, PARTITIONS["optimal"](problem))
    for name, partition in PARTITIONS.items():
        groups = check_cover(partition(problem), problem.layers)
        assert makespan(problem, groups) >= least * (1 - 1e-12), name
    np.testing.assert_array_equal(problem.compute, before[0])  # nothing is written to the problem
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


def test_startups_decide_whether_layers_merge() -> None:
    hidden, dominant = Problem.of([1.0] * 10, 0.1, [0.2] * 10), Problem.of([0.01] * 10, 5.0, [0.2] * 10)
    assert PARTITIONS["optimal"](hidden) == PARTITIONS["layerwise"](hidden) == PARTITIONS["merged"](hidden)
    assert PARTITIONS["optimal"](dominant) == PARTITIONS["merged"](dominant) == ((1, 10),)


@pytest.mark.slow
@given(problems(max_layers=8))
def test_pull_is_the_mirror_of_push(problem: Problem) -> None:
    for groups in partitions(problem.layers):
        pushed, pulled = timeline.push(problem, groups), timeline.pull(problem, groups)
        assert timeline.end(pushed) == pytest.approx(timeline.end(pulled), rel=1e-12)
        assert timeline.end(pushed) == pytest.approx(makespan(problem, groups), rel=1e-12)


@pytest.mark.parametrize("compute, transfer", [([1, 2], [1]), ([], []), ([[1, 2]], [[1, 2]])])
def test_lists_of_different_lengths_are_refused(compute: list[int], transfer: list[int]) -> None:
    with pytest.raises(ValueError, match="give two lists of one length"):
        Problem.of(compute, 0.5, transfer)
