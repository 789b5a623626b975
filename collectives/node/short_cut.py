"""Runs a short call on one node as one compiled function, which copies, enters, waits for the other ranks, and reduces.

The compiled function is `carry_out`. It follows a list of instructions in a record of integers: copy, reduce, enter,
wait for the others. The record also says where the rows of the board, the slots and the arrays lie. The function runs
with the GIL held, so it never waits long: if other ranks are late, or pass other arrays than before, it returns a code,
and the caller goes on with the general steps of `executor`.

It needs Numba. Until it is compiled, and for calls that `record_of` cannot express, the general steps run the call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mpips.collectives.arrays import same_address
from mpips.collectives.fabric.board import NUMBERS, Board
from mpips.collectives.kernels.engine import Kernel
from mpips.collectives.kernels.function import compiled, narrow, widen
from mpips.collectives.node.program import Action, Combine, Copy, NodeProgram, Turns

# Results of a fast path. DONE: the call is complete. NOT_BEGUN: run `NodeExecutor.steps`. MET: all ranks have entered;
# run `NodeExecutor.rest`.
DONE, NOT_BEGUN, MET = 0, 1, 2
# More results of `carry_out`. NOT_MET: not all ranks have entered yet. UNFINISHED + k: this rank has finished phase k
# (the first phase is 0), and some other rank has not.
NOT_MET, UNFINISHED = 3, 4
# Longer calls take the general steps: the compiled function would not make them faster, and would hold the GIL.
MOST_BYTES = 4 << 20
# How often a rank reads a row before it yields its core: if each rank has a core of its own, and if ranks share cores.
SPINS_ALONE, SPINS_SHARED = 300, 3
# How often the rank then yields its core and reads the row again, before `carry_out` returns. A yield may take a time
# slice of another process, and this process's other threads wait for the GIL meanwhile.
MOST_YIELDS = 4

# Fields of a record. EVEN and ODD say where the instructions for even and for odd operations begin in the record. The
# tokens of all ranks begin at TOKENS.
RANK, RANKS, SPINS, LOOKS, MARK, EVEN, ODD, ENTRIES, ODD_ENTRIES, PROGRESS, ODD_PROGRESS, TOKENS = range(12)
# Instructions. A reduction begins with the number of its parts, which is 2 or more:
#   (parts, address of the total, elements, address of the divisor or 0, addresses of the parts)
# The total may lie at the address of the first part, but must not overlap another part.
# A copy is (COPY, target, bytes, source). The other instructions have no arguments. ENTER tells the other ranks that
# this one has entered the operation, and waits until all have. SIGNAL tells them that this rank has finished a phase.
# FOLLOW waits until all ranks have finished the phase.
COPY, ENTER, SIGNAL, FOLLOW, END = 0, -1, -2, -3, -4
CONSTANTS = {
    "RANK": RANK,
    "RANKS": RANKS,
    "SPINS": SPINS,
    "LOOKS": LOOKS,
    "MARK": MARK,
    "EVEN": EVEN,
    "ENTRIES": ENTRIES,
    "PROGRESS": PROGRESS,
    "TOKENS": TOKENS,
    "COPY": COPY,
    "ENTER": ENTER,
    "SIGNAL": SIGNAL,
    "FOLLOW": FOLLOW,
    "END": END,
    "DONE": DONE,
    "MET": MET,
    "NOT_MET": NOT_MET,
    "UNFINISHED": UNFINISHED,
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


def pause() -> None:
    """Let the other thread of this processor's core run faster for a moment. Only for use in kernels."""


def yield_core() -> None:
    """Call sched_yield. Only for use in kernels."""


