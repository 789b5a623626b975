"""`Table`, an embedding table: servers make the row of an id when a worker first pushes to that id.

table = kv.table("users", dim=32, init=mpips.uniform(0.05), optimizer="row_adagrad", learning_rate=0.05)
rows = table.pull(ids)
table.push(ids, gradients)
"""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from mpips.collectives import arrays
from mpips.collectives.errors import NotCopyable, of_caller
from mpips.collectives.fabric.tasks import Task
from mpips.collectives.recorder import own as recorder
from mpips.store.keys.key import Array
from mpips.store.keys.row_sums import Ids, distinct
from mpips.store.runtime import rendezvous
from mpips.store.runtime.engine import Handle
from mpips.store.worker.operations import CALLER_ERRORS, Begun, recorded, step_of_push
from mpips.store.worker.route import Route
from mpips.store.worker.store import WorkerStore
from mpips.tables import files as table_files
from mpips.tables import halves, messages, row_optimizers
from mpips.tables.client import KnownTable, RemoteTables, RowsPush
from mpips.tables.eviction import SCORE

T = TypeVar("T")
# Maximum size of the rows in one call, in bytes. It is limited because all rows for a server travel in one message.
MOST_BYTES = 1 << 30


class Table(NotCopyable):
    """An embedding table on one worker, made by `KVStore.table`. All calls except `ipull` block.

    Ids are int64 with any values and any shape, and may repeat. Rows and gradients have the shape of the ids with `dim`
    appended, and are C-contiguous.

    In a synchronous store every worker must push equally often. Other workers see the effect of a worker's push only
    after all workers have pushed in that round.

    A bad argument raises ValueError or TypeError on this worker only, before anything is sent.
    """

    def __init__(self, store: WorkerStore, route: Route, tables: RemoteTables, known: KnownTable) -> None:
        self._store = store
        self._route = route
        self._tables = tables
        self._known = known
        self.name = known.name
        self.dim = known.card.dim
        self.dtype = np.dtype(known.card.dtype)
        # the last `ipull`, and its generation; the next call in this generation waits for the `ipull`
        self._last: tuple[Handle, int] | None = None

    def __repr__(self) -> str:
        return f"<table {self.name!r}, dim={self.dim}, {self.dtype.name}, {self._known.card.optimizer}>"

    def push(self, ids: object, gradients: object, scores: object = None) -> None:
        """Contribute gradients to the table's next update. Returns when the arrays may be overwritten.

        If an id occurs several times, its gradients are summed in the order in which they occur. The servers then sum
        over all workers, in rank order, and update every row that any worker has named.

        Args:
            ids: int64, any shape. In a synchronous store a worker without ids must push an empty array.
            gradients: Array of the table's dtype, of shape ids.shape + (dim,).
            scores: float64, of the shape of the ids. They are required for a table with `evict_by="score"`, and an
                error for any other table. If an id occurs several times, its last score is used. Scores of later
                workers come last.

        Raises:
            ValueError, TypeError: An argument is bad. Nothing has been sent.
            MemoryError: A server has no memory for new rows. In a synchronous store no server applies the round, the
                rows are unchanged, and the store remains usable. The other workers get the same error, in this call or
                in a later one. In an asynchronous store only this worker's push is refused.

        Example:
            >>> table.push(np.array([7, -3, 7]), np.ones((3, table.dim), table.dtype))
        """
        _push_all("push", [self._check_push("push", ids, gradients, scores)])

    def set(self, ids: object, values: object, scores: object = None) -> None:
        """Set rows to these values. Returns when the arrays may be overwritten.

        In a synchronous store this is a round, as a push is: every worker must call it, even without ids, and every
        later pull of any worker shows the new rows. In an asynchronous store each call is an update of its own. If an
        id occurs several times, its last values are used. Values of later workers come last.

        An id without a row gets a row, with the optimizer state of a new row. The rule `admit` is ignored. An existing
        row keeps its state. FTRL computes rows from this state, so the next push to an existing row would undo most of
        the change: call `remove` first.

        Args:
            ids: int64, any shape.
            values: Array of the table's dtype, of shape ids.shape + (dim,).
            scores: As in `push`.

        Raises:
            ValueError, TypeError, MemoryError: As in `push`.
            StoreError: In this or a later call, if another worker has called `push` or `remove` for the same round.

        Example:
            >>> table.set(np.array([7, -3]), np.full((2, table.dim), 0.5, table.dtype))
            >>> float(table.pull(np.array([-3]))[0, 0])
            0.5
        """
        _push_all("set", [self._check_push("set", ids, values, scores)])

    def remove(self, ids: object) -> None:
        """Drop the rows of these ids, with their optimizer state and counts.

        Returns before the servers have dropped them.

        In a synchronous store this is a round, as a push is: every worker must call it, even without ids, and the rows
        of all workers' ids are dropped. In an asynchronous store each call is an update of its own. Every later pull of
        this worker shows the first values of these ids. Ids without a row are ignored.

        Args:
            ids: int64, any shape.

        Raises:
            ValueError, TypeError: An argument is bad. Nothing has been sent.
            MemoryError: Servers have refused one of this worker's earlier pushes; see `push`.
            StoreError: In this or a later call, if another worker has called `push` or `set` for the same round.

        Example:
            >>> table.remove(np.array([7, -3]))
            >>> table.exists(np.array([7, -3]))
            array([False, False])
        """
        self._check_there("remove")
        with CALLER_ERRORS:
            where, _ = self._ids_of("remove", ids)
        _push_all("remove", [(self, RowsPush(self._known, where, None))])

    def exists(self, ids: object) -> NDArray[np.bool_]:
        """Return a mask of the ids that have a row, after all earlier pushes of this worker. Local, blocking.

        Args:
            ids: int64, any shape.

        Returns:
            A bool array of the shape of the ids.

        Raises:
            ValueError, TypeError, MemoryError: As in `pull`.

        Example:
            >>> table.push(np.array([7]), np.ones((1, table.dim), table.dtype))
            >>> table.exists(np.array([7, 9**9]))
            array([ True, False])
        """
        self._check_there("exists")
        with CALLER_ERRORS:
            where, shape = self._ids_of("exists", ids)
        self._begin(call := f"exists of table {self.name!r}")
        found = np.zeros(len(where), np.bool_)
        task = self._tables.exists(self._known, where, found)
        self._store.run(f"{call} after push {self.pushes}", task, collections=[self.name])
        return found.reshape(shape)

    def pull(self, ids: object, out: object = None) -> Any:
        """Return the rows of these ids, after all earlier pushes of this worker. Blocking.

        For an id without a row, the result has the first values of its row. A pull does not make rows.

        Args:
            ids: int64, any shape.
            out: Array into which the rows are written, and which is returned. It must have the table's dtype and shape
                ids.shape + (dim,). None makes a new array.

        Raises:
            ValueError, TypeError: An argument is bad. Nothing has been sent.
            MemoryError: Servers have refused one of this worker's pushes; see `push`.

        Example:
            >>> table.pull(np.array([[7, -3], [8, 7]])).shape == (2, 2, table.dim)
            True
        """
        self._check_there("pull")
        with CALLER_ERRORS:
            where, shape = self._ids_of("pull", ids)
            target, rows = self._target_of("pull", out, shape)
        _pull_all("pull", [(self, where, rows)])
        return target

    def ipull(self, ids: object, out: object = None) -> Handle:
        """Begin a `pull` and return a handle at once. The handle's `wait()` returns the rows.

        Leave `ids` and `out` unchanged until `wait()` returns. Calls of one table run in program order: the next call
        waits for this one.

        Args:
            ids, out: As in `pull`.

        Example:
            >>> handle = table.ipull(np.array([7, -3]))
            >>> rows = handle.wait()
        """
        self._check_there("ipull")
        with CALLER_ERRORS:
            where, shape = self._ids_of("ipull", ids)
            target, rows = self._target_of("ipull", out, shape)
        task = self._read(where, rows, target)
        self._route.mark(call := f"ipull of table {self.name!r}")
        if recorder.is_traced:
            task = recorded("pull", task, [self._record("pull", len(where), starts=False)])
        handle = self._store.start(f"{call} after push {self.pushes}", task, detached=False, collections=[self.name])
        self._last = handle, self._store.generation.number
        return handle

    def pushpull(self, ids: object, gradients: object, out: object = None, scores: object = None) -> Any:
        """Push gradients of these ids, then return their rows after that push. Blocking.

        Args:
            ids, gradients, scores: As in `push`.
            out: As in `pull`.

        Raises:
            ValueError, TypeError, MemoryError: As in `push` and `pull`.

        Example:
            >>> rows = table.pushpull(np.array([7, -3]), np.ones((2, table.dim), table.dtype))
        """
        push = self._check_push("pushpull", ids, gradients, scores)
        with CALLER_ERRORS:
            target, rows = self._target_of("pushpull", out, self._ids_of("pushpull", ids)[1])
        _push_all("pushpull", [push])
        _pull_all("pushpull", [(self, push[1].ids, rows)])
        return target

    @property
    def pushes(self) -> int:
        """The number of this worker's pushes, except those that servers have refused or a recovery has undone.

        Calls of `set` and `remove` count as pushes.
        """
        return self._known.round

    @property
    def origin(self) -> tuple[int, int]:
        """A value that changes whenever something other than a push changes rows, such as a load or a recovery.

        Rows that were prefetched before the change are then stale.
        """
        return self._store.generation.number, self._known.loads

    @property
    def contributors(self) -> int:
        """The number of workers whose gradients are summed in one update. It is 1 in an asynchronous store."""
        layout = self._store.layout
        return 1 if layout.asynchronous else layout.num_workers

    @property
    def synchronous(self) -> bool:
        """True if an update waits for a push by every worker."""
        return not self._store.layout.asynchronous

    @property
    def needs_scores(self) -> bool:
        """True if each push has to give scores, because the table evicts by score."""
        return self._known.card.evict_by == SCORE

    def is_any(self, what: str, own: bool) -> bool:
        """Return True if `own` is true on any worker of a synchronous store. Collective over the workers, blocking.

        Raises ValueError in an asynchronous store with several workers, because its workers do not wait for each other.
        The message begins with `what`.
        """
        if self._store.layout.num_workers == 1:
            return own
        if not self.synchronous:
            raise of_caller(
                ValueError(
                    f"{what}: workers of a {self._store.layout.kind} store do not hear of each "
                    "other's overflows: take dist_sync, or bfloat16, which needs no scaler"
                )
            )
        return any(any(answer) for answer in self._store.agree(what, data=bytes([own])))

    @property
    def rows(self) -> int:
        """The number of rows on all servers. This asks the servers, and other workers may be adding rows meanwhile."""
        return self.stats()["rows"]

    def stats(self) -> dict[str, int]:
        """Return figures of this table, summed over all servers, after all earlier pushes of this worker. Blocking.

        Returns:
            A dict with these keys:
            `rows`: number of rows;
            `bytes`: memory of the rows, with optimizer state, index and counts;
            `updates`: number of updates of the table;
            `evicted`: number of rows dropped by `evict`, `evict_after` and `limit`;
            `evicted_unused`, `evicted_by_time`, `evicted_by_limit`: the parts of `evicted` that each of these dropped;
            `removed`: number of rows that `remove` dropped;
            `refused`: number of gradients dropped because `admit` gave their id no row;
            `counted`: number of ids without a row whose updates are being counted.

        Example:
            >>> table.push(np.array([7, -3, 7]), np.ones((3, table.dim), table.dtype))
            >>> table.stats()["rows"]
            2
        """
        self._check_there("stats")
        parts = self._stats(self._known)
        hidden = self._tables.known.get(self._known.card.table_of_counts)
        counts = self._stats(hidden) if hidden is not None else []
        return {
            "rows": sum(part.rows for part in parts),
            "bytes": sum(part.nbytes for part in (*parts, *counts)),
            "updates": max(part.updates for part in parts),
            "evicted": sum(part.evicted for part in parts),
            "evicted_unused": sum(part.evicted - part.expired - part.excess for part in parts),
            "evicted_by_time": sum(part.expired for part in parts),
            "evicted_by_limit": sum(part.excess for part in parts),
            "removed": sum(part.removed for part in parts),
            "refused": sum(part.refused for part in parts),
            "counted": sum(part.rows for part in counts),
        }

    def update_optimizer(self, **numbers: Any) -> None:
        """Change hyperparameters of the optimizer, such as `learning_rate`, from the next update on.

        The optimizer keeps its state. Collective, blocking.

        Args:
            numbers: The new values of hyperparameters, by name.

        Raises:
            ValueError, TypeError: On all workers. A hyperparameter is bad or unknown, or in a synchronous store one
                worker has pushed more often than another. Nothing has changed.

        Example:
            >>> table.update_optimizer(learning_rate=0.01)
        """
        self._check_there("update_optimizer")
        card, what = self._known.card, f"update_optimizer of table {self.name!r}"
        options, refusal = rendezvous.attempt(
            lambda: with_name(self.name, lambda: row_optimizers.changed(card.optimizer, card.numbers, numbers))
        )
        table_files.meet(self._store, what, [("numbers", repr(sorted(numbers.items())))], self._known, refusal)
        assert options is not None
        self._store.run(what, self._tables.update(self.name, options))
        card.numbers = options

    def save(self, path: str | os.PathLike[str], since: int | None = None) -> int:
        """Write all rows with their optimizer state to a file (safetensors). All servers write the same round.

        Collective over all workers, blocking. With `since`, the file is an increment: it has only the rows that later
        updates have changed, and the ids of rows that were dropped after `since`. To load increments, pass `load` the
        full file and all increments.

        Args:
            path: The file. If the job is killed during the call, `path` has either the old file or the complete new
                one.
            since: The value that an earlier `save` returned. None writes all rows.

        Returns:
            The number of updates of the table, to be passed as `since` to the next `save`.

        Raises:
            ValueError: On all workers. The file cannot be written; in a synchronous store one worker has pushed more
                often than another; or no increment can be written from `since`, as in `export`.

        Example:
            >>> updates = table.save(path)
            >>> table.push(np.array([7]), np.ones((1, table.dim), table.dtype))
            >>> updates = table.save(f"{path}.increment", since=updates)
        """
        self._check_there("save")
        return table_files.save(self._store, self._tables, self._known, path, lambda: _since(self.name, "save", since))

    def load(self, path: str | os.PathLike[str], *increments: str | os.PathLike[str]) -> None:
        """Replace the rows of the table by those in files that `save` wrote. Collective over all workers.

        The store may have other numbers of servers and workers than the store that saved. The table keeps its own
        learning rate and seed.

        Args:
            path: A file with all rows.
            increments: Files that `save` wrote with `since`, in order. Each begins where the file before it ends.

        Raises:
            ValueError: On all workers. A file is damaged, or does not fit this table or the file before it. Nothing has
                changed.

        Example:
            >>> updates = table.save(path)
            >>> table.load(path)
        """
        self._check_there("load")
        table_files.load(self._store, self._tables, self._known, (path, *increments))

    def export(self, path: str | os.PathLike[str], since: int | None = None) -> int:
        """Write rows to a file (safetensors), for programs that serve the trained model.

        Collective over all workers, blocking. The file has the tensors `ids`, `values` and `dropped`. With `since` it
        has only rows that later updates have changed, and `dropped` has the ids of rows that were dropped after
        `since`. To follow a table, a reader reads the files in order. For each file it removes the ids in `dropped`,
        then sets the rows in `ids` and `values`.

        Args:
            path: The file. If the job is killed during the call, `path` has either the old file or the complete new
                one.
            since: The value that an earlier export returned. None writes all rows.

        Returns:
            The number of updates of the table, to be passed as `since` to the next export.

        Raises:
            ValueError: On all workers, in one of three cases. The file cannot be written. No file of these rows was
                written at `since` (a file from before a `load` has other rows). Or the servers no longer know which
                rows were dropped after `since`.

        Example:
            >>> updates = table.export(path)
        """
        self._check_there("export")
        return table_files.export(
            self._store, self._tables, self._known, path, lambda: _since(self.name, "export", since)
        )

    # ---- calls

    def _stats(self, table: KnownTable) -> list[messages.TableStats]:
        what = f"stats of table {table.name!r} after push {self.pushes}"
        return self._store.run(what, self._tables.stats(table), collections=[self.name])

    def _read(self, ids: Ids, out: Array, target: object) -> Task[object]:
        """Pull into `out`, and return `target`, the caller's array or tensor. `out` is a view of the same memory."""
        yield from self._tables.pull([(self._known, ids, out)])
        return target

    def _record(self, what: str, rows: int, starts: bool = True) -> Begun:
        """Begin the timing record of a call that names `rows` rows."""
        return self._route.marks.begin_record(
            what, self._known, f"table {self.name!r}", rows * self.dim, self.dtype, starts
        )

    def _begin(self, what: str) -> None:
        """Show other processes that this worker is in the call `what`, and wait for the last `ipull`."""
        self._route.mark(what)
        if self._last is not None:
            (last, generation), self._last = self._last, None
            if generation == self._store.generation.number:
                last.wait()

    # ---- arguments

    def _check_there(self, what: str) -> None:
        """Raise StoreError if the store must first recover, or ValueError if the table was lost in a recovery."""
        self._store.operations.check_open()
        if self._tables.known.get(self.name) is not self._known:
            raise of_caller(
                ValueError(
                    f"{what} of table {self.name!r}: tables do not outlive recover(), and its rows are gone: make it "
                    "anew by kv.table(), and load() what you have saved"
                )
            )

    def _check_push(self, what: str, ids: object, rows: object, scores: object = None) -> tuple[Table, RowsPush]:
        """Check the arguments of a push. `rows` are gradients, or for the call `set` values."""
        self._check_there(what)
        with CALLER_ERRORS:
            flat_ids, shape = self._ids_of(what, ids)
            array = self._array_of(what, "values" if what == "set" else "gradients", rows, shape)
            flat_scores = self._scores_of(what, scores, flat_ids, shape)
        flat = array.reshape(-1, self.dim)
        if self._store.operations.checks_finite:
            with self._store.operations.guard(f"{what} of table {self.name!r}"):
                self._check_finite(what, flat_ids, flat)
        return self, RowsPush(self._known, flat_ids, flat, flat_scores, what == "set")

    def _scores_of(self, what: str, scores: object, ids: Ids, shape: tuple[int, ...]) -> Array | None:
        """Check the scores of ids of this shape. Return them with shape (k,), or None if the table needs none."""
        call = f"{what} of table {self.name!r}"
        if (scores is not None) != self.needs_scores:
            if scores is None:
                raise ValueError(f"{call}: evict_by='score' needs a score for each id: pass scores=")
            raise ValueError(f"{call}: the table keeps no scores: make it with evict_by='score', or pass no scores")
        if scores is None:
            return None
        array = self._numbers_of(what, "scores", scores, np.float64)
        if array.shape != shape:
            raise ValueError(
                f"{call}: scores have shape {array.shape}, and ids of shape {shape} need {shape}: give one for each id"
            )
        flat = np.ascontiguousarray(array).reshape(-1)
        if (wrong := np.isnan(flat)).any():
            raise ValueError(
                f"{call}: scores hold {np.count_nonzero(wrong)} NaN among {flat.size}, the first of id "
                f"{ids[np.argmax(wrong)]}, and NaN has no place in an order: give numbers"
            )
        return flat

    def _numbers_of(self, what: str, argument: str, given: object, dtype: type[np.generic]) -> NDArray[Any]:
        """Check that `given` is an array of this dtype, and return it. It has one number for each id."""
        name, wanted = f"{what} of table {self.name!r}: {argument}", dtype.__name__
        if isinstance(given, (list, tuple, int, float, np.number)):
            raise TypeError(f"{name} are of type {type(given).__name__}: pass numpy.array({argument}, numpy.{wanted})")
        array = arrays.host(given, name)  # type: ignore[arg-type]
        if array.dtype != dtype:
            way = f"to(torch.{wanted})" if arrays.is_torch(given) else f"astype(numpy.{wanted})"
            raise TypeError(f"{name} have dtype {array.dtype}, and need {wanted}: pass {argument}.{way}")
        return array

    def _ids_of(self, what: str, ids: object) -> tuple[Ids, tuple[int, ...]]:
        """Check ids. Return them as a 1-D array, and their original shape."""
        array = self._numbers_of(what, "ids", ids, np.int64)
        if array.size * self.dim * self.dtype.itemsize > MOST_BYTES:
            raise ValueError(
                f"{what} of table {self.name!r}: ids are {array.size}, whose rows of {self.dim} {self.dtype.name} are "
                f"more than {MOST_BYTES} bytes: give fewer at a time"
            )
        return np.ascontiguousarray(array).reshape(-1), array.shape

    def _array_of(self, what: str, argument: str, given: object, shape: tuple[int, ...]) -> Array:
        """Check that an array has rows for ids of this shape. `argument` is the array's name in errors."""
        name = f"{what} of table {self.name!r}: {argument}"
        array = arrays.host(given, name)  # type: ignore[arg-type]
        if array.dtype != self.dtype:
            cast = f"pass {argument}.astype({self.dtype.name!r}) (NumPy) or {argument}.to(torch.{self.dtype.name})"
            raise TypeError(f"{name} has dtype {array.dtype}, and the table {self.dtype.name}: {cast}")
        if array.shape != (*shape, self.dim):
            raise ValueError(f"{name} has shape {array.shape}, and ids of shape {shape} need {(*shape, self.dim)}")
        if not array.flags.c_contiguous:
            raise ValueError(f"{name} is not C-contiguous: pass numpy.ascontiguousarray(...) of it")
        return array

    def _target_of(self, what: str, out: object, shape: tuple[int, ...]) -> tuple[Any, Array]:
        """Return the array that a pull returns, and a view of it of shape (k, dim)."""
        if out is None:
            made = np.empty((*shape, self.dim), self.dtype)
            return made, made.reshape(-1, self.dim)
        array = self._array_of(what, "out", out, shape)
        if not array.flags.writeable:
            raise ValueError(f"{what} of table {self.name!r}: out cannot be written: pass a writable array")
        return out, array.reshape(-1, self.dim)

    def _check_finite(self, what: str, ids: Ids, gradients: Array) -> None:
        """Raise FloatingPointError if a push holds NaN or infinity, or if the sum of an id's gradients is infinite.

        Sums are checked only for rows of 16 bits, because such sums are rounded to 16 bits before they are sent. The
        message names the rank, the table, the push and the first id with a bad gradient.
        """
        call = f"{what} of table {self.name!r}: push {self._known.round + 1} of rank {self._store.layout.rank}"
        fine = np.isfinite(gradients)
        if not fine.all():
            wrong, nans = int(np.count_nonzero(~fine)), int(np.count_nonzero(np.isnan(gradients)))
            raise of_caller(
                FloatingPointError(
                    f"{call} holds {nans} NaN and {wrong - nans} infinities among {gradients.size} elements, the first "
                    f"of id {ids[np.argmin(fine.all(axis=1))]}{step_of_push()}: look at the loss, the learning rate "
                    "and the data of that step on that rank"
                )
            )
        if what == "set" or not halves.is_half(self.dtype):
            return
        found = distinct(ids)
        sums = np.empty((len(found.ids), self.dim), self.dtype)
        halves.sum_into(sums, gradients, found.places)
        fine = np.isfinite(sums)
        if not fine.all():
            raise of_caller(
                FloatingPointError(
                    f"{call} sums the gradients of id {found.ids[np.argmin(fine.all(axis=1))]} to infinity in "
                    f"{self.dtype.name}{step_of_push()}: scale the loss down, or give the table dtype='float32'"
                )
            )


