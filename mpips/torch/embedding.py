"""Tables as PyTorch's modules: `Embedding`, `EmbeddingBag`, and `TableOptimizer`, which pushes their gradients.

    table = kv.table("users", dim=32, optimizer="row_adagrad", learning_rate=0.05)
    users = mpips.torch.Embedding(table)                   # in a model, in the place of nn.Embedding
    rows = mpips.torch.TableOptimizer(model)               # beside torch's optimizer of the dense parameters
    loss_of(model(ids), y).backward(); rows.step(); optimizer.step()

A forward pass pulls each row once, as a leaf of autograd's graph. The gradient that backward leaves there waits in the
module for `step`. So what PyTorch does with gradients (accumulate, checkpoint, retain) it does with these.
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
from mpips.torch.tensors import check_on_host, find_overflow, uncompiled

MODES = ("sum", "mean")
WHERE = "give numbers such as the rate to kv.table or table.update_optimizer"
MANY = 1000
"""Forward passes whose gradients wait for one step: so many look like a step that is forgotten."""


class _Next(NamedTuple):
    """Keep what `prefetch` has asked for: each id once, where each stands in the batch, and the rows under way."""

    ids: Tensor
    places: Tensor
    rows: Handle | None
    origin: tuple[int, int]
    pushes: int


@uncompiled("_pull")
class TableModule(nn.Module):
    """Base of the modules whose rows are a table's: pulls rows, and keeps their gradients until they are pushed."""

    def __init__(self, table: Table, *others: object, padding_idx: int | None = None, **options: object) -> None:
        super().__init__()
        name = type(self).__name__
        if not isinstance(table, Table) or others:
            given = ", ".join(map(repr, (table, *others)))
            raise of_caller(TypeError(f"{name}({given}): give the one table that kv.table(...) returns"))
        self._what = f"{name} of table {table.name!r}"
        if options:
            said = f"{self._what} has no argument {next(iter(options))}: leave it out; tables have theirs in kv.table"
            raise of_caller(TypeError(said))
        self.table, self.padding_idx = table, None if padding_idx is None else self._id_of(padding_idx)
        self.embedding_dim = table.dim
        self._dtype: torch.dtype = getattr(torch, table.dtype.name)
        """Of what a forward pass returns."""
        self._learns = True
        """Whether forward passes leave gradients, where autograd is on."""
        self.is_trained = False
        """Whether a `TableOptimizer` pushes its gradients."""
        self._leaves: dict[int, tuple[Tensor, Tensor]] = {}
        """Ids and rows (leaves) whose gradients wait, by identity."""
        self._next: deque[_Next] = deque(maxlen=2)
        """Of the batch that comes now, and of the next one."""

    def prefetch(self, ids: Tensor) -> None:
        """Read the rows of the next batch during compute: the forward pass of these ids then finds them.

        In a synchronous store they begin to travel after the next `TableOptimizer.step`, else that step would be
        missing; in an asynchronous one at once. A forward pass of other ids pulls its own. Does not block.
        """
        self._check(ids)
        with torch.inference_mode(False):  # else no backward pass could keep them
            wanted, places = torch.unique(ids, return_inverse=True)
        waits = self.table.synchronous and self._leaves
        self._next.append(_Next(wanted, places, None, (0, 0), 0) if waits else self._ask(wanted, places))

    def take_gradients(self) -> list[tuple[Tensor, Tensor]]:
        """Return ids and gradients since the last call, (k,) and (k, dim) each, and forget them."""
        leaves, self._leaves = self._leaves, {}
        taken = []
        for ids, rows in leaves.values():
            if rows.grad is not None:
                there = slice(None) if self.padding_idx is None else ids != self.padding_idx
                taken.append((ids[there], rows.grad.detach()[there]))
            rows.grad = None  # another backward pass over the same graph begins anew
        return taken

    def waiting_rows(self) -> list[Tensor]:
        """Return the rows, (k, dim) each, whose `.grad` waits to be taken."""
        return [rows for _, rows in self._leaves.values()]

    def note_push(self) -> None:
        """The table has been pushed to: rows that were asked for before are read anew. Does not block."""
        if self.table.synchronous:
            self._next = deque((self._ask(each.ids, each.places) for each in self._next), maxlen=2)

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Let rows stay as they are, or learn again, from the next forward pass on.

        That of a module around does not come here, as rows are no parameters.
        """
        self._learns = requires_grad
        return self

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Raise TypeError: called by `copy` and `pickle`, also of a model around."""
        raise of_caller(
            TypeError(
                f"{self._what} cannot be copied or pickled, as its rows are on servers: save the model's state_dict(), "
                "and the rows by table.save(...)"
            )
        )

    def extra_repr(self) -> str:
        """Describe the table."""
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        return f"{self.table.name!r}, dim={self.table.dim}{padding}"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Follow `half`, `to` and their like: what a forward pass returns is converted, the table is not."""
        self._dtype = fn(torch.empty(0, dtype=self._dtype)).dtype
        return super()._apply(fn, recurse)

    def _ask(self, ids: Tensor, places: Tensor) -> _Next:
        return _Next(ids, places, self.table.ipull(ids.numpy()), self.table.origin, self.table.pushes)

    def _id_of(self, given: object) -> int:
        """Return an id that may be NumPy's or a tensor. TypeError or ValueError where it is none."""
        try:
            found = operator.index(given)  # type: ignore[arg-type]
        except TypeError:
            raise of_caller(TypeError(f"{self._what}: padding_idx={given!r} is no whole number: give an id")) from None
        if not -(2**63) <= found < 2**63:
            raise of_caller(ValueError(f"{self._what}: padding_idx={found} is no int64: give an id"))
        return found

    def _check(self, ids: object) -> None:
        """Raise TypeError or ValueError where these are no ids."""
        if not isinstance(ids, Tensor):
            raise of_caller(TypeError(f"{self._what}: ids are a {type(ids).__name__}: pass a torch.int64 tensor"))
        if ids.dtype != torch.int64:
            said = f"{self._what}: ids have dtype {ids.dtype}, and need torch.int64: pass ids.long()"
            raise of_caller(TypeError(said))
        check_on_host([ids], self._what)

    def _find_prefetched(self, ids: Tensor) -> tuple[Tensor, Tensor, Handle | None]:
        """Return each id once, where each stands among them, and their rows under way, which are used up by this."""
        self._check(ids)
        for place, found in enumerate(self._next):
            if torch.equal(found.ids[found.places], ids):
                del self._next[place]
                fresh = found.origin == self.table.origin
                fresh &= not self.table.synchronous or found.pushes == self.table.pushes
                return found.ids, found.places, found.rows if fresh else None
        return (*torch.unique(ids, return_inverse=True), None)

    def _pull(self, ids: Tensor) -> tuple[Tensor, Tensor, int | None]:
        """Return where each id stands among the rows, the rows, of a leaf where gradients are wanted, and the place of
        the padding, which is zeros."""
        if torch.jit.is_tracing() or torch.compiler.is_exporting():
            said = "a trace would keep the rows of these ids for all ids: trace the layers behind, and export the table"
            raise of_caller(RuntimeError(f"{self._what}: {said}"))
        wanted, places, handle = self._find_prefetched(ids)
        rows = torch.from_numpy(self.table.pull(wanted.numpy()) if handle is None else handle.wait())
        found = [] if self.padding_idx is None else (wanted == self.padding_idx).nonzero().flatten().tolist()
        rows[found] = 0
        if self._learns and torch.is_grad_enabled():
            rows.requires_grad_()
            rows.register_post_accumulate_grad_hook(lambda leaf: self._keep(wanted, leaf))
        return places, rows.to(self._dtype), found[0] if found else None

    def _keep(self, ids: Tensor, rows: Tensor) -> None:
        """Let a gradient that backward has left wait for `step`. RuntimeError where nobody would push it."""
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


