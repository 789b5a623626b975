"""The page of this process: the file in which it records what it does, so that other processes can read it.

The page is opened when the process becomes a rank, removed when the process ends well, and kept when the process fails.
It is in the folder of the job (`folders`). When the process gets the signal `SIGNAL`, it writes the stacks of all its
threads into a file beside the page. With `MPIPS_RECORDER=0` the process has no page.

The page has a *lane* for each communicator and each store, which shows the last call made on it (`Marks`).
"""

from __future__ import annotations

import atexit
import faulthandler
import os
import signal
import socket
import sys
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any, Protocol
from urllib.parse import unquote

from mpips.collectives.machine import count_local_ranks
from mpips.collectives.recorder import dump, folders
from mpips.collectives.recorder import page as pages
from mpips.collectives.recorder.page import Page
from mpips.collectives.recorder.ring import WORD, RecordRing, form

VARIABLE = "MPIPS_RECORDER"
DUMP_VARIABLE = "MPIPS_DUMP_DIR"
# a signal that no other library uses; on it a rank writes the stacks of its threads into a file
SIGNAL = int(signal.SIGRTMAX) - 6
# A wait that lasts this long is written to the page, and then written again at this interval.
LASTING_SECONDS = 0.2
# the length limit of the message that says how a rank has ended
LONGEST_BYTES = 3800
# the indexes of two words in the head of the page
WAITED = pages.AT["waited_ns"]
WAITED_TIMES = pages.AT["waits"]
# Packages through which the user's program may call this package. `user_line` skips their frames.
BETWEEN = ("mpips", "torch", "jax", "threading", "contextlib", "runpy", "mpi4py")


class RankState:
    """The rank, role, generation and training step of this process. The modules that know these values set them.

    -1 and "" mean unknown. Role, generation and step are written to the page as well.

    Attributes:
        name: The start of each log line: "rank 3", or the name of a process that is not a rank.
    """

    def __init__(self) -> None:
        self.name = self._role = ""
        self.rank = self._generation = self._step = -1

    def take(self, role: str, member: int) -> None:
        """Set the role, and the number in the role. A rank that replaces a dead rank gets the dead rank's number."""
        _identity["member"] = member
        self.role = role

    @property
    def role(self) -> str:
        return self._role

    @role.setter
    def role(self, role: str) -> None:
        self._role = role
        _identity["role"] = role
        page.write(pages.IDENTITY, _identity)

    @property
    def generation(self) -> int:
        return self._generation

    @generation.setter
    def generation(self, generation: int) -> None:
        self._generation = generation
        page.set("generation", generation + 1)

    @property
    def step(self) -> int:
        return self._step

    @step.setter
    def step(self, step: int) -> None:
        self._step = step
        page.set("step", step + 1)
        page.set("step_ns", time.monotonic_ns())
        if is_traced:
            ring.end(ring.begin(form(0, "step"), step))


# Until begin() opens a file, the page is private memory, so that callers need not ask whether there is a page.
page = Page()
rank_state = RankState()
_identity: dict[str, Any] = {}
_notes: dict[str, float] = {}
# thread id -> the wait of that thread, as it is written on the page
_waits: dict[int, dict[str, Any]] = {}
# a lock that guards _waits
_lock = threading.Lock()
# the files to remove when the process ends: the page, and the file for stacks
_paths: list[Path] = []
# identity of a communicator -> its ranks, and how many communicators of the same ranks were made before it
_communicators: dict[int, dict[str, Any]] = {}
# table name -> the words on the page that hold the table's numbers
_tables: dict[str, memoryview] = {}


def is_wanted(environment: Mapping[str, str] = os.environ) -> bool:
    """True unless `MPIPS_RECORDER` is 0. Raises ValueError if the variable is neither 0, 1 nor empty."""
    word = environment.get(VARIABLE, "").strip()
    if word not in ("", "0", "1"):
        raise ValueError(f"{VARIABLE}={word!r} is unknown: give 0 for no pages, or leave it unset")
    return word != "0"


