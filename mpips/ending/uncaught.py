"""An uncaught error ends the job: it is printed once for all ranks that share it, and then all ranks are ended.

A rank other than 0 with an uncaught error waits a moment for another rank to announce the same error. Errors are the
same if type and sentence (without the rank in front) and the place in the user's program are equal, or, if the sentence
is ours, if the sentences are equal. If the same error is announced, the rank prints nothing. If another error or none
is announced, it prints its own, tells the others so, and ends the job. So an error that only one rank has is always
printed. A rank that has only learnt of another rank's mistake waits longer, because the traceback to show is that of
the other rank.
"""

from __future__ import annotations

import dis
import hashlib
import os
import re
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Hashable, Iterator
from contextlib import suppress
from functools import cache
from itertools import pairwise
from types import FrameType, TracebackType
from typing import TYPE_CHECKING

from mpips.collectives import log
from mpips.collectives.clock import Clock
from mpips.collectives.errors import CollectiveError, is_ours
from mpips.collectives.recorder import own as recorder
from mpips.ending.process import flush, is_started, say, say_failure, survives
from mpips.store.world import launched_as

if TYPE_CHECKING:
    from mpi4py import MPI

LOG = log.get("mpips.ending")
RUNNERS = (os.path.join("mpips", "__main__.py"), os.path.join("mpi4py", "run.py"), "<frozen runpy>", "runpy.py")
# the exit code after Ctrl-C, as of shells
INTERRUPTED = 130
# tags of messages on COMM_WORLD when a job ends: "I print this error", and "I have it, too"
SAID, SHARED = 32101, 32102
DIGEST_BYTES = 16
# seconds to wait for another rank to print the error. Rank r waits r * STAGGER longer, at most PATIENCE.
PATIENCE = 0.4
STAGGER = 0.01
# seconds for the launcher to read what was printed; MPICH's launcher drops the rest when a rank aborts
LAST_WORDS = 0.5
# seconds to wait to be ended by the rank that has printed the error
ABORTED = 10.0


# errors for which this module's `sys.excepthook` was called, in a job of several ranks
_handled: list[BaseException] = []


@cache
def install_hooks() -> None:
    """From now on, print an uncaught exception in any thread with its rank, and end the job.

    Called when mpips is imported. Does not need MPI. A program may set hooks of its own later. They run, and then the
    job is ended all the same (`end_after_hook`).
    """
    before, before_in_threads = sys.excepthook, threading.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        trace = error.__traceback__ = _users(error, _without_runner(trace))
        _write_down(kind, error, trace)
        if is_alone():
            before(kind, error, trace)
        else:
            _handled.append(error)
            try:
                _raised(kind, error, trace)
            except ImportError:
                # A file beside the program, such as a numpy.py, hides a module that _raised() imports. The program's
                # own error says so.
                before(kind, error, trace)

    def thread_hook(args: threading.ExceptHookArgs) -> None:
        if is_alone():
            before_in_threads(args)
        elif not issubclass(args.exc_type, SystemExit):
            error, trace = args.exc_value, args.exc_traceback
            if error is not None:
                trace = error.__traceback__ = _users(error, trace)
            _write_down(args.exc_type, error, trace)
            _raised(args.exc_type, error, trace)

    sys.excepthook = hook
    threading.excepthook = thread_hook
    _see_past_hooks_of_threads()
    # This must run before the handlers of atexit. There an open store would wait for ranks that wait for this one.
    threading._register_atexit(_end_after_program)  # type: ignore[attr-defined]


def _see_past_hooks_of_threads() -> None:
    """End the job after an uncaught exception in a thread, even if the program has replaced `threading.excepthook`."""
    make: Callable[[], Callable[[threading.Thread], None]]
    make = threading._make_invoke_excepthook  # type: ignore[attr-defined]

    def make_with_end() -> Callable[[threading.Thread], None]:
        call_hook = make()

        def call_hook_and_end(thread: threading.Thread) -> None:
            error = sys.exc_info()[1]
            call_hook(thread)
            if error is not None and not isinstance(error, SystemExit):
                end_after_hook(error)

        return call_hook_and_end

    threading._make_invoke_excepthook = make_with_end  # type: ignore[attr-defined]


