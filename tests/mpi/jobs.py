"""Jobs of `mpips run` that tests start."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.child import outside
from tests.mpi.sizes import JOB_LIMIT


def job(folder: Path, program: str, roles: str, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """`mpips run ROLES` of a program in this folder, with words of its own, to the end; as from a shell."""
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
    out, said = (text.replace("\0", "") for text in (done.stdout, done.stderr))  # Open MPI ends some lines by it
    return subprocess.CompletedProcess(done.args, done.returncode, out, said)
