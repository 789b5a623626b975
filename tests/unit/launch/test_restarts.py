"""`mpips run --restarts`: which ends are deaths, how often a job starts again, with which roles."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from launch import run
from launch.hosts import Host, HostError, read
from launch.mpirun import Flavour, Launcher, LauncherError, Machine
from launch.restarts import check, describe_death, find_answering_hosts, reduce_roles, run_with_restarts
from launch.running.process import JobEnd
from mpips.store.options import Options

ROOT = Path(__file__).parents[3]
OPTIONS = Options(workers=6, servers=2, checkpoint="/nowhere", every=5)
FINE, KILLED = JobEnd(0, 0, 0, "", ""), JobEnd(137, 137, 0, "it died", "rank 1 was ended by SIGKILL")


@pytest.mark.parametrize(
    ("ended", "remote", "flavour", "why"),
    [
        (KILLED, False, "openmpi", "rank 1 was ended by SIGKILL"),
        (JobEnd(1, 1, 0, "", ""), False, "mpich", ""),
        (JobEnd(3, 3, 0, "rank 1 left with exit code 3", ""), True, "openmpi", ""),
        (JobEnd(143, 143, signal.SIGTERM, "", "rank 1 ..."), True, "openmpi", ""),
        (JobEnd(137, 137, 0, "", ""), True, "openmpi", "a rank of another host was ended by signal 9"),
        (JobEnd(9, 9, 0, "", ""), True, "mpich", "a rank of another host was ended by signal 9"),
        (JobEnd(137, 137, 0, "", ""), False, "openmpi", ""),
        (JobEnd(255, 255, 0, "", ""), True, "intel", "mpirun has left with code 255, as after the death of a rank"),
        (JobEnd(255, 255, 0, "", ""), True, "mpich", ""),
        (JobEnd(14, 14, 0, "", ""), True, "openmpi", "mpirun has left with code 14, as after the death of a rank"),
        (JobEnd(14, 14, 0, "", ""), False, "openmpi", ""),
        (JobEnd(137, -9, 0, "", ""), False, "mpich", "mpirun was ended by signal 9"),
        (JobEnd(1, -11, 0, "", ""), False, "openmpi", ""),  # it crashed while it ended those that had an exception
        (JobEnd(1, 0, 0, "", "mpirun has lost a host"), True, "openmpi", "mpirun has lost a host"),
        (FINE, True, "intel", ""),
    ],
)
def test_which_ends_are_deaths(ended: JobEnd, remote: bool, flavour: Flavour, why: str) -> None:
    assert describe_death(ended, remote, flavour) == why


def play(
    ends: list[JobEnd], restarts: int, hosts: list[object] | None = None, options: Options = OPTIONS
) -> tuple[int, list[Options]]:
    """The exit code of a job that ends so, one end a start, and the options of its starts. `hosts`: what `fit_to_hosts`
    returns or raises, in turn."""
    starts: list[Options] = []

    def start(options: Options) -> JobEnd:
        starts.append(options)
        return ends[len(starts) - 1]

    def fit_to_hosts(wanted: Options) -> Options:
        assert wanted == options and hosts
        answer = hosts.pop(0)
        if isinstance(answer, Exception):
            raise answer
        assert isinstance(answer, Options)
        return answer

    return run_with_restarts(start, fit_to_hosts, options, restarts, hosts is not None, "openmpi"), starts


def test_a_job_starts_again_until_it_ends_well(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    options = Options(workers=2, checkpoint=str(tmp_path), every=5)
    (tmp_path / "store-00000040.safetensors").write_text("")
    assert play([KILLED, KILLED, FINE], 3, options=options) == (0, [options] * 3)
    assert capfd.readouterr().err.splitlines() == [
        f"mpips: rank 1 was ended by SIGKILL: the job starts again from step 40, restart {number} of 3"
        for number in (1, 2)
    ]


def test_not_more_often_than_asked(capfd: pytest.CaptureFixture[str]) -> None:
    code, starts = play([KILLED] * 3, 2)
    assert (code, len(starts)) == (137, 3)
    lines = capfd.readouterr().err.splitlines()
    assert "starts again from its beginning, restart 2 of 2" in lines[1]
    assert lines[2:] == ["it died"]


@pytest.mark.parametrize("end", [JobEnd(1, 1, 0, "", ""), JobEnd(130, 130, 2, "", "")])
def test_an_exception_or_our_signal_is_the_end(end: JobEnd) -> None:
    assert play([end], 9) == (end.code, [OPTIONS])


def test_fewer_roles_where_hosts_are_lost_and_all_when_they_are_back(capfd: pytest.CaptureFixture[str]) -> None:
    fewer = Options(workers=3, servers=2, checkpoint="/nowhere", every=5)
    silent = JobEnd(1, 1, 0, "", "")
    assert play([silent, KILLED, FINE], 5, [fewer, OPTIONS]) == (0, [OPTIONS, fewer, OPTIONS])
    first, second = capfd.readouterr().err.splitlines()
    assert first.startswith("mpips: a host does not answer: the job starts again")
    assert first.endswith(", with -w 3 -s 2 on the hosts that answer")
    assert second.endswith(", with -w 6 -s 2 on the hosts that answer")
    assert play([KILLED], 5, [LauncherError("no host answers")]) == (137, [OPTIONS])
    assert "mpips: the job cannot start again: no host answers" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("slots", "spares", "roles"),
    [
        ([4, 4], -1, (6, 2, -1)),
        ([4, None], -1, (6, 2, -1)),
        ([4, 2], 0, (4, 2, 0)),
        ([3], 0, (1, 2, 0)),
        ([2], 0, (1, 1, 0)),
        ([100], 0, (6, 2, 0)),
        ([11], 3, (6, 2, 3)),
        ([10], 3, (6, 2, 2)),
        ([8], 3, (6, 2, 0)),
        ([7], 3, (5, 2, 0)),
    ],
)
def test_spares_then_workers_then_servers_go(slots: list[int | None], spares: int, roles: tuple[int, int, int]) -> None:
    options = Options(workers=6, servers=2, spares=spares, every=5)
    found = reduce_roles(options, [Host(f"h{number}", count) for number, count in enumerate(slots)])
    assert (found.workers, found.servers, found.spares, found.every) == (*roles, 5)


def test_roles_that_do_not_fit() -> None:
    with pytest.raises(LauncherError, match="have 1 slots, and a worker and a server need 2"):
        reduce_roles(OPTIONS, [Host("a", 1)])
    with pytest.raises(LauncherError, match="no host answers"):
        reduce_roles(OPTIONS, [])
    alone = reduce_roles(Options(workers=5, clients=3), [Host("a", 2)])
    assert (alone.workers, alone.clients, alone.servers) == (2, 2, 0)


def test_hosts_that_answer(tmp_path: Path) -> None:
    file = tmp_path / "mpiexec"
    file.write_text(f"#!{sys.executable}\nimport sys\nsys.exit('gone:1' in sys.argv)\n")
    file.chmod(0o755)
    hosts = [Host("here", 3), Host("gone", 2), Host("localhost", 1)]
    found = find_answering_hosts(hosts, Launcher(str(file), "mpich", "5"), Machine(2))
    assert [host.name for host in found] == ["here", "localhost"]


# ---- the command


def call(*words: str) -> Result:
    return CliRunner().invoke(run.command, list(words))


def test_what_is_missing_is_said_before_ranks_start(mpirun: str, tmp_path: Path) -> None:
    words = ("-w", "2", "--mpirun", mpirun, "--dry-run")
    done = call(*words, "--restarts", "3", "--every", "5", "x.py")
    assert done.exit_code == 2 and "--restarts 3 needs --checkpoint" in done.output
    done = call(*words, "--restarts", "3", "--checkpoint", str(tmp_path), "x.py")
    assert done.exit_code == 2 and "--restarts 3 needs --every" in done.output
    done = call(*words, "--checkpoint", str(tmp_path), "x.py")
    assert done.exit_code == 2 and "--every 0: give both" in done.output
    done = call(*words[:-1], "--checkpoint", f"{mpirun}/x", "--every", "5", "--", "-c", "1")
    assert done.exit_code == 2 and "nothing can be written to that folder" in done.output


def test_folder_and_rounds_reach_the_ranks(mpirun: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = call("-w", "2", "--mpirun", mpirun, "--checkpoint", "Saved", "--every", "7", "--dry-run", "x.py")
    assert f"-genv MPIPS_CHECKPOINT {tmp_path}/Saved" in done.output
    assert "-genv MPIPS_EVERY 7" in done.output
    assert not (tmp_path / "Saved").exists()


def test_folder_with_both_options_alone(tmp_path: Path) -> None:
    check(Options(), 0)
    check(Options(checkpoint=str(tmp_path), every=3), 4)
    with pytest.raises(LauncherError, match="give both"):
        check(Options(every=3), 0)
    with pytest.raises(HostError):
        read(tmp_path / "none")


LOSES_A_HOST = """
import sys
from pathlib import Path
words, lost = " ".join(sys.argv), Path(__file__).with_name("lost")
if "--version" in words:
    print("HYDRA build details:\\n    Version: 4.2.1")
