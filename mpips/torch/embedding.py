"""PyTorch modules that look up rows of tables, `Embedding` and `EmbeddingBag`, and the `TableOptimizer` for the rows.

    table = kv.table("users", dim=32, optimizer="row_adagrad", learning_rate=0.05)
    users = mpips.torch.Embedding(table)                   # in a model, in place of nn.Embedding
    rows = mpips.torch.TableOptimizer(model)               # beside torch's optimizer of the dense parameters
    loss_of(model(ids), y).backward()
    rows.step()
    optimizer.step()

The rows of a table are on servers. A forward pass pulls each row that it needs once, and the pulled rows are a leaf of
autograd's graph. Backward leaves the gradient of the rows in this leaf, until `step` pushes the gradient to the
servers. So everything that PyTorch does with gradients (accumulate, checkpoint, retain) also works for rows.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn import functional

from mpips.collectives.errors import of_caller, warn
from mpips.store.runtime.engine import Handle
from mpips.tables.table import Table, by_store, push_together
from mpips.torch.tensors import check_on_host, find_overflow, from_array, uncompiled

MODES = ("sum", "mean")
WHERE = "give numbers such as the rate to kv.table or table.update_optimizer"
# If the gradients of this many forward passes wait for one step, the program has probably forgotten to call `step`.
MANY = 1000


class _Next(NamedTuple):
    """A batch for which the program has called `prefetch`."""

    # the ids of the batch, each once
    ids: Tensor
    # for each position of the batch, the index of its id in `ids`
    places: Tensor
    # the handle of the pull, or None if the rows have not been requested yet
    rows: Handle | None
    # `Table.origin` and `Table.pushes` at the time of the request. If one of them changes, the rows may be stale.
    origin: tuple[int, int]
    pushes: int


@uncompiled("_pull")
class TableModule(nn.Module):
    """Base class of the modules that look up rows of a table.

    It pulls rows, and keeps their gradients until a `TableOptimizer` pushes the gradients.
    """

    def __init__(self, table: Table, *others: object, padding_idx: int | None = None, **options: object) -> None:
        super().__init__()
        name = type(self).__name__
        if not isinstance(table, Table) or others:
            given = ", ".join(map(repr, (table, *others)))
            raise of_caller(TypeError(f"{name}({given}): give the one table that kv.table(...) returns"))
        self._what = f"{name} of table {table.name!r}"
        if options:
            sentence = (
                f"{self._what} has no argument {next(iter(options))}: leave it out; tables have theirs in kv.table"
            )
            raise of_caller(TypeError(sentence))
        self.table = table
        self.padding_idx = None if padding_idx is None else self._id_of(padding_idx)
        self.embedding_dim = table.dim
        # dtype of the result of a forward pass; half() and to() may make it different from the table's dtype
        self._dtype: torch.dtype = getattr(torch, table.dtype.name)
        # False if the rows are frozen (requires_grad_)
        self._learns = True
        # True if a TableOptimizer pushes the gradients
        self.is_trained = False
        # id(rows) -> (ids, rows), for each forward pass whose gradient has not been pushed yet
        self._leaves: dict[int, tuple[Tensor, Tensor]] = {}
        # prefetched batches: at most two, for the next forward pass and for the one after it
        self._next: deque[_Next] = deque(maxlen=2)

    def prefetch(self, ids: Tensor) -> None:
        """Pull the rows of the next batch during the current one, for the forward pass that has the same ids.

        Does not block. In an asynchronous store the pull starts at once. In a synchronous store it starts after the
        next `TableOptimizer.step`, because rows that are read earlier would lack that step. A forward pass with other
        ids pulls its own rows.

        So in an asynchronous store the forward pass may compute with old rows: what any worker has pushed, set or
        removed since this call is missing from them. After a load or a recovery it pulls the rows again.

        Args:
            ids: int64 ids of any shape, on the host.
        """
        check_ids(self._what, ids)
        # Tensors that are created in inference mode cannot be saved for a backward pass.
        with torch.inference_mode(False):
            wanted, places = torch.unique(ids, return_inverse=True)
        waits = self.table.synchronous and self._leaves
        self._next.append(_Next(wanted, places, None, (0, 0), 0) if waits else self._ask(wanted, places))

    def take_gradients(self) -> list[tuple[Tensor, Tensor]]:
        """Return the ids and gradients of all backward passes since the last call, and remove them from the module.

        Returns:
            A pair for each forward pass: ids (k,) and gradients (k, dim).
        """
        leaves, self._leaves = self._leaves, {}
        taken = []
        for ids, rows in leaves.values():
            if rows.grad is not None:
                pushed = slice(None) if self.padding_idx is None else ids != self.padding_idx
                taken.append((ids[pushed], rows.grad.detach()[pushed]))
            # A second backward pass over the same graph starts with a new gradient.
            rows.grad = None
        return taken

    def waiting_rows(self) -> list[Tensor]:
        """Return the rows (k, dim) of each forward pass whose gradient, `rows.grad`, has not been taken yet."""
        return [rows for _, rows in self._leaves.values()]

    def note_push(self) -> None:
        """Handle a push to the table: in a synchronous store, pull the prefetched rows again. Does not block."""
        if self.table.synchronous:
            self._next = deque((self._ask(each.ids, each.places) for each in self._next), maxlen=2)

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Freeze the rows (False), or train them again (True), from the next forward pass on.

        A model's `requires_grad_` does not reach the rows, because they are not parameters: call this method on the
        module itself.
        """
        self._learns = requires_grad
        return self

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Raise TypeError. `copy` and `pickle` of the module, or of a model that holds it, call this."""
        raise of_caller(
            TypeError(
                f"{self._what} cannot be copied or pickled, as its rows are on servers: save the model's state_dict(), "
                "and the rows by table.save(...)"
            )
        )

    def extra_repr(self) -> str:
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        return f"{self.table.name!r}, dim={self.table.dim}{padding}"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Handle `half`, `to` and similar calls: they change the dtype of forward results, but not of the table."""
        self._dtype = fn(torch.empty(0, dtype=self._dtype)).dtype
        return super()._apply(fn, recurse)

    def _ask(self, ids: Tensor, places: Tensor) -> _Next:
        return _Next(ids, places, self.table.ipull(ids.numpy()), self.table.origin, self.table.pushes)

    def _id_of(self, given: object) -> int:
        """Convert a NumPy integer or a tensor to an int. Raise TypeError or ValueError if it is not an id."""
        try:
            index = operator.index(given)  # type: ignore[arg-type]
        except TypeError:
            raise of_caller(
                TypeError(f"{self._what}: padding_idx={given!r} is not a whole number: give an id")
            ) from None
        if not -(2**63) <= index < 2**63:
            raise of_caller(ValueError(f"{self._what}: padding_idx={index} is no int64: give an id"))
        return index

    def find_prefetched(self, ids: Tensor) -> tuple[Tensor, Tensor, Handle | None]:
        """Return the unique ids, the index among them for each position of `ids`, and the handle of a prefetch or None.

        The handle is None if the rows were not prefetched or are stale. A prefetched batch can be used only once.
        """
        if torch.jit.is_tracing() or torch.compiler.is_exporting():
            advice = (
                "a trace would keep the rows of these ids for all ids: trace the layers behind, and export the table"
            )
            raise of_caller(RuntimeError(f"{self._what}: {advice}"))
        check_ids(self._what, ids)
        for place, batch in enumerate(self._next):
            if torch.equal(batch.ids[batch.places], ids):
                del self._next[place]
                fresh = batch.origin == self.table.origin
                fresh &= not self.table.synchronous or batch.pushes == self.table.pushes
                return batch.ids, batch.places, batch.rows if fresh else None
        return (*torch.unique(ids, return_inverse=True), None)

    def _pull(self, ids: Tensor) -> tuple[Tensor, Tensor, int | None]:
        """Pull the rows of these ids.

        Returns:
            The index of the row for each id, the rows, and the index of the row of `padding_idx`, whose values are
            zeros (None if it is not among the ids). If gradients are wanted, the rows come from a leaf of autograd's
            graph.
        """
        wanted, places, handle = self.find_prefetched(ids)
        rows = from_array(self.table.pull(wanted.numpy()) if handle is None else handle.wait())
        padding = [] if self.padding_idx is None else (wanted == self.padding_idx).nonzero().flatten().tolist()
        rows[padding] = 0
        return places, self.follow_gradient(wanted, rows), padding[0] if padding else None

    def follow_gradient(self, ids: Tensor, rows: Tensor) -> Tensor:
        """Return pulled rows in the module's dtype. If gradients are wanted, `rows` becomes a leaf of autograd's graph.

        `ids` has the id of each row, without duplicates.
        """
        if self._learns and torch.is_grad_enabled():
            rows.requires_grad_()
            rows.register_post_accumulate_grad_hook(lambda leaf: self._keep(ids, leaf))
        return rows.to(self._dtype)

    def _keep(self, ids: Tensor, rows: Tensor) -> None:
        """Keep rows whose gradient backward has just computed, until `step` pushes that gradient.

        Raises RuntimeError if no TableOptimizer would push the gradient.
        """
        if not self.is_trained:
            raise of_caller(
                RuntimeError(
                    f"{self._what} has a gradient that nobody pushes: make mpips.torch.TableOptimizer(model) and call "
                    "its step(), or call the module's requires_grad_(False) where its rows are to stay"
                )
            )
        self._leaves[id(rows)] = ids, rows
        if len(self._leaves) == MANY:
            warn(f"{self._what}: gradients of {MANY} forward passes wait: call step() of the TableOptimizer")


