"""Horovod's DistributedOptimizer: starts an allreduce of each gradient while backward still runs; `step` waits."""

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
from mpips.horovod.negotiation import Op
from mpips.horovod.operations import (
    Compression,
    Compressor,
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
    compression: type[Compressor] = Compression.none,
    backward_passes_per_step: int = 1,
    op: Op = Op.Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the optimizer, of a subclass of its own class, whose `step` reduces gradients over the ranks first.

    Arguments are Horovod's. Its state and its groups are those of `optimizer`. Gradients of `backward_passes_per_step`
    passes add up, and are not divided. A parameter without a gradient on this rank counts as zero.
    """
    if gradient_predivide_factor != 1.0 and op != Op.Average:
        raise of_caller(
            ValueError(
                f"gradient_predivide_factor is {gradient_predivide_factor} with op={op!r}: it goes "
                "with op=hvd.Average alone"
            )
        )
    if backward_passes_per_step <= 0:
        raise of_caller(ValueError(f"backward_passes_per_step is {backward_passes_per_step}: pass 1 or more"))
    if op == Op.Adasum:
        raise of_caller(NotImplementedError("op=Adasum is not supported: choose op=hvd.Average, and tune the rate"))
    if num_groups:
        warnings.warn("num_groups is Horovod's old name: pass groups", DeprecationWarning, stacklevel=2)
        groups = num_groups if groups is None else groups
    kind = type(optimizer)
    methods = {name: value for name, value in vars(_Distributed).items() if name not in ("__dict__", "__weakref__")}
    made: Any = type(kind.__name__, (kind,), {**methods, "_wrapped_class": kind})
    distributed = made.__new__(made)
    distributed.__dict__.update(optimizer.__dict__)
    distributed.__dict__.pop("step", None)  # a scheduler's, of the optimizer alone
    factors = (1.0 / gradient_predivide_factor, gradient_predivide_factor)
    distributed._begin_reducing(
        named_parameters,
        _Reduction(compression, op, factors, sparse_as_dense, process_set),
        backward_passes_per_step,
        groups,
    )
    return distributed


class _Reduction:
    """Reduces gradients as the arguments say; each call returns what waits for the reduced ones."""

    def __init__(
        self,
        compression: type[Compressor],
        op: Op,
        factors: tuple[float, float],
        sparse_as_dense: bool,
        process_set: ProcessSet,
    ) -> None:
        self._compression, self._op, self._factors = compression, op, factors
        self._sparse_as_dense, self.process_set = sparse_as_dense, process_set

    def begin(self, names: Sequence[str], gradients: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
        """Begin to reduce gradients, together where they are several."""
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
    """Methods of the class that `DistributedOptimizer` makes."""

    _wrapped_class: type[torch.optim.Optimizer]

    def _begin_reducing(
        self,
        named: Iterable[tuple[str, Tensor]] | None,
        reduction: _Reduction,
        passes: int,
        groups: int | Sequence[Sequence[Tensor]] | None,
    ) -> None:
        self._reduction, self.backward_passes_per_step = reduction, passes
        self._parameter_names = _names(self.param_groups, named)
        claim_gradients(self, "hvd.DistributedOptimizer", [(name, p) for p, name in self._parameter_names.items()])
        self._together = _group(list(self._parameter_names), self._parameter_names, groups)
        self._left: dict[Tensor, int] = {}
        self._under_way: dict[Tensor, Callable[[], list[Tensor]] | None] = {}
        self._hooked: set[Tensor] = set()
        self._synchronized, self._should_synchronize = False, True
        self._hook_parameters()

    def _hook_parameters(self) -> None:
        """Hook the parameters that require a gradient and are not hooked yet."""
        if not self._reduction.process_set.included() or len(self._reduction.process_set.ranks) == 1:
            return
        for parameter in self._parameter_names:
            if parameter.requires_grad and parameter not in self._hooked:
                self._hooked.add(parameter)
                parameter.register_post_accumulate_grad_hook(self._note_gradient)

    def _note_gradient(self, parameter: Tensor) -> None:
        """Begin to reduce a gradient, and its group, after the last of the step's backward passes."""
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
        """Reduce what is left, and wait until parameters have the gradients of all ranks. Blocking."""
        self._hook_parameters()
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
        """Let `step` within take gradients as they are, after `synchronize`."""
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Wait for the gradients of all ranks, and make the step. Return the loss of `closure`. Blocking."""

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
        """Forget the gradients. AssertionError where they are being reduced."""
        if self._under_way:
            raise AssertionError(
                "zero_grad() comes after backward() and before step() or synchronize(), while "
                "gradients are reduced: call it before backward()"
            )
        self._wrapped_class.zero_grad(self, *args, **keywords)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, on all ranks; its parameters get names by their place."""
        self._wrapped_class.add_param_group(self, param_group)
        at = len(self.param_groups) - 1
        for place, parameter in enumerate(self.param_groups[at]["params"]):
            self._parameter_names[parameter] = f"allreduce.noname.{at}.{place}"
            self._together[parameter] = (parameter,)
        self._hook_parameters()

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Set how many backward passes come before a step."""
        self.backward_passes_per_step = passes
        self._left.clear()


# PyTorch wraps a class's step by what calls its hooks, at the latest in load_state_dict, unless it bears this mark. The
# wrapped class's step, which ours ends in, calls them already: they would run twice where a state was loaded.
_Distributed.step.hooked = True  # type: ignore[attr-defined]


def _names(groups: Sequence[dict[str, Any]], named: Iterable[tuple[str, Tensor]] | None) -> dict[Tensor, str]:
    """Return the name of every parameter. ValueError where one has none, or two have the same."""
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
    """Return, for every parameter, those whose gradients travel together with its own."""
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
