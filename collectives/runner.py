"""Runners carry a call out: by shared memory, over messages, or by MPI's own collectives; at once or beside compute.

`make_runner` picks and compiles one. `Started` is an operation beside compute: its steps are taken in the order in
which operations were started.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from mpips.collectives.arrays import Flat
from mpips.collectives.call import Body, Call, Runner
from mpips.collectives.communicator import Communicator
from mpips.collectives.fabric.board import NUMBERS
from mpips.collectives.fabric.layout import DESCRIPTORS, Descriptor
from mpips.collectives.fabric.requests import Tags
from mpips.collectives.network import native
from mpips.collectives.network.messages import MessagePlan, TwoLevelPlan
from mpips.collectives.network.native import NativePlan
from mpips.collectives.node.executor import DONE, MET, Executor, Ways, not_begun, part_of
from mpips.collectives.recorder import own as recorder
from mpips.collectives.recorder.ring import Ring, form
from mpips.collectives.schedule import catalog
from mpips.collectives.schedule.model import Schedule

UNEVEN = "hierarchical needs nodes with equal numbers of ranks, neighbours in rank: choose another algorithm, or auto"
DOUBLING_BYTES = 32 << 10
"""Up to here recursive_doubling, of which every step takes the whole vector, is taken for faster than halving."""
LOOKS = 4  # for notes: MPICH finds in one what the one before has fetched
ALWAYS = ("ring", "binomial", "direct")  # between nodes, one of these serves any call


class Over:
    """A body whose ranks first see that all are in the same call: on the board of a node, or by notes between nodes."""

    holds = True

    def __init__(self, home: Communicator, text: str, body: Body, sees: bool = True) -> None:
        """`sees`: False where the body does so itself."""
        self._home, self._text, self._body, self._sees = home, text, body, sees
        self._put, self._token = -DESCRIPTORS, 0
        self.fast: Callable[[], int] = not_begun

    def steps(self) -> Iterator[None]:
        home = self._home
        if home.size == 1 or not self._sees:
            return self._body.run()
        return self._met() if home.control is None else home.control.operation(self._text, self._between())

    def moves_by(self, kind: type) -> bool:
        """Return whether the body is of that kind."""
        return isinstance(self._body, kind)

    def rest(self) -> Iterator[None]:
        raise AssertionError(MET)

    def free(self) -> None:
        self._body.free()

    def _between(self) -> Iterator[None]:
        control = self._home.control
        if isinstance(self._body, NativePlan) and control is not None:
            for _ in range(LOOKS):  # nobody carries through what others have given up before this one came
                control.look(0.0)
        yield from self._body.run()

    def _met(self) -> Iterator[None]:
        board = self._home.board
        if not board.descriptors.readable(self._put):
            self._token = board.publish(Descriptor(self._text))
            self._put = board.descriptors.put
        if isinstance(self._body, NativePlan):
            self._body.enter(board.number + 1 & NUMBERS)
        board.enter(self._token)
        yield from board.met()
        board.read(board.tokens())
        yield from board.carried_out(self._body.run())


class Timed:
    """A runner whose runs are recorded with their times (`recorder.ring`)."""

    def __init__(self, home: Communicator, call: Call, runner: Runner, line: str) -> None:
        self._home, self.runner, self.holds = home, runner, runner.holds
        operation, _, subject = call.described().partition(" of ")
        subject = f"{call.label}: {subject}" if call.label else subject
        lane = home.board.marks.identity
        self._form = form(lane, operation, subject, call.nbytes, call.n, call.dtype.name, line=line)
        self._ring, self._sequence = recorder.ring, 0
        self.fast: Callable[[], int] = self._fast

    def _fast(self) -> int:
        ring = recorder.ring
        sequence = ring.begin(self._form, self._home.next_number)
        code = self.runner.fast()
        if code == DONE:
            ring.end(sequence)
        else:
            self._ring, self._sequence = ring, sequence
        return code

    def steps(self) -> Iterator[None]:
        ring, sequence = self._ring, self._sequence
        if sequence:  # `fast` has begun it
            self._sequence = 0
        else:
            ring = recorder.ring
            sequence = ring.begin(self._form, starts=False)
        return self._recorded(ring, sequence)

    def _recorded(self, ring: Ring, sequence: int) -> Iterator[None]:
        ring.start(sequence, self._home.next_number)
        yield from self.runner.steps()
        ring.end(sequence)

    def rest(self) -> Iterator[None]:
        ring, sequence, self._sequence = self._ring, self._sequence, 0
        yield from self.runner.rest()
        ring.end(sequence)

    def free(self) -> None:
        self.runner.free()


def make_runner(home: Communicator, call: Call, x: Flat, out: Flat, tags: Tags) -> Runner:
    """Compile a call; local. ValueError where the algorithm does not serve the call."""
    if call.algorithm == "shared_memory":
        if home.nodes > 1:
            raise ValueError(f"shared_memory serves ranks of one node, but these are on {home.nodes}: use auto")
        return Executor(home.board, call.text, [part_of(call, home.rank, x, out)], ways(home, call.p))
    return Over(home, call.text, make_body(home, call, x, out, tags))


def make_body(home: Communicator, call: Call, x: Flat, out: Flat, tags: Tags) -> Body:
    """Compile what goes over messages; local. ValueError where the algorithm does not serve the call."""
    if call.algorithm == "native":
        if reason := native.why_not(call):
            raise ValueError(reason)
        return NativePlan(home.own, call, x, out, met=home.nodes == 1 < home.size)
    name, parameters = catalog.parse(call.algorithm)
    if name == "hierarchical" and home.nodes > 1 and "local" not in parameters:
        if home.across is None:
            raise ValueError(UNEVEN)
        board = home.board

        def on_node(call: Call, x: Flat, out: Flat) -> Callable[[], Iterator[None]]:
            return Executor(board, call.text, [part_of(call, board.rank, x, out)], ways(home, board.size)).steps

        return TwoLevelPlan(board.rank, board.size, on_node, call, x, out, tags, **parameters)
    schedule = build_schedule(home, call)
    return MessagePlan(tags.lanes.comm, call, schedule, x, out, tags.take(len(schedule.lanes), call.text))


def ways(home: Communicator, ranks: int) -> Ways:
    """Return which vectors go which way between so many ranks of a node."""
    slots = home.table.slot_limits(ranks, home.board.memory.crowded)
    return Ways(slots.always, slots.ordinary, home.table.cross_memory_from(ranks))


def chosen(home: Communicator, draft: Call, algorithm: str) -> str:
    """The algorithm that a name asks for; the same on all ranks."""
    if not isinstance(algorithm, str):
        raise TypeError(f"algorithm {algorithm!r} is of type {type(algorithm).__name__}: pass a name, such as 'auto'")
    if algorithm == "auto":
        return choose(home, draft)
    return choose_reproducible(home, draft) if algorithm == "reproducible" else algorithm


def choose(home: Communicator, call: Call) -> str:
    """Return what `auto` means for the call; the same on all ranks."""
    if home.nodes == 1:
        return "shared_memory"
    name = home.table.best_between(call.kind, home.nodes, home.size, call.nbytes)
    if catalog.parse(name)[0] == "hierarchical" and home.across is not None and call.kind == "allreduce":
        return name
    if catalog.serves(call.kind, name, call.p) is None:
        return name
    return next(other for other in ALWAYS if catalog.serves(call.kind, other, call.p) is None)


def choose_reproducible(home: Communicator, call: Call) -> str:
    """Return what `reproducible` means for the call; the same on all ranks.

    Shared memory adds in the order of the ranks. Between nodes recursive_doubling and halving_doubling add along one
    tree where p is 2^m; for other p only the latter serves. Nodes with several ranks add inside first.
    """
    if call.kind != "allreduce":
        raise ValueError(f"reproducible serves allreduce, not {call.kind}: choose auto")
    if home.nodes == 1:
        return "shared_memory"
    if home.across is not None and home.board.size > 1:
        return "hierarchical(between=halving_doubling)"
    short = call.nbytes <= DOUBLING_BYTES and call.p & (call.p - 1) == 0
    return "recursive_doubling" if short else "halving_doubling"


def build_schedule(home: Communicator, call: Call) -> Schedule:
    """The schedule of a call by an algorithm of the catalogue; `hierarchical` without `local` takes the ranks of each
    node, which must be as many on all nodes and neighbours. ValueError where the algorithm does not serve the call."""
    name, parameters = catalog.parse(call.algorithm)
    catalog.see_serves(call.kind, name, call.more_algorithms(home.nodes))
    if name == "hierarchical" and "local" not in parameters:
        local = parameters["local"] = call.p // home.nodes
        if home.node_of != [rank // local * local for rank in range(call.p)]:
            raise ValueError(UNEVEN)
    return catalog.build(call.kind, name, call.p, call.root, **parameters)


LOOK_SECONDS = 1e-3  # between two looks for the end of the generation of a rank that tests what it has started
MOST_BESIDE = 1.0  # seconds between two looks that count as waiting: a rank that computes for longer does not wait


class Started:
    """A started run of a plan: `what` is the call, `arrays` are those that must stay while it is under way. Those that
    are `exclusive` take turns; others run beside them."""

    def __init__(self, what: str, steps: Iterator[None], exclusive: bool, arrays: object = None) -> None:
        self.what, self.exclusive, self.done = what, exclusive, False
        self.waited = 0.0
        """Seconds through which this rank has tested it in vain."""
        self._arrays = arrays
        self._steps = steps
        self._looked = 0.0

    def step(self) -> None:
        """Move it, as far as it goes without waiting."""
        self.done = next(self._steps, self) is self

    def due(self) -> bool:
        """Return whether to look for the end of the generation again."""
        now = time.monotonic()
        since = now - self._looked
        if since < LOOK_SECONDS:
            return False
        if self._looked:
            self.waited += min(since, MOST_BESIDE)
        self._looked = now
        return True


def begin(home: Communicator, operation: Started) -> None:
    """Begin an operation: it moves until there is something to wait for."""
    home.started.append(operation)
    home.hold()
    advance(home)


def advance(home: Communicator) -> None:
    """Move all that has been started, as far as it goes without waiting."""
    taken = False
    for operation in list(home.started):
        if operation.exclusive and taken:
            continue
        with home.failing(operation.what):
            operation.step()
        if operation.done:
            home.started.remove(operation)
            home.hold()
        else:
            taken = taken or operation.exclusive


def agree(home: Communicator, text: str) -> None:
    """`Communicator.agree`, behind what has been started: the words of a node serve one operation at a time."""
    if home.control is not None or not home.started:
        home.agree(text)
        return
    operation = Started(text, home.board.agreed(text), True)
    with home.failing(text):
        begin(home, operation)
        finish(home, operation)


def finish(home: Communicator, operation: Started) -> None:
    """Run until `operation`, and with it what it has to wait for, is done. Blocking."""

    def steps() -> Iterator[None]:
        while not operation.done:
            advance(home)
            yield

    home.run(steps(), operation.what)
