"""How a store goes on from the folder in which an earlier job has saved it."""

from __future__ import annotations

from collectives.errors import CollectiveError, warn
from mpips.checkpoint import folder as files
from mpips.checkpoint.held import Held
from mpips.checkpoint.load import load
from mpips.checkpoint.source import Store


def resume(store: Store) -> tuple[int, Held]:
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
        return step, Held(path, store.keys, store.groups, store.compressor)
    if failure is not None:
        raise failure
    return 0, Held()
