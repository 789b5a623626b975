"""A short call on one node as one compiled function: put, enter, wait, take, and in shared arrays meet once more.

`carry_out` is the function. It reads a record of integers: where the rows of the board, the slots and the arrays lie,
and what is to be copied and added (`Action`). It runs with the GIL held, so it never waits long: if others are late, or
bring other arrays, it returns a code, and the caller goes on with the general steps of `executor`.

It needs Numba. Until it is compiled, and for what `record_of` cannot express, calls take the general steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mpips.collectives.fabric.board import NUMBERS, Board
from mpips.collectives.kernels.engine import Kernel
from mpips.collectives.kernels.function import compiled, narrow, widen
from mpips.collectives.node.program import Action, Copy, NodeProgram, Reduce, Turns

# Results of a fast path. DONE: the call is complete. NOT_BEGUN: run `Executor.steps`. MET: all ranks have entered; run
# `Executor.rest`.
DONE, NOT_BEGUN, MET = 0, 1, 2
# Two more results of `carry_out`: some ranks have not entered yet; some have not finished the phase.
NOT_MET, UNFINISHED = 3, 4
# Longer calls take the general steps: they gain nothing here, and would hold the GIL.
MOST_BYTES = 1 << 20
# Looks at a row before a rank yields its core: if it has a core of its own, and if ranks share cores.
SPINS_ALONE, SPINS_SHARED = 4000, 20
# looks after that, before `carry_out` returns
MOST_YIELDS = 200

# Fields of a record. PHASED is 1 if ranks touch the arrays of others. EVEN and ODD say where the actions of even and of
# odd operations begin in the record, TOKENS where the tokens of all ranks do.
RANK, RANKS, PHASED, SPINS, LOOKS, MARK, EVEN, ODD, ENTRIES, ODD_ENTRIES, PROGRESS, ODD_PROGRESS, TOKENS = range(13)
FIELDS = {
    "RANK": RANK,
    "RANKS": RANKS,
    "PHASED": PHASED,
    "SPINS": SPINS,
    "LOOKS": LOOKS,
    "MARK": MARK,
    "EVEN": EVEN,
    "ENTRIES": ENTRIES,
    "PROGRESS": PROGRESS,
    "TOKENS": TOKENS,
}


def words_at(address: int) -> Any:
    """Return the words at an address, as an array. Only for use in kernels, whose compiler replaces it."""


def values_at(address: int, count: int) -> Any:
    """Return values of the kernel's dtype at an address, as an array. Only for use in kernels."""


def load_word(address: int) -> int:
    """Read a word that another process writes. Later reads see all that it wrote before. Only for use in kernels."""
    raise NotImplementedError


def store_word(address: int, word: int) -> None:
    """Write a word that other processes read, after all that was written before. Only for use in kernels."""


def move_bytes(to: int, source: int, count: int) -> None:
    """Copy bytes between addresses. Only for use in kernels."""


def yield_core() -> None:
    """Call sched_yield. Only for use in kernels."""


@compiled("int64, int64, int64", constants=FIELDS)
def carry_out(record, number, phase):  # type: ignore[no-untyped-def]
    """Carry out operation `number` as the record at an address says, up to and with `phase`. Return how far it came."""
    words = words_at(record)
    ranks = words[RANKS]
    at = words[EVEN + (number & 1)]
    # In the first round the actions bring this rank's vector, and all ranks meet. In the second they make the result,
    # and in shared arrays all ranks meet again.
    for meeting in range(2):
        count = words[at]
        at += 1
        for _ in range(count):
            # An action is (number of parts, target, length, divisor, parts). A copy has no parts but a source, in
            # place of the divisor.
            parts, target, length = words[at], words[at + 1], words[at + 2]
            if parts == 0:
                move_bytes(target, words[at + 3], length)
            else:
                total = values_at(target, length)
                first = values_at(words[at + 4], length)
                second = values_at(words[at + 5], length)
                for i in range(length):
                    total[i] = narrow(widen(first[i]) + widen(second[i]))
                for part in range(2, parts):
                    other = values_at(words[at + 4 + part], length)
                    for i in range(length):
                        total[i] = narrow(widen(total[i]) + widen(other[i]))
                if words[at + 3] != 0:
                    divisor = widen(values_at(words[at + 3], 1)[0])
                    for i in range(length):
                        total[i] = narrow(widen(total[i]) / divisor)
            at += 4 + parts
        if meeting == 0:
            row = words[ENTRIES + (number & 1)]
            word = number << 32 | words[TOKENS + words[RANK]]
            store_word(words[MARK], word)
        elif words[PHASED] == 0:
            return 0
        else:
            row = words[PROGRESS + (phase & 1)]
            word = phase
        store_word(row + 8 * words[RANK], word)
        looks = 0
        known = True
        for rank in range(ranks):
            wanted = phase
            if meeting == 0:
                wanted = number << 32 | words[TOKENS + rank]
            while True:
                word = load_word(row + 8 * rank)
                if word == wanted:
                    break
                if meeting == 0 and (word >> 32 & 0xFFFFFFFF) == number:
                    known = False
                    break
                looks += 1
                if looks > words[LOOKS]:
                    return 3 + meeting
                if looks > words[SPINS]:
                    yield_core()
        if not known:
            return 2
    return 0


