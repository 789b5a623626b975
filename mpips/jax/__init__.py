"""JAX on mpips: collectives over all ranks, pushes and pulls of a store, inside `jit` and outside; pytrees of arrays.

    gradients = mpips.jax.allreduce(gradients)              # the mean over all ranks, leaf by leaf
    weights = mpips.jax.pushpull(kv, "w", gradients)        # kv.init("w", leaves) before

Calls run in the order in which the program makes them, on every rank alike. On CPUs, and where JAX has `jax.ffi`, XLA
calls mpips on its own buffers: nothing is copied, and `jax.grad`, `jax.vmap`, `lax.scan`, `lax.cond` and `jax.remat` go
through collectives. Elsewhere calls are ordered callbacks, which JAX neither differentiates nor batches.

After `import mpips.jax`, `jax.distributed.initialize()` needs no arguments in processes that MPI has joined.
"""

from importlib.util import find_spec

if find_spec("jax") is None:
    raise ModuleNotFoundError("mpips.jax needs JAX: pip install 'mpips[jax]'", name="jax")

from mpips.collectives.communicator import expect_threads
from mpips.ending import end_job_on_error
from mpips.jax.cluster import register
from mpips.jax.collective import allgather, allreduce, alltoall, barrier, broadcast, reduce_scatter
from mpips.jax.pushpull import init, pull, pushpull

__all__ = [
    "allgather",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "init",
    "pull",
    "pushpull",
    "reduce_scatter",
]

end_job_on_error()
register()
expect_threads()