def begin(rank: int, size: int) -> None:
    """Open this rank's page. Later calls in the same process do nothing.

    Raises:
        OSError: The page cannot be opened. The job can continue without a page.
    """
    global page, ring
    answer_usr2()
    if not _paths and os.environ.get(VARIABLE, "").strip() != "0":
        folder = folders.make_folder(folders.job_name(alone=size == 1))
        path = folder / f"{os.getpid()}{folders.PAGE}"
        try:
            if hosts := os.environ.get(folders.HOSTS):
                folders.write(folder, folders.HOSTS_FILE, unquote(hosts))
            opened = Page(path)
        except OSError:
            folders.remove_if_empty(folder)
            raise
        _paths.append(path)
        atexit.register(_remove_page)
        opened.set("pid", os.getpid())
        opened.set("thread", threading.main_thread().ident or 0)
        opened.set("began_ns", time.time_ns())
        _identity.update(rank=rank, size=size, host=socket.gethostname(), program=[word[:100] for word in sys.argv[:8]])
        opened.write(pages.IDENTITY, _identity)
        opened.write(pages.NOTES, _notes)
        page = opened
        if not is_traced:
            ring = page.ring
        _write_stacks_on_signal(folder / f"{os.getpid()}{folders.STACKS}")
        os.register_at_fork(after_in_child=_start_without_page)


def path_beside_page(suffix: str) -> Path | None:
    """Return the path of this process' page, with another suffix, or None if the process has no page."""
    return _paths[0].with_suffix(suffix) if _paths else None


def copy_identity() -> dict[str, Any]:
    """Return a copy of the identity on the page: rank, size, host, program, and (once known) role and member."""
    return dict(_identity)


def _write_stacks_on_signal(path: Path) -> None:
    if signal.getsignal(SIGNAL) != signal.SIG_DFL:
        return
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    _paths.append(path)
    faulthandler.register(SIGNAL, file=fd, all_threads=True)
    page.set("signal", SIGNAL)


def answer_usr2() -> None:
    """From now on, write a dump on SIGUSR2, or print why that fails. If the program has set a handler, keep it."""
    if signal.getsignal(signal.SIGUSR2) == signal.SIG_DFL:
        # Python allows handlers to be set only in the main thread.
        with suppress(ValueError):
            signal.signal(signal.SIGUSR2, _on_usr2)


def _on_usr2(*_: object) -> None:
    if not os.environ.get(DUMP_VARIABLE):
        _print_line(
            f"SIGUSR2 asks for a dump, but {DUMP_VARIABLE} is not set: set it before the job starts, or use "
            "`mpips why --dump DIR`"
        )
    elif not _paths:
        _print_line(
            f"SIGUSR2 asks for a dump, but this process has no page: MPI has not started in it, or {VARIABLE}=0"
        )
    elif path := _dump():
        _print_line(f"dumped to {path}")


def _print_line(text: str) -> None:
    # Use os.write, because a signal handler that prints may interrupt another print, which Python refuses.
    who = f"rank {_identity['rank']}" if "rank" in _identity else f"process {os.getpid()}"
    with suppress(OSError):
        os.write(2, f"mpips: {who}: {text}\n".encode())


