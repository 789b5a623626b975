"""PyTorch's tensors as what collectives take: contiguous, flat, on the host; and back again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

AS_BYTES = (torch.bool, torch.complex64, torch.complex128)
"""Types that move, but are no numbers to `collectives`."""


def flat(tensor: Tensor) -> Tensor:
    """The tensor's elements in order, 1-D, detached: the same memory where it is contiguous, else a copy."""
    return tensor.detach().contiguous().view(-1)


def data(tensor: Tensor) -> NDArray[np.uint8]:
    """The bytes of a contiguous host tensor, where they lie; empty for one without elements."""
    if not tensor.numel():
        return np.empty(0, np.uint8)
    return tensor.detach().view(-1).view(torch.uint8).numpy()


def written(tensor: Tensor) -> tuple[Tensor, Callable[[], None]]:
    """Where a result for this tensor goes, 1-D, and what brings it home: nothing where the tensor is contiguous."""
    if tensor.is_contiguous():
        return tensor.detach().view(-1), _nothing
    beside = flat(tensor)
    return beside, lambda: _copy_back(tensor, beside)


def movable(tensor: Tensor) -> Tensor:
    """A contiguous 1-D tensor as one of a type that can be moved."""
    return tensor.view(torch.uint8) if tensor.dtype in AS_BYTES else tensor


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Find the tensors in what a module returns: in lists, tuples, dicts and dataclasses."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from tensors_in(each)
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from tensors_in(each)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from tensors_in(getattr(value, field.name))


def see_host(tensors: Sequence[Tensor], what: str) -> None:
    """TypeError where one is sparse; ValueError where one is not on the host."""
    for tensor in tensors:
        if tensor.layout is not torch.strided:
            raise TypeError(f"{what}: a tensor has layout {tensor.layout}: pass dense tensors, as tensor.to_dense()")
        if tensor.device.type != "cpu":
            raise ValueError(f"{what}: a tensor is on {tensor.device}: pass CPU tensors, as tensor.cpu()")


def _copy_back(tensor: Tensor, beside: Tensor) -> None:
    tensor.detach().copy_(beside.view(tensor.shape))


def _nothing() -> None:
    """The result is where it belongs."""