def push_together(pushes: Sequence[tuple[Table, object, object]]) -> None:
    """Push to several tables at once, and wait only once for each store. Blocking.

    Nothing is sent if any argument is bad.

    Args:
        pushes: (table, ids, gradients) with the arguments of `Table.push`. Each table may occur only once. Tables may
            belong to several stores. The stores are handled one after another.
    """
    seen = [table._check_push("push", ids, gradients) for table, ids, gradients in pushes]
    for tables in by_store(table for table, _ in seen):
        _push_all("push", [push for push in seen if push[0] in tables])


def pull_rows(ids: Mapping[Table, object]) -> dict[Table, Any]:
    """Return the rows of several tables of one store, after all earlier pushes of this worker. Blocking.

    Each server gets one message for all tables, instead of one for each table. The rows are those that `Table.pull`
    returns for each table.

    Args:
        ids: For each table, its ids, as in `Table.pull`.

    Returns:
        For each table, its rows, of shape ids.shape + (dim,).

    Raises:
        ValueError, TypeError: An argument is bad, or the tables belong to several stores. Nothing has been sent.
        MemoryError: Servers have refused one of this worker's pushes; see `Table.push`.

    Example:
        >>> rows = mpips.pull_rows({table: np.array([7, -3])})
        >>> rows[table].shape == (2, table.dim)
        True
    """
    if not isinstance(ids, Mapping):
        raise of_caller(TypeError(f"pull_rows: ids are a {type(ids).__name__}: give a dict of tables and their ids"))
    check_one_store("pull_rows", ids)
    found: dict[Table, Any] = {}
    pulls = []
    for table, given in ids.items():
        table._check_there("pull_rows")
        with CALLER_ERRORS:
            where, shape = table._ids_of("pull_rows", given)
        found[table], rows = table._target_of("pull_rows", None, shape)
        pulls.append((table, where, rows))
    if (nbytes := sum(rows.nbytes for *_, rows in pulls)) > MOST_BYTES:
        raise of_caller(
            ValueError(
                f"pull_rows: the rows of these {len(pulls)} tables are {nbytes} bytes, and one call takes at most "
                f"{MOST_BYTES}: give fewer tables or ids at a time"
            )
        )
    if pulls:
        _pull_all("pull_rows", pulls)
    return found


