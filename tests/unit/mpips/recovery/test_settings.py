"""Settings that a generation's end has interrupted are made in the next one, on all workers and servers."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from collectives import CollectiveError
from mpips import optimizers
from mpips.compression import TwoBit
from mpips.store.recovery.plan import Inventory, RecoveryPlan, choose_rounds
from mpips.store.remote.states import Changes, ServerSettings
from mpips.store.transport import frames


class Room:
    """What workers tell each other; rank 0's `at_rank_0` runs first."""

    def __init__(self):
        self.told = b""


class Setup:
    """One worker's end, with servers that note what they are told. `breaks`: when the generation ends: "told" or
    "met"."""

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
    layout = SimpleNamespace(asynchronous=True, rank=0)
    settings = [ServerSettings(layout, one, push) for one, push in zip(setups, pushes)]
    return SimpleNamespace(servers=servers, setups=setups, settings=settings, pushes=pushes)


def attempt(task):
    with pytest.raises(CollectiveError):
        run(task)


def after(store, *refusals):
    """The change that servers make once more, and how all go on when they have said these refusals."""
    said = [Inventory([], [], [], changes=one.changes) for one in store.settings]
    plan = RecoveryPlan(said, choose_rounds(said, True))
    groups, compressor, changes = plan.settings_after(refusals or ("", ""))
    for settings in store.settings:
        settings.begin(Changes(*changes), groups)
    return plan.change, groups, compressor


def test_servers_make_a_change_once_more_that_only_some_had_heard(store):
    sgd = optimizers.create("sgd", learning_rate=0.5)
    for setup in store.setups:
        setup.breaks = "told"
    attempt(store.settings[0].set_optimizer(sgd, None))
    store.setups[1].breaks = "met"
    attempt(store.settings[1].set_optimizer(sgd, None))
    change, groups, _ = after(store)
    assert change == frames.SetOptimizer(optimizers.encode(sgd)) and groups.default == sgd
    assert [settings.updates("w") for settings in store.settings] == [True, True]
    assert after(store)[0] is None


def test_what_one_worker_knows_to_be_made_is_not_made_again(store):
    run(store.settings[0].set_compression(TwoBit(0.25)))
    store.setups[1].breaks = "met"
    attempt(store.settings[1].set_compression(TwoBit(0.25)))
    assert after(store)[0] is None
    assert {settings.changes for settings in store.settings} == {store.settings[0].changes}


def test_a_change_that_all_servers_refuse_has_not_been(store):
    store.setups[0].breaks = store.setups[1].breaks = "met"
    for settings in store.settings:
        attempt(settings.set_compression(TwoBit(0.25)))
    change, _, compressor = after(store, "unknown", "unknown")
    assert change is not None and compressor is None
    assert after(store)[0] is None


def test_servers_that_differ_end_the_generation(store):
    store.setups[0].breaks = store.setups[1].breaks = "met"
    for settings in store.settings:
        attempt(settings.set_compression(TwoBit(0.25)))
    with pytest.raises(CollectiveError, match="servers differ: unknown"):
        after(store, "", "unknown")


def test_what_servers_refuse_has_not_been(store):
    run(store.settings[0].set_optimizer(optimizers.create("sgd"), None))
    before, store.setups[0].refusal = store.settings[0].changes, "unknown"
    with pytest.raises(ValueError, match="unknown"):
        run(store.settings[0].set_compression(TwoBit(0.25)))
    assert store.settings[0].changes == before
    assert store.pushes[0].residuals is None
