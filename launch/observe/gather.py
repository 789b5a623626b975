"""Read what the ranks of a job on this machine do: their pages, what the kernel says of them, and their stacks.

Nothing is stopped. A rank answers a signal by writing its threads' stacks into a file, without Python's help, so also
where it is deep in a library or in an endless loop. Two looks some time apart tell what moves.
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
from mpips.collectives.recorder.page import NUMBERS, PAGE_BYTES, Lane, Seen, read, read_lanes

MARKS_SECONDS = 0.005
"""Between two looks at marks."""
STACK_SECONDS = 1.0
"""At most, for ranks to write their stacks."""
LOCAL_SIZES = (b"OMPI_COMM_WORLD_LOCAL_SIZE", b"MPI_LOCALNRANKS")
"""Variables of Open MPI's launcher and of MPICH's."""
MOST_CALLS = 3
"""Of a rank that are named as its last."""
TICKS = os.sysconf("SC_CLK_TCK")
OURS = str(Path(__file__).parents[2])
FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')
THREAD = re.compile(r"(?:Current t|T)hread 0x([0-9a-f]+)")
LIBRARIES = re.compile(r"/(?:site|dist)-packages/|/lib(?:64)?/python3\.\d+/|^<")


class Frame(NamedTuple):
    """One line of a stack."""

    path: str
    line: int
    function: str
    text: str = ""
    """The line itself, where it can be read on the rank's host."""

    @property
    def is_ours(self) -> bool:
        """Return whether it is of mpips."""
        return self.path.startswith(f"{OURS}/")

    @property
    def is_users(self) -> bool:
        """Return whether it is of the program, and of no library."""
        return not self.is_ours and not LIBRARIES.search(self.path)

    def __str__(self) -> str:
        inside = "" if self.function == "<module>" else f", {self.function}"
        return f"{os.path.basename(self.path)}:{self.line}{inside}"


class Wait(NamedTuple):
    """A wait of one thread: for what, for how many seconds, for which ranks, as far as known, and from which line.

    `thread` is the name of the thread, "" of the main one.
    """

    what: str
    seconds: float
    late: tuple[int, ...]
    line: str
    thread: str = ""


