"""Make `collectives` and `launch` short names of the packages `mpips.collectives` and `mpips.launch`.

Our own modules import one another only as `mpips.collectives...` and `mpips.launch...`. The short names are common
words, and a user's program may have a file `collectives` or a folder `launch` of its own. In that case the program's
imports find the program's file, and our imports still find our modules. In a clone `mpips/collectives` and
`mpips/launch` are symbolic links, and in an installed package they are folders.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType


class _Alias(Loader):
    """Loads `collectives.x` as the module `mpips.collectives.x`, so that each module exists only once."""

    def __init__(self, inner: ModuleSpec) -> None:
        self._inner = inner

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return importlib.import_module(self._inner.name)

    def exec_module(self, module: ModuleType) -> None:
        # The import system has just replaced the module's own spec with the spec of the short name. Undo that.
        module.__spec__ = self._inner

    def get_code(self, name: str) -> CodeType | None:
        """Return the code that `python -m NAME` runs."""
        code: CodeType | None = self._inner.loader.get_code(self._inner.name)  # type: ignore[union-attr]
        return code


class _Finder(MetaPathFinder):
    """Finds modules such as `collectives.x`, if the short name `collectives` refers to our package."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        outer, _, below = name.partition(".")
        if not below or sys.modules.get(outer) is not sys.modules.get(f"mpips.{outer}", self):
            return None
        inner = importlib.util.find_spec(f"mpips.{name}")
        if inner is None:
            return None
        spec = ModuleSpec(name, _Alias(inner), origin=inner.origin)
        spec.submodule_search_locations = inner.submodule_search_locations
        return spec


def open_door(outer: str) -> None:
    """Make the short name `outer` a name of the package `mpips.OUTER`.

    A package calls this while it is imported under its short name. Python prefers our package to a user's folder of
    that name without `__init__.py`, even if the folder comes earlier on `sys.path`. If such a folder has Python files,
    `outer` becomes the user's folder instead.
    """
    own = os.path.realpath(importlib.import_module(f"mpips.{outer}").__path__[0])
    for entry in sys.path:
        folder = os.path.join(entry or os.getcwd(), outer)
        if os.path.isfile(os.path.join(folder, "__init__.py")) or os.path.realpath(folder) == own:
            break
        if os.path.isdir(folder) and any(name.endswith(".py") for name in os.listdir(folder)):
            spec = ModuleSpec(outer, None, is_package=True)
            spec.submodule_search_locations = [folder]
            sys.modules[outer] = importlib.util.module_from_spec(spec)
            return
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
    sys.modules[outer] = sys.modules[f"mpips.{outer}"]
