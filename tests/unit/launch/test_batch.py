"""Batch scripts have the shape that each scheduler reads. None of them runs here."""

from __future__ import annotations

import re
import shlex
import signal
import subprocess
import time
from pathlib import Path

import pytest

from launch.batch import BatchRequest, BatchRequestError, build_srun, write_lsf, write_pbs, write_slurm
from mpips import Options

OPTIONS = Options(servers=2, clients=2, workers=14, masters="all")
REQUEST = BatchRequest(
    "train",
    OPTIONS,
    ("train.py", "--note", "two words"),
    nodes=4,
    minutes=90,
    flavour="openmpi",
    queue="fast",
    account="lab1",
    cores_per_rank=3,
    gpus_per_node=2,
)
WRITERS = {"#SBATCH": write_slurm, "#BSUB": write_lsf, "#PBS": write_pbs}


@pytest.mark.parametrize("mark", WRITERS)
def test_shape(mark: str) -> None:
    text = WRITERS[mark](REQUEST)
    lines = text.splitlines()
    assert lines[0] == "#!/bin/bash"
    directives = [i for i, line in enumerate(lines) if line.startswith(mark)]
    assert directives == list(range(1, len(directives) + 1)), "directives after a command are not read"
    assert not re.search("None|True|False", text)
    assert subprocess.run(["bash", "-n"], input=text, text=True, check=False, timeout=180).returncode == 0
    assert shlex.split(lines[-1])[-3:] == ["train.py", "--note", "two words"]
    assert "export OMP_NUM_THREADS=3" in lines


@pytest.mark.parametrize(
    ("mark", "directives", "words"),
    [
        (
            "#SBATCH",
            "--nodes=4|--ntasks=16|--ntasks-per-node=4|--time=01:30:00|--partition=fast|--account=lab1",
            "export MPIPS_SERVERS=2|export MPIPS_WORKERS=14|export MPIPS_MASTERS=all",
        ),
        (
            "#BSUB",
            '-n 16|-R "span[ptile=4] affinity[core(3)]"|-W 1:30',
            '--hostfile "$LSB_DJOB_HOSTFILE"|--servers 2 --clients 2 --workers 14 --masters all',
        ),
        ("#PBS", "-l select=4:ncpus=12:mpiprocs=4:ngpus=2|-l walltime=01:30:00|-V", '--hostfile "$PBS_NODEFILE"'),
    ],
)
def test_room_and_roles_are_asked_for(mark: str, directives: str, words: str) -> None:
    text = WRITERS[mark](REQUEST)
    assert {f"{mark} {asked}" for asked in directives.split("|")} <= set(text.splitlines())
    assert all(word in text for word in words.split("|"))
    if mark == "#BSUB":  # hosts that are not set up for affinity get jobs of a core a rank
        assert '#BSUB -R "span[ptile=4]"\n' in write_lsf(REQUEST._replace(cores_per_rank=1))


@pytest.mark.parametrize(("flavour", "pmi"), [("openmpi", "pmix"), ("mpich", "pmi2"), ("intel", "pmi2")])
def test_srun_speaks_the_language_of_the_mpi(flavour: str, pmi: str) -> None:
    argv = build_srun(REQUEST._replace(flavour=flavour))
    assert argv[:2] == ["srun", f"--mpi={pmi}"]
    assert argv[-6:] == ["-P", "-m", "mpips", *REQUEST.script]


def test_intel_mpi_does_not_start_without_the_library_by_which_it_hears_srun() -> None:
    text = write_slurm(REQUEST._replace(flavour="intel"))
    guarded = text.replace(shlex.join(build_srun(REQUEST._replace(flavour="intel"))), "echo started")
    for library, code in (("", 1), ("/usr/lib/libpmi2.so", 0)):
        environment = {"I_MPI_PMI_LIBRARY": library} if library else {}
        done = subprocess.run(["bash"], input=guarded, env=environment, text=True, capture_output=True, timeout=180)
        assert (done.returncode != 0) == code, done.stderr
        assert ("libpmi2.so" in done.stderr) == code
    assert "I_MPI" not in write_slurm(REQUEST)


