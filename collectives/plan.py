"""Collectives, compiled once and run many times: a `Plan`, for itself or behind a one-shot call.

What they do and take, and what goes wrong, is told by the one-shot calls (`collectives.api`).
"""

from __future__ import annotations

from functools import partial
from typing import Any

from mpi4py import MPI

from collectives import arrays
from collectives.arrays import Flat, Vector
from collectives.call import REDUCING, ROOTED, Call, see_root
from collectives.communicator import Communicator, communicator
from collectives.errors import CollectiveError, Uncopied, of_caller
from collectives.fabric.wait import see_in_time
from collectives.network.messages import MessagePlan
from collectives.network.tags import Tags
from collectives.node.executor import MET, Executor, not_begun
from collectives.operations import operation
from collectives.runner import Inner, Over, Runner, build_schedule, chosen, make_runner
from collectives.started import Started, advance, agree, begin, finish
from collectives.tensor import compile_tensor


class Plan(Uncopied):
    """One collective over fixed arrays. `plan()` runs it and gives back the result; or `start()`, then `test()` now and
    then beside compute, then `wait()`. Arrays must stay unchanged between start and wait. All ranks start their plans
    in the same order."""

    def __init__(self, home: Communicator, call: Call, runner: Runner, in_place: bool) -> None:
        self.call, self.runner = call, runner
        self._home, self._in_place = home, in_place
        self._arrays: Any = None
        self._result: Any = None
        self._operation: Started | None = None
        self._freed = self._retired = False
        self._exclusive = True

    def __call__(self) -> Any:
        """Run to the end. Blocking."""
        try:
            code = self.runner.fast()
        except BaseException as error:
            raise self._home.fail(self.call.text, error, self) from None
        if code:
            self.go_on(code)
        return self._result

    def go_on(self, code: int) -> None:
        """Run to the end from where the short way has left it."""
        home, runner = self._home, self.runner
        if code != MET:
            self._check()
            if self._operation is not None and not self._exclusive:  # its requests are under way
                raise of_caller(CollectiveError(f"{self.call.text} was started: wait for it first"))
        with home.failing(self.call.text, self):
            if code == MET:
                home.run(runner.rest(), self.call.text)
            elif home.started:
                last = Started(self.call.text, runner.steps(), True)
                begin(home, last)
                finish(home, last)
            else:
                home.run(runner.steps(), self.call.text)

    def start(self, *arrays: Any) -> None:
        """Begin to run, and return as soon as there is something to wait for. `arrays`: those of a plan that does not
        hold on to its own."""
        self._check()
        if self._operation is not None:
            raise of_caller(CollectiveError(f"{self.call.text} was started twice: wait for it first"))
        kept = arrays or self._arrays  # also of a plan that is forgotten before it is done
        with self._home.failing(self.call.text, self, kept):
            self._operation = Started(self.call.text, self.runner.steps(), self._exclusive, kept)
            begin(self._home, self._operation)

    def test(self) -> bool:
        """Move on as far as possible without waiting; True when done. `wait` must still be called."""
        operation = self._started()
        if not operation.done:
            self._home.check()
        with self._home.failing(self.call.text, self):
            advance(self._home)
            if not operation.done and operation.due():
                self._home.hear(operation.waited)
                see_in_time(self.call.text, operation.waited, self._home.generation)
        return operation.done

    def wait(self) -> Any:
        """Finish what `start` began and give back the result. Blocking."""
        operation, self._operation = self._started(), None
        if not operation.done:
            self._home.check()
            with self._home.failing(self.call.text, self):
                finish(self._home, operation)
        if self._retired:
            self.free()
        return self._result

    def keep(self, x: Any, out: Any) -> None:
        """Hold on to the arrays, so that the plan can run as long as it lives. It has tags of its own, so that between
        nodes its messages may be under way beside those of others."""
        own_tags = isinstance(self.runner, Over) and self.runner.moves_by(MessagePlan)
        self._exclusive = self._home.control is None or not own_tags
        self._arrays = (x, out)
        self._result = self.result_of(x, out)

    def result_of(self, x: Any, out: Any) -> Any:
        """Where the result is: out, or x, or this rank's block of x."""
        if not self._in_place:
            return out
        if self.call.kind != "reduce_scatter":
            return x
        start, stop = self.call.block(self._home.rank)
        return arrays.host(x).reshape(-1)[start:stop]

    @property
    def algorithm(self) -> str:
        """What `auto` came out as."""
        return self.call.algorithm

    @property
    def predicted_seconds(self) -> float | None:
        """What the fitted cost model expects; None where there is no model for the algorithm."""
        from collectives.tuner.table import predict_seconds  # here alone, as it loads the simulator

        way = self.runner.way if isinstance(self.runner, Executor) else ""
        return predict_seconds(self._home.table, self.call, self._home.nodes, way)

    @property
    def held_bytes(self) -> int:
        """Bytes of its work vectors, or somewhat more."""
        return self.call.nbytes if self.runner.holds else 0

    def free(self) -> None:
        """Give back what the plan holds of MPI, and its arrays, as soon as what was started is over. Local; the plan
        cannot run any more."""
        if self._operation is not None:
            self._retired = True
        elif not self._freed:
            self._freed = True
            self.runner.fast = not_begun
            self.runner.free()
            self._arrays = self._result = None

    def _check(self) -> None:
        if self._freed:
            raise of_caller(CollectiveError(f"{self.call.text} has been freed: make a new plan"))
        self._home.check()

    def _started(self) -> Started:
        if self._operation is None:
            raise of_caller(CollectiveError(f"{self.call.text} was not started: call start() first"))
        return self._operation


