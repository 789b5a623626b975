"""Compile kernels in the background, from a cache on disk; `Kernel.call` is None until one is there, and NumPy serves.

A kernel is the text of a Python function, `kernel`, of 1-D contiguous arrays and numbers, with the types of these:
"float32[]", "const float32[]" (only read), "int64". Who uses one gives the same bits without it, so nobody waits: one
thread of the process compiles what is asked for, in turn, once NumPy has done enough in its place. Ranks that share the
cache's folder compile each kernel once: who has its lock does, the others read what that one has saved.

`MPIPS_KERNELS=numba` compiles at once, `numpy` never. No fast-math is used, so LLVM contracts and reorders nothing.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import fcntl
import importlib.util
import os
import queue
import re
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from mpips.collectives import log
from mpips.collectives.clock import Clock

LOG = log.get("mpips.kernels")
VARIABLE = "MPIPS_KERNELS"
FOLDER_VARIABLE = "MPIPS_KERNELS_FOLDER"
ENGINES = ("numba", "numpy")
NOT_INSTALLED = "Numba is not installed: pip install 'mpips[fast]'"
COLOURS = re.compile(r"\x1b\[[0-9;]*m")
"""In Numba's messages."""
LONGEST_EXIT_SECONDS = 30.0
"""How long the end of a process waits for the kernel that it is compiling: LLVM may not be left in the middle."""
LONGEST_FORK_SECONDS = 10.0
"""How long a fork waits for the kernel that is being compiled: a child may use Numba, whose locks would be held."""
LONGEST_LOCK_SECONDS = 60.0
"""After so long a wait for another process, which may have been stopped, this one compiles the kernel, too."""
LOOK_SECONDS = 0.05
MOST_LETTERS = 300
ENOUGH = 100_000_000
"""Elements after which kernels are compiled: a kernel saves about 5 ns of each, and it takes 0.5 s to load Numba."""
CALL = 4096
"""Elements that a call counts at least: NumPy's calls take some 20 us more than one of a kernel."""
SWITCH_SECONDS = 0.0001
"""How long other threads, which serve, wait for the interpreter while Numba is loaded and compiles."""


class Kernel:
    """A function to compile."""

    def __init__(self, name: str, source: str, types: tuple[str, ...]) -> None:
        self.name, self.source, self.types = name, source, types
        self.compiled: Callable[..., Any] | None = None
        self.failure = ""
        """Why it never will be there."""

    @property
    def call(self) -> Callable[..., Any] | None:
        """Return what runs it, `call(*arrays)`; None until it is compiled, and for ever where it cannot be."""
        return None if _engine.numpy_only else self.compiled

    def call_for(self, elements: int) -> Callable[..., Any] | None:
        """Return `call`; where it is None NumPy does these elements, which counts for beginning to compile."""
        if self.compiled is None and not self.failure:
            _engine.count(elements)
        return self.call


class Status(NamedTuple):
    """The engine that serves, the reason, the folder of kernels ("" where they are not kept), and why there is none."""

    engine: str
    reason: str
    folder: str
    unkept: str


def chosen(environment: Mapping[str, str] = os.environ) -> str:
    """Return the engine that the environment asks for: numba or numpy; ValueError for another word."""
    word = environment.get(VARIABLE, "").strip().lower()
    if word not in ("", *ENGINES):
        raise ValueError(f"{VARIABLE}={word!r} names no engine: give {' or '.join(ENGINES)}, or leave it unset")
    return word or "numba"


def status() -> Status:
    """Return which engine serves, and why; ValueError where the environment names none. Imports Numba."""
    if why := _not_wanted() or _unusable():
        return Status("numpy", why, "", "")
    folder, unkept = cache_folder()
    return Status("numba", f"Numba {sys.modules['numba'].__version__}", str(folder or ""), unkept)


def _not_wanted() -> str:
    """Return why nothing needs to be imported, as NumPy serves in any case; else ""."""
    if chosen() == "numpy":
        return f"{VARIABLE}=numpy"
    if "numba" not in sys.modules and importlib.util.find_spec("numba") is None:
        return NOT_INSTALLED
    return ""


def _unusable() -> str:
    """Import Numba; return why it cannot compile in this process, else ""."""
    try:
        import numba

        from mpips.collectives.kernels import compiler  # noqa: F401
    except Exception as error:  # of another package, which may be broken
        return f"Numba cannot be loaded: {_in_a_line(error)}"
    return "NUMBA_DISABLE_JIT is set" if numba.config.DISABLE_JIT else ""


