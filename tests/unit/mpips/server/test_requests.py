"""Rare requests to a server: units, optimizers, states, rounds and snapshots, as a worker asks for them."""

from __future__ import annotations

from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from collectives.errors import CollectiveError
from mpips import optimizers
from mpips.optimizers import SGD, Adam, Add
from mpips.store.recovery.memory import UnitMemory
from mpips.store.server.loop import WorkerTraffic
from mpips.store.server.requests import Requests
from mpips.store.server.sources import Elements, Pushes
from mpips.store.server.state import AsynchronousState, SynchronousState
from mpips.store.transport import frames
from mpips.store.transport.frames import FRAME, Frame, Op, UnitCard
from mpips.tables import messages
from mpips.tables.service import ServerTables

decode_answer = msgspec.msgpack.Decoder(frames.Answer | messages.TableAnswer).decode


class Line:
    """A worker's end: what it asks, and the answers."""

    local = True

    def __init__(self):
        self.asked, self.answers = b"", []

    def body(self, frame):
        return np.frombuffer(self.asked, np.uint8)

    def post_body(self, body, op, unit=0, round_=0, token=0, flags=0):
        assert op == Op.ANSWER
        self.answers.append(body.decode() if flags else decode_answer(body))


class Server:
    """Units "a" (of two workers) and "b" of a server, each of ten float32, in blocks of four."""

    def __init__(self, asynchronous=False):
        self.state = AsynchronousState() if asynchronous else SynchronousState()
        self.requests, self.line = (
            Requests(self.state, "server rank 4", UnitMemory(None), 0, {"tables": ServerTables(0)}),
            Line(),
        )
        cards = [UnitCard(number, key, "float32", 0, 10, 1, 4, (0, 1)) for number, key in ((3, "a"), (7, "b"))]
        self.ask(frames.Create(cards))
        self.units = [self.state.units[3], self.state.units[7]]
        for unit in self.units:
            unit.stored[...] = 0

    def ask(self, request):
        """The answer, if there is one."""
        self.line.answers.clear()
        self.line.asked = frames.encode(request)
        self.requests.answer(0, self.line, Frame(int(Op.CONTROL), *[0] * 12))
        if self.requests.waiting and self.state.quiet:
            self.requests.answer_all()
        return self.line.answers[-1] if self.line.answers else None

    def push(self, unit, *values):
        for worker, value in enumerate(values):
            self.state.pushed(unit, worker, Elements(np.full(10, value, np.float32)), 0, 0.0)

    def round(self, *values):
        for unit in self.units:
            self.push(unit, *values)
        while self.state.work()[0]:
            pass


def test_settings_wait_for_earlier_pushes():
    server = Server()
    unit = server.units[0]
    server.push(unit, 1)
    assert server.ask(frames.SetOptimizer(optimizers.encode(Add()))) is None
    server.state.pushed(unit, 1, Elements(np.full(10, 2, np.float32)), 0, 0.0)
    assert server.ask(frames.Flush()) is None
    while server.state.work()[0]:
        pass
    assert list(unit.stored) == [3] * 10
    server.requests.answer_all()
    assert server.line.answers == [frames.RequestDone(), frames.RequestDone()]
    server.round(1, 2)
    assert list(unit.stored) == [6] * 10


def test_groups_of_keys_have_their_own_optimizers():
    server = Server()
    server.ask(frames.SetOptimizer(optimizers.encode(Add())))
    server.ask(frames.SetOptimizer(optimizers.encode(SGD(1.0)), ["b"]))
    server.round(1, 1)
    assert [unit.stored[0] for unit in server.units] == [2, -2]
    server.ask(frames.Create([UnitCard(9, "c", "float32", 0, 10, 1, 4, (0, 1))]))
    assert server.state.units[9].optimizer == Add()


def test_changed_numbers_keep_momentum():
    server, serial, state = Server(), np.zeros(10, np.float32), None
    server.ask(frames.SetOptimizer(optimizers.encode(SGD(0.5, momentum=0.5))))
    state = optimizers.initial(SGD(0.5, momentum=0.5), serial)
    for step, rate in enumerate((0.5, 0.25, 0.125), 1):
        numbers = optimizers.encode_numbers({"learning_rate": rate})
        assert server.ask(frames.UpdateOptimizer(numbers)) == frames.RequestDone()
        server.round(1, 2)
        SGD(rate, momentum=0.5).update(serial, np.full(10, 3, np.float32), state, step)
    assert (server.units[0].stored == serial).all()