def check_ids(what: str, ids: object) -> None:
    """Raise TypeError or ValueError unless `ids` is an int64 tensor on the host. `what` begins the error message."""
    if not isinstance(ids, Tensor):
        raise of_caller(TypeError(f"{what}: ids are a {type(ids).__name__}: pass a torch.int64 tensor"))
    if ids.dtype != torch.int64:
        raise of_caller(TypeError(f"{what}: ids have dtype {ids.dtype}, and need torch.int64: pass ids.long()"))
    check_on_host([ids], what)


class Embedding(TableModule):
    """Looks up rows of a table by id. Replaces `torch.nn.Embedding`. Any int64 is a valid id.

    The forward pass takes int64 ids of any shape on the host, and returns their rows, (*ids.shape, dim). It blocks
    until the rows have arrived. A module may be used several times before a `TableOptimizer` pushes all gradients. Rows
    are not parameters, so they are not in `state_dict`. `table.save` writes them to a file.

    Args:
        table: A table from `kv.table`, which must be the same on all workers.
        padding_idx: An id whose row always reads as zeros. Its gradient is never pushed.

    Raises:
        TypeError, ValueError: An argument is invalid. The forward pass raises these errors for invalid ids.
        RuntimeError: In a backward pass, if no `TableOptimizer` would push the gradient.

    Example:
        >>> users = mpips.torch.Embedding(kv.table("users", dim=2))
        >>> users(torch.tensor([[3, 5, 3]])).shape
        torch.Size([1, 3, 2])
    """

    def forward(self, ids: Tensor) -> Tensor:
        places, rows, padding = self._pull(ids)
        return functional.embedding(places, rows, padding)


