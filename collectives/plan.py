"""Plans: collectives compiled once and run many times, for themselves or behind one-shot calls, which find them again.

What they do and take, and what goes wrong, is told by the one-shot calls (`collectives.api`).

`PlanCache` finds the plan of a one-shot call by the identity of the array, or by where the arrays lie. Its plans hold
no array of the user's: they know addresses. An array, or a list of them, that is made anew for each call and lies where
an earlier one lay finds the plan of that one. What plans hold of their own is bounded.
"""

from __future__ import annotations

import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from operator import is_
from threading import get_ident
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from mpips.collectives import arrays
from mpips.collectives.arrays import Array, Vector, type_name
from mpips.collectives.call import REDUCING, ROOTED, Call, Runner, operation, see_root
from mpips.collectives.communicator import Communicator, communicator
from mpips.collectives.errors import CollectiveError, Uncopied, of_caller
from mpips.collectives.fabric.requests import Tags
from mpips.collectives.fabric.wait import see_in_time
from mpips.collectives.network.messages import MessagePlan
from mpips.collectives.node.executor import MET, Executor, not_begun
from mpips.collectives.recorder import own as recorder
from mpips.collectives.runner import (
    Over,
    Started,
    Timed,
    advance,
    agree,
    begin,
    build_schedule,
    chosen,
    finish,
    make_runner,
)
from mpips.collectives.tensor.compile import compile_tensor


