"""A world of size 1 is told with its cause."""

from __future__ import annotations

import pytest

from mpips.store import world

OPEN_MPI = "Open MPI v5.0.11, package: Open MPI"
MPICH = "MPICH Version:      5.0.2\nMPICH Release date: x"
INTEL = "Intel(R) MPI Library 2021.18 for Linux* OS"


@pytest.mark.parametrize(
    ("environment", "library", "cure"),
    [
        ({"SLURM_STEP_NUM_TASKS": "4"}, OPEN_MPI, "srun --mpi=pmix"),
        ({"SLURM_STEP_NUM_TASKS": "4"}, MPICH, "srun --mpi=pmi2"),
        ({"SLURM_STEP_NUM_TASKS": "4"}, INTEL, "srun --mpi=pmi2"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, MPICH, "mpirun beside this Python"),
        ({"PMI_SIZE": "2", "MPI_LOCALNRANKS": "2"}, OPEN_MPI, "mpirun beside this Python"),
        ({"JSM_NAMESPACE_SIZE": "6"}, MPICH, "mpirun beside this Python"),
    ],
)
def test_cause_and_cure(environment: dict[str, str], library: str, cure: str) -> None:
    sentence = world.lost(environment, library, 1)
    assert sentence is not None
    assert cure in sentence
    assert "world of size 1" in sentence
    assert "\n" not in sentence
    assert world.lost(environment, library, 2) is None


@pytest.mark.parametrize(
    ("environment", "library"),
    [
        ({}, OPEN_MPI),
        ({"SLURM_STEP_NUM_TASKS": "1"}, OPEN_MPI),
        # Under mpirun inside an allocation, Slurm's step counts daemons, not ranks.
        ({"SLURM_STEP_NUM_TASKS": "4", "OMPI_COMM_WORLD_SIZE": "1", "PRTE_LAUNCHED": "1"}, OPEN_MPI),
        ({"OMPI_COMM_WORLD_SIZE": "1"}, MPICH),
        ({"PMI_SIZE": "1"}, OPEN_MPI),
        ({"PMI_SIZE": "not a number"}, OPEN_MPI),
    ],
)
def test_a_world_of_one_that_was_meant(environment: dict[str, str], library: str) -> None:
    assert world.lost(environment, library, 1) is None


@pytest.mark.parametrize(("library", "variable"), [(OPEN_MPI, "PMIX_NAMESPACE"), (MPICH, "PMI_FD")])
def test_before_mpi_init_only_what_is_certain(library: str, variable: str) -> None:
    step = {"SLURM_STEP_NUM_TASKS": "4"}
    assert world.lost(step, library) is not None
    assert world.lost({**step, variable: "x"}, library) is None
    assert world.lost({**step, variable: "x"}, library, size=1) is not None


def test_implementations() -> None:
    names = [world.implementation(text) for text in (OPEN_MPI, MPICH, INTEL, "x")]
    assert names == ["openmpi", "mpich", "intel", "other"]


def test_a_place_is_a_rank_s_own_and_not_its_children_s() -> None:
    started = {
        "OMPI_COMM_WORLD_RANK": "3",
        "OMPI_COMM_WORLD_SIZE": "4",
        "OMPI_COMM_WORLD_LOCAL_RANK": "1",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        "MASTER_PORT": "9",
        "A": "a",
    }
    assert world.variables_of_place(started) == {}  # nobody has asked for it
    asked = {**started, world.PLACE: world.write_place({"MASTER_ADDR": "n1", "MASTER_PORT": "7"})}
    place = world.variables_of_place(asked)
    assert {name: place[name] for name in place if name != world.PLACE} == {
        "MASTER_ADDR": "n1",
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
    }
    rank = {**asked, **place}
    assert world.without_place(rank) == started
    assert world.without_place({**rank, "RANK": "0"}) == {**started, "RANK": "0"}  # set by the program
    assert world.variables_of_place({world.PLACE: ""}) == {}  # no rank
