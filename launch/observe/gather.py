"""Read what the ranks of a job on this machine do: from their pages, from the kernel, and from their stacks.

Nothing is stopped. On a signal a rank writes the stacks of its threads into a file. faulthandler does this in C, so it
also works if the rank is deep in a library or in an endless loop. Two looks some time apart tell what moves.
"""

from __future__ import annotations

import json
import linecache
import mmap
import os
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from mpips.collectives.recorder import folders
from mpips.collectives.recorder.dump import bytes_of
from mpips.collectives.recorder.page import NUMBERS, PAGE_BYTES, LastCall, PageContent, read, read_lanes

# the time between two looks at the marks of a page
MARKS_SECONDS = 0.005
# how long ranks may take to write their stacks
STACK_SECONDS = 1.0
# the variables by which Open MPI and MPICH tell the number of ranks on a host
LOCAL_SIZES = (b"OMPI_COMM_WORLD_LOCAL_SIZE", b"MPI_LOCALNRANKS")
# If it is not known which call of a rank was the last, name at most this many.
MOST_CALLS = 3
TICKS = os.sysconf("SC_CLK_TCK")
# the folder that contains the packages of mpips
OURS = str(Path(__file__).parents[2])
# lines that faulthandler writes
FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')
THREAD = re.compile(r"(?:Current t|T)hread 0x([0-9a-f]+)")
LIBRARIES = re.compile(r"/(?:site|dist)-packages/|/lib(?:64)?/python3\.\d+/|^<")


class Frame(NamedTuple):
    """One frame of a stack."""

    path: str
    line: int
    function: str
    # the source line, if it can be read on the rank's host
    text: str = ""

    @property
    def is_ours(self) -> bool:
        """True for code of mpips."""
        return self.path.startswith(f"{OURS}/")

    @property
    def is_users(self) -> bool:
        """True for code of the user's program, and not of a library or mpips."""
        return not self.is_ours and not LIBRARIES.search(self.path)

    def __str__(self) -> str:
        inside = "" if self.function == "<module>" else f", {self.function}"
        return f"{os.path.basename(self.path)}:{self.line}{inside}"


class Wait(NamedTuple):
    """A wait in which one thread of a rank is."""

    # the call that waits
    what: str
    seconds: float
    # the ranks that it waits for, as far as they are known
    late: tuple[int, ...]
    # the line of the program that made the call
    line: str
    # the name of the thread; "" for the main thread
    thread: str = ""


