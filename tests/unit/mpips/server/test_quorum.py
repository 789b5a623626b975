"""Rounds that a quorum closes: the rule beside a plain model of it, and units that are updated by it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some

from mpips.optimizers import SGD
from mpips.store.server.quorum import OpenRound, Quorum, QuorumState, late_sentence
from mpips.store.server.reduce import Reduce
from mpips.store.server.sources import Elements
from mpips.store.server.unit import Unit

CLIENTS = 4
EVENTS = some.lists(
    some.one_of(
        some.tuples(some.just("give"), some.integers(0, CLIENTS - 1), some.integers(0, 9)),
        some.tuples(some.just("read"), some.integers(0, CLIENTS - 1), some.just(0)),
        some.tuples(some.just("leave"), some.integers(0, CLIENTS - 1), some.just(0)),
        some.tuples(some.just("wait"), some.integers(0, 4), some.just(0)),
    ),
    max_size=60,
)


class Model:
    """What the pages promise, told from a list of what has happened since the last round closed."""

    def __init__(self, least, grace):
        self.least, self.grace, self.closed, self.seen = least, grace, 0, [0] * CLIENTS
        self.happened = []
        self.there = None

    def give(self, client, weight):
        late = max(self.closed - self.seen[client], 0)
        self.happened.append((client, weight, late))
        self.seen[client] = self.closed if late else self.closed + 1

    def waits(self, client):
        return any(one == client and not late for one, _, late in self.happened)

    def closes(self, now, here):
        waiting = {client for client, _, late in self.happened if not late}
        others = [client for client in here if client not in waiting]
        if not self.happened or (others and len(waiting) < min(self.least, len(waiting) + len(others))):
            return False
        if self.there is None:
            self.there = now
        return not others or now - self.there >= self.grace

    def close(self):
        counts = [(client, weight / (1 + late)) for client, weight, late in self.happened]
        self.happened, self.there, self.closed = [], None, self.closed + 1
        return counts


@given(EVENTS, some.integers(1, CLIENTS), some.integers(0, 3))
def test_rounds_close_and_count_as_the_pages_say(events, least, grace):
    made, model = OpenRound(Quorum(least, grace), [0] * CLIENTS), Model(least, grace)
    here, now, pushed, counted = set(range(CLIENTS)), 0, [0] * CLIENTS, [0] * CLIENTS
    for what, client, weight in events:
        if what == "give" and client in here and client not in made.in_time:
            late = made.give(client, weight).late
            model.give(client, weight)
            pushed[client] += 1
            assert model.happened[-1][2] == late
        elif what == "read" and client in here:
            made.read(client)
            model.seen[client] = max(model.seen[client], model.closed)
        elif what == "leave":
            here.discard(client)
        elif what == "wait":
            now += client
        assert [model.waits(one) for one in range(CLIENTS)] == [one in made.in_time for one in range(CLIENTS)]
        due = made.is_due(now, here)
        assert due == model.closes(now, here)
        if due:
            expected, found = model.close(), made.close()
            assert len(found) == len(expected)
            total = sum(weight for _, weight in expected)
            for one, factor in found:
                counted[one.position] += 1
                assert one.push == counted[one.position]  # each push once, in order
                share = one.weight / (1 + one.late) / total if total else 1 / len(found)
                assert factor / len(found) == pytest.approx(share)
            for client in [one.position for one, _ in found if not one.late]:
                made.read(client)
    assert pushed == [count + sum(one[0] == at for one in model.happened) for at, count in enumerate(counted)]


class Whole(Elements):
    """All elements, there or not yet, and their weight."""

    def __init__(self, array, weight=1, there=True):
        super().__init__(array)
        self.quorum_weight, self.there = weight, there

    def ready(self, block):
        return self.there

    def whole(self):
        return self.array.copy()


class Server:
    """A server with one unit of three clients."""

    def __init__(self, least=2, grace=1.0, clients=3):
        self.state = QuorumState(Quorum(least, grace), range(clients), reduce=Reduce())
        self.unit = Unit(0, "w", np.zeros(4, np.float32), [0] * (1 + clients), range(clients), 4, 1)
        self.state.create(self.unit)
        self.state.set_optimizer(SGD(1.0))
        self.pushes, self.granted, self.now = [0] * clients, list[int](), 0.0

    def pushpull(self, client, value, weight=1, there=True):
        source = Whole(np.full(4, value, np.float32), weight, there)
        self.pushes[client] += 1
        self.state.pushed(self.unit, client, source, 0, self.now)
        self.go_on()
        self.hear(self.state.pulled(0, client, self.pushes[client]))
        return source

    def hear(self, replies):
        self.granted += [reply.worker for reply in replies if reply.what == "GRANT"]

    def go_on(self, seconds=0.0):
        self.now += seconds
        self.state.wake(self.now)
        while True:
            worked, replies = self.state.work()
            self.hear(replies)
            if not worked and not (self.state.ready and self.now >= self.state._wakes):
                return

    @property
    def value(self):
        return float(self.unit.stored[0])

    def who_read(self):
        told, self.granted = self.granted, []
        return told


def test_a_round_closes_at_once_when_all_have_given():
    server = Server()
    for client in range(3):
        assert server.value == 0 and not server.who_read()
        server.pushpull(client, -3 * client)
    assert server.value == 3 and server.who_read() == [0, 1, 2] and server.state.quiet


def test_a_quorum_waits_for_the_grace_and_a_late_one_for_nobody():
    server = Server()
    server.pushpull(0, -2)
    server.go_on(10)
    assert server.value == 0
    server.pushpull(1, -4)
    server.go_on(0.9)
    assert server.value == 0 and not server.who_read()
    server.go_on(0.2)
    assert server.value == 3 and server.who_read() == [0, 1]
    server.pushpull(2, -8)  # late by one
    assert server.value == 3 and server.who_read() == [2] and server.state.late_pushes == {2: (1, 1)}
    assert server.state.take_rounds() == (1, {2: 1})
    server.pushpull(0, -1)
    server.pushpull(1, -1)
    assert server.value == 3  # the late one may come in time
    server.go_on(1.1)
    assert server.value == pytest.approx(3 + (1 + 1 + 8 / 2) / 2.5)
    assert server.unit.done == [2, 2, 1] and server.unit.words[1:] == [2, 2, 1]
    assert server.state.take_rounds() == (1, {2: 1}), "what came late was not in time"


def test_a_late_client_that_comes_within_the_grace_is_in_step_again():
    server = Server()
    for value in (-2, -4):
        server.pushpull(0, value)
        server.pushpull(1, value)
        server.go_on(1.1)
    server.pushpull(2, 0)  # late by two
    server.pushpull(0, -6)
    server.pushpull(1, -6)
    server.go_on(0.9)
    server.who_read()
    server.pushpull(2, -6)
    assert server.who_read() == [0, 1, 2] and server.unit.done == [3, 3, 2]
    assert server.value == pytest.approx(2 + 4 + 18 / (3 + 1 / 3))


def test_a_push_that_is_under_way_holds_no_round_up():
    server = Server(grace=0.0)
    slow = server.pushpull(2, -8, there=False)
    server.pushpull(0, -2)
    server.pushpull(1, -4)
    assert server.value == 3 and server.who_read() == [0, 1]
    slow.there = True
    server.go_on()
    assert server.who_read() == [2] and server.value == 3


def test_who_leaves_or_waits_for_all_is_not_waited_for():
    server = Server(least=3)
    server.pushpull(0, -2)
    server.hear(server.state.left(1))
    server.go_on()
    assert server.value == 0
    server.state.meeting.add(2)
    server.state._handle_gone(server.unit)
    server.go_on()
    assert server.value == 2 and server.state.take_rounds() == (1, {})


def test_tokens_and_lateness_make_the_mean():
    server = Server(grace=0.0)
    server.pushpull(0, -1, 10)
    server.pushpull(1, -2, 30)
    assert server.value == pytest.approx((10 + 60) / 40)
    server.pushpull(2, -4, 20)
    before = server.value
    server.pushpull(0, -1, 5)
    server.pushpull(1, -2, 0)
    assert server.value == pytest.approx(before + (5 * 1 + 20 / 2 * 4) / (5 + 20 / 2))


def test_the_end_of_a_generation_closes_what_is_open():
    server = Server(least=3)
    server.pushpull(0, -2)
    assert server.state.finish() and server.value == 2 and server.unit.done == [1, 0, 0]
    server.state.abandon()
    assert server.state.quiet


def test_the_log_names_ranks():
    assert late_sentence({3: (1, 1), 0: (7, 2)}) == (
        "too late for a round, and in the next one with less weight: rank 0 with 7 pushes of a key, by at most 2 "
        "rounds; rank 3 with 1 push of a key, by at most 1 round"
    )