class Record(NamedTuple):
    """What `carry_out` reads for one call."""

    words: NDArray[np.int64]
    phased: bool
    kernel: Kernel
    # arrays that live as long as the record, beside those of the program
    kept: list[Any]


def record_of(board: Board, tokens: Sequence[int], puts: Turns, program: NodeProgram) -> Record | None:
    """Return the record of a call, or None if one compiled function cannot carry it out.

    Args:
        tokens: The tokens of all ranks with which the record is valid.
        puts: What this rank does before it enters.
    """
    phases = program.phases
    if board.fence is not None or len(phases) > 1 or any(phase.after for phase in phases):
        return None
    if phases and (program.last[0] or program.last[1]):
        return None
    rounds = [(puts[turn], phases[0].before if phases else program.last[turn]) for turn in (0, 1)]
    actions = [action for both in rounds for some in both for action in some]
    dtypes = {action.total.dtype for action in actions if isinstance(action, Reduce)}
    kernel = carry_out.prepare(dtypes.pop() if dtypes else np.dtype(np.float32))
    if kernel is None or dtypes or not all(map(_is_short, actions)):
        return None
    memory = board.memory
    spins = SPINS_SHARED if memory.crowded else SPINS_ALONE
    rows = [_address(row) for pair in (board.entries, board.progress) for row in pair]
    words = [board.rank, board.size, int(bool(phases)), spins, spins + MOST_YIELDS, _address(board.marks.word)]
    words += [0, 0, *rows, *tokens]
    kept: list[Any] = []
    for field, both in zip((EVEN, ODD), rounds):
        words[field] = len(words)
        for some in both:
            where = len(words)
            words.append(0)
            for action in some:
                for each in _words_of(action, kept):
                    words += each
                    words[where] += 1
    return Record(np.array(words, np.int64), bool(phases), kernel, kept)


def _is_short(action: Action) -> bool:
    """True if `carry_out` can take the action, and it is short."""
    if isinstance(action, Copy):
        return action.to.nbytes <= MOST_BYTES
    if not isinstance(action, Reduce) or action.call.reduction is None or action.call.reduction.combine is not np.add:
        return False
    arrays = (action.total, *action.parts)
    return action.call.nbytes <= MOST_BYTES and all(array.flags.aligned and array.dtype.isnative for array in arrays)


def _words_of(action: Action, kept: list[Any]) -> list[list[int]]:
    """Return the words of the action, or of two in its place. Arrays that they need besides go into `kept`."""
    if isinstance(action, Copy):
        return [[0, _address(action.to), action.to.nbytes, _address(action.source)]]
    assert isinstance(action, Reduce)
    assert action.call.reduction is not None
    total, divisor = action.total, 0
    if action.call.reduction.is_mean:
        kept.append(np.array([action.call.p], total.dtype))
        divisor = _address(kept[-1])
    # A partial sum may not overwrite a part that is still to be read, and compiled loops over one memory are slow.
    start, end = _address(total), _address(total) + total.nbytes
    clear = all(_address(part) + part.nbytes <= start or end <= _address(part) for part in action.parts)
    if not clear:
        kept.append(np.empty_like(total))
        total = kept[-1]
    parts = [_address(part) for part in action.parts]
    made = [[len(parts), _address(total), total.size, divisor, *parts]]
    return made if clear else [*made, [0, start, total.nbytes, _address(total)]]


def _address(memory: Any) -> int:
    return int((memory if isinstance(memory, np.ndarray) else np.frombuffer(memory, np.uint8)).ctypes.data)


def short_cut(
    board: Board, text: str, put: int, phased: bool, record: int, call: Callable[[int, int, int], int]
) -> Callable[[], int]:
    """Return a fast path that lets `call`, the compiled `carry_out`, carry out the call.

    It returns NOT_BEGUN in three rare cases: this rank's descriptor has been overwritten, fast paths are held (both:
    `board.spent`), or the number of the operation wraps around.

    Args:
        text: The call in words.
        put: The running number of this rank's descriptor.
        phased: Ranks touch the arrays of others.
        record: The address of the call's record.
    """
    entries, progress, ones = board.entries, board.progress, board.ones

    def fast() -> int:
        number = board.number + 1
        if put <= board.spent or number > NUMBERS:
            return NOT_BEGUN
        board.number = number
        phase = board.phase
        if phased:
            phase += 1
            board.last_phase, board.lent = phase, number
            board.phase = phase
        code = call(record, number, phase)
        if code == DONE:
            return DONE
        if code == UNFINISHED:
            board.follow(progress[phase & 1], phase * ones, text)
            return DONE
        if phased:
            board.phase = phase - 1
        if code == NOT_MET:
            board.meet(entries[number & 1], 0, text)
        return MET

    return fast
