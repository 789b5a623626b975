"""Collectives, compiled once and run many times: a `Plan`, for itself or behind a one-shot call. What they do and take,
and what goes wrong, is told by the one-shot calls (`collectives.one_shot`)."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NoReturn

from mpi4py import MPI

from collectives import arrays
from collectives.arrays import Flat, Vector
from collectives.call import REDUCING, ROOTED, Call, see_root
from collectives.choice import Choice
from collectives.errors import CollectiveError
from collectives.guard import Guarded, Runner
from collectives.network import native
from collectives.network.messages import MessagePlan
from collectives.network.native import NativePlan
from collectives.network.tags import Tags
from collectives.network.two_level import TwoLevelPlan
from collectives.operations import operation
from collectives.schedule import catalog
from collectives.schedule.model import Schedule
from collectives.session import Session, session
from collectives.started import HELD, Started, close
from collectives.tensor import compile_tensor
from collectives.transport.scheduled_memory import ScheduledMemory
from collectives.transport.shared_memory import MemoryPlan, Trial

UNEVEN = (
    "hierarchical needs nodes with equal numbers of ranks, neighbours in rank: choose another algorithm, or auto"
)
DOUBLING_BYTES = 32 << 10
"""Up to here recursive_doubling, of which every step takes the whole vector, is taken for faster than halving."""
TRY_BYTES = 128 << 10
"""An owner's part of the vector from which on another way may be faster than stages."""
STAGES_HANDICAP = 1.5  # call after call, they find their arrays in the cache; between other work they would not
RIVAL_HANDICAP = 1.1  # once it is chosen it still takes steps, where the others run through a flat function
ALWAYS = ("ring", "binomial", "direct")  # between nodes, one of these serves any call


