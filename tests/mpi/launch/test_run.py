"""`mpips run` starts jobs for real: roles arrive, exit codes come back, an exception ends all, the README runs."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from mpi4py import MPI

from launch.mpirun import find
from tests.child import ROOT, outside
from tests.choice import first, once
from tests.mpi.launch.support import run, start
from tests.mpi.sizes import JOB_LIMIT

pytestmark = pytest.mark.skipif(MPI.COMM_WORLD.size != 1, reason="starts jobs of its own; once is enough")

PATIENT = "import mpips\nfrom mpips.ending import uncaught\nuncaught.PATIENCE = 20\n"  # cores may be busy
STORE = "import numpy as np\nkv = mpips.create('dist_sync')\nw = np.ones(3, np.float32)\nkv.init('w', w)\n"


def test_roles_reach_the_ranks(tmp_path: Path) -> None:
    script = """
import os
from mpi4py import MPI

env = os.environ
line = f"size {MPI.COMM_WORLD.size} servers {env['MPIPS_SERVERS']} threads {env['OMP_NUM_THREADS']}\\n"
os.write(1, line.encode())
"""
    done = run(tmp_path, script, "--servers", "1", "--workers", "2")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("size 3 servers 1 threads ") == 3


def test_a_shell_loop_keeps_its_input_and_the_script_its_words(tmp_path: Path) -> None:
    """Inside a job of Slurm, whose variables name another host, without srun: as in a container."""
    (tmp_path / "script.py").write_text(
        "import os, sys\nread = sys.stdin.read() if sys.argv[1:2] == ['read'] else ''\n"
        "os.write(1, ascii([*sys.argv[1:], read, os.environ['ADDED']]).encode() + b'\\n')\n"
    )
    mpips = f"{sys.executable} -m launch.run -w 1 --env ADDED='x y' script.py"
    shell = f"""
        printf '1\\n2\\n' | while read x; do {mpips} $x : '' $'\\xff'; done
        echo 3 | {mpips} read
        {mpips} read <&-"""
    slurm = dict.fromkeys(("SLURM_NODELIST", "SLURM_JOB_NODELIST"), "other") | {
        "SLURM_JOB_ID": "7",
        "SLURM_NNODES": "1",
        "SLURM_TASKS_PER_NODE": "4",
    }
    done = subprocess.run(
        ["bash", "-c", shell],
        env=outside() | slurm,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=2 * JOB_LIMIT,
    )
    assert done.stdout.splitlines() == [
        r"['1', ':', '', '\udcff', '', 'x y']",
        r"['2', ':', '', '\udcff', '', 'x y']",
        r"['read', '3\n', 'x y']",
        r"['read', '', 'x y']",
    ], done.stderr


@pytest.mark.slow
@once(
    **{
        "error, said, code": [
            ("open('/data/of/rank/1')", "FileNotFoundError", 1),
            ("import no_such_module", "ModuleNotFoundError", 1),
            ("sys.exit(4)", "exit 4", 4),
        ]
    },
    others=["from mpi4py import MPI\nMPI.COMM_WORLD.Barrier()\n", ""],
)
def test_one_rank_that_fails_before_mpi_has_started_ends_the_job(
    tmp_path: Path, error: str, said: str, code: int, others: str
) -> None:
    rank = "import os, sys\nr = int(os.environ.get('OMPI_COMM_WORLD_RANK', os.environ.get('PMI_RANK')))\n"
    done = run(tmp_path, f"{rank}if r == 1:\n    {error}\n{others}", "--workers", "2")
    assert done.returncode == code, done.stderr  # though Open MPI's mpirun may crash, and MPICH's lose its ranks
    assert done.stderr.count("Traceback") == (code == 1), done.stderr
    assert f"mpips: {said} on rank 1 of 2, before MPI has started: the job ends" in done.stderr


def test_an_error_of_all_ranks_is_said_once_and_one_of_a_single_rank_beside_it(tmp_path: Path) -> None:
    script = (
        "from mpi4py import MPI\nimport mpips\nfrom mpips.ending import uncaught as last\n"
        "last.PATIENCE, last.LAST_WORDS = 1, 2\nMPI.COMM_WORLD.Barrier()\n"
        "if MPI.COMM_WORLD.rank == 2:\n    raise KeyError('another')\nraise ValueError('all have it')\n"
    )
    done = run(tmp_path, script, "--workers", "4")
    assert done.returncode != 0
    assert done.stderr.count("Traceback") == 2, done.stderr
    assert done.stderr.count("ValueError: all have it") == done.stderr.count("KeyError: 'another'") == 1, done.stderr
    assert "ValueError on rank 0 of 4 and 2 others" in done.stderr
    assert "KeyError on rank 2 of 4: the job ends" in done.stderr


MISTAKES = [
    ("mpips.create('mpi_sync', clients=9)", "OptionError: clients=9 is more than workers="),
    ("import collectives; collectives.broadcast(w[kv.rank :])", "MismatchError: rank 0 calls broadcast of "),
    ("mpips.Trainer(None, kv)", "TypeError: a Trainer's model"),
    ("mpips.create(None)", "TypeError: the kind of a store is a string"),
    ("kv.pull('v', [0.0])", "ValueError: pull: key 'v' was not initialised"),
    ("kv.init('v', 3)", "TypeError: init: key 'v' needs an array"),
    ("kv.push('w', w[:2])", "ValueError: push: "),
    ("kv.close(), kv.pull('w', w)", "RuntimeError: the store is closed"),
]


@first(2, **{"call, said, bare": [(*MISTAKES[0], True), *((*mistake, False) for mistake in MISTAKES[::-1])]})
def test_a_mistake_is_shown_with_the_lines_of_the_user_alone(tmp_path: Path, call: str, said: str, bare: bool) -> None:
    script = PATIENT + STORE + f"def main():\n    {call}\nmain()\n"
    done = run(tmp_path, script, "--workers", "2", bare=bare)
    assert done.returncode == 1, done.stderr
    assert done.stderr.count(said) == done.stderr.count("Traceback") == 1, done.stderr
    assert re.findall(r'  File ".*script.py", line (\d+)', done.stderr) == ["10", "9"], done.stderr
    assert done.stderr.count('  File "') == 2, done.stderr
    assert "on all 2 ranks" in done.stderr


@first(1, bad=[1, 0])
def test_the_mistake_of_one_rank_ends_the_job_with_its_lines_alone(tmp_path: Path, bad: int) -> None:
    calls = f"if kv.rank == {bad}:\n    kv.push('w', np.ones(4, np.float32))\nelse:\n    kv.pushpull('w', w)\n"
    done = run(tmp_path, PATIENT.replace("20", "1") + STORE + calls, "--servers", "1", "--workers", "3")
    assert done.returncode == 1, done.stderr
    assert done.stderr.count("ValueError: push: ") == done.stderr.count("Traceback") == 1, done.stderr
    assert re.findall(r'script.py", line (\d+)', done.stderr) == ["9"], done.stderr
    assert f"ValueError on rank {bad} of 4: the job ends" in done.stderr


def test_an_interrupt_ends_all_with_130_and_without_a_traceback(tmp_path: Path) -> None:
    script = "import os, signal\nfrom mpi4py import MPI\nos.write(1, b'up\\n')\nsignal.pause()\n"
    process = start(tmp_path, script, "--workers", "3")
    assert process.stdout is not None
    for _ in range(3):
        assert process.stdout.readline() == "up\n"
    process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=JOB_LIMIT)[1]  # returns when no rank holds standard output or error any more
    assert process.returncode == 130, said
    assert "Traceback" not in said, said
    assert "launch.run: interrupted\n" in said, said


@pytest.mark.slow
def test_an_interrupt_of_one_rank_while_mpi_starts_ends_the_job(tmp_path: Path) -> None:
    script = """
