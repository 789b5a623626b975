"""Calls that failures interrupt are made again, unless the failure would only occur again."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from mpips.collectives.errors import CollectiveError, MismatchError
from mpips.store.keys.key import Rounds
from mpips.store.runtime.errors import LostError, StoreError
from mpips.training.recovery import Recovery


class Store:
    """A store of one worker. Each of `recoveries` says what one recovery finds: the round of the key, and a death."""

    def __init__(self, *recoveries: tuple[int, bool], survives: bool = True, torn: tuple[str, ...] = ()) -> None:
        self.layout = SimpleNamespace(survives=survives, changed=False)
        self.worker = SimpleNamespace(agree=lambda what, data: [data])
        self._recoveries = list(recoveries)
        self._torn = torn

    def recover(self, grow: bool) -> Rounds:
        round_, self.layout.changed = self._recoveries.pop(0)
        rounds = Rounds(w=round_)
        rounds.torn = self._torn
        return rounds


class Steps:
    """A call, or a meeting, that raises these errors one after another, and then ends."""

    def __init__(self, *errors: Exception) -> None:
        self._errors = list(errors)
        self.made = 0

    def __call__(self) -> str:
        self.made += 1
        if self._errors:
            raise self._errors.pop(0)
        return "done"


def test_a_call_is_made_again_after_each_death():
    call, meet = Steps(StoreError("a"), StoreError("b")), Steps()
    assert Recovery(Store((4, True), (4, True)), ["w"], meet).run(call) == "done"
    assert (call.made, meet.made) == (3, 2)


def test_a_call_that_is_not_to_be_repeated_returns_none():
    call, meet = Steps(StoreError("a")), Steps()
    recovery = Recovery(Store((4, True)), ["w"], meet)
    assert recovery.run_once(call) is None and recovery.run_once(call) == "done"
    assert (call.made, meet.made) == (2, 1)


def test_workers_meet_again_where_another_dies_during_the_meeting():
    call, meet = Steps(StoreError("a")), Steps(StoreError("b"))
    assert Recovery(Store((4, True), (4, True)), ["w"], meet).run(call) == "done"
    assert (call.made, meet.made) == (2, 2)


def test_an_error_without_a_death_is_raised_once_nobody_advances():
    errors = [StoreError(text) for text in "abcd"]
    call, meet = Steps(*errors), Steps()
    with pytest.raises(StoreError) as raised:
        Recovery(Store((4, False), (5, False), (5, True), (5, False)), ["w"], meet).run(call)
    assert raised.value is errors[3] and meet.made == 3


@pytest.mark.parametrize("error", [MismatchError("a"), LostError("a")], ids=lambda error: type(error).__name__)
def test_what_no_recovery_mends_is_raised_at_once(error):
    with pytest.raises(CollectiveError) as raised:
        Recovery(Store(), ["w"], Steps()).run(Steps(error))
    assert raised.value is error


def test_a_store_that_survives_no_death_raises_at_once():
    with pytest.raises(StoreError, match=r"^a$"):
        Recovery(Store(survives=False), ["w"], Steps()).run(Steps(StoreError("a")))


@pytest.mark.parametrize("keys, torn", [(["w"], ("w",)), (["w", "lost"], ())])
def test_a_key_that_is_not_whole_is_an_error_that_names_it(keys, torn):
    with pytest.raises(LostError, match=f"key {keys[-1]!r} is not whole after a death: go on from a checkpoint"):
        Recovery(Store((4, True), torn=torn), keys, Steps()).run(Steps(StoreError("a")))
