"""Methods that `torch.compile` calls as they are: it would trace into them, and they call MPI."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import torch

T = TypeVar("T")


def uncompiled(*names: str) -> Callable[[type[T]], type[T]]:
    """Make a class of which these methods, or all where none is named, are not compiled.

    The compiler is not imported for it, which would take seconds.
    """

    def changed(cls: type[T]) -> type[T]:
        for name, method in list(vars(cls).items()):
            if name in names or (not names and inspect.isfunction(method) and not name.startswith("__")):
                setattr(cls, name, _as_it_is(method))
        return cls

    return changed


def _as_it_is(method: Callable[..., Any]) -> Callable[..., Any]:
    made: list[Callable[..., Any]] = []

    @functools.wraps(method)
    def call(*args: Any, **keywords: Any) -> Any:
        if not torch.compiler.is_compiling():
            return method(*args, **keywords)
        if not made:
            made.append(torch.compiler.disable(method))
        return made[0](*args, **keywords)

    return call
