"""`Table`: rows of an embedding table, which servers make when they are first pushed to. Checks of its arguments.

table = kv.table("users", dim=32, init=mpips.uniform(0.05), optimizer="row_adagrad", learning_rate=0.05)
rows = table.pull(ids)
table.push(ids, gradients)
"""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from mpips.collectives import arrays
from mpips.collectives.errors import Uncopied, of_caller, warn
from mpips.collectives.fabric.tasks import Task
from mpips.collectives.recorder import own as recorder
from mpips.store.keys import arguments
from mpips.store.keys.key import Array
from mpips.store.runtime import rendezvous
from mpips.store.runtime.engine import Handle
from mpips.store.transport import frames
from mpips.store.worker.interface import KnownTable
from mpips.store.worker.operations import GIVEN, recorded, step_of_push
from mpips.store.worker.restored import Restored
from mpips.store.worker.route import Route
from mpips.store.worker.store import WorkerStore
from mpips.tables import files as table_files
from mpips.tables import row_optimizers
from mpips.tables.admission import COUNTS, Chance, Seen
from mpips.tables.initial import Ids, Uniform, key_of

T = TypeVar("T")
DTYPES = ("float32", "float64")
MOST_BYTES = 1 << 30
"""Of the rows of one call: they travel to a server as one message."""
MOST_COUNT = 1 << 31
"""Updates that a table counts, and rows that `limit` may allow."""


