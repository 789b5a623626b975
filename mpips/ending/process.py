"""The process of a rank: how it starts MPI, tells the launcher how it fares, starts children, and ends.

MPI is started when the program imports mpi4py, which comes back when all ranks have come.

A rank tells the `mpips run` of its machine, where one listens, that it is here, that MPI has started, its role, and how
it ends. A process that ends without a word has died. The last word is said when all that closes at exit has closed.
Where others have died and nobody listens, as on another host, the first rank that is left says so on standard error.

A child that begins anew, such as those of `subprocess`, inherits the variables by which a launcher tells a rank its
place. If it imports MPI, MPI takes it for that rank, and hangs. So these variables are kept from children as soon as
MPI has started: a child that imports MPI is a world of its own. A fork inherits the memory in which MPI runs. So it
ends without mpi4py's last step, which would end MPI, or the job.

After a death MPI_Finalize of Open MPI hangs in one run of five, and mpi4py calls it when the interpreter has ended. So
it is called before, in a thread that is left behind when it takes too long; mpi4py then sees that MPI has ended. The C
library hands the exit code of the program to the last step, which leaves without a look back.
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

from mpips.collectives.errors import without_mpi
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

_calls: list[Callable[[], None]] = []
"""What is to be done when MPI has started."""


_closers: list[Callable[[], None]] = []
"""What is to be closed before MPI ends."""


def before_mpi_ends(close: Callable[[], None]) -> None:
    """Call `close` at exit, and before that where the program ends MPI itself: the last one first, perhaps twice."""
    _closers.append(close)
    atexit.register(close)


def _close_before_finalize() -> None:
    """Let `MPI.Finalize()` close first what is open: a store would need MPI to close at exit. Called when MPI runs."""
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
    """Return whether MPI has been started here, or in the process of which this one is a fork."""
    module = sys.modules.get("mpi4py.MPI")
    return module is not None and bool(module.Is_initialized())


def when_started(call: Callable[[], None]) -> None:
    """Call it when the program has imported MPI, if that starts it; at once where it has started before."""
    if runs():
        call()
    elif "mpi4py.MPI" not in sys.modules:
        if not _calls:
            sys.meta_path.insert(0, _Importing())
        _calls.append(call)


def open_page() -> None:
    """Let others of this user see what this rank does. Called when MPI has started."""
    world = sys.modules["mpi4py.MPI"].COMM_WORLD
    tracing.begin(world.rank, world.size)


class _Importing(MetaPathFinder):
    """Does what is to be done when MPI has started, and says in one sentence that there is no MPI's library.

    An interrupt is held back until then, as an import that it breaks off leaves an MPI that runs and that nobody has:
    the others would wait for this rank. So it is an uncaught one, which ends the job.
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
    """Raise what mpi4py says of a missing library as one sentence, of the same type."""
    try:
        yield
    except (ImportError, RuntimeError) as error:
        if not (sentence := without_mpi(error)):
            raise
        raise type(error)(sentence) from None


@contextmanager
def _uninterrupted() -> Iterator[list[int]]:
    """Collect the interrupts that come within, where they would be a KeyboardInterrupt."""
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


SURVIVES = "OMPI_MCA_mpi_ft_enable"
"""What `mpirun --with-ft ulfm` tells each rank."""
AFTER_A_DEATH = 1.0  # seconds for MPI_Finalize, which takes some milliseconds
OTHERWISE = 20.0  # the same where no death is known: other ranks may be busy yet


def survives() -> bool:
    """Return whether this process was started so that it outlives other ranks of its job."""
    return os.environ.get(SURVIVES, "").lower() in ("1", "true")


@cache
def end_mpi_in_time() -> None:
    """See to it that this process ends, once all else that is to be done at exit has been done. Called when mpips is
    imported; does not need MPI."""
    if survives():
        atexit.register(_end_mpi)


def _end_mpi() -> None:
    if (module := _running()) is None:
        return
    seconds = OTHERWISE if dead() == [] else AFTER_A_DEATH
    if not finalized(ctypes.CDLL(module.__file__).MPI_Finalize, seconds):
        leave_at_once()


def dead() -> list[int] | None:
    """Ranks of the job that are known to have died, while MPI runs; None where it cannot tell."""
    if (module := _running()) is None:
        return None
    from mpips.collectives.fabric.failure import failed

    try:
        return failed(module.COMM_WORLD)
    except module.Exception:
        return None


def _running() -> Any:
    """mpi4py's module of MPI, None where MPI has not started or has ended."""
    module = sys.modules.get("mpi4py.MPI")
    return module if module is not None and module.Is_initialized() and not module.Is_finalized() else None


def finalized(finalize: Callable[[], object], seconds: float) -> bool:
    """Call it; whether it came back in time."""
    caller = threading.Thread(target=finalize, daemon=True)
    caller.start()
    caller.join(seconds)
    return not caller.is_alive()


