"""Report on a job under faults: seconds until it goes on, rounds done again, bits compared with an undisturbed run.

Pure functions of what was recorded.
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
        host: The host of the rank, if the fault hit the host.
        at: Seconds since the first store was made.
        seconds: From the fault until every worker that was there and survived has begun a new step, or None if they
            never did.
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
        repeated: Rounds that were done again after a recovery.
        skipped: Steps that no worker noted.
        bits: "equal", a description of the first difference, or "" if there is no reference and no difference.
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
        """True if the job ended well, nothing is left of it, and no bits differ."""
        return not (self.code or self.hung or self.left) and self.bits in ("", EQUAL)

    def percentile(self, percent: float) -> float | None:
        """Return a percentile (nearest rank) of the seconds until the job went on, or None if there are none."""
        seconds = sorted(fault.seconds for fault in self.faults if fault.seconds is not None)
        return seconds[max(0, math.ceil(percent / 100 * len(seconds)) - 1)] if seconds else None


def judge(run: WatchedRun, reference: WatchedRun | None = None) -> ChaosReport:
    """Report on a run, and compare its notes with those of a run of the same program without faults. Local.

    Args:
        run: What `watch` has returned.
        reference: A run without faults. Without it, only steps that the run has repeated are compared.

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
    """Return when the first store was made, or when the run began if it made none."""
    return min((message.time for message in run.messages if isinstance(message, StoreCreated)), default=run.began)


def notes_of(run: WatchedRun) -> list[ProgramNote]:
    """Return the notes of a run's programs, in order of time."""
    return _notes(run.messages)


def _notes(messages: Sequence[Message]) -> list[ProgramNote]:
    return sorted((each for each in messages if isinstance(each, ProgramNote)), key=lambda note: note.time)


def _seconds(
    messages: Sequence[Message], time: float, later: Sequence[float], killed: dict[int, float]
) -> float | None:
    """Return the seconds from a fault at `time` until all workers go on, or None.

    If they go on only after the next of the `later` faults, the recovery belongs to both faults.
    """
    for end in [*later, math.inf]:
        went_on = _went_on(messages, time, end, killed)
        if went_on is not None:
            return went_on - time
    return None


def _went_on(messages: Sequence[Message], time: float, end: float, killed: dict[int, float]) -> float | None:
    """Return when the last of the ranks that worked at `time` began a new step.

    If a rank has recovered before `end`, only steps after its last recovery count. Return None if this is not before
    `end`.
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
    """Return the largest number of rounds that a worker did again after its recoveries."""
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
    """Compare notes of the same step and worker, in this run and in the reference. Return the first difference.

    A step that is done again must give the same bits. Without a difference, return "equal", or "" without a reference.
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