class Plan:
    """One collective over fixed arrays. `plan()` runs it and gives back the result; or `start()`, then `test()` now and
    then beside compute, then `wait()`. Arrays must stay unchanged between start and wait. All ranks start their plans
    in the same order."""

    def __init__(self, home: Session, call: Call, make: Callable[[], Runner], in_place: bool):
        """`make` compiles the call for the session as it is; local."""
        self._home, self._call, self._make, self._in_place = home, call, make, in_place
        self._arrays: tuple[Any, Any] | None = None
        self._result: Any = None
        self._exclusive = True
        self._operation: Started | None = None
        self._called = False
        """Whether a call began it and did not end, as what was started before took too long: the next call ends it."""
        self._runner: Runner
        self._run: Callable[[], Iterator[None]]
        self._quick: Callable[[Any], Iterator[None] | None]
        """Called with the runner: it is the runner's own where it has one, and would hold on to it."""
        self._compile()
        home.made.add(self)

    def _compile(self) -> None:
        runner = self._runner = self._make()
        self._run, self._quick = runner.run, _quick(self._home, runner)

    def __call__(self) -> Any:
        """Run to the end. Blocking."""
        left = None
        try:
            left = self._quick(self._runner)
            if left is None:
                return self._result
            if left is not HELD:
                self._home.run(left, self._call.text)
                self._quick = _quick(self._home, self._runner)  # which may have come to know more
                return self._result
        except BaseException as error:
            self._home.leave(self._call.text, error)
            close(left or ())
            raise
        return self._call_in_turn()

    def _call_in_turn(self) -> Any:
        """A call that cannot begin at once."""
        if not (self._called and self._operation):
            self.start()
        try:
            result = self.wait()
        finally:
            self._called = self._operation is not None
        self._quick = _quick(self._home, self._runner)
        return result

    def keep(self, x: Any, out: Any) -> None:
        """Hold on to the arrays, so that the plan can run as long as it lives; beside others, if its messages have tags
        of their own, which alone keep plans apart."""
        runner = self._runner
        tagged = isinstance(runner, Guarded) and isinstance(runner.inner, MessagePlan)
        self._exclusive = self._home.watch is None or not tagged
        self._arrays = (x, out)
        self._result = self.result_of(x, out)

    def result_of(self, x: Any, out: Any) -> Any:
        """Where the result is: out, or x, or this rank's block of x."""
        if not self._in_place:
            return out
        if self._call.kind != "reduce_scatter":
            return x
        start, stop = self._call.block(self._home.rank)
        return arrays.host(x).reshape(-1)[start:stop]

    def start(self) -> None:
        """Begin to run, and return as soon as there is something to wait for."""
        if self._operation is not None:
            raise CollectiveError(f"{self._call.text} was started twice: wait for it first")
        home, what = self._home, self._call.text
        home.check_usable()
        before, operation = home.active, None
        try:
            self._operation = operation = Started(what, self._run(), self._exclusive)
            home.start(operation)
        except BaseException as error:
            self._operation = None
            home.abandon(what, operation, before, error)
            raise

    def test(self) -> bool:
        """Move on as far as possible without waiting; True when done. `wait` must still be called."""
        if self._operation is None:
            raise CollectiveError(f"{self._call.text} was not started: call start() first")
        self._home.advance()
        if not self._operation.done:
            self._home.look(self._call.text)
        return self._operation.done

    def wait(self) -> Any:
        """Finish what `start` began and give back the result. Blocking. Who is interrupted here has given it up; after
        a StallError because of what was started before, it is still under way and can be waited for again."""
        operation = self._operation
        if operation is None:
            raise CollectiveError(f"{self._call.text} was not started: call start() first")
        try:
            self._home.finish(operation)
        finally:
            if operation.done:  # not where one that was started before takes too long
                self._operation = None
        return self._result

    @property
    def algorithm(self) -> str:
        """What `auto` came out as."""
        return self._call.algorithm

    @property
    def predicted_seconds(self) -> float | None:
        """What the fitted cost model expects; None where there is no model for the algorithm."""
        runner = self._runner
        eager, direct = (runner.eager, runner.direct) if isinstance(runner, MemoryPlan) else (False, False)
        return self._home.table.seconds(self._call, self._home.nodes, eager, direct)

    def free(self) -> None:
        """Give back what the plan holds of MPI. Local; the plan cannot run any more."""
        self.release()
        self._home.made.discard(self)
        self._arrays = self._result = None
        this = weakref.proxy(self)  # a plan that held on to itself would wait for the garbage collector
        self._run, self._quick = lambda: this._gone(), _in_turn

    def release(self) -> None:
        """Give back what the plan holds of MPI; it is compiled anew when it runs again. Local."""
        release = getattr(self._runner, "free", None)
        if release is not None:
            release()
        this = weakref.proxy(self)
        self._run, self._quick = lambda: this._anew(), _in_turn

    def _anew(self) -> Iterator[None]:
        self._compile()
        return self._run()

    def _gone(self) -> NoReturn:
        self._home.refuse(f"rank {self._home.rank}: {self._call.text} has been freed: make a new plan")


def _quick(home: Session, runner: Runner) -> Callable[[Any], Iterator[None] | None]:
    """How a runner is asked to do its operation at once: None where it is done, the steps that are left, or HELD."""
    own: Callable[[Any], Iterator[None] | None] | None = getattr(runner, "quick", None)
    return own or (lambda runner: HELD if home.room.held else runner.run())


def _in_turn(runner: Runner) -> Iterator[None]:
    return HELD


def plan(
    kind: str,
    x: Any,
    comm: MPI.Comm | None = None,
    *,
    op: str = "sum",
    algorithm: str = "auto",
    out: Any = None,
    root: int = 0,
) -> Plan:
    """Compile a collective over these arrays, to be run many times. Collective, blocking: ranks compare arguments here.

    `kind` is the name of a one-shot call ("allreduce", "reduce_scatter", "allgather", "broadcast", "reduce",
    "alltoall"); arguments, results and errors are those of this call, see `allreduce`.
    """
    home = session(comm)
    home.check_usable()
    home.finish_started()
    tags = Tags(home.tags_dealt)
    made = checked(home, kind, x, op, algorithm, out, root, tags)
    made.keep(x, out)
    home.agree("plan of " + made._call.text)
    home.tags_dealt += tags.count  # by all ranks or none
    return made