class Rank(NamedTuple):
    """One rank, as it looks from outside. -1 and "" mean unknown.

    "Between the looks" is the time between the two looks of `gather`.
    """

    rank: int
    # number of ranks of the job
    size: int
    role: str
    host: str
    pid: int
    program: tuple[str, ...]
    generation: int
    # the last training step, and the seconds since it ended
    step: int
    step_seconds: float
    # the waits in which it is now
    waits: tuple[Wait, ...]
    # its communicators and stores, each with the call that it has begun last there
    lanes: tuple[LastCall, ...]
    # what it has written about its own end
    end: Mapping[str, Any]
    # the kernel's letter for the state of the process; "" if the process is gone
    state: str
    # shares of the time between the looks
    cpu: float
    waiting: float
    # it has begun a call between the looks
    moved: bool
    # the main thread's stack, innermost frame first
    stack: tuple[Frame, ...]
    memory_bytes: int
    # Unix time
    began: float
    # time in waits that are over, and their number
    waited_seconds: float
    wait_count: int
    # counts since the rank began
    calls: int
    failures: int
    checkpoints: int
    cpu_seconds: float
    # numbers that the program shows, such as its loss
    notes: Mapping[str, float]
    # stacks of the other threads
    threads: tuple[tuple[Frame, ...], ...]
    # its number among the ranks of its role
    member: int
    # the command line of another program that its process has become by exec; otherwise ""
    became: str
    # steps per second between the looks; -1 if no step has ended between them
    step_rate: float
    # Bytes per second between the looks: what it has pushed (a server: received from pushes), and its collectives on
    # one host. -1 if nothing is known.
    byte_rate: float = -1.0
    # server only: worker -> bytes per second that it has pushed here
    taken: Mapping[str, float] = {}
    # server only: pushes and pulls that wait here
    queued: int = -1
    # server only: bytes received from pushes
    taken_bytes: int = 0
    # identity of a lane -> its ranks, and how many communicators of the same ranks were made before it
    communicators: Mapping[str, Any] = {}
    # number of ranks of the job that were started on its host, including itself, from the launcher's variables
    ranks_on_host: int = -1
    # table -> the numbers of `page.TABLE`
    tables: Mapping[str, Mapping[str, int]] = {}
    # table -> growth of these numbers per second between the looks
    table_rates: Mapping[str, Mapping[str, float]] = {}
    # server with tables only: the bytes that new rows may take before a push is refused
    room_bytes: int = -1
    # server only: rounds closed by a quorum
    quorum_rounds: int = -1
    # server only: worker -> how many of these rounds it was not part of, or came late to
    missed: Mapping[str, int] = {}
    # exchanges of parameters, for a worker that trains by itself between them; and the seconds since the last one
    exchanges: int = 0
    exchange_seconds: float = -1.0
    exchanged_bytes: int = 0

    @property
    def lives(self) -> bool:
        """True if its process has not ended."""
        return self.state not in ("", "Z", "X")

    @property
    def stopped(self) -> bool:
        """True if a signal has stopped its process."""
        return self.state in ("T", "t")

    @property
    def last_call(self) -> str:
        """The text of the call that it has begun last, in a store if it has one, otherwise in a communicator; or "".

        With several stores, or several communicators, it is not known which call was the last. Then the last call of
        each is named.
        """
        kinds = {lane: lane.identity >> 61 if lane.identity >> 63 else 0 for lane in self.lanes if lane.text}
        last = [lane for lane, kind in kinds.items() if kind == max(kinds.values())]
        texts = list(dict.fromkeys(lane.text for lane in sorted(last, key=lambda lane: -lane.number)))
        if len(texts) < 2:
            return "".join(texts)
        named = " or ".join(texts[:MOST_CALLS]) + " or another" * (len(texts) > MOST_CALLS)
        return f"{named} (its last calls in {len(last)} {'stores' if max(kinds.values()) else 'communicators'})"

    @property
    def user_frame(self) -> Frame | None:
        """The innermost frame of the main thread that is in the user's program, or None."""
        return next((frame for frame in self.stack if frame.is_users), None)

    @property
    def other_frames(self) -> tuple[Frame, ...]:
        """The innermost frame in the user's program of each other thread that has one."""
        found = (next((frame for frame in stack if frame.is_users), None) for stack in self.threads)
        return tuple(frame for frame in found if frame is not None)

    @property
    def in_mpips(self) -> bool:
        """True if its main thread is in a call of mpips."""
        runner = os.path.join(OURS, "__main__.py")
        for frame in self.stack:
            if frame.is_users:
                return False
            if frame.is_ours and frame.path != runner:
                return True
        return False

    @property
    def is_called_back(self) -> bool:
        """True if its main thread is in code of the user that mpips has called, such as an optimizer."""
        return not self.in_mpips and any(frame.is_ours for frame in self.stack)


class _Look(NamedTuple):
    """What one look at a rank has found."""

    # its page
    seen: PageContent
    # as in `Rank`
    state: str
    cpu_seconds: float
    memory_bytes: int
    # the `time.monotonic()` of the look
    at: float
    became: str = ""


def jobs(top: Path | None = None) -> list[Path]:
    """Return the folders of this user's jobs: first those without live ranks, then the rest. Newer ones come later.

    `top`: the folder that contains them, if it is not the usual one.
    """
    top = folders.jobs_folder() if top is None else top
    try:
        if not folders.is_private(top):
            return []
        found = [path for path in top.iterdir() if any(path.glob(f"*{folders.PAGE}")) or folders.read_hosts(path)]
    except OSError:
        return []
    return sorted(found, key=lambda path: (has_living(path), folders.modified_at(path)))


