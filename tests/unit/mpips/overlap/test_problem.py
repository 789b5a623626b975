"""The problem of one direction: what is refused, and the one makespan of pushes and pulls."""

from __future__ import annotations

import pytest
from hypothesis import given

from mpips.overlap import Problem, check_groups, makespan, timeline

from .problems import partitions, problems


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


@pytest.mark.parametrize("groups", [((1, 2),), ((2, 3),), ((1, 1), (3, 3)), ((1, 2), (2, 3)), ((1, 4),), ()])
def test_groups_that_do_not_cover_are_refused(groups: tuple[tuple[int, int], ...]) -> None:
    with pytest.raises(ValueError, match="group"):
        check_groups(groups, 3)
