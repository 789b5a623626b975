"""Notice a process group through which no gradients go, while an optimizer of PyTorch makes steps.

As where a wrapper does not know the backend's name and leaves the model as it is: each rank then trains alone. Until
the first large tensor, or until as many elements as the optimizer has have gone through groups, these are counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from mpips.collectives.recorder import own as recorder

LARGE = 1024  # elements; losses and counts that programs sum for their logs are fewer


class Watch:
    """Counts what goes through the groups of this process. `active` while that does not suffice for gradients."""

    def __init__(self) -> None:
        self.active = False
        self._groups = 0
        self._moved = 0  # elements, through all groups
        self._trained = 0  # elements of the largest optimizer that has made a step
        self._known: set[int] = set()
        self._hook: Any = None

    def add_group(self, size: int) -> None:
        self._groups += 1
        if self._hook is None and size > 1:
            self.active = True
            self._hook = register_optimizer_step_post_hook(self._see_step)

    def see(self, tensors: Sequence[Any], between_two: bool) -> None:
        """See an operation with these tensors; one `between_two` ranks is an exchange of the program's own."""
        sizes = [tensor.numel() for tensor in tensors if isinstance(tensor, Tensor)]
        self._moved += sum(sizes)
        if between_two or max(sizes, default=0) >= LARGE:
            self._stop()

    def trained_alone(self) -> bool:
        """Return whether optimizers have made steps, and nothing has gone by which they could be those of others.

        DataParallel, DistributedOptimizer and stores have communicators beside those of groups.
        """
        return self.active and self._moved < self._trained and recorder.count_communicators() <= self._groups

    def _see_step(self, optimizer: torch.optim.Optimizer, args: object, keywords: object) -> None:
        if not self.active or torch.compiler.is_compiling() or id(optimizer) in self._known:
            return
        self._known.add(id(optimizer))
        parameters = [tensor for group in optimizer.param_groups for tensor in group["params"]]
        self._trained = max(self._trained, sum(tensor.numel() for tensor in parameters))
        # tensors of GPUs go by another backend, and a DTensor is a part of a model that ranks share
        others = any(tensor.device.type != "cpu" or hasattr(tensor, "placements") for tensor in parameters)
        if others or self._moved >= self._trained:
            self.active = False  # the hook stays: PyTorch is going through the hooks

    def _stop(self) -> None:
        self.active = False
        self._hook.remove()


watch = Watch()