import os, signal, threading, time
if os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK")) == "0":
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()  # in MPI_Init, which waits for the other
else:
    time.sleep(1.5)
from mpi4py import MPI
MPI.COMM_WORLD.Barrier()
"""
    done = run(tmp_path, script, "-w", "2")
    assert done.returncode == 130, done.stderr
    assert "mpips: interrupted on rank 0 of 2: the job ends\n" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_exit_of_one_worker_ends_a_store_that_others_wait_in(tmp_path: Path) -> None:
    script = (
        "import sys\nimport numpy as np\nimport mpips\nkv = mpips.create('mpi_sync')\n"
        "if kv.rank == 1:\n    sys.exit(3)\nkv.init('w', np.ones(10, np.float32))\n"
    )
    done = run(tmp_path, script, "--servers", "1", "--workers", "2")
    assert done.returncode == 3, done.stderr
    assert "exit 3 on rank 1 of 3" in done.stderr


@first(1, unbuffered=["", "1"])
def test_a_line_is_written_when_it_is_printed_and_as_one(tmp_path: Path, monkeypatch, unbuffered: str) -> None:
    """Ranks print at the same time, and then write past Python. (Open MPI's have a terminal, and write so anyway.)"""
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    script = """
import os
from mpi4py import MPI

rank = MPI.COMM_WORLD.rank
for turn in range(50):
    MPI.COMM_WORLD.Barrier()
    print(rank, *range(20), turn)
os.write(1, f"{rank} end\\n".encode())
"""
    done = run(tmp_path, script, "--workers", "3")
    assert done.returncode == 0, done.stderr
    words = " ".join(map(str, range(20)))
    lines = done.stdout.splitlines()
    for rank in range(3):
        expected = [*(f"{rank} {words} {turn}" for turn in range(50)), f"{rank} end"]
        assert [line for line in lines if line.startswith(f"{rank} ")] == expected


def mpips(tmp_path: Path, *words: str, before: str = 'exec "$@"') -> subprocess.CompletedProcess[str]:
    """`mpips WORDS` as the shell line `before` starts it."""
    command = ["sh", "-c", before, "sh", sys.executable, "-P", "-m", "launch.cli", *words]
    return subprocess.run(command, capture_output=True, text=True, env=outside(), cwd=tmp_path, timeout=JOB_LIMIT)


def sentences(done: subprocess.CompletedProcess[str]) -> str:
    """What a command has said beside its progress, of which each line ends with "1 of 2"."""
    return "\n".join(line for line in done.stderr.strip().splitlines() if not re.search(r", \d+ of \d+$", line))


@pytest.mark.slow
def test_bad_data_end_a_training_with_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "bad.csv").write_text("a,b\n1,2\n3,4\n5,x\n7,8\n")
    done = mpips(tmp_path, "train", "--data", "bad.csv", "--ranks", "3", "--servers", "1", "--grid", "1x2")
    assert done.returncode == 2, done.stderr
    assert done.stderr.strip() == (
        "mpips train: bad.csv, line 4: column 2 (b) is 'x', not a finite number; mend or remove the line, "
        "or say --classify if it is a label"
    )


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").is_char_device(), reason="no /dev/full here")
@first(1, what=["kvstore", "allreduce"])
def test_a_full_disk_after_the_work_is_one_sentence_below_the_table(tmp_path: Path, what: str) -> None:
    """A store's benchmark has said before that its clients are uneven."""
    job = ["--ranks", "4", "--kind", "mpi_sync", "--clients", "2"] if what == "kvstore" else ["--ranks", "2"]
    done = mpips(tmp_path, "bench", what, *job, "--sizes", "1KiB", "--seconds", "0.01", "--json", "/dev/full")
    assert done.returncode == 1, done.stderr
    full = "Error: --json /dev/full cannot be written: No space left on device"
    uneven = "mpips: 3 workers do not split evenly over 2 clients; some have one more\n"
    assert sentences(done) == (uneven if what == "kvstore" else "") + full
    assert "ordinary" in done.stdout


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").is_char_device(), reason="no /dev/full here")
def test_a_training_whose_output_is_lost_keeps_its_files(tmp_path: Path) -> None:
    words = ["--data", "synthetic:50,3,1", "--hidden", "8", "--epochs", "1", "--save", "a.st", "--json", "a.json"]
    done = mpips(tmp_path, "train", *words, before='exec "$@" > /dev/full')
    assert done.stderr.strip() == "Error: standard output cannot be written: No space left on device"
    assert done.returncode == 1
    assert (tmp_path / "a.st").is_file()
    assert (tmp_path / "a.json").is_file()