def has_pages(folder: Path) -> bool:
    """True if this host has a page of a rank of the job, alive or dead."""
    with suppress(OSError):
        return any(read(path) is not None for path in folder.glob(f"*{folders.PAGE}"))
    return False


def has_living(folder: Path) -> bool:
    """True if a rank of the job or its launcher is running on this host."""
    pages = folder.glob(f"*{folders.PAGE}")
    return folders.is_launched_here(folder) or any(_owns(int(path.stem), path) for path in pages)


def gather(folder: Path, seconds: float = 0.5, stacks: bool = True) -> list[Rank]:
    """Look at the ranks of a job on this host twice, and return them in order.

    Between the looks the ranks' marks are read every `MARKS_SECONDS`, to count the bytes that their collectives move.
    Calls that take longer than that are counted exactly, others roughly.

    Args:
        folder: The folder of the job.
        seconds: The time between the two looks. Blocks that long, and for up to `STACK_SECONDS` more.
        stacks: Ask the ranks for their stacks.
    """
    paths = sorted(folder.glob(f"*{folders.PAGE}"))
    asked = _Stacks()
    before = {path: look for path in paths if (look := _look(path)) is not None}
    if stacks:
        asked.ask({path: look for path, look in before.items() if look.state not in ("", "Z", "X", "T", "t")})
    moved = _watch_marks([path for path, look in before.items() if look.state not in ("", "Z", "X")], seconds)
    ranks = [
        _rank(look, _look(path) or look, asked.take(path), int(path.stem), moved.get(path, 0))
        for path, look in before.items()
    ]
    return join(ranks)


def _watch_marks(paths: Sequence[Path], seconds: float) -> dict[Path, int]:
    """Read the marks of pages for `seconds`. Return page -> bytes that its rank has moved by collectives meanwhile."""
    moved, known, maps = dict.fromkeys(paths, 0), dict[tuple[Path, int], int](), dict[Path, mmap.mmap]()
    for path in paths:
        with suppress(OSError, ValueError), path.open("rb") as file:
            maps[path] = mmap.mmap(file.fileno(), PAGE_BYTES, access=mmap.ACCESS_READ)
    until = time.monotonic() + seconds
    while True:
        for path, page in maps.items():
            for lane in read_lanes(page):
                calls = lane.number - known.get((path, lane.identity), lane.number) & NUMBERS
                known[path, lane.identity] = lane.number
                if calls:
                    moved[path] += calls * bytes_of(lane.text)
        left = until - time.monotonic()
        if left <= 0:
            break
        time.sleep(min(left, MARKS_SECONDS))
    for page in maps.values():
        page.close()
    return moved


def join(ranks: Iterable[Rank]) -> list[Rank]:
    """Return the ranks in order, each number once.

    A spare that has taken the place of a dead rank has the same number. The one that is alive is kept, or else the
    newest.
    """
    newest: dict[int, Rank] = {}
    for rank in sorted(ranks, key=lambda one: (one.lives, one.began, one.pid)):
        newest[rank.rank] = rank
    return [newest[number] for number in sorted(newest)]


def _owns(pid: int, path: Path) -> bool:
    """True if process `pid` has mapped the page `path`. False if it is a later process with the same pid."""
    try:
        return str(path) in Path(f"/proc/{pid}/maps").read_text()
    except PermissionError:
        # Maps cannot be read in a container without ptrace, or if the process is not dumpable. Compare times instead.
        return _has_begun(pid, folders.modified_at(path))
    except OSError:
        return False


def _has_begun(pid: int, by: float) -> bool:
    """True if there is a process `pid` that began at the Unix time `by` or earlier, give or take a second."""
    with suppress(OSError, StopIteration):
        ticks = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
        boot = next(int(line.split()[1]) for line in Path("/proc/stat").read_text().splitlines() if line[:5] == "btime")
        return boot + ticks / TICKS <= by + 1
    return False