class Rank(NamedTuple):
    """One rank, as it looks from outside. -1 and "" are unknown.

    `state` is the kernel's letter, "" where the process is gone. `cpu` and `waiting` are shares of the time between the
    two looks. `moved`: whether it has begun a call meanwhile. `stack`: of the main thread, innermost first.
    """

    rank: int
    size: int
    role: str
    host: str
    pid: int
    program: tuple[str, ...]
    generation: int
    step: int
    step_seconds: float
    waits: tuple[Wait, ...]
    lanes: tuple[Lane, ...]
    end: Mapping[str, Any]
    state: str
    cpu: float
    waiting: float
    moved: bool
    stack: tuple[Frame, ...]
    memory_bytes: int
    began: float
    """Unix time."""
    waited_seconds: float
    wait_count: int
    calls: int
    failures: int
    checkpoints: int
    cpu_seconds: float
    notes: Mapping[str, float]
    threads: tuple[tuple[Frame, ...], ...]
    """Stacks of its other threads."""
    member: int
    """Its number among those of its role."""
    became: str
    """The words of the other program that its process has become, by exec; else ""."""
    step_rate: float
    """Steps a second between the two looks, from the times of steps; -1 where none has ended between them."""
    byte_rate: float = -1.0
    """Bytes a second between the two looks, of what it has pushed, or, a server, has taken in, and of its collectives
    on one host; -1: not looked for, or nothing is known."""
    taken: Mapping[str, float] = {}
    """Of a server, bytes a second by the workers that have pushed them."""
    queued: int = -1
    """Of a server, pushes and pulls that wait there."""
    taken_bytes: int = 0
    """Of a server, bytes that it has taken in."""
    communicators: Mapping[str, Any] = {}
    """Of its lanes, by their identity, the ranks, and how many communicators of the same ranks were made before."""
    ranks_on_host: int = -1
    """How many ranks of the job were started on its host, itself among them, as MPI's launcher says."""
    tables: Mapping[str, Mapping[str, int]] = {}
    """By table, its numbers there: see `page.TABLE`."""
    table_rates: Mapping[str, Mapping[str, float]] = {}
    """By how much they have grown a second between the two looks."""
    room_bytes: int = -1
    """Of a server with tables, the bytes that new rows may take before a push is refused."""
    quorum_rounds: int = -1
    """Of a server, rounds that a quorum has closed."""
    missed: Mapping[str, int] = {}
    """Of these, by worker, those that it was not in, or came late to."""
    exchanges: int = 0
    """Exchanges of parameters between which it trains by itself."""
    exchange_seconds: float = -1.0
    """How long ago the last one was over."""
    exchanged_bytes: int = 0

    @property
    def lives(self) -> bool:
        """Return whether its process is there."""
        return self.state not in ("", "Z", "X")

    @property
    def stopped(self) -> bool:
        """Return whether a signal has stopped it."""
        return self.state in ("T", "t")

    @property
    def last_call(self) -> str:
        """Return the text of the call that it has begun last in a store, else in a communicator; "" for none.

        Of several stores, or communicators, it is unknown which was the last, so that of each is named.
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
        """Return the innermost line of the user's program."""
        return next((frame for frame in self.stack if frame.is_users), None)

    @property
    def other_frames(self) -> tuple[Frame, ...]:
        """Return of each other thread the innermost line of the user's program, where it has one."""
        found = (next((frame for frame in stack if frame.is_users), None) for stack in self.threads)
        return tuple(frame for frame in found if frame is not None)

    @property
    def in_mpips(self) -> bool:
        """Return whether its main thread is in a call of mpips."""
        runner = os.path.join(OURS, "__main__.py")
        for frame in self.stack:
            if frame.is_users:
                return False
            if frame.is_ours and frame.path != runner:
                return True
        return False

    @property
    def is_called_back(self) -> bool:
        """Return whether its main thread is in the user's code that mpips has called, such as an optimizer."""
        return not self.in_mpips and any(frame.is_ours for frame in self.stack)


class _Look(NamedTuple):
    """One look at a rank."""

    seen: Seen
    state: str
    cpu_seconds: float
    memory_bytes: int
    at: float
    became: str = ""


def jobs(top: Path | None = None) -> list[Path]:
    """Return the folders of this user's jobs, those with living ranks behind the others, the newest last."""
    top = folders.of_jobs() if top is None else top
    try:
        if not folders.is_private(top):
            return []
        found = [path for path in top.iterdir() if any(path.glob(f"*{folders.PAGE}")) or folders.read_hosts(path)]
    except OSError:
        return []
    return sorted(found, key=lambda path: (has_living(path), folders.modified(path)))


def has_pages(folder: Path) -> bool:
    """Return whether something is known of a rank of the job here, dead or alive."""
    with suppress(OSError):
        return any(read(path) is not None for path in folder.glob(f"*{folders.PAGE}"))
    return False


def has_living(folder: Path) -> bool:
    """Return whether a rank of the job lives here, or its launcher, where its ranks are elsewhere."""
    pages = folder.glob(f"*{folders.PAGE}")
    return folders.is_launched_here(folder) or any(_owns(int(path.stem), path) for path in pages)


def gather(folder: Path, seconds: float = 0.5, stacks: bool = True) -> list[Rank]:
    """Return the ranks of a job, in their order, from two looks so far apart. Blocking, for a second more at most.

    With `stacks` ranks are asked where they are. Between the looks their marks are looked at again and again, which
    tells how many bytes they move by collectives: all of calls that take as long as `MARKS_SECONDS`, others about.
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
    """Look at marks for so long; return how many bytes each page's rank has moved by collectives."""
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
    """Return one of each number, in their order: the living, else the newest."""
    newest: dict[int, Rank] = {}
    for rank in sorted(ranks, key=lambda one: (one.lives, one.began, one.pid)):
        newest[rank.rank] = rank  # a spare that has taken a dead rank's place is there beside it
    return [newest[number] for number in sorted(newest)]


