"""The reducer averages gradients, bucket by bucket, while backward goes on; a parameter nobody used gets none.

`Reducer` starts the allreduces. `SharedGradients` lie in one stretch of memory that the ranks of a node share, in the
order in which they become ready. Behind them stand words: for each parameter whether anybody used it, then those that
ranks compare. Gradients of sparse embeddings are no part of it: `RowGradients` gathers their rows after backward.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from mpi4py import MPI
from numpy.typing import NDArray
from torch import Tensor
from torch.futures import Future

import mpips.collectives as collectives
from mpips.collectives.communicator import communicator
from mpips.torch.buckets import Bucket, cut_by_type
from mpips.torch.lockstep import BITS, gather_rows
from mpips.torch.tensors import REALS, bytes_of
from mpips.torch.works import GroupJob, communication, wait_for_plan

if TYPE_CHECKING:
    from mpips.collectives.plan import Plan

NUMPY = {torch.float32: np.float32, torch.float64: np.float64, torch.float16: np.float16}
COMPARED = 2 * BITS + 1
"""Words that ranks compare: those of a token, and whether gradients came late."""


class Reducer:
    """Gradients of `parameters`, in this order, and the allreduces of their buckets. Making it is collective.

    Buckets start in order, each when the gradient after its last arrives; the last one, which carries the words, when
    backward has ended. `in_background`: they go on beside backward. `sparse`: places of parameters with sparse
    gradients, which take no room in the buckets.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        sparse: Collection[int],
        cuts: Sequence[Bucket],
        comm: MPI.Intracomm,
        algorithm: str,
        in_background: bool,
    ) -> None:
        before = [parameter.grad for parameter in parameters]
        self.gradients = SharedGradients(parameters, sparse, comm)
        self._rows = RowGradients([parameters[index] for index in sparse], comm)
        self.buckets = cut_by_type(cuts, [parameter.dtype for parameter in parameters])
        self._place = {parameter: index for index, parameter in enumerate(parameters)}
        self._bucket_of = [number for number, bucket in enumerate(self.buckets) for _ in range(*bucket)]
        self._plans = [
            collectives.plan("allreduce", self.gradients.stretch(*bucket), comm, op="mean", algorithm=algorithm)
            for bucket in self.buckets
        ]
        self._in_background, self._home = in_background, communicator(comm)
        self._under_way: list[Future[None]] = []
        for index, gradient in enumerate(before):
            if gradient is not None:
                self.gradients.take(index, gradient)
        self.reset()

    def reset(self) -> None:
        """Begin anew: no gradient has arrived."""
        self._under_way.clear()
        self._missing, self._next = set(self._place.values()), 0
        self._left = [bucket.last - bucket.first for bucket in self.buckets]
        self._late: set[int] = set()
        self._pending = -1

    def note_arrival(self, parameter: Tensor) -> int:
        """Note that a gradient has been accumulated; return its place in the order.

        It is taken when the next one arrives: hooks of the user's that follow may still change it.
        """
        self._take_pending()
        self._pending = self._place[parameter]
        return self._pending

    def finish(self, token: int | None, scale: float = 1.0) -> bool:
        """Reduce the rest at the end of backward, wait for all, and give parameters their gradients, times `scale`.
        Return whether all ranks brought the same token; no gradient is given where they did not."""
        self._take_pending()
        self.gradients.complete(self._missing)
        self._reduce_rest(token, list(self._late))
        alike = self.gradients.give(scale)
        if alike:
            self._rows.exchange(True, scale)
        return alike

    def contribute_nothing(self) -> None:
        """Reduce zeros, as other ranks go on."""
        self.gradients.zero()
        self._reduce_rest(None, ())
        self._rows.exchange(False, 1.0)

    @property
    def has_begun(self) -> bool:
        """True where a bucket of this backward has started."""
        return self._next > 0

    def free(self) -> None:
        """Give back the plans. Collective."""
        for plan in self._plans:
            plan.free()

    def _take_pending(self) -> None:
        """Take the gradient that has arrived last: buckets that are complete start."""
        index, self._pending = self._pending, -1
        if index < 0 or (gradient := self.gradients.parameters[index].grad) is None:  # a hook has dropped it
            return
        bucket = self._bucket_of[index]
        if bucket < self._next:  # of a block that reentrant checkpointing runs more than once
            if index not in self.gradients.sparse:
                self._late.add(index)
            return
        self.gradients.take(index, gradient)
        if index in self._missing:
            self._missing.discard(index)
            self._left[bucket] -= 1
        while self._next < len(self.buckets) - 1 and not self._left[self._next]:
            self.gradients.release(*self.buckets[self._next])
            self._start_next(self._in_background)

    def _start_next(self, in_background: bool) -> None:
        self._under_way.append(self._start(self._plans[self._next], in_background))
        self._next += 1

    def _start(self, plan: Plan, in_background: bool) -> Future[None]:
        def steps() -> Iterator[None]:
            plan.start()
            yield from wait_for_plan(plan)

        return communication.run(GroupJob(plan, steps, self._home), in_background)

    def _reduce_rest(self, token: int | None, late: Sequence[int]) -> None:
        """Start the buckets that are left, and wait for all; then reduce again what came late on any rank."""
        try:
            self.gradients.write_words(token, bool(late))
            while self._next < len(self.buckets):  # with nothing left beside which they could go on
                self._start_next(False)
            for future in self._under_way:
                future.wait()
            if self.gradients.any_late():
                for index in late:  # what all ranks share keeps its mean
                    self.gradients.add(index)
                for plan in self._plans[:-1]:
                    self._start(plan, False).wait()
        finally:
            self.reset()


