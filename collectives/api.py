"""The public calls, `allreduce` to `grouped_allreduce`: how a repeated call finds its plan at once and runs it.

A plan is a call compiled for given arrays. The docstring of `allreduce` describes the arguments and errors that all
calls, and the function `plan`, share.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import get_ident
from typing import Any

from mpi4py import MPI

from mpips.collectives.arrays import Array
from mpips.collectives.communicator import Communicator, communicator
from mpips.collectives.fabric.requests import Tags
from mpips.collectives.group import compile_group
from mpips.collectives.plan import Plan, PlanCache, compile_plan, group_key

GROUP = "grouped_allreduce"


def begin(
    kind: str,
    x: Array,
    comm: MPI.Comm | None = None,
    *,
    op: str = "sum",
    algorithm: str = "auto",
    out: Array = None,
    root: int = 0,
    label: str = "",
    blocks: Sequence[Any] | None = None,
) -> Plan:
    """Start a one-shot call and return its plan. The caller must call the plan's `test()` repeatedly, then `wait()`.

    Args:
        kind: The name of a call of this module, such as "allreduce". All other arguments are passed to this call.
        blocks: The argument `blocks` of `grouped_allreduce`. No other call has it.
    """
    home = communicator(comm)
    home.check()
    if kind == GROUP:
        plan = _group_plan(home, x, op, algorithm, out, label, blocks)
    else:
        plan = _plan(home, kind, x, op, algorithm, out, root, label)
    plan.start(x, out, blocks)
    return plan


def _call(
    kind: str, x: Array, comm: MPI.Comm | None, op: str, algorithm: str, out: Array, root: int, label: str
) -> Array:
    """Run a one-shot call of one array.

    The fast path is written out in this function, because every function call would add to the latency of a small
    vector. It looks the plan up by the `id()` of the array. Python reuses the id of a freed array, so weak references
    show whether the array is still the one for which the plan was made.
    """
    home = communicator(comm)
    if home.caller != (thread := get_ident()):
        home.change_caller(thread, kind)
    try:
        cached = home.plans.get((kind, id(x), id(out), op, algorithm, root, label))
    except TypeError:
        # An argument such as op=MPI.SUM cannot be hashed. compile_plan will refuse it with a clear message.
        cached = None
    if cached is not None:
        plan, x_ref, out_ref, n, dtype = cached
        if x_ref() is x and (out is None or out_ref() is out) and x.size == n and x.dtype is dtype:
            home.inside = True
            try:
                code = plan.runner.fast()
                if code:
                    plan.finish_run(code)
            except BaseException as error:
                raise home.fail(plan.call.text, error, x, out) from None
            finally:
                home.inside = False
            return out if out is not None else x if kind != "reduce_scatter" else plan.result_of(x, out)
    home.check()
    with home.entered(kind):
        plan = _plan(home, kind, x, op, algorithm, out, root, label)
        with home.failing(plan.call.text, x, out):
            plan()
    return plan.result_of(x, out)


def _plan(home: Communicator, kind: str, x: Array, op: str, algorithm: str, out: Array, root: int, label: str) -> Plan:
    def make() -> Plan:
        return compile_plan(home, kind, x, op, algorithm, out, root, Tags(home.lanes), label)

    return _cached_plan(home, (kind, op, algorithm, root, label), x, out, make)


def _group_plan(
    home: Communicator,
    arrays: Sequence[Any],
    op: str,
    algorithm: str,
    out: Sequence[Any] | None,
    label: str,
    blocks: Sequence[Any] | None,
) -> Plan:
    """Return the plan of a grouped call: look it up by the `id()` of all arrays, or compile it."""
    written = None if out is None and blocks is None else [*(out or ())]
    # for each array, True if `blocks` has an array for it
    has_block = None
    if blocks is not None:
        has_block = tuple([block is not None for block in blocks])
        written += [block for block in blocks if block is not None]  # type: ignore[operator]
    call = (GROUP, op, algorithm, has_block, label)
    every = [*arrays, *(written or ())]
    try:
        cached = home.plans.get(group_key(call, every, len(arrays)))
    except TypeError:
        # An argument cannot be hashed. compile_group will refuse it with a clear message.
        cached = None
    if cached is not None and cached.holds(every):
        plan: Plan = cached.plan
        return plan

    def make() -> Plan:
        return Plan(home, *compile_group(home, arrays, op, algorithm, out, label, blocks), out is None)

    return _cached_plan(home, call, list(arrays), written, make)


def _cached_plan(home: Communicator, call: tuple[Any, ...], x: Array, out: Array, make: Callable[[], Plan]) -> Plan:
    """Return the cached plan for the addresses of these arrays. If the cache has none, make a plan and cache it."""
    if home.cache is None:
        home.cache = PlanCache(home.plans)
    with home.preparing(f"{call[0]}, before it has begun"):
        plan: Plan = home.cache.find(call, x, out, make)
    return plan


def allreduce(
    x: Array,
    comm: MPI.Comm | None = None,
    op: str = "sum",
    algorithm: str = "auto",
    out: Array = None,
    *,
    label: str = "",
) -> Array:
    """Reduce x over all ranks, element by element, and give every rank the result.

    Collective: all ranks of the communicator make the same calls in the same order. Blocks until the result is ready.
    The result has the same bits on every rank.

    >>> collectives.allreduce(np.full(3, 2.0), op="mean")
    array([2., 2., 2.])

    Args:
        x: A C-contiguous array of any shape in host memory: a NumPy array, or any object with `__array_interface__` or
            DLPack. Its elements are float16, bfloat16, float32, float64 or integers. x may also be a list of arrays of
            equal size and type, one for each GPU of this process. Such a list is a *tensor*: the call reduces the
            arrays of all ranks' lists to one result and writes it to every array.
        comm: An mpi4py communicator. None stands for COMM_WORLD.
        op: "sum", "min", "max", "prod", or "mean" (floats only).
        algorithm: "auto", "shared_memory" (ranks of one node), "native" (the call of the MPI library), or a name from
            `schedule.catalog`. "reproducible" (only `allreduce`) chooses like "auto", but only among algorithms that
            add the ranks' values in the same order for every element and every length. Splitting a vector into parts
            then changes no bit of the sums.
        out: The array for the result, of the same kind, size and type as x. None: the result overwrites x.
        label: A name for this call, such as "layer 3". Errors show it, and ranks compare it.

    Returns:
        `out`, or x if `out` is None.

    Raises:
        ValueError, TypeError: An argument is invalid. Only this rank raises, and nothing was sent.
        MismatchError: The ranks make different calls. All ranks raise the same message.
        CollectiveError: A rank was interrupted or has ended, or a second thread made a call on this communicator while
            the first thread was still in a call.
        StallError: A wait took longer than MPIPS_TIMEOUT_SECONDS (default 300; 0: never raise).

    After any of the last three errors the communicator is unusable: every call on it raises the same error until
    `renew`.

    A wait longer than MPIPS_STALL_SECONDS (default 60) issues a warning. Threads that take turns making calls on one
    communicator also cause a warning: use one thread for each communicator.
    """
    return _call("allreduce", x, comm, op, algorithm, out, 0, label)


def reduce_scatter(
    x: Array,
    comm: MPI.Comm | None = None,
    op: str = "sum",
    algorithm: str = "auto",
    out: Array = None,
    *,
    label: str = "",
) -> Array:
    """Reduce x over all ranks and give each rank its block of the result.

    Collective and blocking. See `allreduce` for the arguments and errors.

    >>> block = collectives.reduce_scatter(np.arange(100.0))

    The n elements of x are cut into one block for each of the p ranks. The block of rank r is the elements
    [cut(n, p, r), cut(n, p, r + 1)); see `schedule.model.cut`. Block sizes differ by at most one element, and the
    larger blocks come first.

    Returns:
        `out`, which has the size of this rank's block. Without `out` the result overwrites this rank's block of x, and
        a 1-D view of that block is returned. Some algorithms also overwrite the rest of x with intermediate values.
    """
    return _call("reduce_scatter", x, comm, op, algorithm, out, 0, label)


def allgather(
    x: Array, comm: MPI.Comm | None = None, algorithm: str = "auto", out: Array = None, *, label: str = ""
) -> Array:
    """Collect a block from each rank and give every rank all of them.

    Collective and blocking. See `allreduce` for the arguments and errors.

    >>> collectives.allgather(np.full(3, 7))
    array([7, 7, 7])

    `out` has n elements, and x is this rank's block of these elements. Blocks are cut as in `reduce_scatter`. Without
    `out`, x itself has n elements: this rank's block of x is the input, and the call fills in the other blocks.
    Elements may be of any type except Python objects.
    """
    return _call("allgather", x, comm, "sum", algorithm, out, 0, label)


def broadcast(
    x: Array,
    comm: MPI.Comm | None = None,
    root: int = 0,
    algorithm: str = "auto",
    out: Array = None,
    *,
    label: str = "",
) -> Array:
    """Copy the array of rank `root` to all ranks.

    Collective and blocking. See `allreduce` for the arguments and errors.

    >>> collectives.broadcast(np.arange(3), root=0)
    array([0, 1, 2])

    x has the same size and type on all ranks. Elements may be of any type except Python objects.
    """
    return _call("broadcast", x, comm, "sum", algorithm, out, root, label)


def reduce(
    x: Array,
    comm: MPI.Comm | None = None,
    op: str = "sum",
    root: int = 0,
    algorithm: str = "auto",
    out: Array = None,
    *,
    label: str = "",
) -> Array:
    """Reduce x over all ranks and give the result to rank `root`.

    Collective and blocking. See `allreduce` for the arguments and errors.

    >>> total = collectives.reduce(np.ones(3), root=0)

    On all other ranks `out` is returned unchanged. Without `out`, the call may overwrite x on those ranks with
    intermediate values.
    """
    return _call("reduce", x, comm, op, algorithm, out, root, label)


def alltoall(
    x: Array, comm: MPI.Comm | None = None, algorithm: str = "auto", out: Array = None, *, label: str = ""
) -> Array:
    """Send block d of x to rank d, for every rank d, and collect the blocks that all ranks send to this one.

    Collective and blocking. See `allreduce` for the arguments and errors.

    >>> x = np.full(3 * MPI.COMM_WORLD.size, 7)
    >>> collectives.alltoall(x)[:3]
    array([7, 7, 7])

    The n elements of x are cut into p blocks as in `reduce_scatter`. `out` receives one block from each rank, in the
    order of the ranks. Each block has the size of this rank's block of x, so `out` has p times as many elements as that
    block. Without `out` the result overwrites x, and n must be a multiple of p. Elements may be of any type except
    Python objects. x is a single array, not a list.
    """
    return _call("alltoall", x, comm, "sum", algorithm, out, 0, label)


def grouped_allreduce(
    arrays: Sequence[Any],
    comm: MPI.Comm | None = None,
    op: str = "sum",
    algorithm: str = "auto",
    out: Sequence[Any] | None = None,
    *,
    label: str = "",
    blocks: Sequence[Any] | None = None,
) -> list[Any]:
    """Reduce several arrays over all ranks in one call, each array separately.

    Collective and blocking. See `allreduce` for the other arguments and errors.

    >>> weights, bias = np.full((3, 4), 2.0), np.ones(4, np.float32)
    >>> means = collectives.grouped_allreduce([weights, bias], op="mean")

    (`allreduce` of a list, in contrast, adds the arrays of the list together.) Small arrays are packed together, so one
    grouped call is faster than a call for each array.

    Args:
        arrays: Arrays of any sizes and types. All ranks pass the same number of arrays, with the same sizes and types
            in the same order.
        out: A list of one array for each result. None: the results overwrite `arrays`.
        blocks: A list that has for each array either None or another array of the same size and type. That array gets
            a copy of this rank's block of the result (the elements that `reduce_scatter` would give this rank), at the
            same positions. Its other elements stay unchanged. Ranks may pass different `blocks`.

    Returns:
        `out` or `arrays`, as a list.
    """
    home = communicator(comm)
    home.check()
    with home.entered(GROUP):
        plan = _group_plan(home, arrays, op, algorithm, out, label, blocks)
        with home.failing(plan.call.text, arrays, out, blocks):
            plan()
    return list(arrays if out is None else out)
