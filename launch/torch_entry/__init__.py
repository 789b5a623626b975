"""Make the backend "mpips" known to PyTorch by its entry points, without importing MPI, NumPy or `mpips` before use.

PyTorch calls `announce` at the end of every `import torch`, also in processes that never use mpips. It only adds
attributes to c10d's table of backends. Code that reads one of them, as `init_process_group("mpips")` does before its
rendezvous, thereby imports `mpips.torch`.
"""

from __future__ import annotations

import importlib
import sys

NAME = "mpips"
# c10d looks up the whole string, such as "cpu:mpips,cuda:nccl", before it splits it into devices. So each combination
# needs an attribute of its own.
VALUES = (NAME, f"cpu:{NAME}", f"cpu:{NAME},cuda:nccl", f"cpu:{NAME},cuda:gloo")


class _Value:
    """An attribute set on c10d's class `Backend`. Reading it registers our backend "mpips"."""

    loading = False

    def __init__(self, value: str) -> None:
        self._value = value

    def __get__(self, instance: object, owner: type) -> str:
        # Registering the backend reads this attribute again. It must not register it again then.
        if not _Value.loading:
            _Value.loading = True
            try:
                load()
            finally:
                _Value.loading = False
        return self._value


def announce() -> None:
    """Add the backend's names to c10d's table. Imports nothing, and does nothing without torch.distributed."""
    backend = getattr(sys.modules.get("torch.distributed.distributed_c10d"), "Backend", None)
    if backend is None or NAME.upper() in vars(backend):
        return
    for value in VALUES:
        setattr(backend, value.upper(), _Value(value))
    backend.backend_list.append(NAME)


def load() -> None:
    """Import the backend and register it. Raises RuntimeError with the cause if it cannot be loaded."""
    try:
        importlib.import_module("mpips.torch.backend").register()
    except (ImportError, OSError, RuntimeError) as error:
        raise RuntimeError(
            f'init_process_group("{NAME}"): the backend cannot be loaded ({error}): see what '
            "`mpips doctor` says of this Python"
        ) from error