class Table(Uncopied):
    """One table, on one worker; made by `KVStore.table`. Its calls block, but for `ipull`.

    Ids are int64 of any values and any shape, repeats allowed. Gradients and rows have the shape of the ids, and `dim`
    behind it, and are C-contiguous. In a synchronous store every worker pushes equally often; of what one pushes, other
    workers' pulls see nothing before all have. A bad argument raises ValueError or TypeError on this worker alone, and
    nothing was sent.
    """

    def __init__(self, store: WorkerStore, route: Route, known: KnownTable) -> None:
        self._store, self._route, self._known = store, route, known
        self.name, self.dim, self.dtype = known.name, known.card.dim, np.dtype(known.card.dtype)
        self._last: tuple[Handle, int] | None = None
        """The last `ipull`, which the next call of its generation waits for, and that generation."""

    def __repr__(self) -> str:
        return f"<table {self.name!r}, dim={self.dim}, {self.dtype.name}, {self._known.card.optimizer}>"

    def push(self, ids: object, gradients: object) -> None:
        """Contribute to the table's next update; return when the arrays may be overwritten.

        Gradients of an id that stands several times are summed in the order they stand. The servers sum those of all
        workers, in their order, and update each row that anybody named.

        Args:
            ids: int64, any shape.
            gradients: Of the table's dtype, shape ids.shape + (dim,).

        Raises:
            MemoryError: A server has no memory for new rows. Nothing of this round counts, on no server, and the store
                goes on. Other workers hear of it here or in a later call.
        """
        push_together([(self, ids, gradients)])

    def pull(self, ids: object, out: object = None) -> Any:
        """Return the rows of these ids after this worker's pushes; of ids that no row has, the first values.

        Args:
            ids: int64, any shape.
            out: Where the rows go, of the table's dtype, shape ids.shape + (dim,), and which is returned. None: a new
                array.
        """
        self._check_there("pull")
        with GIVEN:
            where, shape = self._ids_of("pull", ids)
            target, rows = self._target_of("pull", out, shape)
        self._pull("pull", where, rows)
        return target

    def ipull(self, ids: object, out: object = None) -> Handle:
        """`pull` that returns a handle at once; its `wait()` returns the rows.

        `ids` and `out` stay as they are until then. Calls of one table run in program order: the next one waits for it.
        """
        self._check_there("ipull")
        with GIVEN:
            where, shape = self._ids_of("ipull", ids)
            target, rows = self._target_of("ipull", out, shape)
        task = self._read("ipull", where, rows, target)
        self._route.mark(said := f"ipull of table {self.name!r}")
        if recorder.is_traced:
            begun = self._route.marks.begin_table("pull", self._known, len(where), starts=False)
            task = recorded("pull", task, [begun])
        said = f"{said} after push {self._known.round}"
        handle = self._store.start(said, task, detached=False, tables=[self.name])
        self._last = handle, self._store.generation.number
        return handle

    def pushpull(self, ids: object, gradients: object, out: object = None) -> Any:
        """Push gradients of these ids, and return their rows after that, as `pull` does."""
        where, flat = self._see_push("pushpull", ids, gradients)
        with GIVEN:
            target, rows = self._target_of("pushpull", out, self._ids_of("pushpull", ids)[1])
        _push_all("pushpull", [(self, where, flat)])
        self._pull("pushpull", where, rows)
        return target

    @property
    def pushes(self) -> int:
        """Return how often this worker has pushed."""
        return self._known.round

    @property
    def origin(self) -> tuple[int, int]:
        """Return numbers that change when rows become others than by pushes: by a load, or by a recovery."""
        return self._store.generation.number, self._known.loads

    @property
    def contributors(self) -> int:
        """Return how many workers' gradients one update sums: in asynchronous kinds 1."""
        layout = self._store.layout
        return 1 if layout.asynchronous else layout.num_workers

    @property
    def synchronous(self) -> bool:
        """Return whether an update waits for a push by every worker."""
        return not self._store.layout.asynchronous

    def is_any(self, what: str, mine: bool) -> bool:
        """Return whether a word is true on any worker of a synchronous store. Collective over the workers, blocking.

        ValueError in an asynchronous store of several workers, who do not wait for each other.
        """
        if self._store.layout.num_workers == 1:
            return mine
        if not self.synchronous:
            raise of_caller(
                ValueError(
                    f"{what}: workers of a {self._store.layout.kind} store do not hear of each "
                    "other's overflows: take dist_sync, or bfloat16, which needs no scaler"
                )
            )
        return any(any(word) for word in self._store.agree(what, data=bytes([mine])))

    @property
    def rows(self) -> int:
        """Return how many rows the servers hold now; other workers may make more meanwhile."""
        return self.stats()["rows"]

    def stats(self) -> dict[str, int]:
        """Return numbers of all servers after this worker's pushes: `rows`, `updates`, and the `bytes` of rows with
        optimizer state, index and counts.

        `evicted`: rows that were dropped. `refused`: gradients of ids that `admit` gave no row, and which were dropped.
        `counted`: ids without a row whose updates are counted."""
        self._check_there("stats")
        parts = self._stats(self._known)
        counts = self._stats(self._store.tables[self.name + COUNTS]) if self._known.card.seen else []
        return {
            "rows": sum(part.rows for part in parts),
            "bytes": sum(part.nbytes for part in (*parts, *counts)),
            "updates": max(part.updates for part in parts),
            "evicted": sum(part.evicted for part in parts),
            "refused": sum(part.refused for part in parts),
            "counted": sum(part.rows for part in counts),
        }

    def update_optimizer(self, **numbers: Any) -> None:
        """Change numbers of the optimizer, such as `learning_rate`, from the next update on. Collective over workers.

        State stays. ValueError or TypeError on all for a bad or unknown number, or where one has pushed more often.
        """
        self._check_there("update_optimizer")
        card, what = self._known.card, f"update_optimizer of table {self.name!r}"
        options, refusal = rendezvous.attempt(
            lambda: _optimizer(self.name, lambda: row_optimizers.changed(card.optimizer, card.numbers, numbers))
        )
        table_files.meet(self._store, what, [("numbers", repr(sorted(numbers.items())))], self._known, refusal)
        tables = self._store.backend.tables
        assert options is not None and tables is not None
        self._store.run(what, tables.update(self.name, options))
        card.numbers = options

    def save(self, path: str | os.PathLike[str], since: int | None = None) -> int:
        """Write rows with their state into one file (safetensors), after one round. Collective over all workers.

        Return the number of the table's updates, which the next call takes as `since`: then only rows that updates
        after it have changed are written, and the ids of rows that are no more. `load` takes all of the files.

        Args:
            path: A kill at any moment leaves the old file or the new one.
            since: What `save` has returned; None: all rows.

        Raises:
            ValueError: On all workers. The file cannot be written; in a synchronous store, one has pushed more often
                than another; or `since` is refused, as `export` does.
        """
        self._check_there("save")
        return table_files.save(self._store, self._known, path, lambda: _since(self.name, "save", since))

    def load(self, path: str | os.PathLike[str], *increments: str | os.PathLike[str]) -> None:
        """Let the table be what `save` wrote, with any number of servers and workers. Collective over all workers.

        `increments` are the files that `save` wrote with `since`, each from where the one before ends. The table's own
        learning rate and seed stay. ValueError on all where a file does not fit, and nothing has changed.
        """
        self._check_there("load")
        table_files.load(self._store, self._known, (path, *increments))

    def export(self, path: str | os.PathLike[str], since: int | None = None) -> int:
        """Write rows for programs that serve into one file (safetensors): `ids`, `values`, `dropped`. Collective.

        Return the number of the table's updates, which the next call takes as `since`: then only rows that updates
        after it have changed are written, and `dropped` names rows that are no more. A reader forgets the dropped ones,
        then sets the others; file after file.

        Args:
            path: A kill at any moment leaves the old file or the new one.
            since: What an export has returned; None: all rows.

        Raises:
            ValueError: On all workers. The file cannot be written; no file of these rows was written at `since` (those
                before a load are of others); or which rows were dropped after it is no longer known.
        """
        self._check_there("export")
        return table_files.export(self._store, self._known, path, lambda: _since(self.name, "export", since))

    # ---- calls

    def _stats(self, table: KnownTable) -> list[frames.TableStats]:
        tables = self._store.backend.tables
        assert tables is not None
        return self._store.run(f"stats of table {table.name!r}", tables.stats(table), tables=[self.name])

    def _pull(self, what: str, ids: Ids, out: Array) -> None:
        tables = self._store.backend.tables
        assert tables is not None
        self._begin(said := f"{what} of table {self.name!r}")
        begun = [self._route.marks.begin_table("pull", self._known, len(ids))] if recorder.is_traced else ()
        self._store.run(said, tables.pull(self._known, ids, out), tables=[self.name])
        for ring, sequence, _ in begun:
            ring.end(sequence)

    def _read(self, what: str, ids: Ids, out: Array, target: object) -> Task[object]:
        """Pull, and return what `out` is the memory of."""
        tables = self._store.backend.tables
        assert tables is not None
        yield from tables.pull(self._known, ids, out)
        return target

    def _begin(self, what: str) -> None:
        """Let others see this call, and wait for the last `ipull`."""
        self._route.mark(what)
        if self._last is not None:
            (last, generation), self._last = self._last, None
            if generation == self._store.generation.number:
                last.wait()

    # ---- arguments

    def _check_there(self, what: str) -> None:
        """StoreError where the generation is over; ValueError where the table was one of an earlier generation."""
        self._store.operations.check_open()
        if self._store.tables.get(self.name) is not self._known:
            raise of_caller(
                ValueError(
                    f"{what} of table {self.name!r}: tables do not outlive recover(), and its rows are gone: make it "
                    "anew by kv.table(), and load() what you have saved"
                )
            )

    def _see_push(self, what: str, ids: object, gradients: object) -> tuple[Ids, Array]:
        """Return the ids and gradients of a push, (k,) and (k, dim)."""
        self._check_there(what)
        with GIVEN:
            where, shape = self._ids_of(what, ids)
            found = self._array_of(what, "gradients", gradients, shape)
        flat = found.reshape(-1, self.dim)
        if self._store.operations.checks_finite:
            with self._store.operations.guard(f"{what} of table {self.name!r}"):
                self._see_finite(what, where, flat)
        return where, flat

    def _ids_of(self, what: str, ids: object) -> tuple[Ids, tuple[int, ...]]:
        """Return ids as (k,), and their shape."""
        name = f"{what} of table {self.name!r}: ids"
        if isinstance(ids, (list, tuple, int, np.integer)):
            raise TypeError(f"{name} are of type {type(ids).__name__}: pass numpy.array(ids, numpy.int64)")
        found = arrays.host(ids, name)  # type: ignore[arg-type]
        if found.dtype != np.int64:
            way = "ids.long()" if arrays.is_torch(ids) else "ids.astype(numpy.int64)"
            raise TypeError(f"{name} have dtype {found.dtype}, and need int64: pass {way}")
        if found.size * self.dim * self.dtype.itemsize > MOST_BYTES:
            raise ValueError(
                f"{name} are {found.size}, whose rows of {self.dim} {self.dtype.name} are more than {MOST_BYTES} "
                "bytes: give fewer at a time"
            )
        return np.ascontiguousarray(found).reshape(-1), found.shape

    def _array_of(self, what: str, word: str, given: object, shape: tuple[int, ...]) -> Array:
        """Return an array of rows for ids of this shape; TypeError or ValueError where it is another one."""
        name = f"{what} of table {self.name!r}: {word}"
        found = arrays.host(given, name)  # type: ignore[arg-type]
        if found.dtype != self.dtype:
            raise TypeError(f"{name} has dtype {found.dtype}, and the table {self.dtype.name}: convert it")
        if found.shape != (*shape, self.dim):
            raise ValueError(f"{name} has shape {found.shape}, and ids of shape {shape} need {(*shape, self.dim)}")
        if not found.flags.c_contiguous:
            raise ValueError(f"{name} is not C-contiguous: pass numpy.ascontiguousarray(...) of it")
        return found

    def _target_of(self, what: str, out: object, shape: tuple[int, ...]) -> tuple[Any, Array]:
        """Return what a pull returns, and its memory as (k, dim)."""
        if out is None:
            made = np.empty((*shape, self.dim), self.dtype)
            return made, made.reshape(-1, self.dim)
        found = self._array_of(what, "out", out, shape)
        if not found.flags.writeable:
            raise ValueError(f"{what} of table {self.name!r}: out cannot be written: pass a writable array")
        return out, found.reshape(-1, self.dim)

    def _see_finite(self, what: str, ids: Ids, gradients: Array) -> None:
        """FloatingPointError where a push holds NaN or infinity: which rank, table and push, and of which id."""
        fine = np.isfinite(gradients)
        if fine.all():
            return
        wrong, nans = int(np.count_nonzero(~fine)), int(np.count_nonzero(np.isnan(gradients)))
        row = int(np.argmin(fine.all(axis=1)))
        raise of_caller(
            FloatingPointError(
                f"{what} of table {self.name!r}: push {self._known.round + 1} of rank {self._store.layout.rank} "
                f"holds {nans} NaN and {wrong - nans} infinities among {gradients.size} elements, the first of id "
                f"{ids[row]}"
                f"{step_of_push()}: look at the loss, the learning rate and the data of that step on that rank"
            )
        )


