"""Average gradients over ranks, bucket by bucket, during the backward pass.

The `Reducer` starts an allreduce for each bucket. The gradients lie in `SharedGradients`, memory that the ranks of a
node share, in the order in which they become ready. After the gradients, the memory holds two groups of numbers, which
the last bucket's allreduce includes:

- One number for each parameter tells whether any rank used the parameter. If none did, its `grad` is None afterwards.
- The compared numbers tell whether all ranks ran the same program. They encode a rank's token (`Lockstep.token`).

Gradients of sparse embeddings are not in this memory. `RowGradients` gathers their rows after backward.
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
# count of the numbers that ranks compare: two for each bit of the token, and one that is above 0 if a gradient was late
COMPARED = 2 * BITS + 1


class Reducer:
    """The gradients of a model, and the allreduces of their buckets. Creating a Reducer is collective.

    Buckets start in order. A bucket starts when all its gradients have arrived and one more gradient arrives. The last
    bucket also carries the numbers that ranks compare, so it starts when backward has ended.

    Args:
        parameters: The parameters, in the order in which their gradients become ready.
        sparse: The positions in `parameters` of parameters with sparse gradients, which take no room in the buckets.
        cuts: The buckets. A bucket whose parameters have several dtypes is split further.
        comm: The communicator of the ranks over which gradients are averaged.
        algorithm: The algorithm of the allreduces, as in `collectives.allreduce`.
        in_background: Run all buckets but the last while backward goes on.
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
        # Parameters may already have gradients, from a pass in no_sync. These move into the new memory below.
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
        self._in_background = in_background
        self._home = communicator(comm)
        self._under_way: list[Future[None]] = []
        for index, gradient in enumerate(before):
            if gradient is not None:
                self.gradients.take(index, gradient)
        self.reset()

    def reset(self) -> None:
        """Prepare for the next backward pass."""
        self._under_way.clear()
        # positions of parameters whose gradient has not arrived
        self._missing = set(self._place.values())
        # number of the bucket that starts next
        self._next = 0
        # for each bucket, the number of its gradients that have not arrived
        self._left = [bucket.last - bucket.first for bucket in self.buckets]
        # positions of gradients that arrived again after their bucket had started
        self._late: set[int] = set()
        # position of the gradient that arrived last and has not been copied into its bucket yet, or -1
        self._pending = -1

    def note_arrival(self, parameter: Tensor) -> int:
        """Note that a parameter's gradient has been accumulated. Return the parameter's position.

        The gradient is copied into its bucket only when the next gradient arrives. Until then the user's own hooks,
        which run after ours, may still change it.
        """
        self._take_pending()
        self._pending = self._place[parameter]
        return self._pending

    def finish(self, token: int | None, scale: float = 1.0) -> bool:
        """End a backward pass: reduce the remaining buckets, and give all parameters their gradients.

        Collective, blocking.

        Args:
            token: BITS bits that encode what this rank's program did (`Lockstep.token`), or None to compare nothing.
            scale: A factor on the means.

        Returns:
            True if all ranks passed the same token. Otherwise no parameter gets a gradient.
        """
        self._take_pending()
        self.gradients.complete(self._missing)
        self._reduce_rest(token, list(self._late))
        alike = self.gradients.give(scale)
        if alike:
            self._rows.exchange(True, scale)
        return alike

    def contribute_nothing(self) -> None:
        """On a rank that has finished its own steps, contribute zeros to a backward pass of the other ranks."""
        self.gradients.zero()
        self._reduce_rest(None, ())
        self._rows.exchange(False, 1.0)

    @property
    def has_begun(self) -> bool:
        """True once a bucket of this backward pass has started."""
        return self._next > 0

    def free(self) -> None:
        """Free the plans of the allreduces. Collective."""
        for plan in self._plans:
            plan.free()

    def _take_pending(self) -> None:
        """Copy the gradient that arrived last into its bucket, and start the buckets that are complete."""
        index, self._pending = self._pending, -1
        # The gradient is None if one of the user's hooks has set it to None.
        if index < 0 or (gradient := self.gradients.parameters[index].grad) is None:
            return
        bucket = self._bucket_of[index]
        # Reentrant checkpointing may run a block more than once, and then a gradient arrives after its bucket has
        # started.
        if bucket < self._next:
            if index not in self.gradients.sparse:
                self._late.add(index)
            return
        self.gradients.take(index, gradient)
        if index in self._missing:
            self._missing.discard(index)
            self._left[bucket] -= 1
        # The last bucket is never started here: it carries numbers that are known only when backward ends.
        while self._next < len(self.buckets) - 1 and not self._left[self._next]:
            self.gradients.release(*self.buckets[self._next])
            self._start_next(self._in_background)

    def _start_next(self, in_background: bool) -> None:
        self._start(self._plans[self._next], in_background)
        self._next += 1

    def _start(self, plan: Plan, in_background: bool) -> None:
        """Start an allreduce. If it need not run in the background and no other is under way, run it to its end."""
        if not in_background and communication.run_at_once(plan):
            return

        def steps() -> Iterator[None]:
            plan.start()
            yield from wait_for_plan(plan)

        self._under_way.append(communication.run(GroupJob(plan, steps, self._home), in_background))

    def _wait(self) -> None:
        """Wait for all allreduces that have been started."""
        for future in self._under_way:
            future.wait()
        self._under_way.clear()

    def _reduce_rest(self, token: int | None, late: Sequence[int]) -> None:
        """Start the remaining buckets and wait for all of them.

        If a gradient was late on any rank (it arrived after its bucket had started), all ranks reduce a second time. At
        that point each bucket holds the mean of the first exchange, which is equal on all ranks. Each rank adds its
        late gradients to this mean. The mean of the results is the mean of all gradients.
        """
        try:
            self.gradients.write_words(token, bool(late))
            # Not in the background: backward is over, so there is nothing to overlap with.
            while self._next < len(self.buckets):
                self._start_next(False)
            self._wait()
            if self.gradients.any_late():
                # The second mean does not change the first one, which is the same on all ranks.
                for index in late:
                    self.gradients.add(index)
                for plan in self._plans[:-1]:
                    self._start(plan, False)
                self._wait()
        finally:
            self.reset()


