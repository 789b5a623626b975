"""The ranks of a node in one process: boards over real memory, without MPI."""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from collectives import arrays
from collectives.call import REDUCING, Call, find_reduction
from collectives.fabric.board import Board
from collectives.fabric.layout import ROWS_AT, NodeAreas
from collectives.fabric.wait import Limits
from collectives.node.executor import MET, NodeExecutor, WayLimits, call_array

EVERYTHING_IN_STAGES = WayLimits(0, 0, 1 << 60)
HANGS_SECONDS = 30


def boards(size: int, reachable: bool = False, limits: Limits = Limits(60, 20)) -> list[Board]:  # noqa: B008
    """A board for each rank of a node."""
    areas = [np.zeros(ROWS_AT + 4096 * size, np.uint8) for _ in range(size)]
    file = os.memfd_create("poison")
    made = []
    for rank in range(size):
        fd = os.open(f"/proc/self/fd/{file}", os.O_RDWR)
        memory = NodeAreas(rank, areas, [os.getpid()] * size, cores=1, reachable=reachable, fence=None, poison_fd=fd)
        weakref.finalize(memory, os.close, fd)
        made.append(Board(memory, range(size), limits))
    os.close(file)
    return made


def call_of(kind: str, n: int, p: int, dtype: Any = np.float64, op: str = "sum", root: int = 0) -> Call:
    dtype = np.dtype(dtype)
    return Call(kind, n, dtype, find_reduction(op, dtype) if kind in REDUCING else None, root, "shared_memory", p)


def executor(board: Board, call: Call, x: Any, out: Any = None, ways: WayLimits = EVERYTHING_IN_STAGES) -> NodeExecutor:
    x, out = (arrays.flat(each, "x", False) for each in (x, x if out is None else out))
    return NodeExecutor(board, call.text, [call_array(call, board.rank, x, out)], ways)


def run(board: Board, made: Any) -> None:
    """One operation, as a plan runs it."""
    from collectives.fabric.wait import drive

    code = made.fast()
    if code:
        drive(made.rest() if code == MET else made.steps(), board, "a test")


def in_turn(makers: Sequence[Any]) -> None:
    """All ranks' operation, in one thread."""
    waiting = [made.steps() for made in makers]
    while waiting:
        waiting = [steps for steps in waiting if next(steps, waiting) is not waiting]


@contextmanager
def quick_switches() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def together(*ranks: Callable[[], Any]) -> list[Any]:
    """What each returns, or raises, when all run at once."""
    results: list[Any] = [AssertionError("hangs")] * len(ranks)

    def go(rank: int) -> None:
        try:
            results[rank] = ranks[rank]()
        except BaseException as error:
            results[rank] = error

    threads = [threading.Thread(target=go, args=(rank,), daemon=True) for rank in range(len(ranks))]
    with quick_switches():
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(HANGS_SECONDS)
    return results