class Plan(Uncopied):
    """One collective over fixed arrays. `plan()` runs it and gives back the result; or `start()`, then `test()` now and
    then beside compute, then `wait()`. Arrays must stay unchanged between start and wait. All ranks start their plans
    in the same order."""

    def __init__(self, home: Communicator, call: Call, runner: Runner, in_place: bool) -> None:
        self.call, self.runner, self._bare = call, runner, runner
        self._home, self._in_place = home, in_place
        self._arrays: Array = None
        self._result: Array = None
        self._operation: Started | None = None
        self._freed = self._retired = False
        self._exclusive = True
        self._line = recorder.user_line(sys._getframe(1))
        recorder.add_timeable(self)

    def set_timed(self, every: bool) -> None:
        """Time every run from now on, or only where it takes long; see `recorder.own.trace`."""
        timed = (every or self.call.nbytes >= recorder.LONG_BYTES) and not self._freed
        if timed != isinstance(self.runner, Timed):
            self.runner = Timed(self._home, self.call, self._bare, self._line) if timed else self._bare

    def __call__(self) -> Array:
        """Run to the end. Blocking."""
        home = self._home
        if home.caller != (thread := get_ident()):
            home.change_caller(thread, self.call.text)
        outer, home.inside = home.inside, True
        try:
            try:
                code = self.runner.fast()
            except BaseException as error:
                raise home.fail(self.call.text, error, self) from None
            if code:
                self.go_on(code)
        finally:
            home.inside = outer
        return self._result

    def go_on(self, code: int) -> None:
        """Run to the end from where the fast path has left it."""
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

    def start(self, *arrays: Array) -> None:
        """Begin to run, and return as soon as there is something to wait for. `arrays`: those of a plan that does not
        hold on to its own."""
        self._check()
        if self._operation is not None:
            raise of_caller(CollectiveError(f"{self.call.text} was started twice: wait for it first"))
        kept = arrays or self._arrays  # also of a plan that is forgotten before it is done
        with self._home.entered(self.call.text), self._home.failing(self.call.text, self, kept):
            self._operation = Started(self.call.text, self.runner.steps(), self._exclusive, kept)
            begin(self._home, self._operation)

    def test(self) -> bool:
        """Move on as far as possible without waiting; True when done. `wait` must still be called."""
        operation = self._started()
        if not operation.done:
            self._home.check()
        with self._home.entered(self.call.text), self._home.failing(self.call.text, self):
            advance(self._home)
            if not operation.done and operation.due():
                self._home.hear(operation.waited)
                see_in_time(self.call.text, operation.waited, self._home.generation)
        return operation.done

    def wait(self) -> Array:
        """Finish what `start` began and give back the result. Blocking."""
        operation, self._operation = self._started(), None
        if not operation.done:
            self._home.check()
            with self._home.entered(self.call.text), self._home.failing(self.call.text, self):
                finish(self._home, operation)
        if self._retired:
            self.free()
        return self._result

    def keep(self, x: Array, out: Array) -> None:
        """Hold on to the arrays, so that the plan can run as long as it lives. It has tags of its own, so that between
        nodes its messages may be under way beside those of others."""
        own_tags = isinstance(self._bare, Over) and self._bare.moves_by(MessagePlan)
        self._exclusive = self._home.control is None or not own_tags
        self._arrays = (x, out)
        self._result = self.result_of(x, out)

    def result_of(self, x: Array, out: Array) -> Array:
        """Return where the result is: out, or x, or this rank's block of x."""
        if not self._in_place:
            return out
        if self.call.kind != "reduce_scatter":
            return x
        start, stop = self.call.block(self._home.rank)
        return arrays.host(x).reshape(-1)[start:stop]

    @property
    def algorithm(self) -> str:
        """Return what `auto` came out as."""
        return self.call.algorithm

    @property
    def predicted_seconds(self) -> float | None:
        """Return what the fitted cost model expects; None where there is no model for the algorithm."""
        from mpips.collectives.simulator.simulate import predict_seconds  # here alone, as it loads the simulator

        way = self._bare.way if isinstance(self._bare, Executor) else ""
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
            self._bare.free()
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
    x: Array,
    comm: MPI.Comm | None = None,
    *,
    op: str = "sum",
    algorithm: str = "auto",
    out: Array = None,
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
    home: Communicator, kind: str, x: Array, op: str, algorithm: str, out: Array, root: int, tags: Tags, label: str = ""
) -> Plan:
    """A plan, where the arguments are good; ValueError or TypeError where they are not. Local."""
    if isinstance(x, (list, tuple)) or arrays.is_device(x) or arrays.is_device(out):
        make, schedule = partial(make_runner, home), partial(build_schedule, home)
        tensor, body = compile_tensor(home, kind, x, op, algorithm, out, root, label, tags, make, schedule)
        return Plan(home, tensor, Over(home, tensor.text, body, sees=not tensor.staged), out is None)
    source = arrays.host(x, "x")
    target = source if out is None else arrays.host(out, "out")
    in_place = out is None
    call = _call(home, kind, source, target, op, algorithm, in_place, root, label)
    writes_x = in_place and not (kind == "broadcast" and home.rank == root)
    x_flat = arrays.flat(source, "x", writes_x)
    out_flat = x_flat if in_place else arrays.flat(target, "out", True)
    return Plan(home, call, make_runner(home, call, x_flat, out_flat, tags), in_place)


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
        raise ValueError(f"x holds {type_name(x.dtype)} and out {type_name(out.dtype)}: give both the same type")
    reduction = operation(op, x.dtype) if kind in REDUCING else None
    n = out.size if kind == "allgather" else x.size
    draft = Call(kind, n, x.dtype, reduction, root if kind in ROOTED else 0, "auto", home.size)
    wanted = (draft.n, draft.n) if in_place else draft.sizes(home.rank)
    if (x.size, out.size) != wanted:
        raise ValueError(
            f"x and out have {x.size} and {out.size} elements: {kind} of {n} between {home.size} ranks "
            f"needs {wanted[0]} and {wanted[1]} on rank {home.rank}"
        )
    if kind == "alltoall" and in_place and n % home.size:
        raise ValueError(f"alltoall in place of {n} elements needs a multiple of {home.size}: pass out=")
    return Call(kind, n, x.dtype, reduction, draft.root, chosen(home, draft, algorithm), home.size, label)


MOST_PLANS = 256
MOST_BYTES = 256 << 20  # of work vectors
MOST_IDENTITIES = 1024


