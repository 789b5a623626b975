"""Report on a job under faults: seconds until it goes on, rounds done again, bits compared with an undisturbed run.

Pure functions of what was recorded.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

import msgspec

from mpips.chaos.injector import Made, Note, Recovered, Told
from mpips.chaos.watch import Done, Run

EQUAL = "equal"


class Outcome(msgspec.Struct, frozen=True):
    """What became of one fault.

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


class Report(msgspec.Struct, frozen=True):
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
        found = sorted(fault.seconds for fault in self.faults if fault.seconds is not None)
        return found[max(0, math.ceil(percent / 100 * len(found)) - 1)] if found else None


def judge(run: Run, reference: Run | None = None) -> Report:
    """Return the report of a run, compared with a run of the same program without faults if that is given."""
    began = began_at(run)
    made = sorted(run.done, key=lambda done: done.time)
    times = [done.time for done in made if not done.undone]
    killed = {rank: done.time for done in made for rank in done.killed}

    def outcome(done: Done) -> Outcome:
        later = [time for time in times if time > done.time]
        seconds = None if done.undone else _seconds(run.told, done.time, later, killed)
        kind = run.plan.faults[done.fault].kind
        return Outcome(done.fault, kind, done.rank, done.role, done.host, done.time - began, seconds, done.undone)

    outcomes = [outcome(done) for done in made]
    reached = {done.fault for done in made}
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
    return Report(
        run.plan.seed, run.code, run.hung, seconds, outcomes, _repeated(run.told), skipped, bits, list(run.left)
    )


def began_at(run: Run) -> float:
    """Return when the first store was made, or when the run began if it made none."""
    return min((told.time for told in run.told if isinstance(told, Made)), default=run.began)


def notes_of(run: Run) -> list[Note]:
    """Return the notes of a run's programs, in order of time."""
    return sorted((told for told in run.told if isinstance(told, Note)), key=lambda note: note.time)


def _seconds(told: Sequence[Told], time: float, later: Sequence[float], killed: dict[int, float]) -> float | None:
    """Return the seconds from a fault at `time` until all workers go on, or None.

    If they go on only after the next of the `later` faults, the recovery belongs to both faults.
    """
    for end in [*later, math.inf]:
        went_on = _went_on(told, time, end, killed)
        if went_on is not None:
            return went_on - time
    return None


def _went_on(told: Sequence[Told], time: float, end: float, killed: dict[int, float]) -> float | None:
    """Return when the last of the ranks that worked at `time` began a new step.

    If a rank has recovered before `end`, only steps after its last recovery count. Return None if this is not before
    `end`.
    """
    before: dict[int, int] = {}
    recovered: dict[int, float] = {}
    for one in told:
        if isinstance(one, Note) and one.time <= time:
            before[one.rank] = max(before.get(one.rank, -1), one.step)
        elif isinstance(one, Recovered) and time < one.time < end:
            recovered[one.rank] = max(recovered.get(one.rank, 0.0), one.time)
    first: dict[int, float] = {}
    for one in sorted((one for one in told if isinstance(one, Note) and time < one.time < end), key=lambda n: n.time):
        new = one.time > recovered[one.rank] if one.rank in recovered else one.step > before.get(one.rank, -1)
        if new and (one.rank in recovered or not recovered):
            first.setdefault(one.rank, one.time)
    wanted = [rank for rank in recovered or before if killed.get(rank, math.inf) >= end]
    if recovered:
        return max(first.values()) if wanted and all(rank in first for rank in wanted) else None
    going = [first[rank] for rank in wanted if rank in first]
    return max(going) if going else None


def _repeated(told: Sequence[Told]) -> int:
    """Return the largest number of rounds that a worker did again after its recoveries."""
    again: defaultdict[int, int] = defaultdict(int)
    newest: dict[int, int] = {}
    fresh: set[int] = set()
    for one in sorted((one for one in told if isinstance(one, Note | Recovered)), key=lambda one: one.time):
        if isinstance(one, Recovered):
            fresh.add(one.rank)
            continue
        if one.rank in fresh:
            again[one.rank] += max(0, newest.get(one.rank, one.step) - one.step)
            fresh.discard(one.rank)
        newest[one.rank] = one.step
    return max(again.values(), default=0)


def _bits(notes: Sequence[Note], reference: Sequence[Note]) -> str:
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
