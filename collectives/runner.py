"""Runners of compiled calls, over shared memory, messages or MPI's own collectives.

`make_runner` makes the runner that the algorithm of a call needs. A `StartedRun` is a run that advances while the
program computes. Started runs advance in the order in which they were started.
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
from mpips.collectives.node.executor import DONE, MET, NodeExecutor, WayLimits, call_array, not_begun
from mpips.collectives.recorder import own as recorder
from mpips.collectives.recorder.ring import RecordRing, form
from mpips.collectives.schedule import catalog
from mpips.collectives.schedule.model import Schedule

UNEVEN = "hierarchical needs nodes with equal numbers of consecutive ranks: choose another algorithm, or auto"
# Up to this size "reproducible" uses recursive_doubling, which takes fewer steps than halving_doubling but sends the
# whole vector in each.
DOUBLING_BYTES = 32 << 10
# How often to check for notes (messages of `network.control`) before one of MPI's own collectives. With MPICH, one
# check is not enough: the first check may only fetch a note, and the next check then receives the note.
LOOKS = 4
# For every collective, at least one of these algorithms works for any number of ranks.
ALWAYS = ("ring", "binomial", "direct")


class ComparedRunner:
    """A runner that compares the ranks' calls, and runs a body if all ranks are in the same call.

    On one node, the ranks compare their calls on the board before the body runs. Between nodes the body runs at once,
    and notes between nodes reveal ranks whose calls differ (`network.control`). This runner has no fast path.

    Args:
        text: The call in words.
        compares: False if the body itself compares the ranks' calls.
    """

    holds = True

    def __init__(self, home: Communicator, text: str, body: Body, compares: bool = True) -> None:
        self._home = home
        self._text = text
        self._body = body
        self._compares = compares
        # the descriptor by which this rank announces the call on the board: its running number, and its token
        self._put = -DESCRIPTORS
        self._token = 0
        self.fast: Callable[[], int] = not_begun

    def steps(self) -> Iterator[None]:
        home = self._home
        if home.size == 1 or not self._compares:
            return self._body.run()
        return (
            self._run_on_node()
            if home.control is None
            else home.control.operation(self._text, self._run_between_nodes())
        )

    def has_body(self, kind: type) -> bool:
        """True if the body of the call is an instance of the class `kind`, such as `MessagePlan`."""
        return isinstance(self._body, kind)

    def rest(self) -> Iterator[None]:
        # `fast` never returns MET.
        raise AssertionError(MET)

    def free(self) -> None:
        self._body.free()

    def _run_between_nodes(self) -> Iterator[None]:
        control = self._home.control
        if isinstance(self._body, NativePlan) and control is not None:
            # If this call has already failed on the other ranks, `look` finds their notes and raises. Without this
            # check, this rank would wait for ever: the other ranks complete MPI's collective only together with ranks
            # that had entered it before the failure.
            for _ in range(LOOKS):
                control.look(0.0)
        yield from self._body.run()

    def _run_on_node(self) -> Iterator[None]:
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


class TimedRunner:
    """A runner that records the times of another runner's runs (`recorder.ring`)."""

    def __init__(self, home: Communicator, call: Call, runner: Runner, line: str) -> None:
        """`line`: the line of the user's program that made the plan."""
        self._home = home
        self.runner = runner
        self.holds = runner.holds
        operation, _, subject = call.describe().partition(" of ")
        subject = f"{call.label}: {subject}" if call.label else subject
        lane = home.board.marks.identity
        self._form = form(lane, operation, subject, call.nbytes, call.n, call.dtype.name, line=line)
        # the ring and the sequence number of the record that `fast` has begun and not ended; number 0: no such record
        self._ring = recorder.ring
        self._sequence = 0
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
        if sequence:
            # `fast` has begun the record and returned NOT_BEGUN.
            self._sequence = 0
        else:
            ring = recorder.ring
            sequence = ring.begin(self._form, starts=False)
        return self._recorded(ring, sequence)

    def _recorded(self, ring: RecordRing, sequence: int) -> Iterator[None]:
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
    """Compile a call. Local. Raises ValueError if its algorithm does not support the call."""
    if call.algorithm == "shared_memory":
        if home.nodes > 1:
            raise ValueError(
                f"shared_memory works within one node, but these ranks are on {home.nodes} nodes: use auto"
            )
        return NodeExecutor(home.board, call.text, [call_array(call, home.rank, x, out)], way_limits(home, call.p))
    return ComparedRunner(home, call.text, make_body(home, call, x, out, tags))


def make_body(home: Communicator, call: Call, x: Flat, out: Flat, tags: Tags) -> Body:
    """Compile a call that uses messages or MPI's own collective. Local. Raises ValueError, as `make_runner` does."""
    if call.algorithm == "native":
        if reason := native.why_not(call):
            raise ValueError(reason)
        return NativePlan(home.native, call, x, out, met=home.nodes == 1 < home.size)
    name, parameters = catalog.parse(call.algorithm)
    if name == "hierarchical" and home.nodes > 1 and "local" not in parameters:
        if home.across is None:
            raise ValueError(UNEVEN)
        board = home.board

        def on_node(call: Call, x: Flat, out: Flat) -> Callable[[], Iterator[None]]:
            return NodeExecutor(
                board, call.text, [call_array(call, board.rank, x, out)], way_limits(home, board.size)
            ).steps

        return TwoLevelPlan(board.rank, board.size, on_node, call, x, out, tags, **parameters)
    schedule = build_schedule(home, call)
    return MessagePlan(tags.lanes.comm, call, schedule, x, out, tags.take(len(schedule.lanes), call.text))