def plan(
    kind: str,
    x: Any,
    comm: MPI.Comm | None = None,
    *,
    op: str = "sum",
    algorithm: str = "auto",
    out: Any = None,
    root: int = 0,
    label: str = "",
) -> Plan:
    """Compile a collective over these arrays, to be run many times. Collective, blocking: ranks compare arguments here.

    `kind` is the name of a one-shot call ("allreduce", "reduce_scatter", "allgather", "broadcast", "reduce",
    "alltoall"); arguments, results and errors are those of this call, see `allreduce`.
    """
    home = communicator(comm)
    home.check()
    tags = Tags(home.plan_lanes, home.tags_dealt)
    with home.preparing(f"a plan of {kind}"):
        made = compile_plan(home, kind, x, op, algorithm, out, root, tags, label)
    made.keep(x, out)
    agree(home, "plan of " + made.call.text)
    home.deal(tags.count)  # by all ranks, as they have just met
    return made


def compile_plan(
    home: Communicator, kind: str, x: Any, op: str, algorithm: str, out: Any, root: int, tags: Tags, label: str = ""
) -> Plan:
    """A plan, where the arguments are good; ValueError or TypeError where they are not. Local."""
    if isinstance(x, (list, tuple)) or arrays.is_device(x) or arrays.is_device(out):
        return _compile_tensor(home, kind, x, op, algorithm, out, root, tags, label)
    return _compile(home, kind, x, op, algorithm, out, root, tags, label)


def _compile(
    home: Communicator, kind: str, x: Any, op: str, algorithm: str, out: Any, root: int, tags: Tags, label: str = ""
) -> Plan:
    source = arrays.host(x, "x")
    target = source if out is None else arrays.host(out, "out")
    in_place = out is None
    call = _call(home, kind, source, target, op, algorithm, in_place, root, label)
    writes_x = in_place and not (kind == "broadcast" and home.rank == root)
    x_flat = arrays.flat(source, "x", writes_x)
    out_flat = x_flat if in_place else arrays.flat(target, "out", True)
    return Plan(home, call, make_runner(home, call, x_flat, out_flat, tags), in_place)


def _compile_tensor(
    home: Communicator, kind: str, x: Any, op: str, algorithm: str, out: Any, root: int, tags: Tags, label: str = ""
) -> Plan:
    call, make, in_place = compile_tensor(home, kind, x, op, algorithm, out, root, label)

    def flat_runner(call: Call, x: Flat, out: Flat, tags: Tags) -> Inner:
        return Inner(make_runner(home, call, x, out, tags))

    body = make(flat_runner, partial(build_schedule, home), tags)
    return Plan(home, call, Over(home, call.text, body, sees=not call.staged), in_place)


def _call(
    home: Communicator,
    kind: str,
    x: Vector,
    out: Vector,
    op: str,
    algorithm: str,
    in_place: bool,
    root: int,
    label: str,
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
    return Call(kind, n, x.dtype, reduction, draft.root, chosen(home, draft, algorithm), home.size, label)


