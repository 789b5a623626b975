"""Tables on a server without MPI: who is answered when, in rounds and in an asynchronous store."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from collectives.errors import MismatchError
from mpips.optimizers import encode_numbers
from mpips.store.server.tables import ServerTables
from mpips.store.transport import frames


class Workers:
    """Requests of workers to one server; each asker is (worker, its count of requests)."""

    def __init__(self, count: int, staleness: int | None = None) -> None:
        self.tables, self.asked = ServerTables(count, staleness), [0] * count
        self.said: dict[Any, Any] = {}
        self.ask(0, frames.MakeTable("t", 1, "float32", 1, 0.0, "sgd", encode_numbers({"learning_rate": 1.0})))

    def ask(self, worker: int, request: frames.TableRequest, *arrays: np.ndarray) -> Any:
        asker: Any = (worker, self.asked[worker])
        self.asked[worker] += 1
        payload = np.frombuffer(b"".join(array.tobytes() for array in arrays), np.uint8)
        self.hear(self.tables.hear(worker, asker, request, payload))
        return asker

    def hear(self, answers: Any) -> None:
        for who, answer in answers:
            assert who not in self.said
            self.said[who] = answer

    def push(self, worker: int, value: float) -> Any:
        gradients = np.array([-value, 0], np.float32)  # ids begin at a multiple of 8 bytes
        return self.ask(worker, frames.PushRows("t", 1), gradients, np.array([9], np.int64))

    def pull(self, worker: int, round_: int) -> Any:
        return self.ask(worker, frames.PullRows("t", round_, 1, False), np.array([9], np.int64))

    def value(self, asker: Any) -> float:
        return float(np.frombuffer(self.said[asker].data, np.float32)[0])


def test_a_round_waits_for_all_workers() -> None:
    workers = Workers(2)
    first = workers.push(0, 1)
    read, before = workers.pull(0, 1), workers.pull(1, 0)
    assert first in workers.said and read not in workers.said and workers.value(before) == 0
    workers.push(1, 10)
    assert workers.value(read) == 11
    assert workers.value(workers.pull(1, 1)) == 11


def test_a_second_push_waits_for_room() -> None:
    workers = Workers(2)
    asked = [workers.push(0, value) for value in (1, 2, 4)]
    assert asked[0] in workers.said and asked[1] not in workers.said
    workers.push(1, 0)
    assert asked[1] in workers.said and asked[2] not in workers.said
    workers.push(1, 0)
    workers.push(1, 0)
    assert asked[2] in workers.said and workers.value(workers.pull(0, 3)) == 7


def test_who_has_left_is_not_waited_for() -> None:
    workers = Workers(2)
    workers.push(0, 1)
    with pytest.raises(MismatchError, match="table 't': round 1 needs rank 1, which has left the store"):
        workers.tables.left(1)
    other = Workers(2)
    other.tables.left(1)
    with pytest.raises(MismatchError, match="needs rank 1"):
        other.push(0, 1)


def test_a_worker_too_far_ahead_waits() -> None:
    workers = Workers(2, staleness=1)
    asked = [workers.push(0, 1) for _ in range(4)]
    assert [one in workers.said for one in asked] == [True, True, True, False]
    read = workers.pull(0, 2)
    assert read not in workers.said
    workers.push(1, 10)
    assert workers.value(read) == 12 + 1  # the pull sees the third push, which may go on before it
    assert workers.value(workers.pull(1, 1)) == 13
    workers.hear(workers.tables.left(1))
    assert workers.value(workers.pull(0, 4)) == 14


def test_pushes_count_at_once_without_a_bound() -> None:
    workers = Workers(2, staleness=-1)
    for step in range(5):
        assert workers.push(0, 1) in workers.said
        assert workers.value(workers.pull(0, step + 1)) == step + 1