@pytest.mark.parametrize("bad", [{"nodes": 17}, {"name": "two words"}, {"queue": "a;b"}])
def test_refusals(bad: dict[str, object]) -> None:
    for write in WRITERS.values():
        with pytest.raises(BatchRequestError):
            write(REQUEST._replace(**bad))


SAVED = REQUEST._replace(
    options=Options(servers=2, workers=14, checkpoint="/my data/run", every=50), restarts=3, requeue=True
)


@pytest.mark.parametrize("mark", WRITERS)
def test_a_job_that_starts_again(mark: str) -> None:
    text = WRITERS[mark](SAVED)
    assert "--restarts 3 --checkpoint '/my data/run' --every 50 --hostfile" in text
    assert {"#SBATCH": "#SBATCH --requeue", "#BSUB": "#BSUB -r", "#PBS": "#PBS -r y"}[mark] in text.splitlines()
    assert subprocess.run(["bash", "-n"], input=text, text=True, check=False, timeout=180).returncode == 0
    for change in ({"restarts": 3}, {"requeue": True}):
        with pytest.raises(BatchRequestError, match="needs --checkpoint and --every"):
            WRITERS[mark](REQUEST._replace(**change))


@pytest.mark.parametrize("mark", WRITERS)
def test_spares_are_ranks_of_a_job_that_mpips_run_starts(mark: str) -> None:
    spared = REQUEST._replace(options=Options(servers=2, workers=14, spares=4))
    text = WRITERS[mark](spared)
    asked = {"#SBATCH": "--ntasks=20", "#BSUB": "-n 20", "#PBS": "-l select=4:ncpus=15:mpiprocs=5:ngpus=2"}
    assert f"{mark} {asked[mark]}" in text.splitlines()
    assert " --servers 2 --clients 1 --workers 14 --spares 4 " in text.splitlines()[-1]
    assert "srun" not in text
    assert ("#SBATCH --no-kill" in text) == (mark == "#SBATCH")
    assert "--spares 0 " in WRITERS[mark](spared._replace(options=Options(servers=2, workers=14, spares=0)))
    with pytest.raises(BatchRequestError, match=r"--spares 4 cannot be had with MPICH: .* use Open MPI with ULFM"):
        WRITERS[mark](spared._replace(flavour="mpich"))


@pytest.mark.slow
@pytest.mark.parametrize("restarts", [0, 3])
def test_slurm_asks_for_the_queue_before_the_limit(restarts: int, tmp_path: Path) -> None:
    """The script, with stand-ins that say what they are called with: a signal while the job runs, and none."""
    text = write_slurm(SAVED._replace(restarts=restarts))
    assert "#SBATCH --signal=B:USR1@60\n" in text
    assert ("#SBATCH --no-kill" in text) == (restarts > 0)
    for name, body in (
        ("srun", "echo srun > ran; sleep $LONG"),
        ("mpips", "cat hosts-7 > ran; sleep $LONG"),
        ("scontrol", "[ $1 = show ] && printf 'a\\nb\\n' || echo $* > asked"),
    ):
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "a,b"}
    for long, asked in (("2", True), ("0", False)):
        job = subprocess.Popen(["bash", "-c", text], env={**environment, "LONG": long}, cwd=tmp_path)
        deadline = time.monotonic() + 60
        while asked and not ((tmp_path / "ran").exists() and (tmp_path / "ran").read_text()):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        if asked:
            job.send_signal(signal.SIGUSR1)
        assert job.wait(60) == asked
        assert (tmp_path / "ran").read_text() == ("a slots=4\nb slots=4\n" if restarts else "srun\n")
        assert (tmp_path / "asked").exists() == asked
        (tmp_path / "ran").unlink()
        (tmp_path / "asked").unlink(missing_ok=True)
