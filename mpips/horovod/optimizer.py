"""Horovod's DistributedOptimizer: an allreduce of each gradient starts during backward, and `step` waits for all."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from mpips.collectives.errors import of_caller
from mpips.horovod.negotiation import HorovodOp
from mpips.horovod.operations import (
    Compression,
    TensorCompressor,
    allreduce_async,
    grouped_allreduce_async,
    sparse_allreduce_async,
    synchronize,
)
from mpips.horovod.world import ProcessSet, global_process_set
from mpips.torch.lockstep import claim_gradients


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, Tensor]] | None = None,
    compression: type[TensorCompressor] = Compression.none,
    backward_passes_per_step: int = 1,
    op: HorovodOp = HorovodOp.Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Wrap an optimizer so that its `step` first reduces the gradients over all ranks.

    The result is an instance of a subclass of the optimizer's own class, and shares the optimizer's state and groups.
    Gradients of several backward passes are summed, not averaged. A parameter without a gradient on this rank counts as
    zero.

    Args:
        optimizer: An optimizer of torch.optim.
        named_parameters: Pairs of name and parameter, such as `model.named_parameters()`. Ranks match gradients by
            these names.
        compression: `hvd.Compression.none` or `fp16`, or the program's own compressor.
        backward_passes_per_step: The number of backward passes before each step.
        op: `hvd.Average`, or another reduction of `hvd.allreduce`.
        gradient_predivide_factor: Gradients are divided by this factor before they are averaged, and the average is
            multiplied by the factor.
        num_groups: Deprecated argument of Horovod. Pass `groups` instead.
        groups: A number of groups, or lists of parameters. The gradients of a group are reduced as one operation.
        sparse_as_dense: True to convert sparse gradients to dense ones before they are reduced.
        process_set: The ranks that take part.

    Raises:
        ValueError: An argument is invalid.
        NotImplementedError: `op` is Adasum.
    """
    if gradient_predivide_factor != 1.0 and op != HorovodOp.Average:
        raise of_caller(
            ValueError(
                f"gradient_predivide_factor is {gradient_predivide_factor} with op={op!r}: it goes "
                "with op=hvd.Average alone"
            )
        )
    if backward_passes_per_step <= 0:
        raise of_caller(ValueError(f"backward_passes_per_step is {backward_passes_per_step}: pass 1 or more"))
    if op == HorovodOp.Adasum:
        raise of_caller(NotImplementedError("op=Adasum is not supported: choose op=hvd.Average, and tune the rate"))
    if num_groups:
        warnings.warn("num_groups is Horovod's old name: pass groups", DeprecationWarning, stacklevel=2)
        groups = num_groups if groups is None else groups
    kind = type(optimizer)
    methods = {name: value for name, value in vars(_Distributed).items() if name not in ("__dict__", "__weakref__")}
    made: Any = type(kind.__name__, (kind,), {**methods, "_wrapped_class": kind})
    distributed = made.__new__(made)
    distributed.__dict__.update(optimizer.__dict__)
    # A scheduler may have replaced `step` on the instance. That `step` is bound to the wrapped optimizer.
    distributed.__dict__.pop("step", None)
    factors = (1.0 / gradient_predivide_factor, gradient_predivide_factor)
    distributed._begin_reducing(
        named_parameters,
        _Reduction(compression, op, factors, sparse_as_dense, process_set),
        backward_passes_per_step,
        groups,
    )
    return distributed


