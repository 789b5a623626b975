"""How a store goes on from the folder in which an earlier job has saved it; and how spares hear of that."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Protocol

import msgspec

from collectives.errors import CollectiveError, warn
from collectives.network import failures
from mpips.store.checkpoint import folder as files
from mpips.store.checkpoint.held import Claims
from mpips.store.checkpoint.load import load
from mpips.store.checkpoint.source import Store
from mpips.store.roles import Layout

TAG = 6
"""Of `tell`'s message on the store's communicator."""


def resume(store: Store) -> tuple[int, Claims]:
    """Take the newest checkpoint of the folder that can be read: its step, 0 where there is none, and what the program
    may then ask for. Collective, blocking; ValueError on all workers where there is no folder, and none can be made, or
    nothing in it can be read."""
    folder = store.layout.options.checkpoint
    steps: dict[int, str] = {}
    refusal: BaseException | None = None
    if store.layout.rank == 0:
        try:
            files.make(folder)
            files.clear_parts(folder)
            steps = files.steps_in(folder)
        except ValueError as error:
            refusal = error
    told = store.agree("create", refusal=refusal, data=" ".join(map(str, steps)).encode())
    failure: ValueError | None = None
    for step in sorted(map(int, told[0].split()), reverse=True):
        path = files.path_of(folder, step)
        try:
            load(store, path)
        except CollectiveError:
            raise
        except ValueError as error:  # the same on all workers, and nothing has changed
            failure = failure or error
            if store.layout.rank == 0:
                warn(f"the checkpoint of step {step} is left out: {error}")
            continue
        if store.layout.rank == 0:
            print(f"mpips: the store goes on from step {step}, saved in {folder}", file=sys.stderr, flush=True)
        return step, Claims(path, store.keys, store.groups, store.compressor, saved=True, strict=True)
    if failure is not None:
        raise failure
    return 0, Claims()


class Waits(Protocol):
    """What waits: a `Generation`."""

    def wait(self, ready: Callable[[], object], what: str) -> None: ...


def tell_spares(layout: Layout, step: int | None) -> None:
    """On worker 0: the store goes on from this step and saves itself; None: it does not. Does not block."""
    if layout.spares and layout.rank == 0:
        size = layout.world.Get_size()
        failures.tell(layout.world, msgspec.msgpack.encode(step), range(size - layout.spares, size), TAG)


def hear(layout: Layout, generation: Waits) -> int | None:
    """On a spare: what worker 0 has told; blocking."""
    said: list[bytes] = []

    def heard() -> bool:
        if (message := failures.received(layout.world, TAG)) is not None:
            said.append(message[1])
        return bool(said)

    generation.wait(heard, "create")
    return msgspec.msgpack.decode(said[0], type=int | None)