def write_failure(sentence: str, own: bool = False) -> None:
    """Write to the page that this rank has failed, and keep the page when the process ends.

    Also writes a dump if `MPIPS_DUMP_DIR` is set.

    Args:
        sentence: What went wrong.
        own: True if the failure began in this rank's program, False if it follows from another failure. A failure that
            follows from another one does not replace an earlier failure.
    """
    if not own and any(_failures):
        return
    while len(pages.encode(sentence)) > LONGEST_BYTES:
        sentence = sentence[: len(sentence) * 9 // 10]
    page.write(pages.END, {"failed": sentence, "own": own, "at_ns": time.monotonic_ns()})
    page.words[pages.AT["failures"]] += 1
    _failures.append(own)
    _dump()


def write_exit_code(code: int) -> None:
    """Write to the page that the program left with this exit code, unless a failure has already been written."""
    if not _failures:
        write_failure(f"exit code {code}", own=True)


def _dump() -> Path | None:
    """Write this rank's page as JSON into `MPIPS_DUMP_DIR`. Return the file, or None if nothing was written."""
    folder = os.environ.get(DUMP_VARIABLE)
    if folder and _paths:
        try:
            return dump.write_rank(_paths[0], Path(folder) / _paths[0].parent.name)
        except OSError as error:
            _print_line(f"no dump: {DUMP_VARIABLE}={folder!r} cannot be written: {error.strerror or error}")
    return None


# for each failure that write_failure() has written, its argument `own`
_failures: list[bool] = []


def count_checkpoint() -> None:
    """Count a checkpoint that this rank has written."""
    page.words[pages.AT["checkpoints"]] += 1


def add_communicator(identity: int, ranks: Sequence[int]) -> None:
    """Write to the page which ranks of the job a communicator connects.

    The page keeps the newest `KNOWN_COMMUNICATORS` communicators, even after they are freed.
    """
    text = ",".join(map(str, ranks))
    place = _last_places[text] = _last_places.get(text, -1) + 1
    _communicators[identity] = {"ranks": text, "place": place}
    while len(_communicators) > KNOWN_COMMUNICATORS or len(pages.encode(_communicators)) > pages.JSON_BYTES:
        del _communicators[next(iter(_communicators))]
    page.write(pages.COMMUNICATORS, _communicators)


def count_communicators() -> int:
    """Return the number of communicators that this process has made, including those that were freed."""
    return sum(1 + last for last in _last_places.values())


# ranks, as text -> the number of communicators of these ranks that this process has made, minus 1
_last_places: dict[str, int] = {}
KNOWN_COMMUNICATORS = 32


def clear_failures() -> None:
    """Take back the failures that `write_failure` has written, because the program has recovered from them."""
    page.write(pages.END, {})
    _failures.clear()


def _remove_page() -> None:
    if _failures:
        return
    # Other ranks may still begin to wait for this rank. The file with the suffix `.ended` tells them that the rank has
    # ended (see `find_ended`).
    if _paths and _identity["size"] > 1:
        with suppress(OSError):
            (_paths[0].parent / f"{_identity['rank']}{folders.PROGRAM_ENDED}").touch(0o600)
    for path in _paths:
        with suppress(OSError):
            path.unlink()
    with suppress(IndexError):
        folders.remove_if_empty(_paths[0].parent, count_local_ranks())


def find_ended(ranks: Sequence[int]) -> list[int]:
    """Return which of the given ranks of the job have ended well on this host."""
    ended = []
    for rank in ranks if _paths else ():
        with suppress(OSError):
            written = (_paths[0].parent / f"{rank}{folders.PROGRAM_ENDED}").stat().st_mtime
            # An older file was left by an earlier job of the same name.
            if written > _process_began():
                ended.append(rank)
    return ended


@cache
def _process_began() -> float:
    """Return the Unix time at which this process started. No rank of its job has ended before, as MPI starts later."""
    ticks = int(Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()[19])
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks / os.sysconf("SC_CLK_TCK")


def _start_without_page() -> None:
    # A forked child is not a rank, and must not write to its parent's page or remove it.
    global page, ring
    page = Page()
    untrace()
    ring = page.ring
    _waits.clear()
    _notes.clear()
    _tables.clear()
    _paths.clear()
    atexit.unregister(_remove_page)


def note(*unnamed: object, **numbers: float) -> None:
    """Report numbers of this rank's training, such as `step=40, loss=0.3`, to the tools that watch a job.

    The numbers are written into this rank's page, a file in memory. Nothing is sent, and no other rank takes part. A
    number replaces an earlier number of the same name. `mpips why` and `mpips top` show `step` beside what the rank
    does. A Trainer calls `note` by itself. If one number of a call is refused, none of them is reported.

    Args:
        numbers: Values that float() takes, by name. `step` must be at least 0.

    Raises:
        ValueError: A value is not a number, or there are more names than a page holds.
        TypeError: A number has no name.
    """
    if unnamed:
        raise TypeError(
            "note takes numbers by name, such as note(step=40, loss=0.3); mpips.chaos.note(step, value) is for jobs "
            "that `mpips chaos` watches"
        )
    notes = dict(_notes)
    for name, number in numbers.items():
        try:
            notes[name] = float(number)
        except (TypeError, ValueError, OverflowError):
            raise ValueError(f"note: {name} is not a number: pass a float, such as tensor.item()") from None
    step = notes.pop("step", None)
    if step is not None and not 0 <= step < 1 << 53:
        raise ValueError(f"note: step={step} is not a step: pass a whole number of at least 0")
    if (length := len(pages.encode(notes))) > pages.JSON_BYTES:
        longest = max(notes, key=len)
        raise ValueError(
            f"note: the {len(notes)} names and numbers of this rank take {length} bytes, and its page has room for "
            f"{pages.JSON_BYTES}: note fewer, or shorter names (the longest begins with {longest[:40]!r})"
        )
    if step is not None:
        rank_state.step = int(step)
    _notes.update(notes)
    page.write(pages.NOTES, _notes)


def write_load(nbytes: int, queued: int, pushed: Mapping[str, int], **more: Any) -> None:
    """Write the load of this server to its page.

    Args:
        nbytes: Bytes that the server has received.
        queued: Requests that wait at the server.
        pushed: Bytes received from each worker.
        more: Any of `room` (bytes that new rows of its tables may take), `rounds` (rounds that a quorum has closed)
            and `missed` (how many of these rounds each worker missed).
    """
    content = {"at_ns": time.monotonic_ns(), "nbytes": nbytes, "queued": queued, "pushed": pushed, **more}
    page.write(pages.LOAD, content)


def table_numbers(table: str) -> memoryview:
    """Return the words of the page that hold the numbers of an embedding table, in the order of `page.TABLE`."""
    if table not in _tables:
        _tables[table] = page.take_table(table)
    return _tables[table]


def count_exchange(nbytes: int) -> None:
    """Count a finished exchange of parameters, in which this rank sent and received `nbytes` in all."""
    words, at = page.words, pages.AT
    words[at["exchanges"]] += 1
    words[at["exchanged_bytes"]] += nbytes
    words[at["exchange_ns"]] = time.monotonic_ns()


# ---- waits


def write_wait(what: str, began: float, late: Sequence[int]) -> None:
    """Write to the page that this thread is waiting.

    Args:
        what: What the thread waits for.
        began: The start of the wait, in monotonic seconds.
        late: The ranks that the thread waits for.
    """
    thread, current = threading.get_ident(), threading.current_thread()
    other = "" if current is threading.main_thread() else current.name[:60]
    with _lock:
        known = _waits.get(thread)
        line = known["line"] if known is not None and known["what"] == what else user_line(sys._getframe(1))
        _waits[thread] = {
            "what": what[:500],
            "since_ns": int(began * 1e9),
            "late": list(late)[:64],
            "line": line,
            "thread": other,
        }
        page.write(pages.WAITS, list(_waits.values()))


def count_wait(seconds: float, written: bool) -> None:
    """Count a wait that has ended. If `write_wait` has `written` the wait to the page, remove it from the page."""
    words = page.words
    words[WAITED] += int(seconds * 1e9)
    words[WAITED_TIMES] += 1
    if written:
        with _lock:
            _waits.pop(threading.get_ident(), None)
            page.write(pages.WAITS, list(_waits.values()))


def is_user_frame(frame: FrameType) -> bool:
    """True if a frame runs code of the user's program, or of a package that is not in `BETWEEN`."""
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] not in BETWEEN


