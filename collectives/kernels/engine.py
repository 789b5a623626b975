"""Loads compiled kernels, from a cache on disk or by compiling them now. NumPy does the work of kernels not loaded yet.

A kernel is the source of a Python function named `kernel`, whose arguments are 1-D contiguous arrays and numbers, with
their types: "float32[]", "const float32[]" (only read), "int64". Callers can compute the same bits by NumPy.

Loading a kernel takes about 20 ms if the cache has it, and half a second if it must be compiled. The first kernel takes
half a second more, because it imports Numba. So that later calls need not wait, kernels are loaded while a program sets
up calls, if these calls are large enough to gain back the time:

    1. `Kernel.prepare` says that the program has set up calls of the kernel, and how large they are.
    2. `Kernel.call_for` counts the elements that NumPy processes in place of the kernel.
    3. Once both together have reached `ENOUGH_ELEMENTS`, all kernels that were requested are loaded. Blocking.
    4. From then on `prepare` loads a kernel at once.

Kernels are not compiled in a background thread, because Python runs one thread at a time: a job whose kernels were
compiled in the background ran two to three times slower for three seconds. Ranks that share the folder of the cache
compile each kernel once: one rank gets the kernel's lock and compiles, and the others read the file that it has saved.

With `MPIPS_KERNELS=numba` each kernel is loaded as soon as it is prepared or needed. With `MPIPS_KERNELS=numpy` no
kernel is loaded. Fast-math is off, so LLVM does not contract or reorder operations.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import importlib.util
import os
import re
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
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
# If another process holds the lock of a kernel for longer than this, perhaps because it was stopped, this process
# compiles the kernel as well.
LONGEST_LOCK_SECONDS = 60.0
LOOK_SECONDS = 0.05
MOST_LETTERS = 300
# Kernels are loaded after NumPy has processed this many elements in their place. A kernel saves about 5 ns for each
# element, and loading Numba takes 0.5 s.
ENOUGH_ELEMENTS = 100_000_000
# A call counts as at least this many elements, because a call of NumPy takes some 20 us longer than a call of a kernel.
CALL_ELEMENTS = 4096
# A program that prepares a kernel is expected to call it this many times. If these calls have ENOUGH_ELEMENTS, the
# kernel is loaded immediately, for example for the 250,000 weights of a server (400 x 250,000 elements).
EXPECTED_CALLS = 400


class Kernel:
    """A kernel that is loaded, is not loaded yet, or cannot be loaded. `failure` says why it cannot be loaded."""

    def __init__(self, name: str, source: str, types: tuple[str, ...]) -> None:
        self.name = name
        self.source = source
        self.types = types
        self.compiled: Callable[..., Any] | None = None
        # the reason why the kernel never will be compiled
        self.failure = ""

    @property
    def call(self) -> Callable[..., Any] | None:
        """The function to call with the arrays. None until the kernel is loaded, or if it cannot be loaded."""
        return None if _engine.numpy_only else self.compiled

    @property
    def is_open(self) -> bool:
        """True if the kernel is not loaded yet, but may still be loaded."""
        return self.compiled is None and not self.failure

    def prepare(self, elements: int) -> None:
        """Load the kernel if calls on `elements` elements are expected to save more time than loading takes.

        Call this while a program sets up, because loading may block for a second or two.
        """
        if self.is_open:
            _engine.prepare(self, elements)

    def call_for(self, elements: int) -> Callable[..., Any] | None:
        """Return `call`. If it is None, the caller uses NumPy for these elements.

        May block for a second or two: once NumPy has done enough work in place of kernels, this call loads them.
        """
        if self.compiled is None and not self.failure:
            _engine.count(max(elements, CALL_ELEMENTS))
        return self.call


class Status(NamedTuple):
    """The engine in use.

    Attributes:
        engine: "numba" or "numpy".
        reason: Why this engine is in use.
        folder: The folder of compiled kernels, or "" if they are not kept.
        unkept: The reason why compiled kernels are not kept.
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
    """Return the reason to use NumPy, if it is known before Numba is imported. Otherwise return ""."""
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
    folder = Path(os.path.expanduser(given) if given else os.path.join(caches, "mpips", "kernels")).absolute()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except OSError as error:
        return None, f"{folder}: {error.strerror}"
    if status.st_uid not in (os.getuid(), 0) or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return None, f"others can write to {folder}: chmod go-w it, or name another folder in {FOLDER_VARIABLE}"
    return folder, ""


