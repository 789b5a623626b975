"""Run code as another user of this machine, to test what other users may not do. Only root can do this."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

# a user id that nobody has
STRANGER = 54321
BECOME = f"""
import json, os, select, signal, socket, subprocess, sys, time
os.setgroups([])
os.setresgid({STRANGER}, {STRANGER}, {STRANGER})
os.setresuid({STRANGER}, {STRANGER}, {STRANGER})
"""
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


def stranger(code: str, *words: str) -> subprocess.Popen[str]:
    """Start a Python program as another user.

    The program must not import further modules, because that user may not be allowed to read the files of Python.
    """
    command = [sys.executable, "-I", "-c", BECOME + code, *words]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True, cwd="/")