def user_line(frame: FrameType | None) -> str:
    """Return the innermost line of the user's program, such as "train.py:41, load_batch", or "" if there is none."""
    while frame is not None:
        if is_user_frame(frame):
            code = frame.f_code
            inside = "" if code.co_name == "<module>" else f", {code.co_name}"
            return f"{os.path.basename(code.co_filename)}:{frame.f_lineno}{inside}"
        frame = frame.f_back
    return ""


def with_line(what: str, line: str) -> str:
    """Append a line of the program to a text, in parentheses. If the text ends with parentheses, use these."""
    if not line:
        return what
    return f"{what[:-1]}; {line})" if what.endswith(")") else f"{what} ({line})"


# ---- records with times


class Timeable(Protocol):
    """A plan or a store. During a trace it records the time of every call, and otherwise only of long calls."""

    def set_timed(self, every: bool) -> None:
        """From now on, record the time of every call if `every` is True, and otherwise only of long calls."""


# Calls of this many bytes or more are always timed. Timing takes about 3 us, which is more than 1 % of the time of a
# shorter call.
LONG_BYTES = 16 << 20
# the ring into which records are written: the page's own, or during a trace the one that trace() was given
ring = page.ring
is_traced = False
_timeable: weakref.WeakSet[Timeable] = weakref.WeakSet()
# a lock that guards ring, is_traced and _timeable
_timing = threading.Lock()


