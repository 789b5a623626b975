"""The MPI library's own allreduce, for comparison: with its default algorithm, and with each that a user can choose.

Environment variables choose the algorithm of the blocking and the non-blocking call (`Variant`). `schedule` gives the
same messages as a schedule, from which the time of a variant is predicted.
"""

from __future__ import annotations

from typing import NamedTuple

from collectives.schedule import catalog
from collectives.schedule.model import Schedule
from examples.reproduce import rabenseifner
from launch import find

NATIVE = "MPI_Allreduce"
BY_HALVES, WHOLE = "rabenseifner, fold by halves", "rabenseifner, fold by whole"


class Variant(NamedTuple):
    """A choice of the MPI library's algorithms."""

    name: str
    # environment variables that choose it
    variables: dict[str, str]
    # names, for `schedule`, of what MPI_Allreduce and MPI_Iallreduce send
    blocking: str
    immediate: str


def schedule(name: str, p: int) -> Schedule:
    """Return the schedule over p ranks: of an algorithm of the catalogue, or Rabenseifner's as MPI libraries run it."""
    if name in (BY_HALVES, WHOLE):
        return rabenseifner.build(p, name.rpartition(" ")[2])
    return catalog.build("allreduce", name, p)


DEFAULT = "as it comes"
# (name, number in coll/tuned, number in coll/libnbc, blocking, immediate)
OPEN_MPI = (
    ("ring", "4", "1", "ring", "ring"),
    ("rabenseifner", "6", "3", BY_HALVES, BY_HALVES),
    ("recursive doubling", "3", "4", "recursive_doubling", "recursive_doubling"),
)
# (name, MPICH's name, blocking)
MPICH = (
    ("ring", "ring", "ring"),
    ("rabenseifner", "reduce_scatter_allgather", WHOLE),
    ("recursive doubling", "recursive_doubling", "recursive_doubling"),
)


def variants() -> list[Variant]:
    """Return the variants of the MPI library whose `mpirun` is found, the default first.

    By default Open MPI 5 runs Rabenseifner's algorithm in MPI_Allreduce of large vectors between few ranks, and a
    binomial tree in MPI_Iallreduce in place. MPICH 5 runs Rabenseifner's in both.
    """
    if find().flavour == "openmpi":
        found = [Variant(DEFAULT, {}, BY_HALVES, "binomial")]
        for name, tuned, libnbc, blocking, immediate in OPEN_MPI:
            variables = {
                "OMPI_MCA_coll_tuned_use_dynamic_rules": "1",
                "OMPI_MCA_coll_tuned_allreduce_algorithm": tuned,
                "OMPI_MCA_coll_libnbc_iallreduce_algorithm": libnbc,
            }
            found.append(Variant(name, variables, blocking, immediate))
        return found
    found = [Variant(DEFAULT, {}, WHOLE, WHOLE)]
    for name, word, like in MPICH:
        found.append(Variant(name, {"MPIR_CVAR_ALLREDUCE_INTRA_ALGORITHM": word}, like, WHOLE))
    return found
