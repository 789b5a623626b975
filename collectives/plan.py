"""Plans: collectives that are compiled once and run many times, by users or by one-shot calls.

The docstrings of the one-shot calls (`collectives.api`) describe arguments, results and errors.

A one-shot call looks its plan up in a `PlanCache`, first by the `id()` of each array, then by the addresses of the
arrays. Plans in the cache know only addresses and keep no user array alive. So if a program makes a new array for each
call, and the new array has the address of the earlier array, the call finds the earlier plan. The number of cached
plans and their work memory are bounded.
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
from mpips.collectives.call import REDUCING, ROOTED, Call, Runner, check_root, find_reduction
from mpips.collectives.communicator import Communicator, communicator
from mpips.collectives.errors import CollectiveError, NotCopyable, of_caller
from mpips.collectives.fabric.requests import Tags
from mpips.collectives.fabric.wait import check_in_time
from mpips.collectives.network.messages import MessagePlan
from mpips.collectives.node.executor import MET, NodeExecutor, not_begun
from mpips.collectives.recorder import own as recorder
from mpips.collectives.runner import (
    ComparedRunner,
    StartedRun,
    TimedRunner,
    advance,
    agree,
    begin,
    build_schedule,
    finish,
    make_runner,
    resolve_algorithm,
)
from mpips.collectives.tensor.compile import compile_tensor


class Plan(NotCopyable):
    """One collective, compiled for fixed arrays, to be run many times. Made by `collectives.plan`.

    `plan()` runs it, blocks, and returns the result. To compute while it runs, call `start()`, then `test()` now and
    then, and finally `wait()`. Do not touch the arrays between `start()` and `wait()`. All ranks must run and start
    their plans in the same order.
    """

    def __init__(self, home: Communicator, call: Call, runner: Runner, in_place: bool) -> None:
        self.call = call
        # the runner in use: `_bare`, or a TimedRunner that also records the times of `_bare`
        self.runner = runner
        self._bare = runner
        self._home = home
        self._in_place = in_place
        self._arrays: Array = None
        self._result: Array = None
        # the run that start() has begun and wait() has not ended yet
        self._operation: StartedRun | None = None
        self._freed = False
        # True if free() was called during a started run: wait() then frees the plan
        self._retired = False
        # True if a started run of this plan must not be in flight at the same time as other such runs; see keep()
        self._exclusive = True
        self._line = recorder.user_line(sys._getframe(1))
        recorder.add_timeable(self)

    def set_timed(self, every: bool) -> None:
        """Record the times of this plan's runs from now on, if `every` is True or the plan's vectors are long.

        Otherwise stop recording. See `recorder.own.trace`.
        """
        timed = (every or self.call.nbytes >= recorder.LONG_BYTES) and not self._freed
        if timed != isinstance(self.runner, TimedRunner):
            self.runner = TimedRunner(self._home, self.call, self._bare, self._line) if timed else self._bare

    def __call__(self) -> Array:
        """Run the collective and return its result. Collective and blocking."""
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
                self.finish_run(code)
        finally:
            home.inside = outer
        return self._result

    def finish_run(self, code: int) -> None:
        """Finish a run after the fast path has returned `code`.

        `code` is MET if all ranks have entered the call, and NOT_BEGUN if the fast path did nothing.
        """
        home, runner = self._home, self.runner
        if code != MET:
            self._check()
            # A plan that uses messages has persistent requests, which can serve only one run at a time.
            if self._operation is not None and not self._exclusive:
                raise of_caller(CollectiveError(f"{self.call.text} was started: wait for it first"))
        with home.failing(self.call.text, self):
            if code == MET:
                home.run(runner.rest(), self.call.text)
            elif home.started:
                last = StartedRun(self.call.text, runner.steps(), True)
                begin(home, last)
                finish(home, last)
            else:
                home.run(runner.steps(), self.call.text)

    def start(self, *arrays: Array) -> None:
        """Start a run and return as soon as it would have to wait. Collective; does not block.

        `arrays` are the arrays of the call, if the plan itself does not hold them. They are kept alive during the run.
        """
        self._check()
        if self._operation is not None:
            raise of_caller(CollectiveError(f"{self.call.text} was started twice: wait for it first"))
        # The run holds the arrays itself, because the program may drop the plan before the run is done.
        kept = arrays or self._arrays
        with self._home.entered(self.call.text), self._home.failing(self.call.text, self, kept):
            self._operation = StartedRun(self.call.text, self.runner.steps(), self._exclusive, kept)
            begin(self._home, self._operation)

    def test(self) -> bool:
        """Advance the started run as far as possible without blocking.

        Returns True once the run is done. The caller must still call `wait()`.
        """
        operation = self._started()
        if not operation.done:
            self._home.check()
        with self._home.entered(self.call.text), self._home.failing(self.call.text, self):
            advance(self._home)
            if not operation.done and operation.due():
                self._home.look(operation.waited)
                check_in_time(self.call.text, operation.waited, self._home.generation)
        return operation.done

    def wait(self) -> Array:
        """Finish the run that `start` began and return the result. Blocking."""
        operation, self._operation = self._started(), None
        if not operation.done:
            self._home.check()
            with self._home.entered(self.call.text), self._home.failing(self.call.text, self):
                finish(self._home, operation)
        if self._retired:
            self.free()
        return self._result

    def keep(self, x: Array, out: Array) -> None:
        """Keep the arrays alive as long as the plan. Called for plans that the user has made.

        Such a plan has its own message tags. So between nodes its started run can be in flight at the same time as the
        runs of other plans.
        """
        own_tags = isinstance(self._bare, ComparedRunner) and self._bare.has_body(MessagePlan)
        self._exclusive = self._home.control is None or not own_tags
        self._arrays = (x, out)
        self._result = self.result_of(x, out)

    def result_of(self, x: Array, out: Array) -> Array:
        """Return the array that has the result: out, x, or this rank's block of x."""
        if not self._in_place:
            return out
        if self.call.kind != "reduce_scatter":
            return x
        start, stop = self.call.block(self._home.rank)
        return arrays.host(x).reshape(-1)[start:stop]

    @property
    def algorithm(self) -> str:
        """The algorithm in use. For "auto" or "reproducible", this is the algorithm that was chosen."""
        return self.call.algorithm

    @property
    def predicted_seconds(self) -> float | None:
        """The seconds that a run should take by the tuning table, or None if the table does not cover the algorithm."""
        # Imported only when needed, because nothing else in this module needs the simulator.
        from mpips.collectives.simulator.simulate import predict_seconds

        way = self._bare.way if isinstance(self._bare, NodeExecutor) else ""
        return predict_seconds(self._home.table, self.call, self._home.nodes, way)

    @property
    def held_bytes(self) -> int:
        """An upper limit of the memory that the plan's work vectors take, in bytes."""
        return self.call.nbytes if self.runner.holds else 0

    def free(self) -> None:
        """Free the plan's MPI requests and drop its arrays. The plan cannot run any more. Local.

        If a started run has not ended yet, the plan is freed at the end of `wait()`.
        """
        if self._operation is not None:
            self._retired = True
        elif not self._freed:
            self._freed = True
            # Set both, because `set_timed` may later replace one runner by the other.
            self.runner.fast = self._bare.fast = not_begun
            self._bare.free()
            self._arrays = self._result = None

    def _check(self) -> None:
        if self._freed:
            raise of_caller(CollectiveError(f"{self.call.text} has been freed: make a new plan"))
        self._home.check()

    def _started(self) -> StartedRun:
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
    """Compile a collective over these arrays, to be run many times.

    Collective and blocking, because the ranks compare their arguments. The plan keeps the arrays alive.

    Args:
        kind: "allreduce", "reduce_scatter", "allgather", "broadcast", "reduce" or "alltoall". The other arguments, the
            results and the errors are those of the call with this name; see `allreduce`.
    """
    home = communicator(comm)
    home.check()
    tags = Tags(home.plan_lanes, home.tags_dealt)
    with home.preparing(f"a plan of {kind}"):
        new = compile_plan(home, kind, x, op, algorithm, out, root, tags, label)
    new.keep(x, out)
    agree(home, "plan of " + new.call.text)
    # All ranks count the same number, because they have just agreed on the plan.
    home.count_tags(tags.count)
    return new


