"""An uncaught error ends the job: it is printed once for all ranks that share it, and then all ranks are ended.

A rank other than 0 with an uncaught error waits a moment for another rank to announce the same error. Two errors count
as the same if their types, their messages (without the rank in front) and their places in the user's program are
equal. If mpips itself wrote the message, equal messages are enough. If another rank announces the same error, this
rank prints nothing. Otherwise this rank prints its own error, announces it to the other ranks, and ends the job. So an
error that only one rank has is always printed. A rank whose error is about another rank's mistake waits longer, because
the traceback of that other rank should be shown instead.
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
from itertools import pairwise, takewhile
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
# the standard library, and the folders of installed packages
STDLIB = os.path.dirname(os.__file__) + os.sep
INSTALLED = re.compile(r"/(?:site|dist)-packages/")
RUNNERS = (os.path.join("mpips", "__main__.py"), os.path.join("mpi4py", "run.py"), "<frozen runpy>", "runpy.py")
# the exit code after Ctrl-C, which shells also use
INTERRUPTED = 130
# Tags of messages on COMM_WORLD when a job ends. SAID: "I am printing this error". SHARED: "I raised the error that you
# are printing".
SAID, SHARED = 32101, 32102
DIGEST_BYTES = 16
# Seconds to wait for another rank to announce the error. Rank r waits r * STAGGER longer, but at most PATIENCE longer.
PATIENCE = 0.4
STAGGER = 0.01
# Seconds to let the launcher read what a rank has printed. When a rank aborts, MPICH's launcher drops unread output.
LAST_WORDS = 0.5
# seconds that a rank waits for the rank that has printed the error to end the job
ABORTED = 10.0


# errors for which this module's `sys.excepthook` was called, in a job of several ranks
_handled: list[BaseException] = []


@cache
def install_hooks() -> None:
    """From now on, print an uncaught exception in any thread with its rank, and end the job.

    Called when mpips is imported. Does not need MPI. If the program later sets hooks of its own, its hooks run first,
    and then `end_after_hook` ends the job.
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
                # A file beside the program, such as numpy.py, hides a module that _raised() imports. The program's own
                # error is about that file, so show it the usual way.
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
    # This must run before the atexit handlers, in which an open store would wait for ranks that wait for this one.
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
    """End the job if an exception has ended the main program and the program's own hook has shown it.

    Python keeps the last exception that it has shown in `sys.last_value`, but debuggers and test runners also set this
    variable. Only an exception that has left the outermost frame has ended the program.
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
    """Show an error that has left the program through `sys.excepthook`. Return the SystemExit that the hook raises.

    Return None if the hook raises none. If the hook fails with another error, print both errors, as Python does. If the
    hook is ours and the job has several ranks, this function does not return.
    """
    trace = error.__traceback__ = _users(error, _without_runner(error.__traceback__))
    try:
        sys.excepthook(type(error), error, trace)
    except SystemExit as left:
        return left
    except BaseException as failure:
        # The hook may raise any error. It must not keep the job from ending.
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
    """End the job after an uncaught error for which the program's own hook has run.

    The hook may or may not have shown the error, so one line about the error is printed.
    """
    if not is_alone() and not _is_handled(error):
        _write_down(type(error), error, error.__traceback__)
        say_failure(code)
        _raised(type(error), error, error.__traceback__, code, shown=True)


def is_alone() -> bool:
    """True if no other process depends on this one: MPI has not started or has ended, or the world has size 1."""
    if not is_started():
        return True
    module = sys.modules["mpi4py.MPI"]
    return bool(module.Is_finalized() or module.COMM_WORLD.size == 1)


def end_unstarted(what: str, code: int = 1) -> None:
    """Print what has happened (`what`), and end the job. Called on a rank that has not started MPI.

    The rank must then exit with `code`.

    MPI is not started only to abort it, because its start waits for all other ranks, and these may be busy or may have
    left. With Open MPI's mpirun the exit code is enough to end the job. But mpirun may crash if other ranks are just
    starting MPI, so this function gives them a moment. With MPICH the other ranks would wait forever for a rank that
    has left, so this function asks MPICH's process manager to end the job.
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
            # This returns when the process manager has read the message.
            line.recv(1024)


def end(what: str, text: str = "", code: int = 1, same: Hashable = None, told: bool = False) -> None:
    """Print `text` and `what` happened, and end the job with `code`. If another rank prints this error, do not print.

    Returns only in the main thread of a world of size 1, which ends as any Python program does.

    Args:
        what: What happened, for the line that ends with "the job ends".
        text: The text to print before this line, such as a traceback.
        code: The exit code of the job.
        same: A value that is equal on ranks that have the same error. Default: `what`.
        told: True if the error is about another rank's mistake. That rank then gets more time to print its traceback.
    """
    from mpi4py import MPI

    from mpips.collectives.fabric.requests import send

    world = MPI.COMM_WORLD
    flush()
    if world.size == 1 and threading.current_thread() is threading.main_thread():
        say(text)
        return
    mark = hashlib.blake2b(repr(same or what).encode(), digest_size=DIGEST_BYTES).digest()
    # A thread other than the main one may call MPI only with THREAD_MULTIPLE. Otherwise it exchanges no messages.
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
            # Wait to be killed: the rank that prints the error ends all others.
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

    If `shown` is True, a hook of the program may have printed the error already. Then print only one line.
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
    """Write the error and its place to the log and to the recorder, which `mpips why` reads from outside."""
    sentence = "interrupted" if issubclass(kind, KeyboardInterrupt) else _sentence(kind, error, trace)
    recorder.write_failure(sentence, own=not isinstance(error, CollectiveError))
    LOG.info("uncaught: %s", sentence)