@pytest.mark.parametrize(
    "request_, why",
    [
        (frames.SetOptimizer(b"nonsense"), ""),
        (frames.UpdateOptimizer(optimizers.encode_numbers({"learning_rate": 1.0})), "set_optimizer"),
        (frames.PutState([3], [frames.StatePart(1, [], [])]), "set_optimizer"),
    ],
)
def test_what_cannot_be_done_is_answered_by_a_sentence(request_, why):
    server = Server()
    answer = server.ask(request_)
    assert isinstance(answer, str) and why in answer
    server.round(1, 2)
    assert list(server.units[0].stored) == [3] * 10


def test_states_come_back_as_they_were():
    one, other = Server(), Server()
    for server in (one, other):
        server.ask(frames.SetOptimizer(optimizers.encode(Adam(0.1))))
    for _ in range(3):
        one.round(1, 2)
    for ours, theirs in zip(one.units, other.units):
        theirs.stored[...] = ours.stored
        state = one.ask(frames.GetState(ours.number))
        assert other.ask(frames.PutState([ours.number], [state])) == frames.RequestDone()
    one.round(3, 4)
    other.round(3, 4)
    assert (one.units[0].stored == other.units[0].stored).all()


def test_values_are_torn_while_they_are_overwritten():
    server = Server()
    assert server.ask(frames.SetTorn([3], True)) == frames.RequestDone()
    assert [unit.torn for unit in server.units] == [True, False]
    server.ask(frames.SetTorn([3, 7], False))
    assert [unit.torn for unit in server.units] == [False, False]


# ---- snapshots


def contents(server, number, slots):
    """All that is frozen under a number."""
    return {
        (unit.number, slot): np.frombuffer(
            server.ask(frames.ReadSnapshot(number, unit.number, slot, 0, 10)).data, np.float32
        )
        for unit in server.units
        for slot in range(-1, slots)
    }


@given(st.lists(st.sampled_from(["round", "idle", "second"]), max_size=8), st.booleans())
def test_a_snapshot_holds_what_was_there(events, asynchronous):
    server = Server(asynchronous)
    server.ask(frames.SetOptimizer(optimizers.encode(SGD(0.5, momentum=0.5))))
    server.round(1, 2)
    server.round(3, 4)
    expected = {
        (unit.number, slot): array.copy()
        for unit in server.units
        for slot, array in enumerate([unit.stored, *unit.state], -1)
    }
    taken = server.ask(frames.TakeSnapshot(5, [3, 7]))
    assert [step for _, step, _ in taken.units] == [4 if asynchronous else 2] * 2
    assert all(dtypes == ["float32"] for _, _, dtypes in taken.units)
    for event in events:
        if event == "round":
            server.round(5, 6)
        elif event == "idle":
            server.requests.copy_next()
        else:
            server.ask(frames.TakeSnapshot(6, [3]))
    found = contents(server, 5, 1)
    assert all((found[place] == array).all() for place, array in expected.items())
    server.ask(frames.DropSnapshot(5))
    server.ask(frames.DropSnapshot(6))
    server.round(1, 1)
    assert not any(unit.frozen for unit in server.units)


def test_a_part_of_a_frozen_array_can_be_read():
    server = Server()
    server.ask(frames.TakeSnapshot(1, [3]))
    server.units[0].thaw()
    server.units[0].stored[...] = 1
    assert server.ask(frames.ReadSnapshot(1, 3, -1, 2, 5)).data == np.zeros(3, np.float32).tobytes()


