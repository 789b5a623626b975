"""Start jobs: `mpips run` and the other words of the command, batch scripts, the doctor, the emulated cluster.

Other packages use what stands here, and `launch.lab`.
"""

from launch.machine import check_room, this_machine
from launch.mpirun import FULL_DUPLEX, NAMES, Job, Launcher, LauncherError, Machine, build, find, program

__all__ = [
    "FULL_DUPLEX", "NAMES", "Job", "Launcher", "LauncherError", "Machine", "build", "check_room", "find", "program",
    "this_machine",
]  # fmt: skip