def checked(
    home: Session, kind: str, x: Any, op: str, algorithm: str, out: Any, root: int, tags: Tags
) -> Plan:
    """A plan from arguments that are good on this rank; or all ranks raise."""
    try:
        return _compile(home, kind, x, op, algorithm, out, root, tags)
    except CollectiveError:
        raise
    except Exception as error:  # whatever it is, the others must not wait for this rank
        reason = str(error)
    return home.refuse(f"rank {home.rank}: {reason}")  # outside of `except`: one traceback is enough


def _compile(
    home: Session, kind: str, x: Any, op: str, algorithm: str, out: Any, root: int, tags: Tags
) -> Plan:
    if isinstance(x, (list, tuple)) or arrays.is_device(x) or arrays.is_device(out):
        return _tensor(home, kind, x, op, algorithm, out, root, tags)
    source = arrays.host(x, "x")
    target = source if out is None else arrays.host(out, "out")
    in_place = out is None
    call = _call(home, kind, source, target, op, algorithm, in_place, root)
    writes_x = in_place and not (kind == "broadcast" and home.rank == root)
    x_flat = arrays.flat(source, "x", writes_x)
    out_flat = x_flat if in_place else arrays.flat(target, "out", True)
    return Plan(home, call, partial(make_runner, home, call, x_flat, out_flat, tags), in_place)


def _call(
    home: Session, kind: str, x: Vector, out: Vector, op: str, algorithm: str, in_place: bool, root: int
) -> Call:
    see_root(root, home.size)
    if x.dtype != out.dtype:
        raise ValueError(f"x holds {x.dtype.name} and out {out.dtype.name}: give both the same type")
    reduction = operation(op, x.dtype) if kind in REDUCING else None
    n = out.size if kind == "allgather" else x.size
    draft = Call(kind, n, x.dtype, reduction, root if kind in ROOTED else 0, "auto", home.size)
    wanted = (draft.n, draft.n) if in_place else draft.sizes(home.rank)
    if (x.size, out.size) != wanted:
        raise ValueError(f"x and out have {x.size} and {out.size} elements: {kind} of {n} between {home.size} ranks "
                         f"needs {wanted[0]} and {wanted[1]} on rank {home.rank}")
    if kind == "alltoall" and in_place and n % home.size:
        raise ValueError(f"alltoall in place of {n} elements needs a multiple of {home.size}: pass out=")
    chosen = algorithm
    if algorithm in ("auto", "reproducible"):
        chosen = (choose if algorithm == "auto" else choose_reproducible)(home, draft)
    return Call(kind, n, x.dtype, reduction, draft.root, chosen, home.size)


def _tensor(home: Session, kind: str, x: Any, op: str, algorithm: str, out: Any, root: int, tags: Tags) -> Plan:
    call, make, in_place = compile_tensor(home, kind, x, op, algorithm, out, root)

    def runner() -> Runner:
        made = make(partial(make_runner, home), partial(build_schedule, home), tags)
        return made if call.staged else Guarded(home, call, made)

    return Plan(home, call, runner, in_place)


def choose(home: Session, call: Call) -> str:
    """What `auto` means for the call; the same on all ranks."""
    if home.nodes == 1:
        return "shared_memory"
    name = home.table.best_between(call.kind, home.nodes, home.size, call.nbytes)
    if catalog.parse(name)[0] == "hierarchical" and home.across is not None and call.kind == "allreduce":
        return name
    if catalog.serves(call.kind, name, call.p) is None:
        return name
    return next(other for other in ALWAYS if catalog.serves(call.kind, other, call.p) is None)


