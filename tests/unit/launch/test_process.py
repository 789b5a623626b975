"""A job that is watched: signals reach it once, and its exit code comes back."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
WATCH = """
import sys
from launch.running import process
process.GRACE = 0.5
ended = process.run([sys.executable, '-c', *sys.argv[1:]], name='mpips run')
process.print_error(ended.sentence)
sys.exit(ended.code)
"""
WAITS = "import os, signal\nprint(os.getpid(), flush=True)\nsignal.pause()"
# It waits for the signal itself: a handler of Python's is not called if the signal comes just before a read blocks.
COUNTS = """
import signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
print("up", flush=True)
signal.sigwait([signal.SIGINT])
print("heard", flush=True)
sys.stdin.readline()
if signal.sigtimedwait([signal.SIGINT], 0):
    print("heard", flush=True)
sys.exit(1)
"""
STUBBORN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
sleep = [sys.executable, "-c", "import time; print(0, flush=True); time.sleep(600)"]
rank = subprocess.Popen(sleep, start_new_session=True, stdout=subprocess.PIPE)
rank.stdout.readline()
print(os.getpid(), rank.pid, flush=True)
time.sleep(600)
"""
HOPEFUL = """
import sys
from launch.running import process
process.LOOK_SECONDS = 0.1
looks = []
ended = process.run([sys.executable, "-c", sys.argv[1]], lambda: looks.append(0) or len(looks) == int(sys.argv[2]))
print(len(looks), ended.code)
"""

LAUNCHER = """
import os, signal, subprocess, sys
ranks = sys.argv[1:]  # what each does
def interrupted(*_):
    for rank in started: rank.kill()
signal.signal(signal.SIGINT, interrupted)
variables = lambda rank: {**os.environ, "OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_SIZE": str(len(ranks))}
words = lambda line: ["-c", line[1:]] if line[0] == "!" else ["-m", "mpips", "-c", line]
run = lambda i, line: subprocess.Popen([sys.executable, *words(line)], env=variables(i), start_new_session=True)
started = [run(i, line) for i, line in enumerate(ranks) if line]
for rank in started: rank.wait()
signal.sigtimedwait([], float(os.environ.get("LAUNCHER_LASTS", "0")))
sys.exit(int(os.environ.get("LAUNCHER_CODE", "0")))
"""
JOB = """
import sys
from launch.running import process, verdict
process.LOOK_SECONDS, verdict.AFTER_A_DEATH, verdict.AFTER_A_FAILURE = 0.1, 1, limit  # in vain for so long
ended = process.run([sys.executable, "-c", *sys.argv[1:]], name="mpips run", roles=["worker", "server"], ranks_here=2)
process.print_error(ended.sentence)
sys.exit(ended.code)
"""
SURVIVING = JOB.replace("ranks_here=2", "ranks_here=2, spares=0")
UP = "import os, signal, time; os.write(1, b'up\\n'); "


FAILS = "import signal, sys\nfor n in (2, 15): signal.signal(n, lambda *_: sys.exit(1))\n"
HEEDS = (
    "import time\ntry:\n    print(flush=True)\n    while True: time.sleep(0.05)\nexcept KeyboardInterrupt:\n    pass"
)


def heed() -> None:
    """Ctrl-C counts, also where these tests run in the background of a shell, which ignores it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def watched(code: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", WATCH, code]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=ROOT, stdout=pipe, stderr=pipe, text=True, preexec_fn=heed)


def begun(code: str) -> tuple[subprocess.Popen[str], list[int]]:
    """The same once it has said a line of numbers, and these."""
    process = watched(code)
    assert process.stdout is not None
    return process, [int(word) for word in process.stdout.readline().split()]


def assert_ended(*pids: int) -> None:
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.slow
def test_the_exit_code_comes_back() -> None:
    assert watched("raise SystemExit(7)").wait(60) == 7
    assert watched("import os, signal; os.kill(os.getpid(), signal.SIGKILL)").wait(60) == 128 + signal.SIGKILL


@pytest.mark.parametrize("fails", ["", FAILS])
@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_to_the_command_reaches_the_job(number: signal.Signals, code: int, fails: str) -> None:
    """Its code is the signal's, also where mpirun gives one of its own."""
    process, (job,) = begun(fails + WAITS)
    process.send_signal(number)
    said = process.communicate(timeout=60)[1]
    assert process.returncode == code
    assert said.count("mpips run: interrupted\n") == 1
    assert_ended(job)