@pytest.mark.slow
def test_a_training_takes_a_closed_standard_output(tmp_path: Path) -> None:
    words = ["--data", "synthetic:50,3,1", "--hidden", "8", "--epochs", "1", "--json", "a.json", "--ranks", "2"]
    done = mpips(tmp_path, "train", *words, before='exec "$@" >&-')
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "a.json").is_file()


def test_a_job_ended_by_sigterm_has_the_code_of_the_signal(tmp_path: Path) -> None:
    process = start(tmp_path, "from mpi4py import MPI\nprint('up', flush=True)\nMPI.COMM_WORLD.recv()\n", "-w", "2")
    assert process.stdout is not None
    process.stdout.readline()
    process.terminate()
    assert process.wait(JOB_LIMIT) == 143
    process.communicate()


UP = "import os, signal, time\nfrom mpi4py import MPI\nw = MPI.COMM_WORLD\nw.Barrier()\nos.write(1, b'up\\n')\n"
OPEN_MPI = "Open MPI" in MPI.Get_library_version()


def up(process: subprocess.Popen[str], ranks: int) -> subprocess.Popen[str]:
    """The same once all ranks run."""
    assert process.stdout is not None
    assert [process.stdout.readline() for _ in range(ranks)] == ["up\n"] * ranks
    return process


