"""Make "mpips" known to PyTorch by name alone: what its entry points call, without MPI, NumPy or `mpips` before use.

PyTorch calls `announce` at the end of every `import torch`, in processes of any kind. It leaves names in c10d's table.
Who asks for one, as `init_process_group("mpips")` does before its rendezvous, imports `mpips.torch`.
"""

from __future__ import annotations

import importlib
import sys

NAME = "mpips"
VALUES = (NAME, f"cpu:{NAME}", f"cpu:{NAME},cuda:nccl", f"cpu:{NAME},cuda:gloo")
"""c10d looks a whole string up, before it takes it apart."""


class _Value:
    """An attribute of c10d's `Backend` that registers the backend when it is read."""

    loading = False

    def __init__(self, value: str) -> None:
        self._value = value

    def __get__(self, instance: object, owner: type) -> str:
        if not _Value.loading:  # registering reads it, too
            _Value.loading = True
            try:
                load()
            finally:
                _Value.loading = False
        return self._value


def announce() -> None:
    """Let c10d know the backend's names. Import nothing."""
    backend = getattr(sys.modules.get("torch.distributed.distributed_c10d"), "Backend", None)
    if backend is None or NAME.upper() in vars(backend):
        return
    for value in VALUES:
        setattr(backend, value.upper(), _Value(value))
    backend.backend_list.append(NAME)


def load() -> None:
    """Register the backend. Raise RuntimeError with the cause where it cannot be loaded."""
    try:
        importlib.import_module("mpips.torch.backend").register()
    except (ImportError, OSError, RuntimeError) as error:
        raise RuntimeError(
            f'init_process_group("{NAME}"): the backend cannot be loaded ({error}): see what '
            "`mpips doctor` says of this Python"
        ) from error
