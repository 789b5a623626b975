"""Find out from the environment why a process is alone in its MPI world although a launcher started several.

Every launcher sets environment variables of its own, which tell the processes how to find each other. An MPI that does
not know these variables silently starts as a world of size 1, and N processes then train N models. This module does no
I/O: callers pass the environment.
"""

from __future__ import annotations

from collections.abc import Mapping

# variables in which launchers tell each process how many processes were started
OPEN_MPI = "OMPI_COMM_WORLD_SIZE"
HYDRA = "PMI_SIZE"
SLURM = "SLURM_STEP_NUM_TASKS"
JSRUN = "JSM_NAMESPACE_SIZE"
RANKS = ((OPEN_MPI, "OMPI_COMM_WORLD_RANK"), (HYDRA, "PMI_RANK"))
MPIRUN_SIGNS = (OPEN_MPI, "PRTE_LAUNCHED", "MPI_LOCALNRANKS")
# Prefixes of the variables that make a process a rank. `SETTINGS` lists exceptions, which child processes may inherit.
OF_RANK = (
    "PMIX_",
    "PMI_",
    "PMI2_",
    "OMPI_COMM_WORLD_",
    "OMPI_WORLD_",
    "OMPI_UNIVERSE_",
    "OMPI_NUM_APP_CTX",
    "OMPI_FIRST_RANKS",
    "OMPI_APP_CTX_",
    "OMPI_FILE_LOCATION",
    "OMPI_ARGV",
    "OMPI_COMMAND",
    "OMPI_TOOL_NAME",
    "OMPI_MCA_ess_",
    "OMPI_MCA_orte_",
    "OMPI_MCA_mpi_ft_enable",
    "PRTE_LAUNCHED",
    "MPI_LOCALNRANKS",
    "MPI_LOCALRANKID",
    "HYDI_",
)
SETTINGS = ("PMIX_MCA_", "PMIX_PREFIX")
# pairs of variables: the number of the job's ranks on this host, and this rank's number among these ranks
LOCAL_RANKS = (("OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"), ("MPI_LOCALNRANKS", "MPI_LOCALRANKID"))
# mpips sets the variables that torchrun would set, so that programs written for torchrun, such as most DDP programs,
# run unchanged. `mpips run` sets some of these variables, and the rank itself sets the rest. The variable PLACE lists
# all of them, as NAME=VALUE, separated by commas. Child processes inherit them, as under torchrun, but mpips does not
# mistake a child for the rank.
PLACE = "_MPIPS_PLACE"
RANK, SIZE, LOCAL_RANK, MASTER, PORT = "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"
# Precedes percent-encoded arguments of a `python -m mpips` line, which mpirun would otherwise take for its own options.
ENCODED = "--encoded"
# the variable that names a socket. Over it, ranks tell the `mpips run` of their machine that they have started, and how
# they end.
PRESENCE = "_MPIPS_PRESENCE"
# the variable that is set if `mpips run` passes its standard input to rank 0 over the socket of PRESENCE
INPUT = "_MPIPS_INPUT"
PRESENT, STARTED, STEP, ROLE, GOODBYE, FAILING = b"present", b"started", b"step", b"role", b"goodbye", b"failing"
# tag of a remark of rank 0 about a job that has succeeded; the remark is printed when all ranks have ended
REMARK = b"remark"

# Printed once for the whole job, by one rank, if the launcher is on another host and other ranks have died.
WELL_WITHOUT = b"mpips: the job has ended well without rank"
# the variable that names the folder of plan and socket, in a job that `mpips chaos` watches
WATCHED = "_MPIPS_CHAOS"


def implementation(library: str) -> str:
    """Return `openmpi`, `mpich`, `intel` or `other`. `library` is the text of MPI_Get_library_version."""
    text = library.lower()
    if "open mpi" in text:
        return "openmpi"
    if "intel" in text:
        return "intel"
    return "mpich" if "mpich" in text else "other"


