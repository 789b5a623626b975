"""Find out what the ranks of a job on this machine do: from their pages, from the kernel, and from their stacks.

The *page* of a rank is a small file in the machine's memory, in which the rank writes what it does. The page has, for
each *lane* (a communicator or a store), a *mark*: a word that identifies the last call that the rank has begun in this
lane.

No rank is stopped. When a rank gets a certain signal, it writes the stacks of its threads into a file. faulthandler
writes them in C, so a rank can do this even inside a library call or in an endless loop. `gather` takes two samples of
each rank, some time apart. Their difference shows whether the rank makes progress, and how fast.
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

# the seconds between two readings of the marks on a page
MARKS_SECONDS = 0.005
# seconds that ranks may take to write their stacks
STACK_SECONDS = 1.0
# environment variables in which Open MPI and MPICH put the number of ranks on a host
LOCAL_SIZES = (b"OMPI_COMM_WORLD_LOCAL_SIZE", b"MPI_LOCALNRANKS")
# If it is unknown which of several calls of a rank was the last, name at most this many of these calls.
MOST_CALLS = 3
TICKS = os.sysconf("SC_CLK_TCK")
# the folder that contains the packages of mpips
OURS = str(Path(__file__).parents[2])
# patterns of lines that faulthandler writes
FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')
THREAD = re.compile(r"(?:Current t|T)hread 0x([0-9a-f]+)")
# matches the path of a frame whose code belongs to a library, or is in no file (such as "<string>")
LIBRARIES = re.compile(r"/(?:site|dist)-packages/|/lib(?:64)?/python3\.\d+/|^<")


class StackFrame(NamedTuple):
    path: str
    line: int
    function: str
    # the source line, if it can be read on the rank's host
    text: str = ""

    @property
    def is_ours(self) -> bool:
        """True if the code belongs to mpips."""
        return self.path.startswith(f"{OURS}/")

    @property
    def is_users(self) -> bool:
        """True if the code belongs to the user's program, and not to a library or to mpips."""
        return not self.is_ours and not LIBRARIES.search(self.path)

    def __str__(self) -> str:
        inside = "" if self.function == "<module>" else f", {self.function}"
        return f"{os.path.basename(self.path)}:{self.line}{inside}"


class OngoingWait(NamedTuple):
    """An ongoing wait of one thread of a rank."""

    # the call that waits
    what: str
    seconds: float
    # those ranks that the thread waits for and whose numbers are known
    late: tuple[int, ...]
    # the line of the program that made the call
    line: str
    # the name of the thread; "" for the main thread
    thread: str = ""