def _became(pid: int, began: float) -> str:
    """Return the command line of process `pid`, which no longer has its page, if it is still the process of the rank.

    Such a process has become another program by exec. Returns "" if the rank's process, which began at `began`, has
    ended.
    """
    with suppress(OSError):
        if _has_begun(pid, began):
            return " ".join(Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")).strip()[:80]
    return ""


def _ranks_on_host(pid: int) -> int:
    """Return how many ranks of its job were started on the host of process `pid`; -1 if that is unknown."""
    with suppress(OSError, ValueError):
        pairs = (word.partition(b"=") for word in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))
        return next((int(number) for name, _, number in pairs if name in LOCAL_SIZES), -1)
    return -1


def read_end(folder: Path) -> Mapping[str, Any]:
    """Return what `mpips run` has written about the end of a job.

    It is the signal in "heard", or "death" and "sentence"; or an empty dict if nothing was written.
    """
    with suppress(OSError, ValueError):
        found: dict[str, Any] = json.loads((folder / folders.END_FILE).read_text(encoding="utf-8"))
        return found
    return {}


def _look(path: Path) -> _Look | None:
    pid, now = int(path.stem), time.monotonic()
    with suppress(OSError):
        seen = read(path)
        if seen is None:
            return None
        if not _owns(pid, path):
            return _Look(seen, "", 0.0, 0, now, _became(pid, seen.head["began_ns"] / 1e9))
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        used = (int(words[11]) + int(words[12])) / TICKS
        memory = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        return _Look(seen, words[0], used, memory, now)
    return None


def add_pushes(ranks: Sequence[Rank]) -> list[Rank]:
    """Add what each worker has pushed to its `byte_rate`. Servers count it, so this needs the ranks of all hosts."""
    pushed: dict[str, float] = {}
    for one in ranks:
        for worker, rate in one.taken.items():
            pushed[worker] = pushed.get(worker, 0.0) + rate
    return [
        one._replace(byte_rate=max(one.byte_rate, 0.0) + pushed[str(one.member)])
        if one.role == "worker" and str(one.member) in pushed
        else one
        for one in ranks
    ]


def _rank(before: _Look, after: _Look, stacks: Sequence[Sequence[Frame]], pid: int, moved: int) -> Rank:
    """Make a `Rank` of two looks. `moved`: the bytes of collectives between them. `stacks`: the main thread's first."""
    head, identity, now = after.seen.head, after.seen.identity, time.monotonic_ns()
    apart = max(after.at - before.at, 1e-9)
    waits = tuple(
        Wait(one["what"], (now - one["since_ns"]) / 1e9, tuple(one["late"]), one["line"], one["thread"])
        for one in after.seen.waits
    )
    # `waited` has the waits that ended between the looks, `still` the longest one that goes on.
    waited = (head["waited_ns"] - before.seen.head["waited_ns"]) / 1e9
    still = max((min(wait.seconds, apart) for wait in waits), default=0.0)
    step, steps = head["step"] - 1, head["step"] - before.seen.head["step"]
    took = head["step_ns"] - before.seen.head["step_ns"]
    # A server writes its counts to the page now and then, with a time. So their rates refer to these times, and not to
    # the times of the looks.
    load, earlier = after.seen.load, before.seen.load
    between = (load["at_ns"] - earlier["at_ns"]) / 1e9 if load and earlier else 0.0
    taken = (
        {
            worker: (nbytes - earlier["pushed"].get(worker, nbytes)) / between
            for worker, nbytes in load["pushed"].items()
        }
        if between
        else {}
    )
    since = between if load else apart
    rates = (
        {
            table: {name: (number - earlier_of.get(name, number)) / since for name, number in numbers.items()}
            for table, numbers in after.seen.tables.items()
            if (earlier_of := before.seen.tables.get(table))
        }
        if since
        else {}
    )
    byte_rate = moved / apart + sum(taken.values()) if moved or between else -1.0
    return Rank(
        identity.get("rank", -1),
        identity.get("size", -1),
        identity.get("role", ""),
        identity.get("host", ""),
        pid,
        tuple(identity.get("program", ())),
        head["generation"] - 1,
        step,
        (now - head["step_ns"]) / 1e9 if step >= 0 else -1.0,
        waits,
        tuple(after.seen.lanes),
        after.seen.end,
        after.state,
        (after.cpu_seconds - before.cpu_seconds) / apart,
        min(1.0, max(waited / apart, still / apart)),
        after.seen.lanes != before.seen.lanes or steps > 0 or any(taken.values()),
        tuple(stacks[0]) if stacks else (),
        after.memory_bytes,
        head["began_ns"] / 1e9,
        head["waited_ns"] / 1e9,
        head["waits"],
        head["calls"] + sum(lane.number for lane in after.seen.lanes),
        head["failures"],
        head["checkpoints"],
        after.cpu_seconds,
        after.seen.notes,
        tuple(map(tuple, stacks[1:])),
        identity.get("member", -1),
        after.became,
        1e9 * steps / max(took, 1) if steps > 0 else -1.0,
        byte_rate,
        taken,
        load.get("queued", -1),
        load.get("nbytes", 0),
        after.seen.communicators,
        _ranks_on_host(pid),
        after.seen.tables,
        rates,
        load.get("room", -1),
        load.get("rounds", -1),
        load.get("missed", {}),
        head["exchanges"],
        (now - head["exchange_ns"]) / 1e9 if head["exchanges"] else -1.0,
        head["exchanged_bytes"],
    )