def lost(environment: Mapping[str, str], library: str, size: int | None = None) -> str | None:
    """Return an error message if a launcher started several processes but this process is alone in its MPI world.

    Otherwise return None.

    For Slurm the cure depends on the MPI: Open MPI understands `srun --mpi=pmix`, MPICH and Intel MPI understand
    `--mpi=pmi2`.

    Args:
        library: The text of MPI_Get_library_version.
        size: The size of COMM_WORLD. None before MPI_Init. Then a message is returned only in cases that are certain
            without the size.
    """
    if size is not None and size > 1:
        return None
    mine = implementation(library)
    under_mpirun = any(name in environment for name in MPIRUN_SIGNS)
    heard = ("PMIX_NAMESPACE" if mine == "openmpi" else "PMI_FD") in environment
    if not under_mpirun and _count(environment, SLURM) > 1 and not (heard and size is None):
        return _alone(f"srun started {environment[SLURM]} processes", *_slurm(heard, mine))
    if _count(environment, OPEN_MPI) > 1 and mine != "openmpi":
        started = f"Open MPI's mpirun started {environment[OPEN_MPI]} processes"
        return _alone(started, *_foreign(library))
    if _count(environment, HYDRA) > 1 and mine == "openmpi":
        started = f"the mpiexec of MPICH or Intel MPI started {environment[HYDRA]} processes"
        return _alone(started, *_foreign(library))
    if _count(environment, JSRUN) > 1 and mine != "openmpi":
        return _alone(f"jsrun started {environment[JSRUN]} processes", *_foreign(library))
    return None


def launched_as(environment: Mapping[str, str]) -> tuple[int, int] | None:
    """Return (rank, size) from mpirun's variables, before MPI starts.

    Return None if mpirun did not start this process.
    """
    for size, rank in RANKS:
        if size in environment and rank in environment:
            return _count(environment, rank), _count(environment, size)
    return None


def started_as(environment: Mapping[str, str]) -> tuple[int, int] | None:
    """Return (rank, size) if any launcher has started several ranks, else None."""
    for size, rank in (*RANKS, (SLURM, "SLURM_PROCID"), (JSRUN, "JSM_NAMESPACE_RANK")):
        if rank in environment and _count(environment, size) > 1:
            return _count(environment, rank), _count(environment, size)
    return None


def variables_of_place(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that this rank must set so that a program finds all variables that torchrun sets.

    The result is empty if `environment` has no `PLACE`. Variables that the user has set on the rank's host are left as
    they are.
    """
    job, theirs = launched_as(environment), without_place(environment)
    if job is None or PLACE not in environment:
        return {}
    place = _read_place(environment) | {RANK: str(job[0]), SIZE: str(job[1])}
    for size, rank in LOCAL_RANKS:
        if size in environment and rank in environment:
            place |= {LOCAL_RANK: environment[rank], "LOCAL_WORLD_SIZE": environment[size]}
    place = {name: value for name, value in place.items() if name not in theirs}
    return {**place, PLACE: write_place(place)}


def without_place(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without the variables that mpips has set, unless a program has changed their values."""
    ours = _read_place(environment)
    return {name: value for name, value in environment.items() if name != PLACE and ours.get(name) != value}


def write_place(variables: Mapping[str, str]) -> str:
    """Encode variables as the value of `PLACE`."""
    return ",".join(f"{name}={value}" for name, value in variables.items())


def _read_place(environment: Mapping[str, str]) -> dict[str, str]:
    return dict(part.partition("=")[::2] for part in environment.get(PLACE, "").split(",") if part)


def tells_rank(name: str) -> bool:
    """True if a variable of this name makes a process a rank, so that a child process must not inherit it."""
    return name.startswith(OF_RANK) and not name.startswith(SETTINGS)


def _count(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name, "")
    return int(text) if text.isdigit() else 0


def _slurm(heard: bool, mine: str) -> tuple[str, str]:
    if mine == "openmpi":
        cause = "it found no way to join them" if heard else "srun gave it no PMIx server, which Open MPI needs"
        return cause, "start with `srun --mpi=pmix`, or with mpirun inside salloc or sbatch"
    return (
        "srun gave it no PMI-2, which MPICH needs",
        "start with `srun --mpi=pmi2`, or with mpiexec inside salloc or sbatch",
    )


def _foreign(library: str) -> tuple[str, str]:
    name = " ".join(library.strip().splitlines()[0].split(",")[0].split())
    return (
        f"mpi4py runs on another MPI here ({name}), which does not hear that launcher",
        "use the mpirun beside this Python, or install the mpi4py that belongs to that launcher",
    )


def _alone(started: str, cause: str, cure: str) -> str:
    return f"{started}, but each is alone in a world of size 1: {cause}; {cure}"