class Entry(NamedTuple):
    """A plan, and the array for which it was found last."""

    plan: Plan
    x: weakref.ref[Any]
    out: weakref.ref[Any]
    n: int
    dtype: np.dtype[Any]


class Several(NamedTuple):
    """A plan of many arrays, and those for which it was found last."""

    plan: Plan
    arrays: list[weakref.ref[Any]]
    sizes: list[int]
    dtypes: list[Any]

    def holds(self, arrays: Sequence[Any]) -> bool:
        """Return whether it is the plan of these arrays, whose identities are the same."""
        return (
            all(map(is_, [ref() for ref in self.arrays], arrays))
            and [one.size for one in arrays] == self.sizes
            and [one.dtype for one in arrays] == self.dtypes
        )


def identity(call: tuple[Any, ...], every: Sequence[Any], arrays: int) -> tuple[Any, ...]:
    """Under what a plan of many arrays, of which so many are sources, is found."""
    return (call, arrays, tuple(map(id, every)))


class PlanCache:
    """The plans of one communicator. A plan says how many `held_bytes` its work vectors take, and can be freed."""

    def __init__(self, by_identity: dict[Any, Any]) -> None:
        """`by_identity` is kept up to date, for who looks there first."""
        self.by_identity = by_identity
        self._by_place: OrderedDict[Hashable, Plan] = OrderedDict()
        self._held = 0

    def find(self, call: tuple[Hashable, ...], x: Array, out: Array, make: Callable[[], Plan]) -> Plan:
        """The plan of a call with these arrays: `call` says all else. One that is made is kept."""
        key: Hashable
        try:
            key = (*call, place(x), place(out))
            made = self._by_place.get(key)
        except TypeError:  # something is no array, or is no word and cannot be hashed: `make` says which
            key = None
        if key is None:
            return make()
        if made is None:
            made = make()
            self._keep(key, made)
        else:
            self._by_place.move_to_end(key)
        if len(self.by_identity) >= MOST_IDENTITIES:
            self.by_identity.clear()
        if isinstance(x, np.ndarray) and (out is None or isinstance(out, np.ndarray)):
            entry = Entry(made, weakref.ref(x), weakref.ref(x if out is None else out), x.size, x.dtype)
            self.by_identity[(call[0], id(x), id(out), *call[1:])] = entry
        elif isinstance(x, list):
            self._know_again(call, made, x, out)
        return made

    def free(self) -> None:
        """Give back what all plans hold."""
        while self._by_place:
            self._drop()

    def _know_again(self, call: tuple[Hashable, ...], plan: Plan, x: list[Any], out: Array) -> None:
        """Find the plan of these NumPy arrays by their identities from now on."""
        every = x if out is None else [*x, *out]
        if every and all(isinstance(one, np.ndarray) for one in every):
            refs, sizes, dtypes = zip(*((weakref.ref(one), one.size, one.dtype) for one in every))
            entry = Several(plan, list(refs), list(sizes), list(dtypes))
            self.by_identity[identity(call, every, len(x))] = entry

    def _keep(self, key: Hashable, plan: Plan) -> None:
        self._by_place[key] = plan
        self._held += plan.held_bytes
        while len(self._by_place) > MOST_PLANS or (self._held > MOST_BYTES and len(self._by_place) > 1):
            self._drop()

    def _drop(self) -> None:
        _, plan = self._by_place.popitem(last=False)
        self._held -= plan.held_bytes
        self.by_identity.clear()  # which may hold it too
        plan.free()


def place(x: Array) -> Hashable:
    """Return the address, size and type of an array, or of each of a list."""
    if isinstance(x, np.ndarray):
        return x.__array_interface__["data"], x.size, x.dtype, x.flags.c_contiguous
    if x is None:
        return ()
    if isinstance(x, (list, tuple)):
        return tuple([place(one) for one in x])
    if arrays.is_torch(x):
        return x.data_ptr(), x.numel(), x.dtype, x.is_contiguous(), x.device
    if arrays.is_device(x):
        return str(sorted(x.__cuda_array_interface__.items()))
    return place(arrays.host(x))