class Rank(NamedTuple):
    """What is known about one rank. -1 and "" mean unknown.

    `gather` takes two samples of each rank. Some fields are about the time between these two samples.
    """

    rank: int
    # number of ranks in the job
    size: int
    role: str
    host: str
    pid: int
    program: tuple[str, ...]
    # The generation of the rank's store. A recovery after a death begins a new generation.
    generation: int
    # the last training step
    step: int
    # seconds since this step ended
    step_seconds: float
    # the waits that have not ended, one for each thread that waits
    waits: tuple[OngoingWait, ...]
    # the rank's communicators and stores, each with the last call that the rank has begun in it
    lanes: tuple[LastCall, ...]
    # what the rank has written about its own end
    end: Mapping[str, Any]
    # the kernel's letter for the state of the process; "" if the process has ended
    state: str
    # the share of the time between the samples in which the rank used a core
    cpu: float
    # the share of the time between the samples in which the rank waited
    waiting: float
    # True if the rank has begun a call between the samples
    moved: bool
    # the stack of the rank's main thread, innermost frame first
    stack: tuple[StackFrame, ...]
    memory_bytes: int
    # the time at which the rank began, in Unix time
    began: float
    # seconds that the rank has spent in waits that have ended
    waited_seconds: float
    # number of waits that have ended
    wait_count: int
    # the number of collective calls and calls of stores since the rank began
    calls: int
    # the number of generations and communicators that have ended with an error since the rank began
    failures: int
    # the number of checkpoints that the rank has written
    checkpoints: int
    cpu_seconds: float
    # numbers that the user's program reports, such as the loss
    notes: Mapping[str, float]
    # the stacks of the rank's other threads
    threads: tuple[tuple[StackFrame, ...], ...]
    # the number of the rank among the ranks with its role
    member: int
    # the command line of another program, if the rank's process has become this program by exec; otherwise ""
    became: str
    # training steps per second between the samples; -1 if no step has ended between them
    step_rate: float
    # The bytes per second, between the samples, that the rank's collectives on one host and its pushes have moved. For
    # a server, these are the pushes that it has received.
    byte_rate: float = -1.0
    # server only: worker -> bytes per second that this worker has pushed to the server
    taken: Mapping[str, float] = {}
    # server only: number of pushes and pulls that wait at the server
    queued: int = -1
    # server only: bytes received from pushes since the server began
    taken_bytes: int = 0
    # Identity of a communicator -> a dict: "ranks" are its ranks, and "place" is the number of communicators of the
    # same ranks that were made before it.
    communicators: Mapping[str, Any] = {}
    # how many ranks of the job the launcher has started on the rank's host
    ranks_on_host: int = -1
    # embedding table -> a dict with the numbers of the table, by their names in `page.TABLE`
    tables: Mapping[str, Mapping[str, int]] = {}
    # embedding table -> the growth of each of these numbers per second, between the samples
    table_rates: Mapping[str, Mapping[str, float]] = {}
    # server with embedding tables only: the bytes left for new rows; at 0 the server refuses pushes of new rows
    room_bytes: int = -1
    # server only: rounds closed by a quorum, that is, as soon as enough workers had pushed
    quorum_rounds: int = -1
    # server only: worker -> how many of the quorum's rounds closed before this worker's push arrived
    missed: Mapping[str, int] = {}
    # for a worker that trains by itself between exchanges of parameters: the number of exchanges
    exchanges: int = 0
    # seconds since the last exchange of parameters
    exchange_seconds: float = -1.0
    # bytes that all exchanges of parameters have sent and received
    exchanged_bytes: int = 0

    @property
    def lives(self) -> bool:
        """True if the rank's process has not ended."""
        return self.state not in ("", "Z", "X")

    @property
    def stopped(self) -> bool:
        """True if a signal has stopped the rank's process."""
        return self.state in ("T", "t")

    @property
    def last_call(self) -> str:
        """The text of the last call that the rank has begun, or "" if the rank has begun none.

        If the rank has made calls of a store, only these count, and otherwise the calls of communicators. With several
        stores or communicators it is unknown which call was the last. The text then names the last call of each.
        """
        kinds = {lane: lane.identity >> 61 if lane.identity >> 63 else 0 for lane in self.lanes if lane.text}
        last = [lane for lane, kind in kinds.items() if kind == max(kinds.values())]
        texts = list(dict.fromkeys(lane.text for lane in sorted(last, key=lambda lane: -lane.number)))
        if len(texts) < 2:
            return "".join(texts)
        calls = " or ".join(texts[:MOST_CALLS]) + " or another" * (len(texts) > MOST_CALLS)
        return f"{calls} (its last calls in {len(last)} {'stores' if max(kinds.values()) else 'communicators'})"

    @property
    def user_frame(self) -> StackFrame | None:
        """The innermost frame of the main thread that is in the user's program, or None."""
        return next((frame for frame in self.stack if frame.is_users), None)

    @property
    def other_frames(self) -> tuple[StackFrame, ...]:
        """For each thread except the main thread, its innermost frame in the user's program, if it has such a frame."""
        frames = (next((frame for frame in stack if frame.is_users), None) for stack in self.threads)
        return tuple(frame for frame in frames if frame is not None)

    @property
    def in_mpips(self) -> bool:
        """True if the main thread is in a call of mpips."""
        runner = os.path.join(OURS, "__main__.py")
        for frame in self.stack:
            if frame.is_users:
                return False
            if frame.is_ours and frame.path != runner:
                return True
        return False

    @property
    def is_called_back(self) -> bool:
        """True if the main thread is in code of the user, such as an optimizer, that mpips has called."""
        return not self.in_mpips and any(frame.is_ours for frame in self.stack)


