"""Count the test files that import internal names: neither public ones nor those of a seam. `-v` lists the names."""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("mpips", "collectives", "launch")
# modules that users import
PUBLIC = (
    *PACKAGES,
    "mpips.compression",
    "mpips.optimizers",
    "mpips.overlap",
    "mpips.mlp",
    "mpips.training",
    "mpips.torch",
    "mpips.jax",
    "mpips.horovod.torch",
    "mpips.chaos",
)
# Pure objects with tests of their own: description -> modules. CONTRIBUTING names them.
SEAMS = {
    "schedules and their proof": ("collectives.schedule", "collectives.call"),
    "what a schedule costs": ("collectives.simulator", "collectives.tuner.table"),
    "the board on which ranks of a node meet": ("collectives.fabric.board", "collectives.fabric.layout"),
    "the clock of all limits": ("collectives.clock",),
    "compiled kernels beside NumPy's": ("collectives.kernels", "mpips.tables.kernels"),
    "a server without MPI": ("mpips.store.server",),
    "keys cut and spread over servers": ("mpips.store.keys",),
    "recovery planned": ("mpips.store.recovery.plan", "mpips.tables.plan"),
    "rows of a table": ("mpips.tables",),
    "frames between workers and servers": ("mpips.store.transport.frames",),
    "the file format": ("mpips.store.checkpoint.file", "mpips.tables.files"),
    "the planner of overlap": ("mpips.overlap",),
    "what the launcher says of a job's end": ("launch.running.verdict",),
    "what `mpips why` says of pages": ("launch.observe.explain", "launch.observe.gather", "collectives.recorder.page"),
    "launch lines": ("launch.mpirun", "launch.batch", "launch.hosts", "launch.machine"),
}


def internals(path: Path) -> Iterator[str]:
    """Yield the internal names of our packages that a file imports."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [(node.module or "", alias.name) for alias in node.names]
        else:
            continue
        for module, name in names:
            is_inner = module.startswith(("mpips.collectives", "mpips.launch"))
            outer = module.removeprefix("mpips.") if is_inner else module
            if outer.split(".")[0] in PACKAGES and not is_public(outer, name) and not is_seam(outer, name):
                yield f"{module}.{name}" if name else module


def is_public(module: str, name: str) -> bool:
    """True if users import this name from this module."""
    folder = ROOT.joinpath(*module.split("."), name)
    inner = bool(name) and (folder.is_dir() or folder.with_suffix(".py").is_file())
    return (f"{module}.{name}" if inner else module) in PUBLIC


def is_seam(module: str, name: str) -> bool:
    """True if the name is, or comes from, a module in `SEAMS`."""
    full = f"{module}.{name}." if name else f"{module}."
    return any(full.startswith(f"{place}.") for places in SEAMS.values() for place in places)


def main() -> None:
    """Print the table."""
    rows: dict[str, list[tuple[Path, list[str]]]] = defaultdict(list)
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        rows["/".join(path.relative_to(ROOT / "tests").parts[:3][:-1])].append((path, sorted(internals(path))))
    for folder, files in sorted(rows.items()):
        print(f"{folder:20} {sum(bool(names) for _, names in files):4} of {len(files):3} test files reach inside")
        for path, names in files if "-v" in sys.argv else ():
            print(f"    {path.name:36} {' '.join(names)}" if names else f"    {path.name:36} -")
    every = [names for files in rows.values() for _, names in files]
    print(f"{'all':20} {sum(map(bool, every)):4} of {len(every):3}, {sum(map(len, every))} names")


if __name__ == "__main__":
    main()