@first(1, ulfm=[False, True], **{"dies, role": [(1, "worker of client 1"), (2, "server")]})
def test_a_rank_that_is_killed_ends_the_job_and_is_named(tmp_path: Path, dies: int, role: str, ulfm: bool) -> None:
    if ulfm and not OPEN_MPI:
        pytest.skip("an option of Open MPI")
    extra = ["--mpi-arg=--with-ft", "--mpi-arg=ulfm"] if ulfm else []
    script = f"{UP}if w.rank == {dies}:\n    time.sleep(1)\n    os.kill(os.getpid(), signal.SIGKILL)\ntime.sleep(600)\n"
    process = up(start(tmp_path, script, "-w", "2", "-c", "2", "-s", "1", *extra), 3)
    began = time.monotonic()
    said = process.communicate(timeout=JOB_LIMIT)[1]  # returns when no rank holds standard output or error any more
    assert time.monotonic() - began < 30
    known = process.returncode == (137 if OPEN_MPI else 9)
    assert known or (ulfm and process.returncode == 1)
    how = "was ended by SIGKILL" if known else "ended without a word"
    if OPEN_MPI:
        assert f"mpips: rank {dies} ({role}) {how}: the job has ended\n" in said
    else:  # this mpirun ends the others so soon that one of them may be seen to end first; its 9 may be an exit code
        assert re.search(rf"mpips: rank \d \(.*\) ({how}|ended without a word): the job has ended\n", said)


@pytest.mark.slow
def test_an_interrupt_of_the_whole_group_is_130_though_no_terminal_sent_it(tmp_path: Path) -> None:
    process = up(start(tmp_path, f"{UP}time.sleep(600)\n", "-w", "2", group=True), 2)
    os.killpg(process.pid, signal.SIGINT)
    said = process.communicate(timeout=JOB_LIMIT)[1]
    assert process.returncode == 130, said


def test_signals_for_ranks_reach_them_and_the_job_goes_on(tmp_path: Path) -> None:
    handled = (
        "heard = []\nfor n in (10, 12): signal.signal(n, lambda n, _: heard.append(n))\nos.write(1, b'up\\n')\n"
        "while len(heard) < 2: time.sleep(0.01)\nos.write(1, b'%d %r\\n' % (w.rank, heard))\n"
    )
    process = up(start(tmp_path, UP.replace("os.write(1, b'up\\n')\n", "") + handled, "-w", "2"), 2)
    time.sleep(0.5)
    process.send_signal(signal.SIGUSR1)
    time.sleep(0.5)
    process.send_signal(signal.SIGUSR2)
    out, said = process.communicate(timeout=JOB_LIMIT)
    assert process.returncode == 0, said
    assert sorted(out.splitlines()) == ["0 [10, 12]", "1 [10, 12]"]


@first(1, **{"word, code, said": [("['no', 256]", 1, "['no', 256]\nmpips: exit 1"), ("9", 9, "mpips: exit 9")]})
def test_what_a_rank_exits_with_is_its_code_or_its_text(tmp_path: Path, word: str, code: int, said: str) -> None:
    done = run(tmp_path, f"{UP}import sys\nif w.rank == 1: sys.exit({word})\nw.Barrier()\n", "-w", "2")
    assert done.returncode == code, done.stderr
    assert done.stderr.startswith(f"{said} on rank 1 of 2: the job ends\n"), done.stderr