class _Sample(NamedTuple):
    """One sample of a rank. The fields have the same meaning as in `Rank`."""

    # the content of the rank's page
    page: PageContent
    state: str
    cpu_seconds: float
    memory_bytes: int
    # the time of the sample, by `time.monotonic()`
    at: float
    became: str = ""


def jobs(top: Path | None = None) -> list[Path]:
    """Return the folders of this user's jobs. Jobs without live ranks come first, then jobs with live ranks.

    Both groups are sorted by age, the oldest job first. `top` is the folder that contains the folders of jobs, if it is
    not the usual one.
    """
    top = folders.jobs_folder() if top is None else top
    try:
        if not folders.is_private(top):
            return []
        paths = [path for path in top.iterdir() if any(path.glob(f"*{folders.PAGE}")) or folders.read_hosts(path)]
    except OSError:
        return []
    return sorted(paths, key=lambda path: (has_live_ranks(path), folders.modified_at(path)))


def has_pages(folder: Path) -> bool:
    """True if this host has a page of a rank of the job, even of a rank that has ended."""
    with suppress(OSError):
        return any(read(path) is not None for path in folder.glob(f"*{folders.PAGE}"))
    return False


def has_live_ranks(folder: Path) -> bool:
    """True if a rank of the job, or the job's launcher, is running on this host."""
    pages = folder.glob(f"*{folders.PAGE}")
    return folders.is_launched_here(folder) or any(_owns(int(path.stem), path) for path in pages)


def gather(folder: Path, seconds: float = 0.5, stacks: bool = True) -> list[Rank]:
    """Take two samples of the ranks of a job on this host. Return the ranks in the order of their numbers.

    Between the samples, the marks on the ranks' pages are read every `MARKS_SECONDS`, to count the bytes of
    collectives. The count is exact for calls that take longer than `MARKS_SECONDS`, and an estimate for shorter calls.

    Args:
        folder: The folder of the job.
        seconds: The seconds between the two samples. This function blocks for this time, plus up to `STACK_SECONDS`.
        stacks: True to ask the ranks for their stacks.
    """
    paths = sorted(folder.glob(f"*{folders.PAGE}"))
    requests = _StackRequests()
    before = {path: look for path in paths if (look := _look(path)) is not None}
    if stacks:
        requests.send({path: look for path, look in before.items() if look.state not in ("", "Z", "X", "T", "t")})
    moved = _watch_marks([path for path, look in before.items() if look.state not in ("", "Z", "X")], seconds)
    ranks = [
        _make_rank(look, _look(path) or look, requests.read(path), int(path.stem), moved.get(path, 0))
        for path, look in before.items()
    ]
    return join(ranks)


def _watch_marks(paths: Sequence[Path], seconds: float) -> dict[Path, int]:
    """Read the marks on ranks' pages again and again, for `seconds`.

    Return a dict: page -> the bytes that collectives of the page's rank have moved in this time.
    """
    moved = dict.fromkeys(paths, 0)
    # (page, lane) -> the number of the lane's last call, when the mark was last read
    known = dict[tuple[Path, int], int]()
    maps = dict[Path, mmap.mmap]()
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
    """Return the ranks in the order of their numbers, without duplicates.

    A spare that has replaced a dead rank has the dead rank's number. If two ranks have the same number, keep the rank
    that is alive. If both or none of them are alive, keep the newer rank.
    """
    newest: dict[int, Rank] = {}
    for rank in sorted(ranks, key=lambda rank: (rank.lives, rank.began, rank.pid)):
        newest[rank.rank] = rank
    return [newest[number] for number in sorted(newest)]


def _owns(pid: int, path: Path) -> bool:
    """True if process `pid` has mapped the page `path`. False for a later process that got the same pid."""
    try:
        return str(path) in Path(f"/proc/{pid}/maps").read_text()
    except PermissionError:
        # In a container without ptrace, or if the process is not dumpable, the maps cannot be read. Compare times
        # instead.
        return _has_begun(pid, folders.modified_at(path))
    except OSError:
        return False


def _has_begun(pid: int, by: float) -> bool:
    """True if a process `pid` exists and began at most a second after the Unix time `by`."""
    with suppress(OSError, StopIteration):
        ticks = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
        boot = next(int(line.split()[1]) for line in Path("/proc/stat").read_text().splitlines() if line[:5] == "btime")
        return boot + ticks / TICKS <= by + 1
    return False


