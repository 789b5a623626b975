"""What deaths mean for a job whose other ranks go on: when it ends, with which code, and what is said."""

from __future__ import annotations

import math
import signal
from collections.abc import Iterator

import pytest

from launch.running import verdict
from launch.running.presence import Death, Presence, Replacement
from launch.running.verdict import MpirunEnd, OrdinaryVerdict, SurvivingVerdict

ROLES = ("worker", "worker", "server", "spare")
KILLED = int(signal.SIGKILL)


@pytest.fixture
def presence() -> Iterator[Presence]:
    presence = Presence(len(ROLES), survives=True)
    presence.started = True
    yield presence
    presence.close()


def of(presence: Presence) -> SurvivingVerdict:
    return SurvivingVerdict(presence, ROLES, spares=1)


def dies(presence: Presence, *ranks: int) -> None:
    for rank in ranks:
        presence.deaths.append(Death(rank, KILLED))
        presence._ended.add(rank)


def leaves(presence: Presence, *ranks: int) -> None:
    presence.ended_well += len(ranks)
    presence._ended.update(ranks)


def test_a_death_is_told_once_and_the_job_goes_on(presence: Presence) -> None:
    of_job = of(presence)
    dies(presence, 2)
    assert list(of_job.news()) == [("death seen", "rank 2 (server) was ended by SIGKILL; the others go on")]
    assert list(of_job.news()) == []
    assert of_job.end_time(1.0) == math.inf


def test_a_spare_that_takes_a_place_is_told_with_its_step_and_how_many_are_left(presence: Presence) -> None:
    of_job = verdict.SurvivingVerdict(presence, ["worker", "server", "worker", "spare", "spare"], 2)
    dies(presence, 0)
    assert list(of_job.news()) == [("death seen", "rank 0 (worker) was ended by SIGKILL; the others go on")]
    presence.replacements.append(Replacement(3, "worker", 12))
    assert list(of_job.news()) == [
        ("place taken", "rank 3 (spare) has become a worker, from step 12 on; spares left: 1")
    ]
    presence.replacements.append(Replacement(4, "server", -1))
    dies(presence, 1)
    said = [
        "rank 1 (server) was ended by SIGKILL; no spare is left; the others go on",
        "rank 4 (spare) has become a server; spares left: 0",
    ]
    assert [sentence for _, sentence in of_job.news()] == said
    assert list(of_job.news()) == []


def test_a_spare_that_has_got_a_role_is_named_by_it(presence: Presence) -> None:
    presence.deaths.append(Death(3, KILLED, "server"))
    said = "rank 3 (server) was ended by SIGKILL; no spare is left; the others go on"
    assert list(of(presence).news()) == [("death seen", said)]


def test_the_code_is_0_where_all_that_were_left_ended_well(presence: Presence) -> None:
    dies(presence, 1)
    leaves(presence, 0, 2, 3)
    assert of(presence).code(MpirunEnd(137)) == 0
    assert of(presence).sentence(MpirunEnd(137)) == ""


def test_the_code_is_that_of_a_failure_after_a_death(presence: Presence) -> None:
    dies(presence, 1)
    presence.code = 3
    assert of(presence).code(MpirunEnd(1)) == 3
    assert of(presence).end_time(1.0) == 1.0 + verdict.AFTER_A_FAILURE
    presence.failed = True
    assert of(presence).end_time(1.0) == 1.0 + verdict.AFTER_THE_LAST


@pytest.mark.parametrize("left_well, code", [((), 137), ((0,), 0)])
def test_a_job_in_which_only_spares_wait_ends(presence: Presence, left_well: tuple[int, ...], code: int) -> None:
    of_job = of(presence)
    leaves(presence, *left_well)
    dies(presence, *({0, 1, 2} - set(left_well)))
    assert of_job.end_time(5.0) == 5.0 + verdict.AFTER_THE_LAST
    assert of_job.end_time(6.0) == 5.0 + verdict.AFTER_THE_LAST
    end = MpirunEnd(-signal.SIGKILL, ended_for_ranks=True)
    assert of_job.code(end) == code
    assert of_job.sentence(end) == ("" if left_well else "no working rank is left: the job has ended")
    assert "the others go on" not in str(list(of_job.news()))


def test_no_rank_begins_without_one_that_died_before_mpi_had_started(presence: Presence) -> None:
    presence.started = False
    dies(presence, 1)
    assert of(presence).end_time(5.0) == 5.0 + verdict.AFTER_THE_LAST
    assert of(presence).sentence(MpirunEnd(15, ended_for_ranks=True)) == "MPI had not started: the job has ended"


def test_a_killed_mpirun_is_a_failure(presence: Presence) -> None:
    dies(presence, 0, 1, 2, 3)
    assert of(presence).code(MpirunEnd(-signal.SIGKILL)) == 137
    assert of(presence).sentence(MpirunEnd(-signal.SIGKILL)) == "mpirun was ended by SIGKILL: the job has ended"


def test_an_interrupt_is_one_though_ranks_had_died(presence: Presence) -> None:
    dies(presence, 1)
    assert of(presence).code(MpirunEnd(0, signal=signal.SIGINT)) == 130


def test_where_ranks_are_on_other_hosts_mpirun_knows() -> None:
    presence = Presence(2, survives=True)
    dies(presence, 0, 1)
    assert of(presence).end_time(1.0) == math.inf
    assert of(presence).code(MpirunEnd(0)) == 0
    presence.close()


@pytest.mark.parametrize("well, code, death", [(0, 1, "mpirun has lost a host"), (1, 0, "")])
def test_a_lost_host_ends_the_job_unless_one_here_ended_well(well: int, code: int, death: str) -> None:
    presence = Presence(1, survives=True)
    leaves(presence, *range(well))
    end = MpirunEnd(0, lost_host=True)
    assert (of(presence).code(end), of(presence).death(end)) == (code, death)
    assert of(presence).sentence(end) == (f"{death}: the job has ended" if death else "")
    presence.close()


def test_a_lost_host_comes_before_the_ranks_that_mpirun_then_ends() -> None:
    presence = Presence(1)
    dies(presence, 0)
    end = MpirunEnd(0, lost_host=True)
    assert (OrdinaryVerdict(presence, ROLES).code(end), OrdinaryVerdict(presence, ROLES).death(end)) == (
        1,
        verdict.LOST,
    )
    presence.close()


@pytest.mark.parametrize(
    "status, code, said",
    [
        (signal.SIGKILL, 9, "was ended by SIGKILL"),
        (9 << 8, 9, "left with exit code 9"),
        (9 << 8, 137, "left with exit code 9"),
        (None, 137, "was ended by SIGKILL"),
        (None, 9, "ended without a word"),
        (None, 15, "ended without a word"),
    ],
)
def test_what_is_said_of_a_death_is_sure(presence: Presence, status: int | None, code: int, said: str) -> None:
    presence.deaths.append(Death(1, status))
    assert OrdinaryVerdict(presence, ROLES).sentence(MpirunEnd(code)) == f"rank 1 (worker) {said}: the job has ended"