def push_together(pushes: Sequence[tuple[Table, object, object]]) -> None:
    """Push to tables, each once, and wait once for all of a store: (table, ids, gradients), as `Table.push` has them.

    Tables of several stores go to their own ones, store after store. Nothing is sent where an argument of any is bad.
    """
    seen = [(table, *table._see_push("push", ids, gradients)) for table, ids, gradients in pushes]
    for tables in by_store(table for table, *_ in seen):
        _push_all("push", [push for push in seen if push[0] in tables])


def by_store(tables: Iterable[Table]) -> list[list[Table]]:
    """Return tables in lists, one for each store that they are of."""
    found: dict[int, list[Table]] = {}
    for table in tables:
        found.setdefault(id(table._store), []).append(table)
    return list(found.values())


def _push_all(what: str, pushes: Sequence[tuple[Table, Ids, Array]]) -> None:
    """Push to tables of one store."""
    first, names = pushes[0][0], [table.name for table, *_ in pushes]
    store, tables = first._store, first._store.backend.tables
    assert tables is not None
    said = f"{what} of table {names[0]!r}" + (f" and {len(names) - 1} others" if len(names) > 1 else "")
    with first._route.pushing_tables(names):
        for table, *_ in pushes:
            table._begin(said)
        begun = [
            first._route.marks.begin_table("push", table._known, len(ids))
            for table, ids, _ in pushes
            if recorder.is_traced
        ]
        parts = [(table._known, ids, gradients) for table, ids, gradients in pushes]
        store.run(said, tables.push(parts), tables=names)
        for ring, sequence, _ in begun:
            ring.end(sequence)