def _read_new_program(pid: int, began: float) -> str:
    """Return the command line of a rank's process that has become another program by exec, and so has no page.

    Returns "" if the rank's process has ended. `began` is the time at which the rank began. A process `pid` that began
    later is not the rank's process.
    """
    with suppress(OSError):
        if _has_begun(pid, began):
            return " ".join(Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")).strip()[:80]
    return ""


def _ranks_on_host(pid: int) -> int:
    """Return how many ranks of a job the launcher has started on this host, or -1 if this is unknown.

    `pid` is the pid of one of these ranks.
    """
    with suppress(OSError, ValueError):
        pairs = (variable.partition(b"=") for variable in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))
        return next((int(number) for name, _, number in pairs if name in LOCAL_SIZES), -1)
    return -1


def read_end(folder: Path) -> Mapping[str, Any]:
    """Return what `mpips run` has written about the end of a job.

    If a signal to `mpips run` ended the job, "heard" in the dict is the name of the signal. Otherwise the dict has
    "death" and "sentence", as in `JobEnd`. The dict is empty if nothing was written.
    """
    with suppress(OSError, ValueError):
        end: dict[str, Any] = json.loads((folder / folders.END_FILE).read_text(encoding="utf-8"))
        return end
    return {}


def _look(path: Path) -> _Sample | None:
    pid, now = int(path.stem), time.monotonic()
    with suppress(OSError):
        page = read(path)
        if page is None:
            return None
        if not _owns(pid, path):
            return _Sample(page, "", 0.0, 0, now, _read_new_program(pid, page.head["began_ns"] / 1e9))
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        cpu_seconds = (int(fields[11]) + int(fields[12])) / TICKS
        memory = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        return _Sample(page, fields[0], cpu_seconds, memory, now)
    return None


def add_pushes(ranks: Sequence[Rank]) -> list[Rank]:
    """Return the ranks, with the bytes per second that each worker has pushed added to the worker's `byte_rate`.

    Only servers count the pushed bytes, so `ranks` must contain the ranks of all hosts.
    """
    pushed: dict[str, float] = {}
    for rank in ranks:
        for worker, rate in rank.taken.items():
            pushed[worker] = pushed.get(worker, 0.0) + rate
    return [
        rank._replace(byte_rate=max(rank.byte_rate, 0.0) + pushed[str(rank.member)])
        if rank.role == "worker" and str(rank.member) in pushed
        else rank
        for rank in ranks
    ]


def _make_rank(before: _Sample, after: _Sample, stacks: Sequence[Sequence[StackFrame]], pid: int, moved: int) -> Rank:
    """Make a `Rank` from two samples of the rank.

    Args:
        before: The first sample.
        after: The second sample.
        stacks: The stacks of the rank's threads, the main thread first.
        pid: The pid of the rank's process.
        moved: The bytes that the rank's collectives have moved between the samples.
    """
    head, identity, now = after.page.head, after.page.identity, time.monotonic_ns()
    apart = max(after.at - before.at, 1e-9)
    waits = tuple(
        OngoingWait(each["what"], (now - each["since_ns"]) / 1e9, tuple(each["late"]), each["line"], each["thread"])
        for each in after.page.waits
    )
    # seconds of the waits that ended between the samples
    waited = (head["waited_ns"] - before.page.head["waited_ns"]) / 1e9
    # how many of the seconds between the samples the longest ongoing wait takes up
    ongoing = max((min(wait.seconds, apart) for wait in waits), default=0.0)
    step, steps = head["step"] - 1, head["step"] - before.page.head["step"]
    steps_ns = head["step_ns"] - before.page.head["step_ns"]
    # A server writes its counts to the page now and then, together with the current time. So the rates of these counts
    # must be computed with the written times, and not with the times of the samples.
    load, earlier = after.page.load, before.page.load
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
            for table, numbers in after.page.tables.items()
            if (earlier_of := before.page.tables.get(table))
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
        tuple(after.page.lanes),
        after.page.end,
        after.state,
        (after.cpu_seconds - before.cpu_seconds) / apart,
        min(1.0, max(waited / apart, ongoing / apart)),
        after.page.lanes != before.page.lanes or steps > 0 or any(taken.values()),
        tuple(stacks[0]) if stacks else (),
        after.memory_bytes,
        head["began_ns"] / 1e9,
        head["waited_ns"] / 1e9,
        head["waits"],
        head["calls"] + sum(lane.number for lane in after.page.lanes),
        head["failures"],
        head["checkpoints"],
        after.cpu_seconds,
        after.page.notes,
        tuple(map(tuple, stacks[1:])),
        identity.get("member", -1),
        after.became,
        1e9 * steps / max(steps_ns, 1) if steps > 0 else -1.0,
        byte_rate,
        taken,
        load.get("queued", -1),
        load.get("nbytes", 0),
        after.page.communicators,
        _ranks_on_host(pid),
        after.page.tables,
        rates,
        load.get("room", -1),
        load.get("rounds", -1),
        load.get("missed", {}),
        head["exchanges"],
        (now - head["exchange_ns"]) / 1e9 if head["exchanges"] else -1.0,
        head["exchanged_bytes"],
    )