def _owns(pid: int, path: Path) -> bool:
    """Return whether the process of this number has this page, and is none that came later."""
    try:
        return str(path) in Path(f"/proc/{pid}/maps").read_text()
    except PermissionError:  # a container without ptrace, or a process that is not dumpable
        return _has_begun(pid, folders.modified(path))
    except OSError:
        return False


def _has_begun(pid: int, by: float) -> bool:
    """Return whether there is a process of this number that began by then, in Unix time."""
    with suppress(OSError, StopIteration):
        ticks = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
        boot = next(int(line.split()[1]) for line in Path("/proc/stat").read_text().splitlines() if line[:5] == "btime")
        return boot + ticks / TICKS <= by + 1
    return False


def _became(pid: int, began: float) -> str:
    """Return the words of the program that a process without its page is, where it is the one that began then."""
    with suppress(OSError):
        if _has_begun(pid, began):
            return " ".join(Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")).strip()[:80]
    return ""


def _ranks_on_host(pid: int) -> int:
    """Return how many ranks of its job were started on the host of a process; -1 where that is unknown."""
    with suppress(OSError, ValueError):
        pairs = (word.partition(b"=") for word in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))
        return next((int(number) for name, _, number in pairs if name in LOCAL_SIZES), -1)
    return -1


def read_end(folder: Path) -> Mapping[str, Any]:
    """Return what `mpips run` has written of the end of a job: `heard`, or `death` and `sentence`; {} where nothing."""
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
    """Return the ranks of all hosts, with what workers have pushed: servers have counted it."""
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
    head, identity, now = after.seen.head, after.seen.identity, time.monotonic_ns()
    apart = max(after.at - before.at, 1e-9)
    waits = tuple(
        Wait(one["what"], (now - one["since_ns"]) / 1e9, tuple(one["late"]), one["line"], one["thread"])
        for one in after.seen.waits
    )
    waited = (head["waited_ns"] - before.seen.head["waited_ns"]) / 1e9
    still = max((min(wait.seconds, apart) for wait in waits), default=0.0)
    step, steps = head["step"] - 1, head["step"] - before.seen.head["step"]
    took = head["step_ns"] - before.seen.head["step_ns"]
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
    """Stacks that ranks are asked for. What an earlier look has left in their files does not count."""

    def __init__(self) -> None:
        self._from: dict[Path, tuple[int, int, float]] = {}

    def ask(self, looks: Mapping[Path, _Look]) -> None:
        """Send the signal to those that answer it."""
        for path, look in looks.items():
            number, file = look.seen.head["signal"], path.with_suffix(folders.STACKS)
            with suppress(OSError):
                size = file.stat().st_size
                if number and catches(int(path.stem), number):
                    self._from[path] = size, look.seen.head["thread"], time.monotonic()
                    os.kill(int(path.stem), number)

    def take(self, path: Path) -> list[list[Frame]]:
        """Return the stacks, the main thread's first, each innermost first; [] where there is no answer in time."""
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
    """Return whether a process still answers a signal: the program may have set it back, and would be ended by it."""
    caught = re.search(r"^SigCgt:\s*([0-9a-f]+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return caught is not None and bool(int(caught[1], 16) >> (number - 1) & 1)


def _folder_of(pid: int) -> str:
    """Return the current folder of a process, "" where that cannot be seen."""
    with suppress(OSError):
        return os.readlink(f"/proc/{pid}/cwd")
    return ""


def _threads(text: str, main: int, folder: str) -> list[list[Frame]]:
    """Return the stacks in what `faulthandler` writes, that of one thread first; names of files are below `folder`.

    [] while that one has not been written.
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
