"""Every interleaving of a few ranks that run the board's real code over words of this module.

Each access to shared memory hands control to the explorer, which lets any rank go next. Between accesses a rank is
deterministic, so where it stands is what it has observed so far: it runs once for each history (`Automaton`), and the
explorer then walks over pairs of (where each rank stands, memory) without running it again.

- Memory is sequentially consistent, or ordered as on x86: a store waits in its rank's buffer, behind later loads of
  that rank, until it is flushed. A lock and a sleep wait for buffers to be empty.
- A row that is read at once is read word by word, in any order.
- A rank that has looked in vain stands where it stood before; so waiting adds no states. No time passes.
- A rank of `interrupted` gets KeyboardInterrupt, once or never, before any one of its accesses, or of its changes to
  what its board remembers.
- From every state the end must be reachable: then no rank waits for ever, as long as each goes on looking.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
from greenlet import GreenletExit, getcurrent, greenlet

from collectives import clock as clocks
from collectives.fabric import board, layout, wait
from collectives.node import short_cut

FREED = "freed"
INTERRUPT = object()
LOAD, GATHER, STORE, STEP, DRAIN, FREE = "load", "gather", "store", "step", "drain", "free"
ACQUIRE, RELEASE = "acquire", "release"
BITS = 15
NODES = 1 << BITS  # a rank stands at most at so many places


class Fault(AssertionError):
    """What the explorer has found, with the accesses that lead there."""


class Access(NamedTuple):
    """What a rank is about to do with the words at these places."""

    kind: str
    places: tuple[int, ...] = ()
    value: Any = None


@dataclass
class Layout:
    """The shared words: a number for each name, what it holds first, and the rank that alone stores there, if any."""

    numbers: dict[Any, int] = field(default_factory=dict)
    first: list[Any] = field(default_factory=list)
    owners: list[int | None] = field(default_factory=list)

    def place(self, name: Any, owner: int | None = None) -> int:
        """The number of a word, which is 0 at first."""
        if name not in self.numbers:
            self.numbers[name] = len(self.first)
            self.first.append(0)
            self.owners.append(owner)
        return self.numbers[name]

    def name(self, place: int) -> Any:
        return list(self.numbers)[place]


class Words:
    """Shared words that a rank sees as a memoryview."""

    def __init__(self, world: World, places: Sequence[int]) -> None:
        self._world, self._places = world, tuple(places)

    def __getitem__(self, index: int) -> Any:
        return self._world.access(LOAD, (self._places[index],))

    def __setitem__(self, index: int, value: Any) -> None:
        self._world.access(STORE, (self._places[index],), value)

    def __iter__(self) -> Iterator[int]:
        return iter(self._world.access(GATHER, self._places))

    def __bytes__(self) -> bytes:
        return b"".join(word.to_bytes(8, board.ORDER) for word in self)


class Bytes:
    """Shared bytes, of which each slice that is written at once is one word here. See `Descriptors` and `Poison`."""

    def __init__(self, world: World, name: Any, owner: int | None = None) -> None:
        self._world, self._name, self._owner = world, name, owner

    def __setitem__(self, part: slice, value: Any) -> None:
        self._world.access(STORE, (self._place(part),), bytes(value))

    def __getitem__(self, part: slice) -> Any:
        value = self._world.access(LOAD, (self._place(part),))
        return np.frombuffer(value or bytes(part.stop - part.start), np.uint8)[: part.stop - part.start]

    def _place(self, part: slice) -> int:
        return self._world.layout.place((self._name, part.start), self._owner)


class Address(NamedTuple):
    """The address of a word, for `short_cut.carry_out` as Python runs it."""

    words: Any
    index: int = 0

    def __add__(self, nbytes: Any) -> Address:  # type: ignore[override]
        return Address(self.words, self.index + nbytes // 8)


def _move_bytes(to: Address, source: Address, count: int) -> None:
    for i in range(count // 8):
        to.words[to.index + i] = source.words[source.index + i]


PRIMITIVES: dict[str, Any] = {
    "words_at": lambda record: record,
    "values_at": lambda address, count: address.words,
    "load_word": lambda address: address.words[address.index],
    "store_word": lambda address, word: address.words.__setitem__(address.index, word),
    "move_bytes": _move_bytes,
    "widen": lambda value: value,
    "narrow": lambda value: value,
}
"""What stands for the instructions of the compiled function."""


class World:
    """One rank's view, while its code runs. `access` hands over to the explorer.

    `key` is what the code can remember: all that it has observed, but for what it saw in a wait before it went on. A
    wait begins behind a store, and its last look is the one at the row; see `Board.meet`, `Board.follow`, `drive`.
    """

    def __init__(self, layout: Layout, rank: int, size: int) -> None:
        self.layout, self.rank, self.size = layout, rank, size
        self.hub = getcurrent()
        self.dead = False
        self.clock = 0.0
        self.key: tuple[Any, ...] = ()
        self._base: tuple[Any, ...] = ()
        self._pauses: dict[str, int] = {}
        self._seen: dict[tuple[int, ...], Any] = {}
        self._again = False
        self._looks = 0

    def access(self, kind: str, places: tuple[int, ...] = (), value: Any = None) -> Any:
        if self.dead:
            raise GreenletExit
        if self._again and places in self._seen:
            return self._seen[places]
        self._again = False
        seen = self.hub.switch(Access(kind, places, value))
        if seen is INTERRUPT:
            waits = self.key[len(self._base) :][:1] in ((), ("board",), ("drive",))
            self._base = self.key = (*(self._base if waits else self.key), "!")
            self._forget()
            raise KeyboardInterrupt
        if kind == GATHER:
            self.key = (*self._base, seen)
            self._looks += 1
        else:
            self.key = (*self.key, seen)
        if kind in (LOAD, GATHER):
            self._seen[places] = seen
        else:
            self._base = self.key
            self._forget()
        return seen

    def place(self, access: Access | None) -> Any:
        """Where the rank stands before this access."""
        return self.key, access, self._looks if access and access.kind == GATHER else 0

    def pause(self, site: str) -> None:
        """The rank has looked in vain. At first it looks again at once and sees the same, until it does so for good:
        from then on it stands at one place."""
        if self.dead:
            raise GreenletExit
        count = self._pauses[site] = self._pauses.get(site, 0) + 1
        self._again = count < 2
        self._looks = 0
        if count >= 2:
            self.key = (*self._base, site)

    def _forget(self) -> None:
        self._looks = 0
        self._pauses.clear()
        self._seen.clear()

    def words(self, *names: Any, owner: int | None = None) -> Words:
        return Words(self, [self.layout.place(name, owner) for name in names])

    def row(self, name: Any) -> Words:
        """A word of each rank."""
        return Words(self, [self.layout.place((*name, rank), rank) for rank in range(self.size)])

    def free(self, *names: Any) -> None:
        """Nobody may touch these words from here on."""
        self.access(FREE, tuple(self.layout.place(name) for name in names))

    def board(self, kind: type[Stepping] | None = None) -> board.Board:
        """The real board over these words."""
        made = (kind or Stepping)(self._memory(), range(self.size), wait.Limits())
        made._world, made.spins = self, 0
        made._due = float("inf")  # processes do not end here
        made.poison.flag = self.words(("flag", 0), ("flag", 1))  # type: ignore[assignment]
        made.poison._memory = Bytes(self, "sentence")  # type: ignore[assignment]
        return made

    def _memory(self) -> Any:
        rows = [tuple(self.row((name, parity)) for parity in (0, 1)) for name in ("entry", "progress")]
        return SimpleNamespace(
            rank=self.rank,
            size=self.size,
            rows=rows,
            fence=None,
            crowded=False,
            reachable=True,
            poison_fd=self.rank,
            pids=[0] * self.size,
            poison=np.zeros(layout.POISON_BYTES, np.uint8),
            words=[[0] * 8 for _ in range(self.size)],
            identity=1,
            descriptors=[Bytes(self, ("descriptor", rank), rank) for rank in range(self.size)],
        )


class Stepping(board.Board):
    """The board, where an interrupt may also come before each change of what only its rank sees."""

    _world: World | None = None

    def __setattr__(self, name: str, value: Any) -> None:
        if self._world is not None and name in ("number", "phase", "last_phase", "lent"):
            self._world.access(STEP)
        super().__setattr__(name, value)


Program = Callable[[World], Any]


@dataclass(eq=False)
class Node:
    """Where a rank stands: before this access, or at its end with this outcome."""

    number: int
    access: Access | None
    outcome: Any = None
    history: tuple[Any, ...] = ()
    children: dict[Any, Node] = field(default_factory=dict)
    running: tuple[World, greenlet] | None = None
    whole: Node | None = None
    """Of a row that is read in part: before it was read; `got` is what has been read."""
    got: tuple[tuple[int, Any], ...] = ()
    fresh: bool = True
    """Whether it has not been interrupted yet."""


_running: World | None = None


class Automaton:
    """One rank's code, unfolded as far as the explorer came. `numbers` counts the nodes of all."""

    def __init__(self, layout: Layout, rank: int, size: int, program: Program) -> None:
        self._layout, self._rank, self._size, self._program = layout, rank, size, program
        self.nodes: list[Node] = []
        world, code = self._begin()
        start = self._node((), True)
        self._stop(start, world, code, self._switch(world, code, world))
        self._known: dict[Any, Node] = {world.place(start.access): start}

    def after(self, node: Node, seen: Any) -> Node:
        """Where the rank stands once it has observed this."""
        found = node.children.get(seen)
        if found is None:
            found = node.children[seen] = self._after(node, seen)
        return found

    def after_part(self, node: Node, place: int, value: Any) -> Node:
        """Where it stands once it has read one more word of a row."""
        assert node.access is not None
        found = node.children.get((place, value))
        if found is None:
            whole, got = node.whole or node, tuple(sorted([*node.got, (place, value)], key=lambda one: one[0]))
            left = tuple(other for other in node.access.places if other != place)
            if left:
                found = whole.children.get(got)
                if found is None:
                    found = whole.children[got] = self._node(whole.history, whole.fresh)
                    found.access, found.whole, found.got = Access(GATHER, left), whole, got
            else:
                values = dict(got)
                assert whole.access is not None
                found = self.after(whole, tuple(values[each] for each in whole.access.places))
            node.children[place, value] = found
        return found

    def close(self) -> None:
        """The code that stands somewhere ends without another access."""
        for node in self.nodes:
            if node.running is not None:
                node.running[0].dead = True

    def _after(self, node: Node, seen: Any) -> Node:
        world, code = node.running or self._replayed(node.history)
        node.running = None
        came = self._switch(world, code, seen)
        place = world.place(came if isinstance(came, Access) else None)
        found = self._known.get(place)
        if found is not None:
            world.dead = True
            return found
        made = self._known[place] = self._node((*node.history, seen), node.fresh and seen is not INTERRUPT)
        self._stop(made, world, code, came)
        return made

    def _replayed(self, history: Sequence[Any]) -> tuple[World, greenlet]:
        world, code = self._begin()
        self._switch(world, code, world)
        for seen in history:
            self._switch(world, code, seen)
        return world, code

    def _begin(self) -> tuple[World, greenlet]:
        return World(self._layout, self._rank, self._size), greenlet(self._program)

    def _switch(self, world: World, code: greenlet, value: Any) -> Any:
        global _running
        _running = world
        return code.switch(value)

    def _stop(self, node: Node, world: World, code: greenlet, came: Any) -> None:
        if isinstance(came, Access):
            node.access, node.running = came, (world, code)
        else:
            node.outcome = came

    def _node(self, history: tuple[Any, ...], fresh: bool) -> Node:
        self.nodes.append(Node(len(self.nodes), None, history=history, fresh=fresh))
        return self.nodes[-1]