@pytest.mark.parametrize(
    "request_, said",
    [
        (frames.GetState(9), "there is no unit 9 in this store, which has 3, 7"),
        (frames.GetVersions([3, 9]), "no unit 9"),
        (frames.PutState([3, 9], [frames.StatePart(0, [], [])] * 2), "no unit 9"),
        (frames.SetTorn([3, 9], True), "no unit 9"),
        (frames.TakeSnapshot(1, [3, 9]), "no unit 9"),
        (frames.ReadSnapshot(4, 3, -1, 0, 1), "no snapshot 4 in this store, which has none"),
        (messages.PushRows("items", 1), "no table 'items' in this store, which has none"),
        (messages.PullRows("items", 1, 1, False), "no table 'items'"),
        (messages.GetTableStats("items"), "no table 'items'"),
        (messages.UpdateTable("items", b""), "no table 'items'"),
        (messages.PutRows("items", {}), "no table 'items'"),
        (messages.EndLoad("items"), "no table 'items'"),
        (messages.FreezeTables(1, ["items"]), "no table 'items'"),
        (messages.ReadTable(3, "items", 0, 1), "no frozen state 3"),
        (messages.ReadDropped(3, "items"), "no frozen state 3"),
        (messages.ThawTables(3), "no frozen state 3"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_who_names_what_is_unknown_hears_a_sentence(request_, said):
    server = Server()
    answer = server.ask(request_)
    assert answer.startswith("server rank 4: ") and said in answer
    assert not any(unit.torn for unit in server.units) and not server.requests.snapshots
    assert server.ask(frames.GetVersions([3])) is not None, "the server goes on"


def test_a_request_that_cannot_be_read_is_answered():
    server = Server()
    server.line.asked = b"\x81\xa4type\xa7Unheard"
    server.requests.answer(0, server.line, Frame(int(Op.CONTROL), *[0] * 12))
    assert "a request cannot be read" in server.line.answers[-1] and "same version" in server.line.answers[-1]


def test_parts_that_a_snapshot_or_a_table_lacks_are_refused():
    server = Server()
    server.ask(frames.TakeSnapshot(1, [3]))
    assert "no unit of the snapshot 7" in server.ask(frames.ReadSnapshot(1, 7, -1, 0, 1))
    assert "no state 0" in server.ask(frames.ReadSnapshot(1, 3, 0, 0, 1))
    server.ask(messages.MakeTable("t", 1, "float32", 1, 0.0, "sgd", optimizers.encode_numbers({"learning_rate": 1.0})))
    assert "without the array 'ids'" in server.ask(messages.PutRows("t", {}))
    server.ask(messages.FreezeTables(1, ["t"]))
    assert "no array 'x'" in server.ask(messages.ReadTable(1, "t", 0, 1, ["x"]))


@pytest.mark.parametrize("op", [Op.PUSH, Op.PULL, Op.HOLD, Op.SET, 99])
def test_a_frame_that_names_what_is_unknown_ends_the_generation_with_a_sentence(op):
    """Nothing is answered to it, so all ranks hear of it; the server goes on with the next generation."""
    server = Server()
    frame = FRAME.pack(int(op), 0, 0, 0, 9, *[0] * 8)
    line = SimpleNamespace(waiting=lambda: True, read=lambda: [frame])
    traffic = WorkerTraffic.__new__(WorkerTraffic)
    traffic._rings, traffic.remote, traffic._callers = SimpleNamespace(any_written=lambda: True), [], [(1, line)]
    traffic._state, traffic._pushes = server.state, Pushes(server.state, None)
    what = "operation 99" if op == 99 else "unit 9"
    with pytest.raises(CollectiveError, match=f"there is no {what}.*and rank 1 names it: make keys on all"):
        traffic.read_frames()


class Book(UnitMemory):
    """Memory of units that is told to whoever outlives the server; `told` are the generations of which it was."""

    def __init__(self):
        super().__init__(None)
        self.ledger, self.told = object(), []

    def publish(self, units, settings, generation, services=None):
        self.told.append(generation)


@pytest.mark.parametrize("change", [None, frames.UpdateOptimizer(optimizers.encode_numbers({"learning_rate": 1.0}))])
def test_a_change_that_cannot_be_repeated_leaves_its_generation_in_the_ledger(change):
    book = Book()
    refused = Requests(SynchronousState(), "server rank 4", book, generation=3).repeat_change(change)
    assert ("set_optimizer" in refused) == (change is not None)
    assert book.told[-1:] == [3]