def _end_after_program() -> None:
    """End the job if the main program was left by an exception that the program's own hook has shown.

    Python keeps the last exception that it has shown, and so do debuggers and test runners. The program's own exception
    is the one that has left the outermost frame.
    """
    error, trace = getattr(sys, "last_value", None), getattr(sys, "last_traceback", None)
    if error is None or trace is None or _is_handled(error) or hasattr(sys, "ps1"):
        return
    outermost = trace.tb_frame
    if outermost.f_back is None and outermost.f_code.co_name in ("<module>", "_run_module_as_main"):
        error.__traceback__ = _users(error, _without_runner(trace))
        end_after_hook(error)


def _is_handled(error: BaseException) -> bool:
    return any(error is one for one in _handled)


def show(error: BaseException) -> SystemExit | None:
    """Show an error that has left the program, by `sys.excepthook`. Return the SystemExit that the hook raises, if any.

    If the hook fails, print both errors, as Python does. Returns only if the hook is not ours or this process is alone.
    """
    trace = error.__traceback__ = _users(error, _without_runner(error.__traceback__))
    try:
        sys.excepthook(type(error), error, trace)
    except SystemExit as left:
        return left
    except BaseException as failure:
        # Whatever error this is, the job must end.
        failure.__suppress_context__ = True
        first = failure.__traceback__.tb_next if failure.__traceback__ is not None else None
        flush()
        say(
            "".join(
                [
                    "Error in sys.excepthook:\n",
                    *traceback.format_exception(type(failure), failure, first),
                    "\nOriginal exception was:\n",
                    *traceback.format_exception(type(error), error, trace),
                ]
            )
        )
    return None


def end_after_hook(error: BaseException, code: int = 1) -> None:
    """End the job after an uncaught error that the program's own hook got. The hook may or may not have shown it."""
    if not is_alone() and not _is_handled(error):
        _write_down(type(error), error, error.__traceback__)
        say_failure(code)
        _raised(type(error), error, error.__traceback__, code, shown=True)


def is_alone() -> bool:
    """True if no other process depends on this one: a program without MPI, or a world of size 1."""
    if not is_started():
        return True
    module = sys.modules["mpi4py.MPI"]
    return bool(module.Is_finalized() or module.COMM_WORLD.size == 1)


def end_unstarted(what: str, code: int = 1) -> None:
    """Print `what` happened, and end a job whose MPI this rank has not started. The rank must then exit with `code`.

    MPI is not started for that, because its start waits for all other ranks, and they may be busy or have left. With
    Open MPI's mpirun the exit code is enough. But it may crash if other ranks are just starting MPI, so they get a
    moment first. MPICH's launcher lets the others wait for a rank that has left, unless its process manager is told to
    end all.
    """
    place = launched_as(os.environ)
    if place is None or place[1] == 1:
        return
    flush()
    say(f"mpips: {what} on {_where(place[0], 0, place[1])}, before MPI has started: the job ends\n")
    time.sleep(LAST_WORDS)
    manager = os.environ.get("PMI_FD", "")
    if manager.isdigit():
        # These are messages of PMI 1, the protocol of MPICH's process manager.
        with suppress(OSError), socket.socket(fileno=int(manager)) as line:
            line.settimeout(ABORTED)
            line.sendall(b"cmd=init pmi_version=1 pmi_subversion=1\n")
            line.recv(1024)
            line.sendall(b"cmd=abort exitcode=%d\n" % code)
            # This returns when the launcher has read the message.
            line.recv(1024)


def end(what: str, text: str = "", code: int = 1, same: Hashable = None, told: bool = False) -> None:
    """Print `text` and `what` happened, unless a rank with an equal `same` prints it, and end the job with `code`.

    Returns only in the main thread of a world of size 1, which ends as any Python program does.

    Args:
        same: Equal on ranks that have the same error. By default `what`.
        told: Another rank has more to show of this error. It gets more time to do so.
    """
    from mpi4py import MPI

    from mpips.collectives.fabric.requests import send

    world = MPI.COMM_WORLD
    flush()
    if world.size == 1 and threading.current_thread() is threading.main_thread():
        say(text)
        return
    mark = hashlib.blake2b(repr(same or what).encode(), digest_size=DIGEST_BYTES).digest()
    # A thread other than the main one may call MPI only with THREAD_MULTIPLE. Without it, no message is sent.
    shared = threading.current_thread() is threading.main_thread() or MPI.Query_thread() == MPI.THREAD_MULTIPLE
    sayer = _sayer(world, mark, told) if shared else None
    if sayer is None:
        say(text)
        others = _tell(world, mark) if shared else 0
        say(f"mpips: {what} on {_where(world.rank, others, world.size)}: the job ends\n")
        time.sleep(LAST_WORDS)
    else:
        with suppress(MPI.Exception):
            message = send(world, bytearray(mark), sayer, SHARED)
            # The rank that prints the error ends all others.
            _wait(ABORTED, lambda: message.Test() and False)
    world.Abort(code)


