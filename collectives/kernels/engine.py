"""Compiles kernels in the background, with a cache on disk. Until a kernel is compiled, NumPy does its work.

A kernel is the source of a Python function named `kernel`, whose arguments are 1-D contiguous arrays and numbers, with
their types: "float32[]", "const float32[]" (only read), "int64". Callers can compute the same bits by NumPy, so nobody
waits for a kernel. One thread of the process compiles the kernels that were requested, one after the other. It starts
when NumPy has done enough work in place of kernels. Ranks that share the folder of the cache compile each kernel once:
one rank gets the kernel's lock and compiles, and the others read the file that it has saved.

`MPIPS_KERNELS=numba` compiles at once, `MPIPS_KERNELS=numpy` never. Fast-math is off, so LLVM does not contract or
reorder operations.
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
# colour codes in Numba's messages
COLOURS = re.compile(r"\x1b\[[0-9;]*m")
# At its end, a process waits this long for the kernel that it is compiling, because LLVM must not be interrupted.
LONGEST_EXIT_SECONDS = 30.0
# A fork waits this long for the kernel that is being compiled. Otherwise Numba's locks would be held in the child,
# which may use Numba, too.
LONGEST_FORK_SECONDS = 10.0
# After this long a wait for another process, which may have been stopped, this one compiles the kernel as well.
LONGEST_LOCK_SECONDS = 60.0
LOOK_SECONDS = 0.05
MOST_LETTERS = 300
# Kernels are compiled after NumPy has processed this many elements in their place. A kernel saves about 5 ns for each
# element, and loading Numba takes 0.5 s.
ENOUGH_ELEMENTS = 100_000_000
# A call counts as at least this many elements, because a NumPy call takes some 20 us longer than a kernel's.
CALL_ELEMENTS = 4096
# While Numba is loaded or compiles, other threads, which answer requests, wait at most this long for the GIL.
SWITCH_SECONDS = 0.0001


class Kernel:
    """A function that is compiled, or will be, or cannot be. `failure` says why it cannot be."""

    def __init__(self, name: str, source: str, types: tuple[str, ...]) -> None:
        self.name = name
        self.source = source
        self.types = types
        self.compiled: Callable[..., Any] | None = None
        # the reason why the kernel never will be compiled
        self.failure = ""

    @property
    def call(self) -> Callable[..., Any] | None:
        """The function to call with the arrays. None until it is compiled, and always None if it cannot be."""
        return None if _engine.numpy_only else self.compiled

    def call_for(self, elements: int) -> Callable[..., Any] | None:
        """Return `call`. If it is None, the caller uses NumPy, and `elements` count towards the start of compiling."""
        if self.compiled is None and not self.failure:
            _engine.count(elements)
        return self.call


class Status(NamedTuple):
    """The engine in use.

    Attributes:
        engine: "numba" or "numpy".
        reason: Why this engine is in use.
        folder: The folder of compiled kernels, or "" if they are not kept.
        unkept: Why they are not kept.
    """

    engine: str
    reason: str
    folder: str
    unkept: str


def chosen_engine(environment: Mapping[str, str] = os.environ) -> str:
    """Return the engine that `MPIPS_KERNELS` asks for, "numba" or "numpy". Raises ValueError for another word."""
    word = environment.get(VARIABLE, "").strip().lower()
    if word not in ("", *ENGINES):
        raise ValueError(f"{VARIABLE}={word!r} is unknown: give {' or '.join(ENGINES)}, or leave it unset")
    return word or "numba"


def status() -> Status:
    """Return the engine in use, with the reason. Imports Numba, unless NumPy was chosen.

    Raises:
        ValueError: `MPIPS_KERNELS` names no engine.
    """
    if why := _not_wanted() or _unusable():
        return Status("numpy", why, "", "")
    folder, unkept = cache_folder()
    return Status("numba", f"Numba {sys.modules['numba'].__version__}", str(folder or ""), unkept)


def _not_wanted() -> str:
    """Return the reason to use NumPy that is known without an import of Numba, or ""."""
    if chosen_engine() == "numpy":
        return f"{VARIABLE}=numpy"
    if "numba" not in sys.modules and importlib.util.find_spec("numba") is None:
        return NOT_INSTALLED
    return ""


def _unusable() -> str:
    """Import Numba. Return the reason why it cannot compile in this process, or ""."""
    try:
        import numba

        from mpips.collectives.kernels import compiler  # noqa: F401
    except Exception as error:
        # any exception, because an installation of Numba may be broken in any way
        return f"Numba cannot be loaded: {_in_a_line(error)}"
    return "NUMBA_DISABLE_JIT is set" if numba.config.DISABLE_JIT else ""


def _in_a_line(error: Exception) -> str:
    """Return an error as one line of at most `MOST_LETTERS` letters. Errors of Numba have many lines."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= MOST_LETTERS else f"{text[:MOST_LETTERS]} ..."