elif words.endswith("sleep 1"):
    sys.exit("-hosts b:1" in words)
else:
    print(words)
    first = not lost.exists()
    lost.touch()
    sys.exit(first)
"""


@pytest.mark.slow
def test_a_job_goes_on_without_a_host_that_is_lost(tmp_path: Path) -> None:
    file, hosts = tmp_path / "mpiexec", tmp_path / "hosts"
    file.write_text(f"#!{sys.executable}\n{LOSES_A_HOST}")
    file.chmod(0o755)
    hosts.write_text("a:3\nb:4\n")
    saves = ["--restarts", "1", "--checkpoint", str(tmp_path / "saved"), "--every", "5"]
    argv = [sys.executable, "-m", "launch.run", "-w", "5", "-s", "2", "--mpirun", str(file), "--hostfile", str(hosts)]
    done = subprocess.run(
        [*argv, *saves, "--", "-c", "1"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    before, after = done.stdout.splitlines()
    assert "-genv MPIPS_WORKERS 5" in before and "-hosts a:3,b:4" in before
    assert "-genv MPIPS_WORKERS 1" in after and "-genv MPIPS_SERVERS 2" in after and "-hosts a:3 -n 3" in after
    assert "mpips: a host does not answer: the job starts again from its beginning, restart 1 of 1" in done.stderr
    assert done.stderr.rstrip().endswith(", with -w 1 -s 2 on the hosts that answer")
