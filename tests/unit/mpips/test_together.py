"""Tasks side by side: all run to their end, and which failure is raised does not depend on time."""

from __future__ import annotations

from collections.abc import Generator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpips.session import together


def task(number: int, steps: int, fails: bool, ended: list[int]) -> Generator[bool, None, None]:
    for _ in range(steps):
        yield True
    ended.append(number)
    if fails:
        raise RuntimeError(f"task {number}")


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=6))
def test_all_run_to_their_end_and_the_first_in_the_list_that_fails_is_raised(plan):
    ended: list[int] = []
    tasks = [task(number, *each, ended) for number, each in enumerate(plan)]
    failing = [number for number, (_, fails) in enumerate(plan) if fails]
    if failing:
        with pytest.raises(RuntimeError, match=f"^task {failing[0]}$"):
            list(together(tasks))
    else:
        list(together(tasks))
    assert sorted(ended) == list(range(len(plan)))


def test_what_is_given_up_is_closed():
    closed = []

    def endless(number: int) -> Generator[bool, None, None]:
        try:
            while True:
                yield False
        finally:
            closed.append(number)

    running = together([endless(0), endless(1)])
    next(running)
    running.close()
    assert closed == [0, 1]
