"""Tasks side by side: all run to their end, or the first failure is raised at once and the others are closed."""

from __future__ import annotations

from collections.abc import Generator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from collectives.fabric.tasks import run_together


def task(number: int, steps: int, ended: list[int]) -> Generator[bool, None, None]:
    for _ in range(steps):
        yield True
    ended.append(number)


@pytest.mark.slow
@given(st.lists(st.integers(0, 5), max_size=6))
def test_all_run_to_their_end(plan):
    ended: list[int] = []
    list(run_together([task(number, steps, ended) for number, steps in enumerate(plan)]))
    assert sorted(ended) == list(range(len(plan)))


@given(st.lists(st.integers(0, 5), max_size=6), st.integers(1, 4))
def test_so_many_at_a_time(plan, most):
    ended: list[int] = []
    begun: list[int] = []

    def counted(number: int, steps: int) -> Generator[bool, None, None]:
        begun.append(number)
        yield from task(number, steps, ended)

    for _ in run_together([counted(number, steps) for number, steps in enumerate(plan)], most):
        assert len(begun) - len(ended) <= most
    assert begun == sorted(begun) and sorted(ended) == list(range(len(plan)))


def endless(number: int, closed: list[int]) -> Generator[bool, None, None]:
    try:
        while True:
            yield False
    finally:
        closed.append(number)


def test_the_first_failure_closes_the_others():
    def fails() -> Generator[bool, None, None]:
        yield True
        raise RuntimeError("broken pipe")

    closed: list[int] = []
    with pytest.raises(RuntimeError, match="broken pipe"):
        list(run_together([endless(0, closed), fails(), endless(2, closed)]))
    assert sorted(closed) == [0, 2]


def test_what_is_given_up_is_closed():
    closed: list[int] = []
    running = run_together([endless(0, closed), endless(1, closed)])
    next(running)
    running.close()
    assert closed == [0, 1]
