"""Who waits for whom at a server: long waits, workers that leave, workers that wait in a circle."""

from __future__ import annotations

from unittest.mock import MagicMock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from collectives import MismatchError, StallError
from mpips.store.server.late import CIRCLE_SECONDS, Late, Wait, find_circle
from mpips.store.server.sources import Elements
from mpips.store.server.unit import Unit
from mpips.tables import messages, row_optimizers
from mpips.tables.service import ServerTables
from tests.unit.mpips.server.machine import WORKERS, Growing, Machine


@pytest.mark.parametrize("left_first", [False, True])
def test_a_needed_worker_that_left_ends_the_generation(left_first):
    machine = Machine()
    events = [lambda: machine.push(0, 1), lambda: machine.state.left(1)]
    events[left_first]()
    with pytest.raises(MismatchError, match="key 'w': round 1 needs rank 1, which has left the store"):
        events[not left_first]()


def test_a_worker_that_has_pushed_may_leave():
    machine = Machine()
    machine.push(1, 1)
    machine.push(1, 10)
    machine.state.left(1)
    for value in (1, 10):
        for worker in (0, 2):
            machine.push(worker, value)
        assert machine.work() == [3 * value] * 10


def test_a_later_round_sees_that_a_worker_left():
    machine = Machine()
    machine.push(1, 1)
    machine.state.left(1)
    for _ in range(2):
        machine.push(0, 1)
    machine.push(2, 1)
    with pytest.raises(MismatchError, match="round 2 needs rank 1"):
        machine.work()


def test_a_long_wait_warns_and_then_ends():
    machine = Machine(late=Late(1, 3))
    machine.push(0, 1, clock=10)
    for clock in (10.5, 11.5, 12):
        machine.said += machine.state.tick(clock)
    assert [worker for worker, _ in machine.heard("WARNING")] == [0]
    assert "key 'w'" in machine.heard("WARNING")[0][1] and "ranks 1, 2" in machine.heard("WARNING")[0][1]
    with pytest.raises(StallError, match="key 'w': round 1 has waited for 3 s: ranks 1, 2 have not pushed; for longer"):
        machine.state.tick(13.5)


def test_keys_with_the_same_late_workers_warn_together():
    machine = Machine(late=Late(1))
    units = [machine.unit]
    for number, name in enumerate("xyz", 1):
        units.append(Unit(number, name, np.zeros(10, np.float32), [0] * (1 + WORKERS), range(WORKERS), 4, 1))
        machine.state.create(units[-1])
    for unit, workers in zip(units, [[0], [0, 2], [0], [0]]):
        for worker in workers:
            machine.push(worker, Elements(np.ones(10, np.float32)), 10.0, unit)
    machine.said = machine.state.tick(11.5) + machine.state.tick(12.5)
    one, three = "rank 1 has not pushed", "ranks 1, 2 have not pushed"
    assert machine.heard("WARNING") == [
        (0, f"key 'w' (and 2 more keys): round 1 has waited for 1.5 s: {three}"),
        (0, f"key 'x': round 1 has waited for 1.5 s: {one}"),
        (2, f"key 'x': round 1 has waited for 1.5 s: {one}"),
    ]


def test_a_round_of_all_contributions_is_not_late():
    machine = Machine(late=Late(1, 3))
    there = [2]
    for worker in range(WORKERS):
        machine.push(worker, Growing(np.ones(10, np.float32), there))
    assert machine.work() == [3] * 8 + [0] * 2
    assert machine.state.tick(100.0) == []
    there[0] = 3
    assert machine.work() == [3] * 10


def test_a_round_waits_from_the_last_ones_end():
    machine = Machine(workers=2, late=Late(1, 3))
    machine.push(0, 1, clock=10.0)
    machine.push(0, 1, clock=10.1)
    machine.said += machine.state.tick(12.5)
    machine.push(1, 1, clock=12.9)
    machine.work()
    machine.said += machine.state.tick(13.2)
    assert len(machine.heard("WARNING")) == 1
    machine.said += machine.state.tick(14.5)
    assert len(machine.heard("WARNING")) == 2
    with pytest.raises(StallError, match="round 2"):
        machine.state.tick(16.5)


# ---- circles


def two_keys():
    """Workers 0 and 1 have pushed one key each, and wait for the other's."""
    machine = Machine(workers=2)
    other = Unit(1, "x", np.zeros(10, np.float32), [0, 0, 0], range(2), 4, 1)
    machine.state.create(other)
    machine.push(0, 1)
    machine.push(1, 1, unit=other)
    return machine, other


