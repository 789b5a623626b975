"""Where labs are found: not where another user can put one, who would have root enter namespaces of his making."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.strangers import STRANGER, needs_root, stranger

pytest.importorskip("pyroute2")
client = pytest.importorskip("launch.lab.client")

ROOT = Path(__file__).resolve().parents[4]
PRETENDER = r"""
with socket.socket(socket.AF_UNIX) as listener:
    listener.bind("\0mpips-lab-0-pretended")
    listener.listen()
    print("listens", flush=True)
    while True:
        line, _ = listener.accept()
        with line:
            if line.makefile().readline():
                line.sendall(b'{"hosts": ["h0"], "dead": [], "topology": "star:1"}\n')
"""


@needs_root
def test_a_socket_of_another_user_is_no_lab() -> None:
    process = stranger(PRETENDER)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "listens\n"
        assert "pretended" not in client.list_labs()
        with pytest.raises(client.LabError, match="no lab named 'pretended' is up"):
            client.host_command("pretended", "launcher", ["id"])
        with pytest.raises(client.LabError, match="no lab named 'pretended' is up"):
            client.job_command("pretended", 1, ["id"])
    finally:
        process.kill()
        process.communicate()


@needs_root
@pytest.mark.parametrize(
    ("planted", "words", "said"),
    [
        (f"mkdir -m 700 /run/mpips && chown {STRANGER} /run/mpips", "exec launcher -- id", f"to user {STRANGER}, not"),
        ("mkdir -m 777 /run/mpips && chmod 777 /run/mpips", "list", "is open to other users"),
        ("mkdir -m 700 /run/other && ln -s /run/other /run/mpips", "down --all", "cannot be had (Not a directory)"),
    ],
)
def test_a_folder_that_another_user_may_be_behind_is_refused(planted: str, words: str, said: str) -> None:
    own_run = ["unshare", "--mount", "sh", "-c", f"mount -t tmpfs none /run && {planted} && exec \"$@\"", "sh"]
    if subprocess.run([*own_run[:4], "mount -t tmpfs none /run"], capture_output=True, check=False).returncode:
        pytest.skip("no mount namespace can be made here")
    command = [*own_run, sys.executable, "-m", "launch.lab", *words.split()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("Error: ")
    assert said in done.stderr
