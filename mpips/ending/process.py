"""The process of a rank: how it starts MPI, reports to its launcher, starts children, and ends.

MPI starts when the program imports mpi4py. The import returns once all ranks have imported it.

A rank reports to the `mpips run` of its machine, if one listens. It reports that the process has started, that MPI has
started, its role, and how it ends. A process that ends without such a last message counts as dead. The last message is
sent after all other atexit handlers have run. If ranks have died and no launcher listens, because `mpips run` is on
another host, the lowest surviving rank prints the dead ranks on standard error.

A child that runs a new program, as with `subprocess`, inherits the environment variables by which a launcher tells a
rank its place. If the child imported MPI, MPI would take the child for that rank and hang. So these variables are
hidden from children as soon as MPI has started, and a child that imports MPI gets an MPI world of its own. A forked
child inherits MPI's memory. So it exits without mpi4py's finalization, which would end MPI or the job.

After the death of a rank, MPI_Finalize of Open MPI hangs in one of five runs, and mpi4py calls MPI_Finalize after the
interpreter has ended. So this module calls it earlier, in a thread. If the call returns in time, mpi4py sees that MPI
has ended and does not call it again. Otherwise the thread is abandoned, and an on_exit handler of the C library ends
the process with the program's exit code before anything else can hang.
"""

from __future__ import annotations

import atexit
import ctypes
import importlib.util
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache, wraps
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NoReturn

from mpips.collectives.errors import explain_missing_mpi
from mpips.collectives.machine import find_peer
from mpips.collectives.recorder import own as recorder
from mpips.collectives.recorder import tracing
from mpips.store.world import (
    FAILING,
    GOODBYE,
    INPUT,
    PRESENCE,
    PRESENT,
    REMARK,
    ROLE,
    STARTED,
    STEP,
    WELL_WITHOUT,
    launched_as,
    tells_rank,
)

# functions to call when MPI has started
_calls: list[Callable[[], None]] = []


# functions to call before MPI ends
_closers: list[Callable[[], None]] = []


def before_mpi_ends(close: Callable[[], None]) -> None:
    """Register `close` to be called at exit, and also when the program itself calls `MPI.Finalize()`.

    So `close` may be called twice. The function that was registered last is called first.
    """
    _closers.append(close)
    atexit.register(close)


def _close_before_finalize() -> None:
    """Make `MPI.Finalize()` first call the functions in `_closers`. Called when MPI has started.

    Otherwise a store that is still open would need MPI at exit, when MPI has already ended.
    """
    module = sys.modules["mpi4py.MPI"]
    finalize = module.Finalize

    @wraps(finalize)
    def close_and_finalize() -> None:
        if is_started() and not module.Is_finalized():
            for close in reversed(_closers):
                close()
            if "mpips.collectives.communicator" in sys.modules:
                sys.modules["mpips.collectives.communicator"].leave_all()
            if survives():
                _end_mpi()
                return
        finalize()

    module.Finalize = close_and_finalize  # type: ignore[attr-defined]


def runs() -> bool:
    """True if MPI has started in this process. In a fork, also True if MPI had started before the fork."""
    module = sys.modules.get("mpi4py.MPI")
    return module is not None and bool(module.Is_initialized())


def when_started(call: Callable[[], None]) -> None:
    """Call `call` as soon as MPI has started: at once, or when the program imports mpi4py.MPI.

    If the import does not start MPI, `call` is never called.
    """
    if runs():
        call()
    elif "mpi4py.MPI" not in sys.modules:
        if not _calls:
            sys.meta_path.insert(0, _Importing())
        _calls.append(call)


def open_page() -> None:
    """Create the shared-memory page in which other processes of this user can see what this rank does.

    Called when MPI has started.
    """
    world = sys.modules["mpi4py.MPI"].COMM_WORLD
    tracing.begin(world.rank, world.size)


class _Importing(MetaPathFinder):
    """Import hook for mpi4py.MPI. Runs the `when_started` calls, and turns a missing MPI library into one clear error.

    Ctrl-C is deferred until the import is over. Otherwise:

    1. Ctrl-C breaks the import off after MPI has started.
    2. The program has no module mpi4py.MPI, but MPI counts its process as a rank.
    3. The other ranks wait for this rank forever.

    If Ctrl-C came during the import, an uncaught KeyboardInterrupt follows the import and ends the job.
    """

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != "mpi4py.MPI":
            return None
        sys.meta_path.remove(self)
        with _one_sentence():
            spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            create, begin = spec.loader.create_module, spec.loader.exec_module

            def create_module(spec: ModuleSpec) -> ModuleType | None:
                with _one_sentence():
                    return create(spec)

            def exec_module(module: ModuleType) -> None:
                with _uninterrupted() as interrupts:
                    begin(module)
                    if module.Is_initialized():
                        for call in _calls:
                            call()
                if interrupts:
                    if module.Is_initialized() and module.COMM_WORLD.size > 1:
                        sys.excepthook(KeyboardInterrupt, KeyboardInterrupt(), None)
                    raise KeyboardInterrupt

            spec.loader.create_module = create_module  # type: ignore[method-assign]
            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