def _sentence(kind: type[BaseException], error: BaseException | None, trace: TracebackType | None) -> str:
    frames = [] if trace is None else list(traceback.walk_tb(trace))
    # A line of the program tells the user more than a line of a package that it calls.
    users = [place for place in frames if _is_program(place[0])]
    users = users or [place for place in frames if recorder.is_user_frame(place[0])] or frames
    at = f"{os.path.basename(users[-1][0].f_code.co_filename)}:{users[-1][1]}" if users else ""
    return recorder.with_line(f"{kind.__name__}: {error}", at)


def _identity(error: BaseException | None, trace: TracebackType | None) -> Hashable:
    """Return a value that is equal on two ranks if their errors should be printed only once.

    When a caller's mistake breaks a collective call, the rank with the mistake may raise a ValueError. The ranks that
    wait for it raise a CollectiveError with the same message at other lines. So for such errors only the messages are
    compared.
    """
    sentence = _nameless(str(error))
    if getattr(error, "of_caller", False):
        return sentence
    frames = [] if trace is None else list(traceback.walk_tb(trace))
    return (type(error).__name__, sentence, *_lines(frames))


def _nameless(sentence: str) -> str:
    """Remove the rank at the start of an error message, so that equal errors of two ranks compare equal."""
    return re.sub(r"^rank \d+: ", "", sentence)


def _is_told(error: BaseException | None) -> bool:
    """True if mpips wrote the message of this error, and the message is about the mistake of another rank."""
    from mpi4py import MPI

    named = re.match(r"(?:\w+: )?rank (\d+): ", str(error)) if getattr(error, "of_caller", False) else None
    return named is not None and int(named[1]) != MPI.COMM_WORLD.rank


def _say_once(error: BaseException | None) -> None:
    """Let rank 0 print an error that all ranks are known to raise. Each rank then ends by itself, with code 1."""
    from mpi4py import MPI

    # mpi4py.run has set a status that would abort the job, and has no public call to reset it.
    MPI._set_abort_status(0)  # type: ignore[attr-defined]
    if MPI.COMM_WORLD.rank == 0:
        say(f"{type(error).__name__}: {error}\n")


def _without_runner(trace: TracebackType | None) -> TracebackType | None:
    """Return a traceback without its outermost frames, which belong to the runner of the script."""
    while trace is not None and trace.tb_frame.f_code.co_filename.endswith(RUNNERS):
        trace = trace.tb_next
    return trace


def _users(error: BaseException, trace: TracebackType | None) -> TracebackType | None:
    """Return the part of a traceback that the user needs to see.

    If mpips raised the error on purpose, or marked it as the caller's mistake, this part ends at the last line of the
    user's code. If mpips had caught another error before and raised this one in its place, the other error is not
    shown. If the error was raised below user or framework code that mpips called, such as the forward pass of a model,
    only the frames of mpips are left out. Any other error may be a mistake in mpips, and keeps all its frames: also one
    that a package such as NumPy raises when mpips calls it.
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
    else:
        inside = takewhile(lambda frame: not is_ours(frame), (one.tb_frame for one in reversed(whole)))
        if not any(_is_program(frame) or _is_framework(frame) for frame in inside):
            return trace
    kept = [one for one in whole if not is_ours(one.tb_frame)]
    if not kept:
        return trace
    for one, following in pairwise([*kept, None]):
        assert one is not None
        one.tb_next = following
    return kept[0]


def _is_raised_by_us(error: BaseException, innermost: TracebackType) -> bool:
    """True if a `raise` statement in mpips raised this error, so that its message is meant for the user."""
    code = innermost.tb_frame.f_code.co_code
    meant = code[innermost.tb_lasti] == dis.opmap["RAISE_VARARGS"] and not isinstance(error, AssertionError)
    return meant and is_ours(innermost.tb_frame)


def _is_program(frame: FrameType) -> bool:
    """True if a frame runs code of the program itself: not of Python, and not of an installed package."""
    file = frame.f_code.co_filename
    return recorder.is_user_frame(frame) and not (file.startswith((STDLIB, "<frozen ")) or INSTALLED.search(file))


def _is_framework(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).startswith(("torch.", "jax."))


def _lines(frames: list[tuple[FrameType, int]]) -> Iterator[tuple[str, int]]:
    """Yield the file and line of each frame, except for frames of mpips.

    Ranks of different roles, such as workers and servers, reach the same error through different lines of mpips.
    """
    for frame, line in frames:
        if not is_ours(frame):
            yield frame.f_code.co_filename, line


def _sayer(world: MPI.Comm, mark: bytes, told: bool) -> int | None:
    """Return the rank that has announced this error, or None if this rank must print it.

    This rank must print its error if another rank has announced a different error, or if no rank has announced an error
    after a while. Rank 0 does not wait, unless its error is about another rank's mistake (`told`).
    """
    found: list[tuple[int, bytes]] = []

    def heard() -> bool:
        found.extend(_receive(world, SAID))
        return bool(found)

    turn = PATIENCE + STAGGER * min(world.rank, PATIENCE / STAGGER) if world.rank else 0.0
    _wait(turn + 2 * PATIENCE * told, heard)
    return next((rank for rank, said in found if said == mark), None)


def _tell(world: MPI.Comm, mark: bytes) -> int:
    """Tell all other ranks that this rank prints the error. Return the number of other ranks with the same error."""
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
    """Return the ranks that are known to have died. If MPI itself has failed, return all ranks."""
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
        # A rank has died. After Ack_failed, later probes no longer fail because of this rank.
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