class Memory(NamedTuple):
    """All words, and the stores that wait in each rank's buffer."""

    words: tuple[Any, ...]
    buffers: tuple[tuple[tuple[int, Any], ...], ...]

    def seen(self, rank: int, place: int) -> Any:
        for at, value in reversed(self.buffers[rank]):
            if at == place:
                return value
        return self.words[place]

    def stored(self, place: int, value: Any) -> Memory:
        if place < len(self.words) and self.words[place] is FREED:
            raise Fault(f"a store to freed memory: {place}")
        return self._replace(words=(*self.words[:place], value, *self.words[place + 1 :]))

    def flushed(self, rank: int) -> Memory:
        """The rank's oldest store reaches memory."""
        (place, value), *rest = self.buffers[rank]
        buffers = (*self.buffers[:rank], tuple(rest), *self.buffers[rank + 1 :])
        return self.stored(place, value)._replace(buffers=buffers)

    def drained(self) -> Memory:
        """All stores reach memory."""
        memory = self
        for rank in range(len(self.buffers)):
            while memory.buffers[rank]:
                memory = memory.flushed(rank)
        return memory


class Explored(NamedTuple):
    """How much there was."""

    states: int
    moves: int
    histories: int
    seconds: float
    outcomes: set[str]
    """The outcomes of all ranks, for every way in which they end."""


