"""What jobs that were killed have left on this machine: shared memory and session folders that nobody uses any more.

`look` counts it, `drop` removes what is left of one job. All users can put something into these folders: what counts is
this user's own, no link, and named as an MPI names it.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import stat
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

SHARED = Path("/dev/shm")
BLOCK = 512  # bytes, of st_blocks
NAME = re.compile(r"[A-Za-z0-9._@+-]+")  # of what an MPI makes: no word of it means something to a shell or a terminal


class Kind(NamedTuple):
    """What one MPI leaves: whose it is, the folder, and what its files or folders are called."""

    mpi: str
    what: str
    folder: Path
    pattern: str


def kinds() -> tuple[Kind, ...]:
    """All that is looked for. Open MPI's session folders bear the number of their mpirun."""
    sessions = _sessions()
    return (
        Kind("MPICH", "files", SHARED, "mpich_shm_*"),
        Kind("Open MPI", "files", SHARED, "sm_segment.*"),
        Kind("Open MPI", "session folders", sessions, "ompi.[0-9]*"),
        Kind("Open MPI", "session folders", sessions, "prte.*.[0-9]*"),
    )


def look(searched: tuple[Kind, ...]) -> list[dict[str, object]]:
    """What of each kind lies there, is this user's, and no process has open: JSON-serialisable."""
    sizes = _unused(searched)
    return [
        {"mpi": kind.mpi, "what": kind.what, "place": str(kind.folder), "count": len(found),
         "bytes": sum(found.values()), "remove": _command(kind, list(found))}
        for kind, found in sizes.items()
        if found
    ]  # fmt: skip


def drop(mpirun: int, began: float) -> None:
    """Remove what is left of a job that has ended: its mpirun had this number, and all of it was made since `began`.

    MPIs do not say whose a file is. So those of this user go that are as new and that no process has open.
    """
    drop_session(mpirun)
    files = [kind for kind in kinds() if kind.folder == SHARED]
    for path in (path for found in _unused(files).values() for path in found):
        with suppress(OSError):
            if path.lstat().st_ctime >= began:
                path.unlink()


def drop_session(mpirun: int) -> None:
    """Remove what Open MPI's mpirun with this number has left: where it is there, another one does not start."""
    folder = _sessions() / f"ompi.{mpirun}"
    if _is_own(folder):
        shutil.rmtree(folder, ignore_errors=True)


def _sessions() -> Path:
    """The folder in which Open MPI makes its session folders, whether or not it can be written to."""
    return Path(os.environ.get("TMPDIR") or "/tmp")


def _unused(searched: Iterable[Kind]) -> dict[Kind, dict[Path, int]]:
    """What of each kind lies there that no process has open, and its bytes."""
    sizes = {kind: _sizes(kind) for kind in searched}
    if any(sizes.values()):
        folders = tuple(f"{kind.folder.resolve()}/" for kind in sizes)
        used = {name for name in _opened() if name.startswith(folders)}
        for found in sizes.values():
            for path in [path for path in found if _is_used(path, used)]:
                del found[path]
    return sizes


def _sizes(kind: Kind) -> dict[Path, int]:
    """Bytes of memory or disk that each takes: Open MPI's files are longer than what they hold."""
    found = {}
    for path in kind.folder.resolve().glob(kind.pattern):
        with suppress(OSError):
            if NAME.fullmatch(path.name) and _is_own(path):
                held = [file.lstat() for file in (path.rglob("*") if path.is_dir() else (path,))]
                found[path] = sum(status.st_blocks * BLOCK for status in held if stat.S_ISREG(status.st_mode))
    return found


def _is_own(path: Path) -> bool:
    """Whether it is a file or a folder of this user's, and no link."""
    try:
        status = path.lstat()
    except OSError:
        return False
    return status.st_uid == os.geteuid() and (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode))


def _is_used(path: Path, used: set[str]) -> bool:
    return any(name == str(path) or name.startswith(f"{path}/") for name in used)


def _command(kind: Kind, found: list[Path]) -> str:
    """What removes them. A pattern would also take what running jobs have, so a few are named one by one."""
    if len(found) <= 3:
        return shlex.join(["rm", *["-r"][: found[0].is_dir()], *map(str, found)])
    own = ["find", str(kind.folder), "-maxdepth", "1", "-user", str(os.geteuid()), "-name", kind.pattern]
    return shlex.join([*own, "-exec", "rm", "-r", "{}", "+"])


def _opened() -> Iterator[str]:
    """Files that processes of this user have open or mapped. Who makes one opens it, maps it, and then closes it."""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            for link in (process / "fd").iterdir():
                with suppress(OSError):
                    yield os.readlink(link)
            for line in (process / "maps").read_text(errors="replace").splitlines():
                yield line.split(maxsplit=5)[-1]
