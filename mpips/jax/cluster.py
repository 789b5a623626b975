"""Make `jax.distributed.initialize()` work without arguments under any MPI.

JAX recognizes Open MPI by a variable that Open MPI 5 does not set, and it does not recognize MPICH. So mpips adds
itself to JAX's list of cluster types, as the first entry. It must be the first, because under `mpirun` in a Slurm job,
Slurm's variables tell every rank that it is rank 0.
"""

from __future__ import annotations

import os
import socket
from contextlib import suppress

import numpy as np
from mpi4py import MPI

from mpips.address import find_address
from mpips.store.world import launched_as

WHO = "jax.distributed.initialize"


def register() -> None:
    """Let JAX take its list of processes from MPI. Local."""
    # If the internals of this version of JAX differ, nothing is registered, and `initialize()` still needs arguments.
    with suppress(ImportError, AttributeError):
        from jax._src.clusters import ClusterEnv

        class MpipsCluster(ClusterEnv):  # type: ignore[misc]
            """The processes of MPI's world. JAX calls the methods that communicate on all ranks."""

            name = "mpips"

            @classmethod
            def is_env_present(cls) -> bool:
                return MPI.COMM_WORLD.size > 1 or launched_as(os.environ) == (0, 1)

            @classmethod
            def get_coordinator_address(
                cls, timeout_secs: int | None = None, override_coordinator_port: str | None = None
            ) -> str:
                return f"{find_address(WHO)}:{override_coordinator_port or _free_port()}"

            @classmethod
            def get_process_count(cls) -> int:
                return MPI.COMM_WORLD.size

            @classmethod
            def get_process_id(cls) -> int:
                return MPI.COMM_WORLD.rank

            @classmethod
            def get_local_process_id(cls) -> int | None:
                node = MPI.COMM_WORLD.Split_type(MPI.COMM_TYPE_SHARED)
                rank = node.rank
                node.Free()
                return rank

        # A subclass of ClusterEnv appends itself to this list. JAX takes the first cluster type that is present.
        known = ClusterEnv._cluster_types
        known.insert(0, known.pop())


def _free_port() -> int:
    """Return a port that is free on rank 0's host, the same port on all ranks. Collective."""
    port = np.empty(1, np.int64)
    with socket.socket() as trial:
        trial.bind(("", 0))
        port[0] = trial.getsockname()[1]
        MPI.COMM_WORLD.Bcast(port)
    return int(port[0])
