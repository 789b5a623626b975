"""`mpips run` and the `mpips` command as a user meets them, without starting MPI."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from launch import cli, run
from launch.command import Machine

HYDRA = "HYDRA build details:\n    Version: 4.2.1"


@pytest.fixture
def mpirun(tmp_path: Path) -> str:
    """A stand-in that answers `--version` as MPICH does and prints its arguments otherwise."""
    file = tmp_path / "mpiexec"
    answer = f"{HYDRA!r} if sys.argv[1:] == ['--version'] else ' '.join(sys.argv[1:])"
    file.write_text(f"#!{sys.executable}\nimport sys\nprint({answer})\n")
    file.chmod(0o755)
    return str(file)


def call(*words: str) -> Result:
    return CliRunner().invoke(run.command, list(words))


def test_dry_run_prints_the_whole_command(mpirun: str) -> None:
    done = call(
        "-s", "2", "-c", "2", "-w", "4", "--masters", "all", "--mpirun", mpirun, "--dry-run", "x.py", "--lr", "0.1"
    )
    assert done.exit_code == 0, done.output
    words = shlex.split(done.output)
    assert words[-5:] == ["-m", "mpips", "x.py", "--lr", "0.1"]
    assert words[words.index("-n") + 1] == "6"
    pairs = {words[i + 1]: words[i + 2] for i, word in enumerate(words) if word == "-genv"}
    roles = {"MPIPS_SERVERS": "2", "MPIPS_CLIENTS": "2", "MPIPS_WORKERS": "4", "MPIPS_MASTERS": "all"}
    assert roles.items() <= pairs.items()


def test_hostfile(mpirun: str, tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("a:2\nb:2\nc:1\n")
    words = ("-s", "1", "-w", "4", "--hostfile", str(hosts), "--mpirun", mpirun, "--dry-run", "x.py")
    assert "-hosts a:2,b:2,c:1" in call(*words).output
    hosts.write_text("a:2\nb:x\n")
    done = call(*words)
    assert done.exit_code != 0
    assert "line 2" in done.output


def test_clear_refusals(mpirun: str) -> None:
    done = call("-c", "5", "-w", "4", "--mpirun", mpirun, "x.py")
    assert done.exit_code != 0
    assert "clients=5" in done.output
    done = call("-w", "4", "--mpirun", mpirun, "no-such-script.py")
    assert done.exit_code != 0
    assert "no-such-script.py" in done.output
    assert "Traceback" not in done.output
    assert call("-w", "0", "x.py").exit_code != 0


def test_threads_share_the_cores_unless_the_user_says() -> None:
    assert run.threads(3, Machine(8), {}) == {"OMP_NUM_THREADS": "2"}
    assert run.threads(9, Machine(8), {}) == {"OMP_NUM_THREADS": "1"}
    assert run.threads(3, Machine(8), {"MKL_NUM_THREADS": "4"}) == {"MKL_NUM_THREADS": "4"}


def test_help_names_every_command_and_imports_none() -> None:
    code = """
import atexit, sys
import launch.cli
atexit.register(lambda: print([m for m in sys.modules if m.startswith(("collectives", "numpy"))]))
sys.argv[1:] = ["--help"]
launch.cli.main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=50)
    assert all(name in done.stdout for name in cli.COMMANDS)
    assert done.stdout.endswith("[]\n")


def test_an_unknown_command() -> None:
    done = CliRunner().invoke(cli.main, ["fly"])
    assert done.exit_code == 2
    assert "fly" in done.output


def test_ranks_start_the_module_under_mpirun(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[int, list[str]]] = []

    def start(ranks: int, script: list[str]) -> None:
        started.append((ranks, script))
        raise SystemExit(0)

    monkeypatch.setattr(cli, "start", start)
    CliRunner().invoke(cli.main, ["bench", "kvstore", "--ranks", "3", "--sizes", "1KiB"])
    CliRunner().invoke(cli.main, ["bench", "allreduce", "--ranks=2"])
    assert started == [
        (3, ["-m", "mpips.bench", "--sizes", "1KiB"]),
        (2, ["-m", "collectives.bench", "allreduce"]),
    ]
    assert "--ranks" in CliRunner().invoke(cli.main, ["bench", "allreduce", "--ranks", "two"]).output


def test_words_are_forwarded_untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    got: list[str] = []

    class Module:
        class command:
            @staticmethod
            def main(words: list[str], prog_name: str) -> None:
                got.extend([prog_name, *words])

    monkeypatch.setattr(cli.importlib, "import_module", lambda name: Module)
    CliRunner().invoke(cli.main, ["lab", "run", "-n", "2", "--", "python", "x.py", "--ranks", "3", "--help"])
    assert got == ["mpips lab", "run", "-n", "2", "--", "python", "x.py", "--ranks", "3", "--help"]