@compiled("int64, int64, int64", constants=CONSTANTS)
def carry_out(record, number, first_phase):  # type: ignore[no-untyped-def]
    """Carry out one operation by the instructions of a record. It may yield its core, but never waits long.

    Args:
        record: The address of the record, which has the fields and instructions that are listed above.
        number: The number of the operation on the board. Even and odd operations have instructions of their own.
        first_phase: The number of the operation's first phase on the board.

    Returns:
        How far this rank came: DONE, MET, NOT_MET, or UNFINISHED + k (see their comments).
    """
    words = words_at(record)
    rank = words[RANK]
    phase = first_phase
    at = words[EVEN + (number & 1)]
    while True:
        instruction = words[at]
        if instruction == COPY:
            move_bytes(words[at + 1], words[at + 3], words[at + 2])
            at += 4
        elif instruction > COPY:
            length = words[at + 2]
            total = values_at(words[at + 1], length)
            added = 1
            if words[at + 4] != words[at + 1]:
                first = values_at(words[at + 4], length)
                second = values_at(words[at + 5], length)
                for i in range(length):
                    total[i] = narrow(widen(first[i]) + widen(second[i]))
                added = 2
            for part in range(added, instruction):
                other = values_at(words[at + 4 + part], length)
                for i in range(length):
                    total[i] = narrow(widen(total[i]) + widen(other[i]))
            if words[at + 3] != 0:
                divisor = widen(values_at(words[at + 3], 1)[0])
                for i in range(length):
                    total[i] = narrow(widen(total[i]) / divisor)
            at += 4 + instruction
        elif instruction == SIGNAL:
            store_word(words[PROGRESS + (phase & 1)] + 8 * rank, phase)
            at += 1
        elif instruction == END:
            return DONE
        else:
            row = words[PROGRESS + (phase & 1)]
            if instruction == ENTER:
                row = words[ENTRIES + (number & 1)]
                entered = number << 32 | words[TOKENS + rank]
                store_word(words[MARK], entered)
                store_word(row + 8 * rank, entered)
            looks = 0
            others_bring_the_same = True
            for other in range(words[RANKS]):
                wanted = phase
                if instruction == ENTER:
                    wanted = number << 32 | words[TOKENS + other]
                while True:
                    word = load_word(row + 8 * other)
                    if word == wanted:
                        break
                    if instruction == ENTER and (word >> 32 & 0xFFFFFFFF) == number:
                        others_bring_the_same = False
                        break
                    looks += 1
                    if looks > words[LOOKS]:
                        if instruction == ENTER:
                            return NOT_MET
                        return UNFINISHED + phase - first_phase
                    if looks > words[SPINS]:
                        yield_core()
                    else:
                        pause()
            if not others_bring_the_same:
                return MET
            if instruction == FOLLOW:
                phase += 1
            at += 1


class Record(NamedTuple):
    """The record that `carry_out` follows for one call, and what must live as long as this record."""

    words: NDArray[np.int64]
    # the number of phases
    phases: int
    kernel: Kernel
    # Arrays that were made for the instructions (see `_words_of`). The instructions hold only addresses, so this list
    # keeps the arrays alive. All other arrays are kept alive by the program.
    kept: list[Any]


def record_of(board: Board, tokens: Sequence[int], puts: Turns, program: NodeProgram) -> Record | None:
    """Return the record of a call, or None if the compiled function cannot carry it out.

    Args:
        tokens: The token of each rank, a number that stands for the call and the arrays that the rank passes. The
            record is valid only while all ranks enter with these tokens.
        puts: The actions of this rank before it enters the operation, for even and for odd operations.
    """
    if board.fence is not None:
        return None
    actions = [*puts[0], *puts[1], *program.last[0], *program.last[1]]
    actions += [action for phase in program.phases for action in (*phase.before, *phase.after)]
    dtypes = {action.total.dtype for action in actions if isinstance(action, Combine)}
    if len(dtypes) > 1 or not all(map(_is_compiled, actions)):
        return None
    kernel = carry_out.prepare(dtypes.pop() if dtypes else np.dtype(np.float32))
    if kernel is None or kernel.failure:
        return None
    spins = SPINS_SHARED if board.memory.crowded else SPINS_ALONE
    rows = [_address(row) for pair in (board.entries, board.progress) for row in pair]
    words = [board.rank, board.size, spins, spins + MOST_YIELDS, _address(board.marks.word), 0, 0, *rows, *tokens]
    kept: list[Any] = []
    for turn, field in enumerate((EVEN, ODD)):
        words[field] = len(words)
        words += [*_words_of(puts[turn], kept), ENTER]
        for phase in program.phases:
            words += [*_words_of(phase.before, kept), SIGNAL, *_words_of(phase.after, kept), FOLLOW]
        words += [*_words_of(program.last[turn], kept), END]
    return Record(np.array(words, np.int64), len(program.phases), kernel, kept)


