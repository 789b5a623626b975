"""Recover a store, and close it: one generation after another, until all workers have left."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress

from collectives.errors import CollectiveError
from mpips.store.keys.key import Rounds
from mpips.store.recovery.recover import Member, recover
from mpips.store.runtime import rendezvous
from mpips.store.runtime.errors import Step, StoreError, at_exit, in_order, skip_at_exit
from mpips.store.runtime.generation import NEVER
from mpips.store.worker import waiting
from mpips.store.worker.interface import Recovered
from mpips.store.worker.restored import Restored
from mpips.store.worker.settings import Settings

STORE = "the store"
NEEDS_SECONDS = 0.1
"""Between two looks of a worker that waits long at whether what it waits for can come."""


class Generations:
    """The generations of a store on this worker: one begins, one is joined, the last one ends.

    `member`: this worker's part in a recovery. `closed` is called when the last one has ended.
    """

    def __init__(self, store: Settings, member: Member[Recovered], closed: Step) -> None:
        self._store, self._member, self._closed, self._due = store, member, closed, 0.0
        store.generation.needs = self._see_needs
        at_exit(self._exit)

    def recover(self, grow: bool = False) -> Rounds:
        """See `KVStore.recover`."""
        store = self._store
        store.operations.check_not_closed()
        with store.operations.guard("recover"):
            store.engine.forget()
            begun = recover(store.generation, lambda: self._member, store.keys, grow)
            assert begun is not None
        rounds = self._take(begun[1])
        if store.layout.survives:
            store.restored = store.restored.renewed(STORE, store.keys, store.groups, store.compressor)
        else:
            store.restored.keep(store.keys)
        return rounds

    def join(self, recovered: Recovered) -> None:
        """This worker has taken a dead one's place in a store that has this."""
        store = self._store
        rounds = self._take(recovered)
        store.resumed, store.fresh = rounds.step, True
        begun = store.resumed != 0
        store.restored = Restored(STORE, store.keys, store.groups, store.compressor, strict=begun)

    def _take(self, recovered: Recovered) -> Rounds:
        """The next generation has begun with this."""
        store = self._store
        store.keys.clear()
        store.add(recovered.keys)
        store.groups, store.compressor = recovered.groups, recovered.compressor
        rounds = recovered.rounds
        if store.regular is not None:
            store.regular.set_rounds(rounds)
        if rounds.step is not None:
            rounds.step += store.base
        return rounds

    def close(self) -> None:
        """See `KVStore.close`."""
        generation = self._store.generation
        if not self._store.operations.closed:
            limits, generation.limits = generation.limits, NEVER  # who has more to do may take long
            try:
                self._save_last(self._meet_to_close())
            finally:
                generation.limits = limits
            self._leave()

    def give_up(self, error: BaseException) -> None:
        """The block of a `with` has raised this: end the generation for all, and leave. Waits for some seconds at
        most."""
        if not self._store.operations.closed:
            self._store.generation.end("the block of `with` that uses the store", error)
            self._leave()

    def _exit(self) -> None:
        in_order(self.close, self._leave)

    def _save_last(self, told: Sequence[bytes]) -> None:
        """Save what the store holds at its end, where it saves itself and all workers close it after the same step.
        `told`: what each has pushed; empty: they have not met."""
        store = self._store
        if store.regular is None or not told:
            return
        with suppress(CollectiveError):  # somebody has died: what was saved before is there
            store.regular.save_last(alike=all(said == told[0] for said in told))

    def _meet_to_save(self) -> Sequence[bytes]:
        """Wait until all workers close a store that saves itself; what each has pushed, nothing where one does not."""
        store = self._store
        if store.regular is None or store.generation.over is not None:
            return ()
        try:
            with store.operations.guard("close"):
                store.settle()
                return rendezvous.agree(store.generation, waiting.CLOSE, data=waiting.pushes_of(store.keys))
        except (CollectiveError, ValueError):  # the others do something else, and hear of this
            return ()

    def _meet_to_close(self) -> Sequence[bytes]:
        """Return where the store survives deaths, wait until all workers close it: one may die before, and the others
        then
        need this one. StoreError where a death undoes what this worker has pushed: the others make that again. What
        each has pushed; nothing where they have not met."""
        store = self._store
        if not store.layout.survives:
            return self._meet_to_save()
        if store.generation.over is not None:
            return ()
        store.settle()  # what is complete then stays
        pushed = {name: key.round for name, key in store.keys.items()}
        told = waiting.pushes_of(store.keys)
        while True:
            try:
                with store.operations.guard("close"):
                    return rendezvous.agree(store.generation, waiting.CLOSE, data=told)
            except StoreError:
                pass
            try:
                rounds = self.recover()
            except StoreError:  # nobody is left who could need this worker
                return ()
            undone = [name for name, round_ in rounds.items() if round_ < pushed.get(name, 0)]
            if undone and not store.layout.asynchronous:
                raise StoreError(
                    f"close: a death has undone round {pushed[undone[0]]} of key {undone[0]!r}, and the others make it "
                    "again: call recover(), and go on from its step, with close() inside the same try"
                )
            if not store.layout.changed:  # nobody has died: who makes more pushes is not to wait for this worker
                return ()

    def _see_needs(self) -> None:
        """CollectiveError where what this worker waits for cannot come any more."""
        if (now := time.monotonic()) < self._due:
            return
        self._due = now + NEEDS_SECONDS
        self._store.see_standing()
        if self._store.layout.survives or self._store.regular is not None:
            self._see_closing()

    def _see_closing(self) -> None:
        """CollectiveError where a worker closes the store whose next push this one waits for."""
        store = self._store
        ahead = store.layout.options.staleness if store.layout.asynchronous else 0
        now = () if store.regular is None or store.layout.num_servers else store.regular.pushing
        pushing = now if isinstance(now, (list, tuple)) else (now,)
        if ahead >= 0 and (why := waiting.waits_for_closed(store.generation.words(), store.keys, ahead, pushing)):
            raise CollectiveError(why)

    def _leave(self) -> None:
        """Take the steps of the end in this order, each though another fails. Collective."""
        store = self._store
        if store.operations.closed:
            return
        skip_at_exit(self._exit)
        store.operations.closed = True
        store.unbind()
        last = [store.engine.close, store.backend.finish, self._closed]
        if store.generation.over is not None:
            in_order(store.engine.forget, *last)
            return
        saving = [] if store.saving is None else [store.saving.finish]
        in_order(*saving, lambda: store.engine.finish(detached=True), *last)
