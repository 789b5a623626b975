"""Start a job by `mpips run` from a test."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.child import outside
from tests.mpi.sizes import JOB_LIMIT


def job(folder: Path, program: str, roles: str, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a program by `mpips run`, as from a shell, and block until the job has ended.

    Args:
        folder: The folder to which the program is written, and in which the job runs.
        program: The text of the program.
        roles: Options of `mpips run`, such as "-w 2 -s 1".
        words: Arguments for the program.
        variables: Environment variables.
    """
    (folder / "program.py").write_text(program)
    command = [sys.executable, "-m", "launch.cli", "run", *roles.split(), "program.py", *words]
    done = subprocess.run(
        command,
        cwd=folder,
        env=outside() | variables,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=JOB_LIMIT,
        check=False,
    )
    # Open MPI writes NUL bytes.
    output, errors = (text.replace("\0", "") for text in (done.stdout, done.stderr))
    return subprocess.CompletedProcess(done.args, done.returncode, output, errors)
