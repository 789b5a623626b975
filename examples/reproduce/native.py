"""The MPI's own allreduce for comparison: as it comes, and with each algorithm that its user can force on it.

A variant's variables choose the algorithm of the blocking and of the non-blocking call; `schedule` sends the same
messages, and by it a variant's time is predicted.
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
    """A way to let the MPI do it; `blocking` and `immediate` name what MPI_Allreduce and MPI_Iallreduce send, for
    `schedule`."""

    name: str
    variables: dict[str, str]
    blocking: str
    immediate: str


def schedule(name: str, p: int) -> Schedule:
    """The schedule of a variant over p ranks: an algorithm of the catalogue, or Rabenseifner's as MPIs fold it."""
    if name in (BY_HALVES, WHOLE):
        return rabenseifner.build(p, name.rpartition(" ")[2])
    return catalog.build("allreduce", name, p)


DEFAULT = "as it comes"
OPEN_MPI = (  # algorithm, its numbers in coll/tuned and coll/libnbc
    ("ring", "4", "1", "ring", "ring"),
    ("rabenseifner", "6", "3", BY_HALVES, BY_HALVES),
    ("recursive doubling", "3", "4", "recursive_doubling", "recursive_doubling"),
)
MPICH = (
    ("ring", "ring", "ring"),
    ("rabenseifner", "reduce_scatter_allgather", WHOLE),
    ("recursive doubling", "recursive_doubling", "recursive_doubling"),
)


def variants() -> list[Variant]:
    """Those of the MPI that `mpirun` belongs to, the default first.

    By default Open MPI 5 takes Rabenseifner's for MPI_Allreduce of large vectors between few ranks, and a binomial
    tree for MPI_Iallreduce in place; MPICH 5 takes Rabenseifner's for both.
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