def check_one_store(what: str, tables: Iterable[object]) -> None:
    """Raise TypeError if one of these is not a table, or ValueError if they belong to several stores."""
    known: list[Table] = []
    for table in tables:
        if not isinstance(table, Table):
            raise of_caller(TypeError(f"{what}: {table!r} is not a table: give tables that kv.table(...) returns"))
        known.append(table)
    if len(stores := by_store(known)) > 1:
        names = " and ".join(repr(of_store[0].name) for of_store in stores[:2])
        raise of_caller(ValueError(f"{what}: tables {names} belong to different stores: make one call for each store"))


def by_store(tables: Iterable[Table]) -> list[list[Table]]:
    """Group tables by the store that they belong to."""
    groups: dict[int, list[Table]] = {}
    for table in tables:
        groups.setdefault(id(table._store), []).append(table)
    return list(groups.values())


def _push_all(what: str, pushes: Sequence[tuple[Table, RowsPush]]) -> None:
    """Push to several tables of one store."""
    kind = what if what in ("set", "remove") else "push"
    first = pushes[0][0]
    with first._route.pushing([table.name for table, _ in pushes]):
        task = first._tables.push([push for _, push in pushes])
        _run(what, kind, [(table, push.ids) for table, push in pushes], task)


def _pull_all(what: str, pulls: Sequence[tuple[Table, Ids, Array]]) -> None:
    """Pull from several tables of one store. Each item has the ids, and the array to write their rows into."""
    task = pulls[0][0]._tables.pull([(table._known, ids, rows) for table, ids, rows in pulls])
    _run(what, "pull", [(table, ids) for table, ids, _ in pulls], task)