def cache_folder() -> tuple[Path | None, str]:
    """Return the folder of compiled kernels and "", or None and the reason why there is none.

    The folder is `MPIPS_KERNELS_FOLDER`, or mpips/kernels in the user's cache folder. It is made if it does not exist.
    Its files are executed, so it must belong to this user or root, and nobody else may have permission to write to it.
    """
    given = os.environ.get(FOLDER_VARIABLE)
    home = os.path.expanduser("~")
    caches = os.environ.get("XDG_CACHE_HOME") or (os.path.join(home, ".cache") if os.path.isabs(home) else "")
    if not given and not caches:
        return None, f"this user has no home folder: name a folder in {FOLDER_VARIABLE}"
    folder = (Path(given).expanduser() if given else Path(caches, "mpips", "kernels")).absolute()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except OSError as error:
        return None, f"{folder}: {error.strerror}"
    if status.st_uid not in (os.getuid(), 0) or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return None, f"others can write to {folder}: chmod go-w it, or name another folder in {FOLDER_VARIABLE}"
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
        # kernels that were requested and are neither compiled nor failed
        self._left = 0
        # elements that NumPy has processed in place of kernels
        self._elements = 0

    def kernel(self, name: str, source: str, types: Sequence[str]) -> Kernel:
        """Return the kernel of a source and types, and request its compilation if it is new.

        Does not block, and raises no errors: a kernel that cannot be compiled has a `failure`.
        """
        known = self._kernels.get((source, tuple(types)))
        return known if known is not None else self._ask(Kernel(name, source, tuple(types)))

    def _ask(self, kernel: Kernel) -> Kernel:
        with self._lock:
            known = self._kernels.setdefault((kernel.source, kernel.types), kernel)
            if known is not kernel:
                return known
            try:
                kernel.failure = "no kernel is compiled any more" if self._stopped.is_set() else _not_wanted()
            except ValueError as error:
                # MPIPS_KERNELS names no engine
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
        LOG.warning("using NumPy instead of compiled kernels: %s", error)

    def count(self, elements: int) -> None:
        """Count elements that NumPy processes in place of a kernel. Begin to compile when there are enough."""
        if self._thread is None:
            self._elements += max(elements, CALL_ELEMENTS)
            if self._elements >= ENOUGH_ELEMENTS:
                self.begin()

    def begin(self) -> None:
        """Start the thread that compiles the kernels requested so far and later. Does not block."""
        with self._lock:
            if self._thread is not None or self._stopped.is_set():
                return
            thread = threading.Thread(target=self._run, name="mpips kernels", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                # the system allows no more threads
                self._give_up(error)
                return
            atexit.register(self.stop)
            self._thread = thread

    def in_use(self) -> bool:
        """True if this process has begun to compile kernels. Then another kernel costs little."""
        return self._thread is not None

    def settle(self, seconds: float) -> bool:
        """Compile all requested kernels, and wait until they are compiled or have failed.

        Return False if that takes longer than `seconds`.
        """
        if self._left:
            self.begin()
        with self._settled:
            return self._settled.wait_for(lambda: self._left == 0, seconds)

    def stop(self) -> None:
        """Compile no further kernels, and wait until the present one is compiled."""
        self._stopped.set()
        self._wanted.put(None)
        if self._thread is not None:
            self._thread.join(LONGEST_EXIT_SECONDS)

    def before_fork(self) -> None:
        """Wait until the thread is not compiling, but at most `LONGEST_FORK_SECONDS`.

        Otherwise the child could get half imported modules of Numba, and locks of Numba or LLVM that nobody releases.
        """
        self._held = self._compiling.acquire(timeout=LONGEST_FORK_SECONDS)

    def after_fork_in_parent(self) -> None:
        if self._held:
            self._compiling.release()

    def after_fork_in_child(self) -> None:
        """Continue without the thread, which a fork does not copy. The child keeps only kernels that are compiled."""
        left = self._left
        self._begin()
        self._stopped = threading.Event()
        self._stopped.set()
        for kernel in self._kernels.values():
            if kernel.compiled is None:
                kernel.failure = kernel.failure or "the process was forked before it was compiled"
        if left:
            LOG.info("forked while %d kernels were being compiled: this process uses NumPy", left)

    def _run(self) -> None:
        with self._compiling, _yielding_gil(self._stopped):
            unusable = _unusable()
        folder, unkept = cache_folder()
        if (unusable or unkept) and not self._stopped.is_set():
            LOG.warning(
                "%s",
                f"using NumPy instead of compiled kernels: {unusable}"
                if unusable
                else f"compiled kernels are not kept: {unkept}",
            )
        while (kernel := self._wanted.get()) is not None:
            begun = time.perf_counter()
            kernel.failure = unusable or ("the process ends" if self._stopped.is_set() else "")
            try:
                if not kernel.failure:
                    kernel.compiled = self._compiled(kernel, folder)
                    LOG.info("kernel %s is ready after %.2f s", kernel.name, time.perf_counter() - begun)
            except Exception as error:
                # from LLVM, or from Numba for a source that it cannot compile
                kernel.failure = COLOURS.sub("", f"{type(error).__name__}: {error}")
                LOG.info("kernel %s is left to NumPy: %s", kernel.name, kernel.failure)
            with self._settled:
                self._left -= 1
                self._settled.notify_all()

    def _compiled(self, kernel: Kernel, folder: Path | None) -> Callable[..., Any]:
        """Return the function of a kernel, from the cache, or compiled now under the kernel's lock."""
        from mpips.collectives.kernels import compiler

        source = compiler.Source(kernel.name, kernel.source, kernel.types)
        with self._compiling, _yielding_gil(self._stopped):
            path = None if folder is None else compiler.kernel_path(source, folder)
            if path is None or path.exists():
                return compiler.load_or_compile(source, path)
        with _locked(path.with_suffix(".lock"), self._stopped), self._compiling, _yielding_gil(self._stopped):
            return compiler.load_or_compile(source, path)


class _EndOfImports:
    """A finder in `sys.meta_path` that aborts the imports of its thread once the process is ending.

    Numba has hundreds of modules, and the process should not have to wait for all of them.
    """

    def __init__(self, stopped: threading.Event) -> None:
        self._stopped = stopped
        self._thread = threading.get_ident()

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        """Find nothing, so that the other finders are asked. Raise ImportError when the process ends."""
        if self._stopped.is_set() and threading.get_ident() == self._thread:
            raise ImportError("the process ends")


@contextlib.contextmanager
def _yielding_gil(stopped: threading.Event) -> Iterator[None]:
    """Within the block, make this thread yield the GIL more often, and abort its imports once the process is ending.

    Importing Numba would otherwise keep the GIL busy for half a second.
    """
    before, end = sys.getswitchinterval(), _EndOfImports(stopped)
    sys.setswitchinterval(min(before, SWITCH_SECONDS))
    ours = sys.getswitchinterval()
    sys.meta_path.insert(0, end)
    try:
        yield
    finally:
        # ValueError: the program has replaced the list meanwhile.
        with contextlib.suppress(ValueError):
            sys.meta_path.remove(end)
        # If the interval differs, the program has set it meanwhile.
        if sys.getswitchinterval() == ours:
            sys.setswitchinterval(before)


@contextlib.contextmanager
def _locked(path: Path, stopped: threading.Event) -> Iterator[None]:
    """Hold the lock of a file within a block. A killed process releases it, and a forked child does not inherit it.

    The block runs without the lock if the file system has no locks, the folder is read-only, or another process holds
    the lock for longer than `LONGEST_LOCK_SECONDS`.

    Raises:
        RuntimeError: This process ends before it gets the lock.
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
    """Lock a file. Return False if another process has the lock."""
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise
    return True


@contextlib.contextmanager
def numpy_only() -> Iterator[None]:
    """Use no kernels within a block, in all threads of this process. For tests and benchmarks that compare both."""
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
