"""A model's gradients in one stretch of memory that the ranks of a node share, in the order in which they become ready.

Behind them stands a word for each parameter, which says whether anybody used it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from mpi4py import MPI
from torch import Tensor

import collectives

NUMPY: dict[torch.dtype, np.dtype[Any]] = {
    torch.float32: np.dtype(np.float32), torch.float64: np.dtype(np.float64), torch.float16: np.dtype(np.float16),
}  # fmt: skip


def empty(n: int, dtype: torch.dtype, comm: MPI.Comm) -> Tensor:
    """n elements in memory that the node shares."""
    if dtype is torch.bfloat16:
        return torch.from_numpy(collectives.empty(n, np.int16, comm)).view(dtype)
    if dtype not in NUMPY:
        raise TypeError(f"a parameter is of type {dtype}: gradients may be float16, bfloat16, float32 or float64")
    return torch.from_numpy(collectives.empty(n, NUMPY[dtype], comm))


class Gradients:
    """Flat memory for the gradients of `parameters`, in this order; parameters of one type lie in one tensor."""

    def __init__(self, parameters: Sequence[Tensor], comm: MPI.Comm) -> None:
        self.parameters = list(parameters)
        self._flats: dict[torch.dtype, Tensor] = {}
        self._starts: list[int] = []
        ends: dict[torch.dtype, int] = {}
        for parameter in self.parameters:
            self._starts.append(ends.get(parameter.dtype, 0))
            ends[parameter.dtype] = self._starts[-1] + parameter.numel()
        last = self.parameters[-1].dtype
        for dtype, end in ends.items():
            self._flats[dtype] = empty(end + (len(self.parameters) if dtype is last else 0), dtype, comm)
            self._flats[dtype].zero_()
        self.used = self._flats[last][ends[last] :]
        """Of each parameter the share of the ranks that used it, once it has been reduced with the last bucket."""
        self.views = [
            self._flats[parameter.dtype][start : start + parameter.numel()].view(parameter.shape)
            for parameter, start in zip(self.parameters, self._starts)
        ]

    def stretch(self, first: int, last: int) -> Tensor:
        """Gradients [first, last), 1-D, which are of one type; with the words behind them if they are the last."""
        flat = self._flats[self.parameters[first].dtype]
        end = self._starts[last - 1] + self.parameters[last - 1].numel()
        return flat[self._starts[first] : end + (len(self.used) if last == len(self.parameters) else 0)]

    def take(self, index: int) -> None:
        """The parameter's gradient is there: bring it to its place, where it stays."""
        parameter, view = self.parameters[index], self.views[index]
        if parameter.grad is not view:
            view.copy_(parameter.grad)
            parameter.grad = view
        self.used[index] = 1

    def lack(self, index: int) -> None:
        """The parameter has no gradient on this rank: it adds nothing to the sum."""
        if self.parameters[index].grad is None:
            self.views[index].zero_()
            self.used[index] = 0
        else:
            self.take(index)  # what was accumulated before

    def give(self, scale: float) -> None:
        """All has been reduced: every parameter that anybody used has its gradient, times `scale`; others have none."""
        used = (self.used > 0).tolist()
        for parameter, view, anybody in zip(self.parameters, self.views, used):
            parameter.grad = view if anybody else None
        if scale != 1.0:
            for flat in self._flats.values():
                flat.mul_(scale)

    def nothing(self) -> None:
        """This rank contributes nothing."""
        for flat in self._flats.values():
            flat.zero_()

    def norm(self) -> Any:
        """The 2-norm of all gradients together."""
        views = [view for view, parameter in zip(self.views, self.parameters) if parameter.grad is not None]
        return torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(view.float()) for view in views]))
