"""A store without servers: every worker keeps every key, pushes are allreduces, the optimizer runs on the workers."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Sequence
from functools import reduce
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

import collectives
from collectives.api import begin
from collectives.errors import MismatchError
from collectives.started import agree
from mpips import bridge
from mpips.agreement import Agreement, Card
from mpips.arguments import Name
from mpips.compression import Compressor
from mpips.fused import Vectors
from mpips.inside import until
from mpips.keys import Key
from mpips.layout import Layout
from mpips.optimizers import Optimizer, State
from mpips.row_sparse import RowSparse, merge, update_rows
from mpips.rows import packed, unpacked
from mpips.session import Task
from mpips.summed import Everywhere

Array = NDArray[Any]
SUMS = "reproducible"
"""The algorithm of pushes: how keys are cut changes no bit, so that overlap changes none."""


class Pure:
    """The operations of a store without servers; the same values, bit for bit, on every worker."""

    def __init__(self, layout: Layout) -> None:
        assert layout.workers is not None
        self.layout, self._comm = layout, layout.workers
        home = bridge.patient(self._comm, layout.options.stall_seconds, layout.options.timeout_seconds)
        self._agreement = Agreement(self._comm, 0, home.nodes == 1, layout.options) if home.size > 1 else None
        self.one_node = home.nodes == 1
        self._vectors = Vectors(self.one_node)
        self.calling: list[Name] = []
        """The keys that the present call is yet to use, the present one first."""
        self._stored: dict[int | str, Array] = {}
        self._sums: dict[int | str, Array] = {}
        self._states: dict[int | str, tuple[int, State]] = {}
        self._optimizer: Optimizer | None = None
        self._compressor: Compressor | None = None
        self._residuals: dict[int | str, Array] = {}
        self.communicators = (("communicator", "workers"),)
        """Names of what all its operations hold collectives on."""
        self.stepwise = False
        """Whether operations yield where they wait, as they must beside compute, at the cost of some microseconds."""

    def waits_for(self, worker: int) -> bool:
        """Whether this worker is in a call that waits for that one, so that it can make no other: it need not be known,
        as bad calls are told in the call itself."""
        return False

    @property
    def unfinished(self) -> bool:
        """Whether MPI still has to do with a call that was given up."""
        return self._agreement is not None and self._agreement.unfinished

    def check_updated(self, what: str) -> None:
        """Without an optimizer a push replaces the value."""

    def meanwhile(self, look: Callable[[], None]) -> None:
        """What to call now and then while this worker waits for members of its client: all are in all calls."""

    def init(self, keys: list[Key], values: list[Array]) -> Task:
        for key, value in zip(keys, values, strict=True):
            stored = self._stored[key.name] = value.reshape(-1).copy()
            collectives.broadcast(stored, self._comm)
            key.short = Everywhere(self, key) if self.one_node else None
        yield from ()

    def forget(self, keys: Sequence[Key]) -> Task:
        """Give up keys."""
        for key in keys:
            for each in (self._stored, self._sums, self._states, self._residuals):
                each.pop(key.name, None)
        yield from ()

    def push(self, key: Key, flat: Array, priority: int, wait: bool = True) -> Task:
        key.round += 1
        if self._compressor is not None and key.dtype.kind == "f":
            flat = self._compressed(key, flat)
        total = self._total(key)
        yield from self._agreed(Card("push", self.calling or [key.name], True), lambda: self._sum(flat, total))
        self._take(key, total)

    def push_now(self, key: Key, flat: Array) -> Task | None:
        """`push` on one node, where nothing else is under way; what is left of it, if anything."""
        if self.stepwise or self._compressor is not None:
            return self.push(key, flat, 0)
        key.round += 1
        total, agreement = self._total(key), self._agreement
        card = Card("push", self.calling or [key.name], True)
        fallback = None
        if agreement is not None:
            agreement.note(card.text)
        try:
            collectives.allreduce(flat, self._comm, algorithm=SUMS, out=total)
            fallback = agreement.differs() if agreement is not None else None
        except MismatchError as error:
            fallback = str(error)
        if fallback is not None:
            self._explain(card, fallback)
        self._take(key, total)
        return None

    def value(self, key: Key) -> Array:
        """What is stored, 1-D."""
        return self._stored[key.name]

    def _total(self, key: Key) -> Array:
        """Where the key's next sum goes."""
        total = self._sums.get(key.name)
        if total is None:
            total = self._sums[key.name] = np.empty_like(self._stored[key.name])
        return total

    def _take(self, key: Key, total: Array) -> None:
        """The sum replaces what is stored, now that it is known to be the right one, or updates it."""
        if self._optimizer is None:
            self._stored[key.name], self._sums[key.name] = total, self._stored[key.name]
        else:
            self._update(key, total)

    @property
    def fuses(self) -> bool:
        """Whether small keys of one call are better pushed by `push_together`."""
        return self._agreement is not None

    def push_together(self, keys: Sequence[Key], flats: Sequence[Array], priority: int) -> Task:
        """Push keys of one dtype, whose sum over the workers is made as that of one vector."""
        for key in keys:
            key.round += 1
        if self._compressor is not None and keys[0].dtype.kind == "f":
            flats = [self._compressed(key, flat) for key, flat in zip(keys, flats)]
        vector, total, parts = self._vectors.lay(flats)
        card = Card("push", self.calling or [key.name for key in keys], True, together=len(keys))
        try:
            yield from self._agreed(card, lambda: self._sum(vector, total))
        except BaseException:
            self._vectors.leave()
            raise
        for key, part in zip(keys, parts):
            if self._optimizer is None:
                self._stored[key.name][...] = part
            else:
                self._update(key, part)

    def _update(self, key: Key, total: Array) -> None:
        """The optimizer's next step."""
        assert self._optimizer is not None
        step, state = self._states.get(key.name) or (0, self._optimizer.init(self._stored[key.name]))
        self._optimizer.update(self._stored[key.name], total, state, step + 1)
        self._states[key.name] = step + 1, state

    def _agreed(self, card: Card, call: Callable[[], Iterable[bool | None]]) -> Task:
        """What all workers do together: they see that they do the same, or all raise MismatchError."""
        agreement = self._agreement
        if agreement is None:
            yield from call()
            return
        text = card.refusal or card.text
        fallback = yield from agreement.guarded(card, text, call)
        if fallback is not None:
            self._explain(card, fallback)
        if not agreement.one_node:
            yield from call()

    def _explain(self, card: Card, fallback: str) -> NoReturn:
        """Raise what all workers together find to be wrong with the present call."""
        assert self._agreement is not None
        sentence, _ = self._agreement.explain(card, fallback)
        raise MismatchError(sentence)

    def _sum(self, flat: Array, out: Array) -> Task:
        if not self.stepwise:
            collectives.allreduce(flat, self._comm, algorithm=SUMS, out=out)
            return
        yield from bridge.in_steps(self._comm, begin("allreduce", flat, self._comm, algorithm=SUMS, out=out), flat, out)

    def _compressed(self, key: Key, flat: Array) -> Array:
        """What the others would decode from this worker's payload; the rest stays in the residual."""
        assert self._compressor is not None
        if key.name not in self._residuals:
            self._residuals[key.name] = self._compressor.init(flat)
        payload = self._compressor.encode(flat, self._residuals[key.name])
        decoded = np.zeros_like(flat)
        self._compressor.decode(payload, decoded, add=False)
        return decoded

    def collective(self, pushes: bool) -> bool:
        """Whether the other workers take part in this worker's pushes, or pulls."""
        return pushes and self._agreement is not None

    def refuse(self, what: str, keys: Sequence[Key], pushes: bool, sentence: str, event: str) -> Task:
        """This worker's arguments are bad: everybody raises MismatchError where they push."""
        if self.collective(pushes):
            card = Card(what, [key.name for key in keys], pushes, sentence)
            yield from self._agreed(card, lambda: ())

    def skip(self, key: Key, sentence: str, event: str = "") -> None:
        """Nothing to tell: all workers fail at the same key."""

    def fail(self, name: Name, count: int, sentence: str, event: str) -> None:
        """Nobody waits for a single worker."""

    def push_rows(self, key: Key, rows: RowSparse, priority: int) -> Task:
        """Every worker hears of all rows that anybody pushes; those are added up in the order of the workers."""
        if self._compressor is not None:
            yield from self.push(key, rows.to_dense().reshape(-1), priority)
            return
        key.round += 1
        everyone = [rows.merged()]
        yield from self._agreed(
            Card("push of rows", self.calling or [key.name], True), lambda: self._everybodys(key, everyone)
        )
        total, stored = reduce(merge, everyone), self._stored[key.name]
        if self._optimizer is None:
            stored[...] = 0
            stored.reshape(key.shape)[total.rows] = total.values
            return
        step, state = self._states.get(key.name) or (0, self._optimizer.init(stored))
        update_rows(self._optimizer, stored.reshape(key.shape), total, state, step + 1)
        self._states[key.name] = step + 1, state

    def _everybodys(self, key: Key, rows: list[RowSparse]) -> Task:
        """This worker's rows in, those of all workers out, in their order."""
        agree(bridge.living(self._comm), f"push of rows of key {key.name!r}")
        mine = packed(rows.pop())
        sizes = np.empty(self._comm.Get_size(), np.int64)
        yield from until(self._comm.Iallgather(np.array([mine.size], np.int64), sizes))
        data, starts = np.empty(sizes.sum(), np.uint8), np.cumsum(sizes) - sizes
        yield from until(self._comm.Iallgatherv(mine, [data, (sizes.tolist(), starts.tolist())]))
        rows += [unpacked(data[a : a + n], key) for a, n in zip(starts.tolist(), sizes.tolist(), strict=True)]

    def pull(self, key: Key, flat: Array) -> Task:
        flat[...] = self._stored[key.name]
        yield from ()

    def pull_rows(self, key: Key, out: Array, ids: Array) -> Task:
        """Write rows of the key into `out`, (len(ids), ...)."""
        np.take(self._stored[key.name].reshape(key.shape), ids, axis=0, out=out)
        yield from ()

    def pushpull(self, key: Key, flat: Array, out: Array, priority: int) -> Task:
        yield from self.push(key, flat, priority)
        yield from self.pull(key, out)

    def settle(self, keys: Sequence[Key]) -> Task:
        """Pushes have ended when they return."""
        yield from ()

    def set_optimizer(self, optimizer: Optimizer) -> Task:
        self._optimizer = optimizer
        self._states.clear()
        yield from ()

    def set_compression(self, options: dict[str, Any], compressor: Compressor) -> Task:
        self._compressor = compressor
        self._residuals.clear()
        yield from ()

    def states(self, keys: Sequence[Key]) -> Generator[bool | None, None, dict[Any, tuple[int, list[Array]]]]:
        yield from ()
        found = {key.name: self._states.get(key.name, (0, ())) for key in keys}
        return {name: (step, list(state)) for name, (step, state) in found.items()}

    def put_states(self, keys: Sequence[Key], states: dict[Any, tuple[int, list[Array]]]) -> Task:
        if self._optimizer is None:
            raise ValueError("load_optimizer_states needs an optimizer; call set_optimizer first")
        for key in keys:
            step, arrays = states[key.name]
            if not step and not arrays:
                self._states.pop(key.name, None)
                continue
            state = self._optimizer.init(self._stored[key.name])
            if [array.size for array in arrays] != [array.size for array in state]:
                unfit = f"the saved state does not fit {self._optimizer!r}"
                raise ValueError(f"key {key.name!r}: {unfit}: set the optimizer that it was saved of")
            for array, saved in zip(state, arrays, strict=True):
                array[...] = saved
            self._states[key.name] = step, state
        yield from ()

    def residuals(self, keys: Sequence[Key]) -> Array | None:
        """What compression kept back, one key behind the other; None where nothing is compressed."""
        if self._compressor is None:
            return None
        kept = [self._residuals.get(key.name) for key in keys]
        return np.concatenate([np.zeros(key.size) if r is None else r for key, r in zip(keys, kept, strict=True)])

    def put_residuals(self, keys: Sequence[Key], values: Sequence[Array]) -> None:
        """Give every key what was kept back."""
        assert self._compressor is not None
        for key, value in zip(keys, values, strict=True):
            residual = self._residuals[key.name] = self._compressor.init(self._stored[key.name])
            residual[...] = value

    def meet(self, what: str) -> Task:
        """MismatchError everywhere where others are in a push."""
        yield from self._agreed(Card(what, [], False), lambda: self._agree(what))

    def _agree(self, what: str) -> Task:
        agree(bridge.living(self._comm), f"{what} of the store")
        yield from ()

    def finish(self) -> None:
        """The others may come as late as they like."""
        bridge.patient(self._comm, math.inf, 0.0)