class _Reduction:
    """The settings for reducing gradients."""

    def __init__(
        self,
        compression: type[TensorCompressor],
        op: HorovodOp,
        factors: tuple[float, float],
        sparse_as_dense: bool,
        process_set: ProcessSet,
    ) -> None:
        self._compression = compression
        self._op = op
        self._factors = factors
        self._sparse_as_dense = sparse_as_dense
        self.process_set = process_set

    def begin(self, names: Sequence[str], gradients: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
        """Begin to reduce gradients as one operation. Return a function that waits for the results and returns them."""
        sparse = [gradient.is_sparse for gradient in gradients]
        if any(sparse) and not self._sparse_as_dense:
            if len(names) > 1:
                name = names[sparse.index(True)]
                raise of_caller(
                    ValueError(
                        f"DistributedOptimizer: the group of {name!r} has sparse gradients: pass "
                        "sparse_as_dense=True, or leave groups out"
                    )
                )
            finish = sparse_allreduce_async(gradients[0], names[0], self._op, self.process_set)
            return lambda: [finish()]
        dense = [gradient.to_dense() if gradient.is_sparse else gradient for gradient in gradients]
        packed, contexts = zip(*[self._compression.compress(gradient) for gradient in dense])
        arguments = (None, names[0], self._op, *self._factors, self.process_set)
        single = len(packed) == 1
        handle = allreduce_async(packed[0], *arguments) if single else grouped_allreduce_async(packed, *arguments)

        def wait() -> list[Tensor]:
            results = [synchronize(handle)] if single else synchronize(handle)
            plain = [self._compression.decompress(result, context) for result, context in zip(results, contexts)]
            return [result.to_sparse(1) if was else result for result, was in zip(plain, sparse)]

        return wait


class _Distributed(torch.optim.Optimizer):
    """The methods that `DistributedOptimizer` puts into the class of its result."""

    _wrapped_class: type[torch.optim.Optimizer]

    def _begin_reducing(
        self,
        named: Iterable[tuple[str, Tensor]] | None,
        reduction: _Reduction,
        passes: int,
        groups: int | Sequence[Sequence[Tensor]] | None,
    ) -> None:
        self._reduction = reduction
        self.backward_passes_per_step = passes
        self._parameter_names = _names(self.param_groups, named)
        claim_gradients(self, "hvd.DistributedOptimizer", [(name, p) for p, name in self._parameter_names.items()])
        self._together = _group(list(self._parameter_names), self._parameter_names, groups)
        # parameter -> remaining backward passes of this step
        self._left: dict[Tensor, int] = {}
        # Parameters whose gradients are being reduced. The first parameter of each group maps to the function that
        # waits for the group, and the other parameters map to None.
        self._under_way: dict[Tensor, Callable[[], list[Tensor]] | None] = {}
        self._hooked: set[Tensor] = set()
        self._synchronized = False
        self._should_synchronize = True
        self._hook_parameters()

    def _hook_parameters(self) -> None:
        """Add the hook `_note_gradient` to the parameters that require a gradient and have no hook yet."""
        if not self._reduction.process_set.included() or len(self._reduction.process_set.ranks) == 1:
            return
        for parameter in self._parameter_names:
            if parameter.requires_grad and parameter not in self._hooked:
                self._hooked.add(parameter)
                parameter.register_post_accumulate_grad_hook(self._note_gradient)

    def _note_gradient(self, parameter: Tensor) -> None:
        """The hook that runs when a parameter's gradient has been accumulated.

        The reduction of a group begins when all its parameters have had the last backward pass of the step.
        """
        left = self._left.get(parameter, self.backward_passes_per_step) - 1
        if left < 0:
            raise AssertionError(
                f"gradients of {self._parameter_names[parameter]!r} came more than {self.backward_passes_per_step} "
                "times before step(): pass a larger backward_passes_per_step"
            )
        self._left[parameter] = left
        group = self._together[parameter]
        if all(self._left.get(each) == 0 for each in group):
            self._reduce(group)

    def _reduce(self, group: Sequence[Tensor]) -> None:
        for parameter in group:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            self._under_way[parameter] = None
        names = [self._parameter_names[parameter] for parameter in group]
        self._under_way[group[0]] = self._reduction.begin(names, [each.grad for each in group if each.grad is not None])

    def synchronize(self) -> None:
        """Reduce the remaining gradients, and wait until all parameters have their reduced gradients. Blocking."""
        self._hook_parameters()
        # Also reduce parameters without a gradient in this step. Otherwise ranks that have a gradient would wait.
        for parameter in self._parameter_names:
            if parameter in self._hooked and parameter.requires_grad and parameter not in self._under_way:
                self._reduce(self._together[parameter])
        under_way, self._under_way = self._under_way, {}
        self._left.clear()
        for parameter, wait in under_way.items():
            if wait is not None:
                for each, gradient in zip(self._together[parameter], wait()):
                    if each.grad is None or each.grad.is_sparse or gradient.is_sparse:
                        each.grad = gradient
                    else:
                        each.grad.copy_(gradient)
        self._synchronized = True

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """A context in which `step` does not reduce the gradients again. Use it for a step after `synchronize`."""
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Wait for the gradients of all ranks, and run the wrapped optimizer's step. Blocking.

        Return the loss that `closure` computes, or None. The wrapped optimizer calls `closure` as often as it needs,
        and gradients are reduced after each call.
        """

        def evaluate() -> Any:
            assert closure is not None
            loss = closure()
            self.synchronize()
            return loss

        if self._should_synchronize and closure is None:
            if self._synchronized:
                warnings.warn(
                    "optimizer.step() called without optimizer.skip_synchronize() context after "
                    "optimizer.synchronize(), which reduces the gradients once more: make the step within "
                    "`with optimizer.skip_synchronize():`",
                    stacklevel=2,
                )
            self.synchronize()
        self._synchronized = False
        synchronizes = closure is not None and self._should_synchronize
        return self._wrapped_class.step(self, evaluate if synchronizes else closure)  # type: ignore[arg-type]

    def zero_grad(self, *args: Any, **keywords: Any) -> None:
        """Clear the gradients. Raise AssertionError if they are being reduced."""
        if self._under_way:
            raise AssertionError(
                "zero_grad() comes after backward() and before step() or synchronize(), while "
                "gradients are reduced: call it before backward()"
            )
        self._wrapped_class.zero_grad(self, *args, **keywords)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group. All ranks must add the same group. Its parameters are named by their position."""
        self._wrapped_class.add_param_group(self, param_group)
        at = len(self.param_groups) - 1
        for place, parameter in enumerate(self.param_groups[at]["params"]):
            self._parameter_names[parameter] = f"allreduce.noname.{at}.{place}"
            self._together[parameter] = (parameter,)
        self._hook_parameters()

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Set the number of backward passes before each step."""
        self.backward_passes_per_step = passes
        self._left.clear()


# PyTorch wraps the `step` of an optimizer's class with code that calls hooks, at the latest in load_state_dict. This
# attribute prevents the wrapping. Our step calls the wrapped class's step, which already calls the hooks, so they would
# run twice.
_Distributed.step.hooked = True  # type: ignore[attr-defined]


def _names(groups: Sequence[dict[str, Any]], named: Iterable[tuple[str, Tensor]] | None) -> dict[Tensor, str]:
    """Return the name of each parameter. Raise ValueError if a parameter has no name, or if a name occurs twice."""
    if named is None:
        return {
            p: f"allreduce.noname.{at}.{place}"
            for at, group in enumerate(groups)
            for place, p in enumerate(group["params"])
        }
    pairs = list(named)
    if any(not isinstance(pair, tuple) for pair in pairs):
        raise of_caller(ValueError("named_parameters: pass pairs of name and parameter, as model.named_parameters()"))
    twice = [name for name, count in Counter(name for name, _ in pairs).items() if count > 1]
    if twice:
        raise of_caller(ValueError(f"named_parameters names {twice[0]!r} twice: give each parameter a name of its own"))
    names = {parameter: name for name, parameter in pairs}
    missing = sum(p not in names for group in groups for p in group["params"])
    if missing:
        raise of_caller(
            ValueError(
                f"named_parameters leaves out {missing} of the optimizer's parameters: pass model.named_parameters()"
            )
        )
    return {p: names[p] for group in groups for p in group["params"]}


def _group(
    parameters: Sequence[Tensor], names: dict[Tensor, str], groups: int | Sequence[Sequence[Tensor]] | None
) -> dict[Tensor, tuple[Tensor, ...]]:
    """Return the group of each parameter: the parameters whose gradients are reduced as one operation."""
    cuts: list[tuple[Tensor, ...]] = [(parameter,) for parameter in parameters]
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if isinstance(groups, int):
        if groups <= 0:
            raise of_caller(ValueError(f"groups is {groups}: pass a number above 0, or lists of parameters"))
        each, more = divmod(len(trained), groups)
        starts = [number * each + min(number, more) for number in range(groups + 1)]
        cuts += [tuple(trained[first:last]) for first, last in pairwise(starts)]
    elif groups is not None:
        given = [parameter for group in groups for parameter in group]
        if any(not isinstance(parameter, Tensor) or parameter not in names for parameter in given):
            raise of_caller(ValueError("groups has what is no parameter of the optimizer: pass lists of them"))
        if len(set(given)) < len(given):
            raise of_caller(ValueError("groups has a parameter twice: put each into one list"))
        cuts += [tuple(parameter for parameter in group if parameter.requires_grad) for group in groups]
    return {parameter: cut for cut in cuts for parameter in cut}