class SharedGradients:
    """Flat memory for gradients, shared by the ranks of a node.

    Gradients of the same dtype lie in one tensor, in the order of `parameters`. A complex gradient is stored as real
    numbers. Gradients at positions in `sparse` are not stored here; they stay in their parameters.
    """

    def __init__(self, parameters: Sequence[Tensor], sparse: Collection[int], comm: MPI.Comm) -> None:
        self.parameters = list(parameters)
        self.sparse = frozenset(sparse)
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
        # The compared numbers lie after the gradients of the last parameter's dtype, and have the same dtype.
        self._words = self._flats[last][ends[last] :]
        self._used, self._compared = self._words.split((len(self.parameters), COMPARED))
        # A copy of the compared numbers that were written last, and the (token, late) that they encode. Most steps
        # write equal numbers, and then copy these.
        self._written = self._compared.clone()
        self._last: tuple[int | None, bool] = (None, False)
        self._kinds = [(parameter.dtype, parameter.stride()) for parameter in self.parameters]
        stretches = [self._flats[p.dtype][slice(*ends)] for p, *ends in zip(self.parameters, self._starts, self._ends)]
        self._views = [
            stretch if index in self.sparse else stretch.view(p.dtype).as_strided(p.shape, _strides(p))
            for index, (p, stretch) in enumerate(zip(self.parameters, stretches))
        ]

    def are_fitting(self) -> bool:
        """True if the parameters still have the dtypes and strides that they had when the memory was allocated."""
        return all(
            (parameter.dtype, parameter.stride()) == kind for parameter, kind in zip(self.parameters, self._kinds)
        )

    def stretch(self, first: int, last: int) -> Tensor:
        """Return gradients [first, last), which have one dtype, as a 1-D view.

        If the range includes the last gradient, the view also covers the numbers that follow the gradients.
        """
        flat = self._flats[self.parameters[first].dtype]
        words = len(self._words) if last == len(self.parameters) else 0
        return flat[self._starts[first] : self._ends[last - 1] + words]

    def take(self, index: int, gradient: Tensor) -> None:
        """Copy a parameter's gradient to its place in the memory, and make `parameter.grad` a view of that place."""
        view = self._views[index]
        if gradient is not view and index not in self.sparse:
            plain = gradient.layout is torch.strided and not gradient.requires_grad
            view.copy_(gradient if plain else _dense(gradient))
            self.parameters[index].grad = view

    def complete(self, missing: Iterable[int]) -> None:
        """Fill in the gradients that did not arrive in this backward pass, and mark which parameters were used.

        A gradient that did not arrive is replaced by the one that an earlier pass in no_sync left in `parameter.grad`,
        or by zeros.
        """
        self._used.fill_(1)
        for index in missing:
            if (gradient := self.parameters[index].grad) is not None:
                self.take(index, gradient)
            else:
                self._views[index].zero_()
                self._used[index] = 0

    def release(self, first: int, last: int) -> None:
        """Set `grad` of parameters [first, last) to None: autograd must not add to memory that is being reduced."""
        for index in range(first, last):
            if index not in self.sparse:
                self.parameters[index].grad = None

    def add(self, index: int) -> None:
        """Add a late gradient, which a parameter got after its bucket had started, to the mean in the bucket."""
        self._views[index].add_(_dense(self.parameters[index].grad))

    def write_words(self, token: int | None, late: bool) -> None:
        """Write the numbers that ranks compare: the token, and whether any gradient of this rank was late.

        Each bit is written as a pair of numbers, (1, 0) or (0, 1). After a sum or a mean over ranks, both numbers of a
        pair are above 0 if and only if ranks had different bits. This holds in any dtype and for any number of ranks. A
        rank whose token is None writes zeros, which agree with every token.
        """
        if self._last != (token, late):
            bits = [0.0] * BITS if token is None else [float(token >> bit & 1) for bit in range(BITS)]
            others = [0.0] * BITS if token is None else [1.0 - bit for bit in bits]
            self._written = torch.tensor([*bits, *others, float(late)], dtype=self._written.dtype)
            self._last = (token, late)
        self._compared.copy_(self._written)

    def any_late(self) -> bool:
        """True if a gradient was late on any rank. Valid after the reduction."""
        return self._compared[-1].item() > 0

    def give(self, scale: float) -> bool:
        """Set `grad` of each parameter that any rank used to the mean, times `scale`. Set any other `grad` to None.

        Call it after the reduction. Return True if all ranks' tokens were the same. Otherwise return False and change
        nothing.
        """
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
        """Set all values to 0, so that this rank contributes like a rank that used no parameter."""
        for flat in self._flats.values():
            flat.zero_()

    def norm(self) -> Tensor:
        """Return the 2-norm of all gradients together. Local."""
        found = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        if not found:
            return torch.zeros(())
        values = [each.coalesce().values() if each.is_sparse else each for each in found]
        wide = [each.to(torch.promote_types(each.dtype, torch.float32)) for each in values]
        return torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(each) for each in wide]))


