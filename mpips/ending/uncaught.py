"""An uncaught error ends the job: it is said once for all ranks that share it, and then all ranks are ended.

A rank with an uncaught error that is not rank 0 waits a moment for another that says the same: the same type and
sentence (but for the rank in front of it), from the same place of the user's program; or, where the sentence is ours,
the same sentence. If so it keeps silent; if another error is said, or none, it says its own, tells the others so, and
ends the job. So an error that one rank alone has is always said. A rank that has only heard of another's mistake waits
longer: the lines to be seen are that rank's.
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
INTERRUPTED = 130  # the exit code after Ctrl-C, as of shells
SAID, SHARED = 32101, 32102  # tags on COMM_WORLD of a job that ends: "I say this error", "I have it, too"
DIGEST_BYTES = 16
PATIENCE = 0.4  # seconds to wait whether another rank says it, and a little more on every rank
STAGGER = 0.01
LAST_WORDS = 0.5  # seconds for the launcher to read what was printed; MPICH's drops the rest when a rank aborts
ABORTED = 10.0  # seconds to be ended by the rank that has said it


_handled: list[BaseException] = []
"""The error that this module's `sys.excepthook` has been called with, in a rank that has others."""


@cache
def install_hooks() -> None:
    """Say an uncaught exception in any thread of a rank, with the rank, and end the job, from now on.

    Called when mpips is imported; does not need MPI. A program may set hooks of its own later. They run, and then the
    job is ended all the same: `end_after_hook`.
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
            except ImportError:  # a file beside the program hides a module, as numpy.py does: its own error says so
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
    # Before the handlers of atexit: an open store would wait there for ranks that wait for this one.
    threading._register_atexit(_end_after_program)  # type: ignore[attr-defined]


def _see_past_hooks_of_threads() -> None:
    """End the job after an uncaught exception in a thread, whatever `threading.excepthook` is by then."""
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
    """End the job where the main program was left by an exception that a hook of its own has shown.

    Python keeps the last exception that it has shown, and so do debuggers and test runners. That of the program has
    left the outermost frame.
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
    """Show what has left the program, by `sys.excepthook`. Where that fails, say both errors, as Python does.

    Comes back only where the hook is not ours, or this process is alone. Return the SystemExit that it has raised.
    """
    trace = error.__traceback__ = _users(error, _without_runner(error.__traceback__))
    try:
        sys.excepthook(type(error), error, trace)
    except SystemExit as left:
        return left
    except BaseException as failure:  # whatever it is, the job is to end
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
    """End the job after an uncaught error that a hook of the program has been given: it may have shown it, or not."""
    if not is_alone() and not _is_handled(error):
        _write_down(type(error), error, error.__traceback__)
        say_failure(code)
        _raised(type(error), error, error.__traceback__, code, shown=True)


def is_alone() -> bool:
    """Return whether no other process depends on this one: a program without MPI, or a world of size 1."""
    if not is_started():
        return True
    module = sys.modules["mpi4py.MPI"]
    return bool(module.Is_finalized() or module.COMM_WORLD.size == 1)


def end_unstarted(what: str, code: int = 1) -> None:
    """Say `what` it was, and end a job whose MPI this rank has not started, with `code`; the rank is to leave with it.

    MPI is not started for it: that waits for all others, who may be busy, or have left. To Open MPI's mpirun the code
    is enough, though it may crash when others are just starting MPI, so they are given a moment; MPICH's lets the
    others wait for a rank that has left, unless its process manager is told to end all.
    """
    place = launched_as(os.environ)
    if place is None or place[1] == 1:
        return
    flush()
    say(f"mpips: {what} on {_where(place[0], 0, place[1])}, before MPI has started: the job ends\n")
    time.sleep(LAST_WORDS)
    manager = os.environ.get("PMI_FD", "")
    if manager.isdigit():
        with suppress(OSError), socket.socket(fileno=int(manager)) as line:  # as of PMI 1
            line.settimeout(ABORTED)
            line.sendall(b"cmd=init pmi_version=1 pmi_subversion=1\n")
            line.recv(1024)
            line.sendall(b"cmd=abort exitcode=%d\n" % code)
            line.recv(1024)  # comes back when the launcher has heard it


def end(what: str, text: str = "", code: int = 1, same: Hashable = None, told: bool = False) -> None:
    """Say `text` and `what` it was, unless a rank with an equal `same` does; end the job with `code`.

    `told`: another rank has more to show of it, and is given the time. The default of `same` is `what`.
    Comes back only in a world of size 1, which ends as any Python program does, and only in its main thread.
    """
    from mpi4py import MPI

    from mpips.collectives.fabric.requests import send

    world = MPI.COMM_WORLD
    flush()
    if world.size == 1 and threading.current_thread() is threading.main_thread():
        say(text)
        return
    mark = hashlib.blake2b(repr(same or what).encode(), digest_size=DIGEST_BYTES).digest()
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
            _wait(ABORTED, lambda: message.Test() and False)  # the rank that says it ends all
    world.Abort(code)


def _raised(
    kind: type[BaseException],
    error: BaseException | None,
    trace: TracebackType | None,
    code: int = 1,
    shown: bool = False,
) -> None:
    """Say an uncaught error and end the job. `shown`: a hook of the program may have said it; a line is said anyway."""
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
    """Leave to who looks from outside, and to the log, what this process ends by, and where."""
    sentence = "interrupted" if issubclass(kind, KeyboardInterrupt) else _sentence(kind, error, trace)
    recorder.fails(sentence, own=not isinstance(error, CollectiveError))
    LOG.info("uncaught: %s", sentence)


