"""Settings that an epoch's end has interrupted are made in the next one, on all workers and servers."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from collectives import CollectiveError
from mpips import optimizers
from mpips.compression import TwoBit
from mpips.served.states import Settings
from mpips.transport import frames


class Room:
    """What workers tell each other; rank 0's `at_rank_0` runs first."""

    def __init__(self):
        self.told = b""


class Setup:
    """One worker's end, with servers that note what they are told. `breaks`: when the epoch ends: "told" or "met"."""

    def __init__(self, room, rank, servers):
        self.room, self.rank, self.servers, self.breaks, self.refusal = room, rank, servers, "", ""

    def at_rank_0(self, do, what):
        if self.rank == 0:
            self.room.told = yield from do()
        if self.breaks == "met":
            raise CollectiveError("interrupted in the meeting")
        if self.refusal:
            raise ValueError(self.refusal)
        return self.room.told
        yield

    def tell_all(self, request):
        for index, server in enumerate(self.servers):
            if self.breaks == "told" and index == 1:
                raise CollectiveError("interrupted while it tells")
            server.append(request)
        return b""
        yield


def run(task):
    for _ in task:
        pass


@pytest.fixture
def store():
    room, servers = Room(), [[], []]
    setups = [Setup(room, rank, servers) for rank in range(2)]
    pushes = [SimpleNamespace(residuals=None) for _ in setups]
    settings = [Settings(SimpleNamespace(asynchronous=True), one, push) for one, push in zip(setups, pushes)]
    return SimpleNamespace(servers=servers, setups=setups, settings=settings, pushes=pushes)


def attempt(task):
    with pytest.raises(CollectiveError):
        run(task)


def recover(store):
    for setup in store.setups:
        setup.breaks = ""
    for settings in store.settings:
        run(settings.recover())


def test_all_servers_hear_what_only_some_had_heard(store):
    sgd = optimizers.create("sgd", learning_rate=0.5)
    for setup in store.setups:
        setup.breaks = "told"
    attempt(store.settings[0].set_optimizer(sgd, None))
    store.setups[1].breaks = "met"
    attempt(store.settings[1].set_optimizer(sgd, None))
    recover(store)
    assert [settings.updates("w") for settings in store.settings] == [True, True]
    assert [server[-1] for server in store.servers] == [frames.SetOptimizer(optimizers.encode(sgd))] * 2


def test_who_was_interrupted_in_the_meeting_learns_of_it(store):
    run(store.settings[0].set_compression(TwoBit(0.25)))
    store.setups[1].breaks = "met"
    attempt(store.settings[1].set_compression(TwoBit(0.25)))
    assert store.pushes[1].residuals is None
    recover(store)
    assert store.pushes[1].residuals.compressor == TwoBit(0.25)
    assert [len(server) for server in store.servers] == [1, 1]  # all servers had heard: state stays as it is


def test_nothing_is_told_again_where_nothing_was_begun(store):
    for settings in store.settings:
        run(settings.set_optimizer(optimizers.create("sgd"), None))
    recover(store)
    assert [len(server) for server in store.servers] == [1, 1]


def test_what_servers_refuse_has_not_been(store):
    run(store.settings[0].set_optimizer(optimizers.create("sgd"), None))
    store.setups[0].refusal = "unknown"
    with pytest.raises(ValueError, match="unknown"):
        run(store.settings[0].set_compression(TwoBit(0.25)))
    store.setups[0].refusal = ""
    before = [len(server) for server in store.servers]
    recover(store)
    assert [len(server) for server in store.servers] == before
    assert store.pushes[0].residuals is None
