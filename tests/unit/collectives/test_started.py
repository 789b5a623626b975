"""What ranks start and finish later, with the ranks of a node in one process: `collectives.runner`."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from collectives import MismatchError, runner
from collectives.communicator import Communicator
from collectives.runner import Started
from tests.unit.collectives import node

WAYS = (node.Ways(1 << 17, 1 << 17, 1 << 60), node.EVERYTHING_IN_STAGES)


def homes(size):
    for board in node.boards(size):
        home: Any = object.__new__(Communicator)
        home.__dict__.update(
            rank=board.rank, size=size, board=board, generation=board, control=None, over=None, started=[], _kept=[],
            open=True,
        )  # fmt: skip
        yield home


def reduce(home, x, ways):
    made = node.executor(home.board, node.call_of("allreduce", x.size, home.size), x, ways=ways)
    return made, Started("a call", made.steps(), True)


@pytest.mark.parametrize("ways", WAYS)
def test_what_has_been_started_is_carried_out_in_turn(ways):
    def work(home):
        xs = [np.full(50, float(number + home.rank)) for number in range(5)]
        operations = [reduce(home, x, ways)[1] for x in xs]
        for operation in operations:
            runner.begin(home, operation)
        for operation in reversed(operations):
            runner.finish(home, operation)
        assert not home.started
        return [x[7] for x in xs]

    expected = [3.0 * number + 3 for number in range(5)]
    assert node.together(*(partial(work, home) for home in homes(3))) == [expected] * 3


@pytest.mark.parametrize("ways", WAYS)
def test_ranks_may_agree_while_something_is_under_way(ways):
    def work(home):
        x = np.full(50, home.rank + 1.0)
        operation = reduce(home, x, ways)[1]
        runner.begin(home, operation)
        runner.agree(home, "plan of another")
        runner.finish(home, operation)
        runner.agree(home, "and one more")
        return x[0]

    assert node.together(*(partial(work, home) for home in homes(3))) == [6.0] * 3


def test_what_does_not_fit_ends_it_for_all():
    def work(home):
        operation = reduce(home, np.ones(50), WAYS[0])[1]
        runner.begin(home, operation)
        runner.agree(home, f"plan {home.rank}")

    told = node.together(*(partial(work, home) for home in homes(2)))
    assert {type(error) for error in told} == {MismatchError} and str(told[0]) == str(told[1])


def test_no_short_way_is_taken_while_something_is_under_way():
    def work(home):
        made, _ = reduce(home, np.ones(1), WAYS[0])
        node.run(home.board, made)
        assert made.fast() == 0
        operation = reduce(home, np.ones(50), WAYS[1])[1]
        runner.begin(home, operation)
        codes = [made.fast()] if home.started else [1]
        runner.finish(home, operation)
        return [*codes, made.fast()]

    assert node.together(*(partial(work, home) for home in homes(2))) == [[1, 0]] * 2