class Asked(NamedTuple):
    """The arguments of `KVStore.table`, as the program gives them. `options`: the optimizer's numbers."""

    dim: object
    dtype: object
    init: object
    optimizer: object
    seed: object
    admit: object
    evict: object
    limit: object
    options: dict[str, Any]


def make(store: WorkerStore, route: Route, name: object, asked: Asked) -> Table:
    """Make a table. Collective over the workers, but for one that is restored; see `KVStore.table`."""
    if name in store.restored.names and name in store.tables:
        with GIVEN:
            card = _card(store, name, asked)
            known = store.tables[card.table]
            unlike = _unlike(known.card, card, store.restored)
        if unlike and store.layout.rank == 0:
            warn(f"{unlike}: what is restored holds")
        store.restored.claim([known.name, known.name + COUNTS])
        return Table(store, route, known)
    card, refusal = rendezvous.attempt(lambda: _card(store, name, asked))
    store.finish()
    store.agree(f"table {name!r}", [] if card is None else _told(card, asked), refusal, noun="argument")
    assert card is not None and store.backend.tables is not None
    cards = [_card_of_counts(card, asked.admit), card] if isinstance(asked.admit, Seen) else [card]
    for one in cards:
        store.run(f"table {one.table!r}", store.backend.tables.make(one))
        store.tables[one.table] = KnownTable(one)
    return Table(store, route, store.tables[card.table])


