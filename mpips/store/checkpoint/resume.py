"""Let a store save itself in a folder and continue from there (options `checkpoint` and `every`).

`resume` loads the newest checkpoint that can be read. After that the program makes the same calls as in a job that
starts from scratch (see `worker.restored`).

`RegularSaves` is the schedule of saves. A *step* of a program pushes each key once. A worker has ended a step when it
begins to push one key more often than it has pushed any key so far. So all workers of a synchronous store find the same
end of a step without communication, and save together at that point. If some keys have been pushed more often than
others at the end of a step, the store is not saved.

In an asynchronous store worker 0 saves alone, after its own steps. It saves each key as it is at that moment, including
pushes of other workers, but without residuals of compression. No save waits for another: if the last save is still
being written, the next one is put off to a later step. When all workers close the store, its final content is saved.
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

# tag of the message of `tell_spares`, on the store's communicator
TAG = 6


def resume(store: WorkerStore) -> tuple[int, Restored]:
    """Load the newest checkpoint of the folder that can be read. Collective, blocking.

    Returns:
        The step of the checkpoint (0 if the folder has no checkpoint), and the content that the program may claim.

    Raises:
        ValueError: On all workers. The folder does not exist and cannot be made, or it has checkpoints and none of them
            can be read.
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
            # `load` has raised this error on all workers and has changed nothing. So all workers try the next older
            # file.
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
    """Tell the spares from which step the store continues. They need it for the schedule of saves. Does not block.

    Called on all ranks, but only worker 0 sends the message. `step` is None if the store does not save itself.
    """
    if layout.spares and layout.rank == 0:
        size = layout.world.Get_size()
        requests.send_to_all(layout.world, msgspec.msgpack.encode(step), range(size - layout.spares, size), TAG)


def hear_step(layout: Layout, generation: Generation) -> int | None:
    """On a spare, wait for the step that worker 0 sends by `tell_spares`. Blocking."""
    received: list[bytes] = []

    def heard() -> bool:
        if (message := requests.receive_next(layout.world, TAG)) is not None:
            received.append(message[1])
        return bool(received)

    generation.wait(heard, "create")
    return msgspec.msgpack.decode(received[0], type=int | None)


LISTS = (list, tuple)
# After a recovery, or if the last save is still being written, the next save is tried after 1 / LATER of the usual
# number of steps between two saves.
LATER = 8


class RegularSaves:
    """The schedule by which a store saves itself, on one worker.

    Args:
        step: The step from which the store continues.
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
        # number of steps that this worker has begun since `step`, which is the largest number in `_counts`
        self._most = 0
        self._next: float = self._after(step)
        # the last step that was saved, or at first the step from which the store continues
        self._saved = step
        self._warned = False

    def _after(self, step: int) -> int:
        return (step // self.every + 1) * self.every

    def _soon(self, step: int) -> int:
        return min(self._after(step), step + max(1, self.every // LATER))

    def is_due(self, key: Any) -> bool:
        """True if the store has to be saved before a push of this key or list of keys."""
        for name, collection in self._store.collections.items():
            # The two numbers differ if servers have refused a round. The refused round does not count.
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
        # A key of an unhashable type does not exist. The push itself will raise the error.
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
        """Stop saving, because the caller now saves instead.

        Return the folder, and the number of steps between two saves.
        """
        self._next = math.inf
        return self.folder, self.every

    def set_rounds(self, rounds: Mapping[Name, int]) -> None:
        """Continue counting from `rounds`, the rounds of keys and collections after `recover`."""
        self._counts, self._most = dict(rounds), max(rounds.values(), default=0)
        # Save soon, because the failure may have ended the last save before it was complete.
        self._next = self._soon(self._step + self._most)

    def save(self) -> Saving | None:
        """Begin to save the store while training continues. Collective in a synchronous store.

        Return None if no save was begun, for one of two reasons. If the last save is still being written, a later step
        will save. If the store cannot be saved, worker 0 warns.
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
            # The error was raised on all workers, and nothing has changed. So training can continue without this save.
            if store.layout.rank == 0:
                warn(f"the store was not saved after step {step}: {error}")
            return None
        assert saving is not None
        saving.pruned = self.folder
        return saving

    def save_last(self, alike: bool) -> None:
        """Begin to save the final content of the store, unless it has been saved already or `leave` has stopped saves.

        Collective in a synchronous store. `alike`: True if all workers have pushed each key equally often.
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
        """True if all keys that were ever pushed were pushed equally often. Otherwise worker 0 warns, but only once."""
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