class Explorer:
    """The states of some ranks, each of which runs its program. `check` is given all outcomes, and raises."""

    def __init__(
        self,
        programs: Sequence[Program],
        check: Callable[[tuple[Any, ...]], None],
        *,
        interrupted: Sequence[int] = (),
        buffered: bool = False,
        whole: bool = False,
    ) -> None:
        """`whole`: what a rank does while it holds the lock is one move, and so is its look at a row."""
        self._layout, self._size = Layout(), len(programs)
        self._interrupted, self._buffered, self._check = interrupted, buffered, check
        self._whole, self._lock = whole, self._layout.place("lock")
        self._programs = programs
        self._memories: list[Memory] = []
        self._numbers: dict[Memory, int] = {}
        self._moves: list[dict[int, list[tuple[int, int]]]] = [{} for _ in programs]

    def run(self) -> Explored:
        """Visit all states. Fault where something is wrong."""
        begun = time.monotonic()
        with hooked():
            self._ranks = [
                Automaton(self._layout, rank, self._size, program) for rank, program in enumerate(self._programs)
            ]
            try:
                self._visit()
                self._see_ends()
            finally:
                for rank in self._ranks:
                    rank.close()
        histories = sum(len(rank.nodes) for rank in self._ranks)
        seconds = time.monotonic() - begun
        return Explored(len(self._states), len(self._from), histories, seconds, self.outcomes)

    def _visit(self) -> None:
        first = self._pack(self._number(Memory((), ((),) * self._size)), [0] * self._size)
        self._states = {first: 0}
        self._before = array("q", [-1])
        self._from, self._to = array("q"), array("q")
        self._ends: list[int] = []
        self.outcomes: set[str] = set()
        waiting = [first]
        states, before, source, target = self._states, self._before, self._from, self._to
        while waiting:
            state = waiting.pop()
            index = states[state]
            for after in self._following(state, index):
                known = states.get(after)
                if known is None:
                    known = states[after] = len(states)
                    before.append(index)
                    waiting.append(after)
                source.append(index)
                target.append(known)

    def _following(self, state: int, index: int) -> list[int]:
        """The states one move further; none at the end."""
        memory = state >> BITS * self._size << BITS
        found = []
        for rank, known in enumerate(self._moves):
            key = memory | state >> BITS * rank & NODES - 1
            moves = known.get(key)
            if moves is None:
                moves = known[key] = self._made(rank, key, index)
            found += [state + move for move in moves]
        if not found:
            self._see(state, index)
        return found

    def _made(self, rank: int, key: int, index: int) -> list[int]:
        """For each move of a rank that stands there, over that memory: what it adds to the number of the state."""
        memory, node = key >> BITS, key & NODES - 1
        try:
            moves = self._moves_of(rank, self._ranks[rank].nodes[node], self._memories[memory])
        except AssertionError as error:
            raise Fault(f"{error}\n{self._trace(index)}") from None
        assert len(self._ranks[rank].nodes) < NODES
        return [(after - memory << BITS * self._size) + (other - node << BITS * rank) for other, after in moves]

    def _see(self, state: int, index: int) -> None:
        nodes = [code.nodes[node] for code, node in zip(self._ranks, self._unpack(state))]
        if any(node.access is not None for node in nodes):
            return
        outcomes = tuple(node.outcome for node in nodes)
        self._ends.append(index)
        if str(outcomes) not in self.outcomes:
            self.outcomes.add(str(outcomes))
            try:
                self._check(outcomes)
            except AssertionError as error:
                raise Fault(f"{error}\n{self._trace(index)}") from None

    def _moves_of(self, rank: int, node: Node, memory: Memory) -> list[tuple[int, int]]:
        """(where the rank stands then, memory) for each thing that it, or its buffer, can do next."""
        moves = [(node, memory.flushed(rank))] if memory.buffers[rank] else []
        if node.access is not None:
            moves += self._steps(rank, node, node.access, memory)
            if node.fresh and rank in self._interrupted and node.access.kind != FREE and node.whole is None:
                moves.append((self._ranks[rank].after(node, INTERRUPT), memory))
        return [self._settled(rank, *move) for move in moves]

    def _steps(self, rank: int, node: Node, access: Access, memory: Memory) -> list[tuple[Node, Memory]]:
        memory, code = self._grown(memory), self._ranks[rank]
        if access.kind in (LOAD, GATHER):
            values = [(place, self._load(rank, place, memory)) for place in access.places]
            if access.kind == LOAD:
                return [(code.after(node, values[0][1]), memory)]
            if self._whole:
                return [(code.after(node, tuple(value for _, value in values)), memory)]
            return [(code.after_part(node, place, value), memory) for place, value in values]
        if access.kind == STEP:
            return [(code.after(node, None), memory)]
        if access.kind == STORE:
            return [(code.after(node, None), self._store(rank, access, memory))]
        if access.kind == DRAIN:
            return [(code.after(node, None), memory.drained())]
        if memory.buffers[rank]:
            return []
        if access.kind == FREE:
            for place in access.places:
                memory = memory.stored(place, FREED)
        else:
            (lock,) = access.places
            if access.kind == ACQUIRE and memory.words[lock] not in (0, rank + 1):
                return []
            memory = memory.stored(lock, rank + 1 if access.kind == ACQUIRE else 0)
        return [(code.after(node, None), memory)]

    def _load(self, rank: int, place: int, memory: Memory) -> Any:
        value = memory.seen(rank, place)
        if value is FREED:
            raise Fault(f"rank {rank} reads freed memory: {self._layout.name(place)}")
        return value

    def _store(self, rank: int, access: Access, memory: Memory) -> Memory:
        (place,) = access.places
        if not self._buffered:
            return memory.stored(place, access.value)
        buffers = memory.buffers
        mine = (*buffers[rank], (place, access.value))
        return memory._replace(buffers=(*buffers[:rank], mine, *buffers[rank + 1 :]))

    def _settled(self, rank: int, node: Node, memory: Memory) -> tuple[int, int]:
        """A rank's look at its own words is no move: nobody else stores there."""
        owners = self._layout.owners
        while node.access is not None:
            places = node.access.places
            if node.access.kind == GATHER:
                own = [place for place in places if owners[place] == rank and not self._whole]
            else:
                own = [place for place in places if owners[place] == rank and node.access.kind == LOAD]
            if own and node.access.kind == GATHER:
                node = self._ranks[rank].after_part(node, own[0], self._load(rank, own[0], self._grown(memory)))
            elif own or self._goes_on(rank, node, memory):
                ((node, memory),) = self._steps(rank, node, node.access, memory)
            else:
                break
        return node.number, self._number(memory)

    def _goes_on(self, rank: int, node: Node, memory: Memory) -> bool:
        """Whether the next access is part of the move before it."""
        assert node.access is not None
        if node.access.kind == STEP:
            return not (node.fresh and rank in self._interrupted)
        return self._whole and memory.words[self._lock : self._lock + 1] == (rank + 1,)

    def _grown(self, memory: Memory) -> Memory:
        """With the words that code has named since."""
        return memory._replace(words=memory.words + tuple(self._layout.first[len(memory.words) :]))

    def _number(self, memory: Memory) -> int:
        memory = self._grown(memory)
        found = self._numbers.get(memory)
        if found is None:
            found = self._numbers[memory] = len(self._memories)
            self._memories.append(memory)
        return found

    def _pack(self, memory: int, nodes: Sequence[int]) -> int:
        return sum(node << rank * BITS for rank, node in enumerate(nodes)) | memory << BITS * self._size

    def _unpack(self, state: int) -> list[int]:
        return [state >> rank * BITS & NODES - 1 for rank in range(self._size)]

    def _see_ends(self) -> None:
        """Fault unless all ranks can still end, wherever they stand."""
        source, target = np.array(self._from), np.array(self._to)
        ends = np.zeros(len(self._states), bool)
        ends[self._ends] = True
        count = 0
        while count != (count := int(ends.sum())):
            for part in reversed(range(0, len(source), 1 << 16)):
                chosen = slice(part, part + (1 << 16))
                ends[source[chosen][ends[target[chosen]]]] = True
        if not ends.all():
            raise Fault(f"ranks wait for ever\n{self._trace(int(np.flatnonzero(~ends)[0]))}")

    def _trace(self, index: int) -> str:
        states = list(self._states)
        path = [index]
        while self._before[path[-1]] >= 0:
            path.append(self._before[path[-1]])
        lines = []
        for before, after in zip(path[::-1], path[-2::-1]):
            nodes, then = self._unpack(states[before]), self._unpack(states[after])
            rank = next((rank for rank in range(self._size) if nodes[rank] != then[rank]), None)
            lines.append("a store reaches memory" if rank is None else self._line(rank, nodes[rank], then[rank]))
        nodes = self._unpack(states[index])
        return "\n".join(lines + [self._line(rank, node) for rank, node in enumerate(nodes)])

    def _line(self, rank: int, before: int, after: int | None = None) -> str:
        code = self._ranks[rank]
        access = code.nodes[before].access
        if access is None:
            return f"rank {rank}: {code.nodes[before].outcome}"
        names = [self._layout.name(place) for place in access.places]
        cut = after is not None and code.nodes[before].fresh and not code.nodes[after].fresh
        value = f" {access.value!r}" if access.kind == STORE else ""
        state = "stands before" if after is None else "is interrupted before" if cut else "has done"
        return f"rank {rank} {state} {access.kind} {names}{value}"