@pytest.mark.slow
@first(1, code=[9, 15])
def test_a_rank_that_leaves_without_a_word_was_ended_by_no_signal(tmp_path: Path, code: int) -> None:
    done = run(tmp_path, f"{UP}if w.rank == 1: os._exit({code})\ntime.sleep(600)\n", "-w", "2")
    assert done.returncode == code
    assert re.search(
        rf"mpips: rank 1 \(worker\) (left with exit code {code}|ended without a word): the job has ended\n", done.stderr
    ), done.stderr
    assert "was ended by" not in done.stderr


def folder_of_a_stranger(tmp_path: Path) -> Path:
    """A folder whose files have the names of modules that mpips imports, and end who imports them with exit code 0."""
    for name in ("mpips", "launch", "collectives", "numpy", "random", "click", "msgspec", "mpi4py", "json"):
        (tmp_path / f"{name}.py").write_text("import os\nos.write(2, b'imported from here\\n')\nos._exit(0)\n")
    return tmp_path


WHERE = """
import os, subprocess, sys
import neighbour, numpy, random
from mpi4py import MPI

import mpips
child = subprocess.run([sys.executable, "-c", "import sys; print(sys.path[0] == '')"], capture_output=True, text=True)
first = os.path.relpath(sys.path[0]) if sys.path[0] else "''"
sys.stdout.write(f"{first} {'elsewhere' in sys.path[1]} {neighbour.WORD} {child.stdout}")
"""


@pytest.mark.slow
def test_ranks_import_what_python_alone_would_for_a_script_a_module_and_a_line(tmp_path: Path) -> None:
    part, other, elsewhere = (folder_of_a_stranger(tmp_path) / name for name in ("part", "other", "elsewhere"))
    for folder in (part, other, elsewhere):
        folder.mkdir()
    (elsewhere / "neighbour.py").write_text("WORD = 'of PYTHONPATH'")
    (part / "train.py").write_text(WHERE)
    (part / "neighbour.py").write_text("WORD = 'beside the script'")
    (other / "module.py").write_text(WHERE)
    (other / "neighbour.py").write_text("WORD = 'here'")
    (other / "numpy.py").write_text("")  # as Python has it, this one counts
    path = f'PYTHONPATH={elsewhere}:{ROOT} exec "$@"'
    for words, folder, expected in (
        (["part/train.py"], tmp_path, "part True beside the script True\n"),
        (["-m", "module"], other, ". True here True\n"),
        (["--", "-c", WHERE], other, "'' True here True\n"),
    ):
        done = mpips(folder, "run", "-w", "2", *words, before=path)
        assert (done.returncode, done.stdout) == (0, 2 * expected), done.stderr


@pytest.mark.slow
@first(
    1,
    words=[
        "train -n 2 --data synthetic:50,3,1 --hidden 8 --epochs 1",
        "run -w 2 part/train.py",
        "doctor",
        "tune -n 2 --dry-run",
        "bench allreduce -n 2 --sizes 8 --seconds 0.01",
        "chaos --faults 0 -- mpips run -w 2 part/train.py",
    ],
)
def test_what_lies_in_the_current_folder_is_not_imported(tmp_path: Path, words: str) -> None:
    (folder_of_a_stranger(tmp_path) / "part").mkdir()
    (tmp_path / "part" / "train.py").write_text("import mpips, numpy, random\nprint('ran')\n")
    done = mpips(tmp_path, *words.split())
    assert done.returncode == 0, done.stderr
    assert "imported from here" not in done.stderr + done.stdout
    assert done.stdout.count("ran\n") == (2 if "train.py" in words else 0)


@pytest.mark.slow
def test_doctor_under_a_launcher_says_nothing_beside_its_lines(tmp_path: Path) -> None:
    launcher = find()
    options = ["--oversubscribe", "--allow-run-as-root"] if launcher.flavour == "openmpi" else []
    before = f'{launcher.path} {" ".join(options)} -n 2 "$@"'
    done = mpips(tmp_path, "doctor", before=before)
    assert "[ok] world:                  2 ranks, 2 of them" in done.stdout
    assert done.stderr.strip() == ""
