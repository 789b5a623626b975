"""Say in one paragraph what a job does, or why it is stuck: which ranks wait in which call, and for whom. Pure."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from mpips.collectives.errors import format_ranks as name_ranks
from mpips.collectives.recorder.own import with_line
from mpips.launch.observe.gather import Frame, Rank, Wait

# A wait that lasts this long is not part of an ordinary step: the job is said to stand (to be stuck).
STANDS_SECONDS = 1.0
# A rank holds the others up if it waits less than half as long as each of them does, and if each of them waits for more
# than this share of its time.
SLOW_SHARE = 0.25


class Explanation(NamedTuple):
    """What a job does, in a sentence."""

    # "ended", "stands" (it is stuck), "slow" (a rank holds the others up) or "runs"
    kind: str
    sentence: str
    # the ranks to look at
    culprits: tuple[int, ...]


def explain(
    name: str, ranks: Sequence[Rank], end: Mapping[str, Any] | None = None, unreached: Mapping[str, str] | None = None
) -> Explanation:
    """Explain what a job does, from what its ranks look like.

    Args:
        name: The name of the job.
        ranks: Its ranks, at least one.
        end: What `mpips run` has written about the end of the job (see `read_end`).
        unreached: Host that did not answer -> why.
    """
    found = _explain(name, ranks, end, unreached or {})
    mute = "".join(f" Host {host} does not answer: {why.rstrip('.')}." for host, why in (unreached or {}).items())
    return found._replace(sentence=f"{found.sentence}{mute}")


def _explain(
    name: str, ranks: Sequence[Rank], end: Mapping[str, Any] | None, unreached: Mapping[str, str]
) -> Explanation:
    missing = set(range(max(one.size for one in ranks))) - {one.rank for one in ranks}
    ranks = [one for one in ranks if not is_replaced(one, ranks)]
    size = max(one.size for one in ranks)
    program = next((" ".join(map(os.path.basename, one.program[:1])) for one in ranks if one.program), "")
    head = f"job {name} ({program + ', ' if program else ''}{size} rank{'s' * (size > 1)})"
    if not any(one.lives for one in ranks):
        return _ended(head, ranks, len(missing), end or {})
    waits = {one.rank: wait for one in ranks if one.lives and not one.stopped and (wait := _longest(one)) is not None}
    if waits:
        return _stands(head, ranks, waits, missing, unreached)
    left = _left(ranks, missing)
    if left and not unreached and not any(one.moved for one in ranks):
        return _ends(head, ranks, left)
    return _goes_on(head, ranks)


def is_replaced(rank: Rank, ranks: Iterable[Rank]) -> bool:
    """True if a rank has died, and the job has gone on without it in a later generation."""
    return not rank.lives and any(one.generation > rank.generation >= 0 for one in ranks)


def missed_rounds(ranks: Sequence[Rank]) -> dict[int, float]:
    """Return rank -> the share of all rounds closed by a quorum for which this worker came too late.

    Workers that were always in time are left out.
    """
    closed = sum(max(one.quorum_rounds, 0) for one in ranks)
    missed = {
        one.rank: sum(server.missed.get(str(one.member), 0) for server in ranks)
        for one in ranks
        if one.role == "worker"
    }
    return {rank: count / closed for rank, count in missed.items() if count}


def _longest(rank: Rank) -> Wait | None:
    """Return the longest wait of a rank, or None if no wait has lasted for `STANDS_SECONDS`."""
    long = [wait for wait in rank.waits if wait.seconds >= STANDS_SECONDS]
    return max(long, key=lambda wait: wait.seconds, default=None)


# ---- a job that is stuck


def _stands(
    head: str, ranks: Sequence[Rank], waits: dict[int, Wait], missing: set[int], unreached: Mapping[str, str]
) -> Explanation:
    """Explain a job that is stuck.

    Args:
        head: The beginning of the sentence, which names the job.
        ranks: The ranks that have a page.
        waits: rank -> its longest wait.
        missing: Numbers of ranks that have no page.
        unreached: Host that did not answer -> why.
    """
    seconds = max(wait.seconds for wait in waits.values())
    groups: dict[tuple[str, str], list[int]] = {}
    for rank, wait in waits.items():
        line = f"{wait.line}, in its thread {wait.thread}" if wait.thread and wait.line else wait.line
        groups.setdefault((wait.what, line), []).append(rank)
    waiting = [
        f"{name_ranks(members)} wait{'s' * (len(members) == 1)} in {with_line(what, line)}"
        for (what, line), members in groups.items()
    ]
    culprits = _culprits(ranks, waits, missing)
    steps = [one.step for one in ranks if one.step >= 0 and (one.rank in waits or one.rank in culprits)]
    step = f" in step {min(steps)}" if steps else ""
    begin = f"{head} has been stuck for {_seconds(seconds)}{step}: {'; '.join(waiting)}"
    if not culprits:
        ahead = _lanes_ahead(ranks, waits)
        if len({wait.what for wait in waits.values()}) == 1 and len(ahead) < 2:
            why = _under_way(ranks, len({wait.line for wait in waits.values()}) == 1)
        else:
            which = f": {'; '.join(_ahead(ranks, waits, lane) for lane in sorted(ahead))}" if len(ahead) > 1 else ""
            why = (
                "They have made different calls, and each waits for the others: a deadlock"
                f"{which}. All ranks must make the same calls in the same order"
            )
        return Explanation("stands", f"{begin}. {why}.", tuple(waits))
    known = {one.rank: one for one in ranks}
    apart = len({one.host for one in ranks}) > 1 or bool(unreached)
    left = [] if unreached else _left(ranks, missing)
    described = [
        f"rank {number}, which has ended its program"
        if number in left
        else _describe(number, known.get(number), apart, unreached)
        for number in culprits
    ]
    return Explanation("stands", f"{begin}, for {'; and for '.join(described)}.", tuple(culprits))


def _lanes_ahead(ranks: Sequence[Rank], waits: dict[int, Wait]) -> set[int]:
    """Return the identities of communicators and stores in which waiting ranks are ahead of others.

    A rank is ahead if it has begun a call there that another rank has not begun. Empty if some communicator explains
    all of the waits, because all ranks that are ahead anywhere are ahead in it. Otherwise ranks wait for each other
    crosswise: a deadlock.
    """
    least: dict[int, int] = {}
    for one in ranks:
        for lane in one.lanes:
            least[lane.identity] = min(lane.number, least.get(lane.identity, lane.number))
    ahead = {one.rank: {lane.identity for lane in one.lanes if lane.number > least[lane.identity]} for one in ranks}
    every = [ahead[rank] for rank in waits if ahead[rank]]
    return set().union(*every) if every and not set.intersection(*every) else set()


def _ahead(ranks: Sequence[Rank], waits: dict[int, Wait], identity: int) -> str:
    """Say which ranks have begun a call of one communicator that the others have not begun, and on which line."""
    numbers = {one.rank: lane.number for one in ranks for lane in one.lanes if lane.identity == identity}
    most = max(numbers.values())
    there = [rank for rank in numbers if numbers[rank] == most and rank in waits]
    others = [rank for rank in numbers if numbers[rank] < most]
    texts = {lane.text for one in ranks if one.rank in there for lane in one.lanes if lane.identity == identity}
    lines = ", ".join(sorted({waits[rank].line for rank in there} - {""}))
    has, have = ("have" if len(members) > 1 else "has" for members in (there, others))
    # Calls that ranks wait in are named earlier in the sentence.
    what = ", ".join(sorted(texts - {wait.what for wait in waits.values()}))
    call = with_line(f"call {most} of {_communicator(ranks, identity)}{what and f', {what}'}", lines)
    return f"{name_ranks(there)} {has} begun {call}, which {name_ranks(others)} {have} not begun"


def _communicator(ranks: Sequence[Rank], identity: int) -> str:
    """Name a communicator by its ranks and, if several have the same ranks, by the order in which they were made."""
    known = next((found for one in ranks if (found := one.communicators.get(str(identity)))), None)
    if known is None:
        return "a communicator"
    nth = f"communicator {known['place'] + 1}" if known["place"] else "the first communicator"
    return f"{nth} of {name_ranks(list(map(int, known['ranks'].split(','))))}"


def _culprits(ranks: Sequence[Rank], waits: dict[int, Wait], missing: set[int]) -> list[int]:
    """Return the ranks that the others wait for and that do not wait themselves.

    The first of these sets that is not empty: ranks that a wait names and that are gone, stopped, missing or idle; all
    ranks that are gone or stopped; all idle ranks; all missing ranks.
    """
    gone = {one.rank for one in ranks if not one.lives}
    stopped = {one.rank for one in ranks if one.lives and one.stopped}
    late = {rank for wait in waits.values() for rank in wait.late} - set(waits)
    idle = {
        one.rank for one in ranks if one.lives and one.rank not in waits and (not _serves(one) or one.is_called_back)
    }
    for found in (late & (gone | stopped | missing | idle), gone | stopped, idle, missing):
        if found:
            return sorted(found)
    return []


def _serves(rank: Rank) -> bool:
    return rank.role in ("server", "spare") and not rank.stopped


def _under_way(ranks: Sequence[Rank], same_line: bool) -> str:
    """Say why a job is stuck although all ranks are in a call of the same name."""
    on: dict[str, list[int]] = {}
    for one in ranks:
        on.setdefault(one.host, []).append(one.rank)
    if len(on) < 2:
        servers = [one.rank for one in ranks if one.role == "server"]
        mute = f", or {name_ranks(servers)} (server{'s' * (len(servers) > 1)}) will not answer" if servers else ""
        return f"All {'workers' if servers else 'ranks'} are in it, so what they wait for is under way{mute}"
    hosts = "; ".join(f"{host}, {name_ranks(members)}" for host, members in sorted(on.items()))
    if not same_line:
        return (
            "All ranks live, and are in a call of the same name from different lines: of different stores or "
            "communicators it is a deadlock, as all ranks must make the same calls in the same order; else the "
            f"network between their hosts is cut or slow ({hosts})"
        )
    return f"All ranks are in it, and live: the network between their hosts is cut or slow ({hosts})"


def _describe(number: int, rank: Rank | None, apart: bool = False, unreached: Mapping[str, str] | None = None) -> str:
    """Say what a rank does for which others wait.

    Args:
        number: The rank.
        rank: What was seen of it, or None if it has no page.
        apart: Name its host, too.
        unreached: Host that did not answer -> why.
    """
    if rank is None and unreached:
        named = " or ".join(sorted(unreached))
        return f"rank {number}, of which nothing is known: it runs on host {named}, which does not answer"
    if rank is None:
        return f"rank {number}, which has no page on this machine: it runs on another host, or has not begun"
    role = f" ({rank.role})" if rank.role not in ("", "worker") else ""
    who = f"rank {number}{role}{f' on {rank.host}' if apart else ''}, "
    last = f"; the call that it began last is {rank.last_call}" if rank.last_call else ""
    if not rank.lives:
        said = rank.end.get("failed", "")
        if rank.became:
            return f"{who}whose process {rank.pid} has become another program by exec, `{rank.became}`{last}"
        return f"{who}whose process {rank.pid} is gone{f': {said}' if said else ', without a word'}{last}"
    if rank.stopped:
        return f"{who}which is stopped by a signal: `kill -CONT {rank.pid}` lets it go on{last}"
    cpu = f"{100 * rank.cpu:.0f} % CPU"
    at = f" ({_quoted(rank.user_frame)})" if rank.user_frame is not None else ""
    if others := rank.other_frames:
        shown = "; ".join(dict.fromkeys(map(_quoted, others[:3])))
        last = f"; its other thread{'s are' if len(others) > 1 else ' is'} at {shown}{last}"
    if rank.state == "D":
        return f"{who}which waits in the kernel for a disk or a file system{at}"
    if rank.in_mpips:
        return f"{who}which is in a call of mpips{at}, not stopped, {cpu}{last}"
    if not rank.stack:
        return f"{who}which does not say where it is, not stopped, {cpu}{last}"
    return f"{who}which is in Python code outside mpips{at}, not stopped, {cpu}{last if others else ''}"


def _quoted(frame: Frame) -> str:
    """Return the place of a line of the program, and its text if that could be read."""
    return f"{frame}: `{frame.text}`" if frame.text else str(frame)


# ---- a job that is not stuck


def _left(ranks: Sequence[Rank], missing: set[int]) -> list[int]:
    """Return the ranks that have ended their programs: they were in a communicator, and have no page any more.

    Empty if some ranks may be on hosts that were not looked at, because their pages are not known.
    """
    started = {one.host: one.ranks_on_host for one in ranks if one.lives}
    if -1 in started.values() or sum(started.values()) < max(one.size for one in ranks):
        return []
    joined = {
        int(number) for one in ranks for known in one.communicators.values() for number in known["ranks"].split(",")
    }
    return sorted(missing & joined)


def _ends(head: str, ranks: Sequence[Rank], left: Sequence[int]) -> Explanation:
    """Explain a job in which some ranks have ended their programs, and no other rank has just called mpips."""
    rest = [one for one in ranks if one.lives]
    apart = len({one.host for one in ranks}) > 1
    described = "; and for ".join(_describe(one.rank, one, apart) for one in rest)
    have = "has ended its program, and waits" if len(left) == 1 else "have ended their programs, and wait"
    sentence = f"{head} ends: {name_ranks(left)} {have} in MPI's end for {described}."
    return Explanation("stands", sentence, tuple(one.rank for one in rest))


def _goes_on(head: str, ranks: Sequence[Rank]) -> Explanation:
    workers = [one for one in ranks if one.lives and not _serves(one)]
    stopped = [one for one in ranks if one.lives and one.stopped]
    if stopped:
        apart = len({one.host for one in ranks}) > 1
        described = "; ".join(_describe(one.rank, one, apart) for one in stopped)
        sentence = f"{head}: {described}. No other rank has waited for that as long as {STANDS_SECONDS:.0f} s yet."
        return Explanation("stands", sentence, tuple(one.rank for one in stopped))
    steps = [one.step for one in workers if one.step >= 0]
    where = f"in step {max(steps)}" if steps else "without a count of steps"
    for one in workers:
        others = [other.waiting for other in workers if other is not one]
        if others and one.waiting < min(others) / 2 and min(others) > SLOW_SHARE:
            host = f" on {one.host}" if any(other.host != one.host for other in ranks) else ""
            waits = f"it waits {_percent([one.waiting])} of its time, they wait "
            slow = f"rank {one.rank}{host} holds the others up: {waits}"
            at = f", and is at {one.user_frame}" if one.user_frame is not None else ""
            return Explanation("slow", f"{head} goes on, {where}, and {slow}{_percent(others)}{at}.", (one.rank,))
    waiting = _percent([one.waiting for one in workers]) if workers else "0 %"
    if any(one.moved for one in ranks):
        late = ", ".join(f"{_percent([share])} without rank {rank}" for rank, share in missed_rounds(ranks).items())
        quorum = f" Of its rounds the quorum has closed {late} in time." if late else ""
        return Explanation("runs", f"{head} goes on, {where}; workers wait {waiting} of their time.{quorum}", ())
    lines = sorted({str(one.user_frame) for one in workers if one.user_frame is not None})
    at = f": they are at {', '.join(lines[:4])}" if lines else ""
    sentence = f"{head}: no rank waits for another, and none has called mpips just now, {where}{at}."
    return Explanation("runs", sentence, ())


def _ended(head: str, ranks: Sequence[Rank], well: int, end: Mapping[str, Any]) -> Explanation:
    """Explain a job of which no rank on this machine is alive. `well`: the number of ranks that have no page."""
    if heard := end.get("heard"):
        steps = [one.step for one in ranks if one.step >= 0]
        step = f" in step {max(steps)}" if steps else ""
        by = f"{heard}{' (Ctrl-C)' * (heard == 'SIGINT')}"
        return Explanation("ended", f"{head} has ended{step}: its `mpips run` was told to end by {by}.", ())
    death = str(end.get("death", ""))
    dead = [one for one in ranks if death.startswith(f"rank {one.rank} ") and not one.end.get("own")]
    # The launcher saw which rank died first. Others may have been ended by the same signal together with the job.
    if dead:
        others = [one for one in ranks if one not in dead]
        told = {str(one.end["failed"]).rstrip(".") for one in others if one.end.get("failed")}
        told = {text for text in told if not any(text in other for other in told - {text})}
        last = f", after {dead[0].last_call} had begun" if dead[0].last_call else ""
        said = f" Others said: {'; '.join(sorted(told))}." if told else " The others were ended with the job."
        return Explanation("ended", f"{head} has ended. R{death[1:]}{last}.{said}", (dead[0].rank,))
    silent = [one for one in ranks if not one.end.get("failed")]
    own = [one for one in ranks if one.end.get("own")]
    words: dict[str, list[int]] = {}
    for one in [] if own else silent:
        role = f" ({one.role})" if one.role else ""
        last = f", after {one.last_call} had begun" if one.last_call else ""
        words.setdefault(f"{role} ended without a word, as by SIGKILL{last}.", []).append(one.rank)
    for one in (*own, *(one for one in ranks if one not in own)):
        if sentence := one.end.get("failed"):
            words.setdefault(f" said: {str(sentence).rstrip('.')}.", []).append(one.rank)
    parts = [f"R{name_ranks(members)[1:]}{text}" for text, members in words.items()]
    if own and silent:
        parts.append(f"R{name_ranks([one.rank for one in silent])[1:]} ended with the job.")
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


def as_json(
    name: str, found: Explanation, ranks: Sequence[Rank], unreached: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Return what is known about a job as JSON-serialisable data. Unknown numbers are None."""
    return {
        "job": name,
        "kind": found.kind,
        "sentence": found.sentence,
        "culprits": list(found.culprits),
        "unreached": dict(unreached or {}),
        "ranks": [
            {
                "rank": one.rank,
                "role": one.role,
                "host": one.host,
                "pid": one.pid,
                "alive": one.lives,
                "stopped": one.stopped,
                "generation": one.generation,
                "step": one.step,
                "step_seconds": round(one.step_seconds, 3),
                "steps_per_second": round(one.step_rate, 3) if one.step_rate >= 0 else None,
                "bytes_per_second": round(one.byte_rate) if one.byte_rate >= 0 else None,
                "queued": one.queued if one.queued >= 0 else None,
                "tables": {
                    name: {"numbers": dict(numbers), "per_second": dict(one.table_rates.get(name, {}))}
                    for name, numbers in one.tables.items()
                },
                "table_room_bytes": one.room_bytes if one.room_bytes >= 0 else None,
                "quorum_rounds": one.quorum_rounds if one.quorum_rounds >= 0 else None,
                "missed": dict(one.missed),
                "exchanges": one.exchanges,
                "exchanged_bytes": one.exchanged_bytes,
                "exchange_seconds": round(one.exchange_seconds, 3) if one.exchanges else None,
                "waiting_share": round(one.waiting, 4),
                "cpu_share": round(one.cpu, 4),
                "memory_bytes": one.memory_bytes,
                "last_call": one.last_call,
                "at": str(one.user_frame or ""),
                "end": dict(one.end),
                "waits": [
                    {"what": wait.what, "seconds": round(wait.seconds, 3), "for": list(wait.late), "line": wait.line}
                    for wait in one.waits
                ],
            }
            for one in ranks
        ],
    }