class _Engine:
    """All kernels that this process has requested, and whether Numba can be used."""

    def __init__(self) -> None:
        self.numpy_only = False
        self._kernels: dict[tuple[str, tuple[str, ...]], Kernel] = {}
        # a lock that a thread holds while it loads kernels
        self.lock = threading.RLock()
        # elements that NumPy has processed in place of kernels, or is expected to process, since kernels were last
        # loaded
        self._elements = 0
        # True once Numba is imported, or cannot be
        self._begun = False
        # the reason why Numba cannot compile
        self._unusable = ""
        self._folder: Path | None = None

    def kernel(self, name: str, source: str, types: Sequence[str]) -> Kernel:
        """Return the kernel of a source and types. It is not loaded by this call.

        Raises no errors: a kernel that cannot be compiled has a `failure`.
        """
        key = source, tuple(types)
        known = self._kernels.get(key)
        if known is None:
            known = self._kernels.setdefault(key, Kernel(name, *key))
            try:
                known.failure = self._unusable or _not_wanted()
            except ValueError as error:
                # MPIPS_KERNELS names no engine
                known.failure = self._unusable = str(error)
                _warn(self._unusable)
            if os.environ.get(VARIABLE):
                self._elements = ENOUGH_ELEMENTS
        return known

    def prepare(self, kernel: Kernel, elements: int) -> None:
        if self._begun:
            self._load(kernel)
        else:
            self.count(EXPECTED_CALLS * elements)

    def count(self, elements: int) -> None:
        """Count elements that NumPy processes in place of a kernel. Load all kernels if there are enough."""
        self._elements += elements
        if self._elements >= ENOUGH_ELEMENTS:
            self.load_all()

    def load_all(self) -> None:
        """Load all kernels that were requested. Blocking."""
        self._elements = 0
        for kernel in [*self._kernels.values()]:
            self._load(kernel)

    def in_use(self) -> bool:
        """True if this process has loaded Numba. Then another kernel costs little."""
        return self._begun and not self._unusable

    def _load(self, kernel: Kernel) -> None:
        """Load or compile a kernel, unless another thread has done so or the kernel has failed. Blocking."""
        with self.lock:
            if not kernel.is_open:
                return
            if not self._begun:
                self._begin()
            kernel.failure = self._unusable
            if kernel.failure:
                return
            begun = time.perf_counter()
            try:
                kernel.compiled = _load_or_compile(kernel, self._folder)
                LOG.info("kernel %s is ready after %.2f s", kernel.name, time.perf_counter() - begun)
            except Exception as error:
                # LLVM and Numba may raise any exception for a source that cannot be compiled.
                kernel.failure = COLOURS.sub("", f"{type(error).__name__}: {error}")
                LOG.info("kernel %s is left to NumPy: %s", kernel.name, kernel.failure)

    def _begin(self) -> None:
        self._unusable = _unusable()
        self._folder, unkept = cache_folder()
        if self._unusable:
            _warn(self._unusable)
        elif unkept:
            LOG.warning("compiled kernels are not kept: %s", unkept)
        self._begun = True


def _warn(reason: str) -> None:
    LOG.warning("using NumPy instead of compiled kernels: %s", reason)


def _load_or_compile(kernel: Kernel, folder: Path | None) -> Callable[..., Any]:
    """Return the function of a kernel: load it from the cache, or hold the kernel's lock and compile it."""
    from mpips.collectives.kernels import compiler

    source = compiler.Source(kernel.name, kernel.source, kernel.types)
    path = None if folder is None else compiler.kernel_path(source, folder)
    if path is None or path.exists():
        return compiler.load_or_compile(source, path)
    with _locked(path.with_suffix(".lock")):
        return compiler.load_or_compile(source, path)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock of a file within a block. The lock ends with this process, and forked children do not inherit it.

    The block runs without the lock if the file system has no locks, the folder is read-only, or another process holds
    the lock for longer than `LONGEST_LOCK_SECONDS`.
    """
    fd = -1
    clock = Clock()
    try:
        with contextlib.suppress(OSError):
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            while not _lock(fd) and clock.seconds() < LONGEST_LOCK_SECONDS:
                time.sleep(LOOK_SECONDS)
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
# A fork waits for a thread that loads kernels. Otherwise the child could get half-imported modules of Numba, and locks
# of Numba or LLVM that nobody releases.
os.register_at_fork(
    before=_engine.lock.acquire, after_in_parent=_engine.lock.release, after_in_child=_engine.lock.release
)
kernel = _engine.kernel
load_all = _engine.load_all
in_use = _engine.in_use