def _in_a_line(error: Exception) -> str:
    """Return what an error says, of which Numba's take many lines."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= MOST_LETTERS else f"{text[:MOST_LETTERS]} ..."


def cache_folder() -> tuple[Path | None, str]:
    """Return the folder of compiled kernels: $MPIPS_KERNELS_FOLDER, else kernels in mpips' part of the user's cache.

    It is made where it is not there. None, and why, where it cannot be, or where others than its owner, who is this
    user or root, can write to it: what lies there is run.
    """
    given = os.environ.get(FOLDER_VARIABLE)
    home = os.path.expanduser("~")
    caches = os.environ.get("XDG_CACHE_HOME") or (os.path.join(home, ".cache") if os.path.isabs(home) else "")
    if not given and not caches:
        return None, f"there is no home: set a folder by {FOLDER_VARIABLE}"
    folder = (Path(given).expanduser() if given else Path(caches, "mpips", "kernels")).absolute()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
    except OSError as error:
        return None, f"{folder}: {error.strerror}"
    if found.st_uid not in (os.getuid(), 0) or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return None, f"others can write to {folder}: chmod go-w it, or set another folder by {FOLDER_VARIABLE}"
    return folder, ""


class _Engine:
    """The kernels of this process, and the thread that compiles them."""

    def __init__(self) -> None:
        self.numpy_only = False
        self._kernels: dict[tuple[str, tuple[str, ...]], Kernel] = {}
        self._stopped = threading.Event()
        self._begin()

    def _begin(self) -> None:
        self._wanted: queue.SimpleQueue[Kernel | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._settled = threading.Condition(self._lock)
        self._compiling = threading.RLock()
        self._thread: threading.Thread | None = None
        self._left = 0  # kernels that are asked for and not there yet
        self._elements = 0  # that NumPy has done in place of kernels

    def kernel(self, name: str, source: str, types: Sequence[str]) -> Kernel:
        """Return the kernel of that text and types, asking for it where it is new. Not blocking; raises nothing."""
        found = self._kernels.get((source, tuple(types)))
        return found if found is not None else self._ask(Kernel(name, source, tuple(types)))

    def _ask(self, kernel: Kernel) -> Kernel:
        with self._lock:
            found = self._kernels.setdefault((kernel.source, kernel.types), kernel)
            if found is not kernel:
                return found
            try:
                kernel.failure = "no kernel is compiled any more" if self._stopped.is_set() else _not_wanted()
            except ValueError as error:  # a word that names no engine
                self._give_up(error)
            if kernel.failure:
                return kernel
            self._left += 1
        self._wanted.put(kernel)
        if os.environ.get(VARIABLE):
            self.begin()
        return kernel

    def _give_up(self, error: Exception) -> None:
        self._stopped.set()
        self._left = 0
        for kernel in self._kernels.values():
            kernel.failure = str(error)
        LOG.warning("NumPy serves instead of compiled kernels: %s", error)

    def count(self, elements: int) -> None:
        """Count elements that NumPy does in place of a kernel; begin to compile once they are enough."""
        if self._thread is None:
            self._elements += max(elements, CALL)
            if self._elements >= ENOUGH:
                self.begin()

    def begin(self) -> None:
        """Compile what was asked for, and from now on what is. Not blocking."""
        with self._lock:
            if self._thread is not None or self._stopped.is_set():
                return
            thread = threading.Thread(target=self._run, name="mpips kernels", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # no more threads
                self._give_up(error)
                return
            atexit.register(self.stop)
            self._thread = thread

    def in_use(self) -> bool:
        """Return whether this process has begun to compile kernels, so that one more costs little."""
        return self._thread is not None

    def settle(self, seconds: float) -> bool:
        """Compile all kernels that were asked for; wait until they are there, or have failed.

        Return False where that takes longer.
        """
        if self._left:
            self.begin()
        with self._settled:
            return self._settled.wait_for(lambda: self._left == 0, seconds)

    def stop(self) -> None:
        """Compile no more; wait for the one that is being compiled."""
        self._stopped.set()
        self._wanted.put(None)
        if self._thread is not None:
            self._thread.join(LONGEST_EXIT_SECONDS)

    def before_fork(self) -> None:
        """Wait until no module of Numba is half imported, and none of its locks and LLVM's is held."""
        self._held = self._compiling.acquire(timeout=LONGEST_FORK_SECONDS)

    def after_fork_in_parent(self) -> None:
        """Let the thread go on."""
        if self._held:
            self._compiling.release()

    def after_fork_in_child(self) -> None:
        """Go on without the thread: what is compiled stays, no more follows."""
        left = self._left
        self._begin()
        self._stopped = threading.Event()
        self._stopped.set()
        for kernel in self._kernels.values():
            if kernel.compiled is None:
                kernel.failure = kernel.failure or "the process was forked before it was compiled"
        if left:
            LOG.info("forked while %d kernels were being compiled: NumPy serves here", left)

    def _run(self) -> None:
        with self._compiling, _giving_way(self._stopped):
            unusable = _unusable()
        folder, unkept = cache_folder()
        if (unusable or unkept) and not self._stopped.is_set():
            LOG.warning(
                "%s",
                f"NumPy serves instead of compiled kernels: {unusable}"
                if unusable
                else f"compiled kernels are not kept: {unkept}",
            )
        while (kernel := self._wanted.get()) is not None:
            begun = time.perf_counter()
            kernel.failure = unusable or ("the process ends" if self._stopped.is_set() else "")
            try:
                if not kernel.failure:
                    kernel.compiled = self._compiled(kernel, folder)
                    LOG.info("kernel %s is there after %.2f s", kernel.name, time.perf_counter() - begun)
            except Exception as error:  # of LLVM, or of Numba for a text that it cannot compile
                kernel.failure = COLOURS.sub("", f"{type(error).__name__}: {error}")
                LOG.info("kernel %s is left to NumPy: %s", kernel.name, kernel.failure)
            with self._settled:
                self._left -= 1
                self._settled.notify_all()

    def _compiled(self, kernel: Kernel, folder: Path | None) -> Callable[..., Any]:
        """Return a kernel's compiled function, from the cache or by compiling it now."""
        from mpips.collectives.kernels import compiler

        source = compiler.Source(kernel.name, kernel.source, kernel.types)
        with self._compiling, _giving_way(self._stopped):
            path = None if folder is None else compiler.place(source, folder)
            if path is None or path.exists():
                return compiler.compiled(source, path)
        with _locked(path.with_suffix(".lock"), self._stopped), self._compiling, _giving_way(self._stopped):
            return compiler.compiled(source, path)


