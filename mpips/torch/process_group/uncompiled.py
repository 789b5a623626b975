"""Methods that `torch.compile` calls as they are: it would trace into them, and they call MPI."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


def uncompiled(cls: type[T]) -> type[T]:
    """A class whose methods are not compiled. The compiler is not imported for it, which would take seconds."""
    for name, method in list(vars(cls).items()):
        if inspect.isfunction(method) and not name.startswith("__"):
            setattr(cls, name, _as_it_is(method))
    return cls


def _as_it_is(method: Callable[..., Any]) -> Callable[..., Any]:
    made: list[Callable[..., Any]] = []

    @functools.wraps(method)
    def call(*args: Any, **keywords: Any) -> Any:
        compiler = sys.modules.get("torch._dynamo")
        if compiler is None:
            return method(*args, **keywords)
        if not made:
            made.append(compiler.disable(method, wrapping=False))
        return made[0](*args, **keywords)

    return call
