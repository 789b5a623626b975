"""Calls through shared memory, with the ranks of a node in one process: `collectives.node`."""

from __future__ import annotations

import sys
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays as any_array

from collectives.fabric import arena
from collectives.kernels import engine
from collectives.node import executor, short_cut
from collectives.node.executor import CROSS, SHARED, SLOTS, STAGES, WayLimits
from collectives.node.program import combine, steps_of
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


def compiled(makers):
    """Let the ranks run an operation, and compile what later ones need."""
    node.in_turn(makers)
    engine.load_all()
    kernels = [short_cut.carry_out.prepare(np.dtype(dtype)) for dtype in DTYPES.values()]
    assert not [kernel.failure for kernel in kernels if kernel.failure]


COMPILES = pytest.mark.skipif(engine.status().engine != "numba", reason="Numba is not installed")
DTYPES = {"float32": np.float32, "float64": np.float64, "float16": np.float16}


@COMPILES
@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning", "ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("op", ["sum", "mean"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("memory", ["ordinary", "shared"])
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_a_compiled_call_has_the_bits_of_numpy(op, dtype, in_place, memory, data):
    """By the fast path: the other ranks have come, and this one is the last."""
    p, n = data.draw(st.integers(2, 5)), data.draw(st.integers(1, 40))
    values = st.floats(width=64 if dtype == "float64" else 32, allow_nan=False)
    call = node.call_of("allreduce", n, p, dtype, op)
    make = partial(arena.empty, dtype=DTYPES[dtype]) if memory == "shared" else partial(np.empty, dtype=dtype)
    parts = [make(n) for _ in range(p)]
    outs = parts if in_place else [make(n) for _ in range(p)]
    ways = WAYS[SLOTS] if memory == "ordinary" else WAYS[SHARED]
    made = [
        node.executor(board, call, part, None if in_place else out, ways)
        for board, part, out in zip(node.boards(p), parts, outs)
    ]
    compiled(made)
    for _ in range(2):
        drawn = np.float64 if dtype == "float64" else np.float32
        given = [data.draw(any_array(drawn, n, elements=values)).astype(dtype) for _ in range(p)]
        for part, value in zip(parts, given):
            part[:] = value
        wanted = np.empty(n, dtype)
        for function, arguments in steps_of(combine(call, given, wanted, wanted)):
            function(*arguments)
        assert node.together(*(partial(runs, one) for one in made)) == [None] * p
        for out in outs:
            assert np.array_equal(out, wanted, equal_nan=True)
            assert (np.signbit(out) == np.signbit(wanted))[~np.isnan(out)].all()


def runs(made):
    node.run(made._board, made)


@COMPILES
@pytest.mark.parametrize("kind", ["allgather", "broadcast", "reduce_scatter", "reduce", "alltoall"])
def test_every_collective_is_compiled_and_gives_what_the_general_steps_give(kind):
    p, n = 3, 12
    call = node.call_of(kind, n, p)
    results = []
    for fast in (False, True):
        makers, outs = [], []
        for board in node.boards(p):
            own = n // p
            x, out = ordinary(own if kind == "allgather" else n), ordinary(own if kind == "reduce_scatter" else n)
            x[:] = given_by(board.rank, x.size, 0)
            makers.append(node.executor(board, call, x, out, WAYS[SLOTS]))
            outs.append(out)
        compiled(makers)
        for out in outs:
            out[:] = -1
        if fast:
            assert node.together(*(partial(runs, made) for made in makers)) == [None] * p
        else:
            node.in_turn(makers)
        results.append(outs)
    assert np.array_equal(results[0], results[1])


@pytest.mark.parametrize(
    ("op", "dtype", "n"), [("max", "f4", 1), ("sum", "i8", 1), ("prod", "f4", 1), ("sum", "f4", 1 << 21)]
)
def test_what_is_not_compiled_takes_the_general_steps(op, dtype, n):
    boards = node.boards(2)
    ways = WAYS[SLOTS] if n == 1 else WAYS[SHARED]
    x = [arena.empty(n, np.dtype(dtype)) for _ in boards]
    made = [
        node.executor(board, node.call_of("allreduce", n, 2, dtype, op), x[board.rank], None, ways) for board in boards
    ]
    compiled(made)
    assert made[0].fast() == executor.NOT_BEGUN


def test_numbers_that_are_not_aligned_are_left_to_numpy():
    boards = node.boards(2)
    x = [np.zeros(9, np.uint8)[1:].view("f4") for _ in boards]
    made = [
        node.executor(board, node.call_of("allreduce", 2, 2, "f4"), x[board.rank], None, WAYS[SLOTS])
        for board in boards
    ]
    compiled(made)
    assert made[0].fast() == executor.NOT_BEGUN


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


@COMPILES
@pytest.mark.slow
@pytest.mark.parametrize("case", ["slots", "shared"])
def test_an_interrupt_at_any_bytecode_of_a_short_way_ends_the_generation_for_all(case):
    """Rank 0 is interrupted; rank 1 raises too, unless it has ended the operation, with the right sum."""
    n, ways, allocate = {
        "slots": (9, WAYS[SLOTS], ordinary),
        "shared": (9, WAYS[SHARED], shared),
    }[case]
    for at in range(1, 1000):
        boards = node.boards(2)
        ranks = [Rank(board, n, ways, allocate) for board in boards]
        compiled([rank.made for rank in ranks])
        assert node.together(*(partial(turns, rank) for rank in ranks)) == [None] * 2
        told = node.together(partial(interrupted, ranks[0], at), partial(goes_on, ranks[1]))
        if told[0] is None:
            assert at > 20 and told[1] == 3
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