def trace(into: RecordRing) -> None:
    """From now on, record every call of this process, short or long, into the given ring instead of the page's ring.

    Calls that have already begun may be missing. This function may be called from any thread.
    """
    global ring, is_traced
    with _timing:
        ring, is_traced = into, True
        for timeable in list(_timeable):
            timeable.set_timed(True)


def untrace() -> None:
    """End the trace. Calls that have already begun still write their ends into the trace's ring. Later calls do not."""
    global ring, is_traced
    with _timing:
        ring, is_traced = page.ring, False
        for timeable in list(_timeable):
            timeable.set_timed(False)


def add_timeable(timeable: Timeable) -> None:
    """Call `set_timed` of a plan or store now, and whenever a trace begins or ends. Keeps only a weak reference."""
    with _timing:
        _timeable.add(timeable)
        timeable.set_timed(is_traced)


def begin_rare(operation: str, subject: str = "") -> tuple[RecordRing, int]:
    """Begin the record of a rare operation, such as a checkpoint or a recovery.

    Rare operations are always recorded, even when no trace runs. Return the ring, and the sequence number to pass to
    the ring's `end`.
    """
    into = ring
    return into, into.begin(form(0, operation, subject, line=user_line(sys._getframe(1))))


# ---- marks


class Marks:
    """The lane of one communicator or store on this process' page.

    Each call writes a word that identifies it, the *mark*, into the lane. So the mark always shows the last call. If
    the page has no free lane, marks go into private memory, which other processes cannot read.
    """

    def __init__(self, identity: int) -> None:
        self._page = page
        self.identity = identity
        self._lane = page.take_lane(identity)
        at = Page.mark_at(max(self._lane, 0))
        # The mark. A call sets it to 2^32 * the number of the call + a token. A token is a number that stands for the
        # text of a call.
        self.word = page.words[at : at + 1] if self._lane >= 0 else memoryview(bytearray(8)).cast(WORD)

    def name(self, token: int, text: str) -> None:
        """Write to the page the text that a token of this lane stands for."""
        if self._lane >= 0:
            self._page.name(self._lane, token, text)

    def new_token(self, text: str) -> int:
        """Return a new token for a text. The token is unique within the page, not only within its lane."""
        return self._page.new_token(text)

    def close(self) -> None:
        """Free the lane, so that another communicator or store can use it."""
        if self._lane >= 0:
            self._page.give_lane(self._lane)
            self._lane = -1