class SharedGradients:
    """Flat memory for the gradients of `parameters`, in this order; parameters of one type lie in one tensor.

    Of complex ones it holds both parts. Those at places in `sparse` have no room in it, and keep their gradients.
    """

    def __init__(self, parameters: Sequence[Tensor], sparse: Collection[int], comm: MPI.Comm) -> None:
        self.parameters, self.sparse = list(parameters), frozenset(sparse)
        self._flats: dict[torch.dtype, Tensor] = {}
        self._starts: list[int] = []
        self._ends: list[int] = []
        ends: dict[torch.dtype, int] = {}
        for index, parameter in enumerate(self.parameters):
            self._starts.append(ends.get(parameter.dtype, 0))
            numbers = parameter.numel() * (1 + parameter.is_complex())
            self._ends.append(self._starts[-1] + (0 if index in self.sparse else numbers))
            ends[parameter.dtype] = self._ends[-1]
        last = self.parameters[-1].dtype
        for dtype, end in ends.items():
            words = len(self.parameters) + COMPARED if dtype is last else 0
            self._flats[dtype] = _allocate(end + words, dtype, comm)
        self._words = self._flats[last][ends[last] :]
        self._used, self._compared = self._words.split((len(self.parameters), COMPARED))
        self._written = self._compared.clone()
        self._last: tuple[int | None, bool] = (None, False)
        self._kinds = [(parameter.dtype, parameter.stride()) for parameter in self.parameters]
        stretches = [self._flats[p.dtype][slice(*ends)] for p, *ends in zip(self.parameters, self._starts, self._ends)]
        self._views = [
            stretch if index in self.sparse else stretch.view(p.dtype).as_strided(p.shape, _strides(p))
            for index, (p, stretch) in enumerate(zip(self.parameters, stretches))
        ]

    def are_fitting(self) -> bool:
        """Return whether parameters still have the types and strides that they had."""
        return all((one.dtype, one.stride()) == kind for one, kind in zip(self.parameters, self._kinds))

    def stretch(self, first: int, last: int) -> Tensor:
        """Return gradients [first, last), 1-D, of one type; with the words behind them if they are the last."""
        flat = self._flats[self.parameters[first].dtype]
        words = len(self._words) if last == len(self.parameters) else 0
        return flat[self._starts[first] : self._ends[last - 1] + words]

    def take(self, index: int, gradient: Tensor) -> None:
        """Bring a parameter's gradient to its place, where it stays."""
        view = self._views[index]
        if gradient is not view and index not in self.sparse:
            plain = gradient.layout is torch.strided and not gradient.requires_grad
            view.copy_(gradient if plain else _dense(gradient))
            self.parameters[index].grad = view

    def complete(self, missing: Iterable[int]) -> None:
        """End a backward in which some parameters got no gradient: they add nothing, or what they had before."""
        self._used.fill_(1)
        for index in missing:
            if (gradient := self.parameters[index].grad) is not None:
                self.take(index, gradient)
            else:
                self._views[index].zero_()
                self._used[index] = 0

    def release(self, first: int, last: int) -> None:
        """Take gradients [first, last) from their parameters, so that nothing is added to them while they travel."""
        for index in range(first, last):
            if index not in self.sparse:
                self.parameters[index].grad = None

    def add(self, index: int) -> None:
        """Add what the parameter has got since its gradient was released."""
        self._views[index].add_(_dense(self.parameters[index].grad))

    def write_words(self, token: int | None, late: bool) -> None:
        """Write what ranks compare: a token (None: this rank's does not count), and whether gradients came late.

        Each bit is two words, of which one is 0. Where ranks differ no word is, whatever their type and number.
        """
        if self._last != (token, late):
            bits = [0.0] * BITS if token is None else [float(token >> bit & 1) for bit in range(BITS)]
            others = [0.0] * BITS if token is None else [1.0 - bit for bit in bits]
            self._written = torch.tensor([*bits, *others, float(late)], dtype=self._written.dtype)
            self._last = (token, late)
        self._compared.copy_(self._written)

    def any_late(self) -> bool:
        """Return whether gradients came late on any rank, once all has been reduced."""
        return bool(self._compared[-1] > 0)

    def give(self, scale: float) -> bool:
        """Give every parameter that anybody used its gradient, times `scale`, and others none, once all has been
        reduced. Return whether all ranks' tokens are the same; nothing is given where they are not."""
        words = self._words.tolist()
        tokens = words[len(self.parameters) :]
        if any(bit and other for bit, other in zip(tokens, tokens[BITS : 2 * BITS])):
            return False
        for index, used in enumerate(words[: len(self.parameters)]):
            if index not in self.sparse:
                self.parameters[index].grad = self._views[index] if used else None
        if scale != 1.0:
            for flat in self._flats.values():
                flat.mul_(scale)
        return True

    def zero(self) -> None:
        """Let this rank contribute nothing."""
        for flat in self._flats.values():
            flat.zero_()

    def norm(self) -> Tensor:
        """Return the 2-norm of all gradients together."""
        found = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        if not found:
            return torch.zeros(())
        values = [each.coalesce().values() if each.is_sparse else each for each in found]
        wide = [each.to(torch.promote_types(each.dtype, torch.float32)) for each in values]
        return torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(each) for each in wide]))


