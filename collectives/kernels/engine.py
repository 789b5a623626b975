"""Compile kernels in the background, from a cache on disk; `Kernel.call` is None until one is there, and NumPy serves.

A kernel is the text of a Python function, `kernel`, of 1-D contiguous arrays and numbers, with the types of these:
"float32[]", "const float32[]" (only read), "int64". Who uses one gives
the same bits without it, so nobody waits: one thread of the process compiles what is asked for, in turn. Ranks that
share the cache's folder compile each kernel once: who has its lock does, the others read what that one has saved.

`MPIPS_KERNELS=numpy` asks for no kernel. No fast-math is used, so LLVM contracts and reorders nothing.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import hashlib
import importlib.util
import logging
import os
import queue
import stat
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from collectives.errors import CollectiveError

LOG = logging.getLogger("mpips.kernels")
VARIABLE = "MPIPS_KERNELS"
FOLDER_VARIABLE = "MPIPS_KERNELS_FOLDER"
ENGINES = ("numba", "numpy")
LONGEST_EXIT_SECONDS = 30.0
"""How long the end of a process waits for the kernel that it is compiling: LLVM may not be left in the middle."""


class Kernel:
    """A function to compile. `call(*arrays)` runs it; None until it is compiled, and for ever where it cannot be."""

    def __init__(self, name: str, source: str, types: tuple[str, ...]) -> None:
        self.name, self.source, self.types = name, source, types
        self.call: Callable[..., Any] | None = None
        self.failure = ""
        """Why it never will be there."""

    @property
    def stamp(self) -> str:
        """Return what names its text and types in the cache."""
        return hashlib.sha256(f"{self.source}\n{self.types}".encode()).hexdigest()[:20]


class Status(NamedTuple):
    """The engine that serves, the reason, and the folder of kernels ("" without one)."""

    engine: str
    reason: str
    folder: str


def chosen() -> str:
    """Return the engine that the environment asks for: numba or numpy; CollectiveError for another word."""
    word = os.environ.get(VARIABLE, "").strip().lower()
    if word not in ("", *ENGINES):
        raise CollectiveError(f"{VARIABLE}={word!r} names no engine: give {' or '.join(ENGINES)}, or leave it unset")
    return word or "numba"


def status() -> Status:
    """Return which engine serves, and why; CollectiveError where the environment names none."""
    if chosen() == "numpy":
        return Status("numpy", f"{VARIABLE}=numpy", "")
    if importlib.util.find_spec("numba") is None:
        return Status("numpy", "Numba is not installed: pip install 'mpips[fast]'", "")
    try:
        import numba
    except Exception as error:
        return Status("numpy", f"Numba cannot be loaded: {type(error).__name__}: {error}", "")
    if numba.config.DISABLE_JIT:
        return Status("numpy", "NUMBA_DISABLE_JIT is set", "")
    folder = cache_folder()
    return Status("numba", f"Numba {numba.__version__}", "" if folder is None else str(folder))


def cache_folder() -> Path | None:
    """Return the folder of compiled kernels: $MPIPS_KERNELS_FOLDER, else kernels in mpips' part of the user's cache.

    It is made where it is not there. None where it cannot be, or where others than its owner, who is this user or
    root, can write to it: what lies there is run.
    """
    given = os.environ.get(FOLDER_VARIABLE)
    home = os.path.expanduser("~")
    caches = os.environ.get("XDG_CACHE_HOME") or (os.path.join(home, ".cache") if os.path.isabs(home) else "")
    if not given and not caches:
        return None
    folder = Path(given) if given else Path(caches, "mpips", "kernels")
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
    except OSError as error:
        LOG.info("compiled kernels are not kept: %s: %s", folder, error.strerror)
        return None
    if found.st_uid not in (os.getuid(), 0) or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        LOG.warning("compiled kernels are not kept: others can write to %s; chmod go-w it, or set another "
                    "folder by %s", folder, FOLDER_VARIABLE)  # fmt: skip
        return None
    return folder


class _Engine:
    """The kernels of this process, and the thread that compiles them."""

    def __init__(self) -> None:
        self._kernels: dict[tuple[str, tuple[str, ...]], Kernel] = {}
        self._wanted: queue.SimpleQueue[Kernel | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._stopped = False
        self._left = 0  # kernels that are asked for and not there yet
        self._settled = threading.Condition(self._lock)

    def kernel(self, name: str, source: str, types: Sequence[str]) -> Kernel:
        found = self._kernels.get((source, tuple(types)))
        return found if found is not None else self._ask(Kernel(name, source, tuple(types)))

    def _ask(self, kernel: Kernel) -> Kernel:
        with self._lock:
            found = self._kernels.setdefault((kernel.source, kernel.types), kernel)
            if found is not kernel:
                return found
            if self._stopped or chosen() == "numpy" or importlib.util.find_spec("numba") is None:
                kernel.failure = "NumPy is the engine"
                return kernel
            self._left += 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="mpips kernels", daemon=True)
                self._thread.start()
                atexit.register(self.stop)
        self._wanted.put(kernel)
        return kernel

    def settle(self, seconds: float) -> bool:
        """Wait until all kernels that were asked for are there, or have failed; False where that takes longer."""
        with self._settled:
            return self._settled.wait_for(lambda: self._left == 0, seconds)

    def stop(self) -> None:
        """Compile no more; wait for the one that is being compiled."""
        self._stopped = True
        self._wanted.put(None)
        if self._thread is not None:
            self._thread.join(LONGEST_EXIT_SECONDS)

    def forget_thread(self) -> None:
        """In a forked process, where LLVM's locks may be held for ever: what is compiled stays, no more follows."""
        left = self._left
        kernels, self._stopped, self._thread = self._kernels, True, None
        self._lock, self._left, self._wanted = threading.Lock(), 0, queue.SimpleQueue()
        self._settled = threading.Condition(self._lock)
        for kernel in kernels.values():
            kernel.failure = kernel.failure or ("" if kernel.call else "the process was forked before it was compiled")
        if left:
            LOG.info("forked while %d kernels were being compiled: NumPy serves here", left)

    def _run(self) -> None:
        while (kernel := self._wanted.get()) is not None:
            begun = time.perf_counter()
            try:
                if self._stopped:
                    raise RuntimeError("the process ends")
                kernel.call = _compiled(kernel)
                LOG.info("kernel %s is there after %.2f s", kernel.name, time.perf_counter() - begun)
            except Exception as error:
                kernel.failure = f"{type(error).__name__}: {error}"
                LOG.info("kernel %s is left to NumPy: %s", kernel.name, kernel.failure)
            with self._settled:
                self._left -= 1
                self._settled.notify_all()


def _compiled(kernel: Kernel) -> Callable[..., Any]:
    """Return a kernel's compiled function, from the cache or by compiling it now."""
    from collectives.kernels import compiler

    source = compiler.Source(kernel.name, kernel.source, kernel.types, kernel.stamp)
    folder = cache_folder()
    if folder is None:
        return compiler.compiled(source, None)
    with _locked(folder / f"{kernel.stamp}.lock"):
        return compiler.compiled(source, folder)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock that a killed process loses; nothing where the file system has none or the folder is read-only."""
    fd = -1
    with contextlib.suppress(OSError):
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        fcntl.flock(fd, fcntl.LOCK_EX)
    try:
        yield
    finally:
        if fd >= 0:
            os.close(fd)


_engine = _Engine()
os.register_at_fork(after_in_child=_engine.forget_thread)
kernel = _engine.kernel
"""Return the kernel of that text and types, asking for it where it is new. Not blocking."""
settle = _engine.settle
"""Wait, at most so many seconds, until what was asked for is there or has failed; False where time has run out."""
