"""Start jobs: `mpips run` and the other words of the command, batch scripts, the doctor, the emulated cluster.

Other packages use what stands here, and `launch.lab`. It is loaded at its first use, as every `import torch` imports
`launch.torch_entry`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from launch.machine import check_room, this_machine
    from launch.mpirun import FULL_DUPLEX, NAMES, Job, Launcher, LauncherError, Machine, build, find, program

__all__ = [
    "FULL_DUPLEX", "NAMES", "Job", "Launcher", "LauncherError", "Machine", "build", "check_room", "find", "program",
    "this_machine",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'launch' has no attribute {name!r}")
    home = "launch.machine" if name in ("check_room", "this_machine") else "launch.mpirun"
    return getattr(importlib.import_module(home), name)
