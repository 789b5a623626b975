"""Jobs of `mpips run` that tests start from a script, outside the project's folder."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

from tests.child import outside
from tests.mpi.sizes import JOB_LIMIT


def start(tmp_path: Path, script: str, *words: str, bare: bool = False, group: bool = False) -> subprocess.Popen[str]:
    """`mpips run WORDS` of a script, outside the job that this test runs in and the folder of the project.

    `bare`: the command that it would run, without the runner of the script. `group`: in a process group of its own.
    """
    file = tmp_path / "script.py"
    file.write_text(script)
    command = [sys.executable, "-m", "launch.run", *words, str(file)]
    if bare:
        shown = subprocess.run([*command[:-1], "--dry-run", command[-1]], capture_output=True, text=True, env=outside())
        command = shlex.split(shown.stdout.replace(" -P -m mpips ", " "))
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, stdout=pipe, stderr=pipe, text=True, env=outside(), cwd=tmp_path, start_new_session=group
    )


def run(tmp_path: Path, script: str, *words: str, bare: bool = False) -> subprocess.CompletedProcess[str]:
    """The same, to its end."""
    process = start(tmp_path, script, *words, bare=bare)
    try:
        out, said = process.communicate(timeout=JOB_LIMIT)
    finally:
        process.kill()
    return subprocess.CompletedProcess(process.args, process.returncode, out, said)
