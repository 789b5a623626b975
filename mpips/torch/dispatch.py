"""Wrap the methods of the process group: raise errors as PyTorch's backends do, and let other code intercept calls.

c10d is the core of torch.distributed. It calls its own backends through PyTorch operators, and other code can intercept
an operator. For example, a subclass of Tensor with `__torch_dispatch__` (the result of a functional collective, or a
quantized weight) replaces itself by the tensors that it is made of, and a mode such as `CommDebugMode` counts the call.

But c10d calls a backend that is written in Python, such as ours, directly and without an operator. No mode then notices
the call, and the backend gets a tensor subclass that has no memory of its own. So the methods that the decorator
`listened` wraps first look for a mode or a tensor subclass that can intercept the call. If they find one, they call
c10d's operator of the same name. The mode and the subclass see the operator first, and then our method runs on plain
tensors. If nothing can intercept the call, they run our method at once.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
    _pop_mode,
    _push_mode,
)

from mpips.torch.tensors import as_backend_error
from mpips.torch.works import Work

T = TypeVar("T")


def listened(*names: str) -> Callable[[type[T]], type[T]]:
    """Class decorator that wraps the methods `names` of a process group.

    A wrapped method raises `ArgumentError` for bad arguments. Subclasses of Tensor and modes can intercept its calls,
    as they can with PyTorch's own backends (see the docstring of the module).
    """

    def change(cls: type[T]) -> type[T]:
        for name in names:
            setattr(cls, name, _listened(getattr(cls, name)))
        return cls

    return change


def _listened(method: Callable[..., Work]) -> Callable[..., Work]:
    @functools.wraps(method)
    def call(self: Any, *args: Any, **keywords: Any) -> Work:
        try:
            if _is_heard(args):
                return _run_inside(method, self, args, keywords)
            return method(self, *args, **keywords)
        except (TypeError, ValueError) as error:
            if isinstance(error, RuntimeError):
                raise
            raise as_backend_error(error) from error

    return call


def _is_subclass(kind: type) -> bool:
    return getattr(kind, "__torch_dispatch__", None) is not torch._C._disabled_torch_dispatch_impl


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the tensors among these arguments, including those in lists and tuples."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _is_heard(args: Iterable[Any]) -> bool:
    """True if a mode, or a subclass of Tensor among the arguments, can intercept this call.

    Modes that PyTorch itself uses to trace programs do not count.
    """
    listening = torch._C._len_torch_dispatch_stack() > 0 and not any(
        mode.is_infra_mode() for mode in _get_current_dispatch_mode_stack()
    )
    return any(listening or _is_subclass(type(tensor)) for tensor in _tensors(args))


@contextmanager
def _below_others(mode: TorchDispatchMode) -> Iterator[None]:
    """Enter `mode` below the modes that the program has entered, so that the program's modes see an operator first."""
    count = sum(not other.is_infra_mode() for other in _get_current_dispatch_mode_stack())
    others = [_pop_mode() for _ in range(count)][::-1]
    try:
        with mode:
            for other in others:
                _push_mode(other)
            try:
                yield
            finally:
                for _ in others:
                    _pop_mode()
    finally:
        for other in others:
            _push_mode(other)


def _run_inside(method: Callable[..., Work], group: Any, args: tuple[Any, ...], keywords: dict[str, Any]) -> Work:
    """Let tensor subclasses replace themselves by the tensors that they are made of, and run the method on these.

    If a subclass is made of several tensors, the returned work ends when the operations on all of them have ended.
    """
    # c10d's operators call the methods of the group that they get. With our own group, they would call this function
    # again, without end. So they get a plain group.
    plain = dist.ProcessGroup(group.rank(), group.size())
    inside = _Inside(lambda tensors: method(group, *tensors, *args[len(tensors) :], **keywords))
    with _below_others(inside):
        getattr(plain, method.__name__)(*args, **keywords)
    return inside.works[0] if len(inside.works) == 1 else Work.of_all(inside.works, args[0])


class _Inside(TorchDispatchMode):
    """A mode in which an operator of c10d that is called on plain tensors runs our method (`run`) instead.

    `works` collects the works that our method has returned. There are several if a tensor subclass is made of several
    tensors.
    """

    def __init__(self, run: Callable[[list[Any]], Work]) -> None:
        super().__init__()
        self._run = run
        self.works: list[Work] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # The group's methods are never compiled. With True, PyTorch would spend seconds on the import of its compiler,
        # only to skip the methods.
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(_is_subclass(kind) for kind in types):
            # The subclass's own __torch_dispatch__ comes next.
            return NotImplemented
        if func.namespace != "c10d":
            return func(*args, **(kwargs or {}))
        given = list(itertools.takewhile(lambda each: not isinstance(each, torch.ScriptObject), args))
        work = self._run(given)
        self.works.append(work)
        return work.boxed() if len(func._schema.returns) == 1 else (given[0], work.boxed())