def compile_plan(
    home: Communicator, kind: str, x: Array, op: str, algorithm: str, out: Array, root: int, tags: Tags, label: str = ""
) -> Plan:
    """Check the arguments of a call and compile a plan for it. Local.

    Args:
        home: The communicator.
        kind: The name of the collective, such as "allreduce".
        x: The array, or a list of arrays (see `allreduce`).
        op: The name of the reduction. Ignored by kinds that do not reduce.
        algorithm: The name of the algorithm, or "auto" or "reproducible".
        out: The array for the result. None: the result overwrites x.
        root: The root of a broadcast or reduce.
        tags: Gives the tags of the plan's messages.
        label: The caller's name for this call.

    Raises:
        ValueError, TypeError: An argument is invalid.
    """
    if isinstance(x, (list, tuple)) or arrays.is_device(x) or arrays.is_device(out):
        make, schedule = partial(make_runner, home), partial(build_schedule, home)
        tensor, body = compile_tensor(home, kind, x, op, algorithm, out, root, label, tags, make, schedule)
        return Plan(home, tensor, ComparedRunner(home, tensor.text, body, compares=not tensor.staged), out is None)
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
    check_root(root, home.size)
    if x.dtype != out.dtype:
        raise ValueError(f"x holds {type_name(x.dtype)} and out {type_name(out.dtype)}: give both the same type")
    reduction = find_reduction(op, x.dtype) if kind in REDUCING else None
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
    return Call(kind, n, x.dtype, reduction, draft.root, resolve_algorithm(home, draft, algorithm), home.size, label)


