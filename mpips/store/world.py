"""Tell from the environment why a process is alone in its world though a launcher started several. Pure.

Every launcher hands its processes what they need to find each other in variables of its own, and an MPI that does not
know those variables starts as a world of size 1, in silence: N processes then train N models.
"""

from __future__ import annotations

from collections.abc import Mapping

# What a launcher tells each process about the number of its processes.
OPEN_MPI = "OMPI_COMM_WORLD_SIZE"
HYDRA = "PMI_SIZE"
SLURM = "SLURM_STEP_NUM_TASKS"
JSRUN = "JSM_NAMESPACE_SIZE"
RANKS = ((OPEN_MPI, "OMPI_COMM_WORLD_RANK"), (HYDRA, "PMI_RANK"))
MPIRUN_SIGNS = (OPEN_MPI, "PRTE_LAUNCHED", "MPI_LOCALNRANKS")
# Variables by which a launcher makes a process a rank, by their beginnings. Settings, which children share, are none.
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
# The same of a rank among those of its own host.
LOCAL_RANKS = (("OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"), ("MPI_LOCALNRANKS", "MPI_LOCALRANKID"))
# What `mpips run`, and then the rank itself, has set of the variables by which torchrun tells a process its place:
# NAME=VALUE, with commas between them. So programs that ask these, as most that train by DDP do, run as under torchrun.
# Children inherit them, as there, but to mpips they say nothing of a child, nor of a job that it starts.
PLACE = "_MPIPS_PLACE"
RANK, SIZE, LOCAL_RANK, MASTER, PORT = "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"
# Before words of `python -m mpips` that are percent-encoded, as mpirun would take one of them for its own.
ENCODED = "--encoded"
# Ranks tell the `mpips run` of their machine, by a socket that this names, that they are there, and how they end.
PRESENCE = "_MPIPS_PRESENCE"
# Set where that `mpips run` hands its standard input to rank 0, over the same socket.
INPUT = "_MPIPS_INPUT"
PRESENT, STARTED, STEP, ROLE, GOODBYE, FAILING = b"present", b"started", b"step", b"role", b"goodbye", b"failing"
# What rank 0 says of a job that has ended well, to be said once all of it has.
REMARK = b"remark"

# The same where the launcher is on another host, and others have died: the one word that is said for all.
WELL_WITHOUT = b"mpips: the job has ended well without rank"
WATCHED = "_MPIPS_CHAOS"
"""Names, in the environment of a job that `mpips chaos` watches, the folder with the plan and the socket."""


def implementation(library: str) -> str:
    """`openmpi`, `mpich`, `intel` or `other`, from the text of MPI_Get_library_version."""
    text = library.lower()
    if "open mpi" in text:
        return "openmpi"
    if "intel" in text:
        return "intel"
    return "mpich" if "mpich" in text else "other"


def lost(environment: Mapping[str, str], library: str, size: int | None = None) -> str | None:
    """A sentence with cause and cure where the launcher promised several ranks and this one is alone; else None.

    `library` is MPI_Get_library_version's text. `size` is that of COMM_WORLD; None, before MPI_Init, tells only what is
    certain without it. Slurm: `srun --mpi=pmix` is what Open MPI understands, `--mpi=pmi2` what MPICH and Intel MPI do.
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
    """This process' rank and the size of the job, as an mpirun tells them before MPI has started; None without one."""
    for size, rank in RANKS:
        if size in environment and rank in environment:
            return _count(environment, rank), _count(environment, size)
    return None


def started_as(environment: Mapping[str, str]) -> tuple[int, int] | None:
    """Return this process' rank and the size of the job where any launcher has started several ranks; else None."""
    for size, rank in (*RANKS, (SLURM, "SLURM_PROCID"), (JSRUN, "JSM_NAMESPACE_RANK")):
        if rank in environment and _count(environment, size) > 1:
            return _count(environment, rank), _count(environment, size)
    return None


def variables_of_place(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that this rank has to set so that a program finds what torchrun sets; none without `PLACE`.

    What the user has set on the rank's host stays.
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
    """The environment without what `PLACE` says that mpips has set. What a program has changed since is its own."""
    ours = _read_place(environment)
    return {name: value for name, value in environment.items() if name != PLACE and ours.get(name) != value}


def write_place(variables: Mapping[str, str]) -> str:
    """The value of `PLACE` for these variables."""
    return ",".join(f"{name}={value}" for name, value in variables.items())


def _read_place(environment: Mapping[str, str]) -> dict[str, str]:
    return dict(part.partition("=")[::2] for part in environment.get(PLACE, "").split(",") if part)


def tells_rank(name: str) -> bool:
    """Return whether a launcher makes a process a rank by the variable of this name."""
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