def _now() -> World:
    assert _running is not None
    return _running


def _monotonic() -> float:
    world = _now()
    world.clock += 1e-3
    return world.clock


def _give_way() -> None:
    _now().pause("board")


def _flock(fd: int, how: int) -> None:
    world = _now()
    kind = ACQUIRE if how == board.fcntl.LOCK_EX else RELEASE
    world.access(kind, (world.layout.place("lock"),))


@contextmanager
def hooked() -> Iterator[None]:
    """The modules of the node with waits, locks and sleeps that hand over to the explorer."""
    clock: dict[str, object] = {"monotonic": _monotonic}
    seconds = SimpleNamespace(process_time=lambda: 0.0, **clock)
    with (
        mock.patch.object(board, "time", SimpleNamespace(sleep=lambda seconds: _now().access(DRAIN), **clock)),
        mock.patch.object(board, "sched_yield", _give_way),
        mock.patch.multiple(short_cut, **PRIMITIVES),
        mock.patch.object(board, "drive", partial(wait.drive, spins=0)),
        mock.patch.object(wait, "time", SimpleNamespace(sleep=lambda seconds: _now().pause("drive"), **clock)),
        mock.patch.object(clocks, "time", seconds),
        mock.patch.object(wait, "os", SimpleNamespace(sched_yield=lambda: _now().pause("drive"))),
        mock.patch.object(board, "fcntl", SimpleNamespace(flock=_flock, LOCK_EX=2, LOCK_UN=8)),
    ):
        yield
