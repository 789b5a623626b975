"""Say in one paragraph what a job does, or why it stands: who waits in what for whom, and what that one does. Pure."""

from __future__ import annotations

import linecache
import os
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from collectives.errors import ranks as name_ranks
from launch.observe.gather import Rank, Wait

STANDS_SECONDS = 1.0
"""A wait of so long is no part of a usual step: the job is said to stand."""
SLOW_SHARE = 0.25
"""A rank holds the others up that waits less than half of what each other does, where that is so much of their time."""


class Explanation(NamedTuple):
    """Hold a sentence on a job. `kind` is "ended", "stands", "slow" or "runs"; `culprits` are the ranks to look at."""

    kind: str
    sentence: str
    culprits: tuple[int, ...]


def explain(name: str, ranks: Sequence[Rank]) -> Explanation:
    """Explain a job of this name by what its ranks look like; at least one."""
    size = max(one.size for one in ranks)
    program = next((" ".join(map(os.path.basename, one.program[:1])) for one in ranks if one.program), "")
    head = f"job {name} ({program + ', ' if program else ''}{size} rank{'s' * (size > 1)})"
    if not any(one.lives for one in ranks):
        return _ended(head, ranks, size)
    waits = {one.rank: wait for one in ranks if one.lives and not one.stopped and (wait := _longest(one)) is not None}
    if waits:
        return _stands(head, ranks, waits, size)
    return _goes_on(head, ranks)


def _longest(rank: Rank) -> Wait | None:
    """Return the wait of a rank that has lasted longest, of those that last."""
    long = [wait for wait in rank.waits if wait.seconds >= STANDS_SECONDS]
    return max(long, key=lambda wait: wait.seconds, default=None)


# ---- a job that stands


def _stands(head: str, ranks: Sequence[Rank], waits: dict[int, Wait], size: int) -> Explanation:
    seconds = max(wait.seconds for wait in waits.values())
    groups: dict[tuple[str, str], list[int]] = {}
    for rank, wait in waits.items():
        groups.setdefault((wait.what, wait.line), []).append(rank)
    waiting = [
        f"{name_ranks(members)} wait{'s' * (len(members) == 1)} in {what}{f' ({line})' if line else ''}"
        for (what, line), members in groups.items()
    ]
    culprits = _culprits(ranks, waits, size)
    steps = [one.step for one in ranks if one.step >= 0]
    step = f" in step {min(steps)}" if steps else ""
    begin = f"{head} stands since {_seconds(seconds)}{step}: {'; '.join(waiting)}"
    if not culprits:
        alike = len({wait.what for wait in waits.values()}) == 1 and len(_lanes_ahead(ranks, waits)) < 2
        why = (
            "all ranks are in it, so what they wait for is under way between hosts, or a server does not answer"
            if alike
            else "they have made different calls, and each waits for the others: a deadlock. All ranks must make the "
            "same calls in the same order"
        )
        return Explanation("stands", f"{begin}. {why[0].upper()}{why[1:]}.", tuple(waits))
    known = {one.rank: one for one in ranks}
    described = [_describe(number, known.get(number)) for number in culprits]
    return Explanation("stands", f"{begin}, for {'; and for '.join(described)}.", tuple(culprits))


def _lanes_ahead(ranks: Sequence[Rank], waits: dict[int, Wait]) -> set[int]:
    """Return the communicators and stores in which a rank that waits has begun a call that another has not."""
    least: dict[int, int] = {}
    for one in ranks:
        for lane in one.lanes:
            least[lane.identity] = min(lane.number, least.get(lane.identity, lane.number))
    ahead = {one.rank: {lane.identity for lane in one.lanes if lane.number > least[lane.identity]} for one in ranks}
    every = [ahead[rank] for rank in waits if ahead[rank]]
    return set().union(*every) if every and not set.intersection(*every) else set()


def _culprits(ranks: Sequence[Rank], waits: dict[int, Wait], size: int) -> list[int]:
    """Return the ranks that the others wait for, and that do not wait themselves."""
    gone = {one.rank for one in ranks if not one.lives}
    stopped = {one.rank for one in ranks if one.lives and one.stopped}
    missing = set(range(size)) - {one.rank for one in ranks}
    late = {rank for wait in waits.values() for rank in wait.late} - set(waits)
    idle = {one.rank for one in ranks if one.lives and one.rank not in waits and not _serves(one)}
    for found in (late & (gone | stopped | missing | idle), gone | stopped, idle, missing):
        if found:
            return sorted(found)
    return []


def _serves(rank: Rank) -> bool:
    return rank.role in ("server", "spare") and not rank.stopped


