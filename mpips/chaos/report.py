"""Report on a job under faults: how fast it continued, how much it repeated, and whether its results changed.

The report says how many seconds the job took to continue after each fault, how many rounds it repeated, and whether its
results equal those of a run without faults, bit for bit. All functions are pure: they only read the recorded run.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

import msgspec

from mpips.chaos.injector import Message, ProgramNote, StoreCreated, StoreRecovered
from mpips.chaos.watch import FaultAttempt, WatchedRun

EQUAL = "equal"


class Outcome(msgspec.Struct, frozen=True):
    """The outcome of one fault.

    Attributes:
        fault: The number of the fault in the plan.
        rank: The rank that the fault hit, or whose host it hit. -1 if the job ended before the fault was due.
        role: The role of this rank.
        host: The host of this rank, if the fault hit a whole host.
        at: When the fault was made, in seconds since the first store was made.
        seconds: The seconds from the fault until every surviving worker has begun a new step. None if the workers did
            not continue.
        undone: Why the fault was not made, or "".
    """

    fault: int
    kind: str
    rank: int
    role: str
    host: str
    at: float
    seconds: float | None
    undone: str


class ChaosReport(msgspec.Struct, frozen=True):
    """The report of a run.

    Attributes:
        code: The exit code of the job.
        hung: True if the job was ended at its time limit.
        seconds: How long the job ran.
        repeated: The number of rounds that were repeated after recoveries.
        skipped: How many steps no worker noted.
        bits: "equal" if all notes equal the reference's, or a description of the first difference. "" if there is no
            reference, and repeated steps gave the same bits.
        left: Processes and files that the job left behind.
    """

    seed: int
    code: int
    hung: bool
    seconds: float
    faults: list[Outcome]
    repeated: int
    skipped: int
    bits: str
    left: list[str]

    @property
    def good(self) -> bool:
        """True if the job ended well and left nothing behind, and no bits differ."""
        return not (self.code or self.hung or self.left) and self.bits in ("", EQUAL)

    def percentile(self, percent: float) -> float | None:
        """Return a percentile (nearest rank) of the seconds that the job took to continue after a fault.

        Return None if the job did not continue after any fault.
        """
        seconds = sorted(fault.seconds for fault in self.faults if fault.seconds is not None)
        return seconds[max(0, math.ceil(percent / 100 * len(seconds)) - 1)] if seconds else None


def judge(run: WatchedRun, reference: WatchedRun | None = None) -> ChaosReport:
    """Report on a run, and compare its notes with those of a run of the same program without faults. Local.

    Args:
        run: The run that `watch` has returned.
        reference: A run without faults. Without a reference, only the steps that the run has repeated are compared.

    >>> run = mpips.chaos.watch(["true"], mpips.chaos.FaultPlan(), limit=20)
    >>> mpips.chaos.judge(run).good
    True
    """
    began = began_at(run)
    attempts = sorted(run.attempts, key=lambda attempt: attempt.time)
    times = [attempt.time for attempt in attempts if not attempt.undone]
    killed = {rank: attempt.time for attempt in attempts for rank in attempt.killed}

    def outcome(attempt: FaultAttempt) -> Outcome:
        later = [time for time in times if time > attempt.time]
        seconds = None if attempt.undone else _seconds(run.messages, attempt.time, later, killed)
        kind = run.plan.faults[attempt.fault].kind
        return Outcome(
            attempt.fault, kind, attempt.rank, attempt.role, attempt.host, attempt.time - began, seconds, attempt.undone
        )

    outcomes = [outcome(attempt) for attempt in attempts]
    reached = {attempt.fault for attempt in attempts}
    outcomes += [
        Outcome(number, fault.kind, -1, "", "", 0.0, None, "the job ended before")
        for number, fault in enumerate(run.plan.faults)
        if number not in reached
    ]
    notes = notes_of(run)
    steps = {note.step for note in notes}
    skipped = max(steps) - min(steps) + 1 - len(steps) if steps else 0
    seconds = run.ended - run.began
    bits = _bits(notes, notes_of(reference) if reference else [])
    return ChaosReport(
        run.plan.seed, run.code, run.hung, seconds, outcomes, _repeated(run.messages), skipped, bits, list(run.left)
    )


def began_at(run: WatchedRun) -> float:
    """Return the time at which the first store was made, or the beginning of the run if it made no store."""
    return min((message.time for message in run.messages if isinstance(message, StoreCreated)), default=run.began)


def notes_of(run: WatchedRun) -> list[ProgramNote]:
    """Return everything that the programs of a run have noted, in order of time."""
    return _notes(run.messages)


def _notes(messages: Sequence[Message]) -> list[ProgramNote]:
    return sorted((each for each in messages if isinstance(each, ProgramNote)), key=lambda note: note.time)


def _seconds(
    messages: Sequence[Message], time: float, later: Sequence[float], killed: dict[int, float]
) -> float | None:
    """Return the seconds from a fault at `time` until all workers continue, or None if they never do.

    First check whether the workers continue before the next of the `later` faults. If they do not, check whether they
    continue before the fault after that, and so on. One recovery then counts for several faults.
    """
    for end in [*later, math.inf]:
        went_on = _went_on(messages, time, end, killed)
        if went_on is not None:
            return went_on - time
    return None


def _went_on(messages: Sequence[Message], time: float, end: float, killed: dict[int, float]) -> float | None:
    """Return the time at which all ranks have continued after a fault at `time`: the last rank has begun a new step.

    If ranks have recovered between `time` and `end`, all of these ranks must begin a step after their last recovery.
    Return None if the ranks do not continue before `end`.
    """
    before: dict[int, int] = {}
    recovered: dict[int, float] = {}
    for message in messages:
        if isinstance(message, ProgramNote) and message.time <= time:
            before[message.rank] = max(before.get(message.rank, -1), message.step)
        elif isinstance(message, StoreRecovered) and time < message.time < end:
            recovered[message.rank] = max(recovered.get(message.rank, 0.0), message.time)
    first: dict[int, float] = {}
    for note in _notes(messages):
        if not time < note.time < end:
            continue
        rank = note.rank
        new = note.time > recovered[rank] if rank in recovered else note.step > before.get(rank, -1)
        if new and (rank in recovered or not recovered):
            first.setdefault(rank, note.time)
    wanted = [rank for rank in recovered or before if killed.get(rank, math.inf) >= end]
    if recovered:
        return max(first.values()) if wanted and all(rank in first for rank in wanted) else None
    going = [first[rank] for rank in wanted if rank in first]
    return max(going) if going else None


def _repeated(messages: Sequence[Message]) -> int:
    """Return the largest number of rounds that a worker has repeated after its recoveries."""
    again: defaultdict[int, int] = defaultdict(int)
    newest: dict[int, int] = {}
    fresh: set[int] = set()
    relevant = (message for message in messages if isinstance(message, ProgramNote | StoreRecovered))
    for message in sorted(relevant, key=lambda message: message.time):
        if isinstance(message, StoreRecovered):
            fresh.add(message.rank)
            continue
        if message.rank in fresh:
            again[message.rank] += max(0, newest.get(message.rank, message.step) - message.step)
            fresh.discard(message.rank)
        newest[message.rank] = message.step
    return max(again.values(), default=0)


def _bits(notes: Sequence[ProgramNote], reference: Sequence[ProgramNote]) -> str:
    """Compare the notes of each step and worker with the reference. Return a description of the first difference.

    The notes of a repeated step are also compared with each other, because they must have the same bits. Return "equal"
    if no notes differ, or "" if no notes differ and there is no reference.
    """
    wanted = {(note.step, note.worker): note for note in reference}
    for note in sorted(notes, key=lambda note: note.step):
        first = wanted.setdefault((note.step, note.worker), note)
        if first.workers != note.workers:
            return f"step {note.step} has {note.workers} workers, and {first.workers} in another run of it"
        if first.digest != note.digest:
            shown = f": {note.value!r}, not {first.value!r}" if note.value is not None else ""
            return f"differ from step {note.step} of worker {note.worker} on{shown}"
    missing = {step for step, _ in wanted} - {note.step for note in notes}
    if reference and missing:
        return f"step {min(missing)} of the reference was not noted"
    return EQUAL if reference else ""
