"""The MPI's own allreduce for comparison: as it comes, and with each algorithm that its user can force on it.

A variant's variables choose the algorithm of the blocking and of the non-blocking call; `like` is the algorithm of our
catalogue that sends the same messages, by which a variant's time is predicted.
"""

from __future__ import annotations

from typing import NamedTuple

from launch.command import find


class Variant(NamedTuple):
    """A way to let the MPI do it; `blocking` and `immediate` name what MPI_Allreduce and MPI_Iallreduce are like."""

    name: str
    variables: dict[str, str]
    blocking: str | None
    immediate: str | None

    def like(self, p: int, blocking: bool = True) -> str | None:
        """The algorithm of our catalogue with the same messages between p ranks, if there is one: MPIs fold a number
        of ranks that is no power of two onto the next lower one, and ours take it by its factors."""
        found = self.blocking if blocking else self.immediate
        return None if found == "halving_doubling" and p & (p - 1) else found


DEFAULT = "as it comes"
OPEN_MPI = (  # algorithm, its numbers in coll/tuned and coll/libnbc
    ("ring", "4", "1", "ring", "ring"),
    ("rabenseifner", "6", "3", "halving_doubling", "halving_doubling"),
    ("recursive doubling", "3", "4", "recursive_doubling", "recursive_doubling"),
)
MPICH = (
    ("ring", "ring", "ring"),
    ("rabenseifner", "reduce_scatter_allgather", "halving_doubling"),
    ("recursive doubling", "recursive_doubling", "recursive_doubling"),
)


def variants() -> list[Variant]:
    """Those of the MPI that `mpirun` belongs to, the default first.

    By default Open MPI 5 takes Rabenseifner's for MPI_Allreduce of large vectors between 4 to 15 ranks, and a binomial
    tree for MPI_Iallreduce in place.
    """
    if find().flavour == "openmpi":
        found = [Variant(DEFAULT, {}, "halving_doubling", "binomial")]
        for name, tuned, libnbc, blocking, immediate in OPEN_MPI:
            variables = {
                "OMPI_MCA_coll_tuned_use_dynamic_rules": "1",
                "OMPI_MCA_coll_tuned_allreduce_algorithm": tuned,
                "OMPI_MCA_coll_libnbc_iallreduce_algorithm": libnbc,
            }
            found.append(Variant(name, variables, blocking, immediate))
        return found
    found = [Variant(DEFAULT, {}, None, None)]
    for name, word, like in MPICH:
        found.append(Variant(name, {"MPIR_CVAR_ALLREDUCE_INTRA_ALGORITHM": word}, like, None))
    return found