def _told(card: frames.MakeTable, asked: Asked) -> list[tuple[str, str]]:
    """Return all arguments as workers compare them, such that 8 and numpy.int64(8) are alike."""
    said = asked._asdict() | {word: getattr(card, word) or None for word in ("dim", "dtype", "evict", "limit")}
    said["seed"] = operator.index(asked.seed)  # type: ignore[arg-type]
    said["optimizer"] = row_optimizers.decode(card.optimizer, card.numbers)
    del said["options"]  # the optimizer has them
    return [(word, given if word == "dtype" else repr(given)) for word, given in said.items()]


def _unlike(here: frames.MakeTable, asked: frames.MakeTable, restored: Restored) -> str:
    """Return what the program asks for in vain, as what is restored holds; "" where nothing. ValueError where it asks
    for another table."""
    words = {"dim": "dim", "dtype": "dtype", "optimizer": "optimizer", "key": "seed", "bound": "init"}
    for field, word in words.items():
        there, wanted = getattr(here, field), getattr(asked, field)
        if there != wanted:
            unlike = "another one" if word == "seed" else f"{there}, and this is {wanted}"
            raise ValueError(f"table: {asked.table!r} has {word} {unlike} in {restored.source}: {restored.cure}")
    return "" if here == asked else f"table {asked.table!r} has other options in {restored.source} than are asked for"