@contextmanager
def _one_sentence() -> Iterator[None]:
    """Replace mpi4py's long message about a missing MPI library with one sentence. The type of the error stays."""
    try:
        yield
    except (ImportError, RuntimeError) as error:
        if not (sentence := explain_missing_mpi(error)):
            raise
        raise type(error)(sentence) from None


@contextmanager
def _uninterrupted() -> Iterator[list[int]]:
    """Yield a list that collects the interrupts (Ctrl-C) of the block, instead of raising KeyboardInterrupt.

    If the program has its own handler for SIGINT, or this is not the main thread, nothing is changed.
    """
    came: list[int] = []
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield came
        return
    signal.signal(signal.SIGINT, lambda number, frame: came.append(number))
    try:
        yield came
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


# the variable by which `mpirun --with-ft ulfm` tells each rank that it may survive deaths
SURVIVES = "OMPI_MCA_mpi_ft_enable"
# Seconds that MPI_Finalize may take after the death of a rank. It usually takes some milliseconds.
AFTER_A_DEATH = 1.0
# Seconds that MPI_Finalize may take if no death is known. This is longer, because it waits for ranks that are busy.
OTHERWISE = 20.0


def survives() -> bool:
    """True if the launcher has started this process so that it survives the death of other ranks."""
    return os.environ.get(SURVIVES, "").lower() in ("1", "true")


@cache
def end_mpi_in_time() -> None:
    """Ensure that this process ends even if MPI_Finalize hangs. Its other atexit handlers still run before the end.

    Called when mpips is imported. Does not need MPI.
    """
    if survives():
        atexit.register(_end_mpi)


def _end_mpi() -> None:
    if (module := _running()) is None:
        return
    seconds = OTHERWISE if dead() == [] else AFTER_A_DEATH
    if not finalized(ctypes.CDLL(module.__file__).MPI_Finalize, seconds):
        leave_at_once()


def dead() -> list[int] | None:
    """Return the ranks of the job that are known to have died, or None if MPI is not running or cannot tell."""
    if (module := _running()) is None:
        return None
    from mpips.collectives.fabric.failure import dead_ranks

    try:
        return dead_ranks(module.COMM_WORLD)
    except module.Exception:
        return None


def _running() -> Any:
    """Return the module mpi4py.MPI while MPI runs, or None before its start and after its end."""
    module = sys.modules.get("mpi4py.MPI")
    return module if module is not None and module.Is_initialized() and not module.Is_finalized() else None


def finalized(finalize: Callable[[], object], seconds: float) -> bool:
    """Call `finalize` in a thread. Return True if `finalize` returns within `seconds`."""
    caller = threading.Thread(target=finalize, daemon=True)
    caller.start()
    caller.join(seconds)
    return not caller.is_alive()


def leave_at_once() -> None:
    """Register a handler that ends the process with its exit code as soon as the C library's exit() begins.

    The exit handlers of libraries, and threads that still run, can then no longer hang the process.
    """
    libc = ctypes.CDLL(None)
    libc.fflush(None)
    libc.on_exit(libc["_exit"], None)


# seconds to wait for the launcher to take a message
SECONDS = 5.0
PR_SET_PDEATHSIG = 1


