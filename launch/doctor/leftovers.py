"""What jobs that were killed have left on this machine: shared memory and session folders that nobody uses any more."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

SHARED = Path("/dev/shm")
BLOCK = 512  # bytes, of st_blocks


class Kind(NamedTuple):
    """What one MPI leaves: whose it is, the folder, and what its files or folders are called."""

    mpi: str
    what: str
    folder: Path
    pattern: str


def kinds() -> tuple[Kind, ...]:
    """All that is looked for. Open MPI's session folders bear the number of their mpirun."""
    sessions = Path(tempfile.gettempdir())
    return (
        Kind("MPICH", "files", SHARED, "mpich_shm_*"),
        Kind("Open MPI", "files", SHARED, "sm_segment.*"),
        Kind("Open MPI", "session folders", sessions, "ompi.[0-9]*"),
        Kind("Open MPI", "session folders", sessions, "prte.*.[0-9]*"),
    )


def look(searched: tuple[Kind, ...]) -> list[dict[str, object]]:
    """What of each kind lies there, is this user's, and no process has open: JSON-serialisable."""
    sizes = {kind: _sizes(kind) for kind in searched}
    if any(sizes.values()):
        folders = tuple(f"{kind.folder.resolve()}/" for kind in searched)
        used = {name for name in _opened() if name.startswith(folders)}
        for found in sizes.values():
            for path in [path for path in found if _is_used(path, used)]:
                del found[path]
    return [
        {"mpi": kind.mpi, "what": kind.what, "place": str(kind.folder), "count": len(found),
         "bytes": sum(found.values()), "remove": _command(kind, list(found))}
        for kind, found in sizes.items()
        if found
    ]  # fmt: skip


def _sizes(kind: Kind) -> dict[Path, int]:
    """Bytes of memory or disk that each takes: Open MPI's files are longer than what they hold."""
    found = {}
    for path in kind.folder.resolve().glob(kind.pattern):
        with suppress(OSError):
            if path.stat().st_uid == os.getuid():
                files = path.rglob("*") if path.is_dir() else (path,)
                found[path] = sum(file.stat().st_blocks * BLOCK for file in files if file.is_file())
    return found


def _is_used(path: Path, used: set[str]) -> bool:
    return any(name == str(path) or name.startswith(f"{path}/") for name in used)


def _command(kind: Kind, found: list[Path]) -> str:
    """What removes them. A pattern would also take what running jobs have, so a few are named one by one."""
    tool = "rm -r" if found[0].is_dir() else "rm"
    names = found if len(found) <= 3 else [kind.folder / kind.pattern]
    return f"{tool} {' '.join(map(str, names))}"


def _opened() -> Iterator[str]:
    """Files that processes of this user have open or mapped."""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            for line in (process / "maps").read_text(errors="replace").splitlines():
                yield line.split(maxsplit=5)[-1]
            for link in (process / "fd").iterdir():
                with suppress(OSError):
                    yield os.readlink(link)