class EmbeddingBag(TableModule):
    """Computes sums or means of bags of rows. Replaces `torch.nn.EmbeddingBag`.

    With 2-D ids, each row of ids is a bag. With 1-D ids, `offsets` are the positions at which bags begin.
    `per_sample_weights` has the shape of the ids, and needs mode "sum". Everything else works as in `Embedding`.

    Args:
        table: A table from `kv.table`, which must be the same on all workers.
        mode: "sum" or "mean".
        padding_idx: An id that is ignored in all bags. It adds nothing to sums and does not count in means.
        include_last_offset: If True, the last of `offsets` is the end of the last bag, not the start of another bag.

    Raises:
        TypeError, ValueError, RuntimeError: As in `Embedding`.

    Example:
        >>> words = mpips.torch.EmbeddingBag(kv.table("words", dim=2), mode="sum")
        >>> words(torch.tensor([3, 5, 3]), torch.tensor([0, 2])).shape  # two bags
        torch.Size([2, 2])
    """

    def __init__(
        self,
        table: Table,
        mode: str = "mean",
        padding_idx: int | None = None,
        include_last_offset: bool = False,
        **options: object,
    ) -> None:
        super().__init__(table, padding_idx=padding_idx, **options)
        if mode not in MODES:
            raise of_caller(ValueError(f"{self._what}: mode={mode!r}: give {' or '.join(map(repr, MODES))}"))
        self.mode = mode
        self.include_last_offset = include_last_offset

    def forward(self, ids: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        """Return a row for each bag, (bags, dim)."""
        places, rows, padding = self._pull(ids)
        return functional.embedding_bag(
            places,
            rows,
            offsets,
            mode=self.mode,
            per_sample_weights=per_sample_weights,
            include_last_offset=self.include_last_offset,
            padding_idx=padding,
        )

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, mode={self.mode!r}"


class _Group(dict[str, Any]):
    """A parameter group with only `params`. Other names raise KeyError, because the tables have the hyperparameters."""

    def __missing__(self, name: str) -> NoReturn:
        raise of_caller(KeyError(f"a group of a TableOptimizer has no {name!r}: {WHERE}"))

    def __setitem__(self, name: str, value: object) -> NoReturn:
        raise of_caller(TypeError(f"a group of a TableOptimizer takes no {name!r}: {WHERE}"))


class TableOptimizer:
    """Pushes the gradients of a model's tables. The servers update the rows with the optimizer of each table.

    In a synchronous store gradients are averaged over the workers, as DDP and `DataParallel` average the gradients of
    dense parameters. All workers must call `step` equally often. A worker without a batch must also call `step`, and
    contributes zeros to the mean. In an asynchronous store the servers apply each worker's gradients separately, as
    they arrive. The tables may belong to several stores.

    `GradScaler.step` accepts a TableOptimizer if the store is synchronous or has one worker.

    Args:
        model: A module that holds `Embedding`, `EmbeddingBag` or `EmbeddingBagCollection` modules at any depth, the
            same on all workers.

    Raises:
        TypeError, ValueError: `model` is not a module, holds no `Embedding` or `EmbeddingBag`, or holds one whose table
            has `evict_by="score"`.

    Example:
        >>> items = mpips.torch.Embedding(kv.table("items", dim=2, init=mpips.uniform(0), learning_rate=1.0))
        >>> optimizer = mpips.torch.TableOptimizer(items)
        >>> items(torch.tensor([3])).sum().backward()
        >>> optimizer.step()
        >>> items(torch.tensor([3])).tolist()
        [[-1.0, -1.0]]
    """

    # Tells GradScaler to call `step` even if a gradient has overflowed on this worker.
    _step_supports_amp_scaling = True

    def __init__(self, model: nn.Module) -> None:
        if not isinstance(model, nn.Module):
            raise of_caller(TypeError(f"TableOptimizer: model is a {type(model).__name__}: pass a torch.nn.Module"))
        self._modules = [module for module in model.modules() if isinstance(module, TableModule)]
        if not self._modules:
            sentence = "TableOptimizer: the model has no mpips.torch.Embedding or EmbeddingBag: put one into it"
            raise of_caller(ValueError(sentence))
        if scored := next((module.table.name for module in self._modules if module.table.needs_scores), None):
            sentence = (
                f"TableOptimizer: table {scored!r} has evict_by='score', and a step has no scores to push: take "
                "evict_by='count' or 'age', or push its gradients by table.push(ids, gradients, scores)"
            )
            raise of_caller(ValueError(sentence))
        self._of_table: dict[Table, list[TableModule]] = {}
        for module in self._modules:
            module.is_trained = True
            self._of_table.setdefault(module.table, []).append(module)

    def step(self, *, grad_scaler: GradScaler | None = None) -> None:
        """Push the gradients of all backward passes since the last step or `zero_grad`.

        Blocks until the servers have the gradients. Each table gets a single push. If a gradient has overflowed on one
        worker, all workers skip the step.

        Args:
            grad_scaler: Passed by `GradScaler.step`.

        Raises:
            ValueError: With `grad_scaler`, on all workers, if a table is float16, or in an asynchronous store with
                several workers.
            StoreError, MemoryError: As in `Table.push`.
        """
        if grad_scaler is not None and self._overflows(grad_scaler):
            self.zero_grad()
            return
        pushes = []
        for table, modules in self._of_table.items():
            parts = [part for module in modules for part in module.take_gradients()]
            ids, gradients = _joined(table, parts)
            if table.contributors > 1:
                gradients = gradients / table.contributors
            pushes.append((table, ids.numpy(), gradients.contiguous()))
        push_together(pushes)
        for module in self._modules:
            module.note_push()

    def _overflows(self, scaler: GradScaler) -> bool:
        """Unscale the gradients. Return True if a gradient of any worker overflowed, and set this scaler's flag."""
        what = "TableOptimizer.step with a GradScaler"
        # PyTorch refuses to unscale float16, but raises only on workers that have a gradient. The other workers would
        # then wait for them.
        if half := next((table.name for table in self._of_table if table.dtype == np.float16), None):
            sentence = (
                f"{what}: table {half!r} is float16, and so are its gradients, which GradScaler does not unscale: give "
                "the table dtype='float32', or 'bfloat16', which needs no scaler"
            )
            raise of_caller(ValueError(sentence))
        flag = find_overflow(scaler, self)
        # The tables may belong to several stores, so ask the workers of each store.
        words = [tables[0].is_any(what, bool(flag)) for tables in by_store(self._of_table)]
        flag.fill_(float(any(words)))
        return bool(flag)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """One group, whose `params` are the rows with gradients to push. GradScaler and gradient clipping use it."""
        leaves = [leaf for module in self._modules for leaf in module.waiting_rows()]
        return [_Group(params=leaves)]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard the gradients that were not pushed."""
        for module in self._modules:
            module.take_gradients()


def _joined(table: Table, parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Concatenate the ids and the gradients of all parts."""
    if len(parts) == 1:
        return parts[0]
    if not parts:
        return torch.from_numpy(np.empty(0, np.int64)), from_array(np.empty((0, table.dim), table.dtype))
    ids, gradients = zip(*parts)
    return torch.cat(ids), torch.cat(gradients)
