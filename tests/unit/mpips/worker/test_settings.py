"""Calls of all workers: what is compared, how often they meet, and when pushes are waited for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from collectives.fabric.tasks import Task
from collectives.fabric.wait import Limits
from mpips.store.keys.key import Key
from mpips.store.worker.settings import Settings


class Generation:
    """Two workers meet: the other one brings the same, but for what `other` makes of it."""

    def __init__(self, said: list[str]) -> None:
        self.limits, self.over, self.on_end = Limits(30, 30), None, []
        self.said = said
        self.other: Callable[[list[int]], list[int]] = lambda rounds: rounds

    def check(self) -> None:
        pass

    def look(self, waited: float) -> None:
        pass

    def end(self, what: str, error: BaseException) -> BaseException:
        raise AssertionError(f"{what} has ended the generation: {error}")

    def meet(self, payload: bytes, what: str, everybody: bool = False) -> list[bytes]:
        self.said.append("meet")
        word = msgspec.msgpack.decode(payload)
        if word[4]:
            rounds, data = msgspec.msgpack.decode(word[4])
            word[4] = msgspec.msgpack.encode((self.other(rounds), data))
        return [payload, msgspec.msgpack.encode(word)]


class Backend:
    """What is asked to wait for pushes."""

    communicators = ()
    direct = False

    def __init__(self, said: list[str]) -> None:
        self.said = said

    def listen(self) -> None:
        pass

    def settle(self, keys: list[Key]) -> Task[None]:
        self.said.append("settle")
        yield from ()


@pytest.fixture(params=[0, 2], ids=["no servers", "servers"])
def settings(request: pytest.FixtureRequest) -> Iterator[Settings]:
    said: list[str] = []
    layout: Any = SimpleNamespace(rank=0, num_servers=request.param, asynchronous=False)
    made = Settings(layout, Backend(said), Generation(said))  # type: ignore[arg-type]
    made.add([Key("a", (3,), np.dtype(np.float32), round=4), Key("b", (3,), np.dtype(np.float32), round=7)])
    yield made
    made.engine.close()


def test_they_meet_once_and_again_when_servers_have_read_what_was_pushed(settings: Settings) -> None:
    told = settings.settled("recut", [("a", "")], data=b"x")
    assert told == [b"x", b"x"]
    assert settings.generation.said == (["meet", "settle", "meet"] if settings.layout.num_servers else ["meet"])


def test_who_is_ahead_is_named_before_anybody_waits_for_servers(settings: Settings) -> None:
    settings.generation.other = lambda rounds: [rounds[0], rounds[1] + 1]
    with pytest.raises(ValueError, match="set_optimizer: key 'b' was pushed 8 times by rank 1 and 7 times by rank 0"):
        settings.settled("set_optimizer")
    assert settings.generation.said == ["meet"]


def test_a_bad_argument_is_everybodys(settings: Settings) -> None:
    with pytest.raises(TypeError, match="forget: no such thing"):
        settings.settled("forget", refusal=TypeError("forget: no such thing"))
    assert settings.generation.said == ["meet"]
