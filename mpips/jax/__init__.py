"""JAX on mpips: collectives, and pushes and pulls of a store, on pytrees of arrays, inside and outside of `jit`.

    gradients = mpips.jax.allreduce(gradients)              # the mean over all ranks, leaf by leaf
    weights = mpips.jax.pushpull(kv, "w", gradients)        # after mpips.jax.init(kv, "w", weights)

Calls run in the order in which the program makes them, and every rank must make the same calls. On CPUs, with a version
of JAX that has `jax.ffi`, XLA passes its own buffers to mpips. Arrays above 32 KiB are then not copied, and collectives
work inside of `jax.grad`, `jax.vmap`, `lax.scan`, `lax.cond` and `jax.remat`. Otherwise calls are ordered callbacks,
which JAX can neither differentiate nor batch.

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
