"""Start jobs: the `mpips` command with `mpips run`, batch scripts, `mpips doctor`, and an emulated cluster.

Other packages use only the names in `__all__`, and the package `launch.lab`. Each name is imported at its first use, so
that the command starts quickly.
"""

import sys

if sys.version_info < (3, 11):  # noqa: UP036
    # Check this before all other imports: older Pythons cannot parse the other modules. With SystemExit,
    # `python -m launch.x` prints the message without a traceback.
    raise (SystemExit if sys.argv[:1] == ["-m"] else ImportError)(
        f"mpips needs Python 3.11 or newer, this is {sys.version.split()[0]}: install one, and make the environment "
        "with it (`python3.11 -m venv .venv`, in a clone `make PYTHON=python3.11`)"
    )

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpips.launch.machine import check_room, this_machine
    from mpips.launch.mpirun import (
        FULL_DUPLEX,
        NAMES,
        Job,
        Launcher,
        LauncherError,
        Machine,
        build,
        build_rank_command,
        find,
    )

__all__ = [
    "FULL_DUPLEX",
    "NAMES",
    "Job",
    "Launcher",
    "LauncherError",
    "Machine",
    "build",
    "check_room",
    "find",
    "build_rank_command",
    "this_machine",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'launch' has no attribute {name!r}")
    module = "mpips.launch.machine" if name in ("check_room", "this_machine") else "mpips.launch.mpirun"
    return getattr(importlib.import_module(module), name)


# A user's program imports this package as `launch`, our own modules import it as `mpips.launch`. Both names must lead
# to the same modules.
if __name__ == "launch":
    from mpips.doors import open_door

    open_door(__name__)