class _Stacks:
    """Asks ranks for their stacks, and reads what they write.

    The file of a rank may already have stacks from an earlier request. They are skipped by its size before the request.
    """

    def __init__(self) -> None:
        # page -> (size of the file before, identity of the main thread, time of the request)
        self._from: dict[Path, tuple[int, int, float]] = {}

    def ask(self, looks: Mapping[Path, _Look]) -> None:
        """Send the signal to the ranks that handle it."""
        for path, look in looks.items():
            number, file = look.seen.head["signal"], path.with_suffix(folders.STACKS)
            with suppress(OSError):
                size = file.stat().st_size
                if number and catches(int(path.stem), number):
                    self._from[path] = size, look.seen.head["thread"], time.monotonic()
                    os.kill(int(path.stem), number)

    def take(self, path: Path) -> list[list[Frame]]:
        """Return the stacks of a rank, the main thread's first, each with its innermost frame first.

        Waits for them until `STACK_SECONDS` after the request. Returns an empty list if they have not come by then.
        """
        if path not in self._from:
            return []
        size, thread, asked = self._from[path]
        while True:
            with suppress(OSError), open(path.with_suffix(folders.STACKS), encoding="utf-8", errors="replace") as file:
                file.seek(size)
                found = _threads(file.read(), thread, _folder_of(int(path.stem)))
                if found or time.monotonic() > asked + STACK_SECONDS:
                    return found
            if time.monotonic() > asked + STACK_SECONDS:
                return []
            time.sleep(0.02)


def catches(pid: int, number: int) -> bool:
    """True if a process has a handler for a signal.

    The program may have removed it, and then the signal would end the process.
    """
    caught = re.search(r"^SigCgt:\s*([0-9a-f]+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return caught is not None and bool(int(caught[1], 16) >> (number - 1) & 1)


def _folder_of(pid: int) -> str:
    """Return the current folder of a process, or "" if it cannot be read."""
    with suppress(OSError):
        return os.readlink(f"/proc/{pid}/cwd")
    return ""


def _threads(text: str, main: int, folder: str) -> list[list[Frame]]:
    """Parse what `faulthandler` has written. Returns the stacks of all threads, that of `main` first.

    Returns an empty list if the stack of `main` has not been written yet.

    Args:
        text: The text.
        main: The identity of the main thread.
        folder: The current folder of the process, for relative file names.
    """
    stacks: dict[int, list[Frame]] = {main: []}
    thread = 0
    for line in text.splitlines():
        if header := THREAD.match(line):
            thread = int(header.group(1), 16)
            stacks.setdefault(thread, [])
        elif thread and (found := FRAME.match(line)):
            path = found.group(1)
            path = path if path.startswith("<") else os.path.join(folder, path)
            frame = Frame(path, int(found.group(2)), found.group(3))
            text = linecache.getline(path, frame.line).strip() if frame.is_users else ""
            stacks[thread].append(frame._replace(text=text))
    return [*stacks.values()] if stacks[main] else []