def _is_compiled(action: Action) -> bool:
    """True if `carry_out` can carry out the action."""
    if isinstance(action, Copy):
        return True
    if not isinstance(action, Combine) or action.call.reduction is None or action.call.reduction.combine is not np.add:
        return False
    return all(array.flags.aligned and array.dtype.isnative for array in (action.total, *action.parts))


def _words_of(actions: Sequence[Action], kept: list[Any]) -> list[int]:
    """Return the instructions that make `carry_out` perform these actions.

    The instructions name arrays only by their addresses, which do not keep the arrays alive. This function makes two
    kinds of arrays itself: a view of scratch memory for a partial sum, and the divisor of a mean. It appends them to
    `kept`, and the caller must hold that list as long as the instructions may run. Otherwise the memory could be freed.
    """
    words: list[int] = []
    for action in actions:
        if isinstance(action, Copy):
            words += [COPY, _address(action.to), action.to.nbytes, _address(action.source)]
            continue
        assert isinstance(action, Combine)
        words += _words_of_sum(action, kept)
    return words


def _words_of_sum(action: Combine, kept: list[Any]) -> list[int]:
    """Return the instructions for a sum or mean. `kept` is as in `_words_of`."""
    assert action.call.reduction is not None
    total, parts = action.total, list(action.parts)
    words: list[int] = []
    own = next((index for index, part in enumerate(parts) if same_address(part, total)), 0)
    if own:
        # The total lies on a later part, which must be read before it is overwritten. So the parts before it are summed
        # first, in the scratch array. a + b and b + a have the same bits.
        before = parts[:own]
        if own > 1:
            kept.append(action.scratch[: total.size])
            words += [own, _address(kept[-1]), total.size, 0, *map(_address, before)]
            before = [kept[-1]]
        parts = [total, *before, *parts[own + 1 :]]
    divisor = 0
    if action.call.reduction.is_mean:
        kept.append(np.array([action.call.p], total.dtype))
        divisor = _address(kept[-1])
    return [*words, len(parts), _address(total), total.size, divisor, *map(_address, parts)]


def _address(memory: Any) -> int:
    return int((memory if isinstance(memory, np.ndarray) else np.frombuffer(memory, np.uint8)).ctypes.data)


def short_cut(
    board: Board,
    text: str,
    put: int,
    phases: int,
    record: int,
    call: Callable[[int, int, int], int],
    go_on: Callable[[int], None],
) -> Callable[[], int]:
    """Return a function that makes one call of the program by the compiled `carry_out`: its fast path.

    The function returns DONE, MET or NOT_BEGUN. It returns NOT_BEGUN, with nothing done, in three rare cases: this
    rank's descriptor has been overwritten, fast paths are forbidden (`board.spent` shows both of these), or the number
    of the operation wraps around.

    Args:
        text: The call in words, for error messages.
        put: The running number of this rank's descriptor (the text of the call, and the places of its arrays).
        phases: The number of phases of the call.
        record: The address of the call's record.
        call: The compiled `carry_out`.
        go_on: A function that finishes the call by the general steps, blocking. Its argument is the index of the last
            phase that this rank has finished.
    """

    def fast() -> int:
        number = board.number + 1
        if put <= board.spent or number > NUMBERS:
            return NOT_BEGUN
        board.number = number
        finished = board.phase
        if phases:
            board.last_phase, board.lent = finished + 1, number
            # Set the count of phases as if all of them were finished, because an interrupt may come before the compiled
            # function starts or after it has returned. Other ranks do not read this count. They see in the words that
            # the compiled function has stored how far this rank came.
            board.phase = finished + phases
        code = call(record, number, finished + 1)
        if code == DONE:
            return DONE
        if code >= UNFINISHED:
            board.phase = finished + 1 + code - UNFINISHED
            go_on(code - UNFINISHED)
            return DONE
        if phases:
            board.phase = finished
        if code == NOT_MET:
            board.meet(text)
        return MET

    return fast