class _EndOfImports:
    """Ends what its thread imports once the process ends: Numba has hundreds of modules. First in `sys.meta_path`."""

    def __init__(self, stopped: threading.Event) -> None:
        self._stopped, self._thread = stopped, threading.get_ident()

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        """Find nothing."""
        if self._stopped.is_set() and threading.get_ident() == self._thread:
            raise ImportError("the process ends")


@contextlib.contextmanager
def _giving_way(stopped: threading.Event) -> Iterator[None]:
    """Let other threads have the interpreter more often, of which Numba takes half a second; end imports at the end."""
    before, end = sys.getswitchinterval(), _EndOfImports(stopped)
    sys.setswitchinterval(min(before, SWITCH_SECONDS))
    ours = sys.getswitchinterval()
    sys.meta_path.insert(0, end)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # somebody else has set a list of his own
            sys.meta_path.remove(end)
        if sys.getswitchinterval() == ours:  # else the user has chosen one
            sys.setswitchinterval(before)


@contextlib.contextmanager
def _locked(path: Path, stopped: threading.Event) -> Iterator[None]:
    """Hold a lock that neither a killed process keeps nor a forked one.

    No lock where the file system has none, the folder is read-only, or another process keeps it for too long.
    RuntimeError where this process ends before.
    """
    fd = -1
    clock = Clock()
    try:
        with contextlib.suppress(OSError):
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            while not _lock(fd) and clock.seconds() < LONGEST_LOCK_SECONDS:
                if stopped.wait(LOOK_SECONDS):
                    raise RuntimeError("the process ends")
        yield
    finally:
        if fd >= 0:
            os.close(fd)


def _lock(fd: int) -> bool:
    """Lock a file if no other process has it; False where one has."""
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise
    return True


@contextlib.contextmanager
def numpy_only() -> Iterator[None]:
    """Let NumPy serve in a block, in all threads of this process: for tests and benchmarks, which compare both."""
    before, _engine.numpy_only = _engine.numpy_only, True
    try:
        yield
    finally:
        _engine.numpy_only = before


_engine = _Engine()
os.register_at_fork(
    before=_engine.before_fork, after_in_parent=_engine.after_fork_in_parent, after_in_child=_engine.after_fork_in_child
)
kernel = _engine.kernel
settle = _engine.settle
in_use = _engine.in_use
