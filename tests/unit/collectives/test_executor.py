"""Calls through shared memory, with the ranks of a node in one process: `collectives.node`."""

from __future__ import annotations

import sys
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays as any_array

from collectives.fabric import arena
from collectives.node import executor, program
from collectives.node.executor import CROSS, SHARED, SLOTS, STAGES, WayLimits
from collectives.node.program import combine
from tests.unit.collectives import node

WAYS = {
    SLOTS: WayLimits(1 << 17, 1 << 17, 1 << 60),
    SHARED: WayLimits(0, 0, 1 << 60),
    CROSS: WayLimits(0, 0, 0),
    STAGES: WayLimits(0, 0, 1 << 60),
}


def given_by(rank: int, n: int, turn: int) -> np.ndarray:
    return np.arange(n) % 1000 + 1000.0 * (rank + 10 * turn + 1)


def ordinary(n: int) -> np.ndarray:
    return np.full(n, -1.0)


def shared(n: int) -> np.ndarray:
    made = arena.empty(n, np.float64)
    made[:] = -1
    return made


class Rank:
    """One rank's allreduce, again and again."""

    def __init__(self, board, n, ways, allocate, p=2):
        self.board, self.x, self.out, self.p = board, allocate(n), allocate(n), p
        self.made = node.executor(board, node.call_of("allreduce", n, p), self.x, self.out, ways)

    def bring(self, turn):
        self.x[:] = given_by(self.board.rank, self.x.size, turn)

    def see(self, turn):
        """AssertionError unless `out` holds the sum."""
        assert np.array_equal(self.out, sum(given_by(rank, self.x.size, turn) for rank in range(self.p)))


def turns(rank):
    for turn in range(2):
        rank.bring(turn)
        node.run(rank.board, rank.made)
        rank.see(turn)


@pytest.mark.parametrize("who", [(0,), (1, 2), (0, 1, 2)])
def test_arrays_that_nobody_can_reach_go_through_stages(monkeypatch, who):
    boards = node.boards(3, reachable=True)
    ranks = []
    for board in boards:
        if board.rank in who:  # as memory of a device is
            monkeypatch.setattr(executor, "reachable_address", lambda array, written=False: 0)
        ranks.append(Rank(board, 300_001, WAYS[CROSS], ordinary, 3))
        ranks[-1].made._publish()  # the descriptor says where the arrays are
        monkeypatch.undo()
    assert node.together(*(partial(turns, rank) for rank in ranks)) == [None] * 3


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning", "ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("op", ["sum", "mean"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@given(data=st.data())
def test_a_few_numbers_are_added_as_numpy_adds_them(op, dtype, data):
    """By the fast path: the other ranks have come, and this one is the last."""
    p, n = data.draw(st.integers(2, 9)), data.draw(st.integers(1, program.MOST_SCALARS))
    values = st.floats(width=8 * np.dtype(dtype).itemsize, allow_nan=False)
    call = node.call_of("allreduce", n, p, dtype, op)
    parts = [np.zeros(n, dtype) for _ in range(p)]
    ours, theirs = np.empty(n, dtype), np.empty(n, dtype)
    made = [
        node.executor(board, call, part, ours if board.rank == 0 else None, WAYS[SLOTS])
        for board, part in zip(node.boards(p), parts)
    ]
    node.in_turn(made)
    for _ in range(2):
        for part in parts:
            part[:] = data.draw(any_array(dtype, n, elements=values))
        for function, arguments in combine(call, [part.copy() for part in parts], theirs, theirs):
            function(*arguments)
        for other in made[1:]:
            next(other.steps())
        assert made[0].fast() == executor.DONE
        assert np.array_equal(ours, theirs, equal_nan=True)
        assert (np.signbit(ours) == np.signbit(theirs))[~np.isnan(ours)].all()
        for other in made[1:]:
            list(other.rest())


@pytest.mark.parametrize(
    ("kind", "op", "dtype", "n"),
    [
        ("allreduce", "max", "f4", 1),
        ("allreduce", "sum", "f2", 1),
        ("allreduce", "sum", "i8", 1),
        ("allreduce", "sum", "f4", program.MOST_SCALARS + 1),
        ("allreduce", "sum", "f4", 0),
        ("reduce", "sum", "f4", 1),
    ],
)
def test_what_python_would_not_add_in_the_same_way_is_left_to_numpy(kind, op, dtype, n):
    board = node.boards(2)[0]
    made = node.executor(board, node.call_of(kind, n, 2, dtype, op), np.zeros(n, dtype))
    assert program.slot_scalars(board.memory, *made._parts[0][:3]) is None


def test_numbers_that_are_not_aligned_are_left_to_numpy():
    board = node.boards(2)[0]
    x = np.zeros(9, np.uint8)[1:].view("f4")
    part = node.executor(board, node.call_of("allreduce", 2, 2, "f4"), x)._parts[0]
    assert program.slot_scalars(board.memory, *part[:3]) is None


class Interrupt:
    """KeyboardInterrupt at the line, or bytecode, of a function that is passed as the `at`th."""

    def __init__(self, code, at):
        self.code, self.at, self.passed = code, at, 0

    def __call__(self, frame, event, argument):
        if frame.f_code is not self.code:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self.count

    def count(self, frame, event, argument):
        if event == "opcode":
            self.passed += 1
            if self.passed == self.at:
                raise KeyboardInterrupt
        return self.count


@pytest.mark.slow
@pytest.mark.parametrize("case", ["scalars", "slots", "shared", "stages"])
def test_an_interrupt_at_any_bytecode_of_a_short_way_ends_the_generation_for_all(case):
    """Rank 0 is interrupted; rank 1 raises too, unless it has ended the operation, with the right sum."""
    n, ways, allocate = {
        "scalars": (2, WAYS[SLOTS], ordinary),
        "slots": (9, WAYS[SLOTS], ordinary),
        "shared": (9, WAYS[SHARED], shared),
        "stages": (9, WAYS[STAGES], ordinary),
    }[case]
    for at in range(1, 1000):
        boards = node.boards(2)
        ranks = [Rank(board, n, ways, allocate) for board in boards]
        assert node.together(*(partial(turns, rank) for rank in ranks)) == [None] * 2
        told = node.together(partial(interrupted, ranks[0], at), partial(goes_on, ranks[1]))
        if told[0] is None:
            assert at > 30 and told[1] == 3
            return
        assert str(told[0]) == "rank 0 was interrupted"
        assert told[1] in (2, 3) or str(told[1]) == "rank 0 was interrupted", at
        if told[1] in (2, 3):
            with pytest.raises(Exception, match="rank 0 was interrupted"):
                boards[1].look_at_all()
    raise AssertionError("never through")


def interrupted(rank, at):
    """The third operation, interrupted; ends the generation as a communicator does."""
    rank.bring(2)
    sys.settrace(Interrupt(rank.made.fast.__code__, at))
    try:
        node.run(rank.board, rank.made)
    except KeyboardInterrupt as error:
        sys.settrace(None)
        return rank.board.end(error, "rank 0 was interrupted")
    finally:
        sys.settrace(None)
    return None


def goes_on(rank):
    """How many operations it has done."""
    rank.bring(2)
    try:
        node.run(rank.board, rank.made)
    except RuntimeError as error:
        return rank.board.end(error, str(error))
    rank.see(2)
    return 3