def _sentence(kind: type[BaseException], error: BaseException | None, trace: TracebackType | None) -> str:
    frames = [] if trace is None else list(traceback.walk_tb(trace))
    users = [place for place in frames if recorder.is_users(place[0])] or frames
    at = f"{os.path.basename(users[-1][0].f_code.co_filename)}:{users[-1][1]}" if users else ""
    return recorder.with_line(f"{kind.__name__}: {error}", at)


def _identity(error: BaseException | None, trace: TracebackType | None) -> Hashable:
    """Return what errors have in common that are said once. On the rank with the mistake our sentence may be a
    ValueError, and on those that wait for it, at other lines, a CollectiveError."""
    sentence = _nameless(str(error))
    if getattr(error, "of_caller", False):
        return sentence
    frames = [] if trace is None else list(traceback.walk_tb(trace))
    return (type(error).__name__, sentence, *_lines(frames))


def _nameless(sentence: str) -> str:
    """Return a sentence without the rank in front, so that the same words of two ranks count as the same."""
    return re.sub(r"^rank \d+: ", "", sentence)


def _is_told(error: BaseException | None) -> bool:
    """Return whether the sentence is ours and about the mistake of another rank."""
    from mpi4py import MPI

    named = re.match(r"(?:\w+: )?rank (\d+): ", str(error)) if getattr(error, "of_caller", False) else None
    return named is not None and int(named[1]) != MPI.COMM_WORLD.rank


def _say_once(error: BaseException | None) -> None:
    """An error that says of itself that all ranks raise it: rank 0 says it, and each ends by itself, with code 1."""
    from mpi4py import MPI

    MPI._set_abort_status(0)  # type: ignore[attr-defined]  # mpi4py.run has set it, and cannot take it back
    if MPI.COMM_WORLD.rank == 0:
        say(f"{type(error).__name__}: {error}\n")


def _without_runner(trace: TracebackType | None) -> TracebackType | None:
    """The part of a traceback that is the user's: what runs the script is left out."""
    while trace is not None and trace.tb_frame.f_code.co_filename.endswith(RUNNERS):
        trace = trace.tb_next
    return trace


def _users(error: BaseException, trace: TracebackType | None) -> TracebackType | None:
    """Return the part of a traceback that is the user's.

    Of an error that we raise ourselves, or mark as the caller's, that is down to the user's last line, and what was
    caught on the way to it, by us, is left out, too. Of one that was raised in what we have called, such as the forward
    pass of a model, our lines are left out. Any other may be a mistake of ours, and keeps all its lines.
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
        while whole and not recorder.is_users(whole[-1].tb_frame):
            del whole[-1]
    elif whole and not recorder.is_users(whole[-1].tb_frame) and not _is_framework(whole[-1].tb_frame):
        return trace
    kept = [one for one in whole if not is_ours(one.tb_frame)]
    if not kept:
        return trace
    for one, following in pairwise([*kept, None]):
        assert one is not None
        one.tb_next = following
    return kept[0]


def _is_raised_by_us(error: BaseException, innermost: TracebackType) -> bool:
    """Return whether a `raise` of ours has made this error, whose sentence is then meant for the user."""
    code = innermost.tb_frame.f_code.co_code
    meant = code[innermost.tb_lasti] == dis.opmap["RAISE_VARARGS"] and not isinstance(error, AssertionError)
    return meant and is_ours(innermost.tb_frame)


def _is_framework(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).startswith(("torch.", "jax."))


def _lines(frames: list[tuple[FrameType, int]]) -> Iterator[tuple[str, int]]:
    """Files and lines of the user's program; ranks of different roles may be at different places of ours."""
    for frame, line in frames:
        if not is_ours(frame):
            yield frame.f_code.co_filename, line


def _sayer(world: MPI.Comm, mark: bytes, told: bool) -> int | None:
    """Return the rank that says this error already; None where this one is to say it, after a while or because another
    error is being said. Rank 0 does not wait, unless it was told of another rank's mistake."""
    found: list[tuple[int, bytes]] = []

    def heard() -> bool:
        found.extend(_receive(world, SAID))
        return bool(found)

    turn = PATIENCE + STAGGER * min(world.rank, PATIENCE / STAGGER) if world.rank else 0.0
    _wait(turn + 2 * PATIENCE * told, heard)
    return next((rank for rank, said in found if said == mark), None)


def _tell(world: MPI.Comm, mark: bytes) -> int:
    """Tells all others that this rank says it; the number of those that have it, too."""
    from mpi4py import MPI

    from mpips.collectives.fabric.requests import send

    others = set(range(world.size)) - {world.rank}
    ranks: set[int] = set()
    messages: list[MPI.Request] = []
    for rank in others:
        with suppress(MPI.Exception):  # to one that has died
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
    """Ranks that have died, where others outlive them; all, where MPI has failed and nobody can be heard."""
    from mpi4py import MPI

    from mpips.collectives.fabric.failure import failed

    try:
        return set(failed(world))
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
    except MPI.Exception:  # a rank has died: from the next look on it is passed over
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
