"""The words that start programs at addresses that are not random, for ranks that share a core.

A core remembers branches by their addresses. Where several ranks share one, and each is at addresses of its own, each
finds at its turn that the core has learned the others' branches.
"""

from __future__ import annotations

import platform
import shutil
import subprocess


def fixed() -> tuple[str, ...]:
    """What a command begins with, so that its processes all load their code at the same addresses; empty where the
    machine has no such command, or, as containers may, forbids it."""
    setarch = shutil.which("setarch")
    if setarch is None:
        return ()
    words = (setarch, platform.machine(), "-R")
    try:
        subprocess.run([*words, "true"], capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ()
    return words
