"""A store that goes on from a folder and saves itself there (options `checkpoint` and `every`).

`resume` loads the newest checkpoint that can be read. A job that goes on makes the same calls as a job that begins. So
does a worker that joins a store which others train, and after a recovery a program may repeat them (`worker.restored`).

`RegularSaves` is the schedule. A *step* of a program pushes each key once. On a worker a step ends when it begins to
push some key more often than it has pushed any key before. So all workers of a synchronous store come to the same end
of a step, each in its own time, and save together there. After a step at whose end some keys have been pushed more
often than others, nothing is saved.

In an asynchronous store worker 0 saves alone, after steps of its own: each key as it is then, with what others have
pushed, and without residuals of compression. If the last save is still being written, the next one comes after a later
step, and nobody waits for it. When all workers close the store, what it then holds is saved too.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import Any

import msgspec

from mpips.collectives.errors import CollectiveError, warn
from mpips.collectives.fabric import requests
from mpips.store.checkpoint import folder as files
from mpips.store.checkpoint.load import load
from mpips.store.checkpoint.save import Saving, save, save_alone
from mpips.store.keys.key import Name
from mpips.store.roles import Layout
from mpips.store.runtime.generation import Generation
from mpips.store.worker.restored import Restored
from mpips.store.worker.store import WorkerStore

# of the message of `tell_spares`, on the store's communicator
TAG = 6


def resume(store: WorkerStore) -> tuple[int, Restored]:
    """Load the newest checkpoint of the folder that can be read. Collective, blocking.

    Returns:
        Its step (0 if there is none), and what the program may then ask for.

    Raises:
        ValueError: On all workers. There is no folder and none can be made, or none of its files can be read.
    """
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
    texts = store.agree("create", refusal=refusal, data=" ".join(map(str, steps)).encode())
    failure: ValueError | None = None
    for step in sorted(map(int, texts[0].split()), reverse=True):
        path = files.path_of(folder, step)
        try:
            load(store, path)
        except CollectiveError:
            raise
        except ValueError as error:
            # All workers raise the same error, and nothing has changed.
            failure = failure or error
            if store.layout.rank == 0:
                warn(f"the checkpoint of step {step} is left out: {error}")
            continue
        if store.layout.rank == 0:
            print(f"mpips: the store goes on from step {step}, saved in {folder}", file=sys.stderr, flush=True)
        return step, Restored(path, store.pushed, store.groups, store.compressor, saved=True, strict=True)
    if failure is not None:
        raise failure
    return 0, Restored()


def tell_spares(layout: Layout, step: int | None) -> None:
    """Tell the spares from which step the store goes on, to save itself from there. Called on all; worker 0 tells.

    `step` None: the store does not save itself. Does not block.
    """
    if layout.spares and layout.rank == 0:
        size = layout.world.Get_size()
        requests.send_to_all(layout.world, msgspec.msgpack.encode(step), range(size - layout.spares, size), TAG)


def hear_step(layout: Layout, generation: Generation) -> int | None:
    """Wait on a spare for what worker 0 tells. Blocking."""
    received: list[bytes] = []

    def heard() -> bool:
        if (message := requests.receive_next(layout.world, TAG)) is not None:
            received.append(message[1])
        return bool(received)

    generation.wait(heard, "create")
    return msgspec.msgpack.decode(received[0], type=int | None)


LISTS = (list, tuple)
# While a save is under way, and after a recovery, the next save is tried after 1 / LATER of the steps between two.
LATER = 8


class RegularSaves:
    """The schedule by which the store of this worker saves itself.

    Args:
        step: The step from which the store goes on.
    """

    def __init__(self, store: WorkerStore, step: int) -> None:
        options = store.layout.options
        self.folder = options.checkpoint
        self.every = options.every
        self._store = store
        self._step = step
        self.pushing: object = ()
        # number of this worker's pushes of each key and collection
        self._counts: dict[Name, int] = {}
        # steps that this worker has begun since `step`
        self._most = 0
        self._next: float = self._after(step)
        # the last step that was saved, or that the store goes on from
        self._saved = step
        self._warned = False

    def _after(self, step: int) -> int:
        return (step // self.every + 1) * self.every

    def _soon(self, step: int) -> int:
        return min(self._after(step), step + max(1, self.every // LATER))

    def is_due(self, key: Any) -> bool:
        """True if a push of this key, or list of keys, begins a step before which the store must be saved."""
        for name, collection in self._store.collections.items():
            # The numbers differ after a round was refused.
            if collection.round != self._counts.get(name, 0):
                self._counts[name] = collection.round
                self._most = max(self._counts.values())
        if self._step + self._most < self._next:
            return False
        if self._store.layout.rank and self._store.layout.asynchronous:
            return False
        counts = self._counts
        try:
            pushed = max([counts.get(name, 0) for name in (key if type(key) in LISTS else (key,))], default=0)
        # Keys of such types do not exist. The push raises the error.
        except TypeError:
            return False
        return pushed == self._most and (self._store.layout.asynchronous or self._are_equal())

    def count(self, key: Any) -> None:
        """Note that a key, or a list of keys, was pushed."""
        for name in key if type(key) in LISTS else (key,):
            self._counts[name] = count = self._counts.get(name, 0) + 1
            if count > self._most:
                self._most = count

    def leave(self) -> tuple[str, int]:
        """Stop saving, because the caller does it. Return the folder, and the number of steps between two saves."""
        self._next = math.inf
        return self.folder, self.every

    def set_rounds(self, rounds: Mapping[Name, int]) -> None:
        """Count from these rounds, at which the store stands after `recover`."""
        self._counts, self._most = dict(rounds), max(rounds.values(), default=0)
        # Soon, because the last save may have been lost.
        self._next = self._soon(self._step + self._most)

    def save(self) -> Saving | None:
        """Begin to save the store. It is written while training goes on. Collective in a synchronous store.

        Return None if that is left to a later step because a save is under way, or was not possible, of which worker 0
        warns.
        """
        store, step, alone = self._store, self._step + self._most, self._store.layout.asynchronous
        store.finish()
        store.agree_on_refusals("save")
        busy = store.saving is not None and not store.saving.go_on()
        if busy if alone else store.agree("save", data=b"busy" if busy else b"")[0]:
            self._next = self._soon(step)
            return None
        self._next, self._saved = self._after(step), step
        path = files.path_of(self.folder, step)
        try:
            saving = save_alone(store, path) if alone else save(store, path, wait=False)
        except CollectiveError:
            raise
        except ValueError as error:
            # All workers raise the same error, and nothing has changed.
            if store.layout.rank == 0:
                warn(f"the store was not saved after step {step}: {error}")
            return None
        assert saving is not None
        saving.pruned = self.folder
        return saving

    def save_last(self, alike: bool) -> None:
        """Begin to save what is stored at the end, unless it is saved already or the caller saves.

        Collective in a synchronous store. `alike`: all workers have pushed each key equally often.
        """
        store, step, alone = self._store, self._step + self._most, self._store.layout.asynchronous
        if self._next == math.inf or step == self._saved or (alone and store.layout.rank):
            return
        if alone or (alike and self._are_equal()):
            if store.saving is not None:
                store.saving.finish()
            self.save()
        elif store.layout.rank == 0 and not alike:
            warn(f"the store is not saved after step {step}: workers close it after unequal numbers of pushes")

    def _are_equal(self) -> bool:
        """True if all keys that were pushed at all were pushed equally often. Worker 0 warns once if not."""
        pushed = {name: count for name in self._store.pushed if (count := self._counts.get(name, 0))}
        few = min(pushed, key=pushed.__getitem__, default=None)
        if few is None or pushed[few] == self._most:
            return True
        if not self._warned and self._store.layout.rank == 0:
            self._warned = True
            name = f"{self._store.pushed[few].noun} {few!r}"
            warn(
                f"the store is not saved: {name} was pushed {pushed[few]} times, others {self._most} times; push all "
                "of them once a step, or save by kv.save"
            )
        return False