def way_limits(home: Communicator, ranks: int) -> WayLimits:
    """Return the vector sizes from which on the ranks of a node of `ranks` ranks use another kind of program."""
    slots = home.table.slot_limits(ranks, home.board.memory.crowded)
    return WayLimits(slots.always, slots.ordinary, home.table.cross_memory_from(ranks))


def resolve_algorithm(home: Communicator, draft: Call, algorithm: str) -> str:
    """Return the algorithm that the name `algorithm` stands for in this call. The result is the same on all ranks."""
    if not isinstance(algorithm, str):
        raise TypeError(f"algorithm {algorithm!r} is of type {type(algorithm).__name__}: pass a name, such as 'auto'")
    if algorithm == "auto":
        return choose_auto(home, draft)
    return choose_reproducible(home, draft) if algorithm == "reproducible" else algorithm


def choose_auto(home: Communicator, call: Call) -> str:
    """Return the algorithm that `auto` stands for in this call. The result is the same on all ranks."""
    if home.nodes == 1:
        return "shared_memory"
    name = home.table.best_between(call.kind, home.nodes, home.size, call.nbytes)
    if catalog.parse(name)[0] == "hierarchical" and home.across is not None and call.kind == "allreduce":
        return name
    if catalog.serves(call.kind, name, call.p) is None:
        return name
    return next(other for other in ALWAYS if catalog.serves(call.kind, other, call.p) is None)


def choose_reproducible(home: Communicator, call: Call) -> str:
    """Return the algorithm that `reproducible` stands for in this call. The result is the same on all ranks.

    Shared memory adds in the order of the ranks. Between nodes, recursive_doubling and halving_doubling add along the
    same tree if the number of ranks is a power of two. For other numbers of ranks only halving_doubling is
    reproducible. If nodes have several ranks, each node first adds in its shared memory.
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
    """Build the schedule of a call whose algorithm is in the catalogue.

    Raises ValueError if the algorithm does not support the call.

    `hierarchical` without the parameter `local` groups ranks by node. Then all nodes must have the same number of
    ranks, and the ranks of a node must be consecutive.
    """
    name, parameters = catalog.parse(call.algorithm)
    catalog.check_serves(call.kind, name, call.more_algorithms(home.nodes))
    if name == "hierarchical" and "local" not in parameters:
        local = parameters["local"] = call.p // home.nodes
        if home.node_of != [rank // local * local for rank in range(call.p)]:
            raise ValueError(UNEVEN)
    return catalog.build(call.kind, name, call.p, call.root, **parameters)


# How often a rank that tests a started run checks whether the generation has ended.
LOOK_SECONDS = 1e-3
# Of the time between two tests, at most this many seconds count as waiting. During the rest, the rank was computing.
MOST_BESIDE = 1.0


class StartedRun:
    """A started run of a plan.

    Args:
        what: The call in words.
        steps: The run. It yields whenever it has to wait.
        exclusive: Exclusive runs take turns: each begins when the one before it is done. All other runs advance at the
            same time.
        arrays: The user's arrays, which are kept alive until the run is done.
    """

    def __init__(self, what: str, steps: Iterator[None], exclusive: bool, arrays: object = None) -> None:
        self.what = what
        self.exclusive = exclusive
        self.done = False
        # seconds for which this rank has waited, estimated from the times at which it has tested for completion
        self.waited = 0.0
        self._arrays = arrays
        self._steps = steps
        self._looked = 0.0

    def step(self) -> None:
        """Advance the run as far as possible without blocking."""
        self.done = next(self._steps, self) is self

    def due(self) -> bool:
        """True if it is time to check again whether the generation has ended. Updates `waited`."""
        now = time.monotonic()
        since = now - self._looked
        if since < LOOK_SECONDS:
            return False
        if self._looked:
            self.waited += min(since, MOST_BESIDE)
        self._looked = now
        return True


def begin(home: Communicator, run: StartedRun) -> None:
    """Start a run, and advance it until it has to wait for other ranks."""
    home.started.append(run)
    home.update_fast_paths()
    advance(home)


def advance(home: Communicator) -> None:
    """Advance all started runs as far as possible without blocking."""
    # True once the loop has found an exclusive run that is not done: later exclusive runs must wait for that run
    exclusive_waits = False
    for run in list(home.started):
        if run.exclusive and exclusive_waits:
            continue
        with home.failing(run.what):
            run.step()
        if run.done:
            home.started.remove(run)
            home.update_fast_paths()
        else:
            exclusive_waits = exclusive_waits or run.exclusive


def agree(home: Communicator, text: str) -> None:
    """Like `Communicator.agree`. On one node, first finish all started runs.

    The board of a node can serve only one operation at a time.
    """
    if home.control is not None or not home.started:
        home.agree(text)
        return
    run = StartedRun(text, home.board.agreed(text), True)
    with home.failing(text):
        begin(home, run)
        finish(home, run)


def finish(home: Communicator, run: StartedRun) -> None:
    """Advance all started runs until `run` is done. Blocking."""

    def steps() -> Iterator[None]:
        while not run.done:
            advance(home)
            yield

    home.run(steps(), run.what)