def _run(what: str, kind: str, calls: Sequence[tuple[Table, Ids]], task: Task[None]) -> None:
    """Run a push to several tables of one store, or a pull from them. `kind` names the call in timing records."""
    first, names = calls[0][0], [table.name for table, _ in calls]
    others = f" and {len(names) - 1} others" if len(names) > 1 else ""
    call = f"{what} of table {names[0]!r}{others}"
    for table, _ in calls:
        table._begin(call)
    begun = [table._record(kind, len(ids)) for table, ids in calls if recorder.is_traced]
    first._store.run(call if others else f"{call} after push {first.pushes}", task, collections=names)
    for ring, sequence, _ in begun:
        ring.end(sequence)


def _since(name: str, call: str, given: object) -> int:
    """Check an argument `since`. Return it as a number of updates. For None return 0, which means all rows."""
    since = 0 if given is None else whole(name, "since", given)
    if since < 0:
        raise ValueError(f"table {name!r}: since={since}: give what {call} has returned, or None")
    return since


def with_name(name: str, make_optimizer: Callable[[], T]) -> T:
    """Call `make_optimizer`, and name the table in errors that it raises."""
    try:
        return make_optimizer()
    except (ValueError, TypeError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"table {name!r}: {error}") from None


def whole(name: str, argument: str, given: Any) -> int:
    try:
        return operator.index(given)
    except TypeError:
        raise TypeError(f"table {name!r}: {argument}={given!r} is not a whole number: give one") from None