def _describe(number: int, rank: Rank | None) -> str:
    """Say what a rank does that others wait for."""
    if rank is None:
        return f"rank {number}, which has no page on this machine: it runs on another host, or has not begun"
    role = f" ({rank.role})" if rank.role not in ("", "worker") else ""
    who = f"rank {number}{role}, "
    last = f"; the call that it began last is {rank.last_call}" if rank.last_call else ""
    if not rank.lives:
        said = rank.end.get("failed", "")
        return f"{who}whose process {rank.pid} is gone{f': {said}' if said else ', without a word'}{last}"
    if rank.stopped:
        return f"{who}which is stopped by a signal: `kill -CONT {rank.pid}` lets it go on{last}"
    cpu = f"{100 * rank.cpu:.0f} % CPU"
    frame = rank.user_frame
    line = linecache.getline(frame.path, frame.line).strip() if frame is not None else ""
    at = f" ({frame}{f': `{line}`' if line else ''})" if frame is not None else ""
    if rank.state == "D":
        return f"{who}which waits in the kernel for a disk or a file system{at}"
    if rank.in_mpips:
        return f"{who}which is in a call of mpips{at}, not stopped, {cpu}{last}"
    if not rank.stack:
        return f"{who}which does not say where it is, not stopped, {cpu}{last}"
    return f"{who}which is in Python code outside mpips{at}, not stopped, {cpu}"


# ---- a job that does not stand


def _goes_on(head: str, ranks: Sequence[Rank]) -> Explanation:
    workers = [one for one in ranks if one.lives and not _serves(one)]
    stopped = [one for one in ranks if one.lives and one.stopped]
    if stopped:
        described = "; ".join(_describe(one.rank, one) for one in stopped)
        return Explanation("stands", f"{head}: nobody waits yet for {described}.", tuple(one.rank for one in stopped))
    steps = [one.step for one in workers if one.step >= 0]
    where = f"in step {max(steps)}" if steps else "without a count of steps"
    for one in workers:
        others = [other.waiting for other in workers if other is not one]
        if others and one.waiting < min(others) / 2 and min(others) > SLOW_SHARE:
            slow = f"rank {one.rank} holds the others up: it waits {_percent([one.waiting])} of its time, they wait "
            at = f", and is at {one.user_frame}" if one.user_frame is not None else ""
            return Explanation("slow", f"{head} goes on, {where}, and {slow}{_percent(others)}{at}.", (one.rank,))
    waiting = _percent([one.waiting for one in workers]) if workers else "0 %"
    if any(one.moved for one in ranks):
        return Explanation("runs", f"{head} goes on, {where}; workers wait {waiting} of their time.", ())
    lines = sorted({str(one.user_frame) for one in workers if one.user_frame is not None})
    at = f": they are at {', '.join(lines[:4])}" if lines else ""
    sentence = f"{head}: no rank waits for another, and none has called mpips just now, {where}{at}."
    return Explanation("runs", sentence, ())


def _ended(head: str, ranks: Sequence[Rank], size: int) -> Explanation:
    """A job of which no rank on this machine lives."""
    silent = [one for one in ranks if not one.end.get("failed")]
    own = [one for one in ranks if one.end.get("own")]
    words: dict[str, list[int]] = {}
    for one in ([] if own else silent):
        role = f" ({one.role})" if one.role else ""
        last = f", after {one.last_call} had begun" if one.last_call else ""
        words.setdefault(f"{role} ended without a word, as by SIGKILL{last}.", []).append(one.rank)
    for one in (*own, *(one for one in ranks if one not in own)):
        if sentence := one.end.get("failed"):
            words.setdefault(f" said: {str(sentence).rstrip('.')}.", []).append(one.rank)
    parts = [f"R{name_ranks(members)[1:]}{text}" for text, members in words.items()]
    if own and silent:
        parts.append(f"R{name_ranks([one.rank for one in silent])[1:]} ended with the job.")
    well = size - len(ranks)
    if well > 0:
        parts.append(f"Of the other {well} nothing is kept here: they have ended well, or ran on other hosts.")
    culprits = own or silent or list(ranks)
    return Explanation("ended", f"{head} has ended. {' '.join(parts)}", tuple(one.rank for one in culprits))


def _seconds(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _percent(shares: Iterable[float]) -> str:
    low, high = min(found := list(shares)), max(found)
    return f"{100 * low:.0f} %" if round(100 * low) == round(100 * high) else f"{100 * low:.0f} to {100 * high:.0f} %"


def as_json(name: str, found: Explanation, ranks: Sequence[Rank]) -> dict[str, Any]:
    """Return what is known of a job, as it is printed as JSON."""
    return {
        "job": name, "kind": found.kind, "sentence": found.sentence, "culprits": list(found.culprits),
        "ranks": [
            {
                "rank": one.rank, "role": one.role, "host": one.host, "pid": one.pid, "alive": one.lives,
                "stopped": one.stopped, "generation": one.generation, "step": one.step,
                "step_seconds": round(one.step_seconds, 3), "waiting_share": round(one.waiting, 4),
                "cpu_share": round(one.cpu, 4), "memory_bytes": one.memory_bytes, "last_call": one.last_call,
                "at": str(one.user_frame or ""), "end": dict(one.end),
                "waits": [
                    {"what": wait.what, "seconds": round(wait.seconds, 3), "for": list(wait.late), "line": wait.line}
                    for wait in one.waits
                ],
            }
            for one in ranks
        ],
    }  # fmt: skip
