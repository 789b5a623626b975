"""This process' page: opened when the process is a rank, kept where it dies, removed where it ends well.

It lies in the folder of its job (`folders`). Beside it a signal writes the stacks of all threads into a file.
`MPIPS_RECORDER=0` opens none.
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
from mpips.collectives.recorder.ring import WORD, Ring, form

VARIABLE = "MPIPS_RECORDER"
DUMP_VARIABLE = "MPIPS_DUMP_DIR"
SIGNAL = int(signal.SIGRTMAX) - 6
"""A signal that nobody else uses, and that a rank answers by the stacks of its threads."""
LASTING_SECONDS = 0.2
"""Of a wait that is written down, and between two looks at who is late."""
LONGEST_BYTES = 3800
"""Of the sentence by which a rank ends."""
WAITED, WAITED_TIMES = pages.AT["waited_ns"], pages.AT["waits"]
BETWEEN = ("mpips", "torch", "jax", "threading", "contextlib", "runpy", "mpi4py")
"""Packages whose lines stand between a line of the user's program and a call of ours."""


class Place:
    """Hold who this process is in its job, and where in its work. Whoever knows writes it; -1 and "" are unknown.

    `name` is what lines of the log begin with: "rank 3", or what a process that is no rank calls itself.
    """

    def __init__(self) -> None:
        self.name = self._role = ""
        self.rank = self._generation = self._step = -1

    def take(self, role: str, member: int) -> None:
        """Have a role from now on, as its so-manieth: the dead rank's where this one takes its place."""
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


page = Page()
"""Before the process is known to be a rank, in memory that nobody reads."""
place = Place()
_identity: dict[str, Any] = {}
_notes: dict[str, float] = {}
_waits: dict[int, dict[str, Any]] = {}
_lock = threading.Lock()
_paths: list[Path] = []
_communicators: dict[int, dict[str, Any]] = {}
_tables: dict[str, memoryview] = {}


