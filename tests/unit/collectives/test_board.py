"""How the ranks of a node meet, on real memory: `collectives.fabric.board`. Its protocol is explored in
test_explored."""

from __future__ import annotations

import os
import time
from functools import partial

import pytest

from collectives import CollectiveError, StallError
from collectives.fabric.board import NUMBERS, OUT, Board
from collectives.fabric.layout import FINISHED, LAST_TOKEN, LEFT, Descriptor
from collectives.fabric.wait import Limits, drive
from tests.unit.collectives import node


def enter(board: Board, text: str = "a call") -> None:
    board.enter(board.publish(Descriptor(text)))


def test_no_entry_of_a_rank_that_is_there_is_that_of_one_that_has_left():
    assert NUMBERS << 32 | LAST_TOKEN != OUT


def test_who_has_not_come_is_late():
    boards = node.boards(3)
    enter(boards[0])
    assert boards[0].late() == [1, 2]
    enter(boards[2])
    assert boards[0].late() == [1] and boards[2].late() == [1]
    enter(boards[1])
    assert boards[0].late() == []
    boards[0].signal()
    boards[1].signal()
    assert boards[0].late() == [2]


def test_who_has_not_carried_out_is_late():
    boards = node.boards(2)
    for board in boards:
        enter(board)
    steps = boards[0].carried_out(iter([None]))
    next(steps)
    assert boards[0].late() == [1]
    boards[1].memory.words[1][FINISHED] = boards[1].number
    assert boards[0].late() == []


def test_the_sentence_of_a_stall_names_who_is_late():
    boards = node.boards(3, limits=Limits(60, 0.05))
    enter(boards[0])
    enter(boards[2])
    with pytest.raises(StallError, match=r"barrier has waited for 0.05 s: rank 1 has not come; for longer waits raise"):
        drive(boards[0].met(), boards[0], "barrier")


def test_a_rank_that_ends_the_generation_ends_all_waits_with_its_sentence():
    boards = node.boards(3)

    def wait(board):
        enter(board)
        drive(board.met(), board, "a call")

    def fail(board):
        time.sleep(0.05)
        return board.end(KeyError("x"), "rank 2 has given up")

    told = node.together(partial(wait, boards[0]), partial(wait, boards[1]), partial(fail, boards[2]))
    assert [str(error) for error in told] == ["rank 2 has given up"] * 3
    with pytest.raises(CollectiveError, match="rank 2 has given up"):
        boards[1].look_at_all()


def test_a_rank_that_waits_for_nobody_who_has_failed_goes_on():
    boards = node.boards(2)
    enter(boards[0])
    enter(boards[1])
    boards[1].poison.spread(CollectiveError(), "later")
    boards[0].look(1.0)
    drive(boards[0].met(), boards[0], "a call")


def test_a_program_that_has_ended_is_not_waited_for():
    boards = node.boards(2)
    enter(boards[0])
    boards[1].leave()
    assert boards[0].memory.words[1][LEFT] == 1
    with pytest.raises(CollectiveError, match="rank 1 is needed, and its program has ended"):
        drive(boards[0].met(), boards[0], "a call")


def test_what_a_rank_did_before_its_program_ended_counts():
    boards = node.boards(2)
    enter(boards[1])
    boards[1].leave()
    enter(boards[0])
    drive(boards[0].met(), boards[0], "a call")


def test_a_process_that_has_ended_is_not_waited_for():
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    boards = node.boards(2)
    boards[0].memory.pids[1] = child
    enter(boards[0])
    with pytest.raises(CollectiveError, match="rank 1 is needed, and its process has ended"):
        drive(boards[0].met(), boards[0], "a call")


@pytest.mark.parametrize("short", [True, False])
def test_operations_are_counted_on_beyond_2_to_the_32(short):
    """Through threads: 40 sums around the end of the numbers, on 3 ranks that each bring their own."""
    import numpy as np

    boards = node.boards(3)
    for board in boards:
        board.number = NUMBERS - 20
        for parity in (0, 1):
            board.entries[parity][board.rank] = NUMBERS - 21 + (parity != (NUMBERS - 21) & 1) << 32

    def work(board):
        x, out = np.zeros(1), np.zeros(1)
        call = node.executor(board, node.call_of("allreduce", 1, 3), x, out, node.WayLimits(1024, 1024, 1 << 60))
        sums = []
        for turn in range(40):
            x[0] = turn * 10 + board.rank
            if short:
                node.run(board, call)
            else:
                drive(call.steps(), board, "a call")
            sums.append(out[0])
        return sums

    expected = [turn * 30 + 3 for turn in range(40)]
    assert node.together(*(partial(work, board) for board in boards)) == [expected] * 3
    assert {board.number for board in boards} == {19}
