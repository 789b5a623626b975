"""Run a call between the ranks of one node, by a program that is compiled for the arrays of the call.

Every rank puts its input where the others can read it, unless they can read it already. The rank then enters the call,
and waits until all ranks have entered. Now the ranks compute the result. Some programs do this in several phases. After
each phase, every rank waits until all ranks have finished it.

There are four kinds of programs (`program`). All ranks choose the same kind, by the arrays that all of them pass:

slots         for small vectors;
direct        for arrays in node-shared memory;
cross memory  for large arrays in private memory, if the kernel copies between the processes;
stages        for all other arrays, and if ranks pass arrays in different kinds of memory.

All of them add in the order of the ranks. So the bits of a sum depend neither on the program, nor on the length of the
vector, nor on the place of the element in it.

`api` finds the plan by the identity of the array, and the plan runs its executor. The first run reads the descriptors
of the other ranks and makes a program for the arrays of all ranks, which `steps` runs. If Numba is installed and the
call is short, `fast` runs later calls as one compiled function (`short_cut`), as long as the other ranks pass the same
arrays again. Otherwise `fast` returns a code that says how far it came, and `steps` or `rest` does the remaining work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from mpips.collectives.arrays import Flat, Vector, same_address
from mpips.collectives.call import Call
from mpips.collectives.errors import CollectiveError
from mpips.collectives.fabric import arena
from mpips.collectives.fabric.board import Board
from mpips.collectives.fabric.layout import DESCRIPTORS, PLACE_WORDS, ArrayPlace, Descriptor
from mpips.collectives.fabric.process_memory import reachable_address
from mpips.collectives.kernels import sums
from mpips.collectives.kernels.sums import perform
from mpips.collectives.node.program import (
    NOTHING,
    NodeProgram,
    StagePipeline,
    StepProgram,
    Turns,
    Window,
    crossing_program,
    merge,
    shared_program,
    slot_puts,
    slot_takes,
    steps_of,
    with_steps,
)
from mpips.collectives.node.short_cut import DONE, MET, MOST_BYTES, NOT_BEGUN, Record, record_of, short_cut

__all__ = ["DONE", "MET", "NOT_BEGUN", "CallArray", "NodeExecutor", "WayLimits", "call_array", "not_begun"]
# The mode of an array is the kind of program that it takes. WAYS has the modes' names in the tuning table.
SLOTS, SHARED, CROSS, STAGES = range(4)
WAYS = ("slots", "direct", "cross_memory", "stages")
NOWHERE = (ArrayPlace(), ArrayPlace())


class WayLimits(NamedTuple):
    """The sizes in bytes from which on vectors use another kind of program. They are the same on all ranks."""

    # the largest vector that goes through slots wherever its array is, also if it is in node-shared memory
    slots: int
    # the largest vector that goes through slots if its array is in private memory
    ordinary_slots: int
    # the smallest vector in private memory that uses the cross-memory program, if the kernel permits copies between
    # processes
    cross_memory: int


class CallArray(NamedTuple):
    """One of the arrays that a call processes, as this rank passes it.

    `x` and `out` are the parts of the whole vector that this rank passes and gets (`Call.extent_of_x`).
    """

    call: Call
    x: Window
    out: Window
    # Further vectors, as long as the whole vector, into which this rank copies its block of the result as well. The
    # block of a rank is the part of the result that the rank computes. Only calls of several arrays use this.
    block_copies: tuple[Vector, ...] = ()


def call_array(call: Call, rank: int, x: Flat, out: Flat, block_copies: Sequence[Flat] = ()) -> CallArray:
    """Describe one array of a call, from the addresses of this rank's memory, as a `CallArray`. Local.

    Args:
        rank: This rank's number among the ranks of the call.
        x: The address, length and type of the array to read.
        out: The address, length and type of the array for the result. For an in-place call it equals `x`.
        block_copies: The addresses of further vectors that get a copy of this rank's block (`CallArray.block_copies`).
    """
    in_place = x == out
    return CallArray(
        call,
        Window(x.vector(), call.extent_of_x(rank, in_place)[0]),
        Window(out.vector(), call.extent_of_out(rank, in_place)[0]),
        tuple(flat.vector() for flat in block_copies),
    )


class NodeExecutor:
    """The runner of a call between the ranks of a node. The constructor is local: it sends nothing.

    Args:
        board: The board, on which the ranks wait for each other.
        text: A description of the call. The ranks compare it, to find out whether all of them make the same call.
        parts: The arrays of the call. Several arrays are reduced in the same phases.
        ways: The sizes from which on vectors use another kind of program.
    """

    holds = False

    def __init__(self, board: Board, text: str, parts: Sequence[CallArray], ways: WayLimits) -> None:
        self._board = board
        self._memory = board.memory
        self._text = text
        self._parts = parts
        self._ways = ways
        # this rank's descriptor: its number among the descriptors that this rank has published, and its token
        self._put = -DESCRIPTORS
        self._token = 0
        # the token of each rank in the call for whose arrays `_program` is compiled
        self._tokens: tuple[int, ...] | None = None
        # The mode that this rank proposes for each array. The program depends on the proposals of all ranks.
        self.modes = [self._choose_mode(part) for part in parts]
        for part, mode in zip(parts, self.modes):
            call = part.call
            if call.reduction is not None:
                vectors = 2 if mode == CROSS else call.p
                sums.prepare(call.reduction.combine, call.dtype, vectors, call.nbytes, call.reduction.is_mean)
        # True if other ranks may touch this rank's arrays (which they do only in the first phase)
        self._lends = any(mode in (SHARED, CROSS) for mode in self.modes)
        self._program = StepProgram()
        self._puts = self._compile_puts()
        self._put_steps = tuple(map(steps_of, self._puts))
        # the record that the compiled function of `fast` reads
        self._record: Record | None = None
        self.fast: Callable[[], int] = not_begun

    def steps(self) -> Iterator[None]:
        """Run the whole call. Yields whenever it has to wait."""
        board = self._board
        if not board.descriptors.readable(self._put):
            self._publish()
        perform(self._put_steps[board.number + 1 & 1])
        board.enter(self._token, self._lends)
        yield from board.met()
        yield from self.rest()

    def rest(self) -> Iterator[None]:
        """Run the call from the point where all ranks have entered it. Yields whenever it has to wait."""
        board = self._board
        tokens = board.tokens()
        if tokens != self._tokens:
            self._bind(tokens)
        program = self._program
        for before, after in program.phases:
            perform(before)
            board.signal()
            perform(after)
            yield from board.followed()
        perform(program.last[board.number & 1])

    def free(self) -> None:
        """Do nothing: this runner has no MPI objects."""

    @property
    def way(self) -> str:
        """The kind of program that this rank proposes for its first array, by its name in `tuner.table`."""
        return WAYS[self.modes[0]]

    def _choose_mode(self, part: CallArray) -> int:
        """Return the mode (the kind of program) for an array, by the array's size and kind of memory."""
        call, ways = part.call, self._ways
        # An alltoall in place overwrites x, so other ranks must not read x itself.
        moving = call.kind == "alltoall" and same_address(part.x.vector, part.out.vector)
        located = arena.locate(part.x.vector) and arena.locate(part.out.vector)
        if len(self._parts) > 1:
            return SHARED if located else CROSS
        if located and call.nbytes > ways.slots and not moving:
            return SHARED
        if call.nbytes <= max(ways.slots, ways.ordinary_slots):
            return SLOTS
        crosses = self._crosses(call) and not moving and reachable_address(part.x.vector)
        return CROSS if crosses else STAGES

    def _crosses(self, call: Call) -> bool:
        return self._memory.reachable and call.nbytes >= self._ways.cross_memory

    def _compile_puts(self) -> Turns:
        """Return the actions before this rank enters the operation. They do not depend on the other ranks' arrays."""
        call, x, out, _ = self._parts[0]
        if self.modes == [SLOTS]:
            return slot_puts(self._memory, call, x, 0), slot_puts(self._memory, call, x, 1)
        if self.modes == [STAGES]:
            return (StagePipeline(self._memory, call, x, out).puts(0),) * 2
        return NOTHING

    def _publish(self) -> None:
        """Publish this rank's descriptor on the board: the text of the call and the places of its arrays."""
        places = tuple(self._places(part, mode) for part, mode in zip(self._parts, self.modes))
        all_places = place = None
        if len(places) > 1:
            all_places = arena.empty((len(places), PLACE_WORDS), np.int64)
            all_places[:] = np.array(places, np.int64).reshape(len(places), -1)
            place = _region(all_places)
        self._token = self._board.publish(Descriptor(self._text, places), all_places, place)
        self._put = self._board.descriptors.put

    def _places(self, part: CallArray, mode: int) -> tuple[ArrayPlace, ArrayPlace]:
        """Return where other ranks access this rank's x and out, or NOWHERE if the data goes through slots or stages.

        An array that is written must be writable for other processes too. The x of the root of an in-place broadcast is
        also its out, but nobody writes to it.
        """
        if mode in (SLOTS, STAGES):
            return NOWHERE
        call, x, out = part.call, part.x.vector, part.out.vector
        x_place, out_place = NOWHERE if mode == CROSS else (_region(x), _region(out))
        x_at = out_at = 0
        if self._crosses(call) or len(self._parts) > 1:
            read_alone = call.kind == "broadcast" and same_address(x, out) and call.root == self._board.rank
            x_at, out_at = reachable_address(x), reachable_address(out, not read_alone)
        return x_place._replace(address=x_at), out_place._replace(address=out_at)

    def _bind(self, tokens: tuple[int, ...]) -> None:
        """Read the descriptors of all ranks' tokens, and compile a program for the arrays that the ranks pass now."""
        self._tokens = None
        self.fast = not_begun
        descriptors = self._board.read(tokens)
        programs = [self._compile(number, descriptors) for number in range(len(self._parts))]
        program = programs[0] if len(programs) == 1 else merge(programs)
        self._program = with_steps(program)
        self._tokens = tokens
        self._bind_short_cut(tokens, program)

    def _bind_short_cut(self, tokens: tuple[int, ...], program: NodeProgram) -> None:
        """If calls are short, and the compiled function (`short_cut`) supports them, let it run later calls."""
        board = self._board
        is_short = sum(part.call.nbytes for part in self._parts) <= MOST_BYTES
        record = self._record = record_of(board, tokens, self._puts, program) if is_short else None
        if record is None:
            return

        def fast() -> int:
            call = record.kernel.call_for(0)
            if call is None:
                return NOT_BEGUN
            address = record.words.ctypes.data
            self.fast = short_cut(board, self._text, self._put, record.phases, address, call, self._go_on_after)
            return self.fast()

        self.fast = fast

    def _go_on_after(self, phase: int) -> None:
        """Finish a call of which this rank has finished the phase with index `phase`. Blocking."""
        board = self._board
        board.follow(self._text)
        for before, after in self._program.phases[phase + 1 :]:
            perform(before)
            board.signal()
            perform(after)
            board.follow(self._text)
        perform(self._program.last[board.number & 1])

    def _compile(self, number: int, descriptors: Sequence[Descriptor]) -> NodeProgram:
        """Compile the program of one array. All ranks choose the same kind, because they see the same descriptors."""
        part, memory = self._parts[number], self._memory
        places = [descriptor.places[number] for descriptor in descriptors]
        if all(x.shared and out.shared for x, out in places):
            return shared_program(memory, *part, places)
        if self.modes[number] == SLOTS and not any(x.shared for x, _ in places):
            return NodeProgram(last=(slot_takes(memory, *part[:3], 0), slot_takes(memory, *part[:3], 1)))
        if all(x.address and out.address for x, out in places):
            return crossing_program(memory, *part, places)
        if len(self._parts) > 1:
            raise CollectiveError(f"array {number} of {self._text} lies where other ranks cannot reach it: pass a copy")
        # Ranks that proposed another mode did not copy their first block to a stage before they entered.
        unlike = any(x.shared or x.address for x, _ in places) or self.modes[number] == SLOTS
        return StagePipeline(memory, *part[:3]).program(restage=unlike)


def _region(vector: Vector) -> ArrayPlace:
    region = arena.locate(vector)
    return ArrayPlace() if region is None else ArrayPlace(*region)


def not_begun() -> int:
    """The function `fast` of runners that have no fast path."""
    return NOT_BEGUN
