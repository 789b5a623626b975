"""How many test files import what users do not: a table by folder. `python -m tests.internals [-v]` lists the names."""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("mpips", "collectives", "launch")
PUBLIC = (
    *PACKAGES, "mpips.compression", "mpips.optimizers", "mpips.overlap", "mpips.mlp", "mpips.training", "mpips.torch",
    "mpips.jax",
)  # fmt: skip
"""Where users import from."""


def internals(path: Path) -> Iterator[str]:
    """The names that a file imports of our packages from elsewhere."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [(node.module or "", alias.name) for alias in node.names]
        else:
            continue
        for module, name in names:
            if module.split(".")[0] in PACKAGES and not offered(module, name):
                yield f"{module}.{name}" if name else module


def offered(module: str, name: str) -> bool:
    """Whether users import this name from this module."""
    folder = ROOT.joinpath(*module.split("."), name)
    inner = bool(name) and (folder.is_dir() or folder.with_suffix(".py").is_file())
    return (f"{module}.{name}" if inner else module) in PUBLIC


def main() -> None:
    """Prints the table."""
    rows: dict[str, list[tuple[Path, list[str]]]] = defaultdict(list)
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        rows["/".join(path.relative_to(ROOT / "tests").parts[:3][:-1])].append((path, sorted(internals(path))))
    for folder, files in sorted(rows.items()):
        print(f"{folder:20} {sum(bool(names) for _, names in files):4} of {len(files):3} test files import internals")
        for path, names in files if "-v" in sys.argv else ():
            print(f"    {path.name:36} {' '.join(names)}" if names else f"    {path.name:36} -")
    every = [names for files in rows.values() for _, names in files]
    print(f"{'all':20} {sum(map(bool, every)):4} of {len(every):3}, {sum(map(len, every))} names")


if __name__ == "__main__":
    main()