NONE, ROWS, DENSE = range(3)
"""What a rank has of a gradient."""
LABEL = "DataParallel, rows of sparse gradients"


class RowGradients:
    """Gradients of `parameters` that come as rows, as those of `Embedding(sparse=True)`, and travel as rows."""

    def __init__(self, parameters: Sequence[Tensor], comm: MPI.Intracomm) -> None:
        self._parameters, self._comm = parameters, comm
        self._widths = [8 + p[:1].numel() * p.element_size() for p in parameters]
        """Bytes of one row, with its number."""
        self._mine, self._every = np.empty(0, np.uint8), np.empty((comm.size, 0), np.uint8)

    def exchange(self, contributes: bool, scale: float) -> None:
        """Give each parameter that anybody used the mean over all ranks, times `scale`, and others none. Collective,
        blocking; rows are added in the order of the ranks."""
        if not self._parameters:
            return
        parts, heads = list[NDArray[np.uint8]](), list[int]()
        for parameter in self._parameters:
            gradient = parameter.grad if contributes else None
            heads.append(NONE if gradient is None else ROWS if gradient.is_sparse else DENSE)
            rows = torch.zeros_like(parameter[:0]) if gradient is None else gradient.detach()
            rows = (rows if rows.is_sparse else rows.to_sparse(1)).coalesce()
            parts += [bytes_of(rows.indices().contiguous()), bytes_of((rows.values() / self._comm.size).contiguous())]
            heads.append(rows.indices().shape[1])
        every = gather_rows(np.array(heads), self._comm, LABEL).reshape(self._comm.size, len(self._parameters), 2)
        self._gather(parts, int((every[:, :, 1] * self._widths).sum(1).max()))
        starts = [0] * self._comm.size
        for parameter, width, (kinds, counts) in zip(self._parameters, self._widths, every.transpose(1, 2, 0).tolist()):
            found = []
            for nbytes, dtype in ((8, torch.int64), (width - 8, parameter.dtype)):
                ends = [start + nbytes * count for start, count in zip(starts, counts)]
                found.append(torch.empty(nbytes * sum(counts) // dtype.itemsize, dtype=dtype))
                every_part = [row[start:end] for row, start, end in zip(self._every, starts, ends)]
                np.concatenate(every_part, out=bytes_of(found[-1]))
                starts = ends
            values = found[1].view(-1, *parameter.shape[1:])
            mean = torch.sparse_coo_tensor(found[0][None], values, parameter.shape, check_invariants=False).coalesce()
            mean.values().mul_(scale)
            parameter.grad = None if not any(kinds) else mean.to_dense() if DENSE in kinds else mean

    def _gather(self, parts: Sequence[NDArray[np.uint8]], most: int) -> None:
        """Gather all ranks' parts, of at most so many bytes, in memory that grows."""
        if most > self._mine.size:
            self._mine = np.zeros(2 * most, np.uint8)
            self._every = np.empty((self._comm.size, 2 * most), np.uint8)
        start = 0
        for part in parts:
            self._mine[start : start + part.size] = part
            start += part.size
        collectives.allgather(self._mine, self._comm, out=self._every, label=LABEL)


def _strides(parameter: Tensor) -> tuple[int, ...]:
    """Return the strides of a gradient: its parameter's where that is dense, as PyTorch's fused optimizers ask for."""
    return torch.empty_like(parameter, device="meta", memory_format=torch.preserve_format).stride()


def _allocate(n: int, dtype: torch.dtype, comm: MPI.Comm) -> Tensor:
    """Return n zeros in memory that the node shares, real ones where the type is complex."""
    dtype = REALS.get(dtype, dtype)
    if dtype is torch.bfloat16:
        return torch.from_numpy(collectives.empty(n, np.int16, comm)).view(dtype).zero_()
    if dtype not in NUMPY:
        raise TypeError(
            f"a parameter is of type {dtype}: gradients may be float16, bfloat16, float32, "
            "float64, complex64 or complex128"
        )
    return torch.from_numpy(collectives.empty(n, NUMPY[dtype], comm)).zero_()


def _dense(gradient: Tensor) -> Tensor:
    """Return the gradient's values alone, also of backward(create_graph=True), as under DDP. Rows that a sparse one
    lacks are zeros, which no optimizer that takes it moves."""
    gradient = gradient.detach()
    return gradient if gradient.layout is torch.strided else gradient.to_dense()
