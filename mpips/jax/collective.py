"""Differentiable collectives of JAX arrays: `allreduce` and others, applied to each leaf of a pytree.

Every rank differentiates its own loss. In collectives whose result all ranks get, the argument `gradient` selects the
function that is differentiated:

- "sum": the sum of all ranks' losses, as in data parallelism. Cotangents are summed over the ranks.
- "identity": a single loss, which every rank computes from the result in the same way. Each rank uses its own cotangent
  unchanged.

As in `jax.lax`, with p ranks `allgather` puts an axis of length p in front of a leaf's shape, and `reduce_scatter`
removes such an axis.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

import mpips.collectives as collectives
from mpips.collectives.call import check_root, find_reduction
from mpips.collectives.communicator import comm_for_thread, communicator
from mpips.jax.primitive import JaxCall, Tree, bind, bind_own

GRADIENTS = ("sum", "identity")
LINEAR = ("sum", "mean")


@dataclass(frozen=True)
class JaxCollective(JaxCall):
    """A call of a collective. `kind` is the name of the function in `mpips.collectives` that runs, or "barrier"."""

    kind: str
    # not part of the hash, because communicators can be compared but not hashed
    comm: MPI.Comm | None = field(hash=False)
    op: str = "sum"
    algorithm: str = "auto"
    root: int = 0
    gradient: str = "sum"

    def __str__(self) -> str:
        return f"{self.kind} with op={self.op!r}" if self.kind in ("allreduce", "reduce_scatter") else self.kind

    @property
    def ranks(self) -> int:
        return (MPI.COMM_WORLD if self.comm is None else self.comm).size

    @property
    def rank(self) -> int:
        return (MPI.COMM_WORLD if self.comm is None else self.comm).rank

    @property
    def order(self) -> int:
        return (MPI.COMM_WORLD if self.comm is None else self.comm).handle

    @property
    def in_place(self) -> bool:  # type: ignore[override]
        return self.kind in ("allreduce", "broadcast")

    def shapes(self, inputs: Sequence[Any]) -> list[Any]:
        outputs = []
        for x in inputs:
            if self.kind in ("reduce_scatter", "alltoall") and x.shape[:1] != (self.ranks,):
                raise ValueError(
                    f"{self.kind} of an array of shape {x.shape}: its first axis must have length "
                    f"{self.ranks}, a row for each rank"
                )
            shape = {"allgather": (self.ranks, *x.shape), "reduce_scatter": x.shape[1:]}.get(self.kind, x.shape)
            outputs.append(jax.ShapeDtypeStruct(shape, x.dtype))
        return outputs

    def run(self, inputs: list[NDArray[Any]], outputs: list[NDArray[Any]]) -> None:
        # XLA runs this method in its own thread, while the program may make calls on `self.comm`. So XLA's calls use
        # another communicator of the same ranks.
        comm = comm_for_thread(self.comm)
        if self.kind == "barrier":
            communicator(comm).agree("barrier")
        elif self.kind == "allreduce" and len(inputs) > 1:
            written = None if all(x is y for x, y in zip(inputs, outputs)) else outputs
            collectives.grouped_allreduce(inputs, comm, self.op, self.algorithm, written)
        else:
            for x, y in zip(inputs, outputs):
                self._run_one(comm, x, None if x is y else y)

    def _run_one(self, comm: MPI.Intracomm, x: NDArray[Any], out: NDArray[Any] | None) -> None:
        if self.kind == "allreduce":
            collectives.allreduce(x, comm, self.op, self.algorithm, out)
        elif self.kind == "broadcast":
            collectives.broadcast(x, comm, self.root, self.algorithm, out)
        elif self.kind == "allgather":
            collectives.allgather(x, comm, self.algorithm, out)
        elif self.kind == "reduce_scatter":
            collectives.reduce_scatter(x, comm, self.op, self.algorithm, out)
        else:
            collectives.alltoall(x, comm, self.algorithm, out)

    def batch(self, x: jax.Array, axis: int) -> tuple[jax.Array, int]:
        if self.kind == "allgather":
            return x, axis + 1
        # The axis of the ranks must stay in front, so the batch axis moves to the second place.
        if self.kind in ("reduce_scatter", "alltoall"):
            x, axis = (jax.numpy.moveaxis(x, 0, 1), 1) if axis == 0 else (x, axis)
            return x, axis - 1 if self.kind == "reduce_scatter" else axis
        return x, axis

    def own(self, x: jax.Array) -> jax.Array:
        return x / self.ranks if self.op == "mean" else x

    def tangent(self) -> JaxCall:
        return self if self.op in LINEAR else super().tangent()

    def transpose(self, cotangents: list[jax.Array]) -> list[jax.Array]:
        numpy = jax.numpy
        if self.kind == "allreduce":
            if self.gradient == "sum":
                return bind(self, cotangents)
            return [bind_own(self, x) for x in cotangents]
        if self.kind == "broadcast":
            if self.gradient == "sum":
                cotangents = bind(replace(self, kind="allreduce", root=0, algorithm="auto"), cotangents)
            return [x if self.rank == self.root else numpy.zeros_like(x) for x in cotangents]
        if self.kind == "allgather":
            if self.gradient == "sum":
                return bind(replace(self, kind="reduce_scatter", algorithm="auto"), cotangents)
            return [x[self.rank] for x in cotangents]
        if self.kind == "alltoall":
            return bind(self, cotangents)
        divisor = self.ranks if self.op == "mean" else 1
        rows = bind(replace(self, kind="allgather", op="sum", algorithm="auto"), cotangents)
        return [x / divisor if divisor > 1 else x for x in rows]


def allreduce(
    tree: Tree, op: str = "mean", comm: MPI.Comm | None = None, algorithm: str = "auto", *, gradient: str = "sum"
) -> Tree:
    """Reduce every leaf of a pytree over all ranks. Collective.

    All leaves are reduced in a single call. If nothing reads a leaf afterwards, XLA puts the result into the leaf's
    memory. This is often the case for gradients, and for arguments that `jit` may overwrite (`donate_argnums`).

    Args:
        tree: Arrays or numbers of float16, bfloat16, float32, float64 or integers. Complex numbers are allowed for
            "sum" and "mean", and bool for "min" (all), "max" (any) and "prod".
        op: "mean", "sum", "min", "max" or "prod".
        comm: An mpi4py communicator. All its ranks must make the call. None means COMM_WORLD.
        algorithm: The algorithm, as in `collectives.allreduce`.
        gradient: "sum" differentiates the sum of all ranks' losses, as in data parallelism. "identity" differentiates a
            single loss that every rank computes from the result. With op "mean" cotangents are also divided by the
            number of ranks.

    Returns:
        A tree of the same form, shapes and dtypes.

    Raises:
        ValueError: `op`, `gradient` or a shape is invalid. Raised while the call is traced.
        NotImplementedError: The program needs the gradient of "min", "max" or "prod".
        jax.errors.JaxRuntimeError: `collectives.allreduce` raised an error when the call ran. It has the same
            message.

    Example:
        >>> mpips.jax.allreduce({"b": jnp.zeros(()), "w": jnp.ones(3)})
        {'b': Array(0., dtype=float32), 'w': Array([1., 1., 1.], dtype=float32)}
    """
    leaves, shape = jax.tree.flatten(tree)
    parts = [_encode(jax.numpy.asarray(leaf), op) for leaf in leaves]
    for part in (part for one in parts for part in one):
        find_reduction(op, part.dtype)
    call = JaxCollective("allreduce", comm, op, algorithm, gradient=_checked(gradient))
    found = iter(_run(call, [part for one in parts for part in one]))
    return jax.tree.unflatten(shape, [_decode(leaf, [next(found) for _ in one]) for leaf, one in zip(leaves, parts)])


def broadcast(tree: Tree, root: int = 0, comm: MPI.Comm | None = None, *, gradient: str = "sum") -> Tree:
    """Return the root's leaves on all ranks. Only the root gets a gradient. Collective.

    Args:
        tree: Arrays of any dtype, with the same shapes and dtypes on all ranks.
        root: The rank whose leaves all ranks get.
        comm: As in `allreduce`.
        gradient: As in `allreduce`.

    Returns:
        A tree of the same form.

    Raises:
        ValueError: `root` is not a rank, or `gradient` is unknown. Raised while the call is traced.
        jax.errors.JaxRuntimeError: `collectives.broadcast` raised an error when the call ran.

    Example:
        >>> mpips.jax.broadcast(jnp.arange(3), root=0)
        Array([0, 1, 2], dtype=int32)
    """
    check_root(root, JaxCollective("broadcast", comm).ranks)
    return _map(JaxCollective("broadcast", comm, root=int(root), gradient=_checked(gradient)), tree)


def allgather(tree: Tree, comm: MPI.Comm | None = None, *, gradient: str = "sum") -> Tree:
    """Gather the leaves of all ranks on every rank. Collective.

    Args:
        tree: Arrays of any dtype, with the same shapes and dtypes on all ranks.
        comm: As in `allreduce`.
        gradient: As in `allreduce`.

    Returns:
        A tree of the same form. A leaf of shape `shape` becomes one of shape (ranks, *shape).

    Raises:
        ValueError: `gradient` is unknown. Raised while the call is traced.
        jax.errors.JaxRuntimeError: `collectives.allgather` raised an error when the call ran.

    Example:
        >>> mpips.jax.allgather(jnp.full(3, 7))[0]
        Array([7, 7, 7], dtype=int32)
    """
    return _map(JaxCollective("allgather", comm, gradient=_checked(gradient)), tree)


def reduce_scatter(tree: Tree, op: str = "sum", comm: MPI.Comm | None = None) -> Tree:
    """Reduce every leaf over all ranks, and return row r of the result on rank r. Collective.

    The gradient is an allgather of the cotangents.

    Args:
        tree: Arrays of shape (ranks, *shape), with a dtype that `allreduce` accepts.
        op: As in `allreduce`.
        comm: As in `allreduce`.

    Returns:
        A tree of the same form, whose leaves have shape `shape`.

    Raises:
        ValueError: `op` or a shape is invalid. Raised while the call is traced.
        NotImplementedError: The program needs the gradient of "min", "max" or "prod".
        jax.errors.JaxRuntimeError: `collectives.reduce_scatter` raised an error when the call ran.

    Example:
        >>> mpips.jax.reduce_scatter(jnp.ones((mpips.size(), 2)), op="mean")
        Array([1., 1.], dtype=float32)
    """
    for leaf in jax.tree.leaves(tree):
        find_reduction(op, jax.numpy.result_type(leaf))
    return _map(JaxCollective("reduce_scatter", comm, op), tree)


def alltoall(tree: Tree, comm: MPI.Comm | None = None) -> Tree:
    """Send row r of every leaf to rank r. Collective.

    Args:
        tree: Arrays of shape (ranks, *shape) and any dtype. Shapes and dtypes must be the same on all ranks.
        comm: As in `allreduce`.

    Returns:
        A tree of the same form and shapes. Row s of a leaf is the row that rank s has sent to this rank.

    Raises:
        ValueError: A shape is invalid. Raised while the call is traced.
        jax.errors.JaxRuntimeError: `collectives.alltoall` raised an error when the call ran.

    Example:
        >>> mpips.jax.alltoall(jnp.full((mpips.size(), 2), 7))[0]
        Array([7, 7], dtype=int32)
    """
    return _map(JaxCollective("alltoall", comm), tree)


def barrier(comm: MPI.Comm | None = None) -> None:
    """Wait for all ranks. Collective.

    Outside of `jit` this call blocks. Inside of `jit`, later calls of mpips wait until all ranks have reached the
    barrier.

    Args:
        comm: As in `allreduce`.

    Raises:
        jax.errors.JaxRuntimeError: The ranks make different calls, or a rank has ended.

    Example:
        >>> mpips.jax.barrier()
    """
    _run(JaxCollective("barrier", comm), [])
    if not isinstance(jax.numpy.zeros(()), jax.core.Tracer):
        jax.effects_barrier()


def _map(call: JaxCollective, tree: Tree) -> Tree:
    leaves, shape = jax.tree.flatten(tree)
    return jax.tree.unflatten(shape, _run(call, leaves) if leaves else [])


def _run(call: JaxCollective, arrays: list[Any]) -> list[Any]:
    return bind(call, arrays) if arrays or call.kind == "barrier" else []


def _checked(gradient: str) -> str:
    if gradient not in GRADIENTS:
        raise ValueError(f"unknown gradient {gradient!r}: choose one of {', '.join(GRADIENTS)}")
    return gradient


def _encode(leaf: jax.Array, op: str) -> list[jax.Array]:
    """Return a leaf as real arrays for the reduction: `collectives` supports neither bool nor complex numbers."""
    if leaf.dtype.kind == "b" and op in ("min", "max", "prod"):
        return [leaf.astype(np.uint8)]
    return [leaf.real, leaf.imag] if leaf.dtype.kind == "c" and op in LINEAR else [leaf]


def _decode(leaf: Any, parts: list[jax.Array]) -> jax.Array:
    """Return the result for a leaf, given the results for the real arrays that `_encode` made of it."""
    if len(parts) == 2:
        return jax.lax.complex(*parts)
    return parts[0].astype(bool) if jax.numpy.result_type(leaf).kind == "b" else parts[0]
