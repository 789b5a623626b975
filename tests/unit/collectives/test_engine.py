"""The engine of compiled kernels, in processes of their own: caches, locks and forks; else NumPy serves."""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from collectives.kernels import engine
from tests.child import outside

pytest.importorskip("numba")
LIMIT = 60  # seconds that no process may take; each needs about one
BEGIN = r"""
import logging, os, sys, threading, time
from pathlib import Path
logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s", stream=sys.stdout)
logging.getLogger("mpips").setLevel(logging.INFO)
import numpy as np
from collectives.kernels import engine
folder = Path(os.environ["MPIPS_KERNELS_FOLDER"])
text = "def kernel(a):\n    for i in range(a.size):\n        a[i] = a[i] + {}\n"
one = engine.kernel("one", text.format(1), ["float32[]"])
def say(kernel):
    a = np.ones(3, np.float32)
    if kernel.call: kernel.call(a)
    print("sums", a.sum(), kernel.failure, flush=True)
"""
USE = "engine.load_all(); say(one)"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "kernels"


def start(
    folder: Path, program: str = USE, before: str = "", prefix: tuple[str, ...] = (), **variables: str
) -> subprocess.Popen[str]:
    """Start a process that asks for a kernel, and goes on with a program."""
    return subprocess.Popen(
        [*prefix, sys.executable, "-c", before + BEGIN + program],
        env=outside() | {"MPIPS_KERNELS": "numba", "MPIPS_KERNELS_FOLDER": str(folder)} | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def end(process: subprocess.Popen[str]) -> list[str]:
    """Return what a process said that has ended well."""
    try:
        said, _ = process.communicate(timeout=LIMIT)
    finally:
        process.kill()
    assert process.returncode == 0, said
    return said.splitlines()


def run(folder: Path, program: str = USE, before: str = "", **variables: str) -> list[str]:
    return end(start(folder, program, before, **variables))


def there(said: list[str]) -> bool:
    """Whether a kernel was compiled or read, and gave its result."""
    return "sums 6.0 " in said


def kept(said: list[str]) -> int:
    """How many kernels a process has written."""
    return sum("is kept in" in line for line in said)


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the kernel in it."""
    folder = tmp_path_factory.mktemp("cache") / "mpips" / "kernels"
    said = run(folder)
    assert there(said)
    assert kept(said) == 1
    return folder


def copied(warm: Path, folder: Path) -> Path:
    """Copy the folder; return the kernel in it."""
    shutil.copytree(warm, folder)
    (kernel,) = folder.glob("*.kernel")
    return kernel


@pytest.mark.slow
def test_what_is_kept_is_not_compiled_again(warm: Path) -> None:
    (kernel,) = warm.glob("*.kernel")
    before = kernel.stat().st_mtime_ns
    said = run(warm)
    assert there(said)
    assert kept(said) == 0
    assert kernel.stat().st_mtime_ns == before
    assert warm.stat().st_mode & 0o777 == 0o700


@pytest.mark.slow
def test_standard_output_is_the_users_while_a_kernel_is_compiled_and_after(folder: Path) -> None:
    """Numba's own way of colouring messages takes it and writes to it."""
    pytest.importorskip("colorama")
    program = """
ours, two = sys.stdout, engine.kernel("two", text.format("a[0]"), ["const float32[]"])
loading = threading.Thread(target=engine.load_all)
loading.start()
while loading.is_alive(): assert sys.stdout is ours
print("fails" if two.failure else "")
"""
    said = run(folder, program)
    assert said[-1] == "fails"
    assert "\x1b" not in "".join(said)


@pytest.mark.slow
def test_damaged_files_are_compiled_anew(folder: Path) -> None:
    program = """
others = [engine.kernel(f"of {i}", text.format(i), ["float32[]"]) for i in (2, 3, 4)]
engine.load_all()
for kernel in (one, *others): say(kernel)
"""
    sums = [f"sums {3 + 3 * i}.0 " for i in (1, 2, 3, 4)]
    said = run(folder, program)
    assert [line for line in said if line.startswith("sums")] == sums
    whole = [file.read_bytes() for file in folder.glob("*.kernel")]
    flipped = bytearray(whole[0])
    flipped[5000] ^= 1
    damaged = [b"", whole[1][:5000], flipped, hashlib.sha256(b"no pickle").digest() + b"no pickle"]
    for file, data in zip(folder.glob("*.kernel"), damaged, strict=True):
        file.write_bytes(data)
    said = run(folder, program)
    assert [line for line in said if line.startswith("sums")] == sums
    assert sum("compiled anew" in line for line in said) == kept(said) == 4


def read_only(folder: Path) -> tuple[str, ...]:
    """Return words of a command in which a folder cannot be written to; root needs a mount of its own for that."""
    if os.getuid():
        folder.chmod(0o500)
        return ()
    mount = f"mount --bind {folder} {folder} && mount -o remount,ro,bind {folder}"
    words = ("unshare", "--mount", "sh", "-c", f'{mount} && exec "$@"', "sh")
    if not shutil.which("unshare") or subprocess.run([*words, "true"], capture_output=True, timeout=LIMIT).returncode:
        pytest.skip("root may write everywhere, and cannot mount here")
    return words


@pytest.mark.slow
@pytest.mark.parametrize("full", [True, False], ids=["with the kernel", "empty"])
def test_a_read_only_folder_is_read(full: bool, warm: Path, folder: Path) -> None:
    if full:
        copied(warm, folder)
    else:
        folder.mkdir()
    said = end(start(folder, prefix=read_only(folder)))
    assert there(said)
    assert kept(said) == 0
    assert sum("is not kept" in line for line in said) == (not full)


@pytest.mark.slow
def test_a_folder_without_room_is_none(folder: Path) -> None:
    program = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n" + USE
    said = run(folder, program)
    assert there(said)
    assert [line for line in said if "is not kept" in line] == [
        "INFO kernel one is not kept: OSError: [Errno 27] File too large"
    ]
    assert [file.suffix for file in folder.iterdir()] == [".lock"]


@pytest.mark.slow
def test_a_folder_that_others_can_write_to_is_refused(warm: Path, folder: Path) -> None:
    copied(warm, folder)
    folder.chmod(0o777)
    said = run(folder)
    assert there(said)
    assert [line for line in said if line.startswith("WARNING")] == [
        f"WARNING compiled kernels are not kept: others can write to {folder}: chmod go-w it, or name another folder "
        "in MPIPS_KERNELS_FOLDER"
    ]


def test_a_folder_that_cannot_be_made_is_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.touch()
    monkeypatch.setenv(engine.FOLDER_VARIABLE, str(folder))
    assert engine.cache_folder() == (None, f"{folder}: File exists")
    monkeypatch.delenv(engine.FOLDER_VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    assert engine.cache_folder() == (None, f"{folder}/mpips/kernels: Not a directory")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "nowhere")
    assert engine.cache_folder() == (None, "this user has no home folder: name a folder in MPIPS_KERNELS_FOLDER")


@pytest.mark.slow
def test_of_many_processes_one_compiles(folder: Path) -> None:
    said = [end(process) for process in [start(folder) for _ in range(8)]]
    assert all(map(there, said))
    assert sum(map(kept, said)) == 1


@pytest.mark.slow
def test_after_a_kill_in_the_middle_the_next_one_compiles(folder: Path) -> None:
    killed = start(folder)
    until = time.monotonic() + LIMIT
    while not list(folder.glob("*.lock")) and time.monotonic() < until:
        time.sleep(0.001)
    killed.send_signal(signal.SIGKILL)
    killed.communicate(timeout=LIMIT)
    assert killed.returncode == -signal.SIGKILL
    said = run(folder)
    assert there(said)
    assert kept(said) == 1


FORK = """
loading = threading.Thread(target=engine.load_all)
loading.start()
while "numba" not in sys.modules: time.sleep(0.001)
if not os.fork():
    import numba
    say(one)
    numba.njit(lambda x: x + 1)(1)
    os._exit(7)
print(os.waitstatus_to_exitcode(os.wait()[1]))
"""


@pytest.mark.slow
def test_a_fork_waits_for_the_kernel_that_another_thread_loads(folder: Path) -> None:
    said = run(folder, FORK)
    assert said.count("sums 6.0 ") == 1
    assert said[-1] == "7"


@pytest.mark.slow
def test_a_fork_keeps_its_kernels(warm: Path) -> None:
    said = run(warm, USE + "\nif not os.fork(): say(one); os._exit(0)\nos.wait()")
    assert said.count("sums 6.0 ") == 2


BROKEN = "raise ImportError('Numba needs\\n NumPy 1.0')"
MISSING = "using NumPy instead of compiled kernels: "


@pytest.mark.slow
@pytest.mark.parametrize(
    ("numba", "variables", "warned"),
    [
        ("", {"NUMBA_DISABLE_JIT": "1"}, f"WARNING {MISSING}NUMBA_DISABLE_JIT is set"),
        (BROKEN, {}, f"WARNING {MISSING}Numba cannot be loaded: ImportError: Numba needs NumPy 1.0"),
        (BROKEN, {"MPIPS_KERNELS": "numpy"}, ""),
        (
            BROKEN,
            {"MPIPS_KERNELS": "fast"},
            f"WARNING {MISSING}MPIPS_KERNELS='fast' is unknown: give numba or numpy, or leave it unset",
        ),
    ],
    ids=["switched off", "broken", "not wanted", "a wrong word"],
)
def test_without_numba_numpy_serves(numba: str, variables: dict[str, str], warned: str, folder: Path) -> None:
    program = 'two = engine.kernel("two", text.format(2), ["float32[]"])\nengine.load_all(); say(one); say(two)'
    if numba:
        (folder / "numba").mkdir(parents=True)
        (folder / "numba" / "__init__.py").write_text(numba)
        variables["PYTHONPATH"] = f"{folder}:{outside()['PYTHONPATH']}"
    said = run(folder, program, **variables)
    assert [line for line in said if line.startswith(("INFO", "WARNING"))] == [warned] * bool(warned)
    assert [line[:9] for line in said if line.startswith("sums")] == ["sums 3.0 "] * 2


@pytest.mark.slow
def test_short_work_stays_with_numpy_and_long_work_is_compiled(folder: Path) -> None:
    program = """
one.call_for(1000)
one.prepare(1000)
print(engine.in_use(), one.call)
for _ in range(1000): one.call_for(1_000_000)
say(one)
"""
    said = run(folder, program, MPIPS_KERNELS="")
    assert said[0] == "False None"
    assert there(said)


@pytest.mark.slow
def test_a_kernel_for_long_calls_is_ready_before_the_first(folder: Path) -> None:
    said = run(folder, "one.prepare(1_000_000); say(one)", MPIPS_KERNELS="")
    assert there(said)