# kinds of gradient that a rank may have for a parameter: no gradient, a sparse gradient, a dense gradient
NONE, ROWS, DENSE = range(3)
LABEL = "DataParallel, rows of sparse gradients"


class RowGradients:
    """Exchanges the sparse gradients of embeddings made with `sparse=True`, as rows."""

    def __init__(self, parameters: Sequence[Tensor], comm: MPI.Intracomm) -> None:
        self._parameters = parameters
        self._comm = comm
        # for each parameter, the bytes of one row and of the row's index
        self._widths = [8 + p[:1].numel() * p.element_size() for p in parameters]
        # buffers of the gather: the rows of this rank, and the rows of all ranks
        self._own = np.empty(0, np.uint8)
        self._every = np.empty((comm.size, 0), np.uint8)

    def exchange(self, contributes: bool, scale: float) -> None:
        """Set `grad` of each parameter that any rank used to the mean of all ranks' gradients. Collective, blocking.

        If no rank used a parameter, its `grad` becomes None. The mean is sparse, unless a rank had a dense gradient.
        Rows are added in the order of the ranks, so the result has the same bits on all ranks.

        Args:
            contributes: False if this rank has no gradients to give.
            scale: A factor on the means.
        """
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
        # 1. All ranks gather the kinds and the numbers of rows of each other's gradients.
        # 2. They gather the rows, padded to the largest number of bytes that any rank has.
        # 3. Each rank adds up the rows. The data of one rank are, for each parameter in turn, all its indices and then
        # all its values.
        every = gather_rows(np.array(heads), self._comm, LABEL).reshape(self._comm.size, len(self._parameters), 2)
        self._gather(parts, int((every[:, :, 1] * self._widths).sum(1).max()))
        starts = [0] * self._comm.size
        for parameter, width, (kinds, counts) in zip(self._parameters, self._widths, every.transpose(1, 2, 0).tolist()):
            pieces = []
            for nbytes, dtype in ((8, torch.int64), (width - 8, parameter.dtype)):
                ends = [start + nbytes * count for start, count in zip(starts, counts)]
                pieces.append(torch.empty(nbytes * sum(counts) // dtype.itemsize, dtype=dtype))
                every_part = [row[start:end] for row, start, end in zip(self._every, starts, ends)]
                np.concatenate(every_part, out=bytes_of(pieces[-1]))
                starts = ends
            values = pieces[1].view(-1, *parameter.shape[1:])
            mean = torch.sparse_coo_tensor(pieces[0][None], values, parameter.shape, check_invariants=False).coalesce()
            mean.values().mul_(scale)
            parameter.grad = None if not any(kinds) else mean.to_dense() if DENSE in kinds else mean

    def _gather(self, parts: Sequence[NDArray[np.uint8]], most: int) -> None:
        """Gather the parts of all ranks into `_every`. `most` is the largest number of bytes that any rank has."""
        if most > self._own.size:
            self._own = np.zeros(2 * most, np.uint8)
            self._every = np.empty((self._comm.size, 2 * most), np.uint8)
        start = 0
        for part in parts:
            self._own[start : start + part.size] = part
            start += part.size
        collectives.allgather(self._own, self._comm, out=self._every, label=LABEL)


def _strides(parameter: Tensor) -> tuple[int, ...]:
    """Return the strides for a parameter's gradient: those of the parameter, if it is dense and does not overlap.

    PyTorch's fused optimizers need gradients with the strides of their parameters.
    """
    return torch.empty_like(parameter, device="meta", memory_format=torch.preserve_format).stride()


def _allocate(n: int, dtype: torch.dtype, comm: MPI.Comm) -> Tensor:
    """Return n zeros in memory that the ranks of the node share. A complex dtype is replaced by its real dtype."""
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
    """Return a gradient as a dense tensor, detached from any graph that backward(create_graph=True) has built.

    DDP detaches gradients in the same way. A sparse gradient gets zeros in its missing rows. Optimizers that accept
    sparse gradients do not change a row whose gradient is zero.
    """
    gradient = gradient.detach()
    return gradient if gradient.layout is torch.strided else gradient.to_dense()