def _raised(
    kind: type[BaseException],
    error: BaseException | None,
    trace: TracebackType | None,
    code: int = 1,
    shown: bool = False,
) -> None:
    """Print an uncaught error and end the job.

    If `shown`, a hook of the program may have printed it: print one line.
    """
    if getattr(error, "everywhere", False):
        _say_once(error)
        return
    if issubclass(kind, KeyboardInterrupt):
        say_failure(INTERRUPTED)
        end("interrupted", code=INTERRUPTED)
        return
    what = _sentence(kind, error, trace) if shown else kind.__name__
    text = "" if shown else "".join(traceback.format_exception(kind, error, trace))
    end(what, text, code, same=_identity(error, trace), told=_is_told(error))


def _write_down(kind: type[BaseException], error: BaseException | None, trace: TracebackType | None) -> None:
    """Record the error and its place for the log and for those who look at this process from outside."""
    sentence = "interrupted" if issubclass(kind, KeyboardInterrupt) else _sentence(kind, error, trace)
    recorder.write_failure(sentence, own=not isinstance(error, CollectiveError))
    LOG.info("uncaught: %s", sentence)


def _sentence(kind: type[BaseException], error: BaseException | None, trace: TracebackType | None) -> str:
    frames = [] if trace is None else list(traceback.walk_tb(trace))
    users = [place for place in frames if recorder.is_user_frame(place[0])] or frames
    at = f"{os.path.basename(users[-1][0].f_code.co_filename)}:{users[-1][1]}" if users else ""
    return recorder.with_line(f"{kind.__name__}: {error}", at)


def _identity(error: BaseException | None, trace: TracebackType | None) -> Hashable:
    """Return a value that is equal for errors that should be printed once.

    One of our sentences may be a ValueError on the rank with the mistake, and a CollectiveError, raised at other lines,
    on ranks that wait for it. So for these only the sentence counts.
    """
    sentence = _nameless(str(error))
    if getattr(error, "of_caller", False):
        return sentence
    frames = [] if trace is None else list(traceback.walk_tb(trace))
    return (type(error).__name__, sentence, *_lines(frames))


def _nameless(sentence: str) -> str:
    """Remove the rank at the start of a sentence, so that equal errors of two ranks compare equal."""
    return re.sub(r"^rank \d+: ", "", sentence)


def _is_told(error: BaseException | None) -> bool:
    """True if the sentence is ours and about the mistake of another rank."""
    from mpi4py import MPI

    named = re.match(r"(?:\w+: )?rank (\d+): ", str(error)) if getattr(error, "of_caller", False) else None
    return named is not None and int(named[1]) != MPI.COMM_WORLD.rank


def _say_once(error: BaseException | None) -> None:
    """Let rank 0 print an error which all ranks are known to raise. Each then ends by itself, with code 1."""
    from mpi4py import MPI

    # mpi4py.run has set a status that would abort the job, and cannot take it back.
    MPI._set_abort_status(0)  # type: ignore[attr-defined]
    if MPI.COMM_WORLD.rank == 0:
        say(f"{type(error).__name__}: {error}\n")


def _without_runner(trace: TracebackType | None) -> TracebackType | None:
    """Return the user's part of a traceback, without the frames that run the script."""
    while trace is not None and trace.tb_frame.f_code.co_filename.endswith(RUNNERS):
        trace = trace.tb_next
    return trace


