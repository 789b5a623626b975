"""The process of a rank: how it starts MPI, reports to its launcher, starts children, and ends.

MPI starts when the program imports mpi4py. The import returns once all ranks have imported it.

A rank reports to the `mpips run` of its machine, if one listens: that it has started, that MPI has started, its role,
and how it ends. A process that ends without reporting how counts as dead. The last message is sent after everything
that closes at exit has closed. If ranks have died and no launcher listens, as on another host, the lowest rank that is
left reports them on standard error.

A child that starts a new program, as with `subprocess`, inherits the variables by which a launcher tells a rank its
place. If the child imports MPI, MPI takes it for that rank and hangs. So these variables are hidden from children as
soon as MPI has started, and a child that imports MPI becomes a world of its own. A forked child inherits MPI's
memory. So it exits without mpi4py's finalization, which would end MPI or the job.

After a death, MPI_Finalize of Open MPI hangs in one of five runs, and mpi4py calls it after the interpreter has ended.
So it is called earlier, in a thread. If it returns in time, mpi4py sees that MPI has ended and does not call it. If
not, the thread is abandoned, and an on_exit handler of the C library, which is given the program's exit code, ends the
process before anything else can hang.
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
    """Call `close` at exit, or earlier if the program ends MPI itself. The last one registered is called first.

    It may be called twice.
    """
    _closers.append(close)
    atexit.register(close)


def _close_before_finalize() -> None:
    """Let `MPI.Finalize()` first close what is still open. Called when MPI has started.

    An open store would otherwise need MPI at exit, when MPI has already ended.
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
    """True if MPI has started here, or in the process of which this one is a fork."""
    module = sys.modules.get("mpi4py.MPI")
    return module is not None and bool(module.Is_initialized())


def when_started(call: Callable[[], None]) -> None:
    """Call `call` when the program imports MPI, if that starts it, or at once if MPI has started already."""
    if runs():
        call()
    elif "mpi4py.MPI" not in sys.modules:
        if not _calls:
            sys.meta_path.insert(0, _Importing())
        _calls.append(call)


def open_page() -> None:
    """Let other processes of this user see what this rank does. Called when MPI has started."""
    world = sys.modules["mpi4py.MPI"].COMM_WORLD
    tracing.begin(world.rank, world.size)


class _Importing(MetaPathFinder):
    """Import hook for mpi4py.MPI. Runs the `when_started` calls, and turns a missing MPI library into one clear error.

    Ctrl-C is deferred until the import is over. Otherwise:

    1. Ctrl-C breaks the import off after MPI has started.
    2. The program has no module of MPI, but its process is a rank.
    3. The other ranks wait for this rank for ever.

    After the import the interrupt counts as an uncaught one, which ends the job.
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
    """Replace mpi4py's error about a missing library by one sentence, with the same type."""
    try:
        yield
    except (ImportError, RuntimeError) as error:
        if not (sentence := explain_missing_mpi(error)):
            raise
        raise type(error)(sentence) from None


@contextmanager
def _uninterrupted() -> Iterator[list[int]]:
    """Collect interrupts that arrive in the block, if they would raise KeyboardInterrupt."""
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
# seconds for MPI_Finalize after a death. It usually takes some milliseconds.
AFTER_A_DEATH = 1.0
# seconds for MPI_Finalize if no death is known: other ranks may still be busy
OTHERWISE = 20.0


def survives() -> bool:
    """True if this process was started so that it survives the death of other ranks."""
    return os.environ.get(SURVIVES, "").lower() in ("1", "true")


@cache
def end_mpi_in_time() -> None:
    """Ensure that this process ends after everything else at exit has been done, even if MPI_Finalize hangs.

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
    """Return the ranks of the job that are known to have died, or None if MPI does not run or cannot tell."""
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
    """Call `finalize` in a thread. Return True if it returns in time."""
    caller = threading.Thread(target=finalize, daemon=True)
    caller.start()
    caller.join(seconds)
    return not caller.is_alive()


def leave_at_once() -> None:
    """End the process at exit with its exit code, without the remaining steps of threads and libraries."""
    libc = ctypes.CDLL(None)
    libc.fflush(None)
    libc.on_exit(libc["_exit"], None)


# seconds to wait for the launcher to take a message
SECONDS = 5.0
PR_SET_PDEATHSIG = 1


class StatusLine:
    """The connection by which this process reports to its launcher.

    Messages are dropped if no launcher listens, and in forks.
    """

    def __init__(self) -> None:
        self._process = os.getpid()
        # True once the program has ended well
        self._well = False
        job = launched_as(os.environ)
        self._rank = job[0] if job else 0
        # True if a launcher of this user listens
        self._is_heard = False
        self._line = socket.socket(socket.AF_UNIX)
        self._line.settimeout(SECONDS)
        # Remove them, so that processes which this one starts do not report.
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
        """Read standard input in place of `mpips run`.

        What the program does not read stays for the caller of `mpips run`.
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


# the line of this process, if `python -m mpips` runs its program
_lines: list[StatusLine] = []


def say_role(role: str, step: int | None = None) -> None:
    """Tell the launcher that a spare has got a role, such as "worker of client 1", and its first step if that is known.

    The launcher then names the process by this role, and its end counts for the job.
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
    """Ensure that processes which this one starts are not taken for ranks. Called when mpips is imported.

    Does not need MPI.
    """
    os.register_at_fork(after_in_child=_note_fork)
    when_started(hide_variables)
    when_started(_close_before_finalize)


def is_started() -> bool:
    """True if this process has started MPI itself, and is not a fork of a process that did."""
    return runs() and not is_fork()


def is_fork() -> bool:
    """True if this process is a fork of a rank, and not a rank by an MPI that it has started itself."""
    return os.getpid() in _forks and (_forks[os.getpid()] or not runs())


def hide_variables() -> None:
    """Hide from children the variables that make this process a rank. `os.environ[name]` still has them here."""
    for name in [name for name in os.environ if tells_rank(name)]:
        # This removes it from what children inherit, and not from `os.environ`.
        os.unsetenv(name)
    # `subprocess` with env={**os.environ} iterates over it, and must not find them.
    os.environ.__class__ = _OfRank


def leave_fork(code: int) -> NoReturn:
    """End this fork of a rank as Python does, but without mpi4py's last step."""
    for step in (threading._shutdown, atexit._run_exitfuncs):  # type: ignore[attr-defined]
        with suppress(Exception):
            step()
    flush()
    os._exit(code)


def flush() -> None:
    """Flush what the program has printed.

    Its `sys.stdout` and `sys.stderr` may be replaced by any object, or closed.
    """
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()


def say(text: str) -> None:
    """Write to standard error directly, because the program's `sys.stderr` may be replaced by any object, or closed."""
    with suppress(OSError):
        os.write(2, text.encode(errors="backslashreplace"))


class _OfRank(os._Environ):  # type: ignore[type-arg]
    """The environment of a rank.

    Copies of it, which are made for children, lack the variables that make this one a rank.
    """

    def __iter__(self) -> Iterator[str]:
        return (name for name in super().__iter__() if not tells_rank(name))

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _note_fork() -> None:
    _forks[os.getpid()] = runs()
