"""The settings in which each MPI library is measured: those that can change the speed of a collective on one node.

A setting is a set of environment variables for a job. Most settings choose an algorithm that the library does not
choose by default.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

# mpi4py asks for MPI_THREAD_MULTIPLE, with which some algorithms refuse to run; this asks for less.
SERIALIZED = {"MPI4PY_RC_THREAD_LEVEL": "serialized"}
# names under which Open MPI and MPICH know the collectives that our calls are compared with
CALLS = {
    "allreduce": ("allreduce",),
    "reduce_scatter": ("reduce_scatter", "reduce_scatter_block"),
    "allgather": ("allgather", "allgatherv"),
    "broadcast": ("bcast",),
}
COLLECTIVES = tuple(CALLS)

# collective -> the algorithms of Open MPI's component `tuned`
TUNED = {
    # in this order: recursive_doubling, ring, segmented_ring, rabenseifner
    "allreduce": ("3", "4", "5", "6"),
    "reduce_scatter": ("recursive_halving", "ring", "butterfly"),
    "allgather": ("bruck", "recursive_doubling", "ring", "neighbor", "sparbit"),
    "broadcast": ("pipeline", "binomial", "knomial", "scatter_allgather", "scatter_allgather_ring"),
}
# (call, algorithm) that this component does not have; its default then runs
NOT_TUNED = (("reduce_scatter_block", "ring"), ("allgatherv", "recursive_doubling"))
# the collectives of Open MPI's component `sm`
SM = ("allreduce", "broadcast")
SM_FIRST = {**SERIALIZED, "OMPI_MCA_coll_sm_priority": "100"}
UCX = {
    "OMPI_MCA_pml": "ucx",
    "OMPI_MCA_opal_common_ucx_tls": "any",
    "OMPI_MCA_opal_common_ucx_devices": "any",
    "UCX_TLS": "sm,self",
}

# collective -> the algorithms of MPICH that send messages
BY_MESSAGES = {
    "allreduce": (),
    "reduce_scatter": ("pairwise", "recursive_doubling", "recursive_halving"),
    "allgather": ("brucks", "recursive_doubling", "ring"),
    "broadcast": ("binomial", "scatter_ring_allgather", "pipelined_tree"),
}
# the collectives for which MPICH has algorithms in shared memory. The size of their cells is a setting.
IN_CELLS = ("allreduce", "broadcast")
CELLS = {"cells of 256 KiB": "262144", "cells of 1 MiB": "1048576"}
# Ranks wait for a cell without yielding their core. If ranks share cores, a call of 64 MiB would take many seconds.
LONGEST_IN_CELLS = 256 << 10

# presets of Intel MPI's allreduce that use shared memory
ADJUST = ("10", "11", "12")


class Setting(NamedTuple):
    """A setting in which an MPI library is measured: the environment variables of its jobs."""

    name: str
    variables: Mapping[str, str]
    # The largest vector in bytes to measure if ranks share cores. None means any size.
    longest_on_shared_cores: int | None = None


def settings(flavour: str, collective: str) -> list[Setting]:
    """Return the settings of an MPI library that affect a collective.

    Args:
        flavour: "openmpi", "mpich", or any other MPI.
        collective: One of `COLLECTIVES`.
    """
    special = {"openmpi": _openmpi, "mpich": _mpich, "intel": _intel}.get(flavour, _default)
    return [Setting("as mpi4py starts it", {}), *special(collective)]


def _default(_: str) -> Iterator[Setting]:
    yield Setting("default", SERIALIZED)


def _openmpi(collective: str) -> Iterator[Setting]:
    yield Setting("default", SERIALIZED)
    if collective in SM:
        yield Setting("coll/sm, 8 KiB", SM_FIRST)
        yield Setting("coll/sm, 64 KiB", {**SM_FIRST, "OMPI_MCA_coll_sm_fragment_size": "65536"})
    for algorithm in TUNED[collective]:
        chosen = {
            f"OMPI_MCA_coll_tuned_{call}_algorithm": algorithm
            for call in CALLS[collective]
            if (call, algorithm) not in NOT_TUNED
        }
        yield Setting(f"tuned {algorithm}", {**SERIALIZED, "OMPI_MCA_coll_tuned_use_dynamic_rules": "1", **chosen})
    yield Setting("UCX", {**SERIALIZED, **UCX})


def _mpich(collective: str) -> Iterator[Setting]:
    (call, *_) = CALLS[collective]
    by_messages = dict(SERIALIZED)
    longest = LONGEST_IN_CELLS if collective in IN_CELLS else None
    yield Setting("default", SERIALIZED, longest)
    if collective in IN_CELLS:
        by_messages[f"MPIR_CVAR_{call.upper()}_POSIX_INTRA_ALGORITHM"] = "mpir"
        yield Setting("mpir", by_messages)
        for name, size in CELLS.items():
            cells = {f"MPIR_CVAR_{kind}_INTRANODE_BUFFER_TOTAL_SIZE": size for kind in ("REDUCE", "BCAST")}
            yield Setting(name, {**SERIALIZED, **cells}, longest)
    for algorithm in BY_MESSAGES[collective]:
        chosen = {f"MPIR_CVAR_{call.upper()}_INTRA_ALGORITHM": algorithm for call in CALLS[collective]}
        yield Setting(algorithm, {**by_messages, **chosen})


def _intel(collective: str) -> Iterator[Setting]:
    yield Setting("default", SERIALIZED)
    if collective == "allreduce":
        for number in ADJUST:
            yield Setting(f"adjust {number}", {**SERIALIZED, "I_MPI_ADJUST_ALLREDUCE": number})