def _users(error: BaseException, trace: TracebackType | None) -> TracebackType | None:
    """Return the part of a traceback that is the user's.

    If we raised the error ourselves, or marked it as the caller's, this is the part down to the user's last line; an
    error that we caught before it is left out, too. If the error was raised in code that we called, such as the forward
    pass of a model, only our frames are left out. Any other error may be a mistake of ours, and keeps all its frames.
    """
    whole: list[TracebackType] = []
    inner = trace
    while inner is not None:
        whole.append(inner)
        inner = inner.tb_next
    if getattr(error, "of_caller", False) or (whole and _is_raised_by_us(error, whole[-1])):
        before = error.__cause__ or error.__context__
        if before is not None and before.__traceback__ is not None and is_ours(before.__traceback__.tb_frame):
            error.__cause__, error.__suppress_context__ = None, True
        while whole and not recorder.is_user_frame(whole[-1].tb_frame):
            del whole[-1]
    elif whole and not recorder.is_user_frame(whole[-1].tb_frame) and not _is_framework(whole[-1].tb_frame):
        return trace
    kept = [one for one in whole if not is_ours(one.tb_frame)]
    if not kept:
        return trace
    for one, following in pairwise([*kept, None]):
        assert one is not None
        one.tb_next = following
    return kept[0]


def _is_raised_by_us(error: BaseException, innermost: TracebackType) -> bool:
    """True if a `raise` statement of ours has made this error, so that its sentence is meant for the user."""
    code = innermost.tb_frame.f_code.co_code
    meant = code[innermost.tb_lasti] == dis.opmap["RAISE_VARARGS"] and not isinstance(error, AssertionError)
    return meant and is_ours(innermost.tb_frame)


def _is_framework(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).startswith(("torch.", "jax."))


def _lines(frames: list[tuple[FrameType, int]]) -> Iterator[tuple[str, int]]:
    """Yield files and lines of the user's program. Ours are left out, because ranks of different roles differ there."""
    for frame, line in frames:
        if not is_ours(frame):
            yield frame.f_code.co_filename, line


def _sayer(world: MPI.Comm, mark: bytes, told: bool) -> int | None:
    """Return the rank that has announced this error, or None if this rank must print it.

    It must if another error was announced, or none after a while. Rank 0 does not wait, unless it was told of another
    rank's mistake.
    """
    found: list[tuple[int, bytes]] = []

    def heard() -> bool:
        found.extend(_receive(world, SAID))
        return bool(found)

    turn = PATIENCE + STAGGER * min(world.rank, PATIENCE / STAGGER) if world.rank else 0.0
    _wait(turn + 2 * PATIENCE * told, heard)
    return next((rank for rank, said in found if said == mark), None)


def _tell(world: MPI.Comm, mark: bytes) -> int:
    """Tell all others that this rank prints the error. Return the number of ranks that have it, too."""
    from mpi4py import MPI

    from mpips.collectives.fabric.requests import send

    others = set(range(world.size)) - {world.rank}
    ranks: set[int] = set()
    messages: list[MPI.Request] = []
    for rank in others:
        # The rank may have died.
        with suppress(MPI.Exception):
            messages.append(send(world, bytearray(mark), rank, SAID))

    def all_have() -> bool:
        for message in messages:
            with suppress(MPI.Exception):
                message.Test()
        ranks.update(rank for rank, _ in _receive(world, SHARED))
        return ranks >= others - _dead(world)

    _wait(PATIENCE, all_have)
    return len(ranks)


def _dead(world: MPI.Comm) -> set[int]:
    """Return the ranks that have died, if others survive deaths. If MPI itself has failed, return all ranks."""
    from mpi4py import MPI

    from mpips.collectives.fabric.failure import dead_ranks

    try:
        return set(dead_ranks(world))
    except MPI.Exception:
        return set(range(world.size))


def _receive(world: MPI.Comm, tag: int) -> Iterator[tuple[int, bytes]]:
    from mpi4py import MPI

    status = MPI.Status()
    try:
        while world.Iprobe(MPI.ANY_SOURCE, tag, status):
            mark = bytearray(DIGEST_BYTES)
            world.Recv(mark, status.source, tag)
            yield status.source, bytes(mark)
    except MPI.Exception:
        # A rank has died. Ack_failed makes MPI ignore it from the next probe on.
        if not survives():
            raise
        with suppress(MPI.Exception):
            world.Ack_failed()


def _wait(seconds: float, done: Callable[[], object]) -> None:
    clock = Clock()
    while not done() and clock.seconds() < seconds:
        time.sleep(0.002)


def _where(rank: int, others: int, size: int) -> str:
    if others and others == size - 1:
        return f"all {size} ranks"
    more = f" and {others} other{'s' if others > 1 else ''}" if others else ""
    return f"rank {rank} of {size}{more}"
