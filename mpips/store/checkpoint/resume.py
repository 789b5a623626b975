"""A store that goes on from a folder and saves itself there (options `checkpoint` and `every`).

`resume` loads the newest checkpoint that can be read. A job that goes on makes the same calls as one that begins, and
so does a worker that has joined a store which others train; after a recovery a program may repeat them
(`worker.restored`).

`RegularSaves` is the schedule. A *step* of a program pushes each key once. It ends on a worker when that begins to push
a key once more than it has pushed any: so all workers of a synchronous store come to the same end, each in its own
time, and save together there. Nothing is saved after a step at whose end keys have been pushed unequally often. In an
asynchronous store worker 0 saves alone, after steps of its own: each key as it is then, with whatever others have
pushed; what compression has kept back is not saved. Where the last save is still being written, the next one waits for
a later step, and nobody waits for it. What the store holds when all workers close it is saved, too.
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

TAG = 6
"""Of `tell`'s message on the store's communicator."""


def resume(store: WorkerStore) -> tuple[int, Restored]:
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
        return step, Restored(path, store.pushed, store.groups, store.compressor, saved=True, strict=True)
    if failure is not None:
        raise failure
    return 0, Restored()


def tell_spares(layout: Layout, step: int | None) -> None:
    """On worker 0: the store goes on from this step and saves itself; None: it does not. Does not block."""
    if layout.spares and layout.rank == 0:
        size = layout.world.Get_size()
        requests.tell(layout.world, msgspec.msgpack.encode(step), range(size - layout.spares, size), TAG)


def hear_step(layout: Layout, generation: Generation) -> int | None:
    """On a spare: what worker 0 has told; blocking."""
    said: list[bytes] = []

    def heard() -> bool:
        if (message := requests.received(layout.world, TAG)) is not None:
            said.append(message[1])
        return bool(said)

    generation.wait(heard, "create")
    return msgspec.msgpack.decode(said[0], type=int | None)


LISTS = (list, tuple)
LATER = 8
"""While a save is under way, and after a recovery, the next one is tried after 1 / 8 of the steps between two."""


class RegularSaves:
    """The schedule by which the store of this worker saves itself. `step`: that from which it goes on."""

    def __init__(self, store: WorkerStore, step: int) -> None:
        options = store.layout.options
        self.folder, self.every = options.checkpoint, options.every
        self._store, self._step = store, step
        self.pushing: object = ()
        self._counts: dict[Name, int] = {}
        """How often this worker has pushed each key and table."""
        self._most = 0
        """The steps that this worker has begun."""
        self._next: float = self._after(step)
        self._saved = step
        """The last step that was saved, or that it goes on from."""
        self._warned = False

    def _after(self, step: int) -> int:
        return (step // self.every + 1) * self.every

    def _soon(self, step: int) -> int:
        return min(self._after(step), step + max(1, self.every // LATER))

    def is_due(self, key: Any) -> bool:
        """Return whether a push of this key, or list of keys, begins a step before which the store has to be saved."""
        for name, table in self._store.tables.items():
            if table.round != self._counts.get(name, 0):  # a round was refused
                self._counts[name] = table.round
                self._most = max(self._counts.values())
        if self._step + self._most < self._next:
            return False
        if self._store.layout.rank and self._store.layout.asynchronous:
            return False
        counts = self._counts
        try:
            pushed = max([counts.get(name, 0) for name in (key if type(key) in LISTS else (key,))], default=0)
        except TypeError:  # such keys cannot be; the push says so
            return False
        return pushed == self._most and (self._store.layout.asynchronous or self._are_equal())

    def count(self, key: Any) -> None:
        """Such a push has been made."""
        for name in key if type(key) in LISTS else (key,):
            self._counts[name] = count = self._counts.get(name, 0) + 1
            if count > self._most:
                self._most = count

    def leave(self) -> tuple[str, int]:
        """Save no more, as the caller will: to which folder, and after how many rounds each."""
        self._next = math.inf
        return self.folder, self.every

    def set_rounds(self, rounds: Mapping[Name, int]) -> None:
        """The store stands at these rounds, after `recover`."""
        self._counts, self._most = dict(rounds), max(rounds.values(), default=0)
        self._next = self._soon(self._step + self._most)  # the last save may have been lost

    def save(self) -> Saving | None:
        """Save what is stored, beside the training. None where that is left to a later step, or was not possible,
        which is warned of. Collective in a synchronous store."""
        store, step, alone = self._store, self._step + self._most, self._store.layout.asynchronous
        store.finish()
        store.hear_refusals("save")
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
        except ValueError as error:  # the same on all workers, and nothing has changed
            if store.layout.rank == 0:
                warn(f"the store was not saved after step {step}: {error}")
            return None
        assert saving is not None
        saving.pruned = self.folder
        return saving

    def save_last(self, alike: bool) -> None:
        """Begin to save what is stored at the end, unless it has been, or the caller saves. `alike`: all workers have
        pushed each key equally often. Collective in a synchronous store."""
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
        """Return whether all keys that have been pushed were pushed equally often."""
        pushed = {name: count for name in self._store.pushed if (count := self._counts.get(name, 0))}
        few = min(pushed, key=pushed.__getitem__, default=None)
        if few is None or pushed[few] == self._most:
            return True
        if not self._warned and self._store.layout.rank == 0:
            self._warned = True
            name = f"{self._store.pushed[few].noun} {few!r}"
            warn(
                f"the store is not saved: {name} was pushed {pushed[few]} times, others {self._most} times; push every "
                "key and table once a step, or save by kv.save"
            )
        return False
