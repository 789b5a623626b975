"""Pushes and pulls of one worker: checked, counted, put in order, done now or started."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Hashable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives.errors import CollectiveError, MismatchError, StallError, of_caller
from mpips import arguments, calls, fused
from mpips.arguments import Name
from mpips.calls import Call
from mpips.engine import Engine, Handle
from mpips.keys import Key
from mpips.layout import Layout
from mpips.members import Nameless
from mpips.pure import Pure
from mpips.row_sparse import RowSparse
from mpips.served import Served
from mpips.session import together
from mpips.talk import RECENT, Talk

Array = NDArray[Any]
Task = Generator[bool | None, None, Any]
CLOSED = "the store is closed: make this call before close()"


class Operations:
    """What `KVStore` does with keys. `known`: the keys that are initialised."""

    def __init__(self, layout: Layout, backend: Served | Pure, engine: Engine, known: dict[Name, Key]) -> None:
        options, workers = layout.options, layout.workers
        assert workers is not None
        assert layout.meetings is not None
        self._layout, self._backend, self._engine, self._known = layout, backend, engine, known
        self.talk = Talk(
            workers, layout.meetings, lambda: {key.name: key.round for key in known.values()}, backend.fail,
            layout.asynchronous, backend.waits_for, options.stall_seconds, options.timeout_seconds,
        )  # fmt: skip
        engine.look = lambda waited: self.talk.look()
        backend.meanwhile(self.talk.look)
        self.closed = ""
        """Why no call can be made any more."""
        self._rounds = not layout.asynchronous and isinstance(backend, Served)

    def do(self, what: str, key: Any, value: Any, out: Any, priority: int) -> None:
        """Push, pull or pushpull, blocking."""
        names, task, priority = self._prepare(what, key, value, out, priority)
        self.run(names, task, priority, what, "" if what == "push" else what)

    def start(
        self, what: str, key: Any, value: Any, out: Any, priority: int, turns: Sequence[Hashable]
    ) -> Handle:
        """The same, not blocking; it takes turns with others on its keys and on `turns`."""
        names, task, priority = self._prepare(what, key, value, out, priority)
        if isinstance(self._backend, Pure):
            self._backend.stepwise = True
        order = [*self._order(names), *(("turns", name) for name in turns)]
        return self._engine.submit(order, task, priority, self._text(what, names))

    def taken(self, key: Any, push: Handle) -> Handle:
        """A handle that ends when the servers have read what `push`, of these keys, sends: `push` itself ends when its
        arrays may be overwritten, perhaps with most of it still on its way. Asynchronous stores cannot tell."""
        self.check_open()
        keys = calls.named(self._known, key)
        if self._layout.asynchronous or not isinstance(self._backend, Served) or keys is None:
            return push
        return self._engine.submit([("taken", push)], self._read(keys, push), 0, f"{push.what}, read by the servers")

    def _read(self, keys: Sequence[Key], push: Handle) -> Task:
        while not push.done:
            yield False
        if push.error is None:
            yield from self._backend.settle(keys)

    def pull_rows(self, key: Any, out: Any, row_ids: Any, priority: int) -> None:
        """`KVStore.row_sparse_pull`."""
        what = "row_sparse_pull"
        self._settle()
        try:
            arguments.see_priority(priority, what)
            rows = calls.rows(self._known, key, out, row_ids)
        except (ValueError, TypeError) as error:
            known = calls.named(self._known, key)
            self.run([one.name for one in known or ()], self.refuse(what, known, False, error), 0, what)
            return
        for record, target, ids in rows:
            self.run([record.name], self._backend.pull_rows(record, target, ids), priority, what, what)

    def run(self, names: Sequence[Name], task: Task, priority: int, what: str, waits: str = "") -> None:
        """Do it, blocking. `waits`: its name, if it ends only when all workers have pushed these keys as often."""
        text = self._text(waits, names) if waits and self._rounds else ""
        needs = (lambda: {name: self._known[name].round for name in names}) if text else None
        look = self.talk.waiting(text, needs)
        failure: BaseException | None = None
        try:
            self._engine.run(self._order(names), task, priority, lambda: self._text(what, names), look)
        except BaseException as error:
            failure = error
            raise
        finally:
            self.talk.ended(failure)

    def pull(self, key: Key, out: Array) -> Task:
        """What pulls one key, when it is run."""
        return self._backend.pull(key, out.reshape(-1))

    def count(self, key: Any) -> None:
        """One more push, of the keys that the caller named."""
        talk = self.talk
        talk.calls += 1
        talk.recent[talk.calls % RECENT] = key
        if not talk.calls % RECENT:
            talk.look()  # what others have said must not pile up

    def check_open(self) -> None:
        """RuntimeError where no call can be made any more."""
        if self.closed:
            raise of_caller(RuntimeError(self.closed))

    @contextlib.contextmanager
    def whole(self, what: str) -> Iterator[None]:
        """A change of keys that all workers and servers make. Where it breaks off they may differ, so no call can be
        made any more."""
        try:
            yield
        except BaseException as error:
            why = str(error) or type(error).__name__
            self.closed = f"{what} broke off ({why}), so workers and servers may differ: close, and make another store"
            for key in self._known.values():
                key.short = None
            raise

    def refuse(self, what: str, keys: Sequence[Key] | None, pushes: bool, error: Exception) -> Task:
        """A call whose arguments are bad: all who wait for it, or at least hear of it, get the same sentence."""
        sentence, nameless = f"rank {self._layout.rank}: {error}", keys is None
        try:
            yield from self._backend.refuse(what, keys or (), pushes, sentence, self.talk.event())
        except Nameless as told:
            sentence = str(told)
        except StallError:
            raise
        except MismatchError as told:
            sentence, nameless = str(told), False
        if pushes and nameless:
            self.talk.refused(sentence)
        elif not pushes or self._layout.asynchronous:
            self.talk.warn(sentence)
        raise of_caller(type(error)(sentence))

    # ---- inside

    def _settle(self) -> None:
        """Learn what others wait for since a bad call of this worker, before the next one."""
        self.check_open()
        if self.talk.debt is not None:
            with self._engine.paused():
                self.talk.settle()

    def _prepare(self, what: str, key: Any, value: Any, out: Any, priority: int) -> tuple[list[Name], Task, int]:
        """The keys, what is to be done, and its priority: a bad call has none."""
        self._settle()
        pushes = what != "pull"
        if pushes:
            self._backend.check_updated(what)
        try:
            arguments.see_priority(priority, what)
            made = calls.check(self._known, what, key, value, out)
        except (ValueError, TypeError) as error:
            keys = calls.named(self._known, key)
            if pushes:
                self.count(key if keys else ())
            return [one.name for one in keys or ()], self.refuse(what, keys, pushes, error), 0
        if pushes:
            self.count(key)
        return [call.key.name for call in made], self._perform(made, priority), priority

    def _perform(self, made: list[Call], priority: int) -> Task:
        """Several keys at the same time, unless collectives must keep their order."""
        if len(made) == 1 or (self._backend.communicators and self._backend.collective(made[0].payload is not None)):
            return self._in_turn(made, priority)
        return together([self._one(call, priority) for call in made])

    def _in_turn(self, made: list[Call], priority: int) -> Task:
        """One after the other, small ones that push together; what those pull comes last."""
        steps = fused.steps(made) if self._backend.fuses else [[call] for call in made]
        yield from self._in_steps(steps, priority)
        pushed = [call for step in steps if len(step) > 1 for call in step if call.payload is not None]
        if pulls := [call._replace(payload=None) for call in pushed if call.targets]:
            yield from self._perform(pulls, priority)

    def _in_steps(self, steps: Sequence[list[Call]], priority: int) -> Task:
        made = [call for step in steps for call in step]
        names, before = [call.key.name for call in made], [call.key.round for call in made]
        done = 0
        for step in steps:
            self._backend.calling = names[done:]
            done += len(step)
            try:
                yield from self._step(step, priority)
                if done < len(made):
                    yield True
            except (CollectiveError, KeyboardInterrupt) as error:
                sentence = str(error) or f"rank {self._layout.rank} has given up a call"
                for later, round_ in list(zip(made, before))[done:] if self._backend.calling else ():
                    if later.payload is not None and later.key.round == round_:
                        self._backend.skip(later.key, sentence)
                raise
            finally:
                self._backend.calling = []

    def _step(self, step: Sequence[Call], priority: int) -> Task:
        if len(step) == 1:
            return self._one(step[0], priority)
        keys = [call.key for call in step]
        if step[0].payload is not None:
            return self._backend.push_together(keys, [call.payload.reshape(-1) for call in step], priority)  # type: ignore[union-attr]
        return self._pull_together(keys, [call.targets for call in step])

    def _pull_together(self, keys: Sequence[Key], targets: Sequence[Sequence[Array]]) -> Task:
        assert isinstance(self._backend, Served)  # without servers pulls are no collectives
        yield from self._backend.pull_together(keys, [first.reshape(-1) for first, *_ in targets])
        for first, *others in targets:
            for other in others:
                np.copyto(other, first)

    def _one(self, call: Call, priority: int) -> Task:
        key, payload, targets = call
        if payload is None:
            yield from self._backend.pull(key, targets[0].reshape(-1))
        elif isinstance(payload, RowSparse):
            yield from self._backend.push_rows(key, payload, priority)
            if targets:
                yield from self._backend.pull(key, targets[0].reshape(-1))
        elif key.short is not None and not key.short.lists:
            left = key.short.pushpull(payload, targets[0], priority) if targets else key.short.push(payload, priority)
            if left is not None:
                yield from left
        elif targets:
            yield from self._backend.pushpull(key, payload.reshape(-1), targets[0].reshape(-1), priority)
        else:
            yield from self._backend.push(key, payload.reshape(-1), priority)
        for other in targets[1:]:
            np.copyto(other, targets[0])

    def _text(self, what: str, names: Sequence[Name]) -> str:
        word = f" of key{'s' if len(names) > 1 else ''} {', '.join(map(repr, names[:4]))}" if names else ""
        return f"rank {self._layout.rank}: {what}{word}{', ...' if len(names) > 4 else ''}"

    def _order(self, names: Sequence[Name]) -> list[Hashable]:
        """What an operation takes turns on: its keys, and communicators, used in one order everywhere."""
        return [*names, *self._backend.communicators]
