"""The calls that users make: `allreduce(x)`, its family, `grouped_allreduce`; how each finds its plan.

`allreduce` tells what its sisters, and `plan`, have in common with it.
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
from mpips.collectives.plan import Plan, PlanCache, compile_plan, identity

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
    """A one-shot call that has begun: `test()` now and then, then `wait()`. `kind` is the name of one of the calls;
    `blocks` are `grouped_allreduce`'s."""
    home = communicator(comm)
    home.check()
    if kind == GROUP:
        made = _group(home, x, op, algorithm, out, label, blocks)
    else:
        made = _plan(home, kind, x, op, algorithm, out, root, label)
    made.start(x, out, blocks)
    return made


def _call(
    kind: str, x: Array, comm: MPI.Comm | None, op: str, algorithm: str, out: Array, root: int, label: str
) -> Array:
    """Find the plan, by the identity of the array first, and run it."""
    home = communicator(comm)
    if home.caller != (thread := get_ident()):
        home.change_caller(thread, kind)
    try:
        found = home.plans.get((kind, id(x), id(out), op, algorithm, root, label))
    except TypeError:  # what is no word, such as MPI.SUM, cannot be hashed: the plan's compiler names it
        found = None
    if found is not None:
        made, x_then, out_then, n, dtype = found
        if x_then() is x and (out is None or out_then() is out) and x.size == n and x.dtype is dtype:
            home.inside = True
            try:
                code = made.runner.fast()
                if code:
                    made.go_on(code)
            except BaseException as error:
                raise home.fail(made.call.text, error, x, out) from None
            finally:
                home.inside = False
            return out if out is not None else x if kind != "reduce_scatter" else made.result_of(x, out)
    home.check()
    with home.entered(kind):
        made = _plan(home, kind, x, op, algorithm, out, root, label)
        with home.failing(made.call.text, x, out):
            made()
    return made.result_of(x, out)


def _plan(home: Communicator, kind: str, x: Array, op: str, algorithm: str, out: Array, root: int, label: str) -> Plan:
    def make() -> Plan:
        return compile_plan(home, kind, x, op, algorithm, out, root, Tags(home.lanes), label)

    return _kept(home, (kind, op, algorithm, root, label), x, out, make)


def _group(
    home: Communicator,
    arrays: Sequence[Any],
    op: str,
    algorithm: str,
    out: Sequence[Any] | None,
    label: str,
    blocks: Sequence[Any] | None,
) -> Plan:
    """The plan of many arrays, by the identities of all of them first."""
    written = None if out is None and blocks is None else [*(out or ())]
    which = None
    if blocks is not None:
        which = tuple([block is not None for block in blocks])
        written += [block for block in blocks if block is not None]  # type: ignore[operator]
    call = (GROUP, op, algorithm, which, label)
    every = [*arrays, *(written or ())]
    try:
        found = home.plans.get(identity(call, every, len(arrays)))
    except TypeError:  # as in `_call`
        found = None
    if found is not None and found.holds(every):
        plan: Plan = found.plan
        return plan

    def make() -> Plan:
        return Plan(home, *compile_group(home, arrays, op, algorithm, out, label, blocks), out is None)

    return _kept(home, call, list(arrays), written, make)


def _kept(home: Communicator, call: tuple[Any, ...], x: Array, out: Array, make: Callable[[], Plan]) -> Plan:
    if home.cache is None:
        home.cache = PlanCache(home.plans)
    with home.preparing(f"{call[0]}, before it has begun"):
        found: Plan = home.cache.find(call, x, out, make)
    return found