# the limits of a PlanCache: the number of plans, the bytes of their work vectors, the number of entries in
# `by_identity`
MOST_PLANS = 256
MOST_BYTES = 256 << 20
MOST_IDENTITIES = 1024


class CachedPlan(NamedTuple):
    """A cached plan of one array, with weak references to the arrays for which the plan was last looked up."""

    plan: Plan
    x: weakref.ref[Any]
    out: weakref.ref[Any]
    n: int
    dtype: np.dtype[Any]


class CachedGroupPlan(NamedTuple):
    """A cached plan of several arrays, with weak references to the arrays for which the plan was last looked up."""

    plan: Plan
    arrays: list[weakref.ref[Any]]
    sizes: list[int]
    dtypes: list[Any]

    def holds(self, arrays: Sequence[Any]) -> bool:
        """True if the plan is for these arrays. Equal ids do not prove it: Python reuses the ids of freed arrays."""
        return (
            all(map(is_, [ref() for ref in self.arrays], arrays))
            and [array.size for array in arrays] == self.sizes
            and [array.dtype for array in arrays] == self.dtypes
        )


def group_key(call: tuple[Any, ...], every: Sequence[Any], arrays: int) -> tuple[Any, ...]:
    """Return the key of `PlanCache.by_identity` for a plan of several arrays.

    `every` has the source arrays first. `arrays` is their number.
    """
    return (call, arrays, tuple(map(id, every)))


class PlanCache:
    """The plans of a communicator's one-shot calls. When it is full, it frees the least recently used plan.

    `api` first looks for a plan in the dict `by_identity`, which this cache fills. Its keys contain the `id` of each
    array.
    """

    def __init__(self, by_identity: dict[Any, Any]) -> None:
        self.by_identity = by_identity
        # key with the addresses of the arrays -> plan; the plan used last is at the end
        self._by_address: OrderedDict[Hashable, Plan] = OrderedDict()
        self._held = 0

    def find(self, call: tuple[Hashable, ...], x: Array, out: Array, make: Callable[[], Plan]) -> Plan:
        """Return the plan of a call with these arrays. If the cache has none, make the plan with `make` and cache it.

        `call` holds everything else that a plan depends on.
        """
        key: Hashable
        try:
            key = (*call, place_key(x), place_key(out))
            plan = self._by_address.get(key)
        except TypeError:
            # An argument is not an array, or cannot be hashed. `make` raises a TypeError that names the argument.
            key = None
        if key is None:
            return make()
        if plan is None:
            plan = make()
            self._keep(key, plan)
        else:
            self._by_address.move_to_end(key)
        if len(self.by_identity) >= MOST_IDENTITIES:
            self.by_identity.clear()
        if isinstance(x, np.ndarray) and (out is None or isinstance(out, np.ndarray)):
            entry = CachedPlan(plan, weakref.ref(x), weakref.ref(x if out is None else out), x.size, x.dtype)
            self.by_identity[(call[0], id(x), id(out), *call[1:])] = entry
        elif isinstance(x, list):
            self._remember_group(call, plan, x, out)
        return plan

    def free(self) -> None:
        """Free all plans."""
        while self._by_address:
            self._drop()

    def _remember_group(self, call: tuple[Hashable, ...], plan: Plan, x: list[Any], out: Array) -> None:
        """Add an entry by which `api` finds the plan for these arrays, if all of them are NumPy arrays."""
        every = x if out is None else [*x, *out]
        if every and all(isinstance(array, np.ndarray) for array in every):
            refs, sizes, dtypes = zip(*((weakref.ref(array), array.size, array.dtype) for array in every))
            entry = CachedGroupPlan(plan, list(refs), list(sizes), list(dtypes))
            self.by_identity[group_key(call, every, len(x))] = entry

    def _keep(self, key: Hashable, plan: Plan) -> None:
        self._by_address[key] = plan
        self._held += plan.held_bytes
        while len(self._by_address) > MOST_PLANS or (self._held > MOST_BYTES and len(self._by_address) > 1):
            self._drop()

    def _drop(self) -> None:
        _, plan = self._by_address.popitem(last=False)
        self._held -= plan.held_bytes
        # Some entries of `by_identity` may hold the plan. The next calls fill the dict again.
        self.by_identity.clear()
        plan.free()


def place_key(x: Array) -> Hashable:
    """Return the address, size and type of an array, or of each array of a list, as a hashable key."""
    if isinstance(x, np.ndarray):
        return x.__array_interface__["data"], x.size, x.dtype, x.flags.c_contiguous
    if x is None:
        return ()
    if isinstance(x, (list, tuple)):
        return tuple([place_key(item) for item in x])
    if arrays.is_torch(x):
        return x.data_ptr(), x.numel(), x.dtype, x.is_contiguous(), x.device
    if arrays.is_device(x):
        return str(sorted(x.__cuda_array_interface__.items()))
    return place_key(arrays.host(x))
