"""Rows that are read where they lie are those that the server would answer with, of one whole round."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

from collectives.kernels import engine
from mpips.optimizers import encode_numbers
from mpips.store.keys.row_sums import owners_of
from mpips.store.transport import frames
from mpips.tables import index, kernels, messages
from mpips.tables.in_place import RowsInPlace
from mpips.tables.initial import key_of
from mpips.tables.service import ServerTables

pytest.importorskip("numba")
if engine.status().engine != "numba":
    pytest.skip(engine.status().reason, allow_module_level=True)

LINE: Any = object()
RATE = encode_numbers({"learning_rate": 1.0})
DIM = 5
SECONDS = 3.0


def card(dtype: str = "float32", **life: int) -> messages.MakeTable:
    return messages.MakeTable("t", DIM, dtype, key_of(3, "t"), 0.5, "sgd", RATE, **life)


def ask(tables: ServerTables, request: messages.TableRequest, payload: np.ndarray | None = None) -> Any:
    return tables.answer(0, (LINE, 0), request, np.zeros(0, np.uint8) if payload is None else payload)[-1][1]


def push(tables: ServerTables, ids: np.ndarray, gradients: np.ndarray) -> None:
    payload = np.zeros(messages.ids_at(len(ids), gradients.strides[0]) + ids.nbytes, np.uint8)
    payload[: gradients.nbytes] = gradients.reshape(-1).view(np.uint8)
    payload[payload.nbytes - ids.nbytes :] = ids.view(np.uint8)
    ask(tables, messages.PushRows("t", len(ids)), payload)


def located(
    found: messages.TablePlaces, dtype: str = "float32", server: tuple[int, int] = (0, 1), bound: float = 0.5
) -> RowsInPlace:
    return RowsInPlace(found, msgspec.structs.replace(card(dtype), bound=bound), 1, server)


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    for dtype in messages.DTYPES:
        kernels.read_rows.prepare(np.dtype(dtype))
    engine.load_all()


@pytest.mark.parametrize("dtype", messages.DTYPES)
@pytest.mark.parametrize("life", [{}, {"evict": 2}, {"limit": 700}])
@pytest.mark.parametrize("numpy", [False, True])  # the server's part
def test_rows_are_those_of_a_pull(
    monkeypatch: pytest.MonkeyPatch, dtype: str, life: dict[str, int], numpy: bool
) -> None:
    monkeypatch.setattr(index, "MOVED_AT_ONCE", 64)  # so the index is mostly being moved
    random, moving = np.random.default_rng(4), 0
    servers = [ServerTables(1, None, number, 2) for number in range(2)]
    for tables in servers:
        ask(tables, card(dtype, **life))
    parts = [
        located(ask(tables, messages.LocateTable("t")), dtype, (number, 2)) for number, tables in enumerate(servers)
    ]
    for round_ in range(1, 30):
        ids = np.unique(random.integers(-5000, 5000, 40 * round_)) * 10**14
        owners, gradients = owners_of(ids, 2), random.standard_normal((len(ids), DIM)).astype(dtype)
        for number, tables in enumerate(servers):
            if numpy:
                with engine.numpy_only():
                    push(tables, ids[owners == number], gradients[owners == number])
            else:
                push(tables, ids[owners == number], gradients[owners == number])
        wanted = random.permutation(np.concatenate([ids, ids[:7], np.arange(-50, 50), random.integers(-99, 99, 9)]))
        out, expected = np.full((2, len(wanted), DIM), np.nan).astype(dtype)
        for number, (part, tables) in enumerate(zip(parts, servers)):
            assert part.round_with(0, round_) == round_ and part.round_with(0, round_ + 1) == -1
            assert part.read(round_, wanted, out) and not part.read(round_ - 1, wanted, out)
            mine = owners_of(wanted, 2) == number
            answer = ask(tables, messages.PullRows("t", round_, int(mine.sum()), False), wanted[mine].view(np.uint8))
            expected[mine] = np.frombuffer(answer.data, dtype).reshape(-1, DIM)
            moving += bool(part._where[index.GROWING])
        assert out.tobytes() == expected.tobytes()
    assert moving or life  # few rows are in the index in a move of a table that drops them


def test_rows_that_went_elsewhere_are_not_read() -> None:
    tables, ids, out = ServerTables(1), np.arange(9), np.zeros((9, DIM), np.float32)
    ask(tables, card())
    part = located(ask(tables, messages.LocateTable("t")))
    push(tables, ids, np.ones((9, DIM), np.float32))
    assert part.valid and part.round_with(0, 1) == 1
    ask(tables, messages.ResetTable("t", 1))  # a load begins
    assert not part.valid and part.round_with(0, 1) == -1 and not part.read(1, ids, out)
    torn = located(ask(tables, messages.LocateTable("t")))
    assert not torn.valid
    ask(tables, messages.EndLoad("t"))  # and what it has replaced is given back
    assert not part.valid and part.round_with(0, 0) == -1 and not part.read(0, ids, out)
    new = located(ask(tables, messages.LocateTable("t")))
    assert new.round_with(0, 1) == 1 and new.read(1, ids, out)


@pytest.fixture
def child() -> Iterator[Callable[[Callable[[Any], None]], tuple[int, Any]]]:
    """Run a function in a process of its own, with the end of a pipe to write to; what is returned is killed."""
    started: list[int] = []

    def start(do: Callable[[Any], None]) -> tuple[int, Any]:
        reading, writing = os.pipe()
        pid = os.fork()
        if not pid:
            try:
                with os.fdopen(writing, "wb") as file:
                    do(file)
            finally:
                os._exit(0)
        os.close(writing)
        started.append(pid)
        return pid, os.fdopen(reading, "rb")

    yield start
    for pid in started:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


@pytest.mark.slow
@pytest.mark.parametrize("limit", [0, 4000])
def test_a_read_is_of_one_round_while_the_server_goes_on_and_dies(child: Any, limit: int) -> None:
    always = np.arange(3000) * 7

    def serve(told: Any) -> None:
        """Push 1 to the same rows again and again, and to others that make the index grow, and are dropped."""
        tables, round_ = ServerTables(1, -1), 0
        ask(tables, messages.MakeTable("t", DIM, "float32", key_of(3, "t"), 0.0, "sgd", RATE, limit=limit))
        told.write(frames.encode(ask(tables, messages.LocateTable("t"))))
        told.close()
        while True:
            round_ += 1
            more = -1 - np.arange(500) - 500 * (round_ % 4000)
            ids = np.concatenate([always, more])
            push(tables, ids, np.full((len(ids), DIM), -1, np.float32))

    pid, said = child(serve)
    part = located(messages.decode_answer(said.read()), bound=0.0)
    out, whole, until = np.zeros((len(always), DIM), np.float32), set[int](), time.monotonic() + SECONDS
    killed = False
    while time.monotonic() < until or not killed:
        if not killed and time.monotonic() > until - SECONDS / 2:
            os.kill(pid, signal.SIGKILL)
            killed = True
        round_ = part.round_with(0, 0)
        if round_ >= 0 and part.read(round_, always, out):
            assert (out == round_).all()
            whole.add(round_)
    assert len(whole) > 1