def test_a_circle_of_waiting_workers_is_told():
    machine, _ = two_keys()
    machine.state.waits(0, 0, 1)
    machine.state.waits(1, 1, 1)
    machine.state.tick(5.0)
    with pytest.raises(MismatchError) as error:
        machine.state.tick(5.1 + CIRCLE_SECONDS)
    assert str(error.value) == (
        "rank 0 waits for round 1 of key 'w', to which rank 1 has not pushed; "
        "rank 1 waits for round 1 of key 'x', to which rank 0 has not pushed: use keys in the same order on all ranks"
    )


@pytest.mark.parametrize("first, second", [((0, 0, 1), None), ((1, 0, 1), (0, 1, 1)), ((0, 0, 1), (1, 1, 0))])
def test_who_waits_for_no_circle_goes_on_waiting(first, second):
    machine, _ = two_keys()
    for wait in filter(None, (first, second)):
        machine.state.waits(*wait)
    for clock in (5.0, 7.0, 9.0):
        machine.state.tick(clock)


def test_a_circle_that_opens_is_forgotten():
    machine, other = two_keys()
    machine.state.waits(0, 0, 1)
    machine.state.waits(1, 1, 1)
    machine.state.tick(5.0)
    machine.push(1, 1)
    machine.work()
    machine.state.tick(9.0)
    machine.push(0, 1, unit=other)
    machine.work()
    assert list(other.stored) == [2] * 10


def test_a_circle_through_another_server_is_seen():
    machine = Machine(workers=2)
    machine.push(0, 1)
    machine.state.waits(0, 0, 1)
    machine.state.late.note_elsewhere(1, [Wait(1, "y", 4, (0,))])
    machine.state.tick(5.0)
    with pytest.raises(MismatchError, match=r"rank 1 waits for round 4 of key 'y', to which rank 0 has not pushed"):
        machine.state.tick(6.0)


def test_tables_wait_as_keys_do():
    """Long waits are said, and circles of both; what was refused is waited for by nobody."""
    late = Late(1, 30)
    machine, tables = Machine(workers=2, late=late), ServerTables(2, late=late)
    line, nothing = MagicMock(), np.zeros(0, np.uint8)

    def hear(worker, request):
        tables.answer(worker, (line, 0), request, nothing)

    hear(0, messages.MakeTable("users", 2, "float32", 0, 0.0, *row_optimizers.encode(row_optimizers.RowSGD())))
    assert tables.open == []
    hear(1, messages.PushRows("users", 0))
    machine.state.tick(10.0, tables.open, tables.waits_to_hear())
    said = machine.state.tick(11.5, tables.open)
    assert [(reply.what, reply.worker) for reply in said] == [("WARNING", 1)]
    assert said[0].text == "table 'users': round 1 has waited for 1.5 s: rank 0 has not pushed"
    machine.push(0, 1)
    machine.state.waits(0, 0, 1)
    hear(1, messages.WaitForTable("users", 1))
    machine.state.tick(12.0, tables.open)
    with pytest.raises(MismatchError) as error:
        machine.state.tick(12.1 + CIRCLE_SECONDS, tables.open)
    assert str(error.value) == (
        "rank 0 waits for round 1 of key 'w', to which rank 1 has not pushed; rank 1 waits for round 1 of table "
        "'users', to which rank 0 has not pushed: use keys and tables in the same order on all ranks"
    )
    hear(1, messages.RefuseRound("users", 1, 1, "no memory"))
    hear(1, messages.WaitForTable("users", 1))  # it was on its way
    for clock in (13.0, 15.0):
        machine.state.tick(clock, tables.open)
    assert [wait.worker for wait in late.waits_here()] == [0]


@given(st.dictionaries(st.integers(0, 6), st.sets(st.integers(0, 6), min_size=1, max_size=3), max_size=7))
def test_a_circle_is_found_if_there_is_one(edges):
    waits = {worker: Wait(worker, "w", 1, tuple(sorted(to - {worker}))) for worker, to in edges.items()}
    circle = find_circle(waits)
    for wait, following in zip(circle, circle[1:] + circle[:1]):
        assert following.worker in wait.absent
    left = {worker: set(wait.absent) for worker, wait in waits.items()}
    while free := [worker for worker, to in left.items() if not to & set(left)]:
        for worker in free:
            del left[worker]
    assert bool(circle) == bool(left)
