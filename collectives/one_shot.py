"""One-shot calls, `allreduce(x)` and its family: the plan is compiled at the first call and found again, by the arrays'
identity or by where they lie. Arguments and kinds: see `plan`."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
from mpi4py import MPI

from collectives.plan import Plan, checked
from collectives.session import MOST_PLANS, Session, session
from collectives.transport.tags import Tags


def begin(
    kind: str,
    x: Any,
    comm: MPI.Comm | None = None,
    *,
    op: str = "sum",
    algorithm: str = "auto",
    out: Any = None,
    root: int = 0,
) -> Plan:
    """A one-shot call that has begun: `test()` now and then, then `wait()`. The caller holds on to the arrays."""
    home = session(comm)
    home.check_usable()
    made, _ = _by_address(home, kind, x, op, algorithm, out, root)
    made.start()
    return made


def _one_shot(kind: str, x: Any, comm: MPI.Comm | None, op: str, algorithm: str, out: Any, root: int) -> Any:
    """Find the plan by the identity of the arrays, or by where they lie, or make it. Plans kept here hold no array."""
    home = session(comm)
    key = (kind, id(x), id(out), op, algorithm, root)
    found = home.plans.get(key)
    if found is not None:
        made, x_then, out_then, n, dtype = found
        if x_then() is x and (out is None or out_then() is out) and x.size == n and x.dtype is dtype:
            made()
            return out if out is not None else x if kind != "reduce_scatter" else made.result_of(x, out)
    home.check_usable()
    made, kept = _by_address(home, kind, x, op, algorithm, out, root)
    if isinstance(x, np.ndarray) and (out is None or isinstance(out, np.ndarray)):
        if len(home.plans) >= MOST_PLANS:
            home.plans.clear()
        out_then = weakref.ref(x if out is None else out)
        home.plans[key] = (made, weakref.ref(x), out_then, x.size, x.dtype)
    made()
    result = made.result_of(x, out)
    if not kept:
        made.free()
    return result


def _by_address(
    home: Session, kind: str, x: Any, op: str, algorithm: str, out: Any, root: int
) -> tuple[Plan, bool]:
    """The plan, and whether it is kept. A view made anew for each call has another identity but lies where it lay."""
    places = _places(x), _places(out)
    if None in places:
        return checked(home, kind, x, op, algorithm, out, root, Tags()), False
    key = (kind, *places, op, algorithm, root)
    made = home.by_address.get(key)
    if made is None:
        made = checked(home, kind, x, op, algorithm, out, root, Tags())
        while len(home.by_address) >= MOST_PLANS:
            oldest = next(iter(home.by_address))
            home.by_address.pop(oldest).free()
            home.plans.clear()  # which may hold it too
        home.by_address[key] = made
    return made, True


def _places(x: Any) -> tuple[Any, ...] | None:
    """Where NumPy arrays lie and what they are; None for other arrays."""
    vectors = x if isinstance(x, (list, tuple)) else [x] if x is not None else []
    if not all(isinstance(vector, np.ndarray) for vector in vectors):
        return None
    return isinstance(x, (list, tuple)), *(
        (v.__array_interface__["data"], v.size, v.dtype, v.flags.c_contiguous) for v in vectors
    )


def allreduce(
    x: Any, comm: MPI.Comm | None = None, op: str = "sum", algorithm: str = "auto", out: Any = None
) -> Any:
    """The reduction of all ranks' x, on all ranks. Collective, blocking."""
    return _one_shot("allreduce", x, comm, op, algorithm, out, 0)


def reduce_scatter(
    x: Any, comm: MPI.Comm | None = None, op: str = "sum", algorithm: str = "auto", out: Any = None
) -> Any:
    """This rank's block of the reduction of all ranks' x. Collective, blocking."""
    return _one_shot("reduce_scatter", x, comm, op, algorithm, out, 0)


def allgather(x: Any, comm: MPI.Comm | None = None, algorithm: str = "auto", out: Any = None) -> Any:
    """All ranks' blocks, on all ranks. Collective, blocking."""
    return _one_shot("allgather", x, comm, "sum", algorithm, out, 0)


def broadcast(x: Any, comm: MPI.Comm | None = None, root: int = 0, algorithm: str = "auto", out: Any = None) -> Any:
    """The root's x, on all ranks. Collective, blocking."""
    return _one_shot("broadcast", x, comm, "sum", algorithm, out, root)


def reduce(
    x: Any, comm: MPI.Comm | None = None, op: str = "sum", root: int = 0, algorithm: str = "auto", out: Any = None
) -> Any:
    """The reduction of all ranks' x, on the root. Collective, blocking."""
    return _one_shot("reduce", x, comm, op, algorithm, out, root)


def alltoall(x: Any, comm: MPI.Comm | None = None, algorithm: str = "auto", out: Any = None) -> Any:
    """Block d of each rank r's x, at place r of rank d's result. Collective, blocking."""
    return _one_shot("alltoall", x, comm, "sum", algorithm, out, 0)
