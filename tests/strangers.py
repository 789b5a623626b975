"""Another user of this machine, for tests of what one may not do: root alone can be one."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

STRANGER = 54321  # an id that nobody has
BECOME = f"""
import json, os, select, signal, socket, subprocess, sys, time
os.setgroups([])
os.setresgid({STRANGER}, {STRANGER}, {STRANGER})
os.setresuid({STRANGER}, {STRANGER}, {STRANGER})
"""
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


def stranger(code: str, *words: str) -> subprocess.Popen[str]:
    """Start Python `code` with these words as another user. It can import nothing more, as Python may be out of its
    reach."""
    command = [sys.executable, "-I", "-c", BECOME + code, *words]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True, cwd="/")
