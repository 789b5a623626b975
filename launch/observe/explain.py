"""Explain in one paragraph what a job does, or why it is stuck: which ranks wait in which call for which ranks.

Two words are used below. The *page* of a rank is the file in which the rank writes what it does. A *lane* is a
communicator or a store. For each lane, the page identifies the last call that the rank has begun in the lane.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from mpips.collectives.errors import format_ranks as name_ranks
from mpips.collectives.recorder.own import with_line
from mpips.launch.observe.gather import OngoingWait, Rank, StackFrame

# If a wait lasts this long, the job counts as stuck, because waits within an ordinary step are shorter.
STANDS_SECONDS = 1.0
# A rank counts as slow if each other rank waits for more than this share of its time, and the slow rank itself waits
# less than half as long as any other rank.
SLOW_SHARE = 0.25


class Explanation(NamedTuple):
    """The explanation of what a job does."""

    # "ended", "stands" (it is stuck), "slow" (a rank slows down the others) or "runs"
    kind: str
    sentence: str
    # the ranks that the user should examine
    culprits: tuple[int, ...]


def explain(
    name: str, ranks: Sequence[Rank], end: Mapping[str, Any] | None = None, unreached: Mapping[str, str] | None = None
) -> Explanation:
    """Explain what a job does, from what is known about its ranks. Pure.

    Args:
        name: The name of the job.
        ranks: The known ranks of the job, at least one.
        end: What `mpips run` has written about the end of the job (see `gather.read_end`).
        unreached: A dict of the hosts that did not answer: host -> why.
    """
    explanation = _explain(name, ranks, end, unreached or {})
    silent = "".join(f" Host {host} does not answer: {why.rstrip('.')}." for host, why in (unreached or {}).items())
    return explanation._replace(sentence=f"{explanation.sentence}{silent}")


def _explain(
    name: str, ranks: Sequence[Rank], end: Mapping[str, Any] | None, unreached: Mapping[str, str]
) -> Explanation:
    missing = set(range(max(each.size for each in ranks))) - {each.rank for each in ranks}
    ranks = [each for each in ranks if not is_replaced(each, ranks)]
    size = max(each.size for each in ranks)
    program = next((" ".join(map(os.path.basename, each.program[:1])) for each in ranks if each.program), "")
    head = f"job {name} ({program + ', ' if program else ''}{size} rank{'s' * (size > 1)})"
    if not any(each.lives for each in ranks):
        return _explain_ended(head, ranks, len(missing), end or {})
    waits = {
        each.rank: wait
        for each in ranks
        if each.lives and not each.stopped and (wait := _longest_wait(each)) is not None
    }
    if waits:
        return _explain_stuck(head, ranks, waits, missing, unreached)
    finished = _find_finished(ranks, missing)
    if finished and not unreached and not any(each.moved for each in ranks):
        return _explain_ending(head, ranks, finished)
    return _explain_running(head, ranks)


def is_replaced(rank: Rank, ranks: Iterable[Rank]) -> bool:
    """True if a rank has died and the job has continued without it.

    The job has continued if other ranks are in a later generation: a recovery after a death begins a new generation of
    the store.
    """
    return not rank.lives and any(each.generation > rank.generation >= 0 for each in ranks)


def missed_rounds(ranks: Sequence[Rank]) -> dict[int, float]:
    """Return how often the push of each worker came too late, as a dict: rank -> share of the rounds.

    Only rounds that a quorum has closed count. A quorum closes a round when enough workers have pushed. Workers whose
    pushes were always in time are left out.
    """
    closed = sum(max(each.quorum_rounds, 0) for each in ranks)
    missed = {
        each.rank: sum(server.missed.get(str(each.member), 0) for server in ranks)
        for each in ranks
        if each.role == "worker"
    }
    return {rank: count / closed for rank, count in missed.items() if count}


def _longest_wait(rank: Rank) -> OngoingWait | None:
    """Return the longest wait of a rank, or None if no wait has lasted for `STANDS_SECONDS`."""
    long_waits = [wait for wait in rank.waits if wait.seconds >= STANDS_SECONDS]
    return max(long_waits, key=lambda wait: wait.seconds, default=None)


# ---- a job that is stuck


def _explain_stuck(
    head: str, ranks: Sequence[Rank], waits: dict[int, OngoingWait], missing: set[int], unreached: Mapping[str, str]
) -> Explanation:
    """Explain a job that is stuck.

    Args:
        head: The beginning of the explanation, which names the job.
        ranks: The ranks that have a page.
        waits: Number of a rank -> the longest wait of this rank.
        missing: Numbers of the ranks that have no page.
        unreached: A dict of the hosts that did not answer: host -> why.
    """
    seconds = max(wait.seconds for wait in waits.values())
    groups: dict[tuple[str, str], list[int]] = {}
    for rank, wait in waits.items():
        line = f"{wait.line}, in its thread {wait.thread}" if wait.thread and wait.line else wait.line
        groups.setdefault((wait.what, line), []).append(rank)
    groups_waiting = [
        f"{name_ranks(members)} wait{'s' * (len(members) == 1)} in {with_line(what, line)}"
        for (what, line), members in groups.items()
    ]
    culprits = _find_culprits(ranks, waits, missing)
    steps = [each.step for each in ranks if each.step >= 0 and (each.rank in waits or each.rank in culprits)]
    step = f" in step {min(steps)}" if steps else ""
    begin = f"{head} has been stuck for {_format_seconds(seconds)}{step}: {'; '.join(groups_waiting)}"
    if not culprits:
        ahead = _find_lanes_ahead(ranks, waits)
        if len({wait.what for wait in waits.values()}) == 1 and len(ahead) < 2:
            why = _describe_common_wait(ranks, len({wait.line for wait in waits.values()}) == 1)
        else:
            which = (
                f": {'; '.join(_describe_ahead(ranks, waits, lane) for lane in sorted(ahead))}"
                if len(ahead) > 1
                else ""
            )
            why = (
                "They have made different calls, and each waits for the others: a deadlock"
                f"{which}. All ranks must make the same calls in the same order"
            )
        return Explanation("stands", f"{begin}. {why}.", tuple(waits))
    by_number = {each.rank: each for each in ranks}
    several_hosts = len({each.host for each in ranks}) > 1 or bool(unreached)
    finished = [] if unreached else _find_finished(ranks, missing)
    described = [
        f"rank {number}, which has ended its program"
        if number in finished
        else _describe(number, by_number.get(number), several_hosts, unreached)
        for number in culprits
    ]
    return Explanation("stands", f"{begin}, for {'; and for '.join(described)}.", tuple(culprits))


def _find_lanes_ahead(ranks: Sequence[Rank], waits: dict[int, OngoingWait]) -> set[int]:
    """Return the identities of the lanes in which ranks wait for each other in a circle, which is a deadlock.

    A rank is *ahead* in a lane if it has begun a call in this lane that another rank has not begun. Take the waiting
    ranks that are ahead in any lane. If all of them are ahead in one common lane, this lane explains all waits, and the
    result is empty. Otherwise the result is the set of all lanes in which a waiting rank is ahead.
    """
    least: dict[int, int] = {}
    for each in ranks:
        for lane in each.lanes:
            least[lane.identity] = min(lane.number, least.get(lane.identity, lane.number))
    ahead = {each.rank: {lane.identity for lane in each.lanes if lane.number > least[lane.identity]} for each in ranks}
    every = [ahead[rank] for rank in waits if ahead[rank]]
    return set().union(*every) if every and not set.intersection(*every) else set()


def _describe_ahead(ranks: Sequence[Rank], waits: dict[int, OngoingWait], identity: int) -> str:
    """Describe a call of one communicator that some ranks have begun and other ranks have not begun.

    The description includes the line of the program that made the call.
    """
    numbers = {each.rank: lane.number for each in ranks for lane in each.lanes if lane.identity == identity}
    most = max(numbers.values())
    ahead = [rank for rank in numbers if numbers[rank] == most and rank in waits]
    behind = [rank for rank in numbers if numbers[rank] < most]
    texts = {lane.text for each in ranks if each.rank in ahead for lane in each.lanes if lane.identity == identity}
    lines = ", ".join(sorted({waits[rank].line for rank in ahead} - {""}))
    has, have = ("have" if len(members) > 1 else "has" for members in (ahead, behind))
    # Leave out the calls in which ranks wait, because the explanation has already named them.
    what = ", ".join(sorted(texts - {wait.what for wait in waits.values()}))
    call = with_line(f"call {most} of {_name_communicator(ranks, identity)}{what and f', {what}'}", lines)
    return f"{name_ranks(ahead)} {has} begun {call}, which {name_ranks(behind)} {have} not begun"


def _name_communicator(ranks: Sequence[Rank], identity: int) -> str:
    """Name a communicator by its ranks and by its number among the communicators of the same ranks.

    The communicators are counted in the order in which they were made.
    """
    known = next((entry for each in ranks if (entry := each.communicators.get(str(identity)))), None)
    if known is None:
        return "a communicator"
    nth = f"communicator {known['place'] + 1}" if known["place"] else "the first communicator"
    return f"{nth} of {name_ranks(list(map(int, known['ranks'].split(','))))}"


def _find_culprits(ranks: Sequence[Rank], waits: dict[int, OngoingWait], missing: set[int]) -> list[int]:
    """Return the ranks that others wait for and that do not wait themselves.

    Return the first of these sets that is not empty:

    1. the ranks that a wait names, if they have ended, are stopped, have no page, or do not wait,
    2. all ranks that have ended or are stopped,
    3. all ranks that do not wait, except servers and spares that only serve,
    4. all ranks without a page.
    """
    gone = {each.rank for each in ranks if not each.lives}
    stopped = {each.rank for each in ranks if each.lives and each.stopped}
    late = {rank for wait in waits.values() for rank in wait.late} - set(waits)
    idle = {
        each.rank
        for each in ranks
        if each.lives and each.rank not in waits and (not _serves(each) or each.is_called_back)
    }
    for culprits in (late & (gone | stopped | missing | idle), gone | stopped, idle, missing):
        if culprits:
            return sorted(culprits)
    return []


def _serves(rank: Rank) -> bool:
    return rank.role in ("server", "spare") and not rank.stopped


def _describe_common_wait(ranks: Sequence[Rank], same_line: bool) -> str:
    """Describe why a job may be stuck if all ranks wait in calls of the same name.

    `same_line` is True if all ranks have made the call on the same line of the program.
    """
    by_host: dict[str, list[int]] = {}
    for each in ranks:
        by_host.setdefault(each.host, []).append(each.rank)
    if len(by_host) < 2:
        servers = [each.rank for each in ranks if each.role == "server"]
        silent = f", or {name_ranks(servers)} (server{'s' * (len(servers) > 1)}) will not answer" if servers else ""
        return f"All {'workers' if servers else 'ranks'} are in it, so what they wait for is under way{silent}"
    hosts = "; ".join(f"{host}, {name_ranks(members)}" for host, members in sorted(by_host.items()))
    if not same_line:
        return (
            "All ranks live, and are in a call of the same name from different lines: of different stores or "
            "communicators it is a deadlock, as all ranks must make the same calls in the same order; else the "
            f"network between their hosts is cut or slow ({hosts})"
        )
    return f"All ranks are in it, and live: the network between their hosts is cut or slow ({hosts})"


def _describe(
    number: int, rank: Rank | None, with_host: bool = False, unreached: Mapping[str, str] | None = None
) -> str:
    """Describe what a rank does. Other ranks wait for this rank.

    Args:
        number: The number of the rank.
        rank: What is known about the rank, or None if it has no page.
        with_host: True to name the rank's host.
        unreached: A dict of the hosts that did not answer: host -> why.
    """
    if rank is None and unreached:
        hosts = " or ".join(sorted(unreached))
        return f"rank {number}, of which nothing is known: it runs on host {hosts}, which does not answer"
    if rank is None:
        return f"rank {number}, which has no page on this machine: it runs on another host, or has not begun"
    role = f" ({rank.role})" if rank.role not in ("", "worker") else ""
    who = f"rank {number}{role}{f' on {rank.host}' if with_host else ''}, "
    last = f"; the call that it began last is {rank.last_call}" if rank.last_call else ""
    if not rank.lives:
        message = rank.end.get("failed", "")
        if rank.became:
            return f"{who}whose process {rank.pid} has become another program by exec, `{rank.became}`{last}"
        return f"{who}whose process {rank.pid} is gone{f': {message}' if message else ', without a word'}{last}"
    if rank.stopped:
        return f"{who}which is stopped by a signal: `kill -CONT {rank.pid}` lets it go on{last}"
    cpu = f"{100 * rank.cpu:.0f} % CPU"
    at = f" ({_quote_line(rank.user_frame)})" if rank.user_frame is not None else ""
    if others := rank.other_frames:
        shown = "; ".join(dict.fromkeys(map(_quote_line, others[:3])))
        last = f"; its other thread{'s are' if len(others) > 1 else ' is'} at {shown}{last}"
    if rank.state == "D":
        return f"{who}which waits in the kernel for a disk or a file system{at}"
    if rank.in_mpips:
        return f"{who}which is in a call of mpips{at}, not stopped, {cpu}{last}"
    if not rank.stack:
        return f"{who}whose stack is unknown, not stopped, {cpu}{last}"
    return f"{who}which is in Python code outside mpips{at}, not stopped, {cpu}{last if others else ''}"


def _quote_line(frame: StackFrame) -> str:
    """Return the file and number of a line of the program. If the file could be read, append the text of the line."""
    return f"{frame}: `{frame.text}`" if frame.text else str(frame)


# ---- a job that is not stuck


def _find_finished(ranks: Sequence[Rank], missing: set[int]) -> list[int]:
    """Return the ranks that have ended their programs: they once joined a communicator, and no longer have a page.

    Return an empty list if some ranks may be on hosts that were not looked at. The pages of such ranks are missing,
    although the ranks may not have ended.
    """
    started = {each.host: each.ranks_on_host for each in ranks if each.lives}
    if -1 in started.values() or sum(started.values()) < max(each.size for each in ranks):
        return []
    joined = {
        int(number) for each in ranks for known in each.communicators.values() for number in known["ranks"].split(",")
    }
    return sorted(missing & joined)


def _explain_ending(head: str, ranks: Sequence[Rank], finished: Sequence[int]) -> Explanation:
    """Explain a job in which some ranks have ended their programs, and the other ranks make no calls of mpips."""
    rest = [each for each in ranks if each.lives]
    several_hosts = len({each.host for each in ranks}) > 1
    described = "; and for ".join(_describe(each.rank, each, several_hosts) for each in rest)
    have = "has ended its program, and waits" if len(finished) == 1 else "have ended their programs, and wait"
    sentence = f"{head} ends: {name_ranks(finished)} {have} in MPI's end for {described}."
    return Explanation("stands", sentence, tuple(each.rank for each in rest))


def _explain_running(head: str, ranks: Sequence[Rank]) -> Explanation:
    workers = [each for each in ranks if each.lives and not _serves(each)]
    stopped = [each for each in ranks if each.lives and each.stopped]
    if stopped:
        several_hosts = len({each.host for each in ranks}) > 1
        described = "; ".join(_describe(each.rank, each, several_hosts) for each in stopped)
        sentence = f"{head}: {described}. No other rank has waited for that as long as {STANDS_SECONDS:.0f} s yet."
        return Explanation("stands", sentence, tuple(each.rank for each in stopped))
    steps = [each.step for each in workers if each.step >= 0]
    where = f"in step {max(steps)}" if steps else "without a count of steps"
    for each in workers:
        others = [other.waiting for other in workers if other is not each]
        if others and each.waiting < min(others) / 2 and min(others) > SLOW_SHARE:
            host = f" on {each.host}" if any(other.host != each.host for other in ranks) else ""
            waits = f"it waits {_format_shares([each.waiting])} of its time, they wait "
            slow = f"rank {each.rank}{host} holds the others up: {waits}"
            at = f", and is at {each.user_frame}" if each.user_frame is not None else ""
            return Explanation(
                "slow", f"{head} goes on, {where}, and {slow}{_format_shares(others)}{at}.", (each.rank,)
            )
    waiting = _format_shares([each.waiting for each in workers]) if workers else "0 %"
    if any(each.moved for each in ranks):
        late = ", ".join(
            f"{_format_shares([share])} without rank {rank}" for rank, share in missed_rounds(ranks).items()
        )
        quorum = f" Of its rounds the quorum has closed {late} in time." if late else ""
        return Explanation("runs", f"{head} goes on, {where}; workers wait {waiting} of their time.{quorum}", ())
    lines = sorted({str(each.user_frame) for each in workers if each.user_frame is not None})
    at = f": they are at {', '.join(lines[:4])}" if lines else ""
    sentence = f"{head}: no rank waits for another, and none has called mpips just now, {where}{at}."
    return Explanation("runs", sentence, ())


def _explain_ended(head: str, ranks: Sequence[Rank], missing: int, end: Mapping[str, Any]) -> Explanation:
    """Explain a job whose ranks on this machine have all ended. `missing` is the number of ranks without a page."""
    if heard := end.get("heard"):
        steps = [each.step for each in ranks if each.step >= 0]
        step = f" in step {max(steps)}" if steps else ""
        by = f"{heard}{' (Ctrl-C)' * (heard == 'SIGINT')}"
        return Explanation("ended", f"{head} has ended{step}: its `mpips run` was told to end by {by}.", ())
    death = str(end.get("death", ""))
    dead = [each for each in ranks if death.startswith(f"rank {each.rank} ") and not each.end.get("own")]
    # The launcher has recorded that this rank died first. The other ranks were ended together with the job, perhaps by
    # the same signal.
    if dead:
        others = [each for each in ranks if each not in dead]
        messages = {str(each.end["failed"]).rstrip(".") for each in others if each.end.get("failed")}
        # Leave out a message that is contained in another message.
        messages = {text for text in messages if not any(text in other for other in messages - {text})}
        last = f", after {dead[0].last_call} had begun" if dead[0].last_call else ""
        rest = f" Others said: {'; '.join(sorted(messages))}." if messages else " The others were ended with the job."
        return Explanation("ended", f"{head} has ended. R{death[1:]}{last}.{rest}", (dead[0].rank,))
    silent = [each for each in ranks if not each.end.get("failed")]
    own = [each for each in ranks if each.end.get("own")]
    # Ranks that ended in the same way get one sentence together, for example "Ranks 3 and 4 ended without a word, as by
    # SIGKILL." A key is such a sentence without its subject "Ranks 3 and 4". The value is the list of these ranks.
    endings: dict[str, list[int]] = {}
    for each in [] if own else silent:
        role = f" ({each.role})" if each.role else ""
        last = f", after {each.last_call} had begun" if each.last_call else ""
        endings.setdefault(f"{role} ended without a word, as by SIGKILL{last}.", []).append(each.rank)
    for each in (*own, *(each for each in ranks if each not in own)):
        if sentence := each.end.get("failed"):
            endings.setdefault(f" said: {str(sentence).rstrip('.')}.", []).append(each.rank)
    parts = [f"R{name_ranks(members)[1:]}{text}" for text, members in endings.items()]
    if own and silent:
        parts.append(f"R{name_ranks([each.rank for each in silent])[1:]} ended with the job.")
    if missing > 0:
        parts.append(f"Nothing is known here about the other {missing}: they have ended well, or ran on other hosts.")
    culprits = own or silent or list(ranks)
    return Explanation("ended", f"{head} has ended. {' '.join(parts)}", tuple(each.rank for each in culprits))


def _format_seconds(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _format_shares(shares: Iterable[float]) -> str:
    values = list(shares)
    low, high = min(values), max(values)
    return f"{100 * low:.0f} %" if round(100 * low) == round(100 * high) else f"{100 * low:.0f} to {100 * high:.0f} %"


def as_json(
    name: str, explanation: Explanation, ranks: Sequence[Rank], unreached: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Return what is known about a job, as data that can be written as JSON. Unknown rates and counts are None."""
    return {
        "job": name,
        "kind": explanation.kind,
        "sentence": explanation.sentence,
        "culprits": list(explanation.culprits),
        "unreached": dict(unreached or {}),
        "ranks": [
            {
                "rank": each.rank,
                "role": each.role,
                "host": each.host,
                "pid": each.pid,
                "alive": each.lives,
                "stopped": each.stopped,
                "generation": each.generation,
                "step": each.step,
                "step_seconds": round(each.step_seconds, 3),
                "steps_per_second": round(each.step_rate, 3) if each.step_rate >= 0 else None,
                "bytes_per_second": round(each.byte_rate) if each.byte_rate >= 0 else None,
                "queued": each.queued if each.queued >= 0 else None,
                "tables": {
                    name: {"numbers": dict(numbers), "per_second": dict(each.table_rates.get(name, {}))}
                    for name, numbers in each.tables.items()
                },
                "table_room_bytes": each.room_bytes if each.room_bytes >= 0 else None,
                "quorum_rounds": each.quorum_rounds if each.quorum_rounds >= 0 else None,
                "missed": dict(each.missed),
                "exchanges": each.exchanges,
                "exchanged_bytes": each.exchanged_bytes,
                "exchange_seconds": round(each.exchange_seconds, 3) if each.exchanges else None,
                "waiting_share": round(each.waiting, 4),
                "cpu_share": round(each.cpu, 4),
                "memory_bytes": each.memory_bytes,
                "last_call": each.last_call,
                "at": str(each.user_frame or ""),
                "end": dict(each.end),
                "waits": [
                    {"what": wait.what, "seconds": round(wait.seconds, 3), "for": list(wait.late), "line": wait.line}
                    for wait in each.waits
                ],
            }
            for each in ranks
        ],
    }