@pytest.mark.slow
@pytest.mark.parametrize("whom, number", [("command", signal.SIGTERM), ("mpirun", signal.SIGKILL)])
def test_no_process_outlives_a_stubborn_or_a_killed_mpirun(whom: str, number: signal.Signals) -> None:
    process, pids = begun(STUBBORN)
    os.kill(process.pid if whom == "command" else pids[0], number)
    assert process.wait(60) == 128 + number
    assert_ended(*pids)


def test_a_job_that_ends_well_after_an_interrupt_has_ended_well() -> None:
    process, _ = begun(HEEDS)
    process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=60)[1]
    assert process.returncode == 0
    assert "interrupted" not in said


def test_the_job_ends_with_a_command_that_is_killed() -> None:
    process, _ = begun(WAITS)
    process.kill()
    assert process.communicate(timeout=60)[0] == ""  # ends when the job, which holds the other end, does
    assert process.wait(60) == -signal.SIGKILL


@pytest.mark.slow
@pytest.mark.parametrize(
    "code, hopeless_at, said",
    [("import signal; signal.pause()", "2", f"2 {128 + signal.SIGTERM}"), ("raise SystemExit(7)", "0", "7")],
)
def test_a_job_is_ended_when_it_has_become_hopeless_only(code: str, hopeless_at: str, said: str) -> None:
    command = [sys.executable, "-c", HOPEFUL, code, hopeless_at]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip().endswith(said), done.stderr


def job(*ranks: str, after_a_failure: float = 20.0, program: str = JOB) -> subprocess.Popen[str]:
    """A job of ranks under an mpirun that waits for the others when one has died, and says 0 whatever happened."""
    command = [sys.executable, "-c", f"limit = {after_a_failure}\n{program}", LAUNCHER, *ranks]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=ROOT, stdout=pipe, stderr=pipe, text=True, preexec_fn=heed)


def started(process: subprocess.Popen[str], ranks: int = 2) -> subprocess.Popen[str]:
    """The same once so many ranks run."""
    assert process.stdout is not None
    assert [process.stdout.readline() for _ in range(ranks)] == ["up\n"] * ranks
    return process


@pytest.mark.slow
def test_an_error_that_a_rank_has_told_is_not_told_again() -> None:
    process = job(f"{UP}raise ValueError('told')", f"{UP}time.sleep(60)", after_a_failure=1.5)
    said = process.communicate(timeout=60)[1]
    assert process.returncode == 1
    assert "ValueError: told" in said
    assert "the job has ended" not in said


@pytest.mark.slow
def test_the_code_is_that_of_the_rank_that_failed_where_mpirun_crashed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAUNCHER_CODE", "255")
    process = job(f"{UP}raise SystemExit(4)", UP)
    said = process.communicate(timeout=60)[1]
    assert process.returncode == 4, said
    assert "exit 4 on rank 0 of 2" in said


@pytest.mark.slow
def test_an_interrupt_counts_where_mpirun_says_0_and_its_ranks_were_killed() -> None:
    process = started(job(f"{UP}time.sleep(600)", f"{UP}time.sleep(600)"))
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=60)[1]
    assert process.returncode == 130
    assert "mpips run: interrupted" in said


def test_a_signal_for_a_job_whose_ranks_are_not_known_goes_to_the_job() -> None:
    process, _ = begun(f"import signal, sys\nsignal.signal(10, lambda *_: sys.exit(4))\n{WAITS}")
    process.send_signal(signal.SIGUSR1)
    assert process.wait(60) == 4


def test_signals_are_ours_again_after_a_job() -> None:
    code = (
        "import signal, sys\nfrom launch.running import process\n"
        "process.run([sys.executable, '-c', '1'])\n"
        "print(signal.pthread_sigmask(signal.SIG_BLOCK, []))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout == "set()\n", done.stderr


def test_ctrl_c_at_a_terminal_reaches_the_job_once() -> None:
    child, terminal = pty.fork()
    if not child:
        os.chdir(ROOT)
        heed()
        os.execv(sys.executable, [sys.executable, "-c", WATCH.replace("0.5", "60"), COUNTS])  # the machine may be busy
    text = b""
    for typed, answer in ((b"", b"up"), (b"\x03", b"heard"), (b"\n", b"")):
        os.write(terminal, typed)
        while answer not in text:
            text += os.read(terminal, 100)
    _, status = os.waitpid(child, 0)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(status) == 130
    assert text.count(b"heard") == 1


@pytest.mark.slow
def test_what_a_killed_mpirun_left_is_not_in_the_way_of_one_with_its_number(tmp_path: Path) -> None:
    """Open MPI names a folder after its mpirun, and starts no job where one with that name is there."""
    leaves = f"import os, signal\nos.makedirs('{tmp_path}/ompi.%d' % os.getpid())\nos.kill(os.getpid(), signal.SIGKILL)"
    environment = {**os.environ, "TMPDIR": str(tmp_path)}

    def job(program: str) -> int:
        command = [sys.executable, "-c", WATCH, program]
        return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, timeout=60).returncode

    assert job(leaves) == 128 + signal.SIGKILL
    assert not list(tmp_path.iterdir())
    last = subprocess.Popen(["true"])
    last.wait()
    coming = {(last.pid + 1 + more) % int(Path("/proc/sys/kernel/pid_max").read_text()) for more in range(2000)}
    for pid in coming:
        (tmp_path / f"ompi.{pid}").mkdir()
    assert job(f"import os, sys\nsys.exit(os.path.exists('{tmp_path}/ompi.%d' % os.getpid()))") == 0
    assert len(list(tmp_path.iterdir())) == len(coming) - 1


