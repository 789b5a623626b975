"""The board's protocol (publish, meet, take, poison), in every interleaving of two and three ranks.

The real code runs: board, poison, descriptors, executor with its fast paths, and how a generation ends. Vectors
and arrays are words; an array is touched by the other ranks, and freed when its rank is done or has failed. CASES
says what is covered: two operations, the first of which may bind, a rank that brings another array to the second,
numbers that wrap, an interrupt of one or of both ranks before each access, stores that a processor holds back. Two
ranks are explored access by access. With three, but for slots where nobody fails, a look at a row is one move, and so
is what a rank does under the lock. Three ranks that touch arrays while one fails do one operation, in the slow tests.
Not covered: processes that die, time limits, two interrupts of one rank, fences of other processors, what goes over
messages."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from greenlet import GreenletExit

from collectives import CollectiveError
from collectives.call import Call
from collectives.errors import error_for_all
from collectives.fabric.board import Board, GenerationEnd, Poison
from collectives.fabric.layout import ArrayPlace
from collectives.node import short_cut
from collectives.node.executor import MET, SHARED, SLOTS, CallArray, NodeExecutor
from collectives.node.program import NOTHING, NodeProgram, Phase, Turns, Window
from tests.unit.collectives import explorer
from tests.unit.collectives.explorer import Address, Explorer, Fault, Memory, Stepping, World

Make = Callable[[World], Board]
TEXT = "allreduce of 1 float64"


def brings(rank: int, operation: int) -> int:
    """What a rank brings: no two sums of such numbers are alike."""
    return 1 << 4 * operation + rank


def total(size: int, operation: int) -> int:
    return sum(brings(rank, operation) for rank in range(size))


class Slots(NodeExecutor):
    """The real executor and its fast path, over slots that the explorer sees."""

    def __init__(self, world: World, board: Board) -> None:
        self.world, self.x, self.out = world, [0], [None]
        self.slots = [
            [world.words(("slot", parity, rank), owner=rank) for rank in range(world.size)] for parity in (0, 1)
        ]
        nowhere = Window(np.empty(0))
        part = CallArray(Call("allreduce", 1, np.dtype(np.float64), None, 0, "auto", world.size), nowhere, nowhere)
        super().__init__(board, TEXT, [part], None)  # type: ignore[arg-type]

    def bring(self, operation: int) -> None:
        self.x[0] = brings(self.world.rank, operation)

    def result(self) -> Any:
        return self.out[0]

    def free(self) -> None:
        """Others only read what lies in slots."""

    def actions(self, parity: int) -> tuple[list[Any], list[Any]]:
        """What this rank does before it meets the others, and then, as a record has it."""
        slots = self.slots[parity]
        put = [0, Address(slots[self.world.rank]), 8, Address(self.x)]
        return put, [self.world.size, Address(self.out), 1, 0, *map(Address, slots)]

    def _choose_mode(self, part: Any) -> int:
        return SLOTS

    def _places(self, part: Any, mode: int) -> tuple[ArrayPlace, ArrayPlace]:
        return ArrayPlace(), ArrayPlace()

    def _compile_puts(self) -> Turns:
        rank = self.world.rank
        return tuple(((lambda slots=slots: slots[rank].__setitem__(0, self.x[0]), ()),) for slots in self.slots)  # type: ignore[return-value,misc]

    def _compile(self, number: int, descriptors: Any) -> NodeProgram:
        def take(slots: Any) -> None:
            self.out[0] = sum(slot[0] for slot in slots)

        return NodeProgram(last=tuple(((take, (slots,)),) for slots in self.slots))  # type: ignore[arg-type]

    def _bind_short_cut(self, tokens: tuple[int, ...], program: NodeProgram) -> None:
        if any(phase.after for phase in program.phases):
            return
        board = self._board
        rows = [Address(row) for pair in (board.entries, board.progress) for row in pair]
        record = [board.rank, board.size, 0, 0, Address([0]), 0, 0, *rows, *tokens]
        for field, parity in ((short_cut.EVEN, 0), (short_cut.ODD, 1)):
            record[field] = len(record)
            before, after = self.actions(parity)
            end = [short_cut.SIGNAL, short_cut.FOLLOW, short_cut.END] if program.phases else [short_cut.END]
            record += [*before, short_cut.ENTER, *after, *end]
        call: Any = short_cut.carry_out.function
        phases = len(program.phases)
        self.fast = short_cut.short_cut(board, self._text, self._put, phases, record, call, self._go_on_after)  # type: ignore[arg-type]


class Touching(Slots):
    """Arrays that every other rank reads and writes, in one phase: rank r sums element r, for all."""

    def __init__(self, world: World, board: Board) -> None:
        ranks = range(world.size)
        self.xs = [world.words(("x", rank), owner=rank) for rank in ranks]
        self.outs = [world.words(*(("out", rank, element) for element in ranks)) for rank in ranks]
        self.mine = [0]
        super().__init__(world, board)

    def bring(self, operation: int) -> None:
        self.mine[0] = self.xs[self.world.rank][0] = brings(self.world.rank, operation)

    def result(self) -> Any:
        rank = self.world.rank
        seen = {self.outs[rank][other] for other in range(self.world.size) if other != rank} | {self.out[0]}
        return seen.pop() if len(seen) == 1 else seen

    def free(self) -> None:
        rank = self.world.rank
        self.world.free(("x", rank), *(("out", rank, element) for element in range(self.world.size)))

    def _choose_mode(self, part: Any) -> int:
        return SHARED

    def _places(self, part: Any, mode: int) -> tuple[ArrayPlace, ArrayPlace]:
        return ArrayPlace(1), ArrayPlace(1)

    def _compile_puts(self) -> Turns:
        return NOTHING

    def _compile(self, number: int, descriptors: Any) -> NodeProgram:
        return NodeProgram((Phase(((self.touch, ()),)),))

    def actions(self, parity: int) -> tuple[list[Any], list[Any]]:
        rank, size = self.world.rank, self.world.size
        others = [other for other in range(size) if other != rank]
        copies = [(0, Address(self.outs[other], rank), 8, Address(self.out)) for other in others]
        return [], [*self.reduction(), *(word for copy in copies for word in copy)]

    def reduction(self) -> list[Any]:
        rank = self.world.rank
        parts = [Address(self.mine if other == rank else x) for other, x in enumerate(self.xs)]
        return [self.world.size, Address(self.out), 1, 0, *parts]

    def touch(self) -> None:
        rank = self.world.rank
        others = [other for other in range(self.world.size) if other != rank]
        self.out[0] = self.mine[0] + sum(self.xs[other][0] for other in others)  # type: ignore[call-overload]
        for other in others:
            self.outs[other][rank] = self.out[0]


def program(
    kind: type[Slots],
    *,
    bound: bool = False,
    operations: int = 2,
    make: Make = World.board,
    first: int = 0,
    anew: bool = False,
) -> explorer.Program:
    """Some operations of a rank; whatever is raised ends the generation. `bound`: all know each other's descriptors
    already. `first`: the number of the operation before. `anew`: rank 0 brings another array to each."""

    def run(world: World) -> Any:
        if first:
            follow(world, first)
        board = make(world)
        ending = GenerationEnd(lambda told: board.end(told, str(told)))
        calls = [made(world, kind, board, bound)]
        results: list[Any] = []
        try:
            board.number = first
            for operation in range(operations):
                if operation and anew and world.rank == 0:
                    calls.append(kind(world, board))
                calls[-1].bring(operation)
                code = calls[-1].fast()
                if code:
                    explorer.board.drive(calls[-1].rest() if code == MET else calls[-1].steps(), board, TEXT)
                results.append(calls[-1].result())
        except GreenletExit:
            raise
        except BaseException as error:
            with contextlib.suppress(KeyboardInterrupt):
                ending.end(error_for_all(world.rank, TEXT, error))
            assert ending.error is not None
        calls[-1].free()
        return tuple(results), str(ending.error) if ending.error else None

    return run


def made(world: World, kind: type[Slots], board: Board, bound: bool) -> Any:
    call = kind(world, board)
    if bound:
        bind(call, board)
    return call


def follow(world: World, number: int) -> None:
    """The words of all ranks as they stand after that operation."""
    for before in (number - 1, number):
        for rank in range(world.size):
            place = world.layout.place(("entry", before & 1, rank), rank)
            world.layout.first[place] = before << 32 | 1


def bind(call: Any, board: Board) -> None:
    """As after a first operation, of which nothing is left but the descriptors."""
    size = call.world.size
    call._put = call._token = board.descriptors.put = 1
    board.hold_fast_paths(False)
    call._tokens = (1,) * size
    program = call._compile(0, [])
    call._program = program
    call._bind_short_cut(call._tokens, program)


def sound(size: int, interrupted: bool, operations: int = 2) -> Callable[[tuple[Any, ...]], None]:
    def check(outcomes: tuple[Any, ...]) -> None:
        for results, over in outcomes:
            assert list(results) == [total(size, operation) for operation in range(len(results))], "a wrong sum"
            assert len(results) == operations or over, "neither done nor told why not"
        sentences = {over for _, over in outcomes if over}
        assert len(sentences) <= 1, f"two sentences: {sentences}"
        assert interrupted or not sentences, f"nobody failed: {sentences}"

    return check


def explore(
    kind: type[Slots],
    size: int = 2,
    interrupted: tuple[int, ...] = (),
    buffered: bool = False,
    whole: bool = False,
    operations: int = 2,
    **how: Any,
) -> explorer.Explored:
    run = program(kind, operations=operations, **how)
    check = sound(size, bool(interrupted), operations)
    return Explorer([run] * size, check, interrupted=interrupted, buffered=buffered, whole=whole).run()


class Reading(Touching):
    """Arrays that every other rank reads, as in a reduce_scatter."""

    def result(self) -> Any:
        return self.out[0]

    def free(self) -> None:
        self.world.free(("x", self.world.rank))

    def actions(self, parity: int) -> tuple[list[Any], list[Any]]:
        return [], self.reduction()

    def touch(self) -> None:
        self.out[0] = sum(x[0] if rank != self.world.rank else self.mine[0] for rank, x in enumerate(self.xs))  # type: ignore[call-overload]


CASES = {
    "slots": {"kind": Slots, "buffered": True},
    "slots, known": {"kind": Slots, "bound": True, "buffered": True},
    "slots, one fails": {"kind": Slots, "interrupted": (0,)},
    "slots, both fail": {"kind": Slots, "interrupted": (0, 1), "buffered": True},
    "slots, another array": {"kind": Slots, "bound": True, "anew": True, "interrupted": (0, 1)},
    "slots, numbers that wrap": {"kind": Slots, "bound": True, "first": (1 << 32) - 2, "interrupted": (0, 1)},
    "arrays": {"kind": Touching, "buffered": True},
    "arrays, one fails": {"kind": Touching, "interrupted": (0,), "buffered": True},
    "arrays, both fail": {"kind": Touching, "bound": True, "interrupted": (0, 1)},
    "arrays, another array": {"kind": Touching, "bound": True, "anew": True, "interrupted": (0,)},
    "three, slots": {"kind": Slots, "size": 3, "bound": True},
    "three, slots, stores held back": {"kind": Slots, "size": 3, "bound": True, "buffered": True, "whole": True},
    "three, slots, one fails": {"kind": Slots, "size": 3, "bound": True, "interrupted": (1,), "whole": True},
    "three, arrays": {"kind": Touching, "size": 3, "bound": True, "whole": True},
    "three, arrays, one fails": {
        "kind": Reading,
        "size": 3,
        "bound": True,
        "interrupted": (0,),
        "whole": True,
        "operations": 1,
    },
}


LONG = "three, arrays, one fails"  # a minute


@pytest.mark.slow
@pytest.mark.parametrize("case", [pytest.param(name, marks=[pytest.mark.full] * (name == LONG)) for name in CASES])
def test_in_every_order_sums_are_right_and_all_hear_of_the_end(case: str) -> None:
    how: dict[str, Any] = dict(CASES[case])
    found = explore(**how)
    assert found.states > 100
    assert ("given up" in str(found.outcomes)) == bool(how.get("interrupted"))


def test_of_two_that_fail_at_once_either_may_be_the_first() -> None:
    told = str(explore(Slots, bound=True, interrupted=(0, 1), operations=1).outcomes)
    assert "'rank 0 has given up" in told and "'rank 1 has given up" in told


class Late:
    """A row of words, where a rank puts its vector only behind its word."""

    def __init__(self, row: Any, put: Callable[[], None]) -> None:
        self._row, self._put = row, put

    def __setitem__(self, rank: int, word: int) -> None:
        self._row[rank] = word
        self._put()

    def __getitem__(self, rank: int) -> int:
        return self._row[rank]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._row, name)

    def __bytes__(self) -> bytes:
        return bytes(self._row)


class LateVector(Slots):
    """A flag that is set before its data."""

    def _bind_short_cut(self, tokens: tuple[int, ...], program: NodeProgram) -> None:
        board, rank = self._board, self.world.rank
        board.entries = tuple(  # type: ignore[assignment]
            Late(row, lambda slots=slots: slots[rank].__setitem__(0, self.x[0]))
            for row, slots in zip(board.entries, self.slots)
        )
        super()._bind_short_cut(tokens, program)

    def actions(self, parity: int) -> tuple[list[Any], list[Any]]:
        return [], super().actions(parity)[1]


class LateWork(Touching):
    """A phase that is said to be over before it begins."""

    def _compile(self, number: int, descriptors: Any) -> NodeProgram:
        return NodeProgram((Phase((), ((self.touch, ()),)),))


class OneSlot(Slots):
    """A slot that is written again while others may still read it."""

    def __init__(self, world: World, board: Board) -> None:
        super().__init__(world, board)
        self.slots[1] = self.slots[0]
        self._puts = self._compile_puts()


def one_row(world: World) -> Board:
    """A word that is stored again while others may still look for what it was."""
    board = world.board()
    board.entries = board.entries[:1] * 2
    return board


class Forgetful(Poison):
    """Poison that is overwritten by who comes next."""

    def spread(self, error: BaseException, sentence: str) -> CollectiveError:
        self.flag[0] = 0
        return super().spread(error, sentence)


class Hasty(Poison):
    """A flag that is set before its sentence, where no lock holds readers back."""

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        yield

    def spread(self, error: BaseException, sentence: str) -> CollectiveError:
        self.flag[0] = 1
        return super().spread(error, sentence)


class Restless(Stepping):
    """A rank that gives its arrays back while others touch them."""

    def _touching(self) -> bool:
        return False


class Silent(Stepping):
    """A rank that poisons, and leaves its word as it was."""

    def end(self, error: BaseException, sentence: str) -> CollectiveError:
        told = self.poison.spread(error, sentence)
        self.hold_fast_paths(True)
        while self._touching():
            explorer.board.sched_yield()
        return told


def poisoned(kind: type[Poison]) -> Make:
    def make(world: World) -> Board:
        board = world.board()
        board.poison.__class__ = kind
        return board

    return make


def boarded(kind: type[Stepping]) -> Make:
    return lambda world: world.board(kind)


BROKEN = {
    "a flag before its data": (LateVector, {}, "a wrong sum"),
    "a phase over before it begins": (LateWork, {}, "a wrong sum|freed memory"),
    "a slot reused too early": (OneSlot, {}, "a wrong sum"),
    "a word reused too early": (Slots, {"make": one_row}, "wait for ever"),
    "a poison that is overwritten": (Slots, {"make": poisoned(Forgetful), "interrupted": (0, 1)}, "two sentences"),
    "a poison without its sentence": (Slots, {"make": poisoned(Hasty), "interrupted": (0,)}, "nor told why not"),
    "a rank that does not wait": (Touching, {"make": boarded(Restless), "interrupted": (0,)}, "freed memory"),
    "a word that is left behind": (Touching, {"make": boarded(Silent), "interrupted": (0,)}, "freed memory"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_broken_is_found(name: str) -> None:
    kind, how, words = BROKEN[name]
    with pytest.raises(Fault, match=words):
        explore(kind, bound=True, **how)


@pytest.mark.slow
def test_a_store_that_the_processor_holds_back_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Memory, "drained", lambda memory: memory)
    explore(Touching, bound=True, interrupted=(0,))
    with pytest.raises(Fault, match="freed memory"):
        explore(Touching, bound=True, interrupted=(0,), buffered=True)