def allreduce(
    x: Array,
    comm: MPI.Comm | None = None,
    op: str = "sum",
    algorithm: str = "auto",
    out: Array = None,
    *,
    label: str = "",
) -> Array:
    """The reduction of all ranks' x, on all ranks: x[n] -> out[n]. Collective, blocking.

    >>> collectives.allreduce(np.full(3, 2.0), op="mean")
    array([2., 2., 2.])

    x          a C-contiguous array of any shape on the host (NumPy, or anything with `__array_interface__` or DLPack)
               of float16, bfloat16, float32, float64 or integers; or a list of arrays of one size and type, one for
               each GPU of the worker: a *tensor*, whose vectors are reduced together and all get the result.
    comm       an mpi4py communicator (None: COMM_WORLD): all its ranks call.
    op         "sum", "min", "max", "prod" or, of floats, "mean".
    algorithm  "auto", "shared_memory" (one node), "native" (the MPI's own), or one of `schedule.catalog`;
               "reproducible" (allreduce): `auto` among those that add the ranks' values of every element in one order,
               wherever it stands and however long the vector is, so that cutting a vector changes no bit.
    out        where the result goes: an array as x is, of x's type; None: in place, into x.
    label      what the call is for, such as "layer 3": ranks compare it, and sentences name it.

    Returns where the result is: `out`, or x. Every rank gets bitwise the same.

    Bad arguments raise ValueError or TypeError on the rank that made them; nothing was sent. Ranks call the same, in
    the same order. Otherwise all raise `MismatchError`, with the same sentence. Where a rank is interrupted, or ends,
    all others raise `CollectiveError`; a wait longer than MPIPS_TIMEOUT_SECONDS (300; 0: never) raises `StallError`.
    Then the communicator is over: see `renew`. A wait longer than MPIPS_STALL_SECONDS (60) warns. One thread
    may call on a communicator: one that calls while another is in a call ends it for all ranks with `CollectiveError`,
    and threads that call by turns get a RuntimeWarning.
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
    """This rank's block of the reduction of all ranks' x: x[n] -> out[block]. Collective, blocking.

    >>> mine = collectives.reduce_scatter(np.arange(100.0))

    Of p ranks, rank r's block is elements [cut(n, p, r), cut(n, p, r + 1)) of n: sizes differ by one at most, the
    larger first. In place the block of x is returned, as a 1-D view, and the rest of x is as before or scratch, by
    algorithm. Arguments and errors: see `allreduce`.
    """
    return _call("reduce_scatter", x, comm, op, algorithm, out, 0, label)


def allgather(
    x: Array, comm: MPI.Comm | None = None, algorithm: str = "auto", out: Array = None, *, label: str = ""
) -> Array:
    """All ranks' blocks, on all ranks: x[block] -> out[n]. Collective, blocking.

    >>> collectives.allgather(np.full(3, 7))
    array([7, 7, 7])

    Blocks are those of `reduce_scatter`. In place x has n elements, of which this rank's block is given. Elements may
    be of any type but Python objects. Arguments and errors: see `allreduce`.
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
    """The root's x, on all ranks: x[n] of rank `root` -> out[n]. Collective, blocking.

    >>> collectives.broadcast(np.arange(3), root=0)
    array([0, 1, 2])

    x has the same size and type on all ranks. Elements may be of any type but Python objects. Arguments and errors: see
    `allreduce`.
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
    """The reduction of all ranks' x, on the root: x[n] -> out[n] of rank `root`. Collective, blocking.

    >>> total = collectives.reduce(np.ones(3), root=0)

    What other ranks pass as `out`, and get back, is not touched; in place their x is scratch. Arguments and errors: see
    `allreduce`.
    """
    return _call("reduce", x, comm, op, algorithm, out, root, label)


def alltoall(
    x: Array, comm: MPI.Comm | None = None, algorithm: str = "auto", out: Array = None, *, label: str = ""
) -> Array:
    """Block d of each rank r's x, at place r of rank d's result: x[n] -> out. Collective, blocking.

    >>> x = np.full(3 * MPI.COMM_WORLD.size, 7)
    >>> collectives.alltoall(x)[:3]
    array([7, 7, 7])

    Blocks are those of `reduce_scatter`; on rank r, `out` has p times the elements of its block. In place p must divide
    n. Elements may be of any type but Python objects; x is one array. Arguments and errors: see `allreduce`.
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
    """Many arrays of any sizes and types in one call, each reduced across ranks: arrays[i][n_i] -> out[i][n_i].
    Collective, blocking.

    >>> weights, bias = np.full((3, 4), 2.0), np.ones(4, np.float32)
    >>> means = collectives.grouped_allreduce([weights, bias], op="mean")

    Unlike `allreduce` of a list, which adds the vectors of a worker together, the arrays stay apart. All ranks bring as
    many, of the same sizes and types, in the same order. Small ones travel together. Returns `out`, or `arrays`, as a
    list. Arguments and errors: see `allreduce`.

    blocks     for each array another of its size and type, or None: there this rank's block of the result goes, too,
               where `reduce_scatter` has it; all else there stays as it is. Ranks need not do alike.
    """
    home = communicator(comm)
    home.check()
    with home.entered(GROUP):
        made = _group(home, arrays, op, algorithm, out, label, blocks)
        with home.failing(made.call.text, arrays, out, blocks):
            made()
    return list(arrays if out is None else out)