def leave_at_once() -> None:
    """The process ends with the exit code that it is about to have, whatever threads and libraries would yet do."""
    libc = ctypes.CDLL(None)
    libc.fflush(None)
    libc.on_exit(libc["_exit"], None)


SECONDS = 5.0  # to be heard by the launcher
PR_SET_PDEATHSIG = 1


class StatusLine:
    """The line of this process to its launcher; a word to nobody where none listens, or from a fork."""

    def __init__(self) -> None:
        self._process, self._well, job = os.getpid(), False, launched_as(os.environ)
        self._rank, self._is_heard = job[0] if job else 0, False
        self._line = socket.socket(socket.AF_UNIX)
        self._line.settimeout(SECONDS)
        name, has_input = os.environ.pop(PRESENCE, ""), os.environ.pop(INPUT, "")  # not for what this process starts
        if job and name:
            with suppress(OSError):
                self._line.connect(f"\0{name}")
                self._is_heard = find_peer(self._line).ours
                ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # nobody outlives its mpirun
        self._say(b"%s %d\n" % (PRESENT, self._rank))
        if has_input and self._is_heard and self._rank == 0:
            self._take_input()
        when_started(self.started)
        atexit.register(self._leave)
        self._in_threads, threading.excepthook = threading.excepthook, self._thread_fails
        _lines.append(self)

    def _take_input(self) -> None:
        """Read from now on what `mpips run` would: what the program does not read is left to who started that."""
        with suppress(OSError):
            _, (file, *_), _, _ = socket.recv_fds(self._line, 1, 1)
            os.dup2(file, 0)
            os.close(file)

    def started(self) -> None:
        self._say(STARTED + b"\n")

    def has_role(self, role: str, step: int | None) -> None:
        self._say((b"" if step is None else b"%s %d\n" % (STEP, step)) + b"%s %s\n" % (ROLE, role.encode()))

    def ends_well(self, remark: str = "") -> None:
        """The program has ended, with a `remark` on the job, which counts where all of it ends well."""
        self._well = True
        if remark and self._is_heard:
            self._say(b"%s %s\n" % (REMARK, remark.encode()))
        elif remark:
            sys.stdout.flush()
            os.write(2, f"mpips: {remark}\n".encode())

    def fails(self, code: int = 1) -> None:
        if os.getpid() == self._process:
            recorder.exits(code)
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


_lines: list[StatusLine] = []
"""That of this process, where `python -m mpips` runs its program."""


def say_role(role: str, step: int | None = None) -> None:
    """Say that a spare has got a role, such as "worker of client 1", and from which step it goes on, if that is known.

    The launcher names it so, and the job is its own to end.
    """
    for line in _lines:
        line.has_role(role, step)


def say_failure(code: int) -> None:
    """This rank ends the job with this exit code."""
    for line in _lines:
        line.fails(code)


_forks: dict[int, bool] = {}
"""This process, where it is a fork, and whether MPI had started before."""


@cache
def keep_children_from_being_ranks() -> None:
    """See to it that what this process starts is no rank. Called when mpips is imported; does not need MPI."""
    os.register_at_fork(after_in_child=_note_fork)
    when_started(hide_variables)
    when_started(_close_before_finalize)


def is_started() -> bool:
    """Return whether this process, and not one of which it is a fork, has started MPI."""
    return runs() and not is_fork()


def is_fork() -> bool:
    """Return whether this process is a fork of a rank, and no rank by an MPI that it has started itself."""
    return os.getpid() in _forks and (_forks[os.getpid()] or not runs())


def hide_variables() -> None:
    """Keep from children the variables that make this process a rank. `os.environ[name]` still has them here."""
    for name in [name for name in os.environ if tells_rank(name)]:
        os.unsetenv(name)  # `os.environ` does not see it
    os.environ.__class__ = _OfRank


def leave_fork(code: int) -> NoReturn:
    """End this fork of a rank as Python does, but for mpi4py's last step."""
    for step in (threading._shutdown, atexit._run_exitfuncs):  # type: ignore[attr-defined]
        with suppress(Exception):
            step()
    flush()
    os._exit(code)


def flush() -> None:
    """Write what the program has printed. Its `sys.stdout` and `sys.stderr` may be anything, or closed."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()


def say(text: str) -> None:
    """Write to standard error past the program's `sys.stderr`, which may be anything, or closed."""
    with suppress(OSError):
        os.write(2, text.encode(errors="backslashreplace"))


class _OfRank(os._Environ):  # type: ignore[type-arg]
    """The environment of a rank: a copy, which is for a child, is without the variables that make this one a rank."""

    def __iter__(self) -> Iterator[str]:
        return (name for name in super().__iter__() if not tells_rank(name))

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _note_fork() -> None:
    _forks[os.getpid()] = runs()
