"""Detect that an optimizer of PyTorch makes steps while no gradients go through any process group.

Each rank would then train alone. This happens, for example, if a wrapper does not know the backend's name and returns
the model unwrapped. We count the elements that go through process groups, until a large tensor goes through a group or
the count reaches the number of elements that the optimizer trains. From then on we assume that gradients are exchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from mpips.collectives.recorder import own as recorder

# A tensor with this many elements is large. Losses and counts that programs sum for their logs have fewer.
LARGE = 1024


class GradientWatch:
    """Counts the elements of the tensors that this process passes to operations of its process groups.

    The count begins with the first group of several ranks and is never reset. `active` becomes True at that moment, and
    stays True as long as the counted elements are too few to be gradients.
    """

    def __init__(self) -> None:
        self.active = False
        # number of communicators that process groups have used
        self._groups = 0
        # total number of elements of the tensors in all operations of all process groups, since the first group began
        self._moved = 0
        # number of elements of an optimizer's parameters: the largest number among the optimizers that have made a step
        self._trained = 0
        # id() of each optimizer that has made a step
        self._known: set[int] = set()
        self._hook: Any = None

    def add_group(self, size: int) -> None:
        self._groups += 1
        if self._hook is None and size > 1:
            self.active = True
            self._hook = register_optimizer_step_post_hook(self._see_step)

    def see(self, tensors: Sequence[Any], between_two: bool) -> None:
        """Count the elements of the tensors of one operation of a process group.

        A tensor of LARGE elements or more is taken for gradients, and the watch stops. `between_two` is True for a send
        or a receive. The watch then stops, too, because a program that sends tensors itself is assumed to exchange its
        gradients in this way.
        """
        sizes = [tensor.numel() for tensor in tensors if isinstance(tensor, Tensor)]
        self._moved += sum(sizes)
        if between_two or max(sizes, default=0) >= LARGE:
            self._stop()

    def trained_alone(self) -> bool:
        """True if optimizers have made steps, and nothing was exchanged that could have been gradients.

        The result is False in a program that exchanges gradients by DataParallel, DistributedOptimizer or a store.
        These use communicators of their own, so this process then has more communicators than groups.
        """
        return self.active and self._moved < self._trained and recorder.count_communicators() <= self._groups

    def _see_step(self, optimizer: torch.optim.Optimizer, args: object, keywords: object) -> None:
        if not self.active or torch.compiler.is_compiling() or id(optimizer) in self._known:
            return
        self._known.add(id(optimizer))
        parameters = [tensor for group in optimizer.param_groups for tensor in group["params"]]
        self._trained = max(self._trained, sum(tensor.numel() for tensor in parameters))
        # Stop if gradients are exchanged elsewhere. Gradients of tensors on GPUs go through another backend. A DTensor
        # is one rank's part of a tensor that is split between ranks.
        others = any(tensor.device.type != "cpu" or hasattr(tensor, "placements") for tensor in parameters)
        if others or self._moved >= self._trained:
            # Do not remove the hook here, because PyTorch is iterating over the hooks now.
            self.active = False

    def _stop(self) -> None:
        self.active = False
        self._hook.remove()


watch = GradientWatch()