def choose_reproducible(home: Session, call: Call) -> str:
    """What `reproducible` means for the call; the same on all ranks.

    Shared memory adds in the order of the ranks. Between nodes recursive_doubling and halving_doubling add along one
    tree where p is 2^m; for other p only the latter serves. Nodes with several ranks add inside first.
    """
    if call.kind != "allreduce":
        raise ValueError(f"reproducible serves allreduce, not {call.kind}: choose auto")
    if home.nodes == 1:
        return "shared_memory"
    if home.across is not None and home.room.size > 1:
        return "hierarchical(between=halving_doubling)"
    short = call.nbytes <= DOUBLING_BYTES and call.p & (call.p - 1) == 0
    return "recursive_doubling" if short else "halving_doubling"


def make_runner(home: Session, call: Call, x: Flat, out: Flat, tags: Tags) -> Runner:
    """Compile a call; local. ValueError where the algorithm does not serve the call."""
    if call.algorithm == "shared_memory":
        if home.nodes > 1:
            raise ValueError(f"shared_memory serves ranks of one node, but these are on {home.nodes}: use auto")
        eager = home.table.eager_limits(home.size, home.room.crowded)
        return MemoryPlan(home.room, call, x, out, eager, _trial(home, call, x, out))
    if call.algorithm == "native":
        reason = native.why_not(call)
        if reason:
            raise ValueError(reason)
        return Guarded(home, call, NativePlan(home.comm, call, x, out, home.choice(call.text)))
    name, parameters = catalog.parse(call.algorithm)
    over = catalog.transport(call.algorithm)
    if name == "hierarchical" and home.nodes > 1 and not over and "local" not in parameters:
        if home.across is None:
            raise ValueError(UNEVEN)
        eager = home.table.eager_limits(home.room.size, home.room.crowded)
        return Guarded(home, call, TwoLevelPlan(home.room, home.across, call, x, out, eager, tags, **parameters))
    schedule = build_schedule(home, call)
    if over == "memory" and home.nodes > 1:
        raise ValueError(f"over=memory serves ranks of one node, but these are on {home.nodes}: use over=messages")
    if over != "messages" and home.nodes == 1:
        return ScheduledMemory(home.room, call, schedule, x, out)
    taken = tags.take(len(schedule.lanes), call.text)
    return Guarded(home, call, MessagePlan(home.comm, call, schedule, x, out, taken))


def _trial(home: Session, call: Call, x: Flat, out: Flat) -> Trial | None:
    """The choice between stages, reach and the MPI's own call, one for all calls of a kind and about a size; None where
    only stages do. The MPI takes part where it gives the same bits; its non-blocking call, as a started plan must give
    way."""
    if call.nbytes < max(1, TRY_BYTES * home.size):
        return None
    rival = None
    if call.kind not in REDUCING and home.size > 1 and not native.why_not(call):
        rival = NativePlan(home.comm, call, x, out, Choice(home.comm, decided=True))
    handicaps = [STAGES_HANDICAP, *[1.0] * bool(home.room.pids), *[RIVAL_HANDICAP] * (rival is not None)]
    if len(handicaps) == 1:
        return None
    sort = f"{call.kind} of some 2^{call.nbytes.bit_length()} bytes, {len(handicaps)} ways"
    return Trial(home.choice(sort, handicaps), rival)


def build_schedule(home: Session, call: Call) -> Schedule:
    """The schedule of a call by an algorithm of the catalogue; `hierarchical` without `local` takes the ranks of each
    node, which must be as many on all nodes and neighbours. ValueError where the algorithm does not serve the call."""
    name, parameters = catalog.parse(call.algorithm)
    catalog.see_serves(call.kind, name, call.more_algorithms(home.nodes))
    if name == "hierarchical" and "local" not in parameters:
        local = parameters["local"] = call.p // home.nodes
        if home.node_of != [rank // local * local for rank in range(call.p)]:
            raise ValueError(UNEVEN)
    return catalog.build(call.kind, name, call.p, call.root, **parameters)