class StatusLine:
    """The connection through which this process reports to its launcher.

    If no launcher listens, messages are dropped. A forked child sends no messages.
    """

    def __init__(self) -> None:
        self._process = os.getpid()
        # True once the program has ended well
        self._well = False
        job = launched_as(os.environ)
        self._rank = job[0] if job else 0
        # True if a launcher that belongs to this user listens
        self._is_heard = False
        self._line = socket.socket(socket.AF_UNIX)
        self._line.settimeout(SECONDS)
        # Remove both variables, so that processes which this one starts do not report to the launcher.
        name, has_input = os.environ.pop(PRESENCE, ""), os.environ.pop(INPUT, "")
        if job and name:
            with suppress(OSError):
                self._line.connect(f"\0{name}")
                self._is_heard = find_peer(self._line).ours
                # The kernel kills this process when the launcher dies, so no rank outlives it.
                ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        self._say(b"%s %d\n" % (PRESENT, self._rank))
        if has_input and self._is_heard and self._rank == 0:
            self._take_input()
        when_started(self.started)
        atexit.register(self._leave)
        self._in_threads, threading.excepthook = threading.excepthook, self._thread_fails
        _lines.append(self)

    def _take_input(self) -> None:
        """Make the standard input of `mpips run` the standard input of this process.

        What the program does not read is left for the program that has called `mpips run`.
        """
        with suppress(OSError):
            _, (file, *_), _, _ = socket.recv_fds(self._line, 1, 1)
            os.dup2(file, 0)
            os.close(file)

    def started(self) -> None:
        self._say(STARTED + b"\n")

    def has_role(self, role: str, step: int | None) -> None:
        self._say((b"" if step is None else b"%s %d\n" % (STEP, step)) + b"%s %s\n" % (ROLE, role.encode()))

    def ends_well(self, remark: str = "") -> None:
        """Report that the program has ended well. `remark` is shown if the whole job ends well."""
        self._well = True
        if remark and self._is_heard:
            self._say(b"%s %s\n" % (REMARK, remark.encode()))
        elif remark:
            sys.stdout.flush()
            os.write(2, f"mpips: {remark}\n".encode())

    def fails(self, code: int = 1) -> None:
        if os.getpid() == self._process:
            recorder.write_exit_code(code)
        self._say(b"%s %d\n" % (FAILING, code & 255))

    def _leave(self) -> None:
        if not self._well or os.getpid() != self._process:
            return
        self._say(GOODBYE + b"\n")
        others = dead() if survives() and not self._is_heard else None
        if others and {*range(self._rank)} <= {*others}:
            ranks = ", ".join(map(str, others)).encode()
            with suppress(OSError):
                os.write(2, b"%s%s %s\n" % (WELL_WITHOUT, b"s"[: len(others) > 1], ranks))

    def _thread_fails(self, args: threading.ExceptHookArgs) -> None:
        if not issubclass(args.exc_type, SystemExit):
            self.fails()
        self._in_threads(args)

    def _say(self, word: bytes) -> None:
        if os.getpid() == self._process:
            with suppress(OSError):
                self._line.send(word)


# the StatusLine of this process; empty unless `python -m mpips` runs the program
_lines: list[StatusLine] = []


def say_role(role: str, step: int | None = None) -> None:
    """Tell the launcher that this rank, a spare until now, has got a role, and its first step if that is known.

    An example of a role is "worker of client 1". The launcher then names the process by this role. From then on, the
    result of the job also depends on how this process ends.
    """
    for line in _lines:
        line.has_role(role, step)


def say_failure(code: int) -> None:
    """Tell the launcher that this rank ends the job with this exit code."""
    for line in _lines:
        line.fails(code)


# pid of this process, if it is a fork -> whether MPI had started before the fork
_forks: dict[int, bool] = {}


@cache
def keep_children_from_being_ranks() -> None:
    """Ensure that MPI does not take the children of this process for ranks. Called when mpips is imported.

    Does not need MPI.
    """
    os.register_at_fork(after_in_child=_note_fork)
    when_started(hide_variables)
    when_started(_close_before_finalize)


def is_started() -> bool:
    """True if this process has started MPI itself, and is not a fork of a process that did."""
    return runs() and not is_fork()


def is_fork() -> bool:
    """True if this process is a fork, unless it has started MPI itself after the fork."""
    return os.getpid() in _forks and (_forks[os.getpid()] or not runs())


def hide_variables() -> None:
    """Hide from children the variables that make this process a rank. Here `os.environ[name]` still returns them."""
    for name in [name for name in os.environ if tells_rank(name)]:
        # This removes the variable from the environment that children inherit, but not from `os.environ`.
        os.unsetenv(name)
    # `subprocess` with env={**os.environ} iterates over `os.environ`. The iteration must not find the variables.
    os.environ.__class__ = _OfRank


def leave_fork(code: int) -> NoReturn:
    """End this fork of a rank as Python would end it, but without mpi4py's finalization."""
    for step in (threading._shutdown, atexit._run_exitfuncs):  # type: ignore[attr-defined]
        with suppress(Exception):
            step()
    flush()
    os._exit(code)


def flush() -> None:
    """Flush what the program has printed.

    Errors are ignored: the program may have closed `sys.stdout` or `sys.stderr`, or replaced it with any object.
    """
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()


def say(text: str) -> None:
    """Write `text` directly to standard error.

    The program may have closed `sys.stderr`, or replaced it with any object.
    """
    with suppress(OSError):
        os.write(2, text.encode(errors="backslashreplace"))


class _OfRank(os._Environ):  # type: ignore[type-arg]
    """The environment of a rank.

    A copy, such as a program makes for a child, lacks the variables that make this process a rank.
    """

    def __iter__(self) -> Iterator[str]:
        return (name for name in super().__iter__() if not tells_rank(name))

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _note_fork() -> None:
    _forks[os.getpid()] = runs()
