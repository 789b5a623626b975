"""A click type for the Python of another environment."""

from __future__ import annotations

import shutil
import subprocess
from typing import Any

import click

# a program that prints which of its arguments are modules that it cannot import
LOOK = "import sys, importlib.util as i; print(*(name for name in sys.argv[1:] if not i.find_spec(name)))"


class Interpreter(click.ParamType):
    """A Python that has the packages. `how` tells the user how to make such an environment."""

    name = "python"

    def __init__(self, how: str, *packages: str) -> None:
        self._how = how
        self._packages = packages

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if shutil.which(value) is None:
            self.fail(f"there is no Python {value!r} here: {self._how}", param, ctx)
        command = [value, "-c", LOOK, *self._packages]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        except (OSError, subprocess.SubprocessError):
            self.fail(f"{value!r} is no Python that works: {self._how}", param, ctx)
        if lacking := done.stdout.split():
            self.fail(f"{value!r} has no {' and no '.join(lacking)}: {self._how}", param, ctx)
        return str(value)