STARTED = f"from mpips.ending import process; process._lines[0].started(); {UP}"
DIES = f"{STARTED}time.sleep(0.3); os.kill(os.getpid(), signal.SIGKILL)"
TOLD = "mpips: rank 1 (server) was ended by SIGKILL; the others go on\n"
OLD = TOLD.replace("was ended by SIGKILL", "ended without a word")  # of a kernel that does not keep it


@pytest.mark.slow
def test_where_others_go_on_a_death_is_told_and_the_rest_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAUNCHER_CODE", "1")
    process = job(f"{STARTED}time.sleep(2); print('well')", DIES, program=SURVIVING)
    out, said = process.communicate(timeout=60)
    assert process.returncode == 0
    assert said in (TOLD, OLD)
    assert out.endswith("well\n")


@pytest.mark.slow
@pytest.mark.parametrize("survivor, code", [(STARTED, 0), (DIES, 137)])
def test_an_mpirun_that_does_not_end_with_its_ranks_is_ended(
    monkeypatch: pytest.MonkeyPatch, survivor: str, code: int
) -> None:
    monkeypatch.setenv("LAUNCHER_LASTS", "600")
    process = started(job(survivor, DIES, program=SURVIVING))
    begun = time.monotonic()
    said = process.communicate(timeout=60)[1]
    assert time.monotonic() - begun < 20
    assert process.returncode in (code, min(code, 1))  # 1 where the kernel does not keep how they ended
    assert ("no working rank is left: the job has ended" in said) == (code > 0)


@pytest.mark.slow
def test_a_rank_that_hangs_after_its_goodbye_has_ended_well() -> None:
    hangs = "class Hangs:\n    def __del__(self, sleep=time.sleep): sleep(600)\nos.hangs = Hangs()"
    process = started(job(f"{STARTED}time.sleep(1)\n{hangs}", DIES, program=SURVIVING))
    begun = time.monotonic()
    process.communicate(timeout=60)
    assert time.monotonic() - begun < 20
    assert process.returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "unheard, said, code",
    [
        ("!import os, time; time.sleep(0.5); os.kill(os.getpid(), 2)", "was ended by SIGINT", 130),
        ("!import sys, time; time.sleep(0.5); sys.exit(3)", "left with exit code 3", 3),
        ("", "ended without a word", 1),
    ],
)
def test_a_rank_that_ends_before_it_can_be_heard_ends_a_job_in_which_mpirun_waits_for_the_others(
    unheard: str, said: str, code: int
) -> None:
    program = JOB.replace("limit  #", "1; process.MISSING_SECONDS = 1  #")
    command = [sys.executable, "-c", program, LAUNCHER, unheard, "import time; time.sleep(600)"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, preexec_fn=heed, timeout=60)
    assert done.returncode == code, done.stderr
    assert f"mpips: rank 0 (worker) {said}: the job has ended\n" in done.stderr


@pytest.mark.slow
def test_a_job_whose_ranks_are_long_in_coming_says_that_it_starts_them() -> None:
    program = JOB.replace("limit  #", "1; process.SILENT_SECONDS = 0.5  #")
    late = LAUNCHER.replace("import os,", "import time; time.sleep(1); import os,")
    for launcher, said in ((late, "mpips: starting 2 ranks on this machine\n"), (LAUNCHER, "")):
        command = [sys.executable, "-c", program.replace("0.5", "0.5" if said else "30"), launcher, "pass", "pass"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, preexec_fn=heed, timeout=60)
        assert done.returncode == 0
        assert [line for line in done.stderr.splitlines(keepends=True) if "starting" in line] == [said] * bool(said)