class Embedding(TableModule):
    """Rows of a table by ids, in the place of `torch.nn.Embedding`; any int64 is an id.

    table       what `kv.table` has returned, on each worker.
    padding_idx an id whose row is zeros and stays so: it is never pushed.

    The forward pass takes int64 ids of any shape on the host and returns their rows, (*ids.shape, dim); it blocks until
    they are there. A module may be used several times before a `TableOptimizer` pushes all gradients. Rows are no
    parameters: `state_dict` lacks them, `table.save` writes them.
    """

    def forward(self, ids: Tensor) -> Tensor:
        """Return the rows of ids."""
        places, rows, padding = self._pull(ids)
        return functional.embedding(places, rows, padding)


class EmbeddingBag(TableModule):
    """Sums or means of bags of rows, in the place of `torch.nn.EmbeddingBag`.

    table       what `kv.table` has returned, on each worker.
    mode        "sum" or "mean".
    padding_idx an id that counts in no bag: neither in sums nor in means.
    include_last_offset     the last of `offsets` is where the last bag ends, and begins none.

    Bags are the rows of 2-D ids, or cut 1-D ids at `offsets`, where each begins. `per_sample_weights` has the shape of
    the ids, and needs mode "sum". Else as `Embedding`.
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
        self.mode, self.include_last_offset = mode, include_last_offset

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
        """Describe the table and the mode."""
        return f"{super().extra_repr()}, mode={self.mode!r}"


class _Group(dict[str, Any]):
    """Refuse what a group of PyTorch's has beside `params`: numbers of rows are their table's."""

    def __missing__(self, name: str) -> NoReturn:
        raise of_caller(KeyError(f"a group of a TableOptimizer has no {name!r}: {WHERE}"))

    def __setitem__(self, name: str, value: object) -> NoReturn:
        raise of_caller(TypeError(f"a group of a TableOptimizer takes no {name!r}: {WHERE}"))


class TableOptimizer:
    """Push the gradients of a model's tables, each once for a step; the servers update rows by each table's optimizer.

    model       a module that holds `Embedding` or `EmbeddingBag` modules, wrapped or not, alike on all workers.

    In a synchronous store gradients are averaged over the workers, as DDP and `DataParallel` average those of dense
    parameters. All workers call `step` equally often, also without a batch: such a worker counts as zero. In an
    asynchronous store each worker's gradients count by themselves, when they come. Tables may be of several stores.

    `GradScaler.step` takes it, in a synchronous store or of one worker.
    """

    _step_supports_amp_scaling = True
    """GradScaler calls `step` though a gradient has overflowed here."""

    def __init__(self, model: nn.Module) -> None:
        if not isinstance(model, nn.Module):
            raise of_caller(TypeError(f"TableOptimizer: model is a {type(model).__name__}: pass a torch.nn.Module"))
        self._modules = [module for module in model.modules() if isinstance(module, TableModule)]
        if not self._modules:
            said = "TableOptimizer: the model has no mpips.torch.Embedding or EmbeddingBag: put one into it"
            raise of_caller(ValueError(said))
        self._of_table: dict[Table, list[TableModule]] = {}
        for module in self._modules:
            module.is_trained = True
            self._of_table.setdefault(module.table, []).append(module)

    def step(self, *, grad_scaler: GradScaler | None = None) -> None:
        """Push what backward passes have left since the last step or `zero_grad`; return when the servers have it.

        `grad_scaler` is passed by `GradScaler.step`. Where a gradient has overflowed on one worker, all skip the step.
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
            pushes.append((table, ids.numpy(), gradients.contiguous().numpy()))
        push_together(pushes)
        for module in self._modules:
            module.note_push()

    def _overflows(self, scaler: GradScaler) -> bool:
        """Unscale the gradients; return whether those of any worker have overflowed, which all scalers then hear of."""
        found, what = find_overflow(scaler, self), "TableOptimizer.step with a GradScaler"
        words = [tables[0].is_any(what, bool(found)) for tables in by_store(self._of_table)]  # each store is asked
        found.fill_(float(any(words)))
        return bool(found)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Return one group, whose `params` are the rows with gradients that wait: for `GradScaler`, or to clip them."""
        leaves = [leaf for module in self._modules for leaf in module.waiting_rows()]
        return [_Group(params=leaves)]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget gradients that were not pushed."""
        for module in self._modules:
            module.take_gradients()


def _joined(table: Table, parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Return the ids and gradients of all parts, one behind the other."""
    if len(parts) == 1:
        return parts[0]
    if not parts:
        return torch.from_numpy(np.empty(0, np.int64)), torch.from_numpy(np.empty((0, table.dim), table.dtype))
    ids, gradients = zip(*parts)
    return torch.cat(ids), torch.cat(gradients)