def _card(store: WorkerStore, name: object, asked: Asked) -> frames.MakeTable:
    """Return a new table as servers are told of it; ValueError or TypeError where it cannot be."""
    if not isinstance(name, str):
        raise TypeError(f"table: the name {name!r} is no str: give one")
    arguments.see_new(name, "table", "name")
    name = str.__str__(name)
    _see_store(store, name)
    dim, dtype, init, optimizer, seed, admit, evict, limit, options = asked
    if not (admit is None or isinstance(admit, (Seen, Chance))):
        raise ValueError(f"table {name!r}: admit={admit!r}: give mpips.seen(times), mpips.chance(probability) or None")
    for one in (name, name + COUNTS) if isinstance(admit, Seen) else (name,):
        if one in store.keys:
            raise ValueError(f"table: a key has the name {one!r}: choose another")
        if one in store.tables and one not in store.restored.names:
            raise ValueError(f"table: {one!r} was already made; a table is made once")
    try:
        word = str(dtype) if dtype is None else np.dtype(dtype).name  # type: ignore[call-overload]
    except TypeError:
        word = repr(dtype).removeprefix("torch.")
    if word not in DTYPES:
        raise ValueError(f"table {name!r}: dtype={word}, and a table holds {' or '.join(DTYPES)}: give one of them")
    width = _whole(name, "dim", dim)
    if not 0 < width <= MOST_BYTES // 8:
        raise ValueError(f"table {name!r}: dim={width}: give at least 1 and at most {MOST_BYTES // 8}")
    if isinstance(init, Uniform) and init.bound > np.finfo(word).max:
        raise ValueError(f"table {name!r}: init={init!r} is infinite in {word}: give a smaller bound")
    if not isinstance(init, Uniform):
        raise ValueError(f"table {name!r}: init={init!r}: give mpips.uniform(bound); uniform(0) are zeros")
    if isinstance(admit, Seen):
        _at_least(name, "remember", admit.remember, store.layout.num_servers)
    chosen, numbers = _optimizer(name, lambda: row_optimizers.encode(row_optimizers.create(optimizer, options)))
    return frames.MakeTable(
        name,
        width,
        word,
        key_of(_whole(name, "seed", seed), name),
        init.bound,
        chosen,
        numbers,
        _at_least(name, "evict", evict, 1),
        _at_least(name, "limit", limit, store.layout.num_servers),
        seen=admit.times if isinstance(admit, Seen) else 0,
        chance=admit.probability if isinstance(admit, Chance) else 1.0,
    )


def _optimizer(name: str, make: Callable[[], T]) -> T:
    """Return what `make` makes of an optimizer's name and numbers; its error names the table."""
    try:
        return make()
    except (ValueError, TypeError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"table {name!r}: {error}") from None


def _card_of_counts(card: frames.MakeTable, admit: Seen) -> frames.MakeTable:
    """Return the table that counts how many updates have named ids which have no row yet."""
    chosen, numbers = row_optimizers.encode(row_optimizers.create("sgd", {"learning_rate": 1.0}))
    return frames.MakeTable(
        card.table + COUNTS, 1, "float32", card.key, 0.0, chosen, numbers, card.evict, admit.remember
    )


def _see_store(store: WorkerStore, name: str) -> None:
    """ValueError where the store cannot keep a table."""
    if store.backend.tables is None:
        why = f"kind {store.layout.kind!r} has no servers here, and a table needs one: take dist_sync with servers=1"
        raise ValueError(f"table {name!r}: {why}")


def _whole(name: str, word: str, given: Any) -> int:
    try:
        return operator.index(given)
    except TypeError:
        raise TypeError(f"table {name!r}: {word}={given!r} is no whole number: give one") from None


def _since(name: str, call: str, given: object) -> int:
    """Return the updates after which rows are written, 0 for None."""
    since = 0 if given is None else _whole(name, "since", given)
    if since < 0:
        raise ValueError(f"table {name!r}: since={since}: give what {call} has returned, or None")
    return since


def _at_least(name: str, word: str, given: object, least: int) -> int:
    """Return a whole number, 0 for None."""
    if given is None:
        return 0
    number = _whole(name, word, given)
    if not least <= number < MOST_COUNT:
        raise ValueError(f"table {name!r}: {word}={number}: give at least {least} and less than 2**31, or None")
    return number
