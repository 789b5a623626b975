"""A model's gradients in one stretch of memory that the ranks of a node share, in the order in which they become ready.

Behind them stand words: for each parameter whether anybody used it, then what ranks compare.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from mpi4py import MPI
from torch import Tensor

import collectives
from mpips.torch.lockstep import BITS

NUMPY: dict[torch.dtype, np.dtype[Any]] = {
    torch.float32: np.dtype(np.float32), torch.float64: np.dtype(np.float64), torch.float16: np.dtype(np.float16),
}  # fmt: skip

COMPARED = 2 * BITS + 1
"""Words that ranks compare: those of a token, and whether gradients came late."""


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
            self._flats[dtype] = empty(end + (len(self.parameters) + COMPARED if dtype is last else 0), dtype, comm)
            self._flats[dtype].zero_()
        self._words = self._flats[last][ends[last] :]
        self.used, self._compared = self._words.split((len(self.parameters), COMPARED))
        self._said = self._compared.clone()
        self._last: tuple[int | None, bool] = (None, False)
        self.views = [
            self._flats[parameter.dtype][start : start + parameter.numel()].view(parameter.shape)
            for parameter, start in zip(self.parameters, self._starts)
        ]

    def stretch(self, first: int, last: int) -> Tensor:
        """Gradients [first, last), 1-D, which are of one type; with the words behind them if they are the last."""
        flat = self._flats[self.parameters[first].dtype]
        end = self._starts[last - 1] + self.parameters[last - 1].numel()
        return flat[self._starts[first] : end + (len(self._words) if last == len(self.parameters) else 0)]

    def take(self, index: int) -> None:
        """The parameter's gradient is there: bring it to its place, where it stays."""
        parameter, view = self.parameters[index], self.views[index]
        if parameter.grad is not view:
            view.copy_(_dense(parameter.grad))  # of backward(create_graph=True) the values alone, as under DDP
            parameter.grad = view
        self.used[index] = 1

    def lack(self, index: int) -> None:
        """The parameter has no gradient on this rank: it adds nothing to the sum."""
        if self.parameters[index].grad is None:
            self.views[index].zero_()
            self.used[index] = 0
        else:
            self.take(index)  # what was accumulated before

    def release(self, first: int, last: int) -> None:
        """Take gradients [first, last) from their parameters, so that nothing is added to them while they travel."""
        for parameter in self.parameters[first:last]:
            parameter.grad = None

    def add(self, index: int) -> None:
        """Add what the parameter has got since its gradient was released."""
        self.views[index].add_(_dense(self.parameters[index].grad))

    def say(self, token: int | None, late: bool) -> None:
        """Write what ranks compare: a token (None: this rank's does not count), and whether gradients came late.

        Each bit is two words, of which one is 0. Where ranks differ no word is, whatever their type and number.
        """
        if self._last != (token, late):
            bits = [0.0] * BITS if token is None else [float(token >> bit & 1) for bit in range(BITS)]
            others = [0.0] * BITS if token is None else [1.0 - bit for bit in bits]
            self._said = torch.tensor([*bits, *others, float(late)], dtype=self._said.dtype)
            self._last = (token, late)
        self._compared.copy_(self._said)

    def late(self) -> bool:
        """Return whether gradients came late on any rank, once all has been reduced."""
        return bool(self._compared[-1] > 0)

    def give(self, scale: float) -> bool:
        """Give every parameter that anybody used its gradient, times `scale`, and others none, once all has been
        reduced. Return whether all ranks' tokens are the same; nothing is given where they are not."""
        words = self._words.tolist()
        tokens = words[len(self.parameters) :]
        if any(bit and other for bit, other in zip(tokens, tokens[BITS : 2 * BITS])):
            return False
        for parameter, view, used in zip(self.parameters, self.views, words):
            parameter.grad = view if used else None
        if scale != 1.0:
            for flat in self._flats.values():
                flat.mul_(scale)
        return True

    def nothing(self) -> None:
        """This rank contributes nothing."""
        for flat in self._flats.values():
            flat.zero_()

    def norm(self) -> Tensor:
        """Return the 2-norm of all gradients together."""
        found = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        if not found:
            return torch.zeros(())
        return torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(each.float()) for each in found]))


def _dense(gradient: Tensor) -> Tensor:
    """Return the gradient's values. Rows that a sparse one lacks are zeros, which no optimizer that takes it moves."""
    gradient = gradient.detach()
    return gradient if gradient.layout is torch.strided else gradient.to_dense()
