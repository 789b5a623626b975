"""Pulls of several tables in one message to a server, without MPI: answered once, when each can be answered."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from mpips.tables import messages
from tests.unit.mpips.server.table_workers import CARD, Workers

OTHER = msgspec.structs.replace(CARD, table="u")


def push(workers: Workers, worker: int, table: str, value: float, refusals: int = 0) -> None:
    gradients = np.array([-value, 0], np.float32)
    workers.ask(worker, messages.PushRows(table, 1, refusals), gradients, np.array([9], np.int64))


def ask(workers: Workers, *rounds: int) -> Any:
    """Let worker 0 pull row 9 of both tables, once they have these rounds."""
    pulls = [messages.PullRows(table, round_, 1, False) for table, round_ in zip("tu", rounds)]
    return workers.ask(0, messages.PullTables(pulls), np.array([9, 9], np.int64))


def values(workers: Workers, asker: Any) -> list[float]:
    return [float(np.frombuffer(answer.data, np.float32)[0]) for answer in workers.said[asker].answers]


def test_pulls_are_answered_together() -> None:
    workers = Workers(2, cards=[CARD, OTHER])
    for table, value in (("t", 1), ("u", 10)):
        push(workers, 0, table, value)
    before, read = ask(workers, 0, 0), ask(workers, 1, 1)
    assert values(workers, before) == [0, 0]
    push(workers, 1, "t", 2)
    assert read not in workers.said
    assert values(workers, ask(workers, 1, 0)) == [3, 0]
    push(workers, 1, "u", 20)
    assert values(workers, read) == [3, 30]


def test_a_worker_that_leaves_lets_pulls_go_on() -> None:
    workers = Workers(2, staleness=0, cards=[CARD, OTHER])
    push(workers, 0, "t", 1)
    read = ask(workers, 1, 0)
    assert read not in workers.said
    workers.hear(workers.tables.left(1))
    assert values(workers, read) == [1, 0]


def test_a_refused_round_answers_its_pull_of_several() -> None:
    workers = Workers(2, cards=[CARD, OTHER])
    push(workers, 0, "t", 1)
    read = ask(workers, 1, 0)
    workers.ask(1, messages.RefuseRound("t", 1, 1, "no memory", []))
    refused, rows = workers.said[read].answers
    assert isinstance(refused, messages.RoundRefused) and refused.why == "no memory"
    assert np.frombuffer(rows.data, np.float32)[0] == 0


def test_rows_are_written_where_each_table_has_its_own() -> None:
    """In memory that worker and server share; tables have rows of 4 and 12 bytes."""
    wide = msgspec.structs.replace(CARD, table="u", dim=3)
    workers = Workers(1, cards=[CARD, wide])
    push(workers, 0, "t", 5)
    workers.ask(0, messages.PushRows("u", 1), np.array([-1, -2, -3, 0], np.float32), np.array([8], np.int64))
    memory = np.full(64, 255, np.uint8)
    memory[40:].view(np.int64)[:] = 7, 9, 8
    pulls = [messages.PullRows("t", 1, 2, True), messages.PullRows("u", 1, 1, True, rows_at=12)]
    workers.tables.answer(0, ("worker", 1), messages.PullTables(pulls), memory)  # type: ignore[arg-type]
    assert memory[:8].view(np.float32).tolist() == [0, 5]
    assert memory[12:24].view(np.float32).tolist() == [1, 2, 3]
    assert (memory[8:12] == 255).all() and (memory[24:40] == 255).all()
