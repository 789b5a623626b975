"""The report of a job under faults: seconds to go on, rounds done again, bits beside a run without faults. Pure."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

import msgspec

from mpips.chaos.injector import Made, Note, Recovered, Told
from mpips.chaos.watch import Done, Run

EQUAL = "equal"


class Outcome(msgspec.Struct, frozen=True):
    """One fault. `host`: the rank's, where it was a fault of that. `at`: seconds since the first store was made.
    `seconds`: from the fault until every worker that was there and lived has begun a new step; None where none began
    one any more."""

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

    `repeated`: rounds that were done again after a recovery. `skipped`: steps that nobody noted. `bits`: "equal", what
    differs, or "" where nothing was noted twice and there is no reference.
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
        """Return whether the job ended well, nothing is left of it, and no bits differ."""
        return not (self.code or self.hung or self.left) and self.bits in ("", EQUAL)

    def percentile(self, percent: float) -> float | None:
        """Of the seconds to go on, the nearest rank; None where there are none."""
        found = sorted(fault.seconds for fault in self.faults if fault.seconds is not None)
        return found[max(0, math.ceil(percent / 100 * len(found)) - 1)] if found else None


def judge(run: Run, reference: Run | None = None) -> Report:
    """Return the report of a run, beside one of the same program without faults where there is one."""
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
    """Return when the first store was made; the beginning of a run that made none."""
    return min((told.time for told in run.told if isinstance(told, Made)), default=run.began)


def notes_of(run: Run) -> list[Note]:
    """Return what its programs noted, in order of time."""
    return sorted((told for told in run.told if isinstance(told, Note)), key=lambda note: note.time)


def _seconds(told: Sequence[Told], time: float, later: Sequence[float], killed: dict[int, float]) -> float | None:
    """From a fault at `time` until all go on. A recovery after the next of the `later` faults is of both."""
    for end in [*later, math.inf]:
        went_on = _went_on(told, time, end, killed)
        if went_on is not None:
            return went_on - time
    return None


def _went_on(told: Sequence[Told], time: float, end: float, killed: dict[int, float]) -> float | None:
    """Return when the last of the ranks that worked at `time` began a new step, after its last recovery before `end`.

    None where that is not before `end`.
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
    """Return the most rounds that a worker did again after its recoveries."""
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
    """Return whether notes of a step and worker are the same whenever it was done, and those of the reference."""
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