class _StackRequests:
    """Asks ranks for their stacks, and reads the stacks that they write.

    A rank's file may contain stacks from an earlier request. So this object notes the size of the file before its own
    request, and reads only what follows.
    """

    def __init__(self) -> None:
        # page -> (size of the rank's file before the request, identity of the main thread, time of the request)
        self._requests: dict[Path, tuple[int, int, float]] = {}

    def send(self, looks: Mapping[Path, _Sample]) -> None:
        """Send the signal for a request to each rank that handles this signal."""
        for path, look in looks.items():
            number, file = look.page.head["signal"], path.with_suffix(folders.STACKS)
            with suppress(OSError):
                size = file.stat().st_size
                if number and catches(int(path.stem), number):
                    self._requests[path] = size, look.page.head["thread"], time.monotonic()
                    os.kill(int(path.stem), number)

    def read(self, path: Path) -> list[list[StackFrame]]:
        """Return the stacks of a rank's threads, the main thread first. Each stack begins with its innermost frame.

        Waits for the stacks until `STACK_SECONDS` after the request. Returns an empty list if the rank has not written
        its stacks by then.
        """
        if path not in self._requests:
            return []
        size, thread, sent = self._requests[path]
        while True:
            with suppress(OSError), open(path.with_suffix(folders.STACKS), encoding="utf-8", errors="replace") as file:
                file.seek(size)
                stacks = _parse_stacks(file.read(), thread, _read_folder(int(path.stem)))
                if stacks or time.monotonic() > sent + STACK_SECONDS:
                    return stacks
            if time.monotonic() > sent + STACK_SECONDS:
                return []
            time.sleep(0.02)


def catches(pid: int, number: int) -> bool:
    """True if a process has a handler for the signal `number`.

    If the program has removed the handler, do not send the signal, because it would kill the process.
    """
    caught = re.search(r"^SigCgt:\s*([0-9a-f]+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return caught is not None and bool(int(caught[1], 16) >> (number - 1) & 1)


def _read_folder(pid: int) -> str:
    """Return the current folder of a process, or "" if it cannot be read."""
    with suppress(OSError):
        return os.readlink(f"/proc/{pid}/cwd")
    return ""


def _parse_stacks(text: str, main: int, folder: str) -> list[list[StackFrame]]:
    """Parse the stacks that faulthandler has written. Return the stacks of all threads, the main thread first.

    Returns an empty list if the stack of the main thread has not been written yet.

    Args:
        text: The text that faulthandler has written.
        main: The identity of the main thread.
        folder: The current folder of the process. Relative file names in `text` are relative to this folder.
    """
    stacks: dict[int, list[StackFrame]] = {main: []}
    thread = 0
    for line in text.splitlines():
        if header := THREAD.match(line):
            thread = int(header.group(1), 16)
            stacks.setdefault(thread, [])
        elif thread and (match := FRAME.match(line)):
            path = match.group(1)
            path = path if path.startswith("<") else os.path.join(folder, path)
            frame = StackFrame(path, int(match.group(2)), match.group(3))
            text = linecache.getline(path, frame.line).strip() if frame.is_users else ""
            stacks[thread].append(frame._replace(text=text))
    return [*stacks.values()] if stacks[main] else []