def is_wanted(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether ranks have pages. ValueError where the variable says neither."""
    word = environment.get(VARIABLE, "").strip()
    if word not in ("", "0", "1"):
        raise ValueError(f"{VARIABLE}={word!r} is unknown: give 0 for no pages, or leave it unset")
    return word != "0"


def begin(rank: int, size: int) -> None:
    """Open this rank's page, once for the process. OSError where it cannot be: then the job goes on without."""
    global page, ring
    answer_usr2()
    if not _paths and os.environ.get(VARIABLE, "").strip() != "0":
        here = folders.make(folders.job_name(alone=size == 1))
        path = here / f"{os.getpid()}{folders.PAGE}"
        try:
            if hosts := os.environ.get(folders.HOSTS):
                folders.write(here, folders.HOSTS_FILE, unquote(hosts))
            opened = Page(path)
        except OSError:
            folders.leave(here)
            raise
        _paths.append(path)
        atexit.register(_end)
        opened.set("pid", os.getpid())
        opened.set("thread", threading.main_thread().ident or 0)
        opened.set("began_ns", time.time_ns())
        _identity.update(rank=rank, size=size, host=socket.gethostname(), program=[word[:100] for word in sys.argv[:8]])
        opened.write(pages.IDENTITY, _identity)
        opened.write(pages.NOTES, _notes)
        page = opened
        if not is_traced:
            ring = page.ring
        _answer_signals(here / f"{os.getpid()}{folders.STACKS}")
        os.register_at_fork(after_in_child=_forget)


def beside(suffix: str) -> Path | None:
    """Return where a file of this process with that suffix lies beside its page; None where it has no page."""
    return _paths[0].with_suffix(suffix) if _paths else None


def who() -> dict[str, Any]:
    """Return what the page says of who this rank is."""
    return dict(_identity)


def _answer_signals(path: Path) -> None:
    if signal.getsignal(SIGNAL) != signal.SIG_DFL:
        return
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    _paths.append(path)
    faulthandler.register(SIGNAL, file=fd, all_threads=True)
    page.set("signal", SIGNAL)


def answer_usr2() -> None:
    """Write a dump upon SIGUSR2, or say why there is none, from now on; a program's own handler stays."""
    if signal.getsignal(signal.SIGUSR2) == signal.SIG_DFL:
        with suppress(ValueError):  # in the main thread alone
            signal.signal(signal.SIGUSR2, _hear_usr2)


def _hear_usr2(*_: object) -> None:
    if not os.environ.get(DUMP_VARIABLE):
        _say(
            f"SIGUSR2 asks for a dump, and {DUMP_VARIABLE} names no folder: set it before the job starts, or ask by "
            "`mpips why --dump DIR`"
        )
    elif not _paths:
        _say(f"SIGUSR2 asks for a dump, and this process has no page: MPI has not started in it, or {VARIABLE}=0")
    elif path := _dump():
        _say(f"dumped to {path}")


def _say(text: str) -> None:
    """Write a line to standard error, which a handler of signals may do at any moment."""
    who = f"rank {_identity['rank']}" if "rank" in _identity else f"process {os.getpid()}"
    with suppress(OSError):
        os.write(2, f"mpips: {who}: {text}\n".encode())


def fails(sentence: str, own: bool = False) -> None:
    """Keep the page when the process ends: something has gone wrong, and this says what.

    `own`: in this rank's program, and not because another rank has failed. What follows from it does not replace it.
    """
    if not own and any(_failed):
        return
    while len(pages.encode(sentence)) > LONGEST_BYTES:
        sentence = sentence[: len(sentence) * 9 // 10]
    page.write(pages.END, {"failed": sentence, "own": own, "at_ns": time.monotonic_ns()})
    page.words[pages.AT["failures"]] += 1
    _failed.append(own)
    _dump()


def exits(code: int) -> None:
    """Say that the program has left with this code, where nothing has said why."""
    if not _failed:
        fails(f"exit code {code}", own=True)


def _dump() -> Path | None:
    """Write this rank's page as JSON into the folder that the user has named; return the file, None without one."""
    folder = os.environ.get(DUMP_VARIABLE)
    if folder and _paths:
        try:
            return dump.write_rank(_paths[0], Path(folder) / _paths[0].parent.name)
        except OSError as error:
            _say(f"no dump: {DUMP_VARIABLE}={folder!r} cannot be written: {error.strerror or error}")
    return None


_failed: list[bool] = []
"""Of each failure whether it is this rank's own."""


def count_checkpoint() -> None:
    """Count a checkpoint that this rank has written."""
    page.words[pages.AT["checkpoints"]] += 1


def add_communicator(identity: int, ranks: Sequence[int]) -> None:
    """Say which ranks of the job a lane joins. The last `KNOWN_COMMUNICATORS` are kept, freed or not."""
    text = ",".join(map(str, ranks))
    place = _made[text] = _made.get(text, -1) + 1
    _communicators[identity] = {"ranks": text, "place": place}
    while len(_communicators) > KNOWN_COMMUNICATORS or len(pages.encode(_communicators)) > pages.JSON_BYTES:
        del _communicators[next(iter(_communicators))]
    page.write(pages.COMMUNICATORS, _communicators)


def count_communicators() -> int:
    """The communicators that this process has made so far, freed or not."""
    return sum(1 + last for last in _made.values())


_made: dict[str, int] = {}
KNOWN_COMMUNICATORS = 32


def goes_well() -> None:
    """Take back what `fails` has said: the program has gone on from it."""
    page.write(pages.END, {})
    _failed.clear()


def _end() -> None:
    if _failed:
        return
    if _paths and _identity["size"] > 1:  # others may yet begin to wait for this one
        with suppress(OSError):
            (_paths[0].parent / f"{_identity['rank']}{folders.PROGRAM_ENDED}").touch(0o600)
    for path in _paths:
        with suppress(OSError):
            path.unlink()
    with suppress(IndexError):
        folders.leave(_paths[0].parent, count_local_ranks())


def find_ended(ranks: Sequence[int]) -> list[int]:
    """Return which of these ranks of the job say, on this host, that their program has ended."""
    found = []
    for rank in ranks if _paths else ():
        with suppress(OSError):
            written = (_paths[0].parent / f"{rank}{folders.PROGRAM_ENDED}").stat().st_mtime
            if written > _process_began():  # else an earlier job of this name has left it
                found.append(rank)
    return found


@cache
def _process_began() -> float:
    """Return when this process was started, in Unix time. MPI starts later, and no rank of the job ends before that."""
    ticks = int(Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()[19])
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks / os.sysconf("SC_CLK_TCK")


def _forget() -> None:
    """A fork of a rank is no rank."""
    global page, ring
    page = Page()
    untrace()
    ring = page.ring
    _waits.clear()
    _notes.clear()
    _tables.clear()
    _paths.clear()
    atexit.unregister(_end)


def note(*unnamed: object, **numbers: float) -> None:
    """Report numbers of this rank's training, such as `step=40, loss=0.3`, to who looks from outside. Sends nothing.

    Each replaces the one of its name. `step` is shown by `mpips why` and `top`, too. A Trainer reports by itself.
    ValueError for what is no number, and for more names than a page holds; then nothing of this call is reported.
    TypeError for a number without a name.
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
            raise ValueError(f"note: {name} is no number: pass a float, as of tensor.item()") from None
    step = notes.pop("step", None)
    if step is not None and not 0 <= step < 1 << 53:
        raise ValueError(f"note: step={step} is no step: pass a whole number of at least 0")
    if (length := len(pages.encode(notes))) > pages.JSON_BYTES:
        longest = max(notes, key=len)
        raise ValueError(
            f"note: the {len(notes)} names and numbers of this rank take {length} bytes, and its page has room for "
            f"{pages.JSON_BYTES}: note fewer, or shorter names (the longest begins with {longest[:40]!r})"
        )
    if step is not None:
        place.step = int(step)
    _notes.update(notes)
    page.write(pages.NOTES, _notes)


def write_load(nbytes: int, queued: int, pushed: Mapping[str, int], **more: Any) -> None:
    """Say how many bytes this server has taken in, by worker, and how many requests wait there.

    `room`: bytes that new rows of its tables may take. `rounds`: those that a quorum has closed; `missed`: by worker,
    how many of these it was not in."""
    content = {"at_ns": time.monotonic_ns(), "nbytes": nbytes, "queued": queued, "pushed": pushed, **more}
    page.write(pages.LOAD, content)


def numbers_of(table: str) -> memoryview:
    """Return the numbers of a table of embeddings on this rank's page, the same ones each time: see `page.TABLE`."""
    if table not in _tables:
        _tables[table] = page.take_table(table)
    return _tables[table]


def count_exchange(nbytes: int) -> None:
    """Count an exchange of parameters that is over, of so many bytes up and down."""
    words, at = page.words, pages.AT
    words[at["exchanges"]] += 1
    words[at["exchanged_bytes"]] += nbytes
    words[at["exchange_ns"]] = time.monotonic_ns()


# ---- waits


def waits(what: str, began: float, late: Sequence[int]) -> None:
    """Write down that this thread waits for that since then (monotonic seconds), and for which ranks."""
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


def waited(seconds: float, written: bool) -> None:
    """Count a wait that is over; take back what `waits` has written of it."""
    words = page.words
    words[WAITED] += int(seconds * 1e9)
    words[WAITED_TIMES] += 1
    if written:
        with _lock:
            _waits.pop(threading.get_ident(), None)
            page.write(pages.WAITS, list(_waits.values()))


def is_users(frame: FrameType) -> bool:
    """Return whether a frame runs code of the user's program, or of a package that it stands on."""
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] not in BETWEEN


def user_line(frame: FrameType | None) -> str:
    """Return the innermost line of the user's program, as "train.py:41, load_batch"; "" where there is none."""
    while frame is not None:
        if is_users(frame):
            code = frame.f_code
            inside = "" if code.co_name == "<module>" else f", {code.co_name}"
            return f"{os.path.basename(code.co_filename)}:{frame.f_lineno}{inside}"
        frame = frame.f_back
    return ""


def with_line(what: str, line: str) -> str:
    """Return a text with a line of the program in one pair of parentheses behind it."""
    if not line:
        return what
    return f"{what[:-1]}; {line})" if what.endswith(")") else f"{what} ({line})"


# ---- records with times


class Timeable(Protocol):
    """A plan, or a store: what makes calls that are timed while a trace is on, and else only where they take long."""

    def set_timed(self, every: bool) -> None:
        """Time every call from now on, or only those that take long."""


LONG_BYTES = 16 << 20
"""From here on each call is timed, which takes about 3 us: of a shorter call's time that is more than 1 %."""
ring = page.ring
"""Where records go: into the page, or into what `trace` was given."""
is_traced = False
_timeable: weakref.WeakSet[Timeable] = weakref.WeakSet()
_timing = threading.Lock()


def trace(into: Ring) -> None:
    """Record every call of this process into that ring from now on, whatever it takes; the page's own ring rests.

    Calls that are under way may be left out. Any thread may call.
    """
    global ring, is_traced
    with _timing:
        ring, is_traced = into, True
        for one in list(_timeable):
            one.set_timed(True)


def untrace() -> None:
    """End `trace`: nothing more is written to its ring but the ends of calls that are under way."""
    global ring, is_traced
    with _timing:
        ring, is_traced = page.ring, False
        for one in list(_timeable):
            one.set_timed(False)


def add_timeable(one: Timeable) -> None:
    """Tell it from now on, as long as it lives, whether every call is timed; and now."""
    with _timing:
        _timeable.add(one)
        one.set_timed(is_traced)


def begin_rare(operation: str, subject: str = "") -> tuple[Ring, int]:
    """Begin to record what is rare, such as a checkpoint or a recovery; return the ring, and what its `end` takes."""
    into = ring
    return into, into.begin(form(0, operation, subject, line=user_line(sys._getframe(1))))


# ---- marks


class Marks:
    """A lane of this process: where calls put their marks, and the texts of their tokens."""

    def __init__(self, identity: int) -> None:
        self._page, self.identity = page, identity
        self._lane = page.take_lane(identity)
        at = Page.mark_at(max(self._lane, 0))
        self.word = page.words[at : at + 1] if self._lane >= 0 else memoryview(bytearray(8)).cast(WORD)
        """The mark: one word, which a call sets to 2^32 * its number + its token."""

    def name(self, token: int, text: str) -> None:
        """Say what a token stands for."""
        if self._lane >= 0:
            self._page.name(self._lane, token, text)

    def new_token(self, text: str) -> int:
        """Return a token that stands for this."""
        return self._page.new_token(text)

    def close(self) -> None:
        """Give the lane back."""
        if self._lane >= 0:
            self._page.give_lane(self._lane)
            self._lane = -1
