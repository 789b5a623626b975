"""Make the backend "mpips" known to PyTorch, through an entry point, without importing `mpips` before it is used.

PyTorch calls `announce` at the end of every `import torch`, even in processes that never use mpips. So `announce` must
not import MPI or NumPy. It only adds attributes to `Backend`, the class of torch.distributed (c10d) that lists all
backends. `init_process_group("mpips")` reads such an attribute before its rendezvous, and the attribute then imports
`mpips.torch`.
"""

from __future__ import annotations

import importlib
import sys

NAME = "mpips"
# c10d looks up a whole string such as "cpu:mpips,cuda:nccl" before it splits the string into devices. So each of these
# strings needs an attribute of its own.
BACKEND_STRINGS = (NAME, f"cpu:{NAME}", f"cpu:{NAME},cuda:nccl", f"cpu:{NAME},cuda:gloo")


class _BackendAttribute:
    """An attribute of c10d's class `Backend`. Reading the attribute registers our backend."""

    # True while our backend is being registered
    loading = False

    def __init__(self, value: str) -> None:
        self._value = value

    def __get__(self, instance: object, owner: type) -> str:
        # Registering the backend reads this attribute again. That second read must not register the backend again.
        if not _BackendAttribute.loading:
            _BackendAttribute.loading = True
            try:
                load()
            finally:
                _BackendAttribute.loading = False
        return self._value


def announce() -> None:
    """Add our backend to c10d's class `Backend`. Imports nothing. Does nothing if torch.distributed is missing."""
    backend = getattr(sys.modules.get("torch.distributed.distributed_c10d"), "Backend", None)
    if backend is None or NAME.upper() in vars(backend):
        return
    for value in BACKEND_STRINGS:
        setattr(backend, value.upper(), _BackendAttribute(value))
    backend.backend_list.append(NAME)


def load() -> None:
    """Import the backend and register it. Raises RuntimeError with the cause if the backend cannot be loaded."""
    try:
        importlib.import_module("mpips.torch.backend").register()
    except (ImportError, OSError, RuntimeError) as error:
        raise RuntimeError(
            f'init_process_group("{NAME}"): the backend cannot be loaded ({error}): see what '
            "`mpips doctor` says of this Python"
        ) from error
