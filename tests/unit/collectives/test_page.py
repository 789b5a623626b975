"""A rank's page: what another process reads there, how long it lies there, and who can plant or read it."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from collectives.recorder import folders, page
from collectives.recorder.page import LANES, TOKENS, Page, read
from tests.child import outside

BEGIN = """
import os, sys
from pathlib import Path
from collectives.recorder import folders, own, tracing
folders.jobs_folder = lambda: Path(sys.argv[1])
tracing.begin(3, 5)
marks = own.Marks(77)
"""


@pytest.fixture
def shared(tmp_path: Path) -> tuple[Page, Path]:
    path = tmp_path / "1.page"
    return Page(path), path


def run(top: Path, program: str, words: Sequence[str] = (), **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", BEGIN + program, str(top), *words],
        env={**outside(), "_MPIPS_JOB": "job", **variables},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_what_is_written_is_read(shared: tuple[Page, Path]) -> None:
    made, path = shared
    made.set("step", 8)
    made.write(page.IDENTITY, {"rank": 2, "role": "wörker"})
    made.write(page.WAITS, [{"what": "barrier"}])
    lane = made.take_lane(99)
    made.name(lane, 5, "allreduce of 3 float32")
    made.words[Page.mark_at(lane)] = 41 << 32 | 5
    seen = read(path)
    assert seen is not None and seen.head["step"] == 8
    assert (seen.identity, seen.waits, seen.end) == ({"rank": 2, "role": "wörker"}, [{"what": "barrier"}], {})
    assert seen.lanes == [page.LastCall(99, 41, "allreduce of 3 float32")]


def test_a_token_whose_place_another_has_taken_has_no_text(shared: tuple[Page, Path]) -> None:
    made, path = shared
    lane = made.take_lane(1)
    made.name(lane, 5, "old")
    made.name(lane, 5 + TOKENS, "new")
    texts = []
    for token in (5, 5 + TOKENS, 6, 0):
        made.words[Page.mark_at(lane)] = 1 << 32 | token
        seen = read(path)
        assert seen is not None
        texts.append(seen.lanes[0].text)
    assert texts == ["", "new", "", ""]


def test_long_texts_are_cut_and_long_lists_shortened(shared: tuple[Page, Path]) -> None:
    made, path = shared
    lane = made.take_lane(1)
    made.name(lane, 1, "é" * 500)
    made.words[Page.mark_at(lane)] = 1
    made.write(page.WAITS, [{"what": "é" * 500}] * 9)
    seen = read(path)
    assert seen is not None and len(seen.waits) == 4 and set(seen.lanes[0].text[:-1]) == {"é"}


def test_lanes_beyond_the_last_are_not_seen_and_given_ones_are_taken_anew(shared: tuple[Page, Path]) -> None:
    made, path = shared
    lanes = [made.take_lane(number + 1) for number in range(LANES + 1)]
    assert lanes[-1] == -1
    made.give_lane(lanes[3])
    assert made.take_lane(1000) == lanes[3]
    seen = read(path)
    assert seen is not None and len(seen.lanes) == LANES and 1000 in {lane.identity for lane in seen.lanes}


def test_json_in_the_middle_of_a_write_is_not_read(shared: tuple[Page, Path]) -> None:
    made, path = shared
    made.write(page.END, {"failed": "why"})
    made.words[page.END // 8] += 1
    seen = read(path)
    assert seen is not None and seen.end == {}


@pytest.mark.parametrize("spoil", ["short", "magic", "version"])
def test_other_files_are_no_pages(shared: tuple[Page, Path], spoil: str) -> None:
    made, path = shared
    if spoil == "short":
        path.write_bytes(path.read_bytes()[:-1])
    else:
        made.set(spoil, 12345)
    assert read(path) is None


def test_a_page_goes_with_a_process_that_ends_well(tmp_path: Path) -> None:
    top = tmp_path / "jobs"
    done = run(top, "print(sorted(one.suffix for one in Path(sys.argv[1], 'job').iterdir()))")
    assert done.stdout == "['.page', '.stacks']\n", done.stderr
    assert list(top.iterdir()) == []


@pytest.mark.parametrize(
    ("end", "failed"),
    [("own.write_failure('the reason')", "the reason"), ("os.kill(os.getpid(), 9)", None), ("os._exit(0)", None)],
)
def test_a_page_stays_where_a_process_ends_otherwise(tmp_path: Path, end: str, failed: str | None) -> None:
    run(tmp_path / "jobs", f"marks.name(1, 'sum'); marks.word[0] = 7 << 32 | 1; own.rank_state.step = 4\n{end}")
    (path,) = (tmp_path / "jobs" / "job").glob("*.page")
    seen = read(path)
    assert seen is not None and seen.lanes == [page.LastCall(77, 7, "sum")] and seen.head["step"] == 5
    assert seen.end.get("failed") == failed and (seen.identity["rank"], seen.identity["size"]) == (3, 5)


def test_long_words_of_the_program_and_long_reasons_are_cut(tmp_path: Path) -> None:
    run(tmp_path / "jobs", "own.write_failure(chr(1) * 9000)", words=["é" * 9000, "\udcff"] * 4)
    (path,) = (tmp_path / "jobs" / "job").glob("*.page")
    seen = read(path)
    assert seen is not None and len(seen.end["failed"]) > 500 and seen.identity["rank"] == 3


def test_notes_that_do_not_fit_are_refused_whole(tmp_path: Path) -> None:
    done = run(
        tmp_path / "jobs",
        """
own.note(loss=0.5)
try: own.note(**{'gradient' * 600: 1.0, 'step': 7})
except ValueError as error: print(error)
own.note(accuracy=0.25)
own.write_failure('x')
""",
    )
    assert "bytes, and its page has room for 4080: note fewer, or shorter names" in done.stdout, done.stderr
    (path,) = (tmp_path / "jobs" / "job").glob("*.page")
    seen = read(path)
    assert seen is not None and seen.notes == {"loss": 0.5, "accuracy": 0.25} and seen.head["step"] == 0


def test_what_follows_from_an_own_failure_does_not_replace_it(tmp_path: Path) -> None:
    run(tmp_path / "jobs", "own.write_failure('exit code 3', own=True); own.write_failure('rank 3 is needed')")
    (path,) = (tmp_path / "jobs" / "job").glob("*.page")
    seen = read(path)
    assert seen is not None and (seen.end["failed"], seen.end["own"]) == ("exit code 3", True)


def test_what_has_gone_well_again_leaves_no_page(tmp_path: Path) -> None:
    run(tmp_path / "jobs", "own.write_failure('the reason'); own.clear_failures()")
    assert list((tmp_path / "jobs").iterdir()) == []


def test_only_the_user_reads_pages(tmp_path: Path) -> None:
    run(tmp_path / "jobs", "own.write_failure('x')", _UMASK="0")
    every = [tmp_path / "jobs", *(tmp_path / "jobs").rglob("*")]
    assert len(every) == 4 and not any(stat.S_IMODE(path.lstat().st_mode) & 0o077 for path in every)


@pytest.mark.parametrize("planted", ["an open folder", "a link", "a file"])
def test_what_others_may_have_planted_is_not_used(tmp_path: Path, planted: str) -> None:
    top, elsewhere = tmp_path / "jobs", tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    if planted == "an open folder":
        top.mkdir()
        top.chmod(0o777)
    elif planted == "a link":
        top.symlink_to(elsewhere)
    else:
        top.write_text("")
    done = run(top, "print('on')")
    assert done.stdout == "on\n" and done.stderr.count("this rank has no page") == 1
    assert not any(elsewhere.iterdir()) and not (top.is_dir() and any(top.iterdir()))


def test_a_fork_writes_no_page(tmp_path: Path) -> None:
    program = """
if not (child := os.fork()):
    own.rank_state.step = 9
    own.write_failure("of the child")
    sys.exit()
os.waitpid(child, 0)
own.write_failure("of the rank")
"""
    run(tmp_path / "jobs", program)
    (path,) = (tmp_path / "jobs" / "job").glob("*.page")
    seen = read(path)
    assert seen is not None and seen.end["failed"] == "of the rank" and seen.head["step"] == 0


@pytest.mark.slow
def test_few_jobs_that_have_ended_badly_are_kept(tmp_path: Path) -> None:
    top = tmp_path / "jobs"
    for number in range(folders.KEPT_JOBS + 4):
        run(top, "own.write_failure('x')", _MPIPS_JOB=f"job-{number:02}")
    assert [path.name for path in sorted(top.iterdir())] == [
        f"job-{number:02}" for number in range(3, folders.KEPT_JOBS + 4)
    ]


def test_the_recorder_can_be_left_out(tmp_path: Path) -> None:
    run(tmp_path / "jobs", "own.write_failure('x')", MPIPS_RECORDER="0")
    assert not (tmp_path / "jobs").exists()


@pytest.mark.parametrize(
    ("variables", "name"),
    [
        ({"_MPIPS_JOB": "12", "SLURM_JOB_ID": "7"}, "12"),
        ({"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "2"}, "7.2"),
        ({"SLURM_JOB_ID": "7"}, f"7.p{os.getppid()}"),
        ({"LSB_JOBID": "7", "PMIX_NAMESPACE": "prte@1"}, "7.prte@1"),
        ({"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "2", "HYDI_CONTROL_FD": "7"}, f"7.p{os.getppid()}"),
        ({"PMIX_NAMESPACE": "../prte/a b@1"}, "-prte-a-b@1"),
        ({}, f"p{os.getppid()}"),
    ],
)
def test_a_job_has_the_name_that_its_launcher_gives(variables: dict[str, str], name: str) -> None:
    assert folders.job_name(variables) == name


@pytest.mark.slow
@pytest.mark.parametrize("own_script", [False, True], ids=["beside others", "behind a script of its own"])
def test_ranks_of_a_launch_share_a_name_and_two_launches_do_not(own_script: bool) -> None:
    rank = f"{sys.executable} -c 'from collectives.recorder import folders; print(folders.job_name())'"
    if own_script:
        rank = f'sh -c "{rank}; true"'
    launch = ["sh", "-c", f"PMI_RANK=0 {rank}; PMI_RANK=1 {rank}"]
    names = [
        subprocess.run(
            launch, env={**outside(), "SLURM_JOB_ID": "7"}, capture_output=True, text=True, check=True, timeout=60
        ).stdout.split()
        for _ in range(2)
    ]
    assert all(len(one) == 2 and len(set(one)) == 1 for one in names) and names[0] != names[1]


def run_with_memory(size: str, program: str) -> subprocess.CompletedProcess[str]:
    """Run a rank where the memory for pages is so large."""
    words = ["unshare", "--mount", "sh", "-c", f'mount -t tmpfs -o size={size} tmpfs /dev/shm && exec "$@"', "sh"]
    if subprocess.run([*words, "true"], capture_output=True, timeout=60, check=False).returncode:
        pytest.skip("nobody can mount here")
    program = BEGIN.replace("folders.jobs_folder = lambda: Path(sys.argv[1])", "") + program
    return subprocess.run(
        [*words, sys.executable, "-c", program],
        env={**outside(), "_MPIPS_TRACE": str(32 << 20)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


USES_ALL = """
import shutil
from collectives.recorder.page import read
own.rank_state.step = 4
own.note(loss=1.0)
for token in range(1, 61):
    marks.name(token, "sum"); marks.word[0] = marks.new_token("x" * 300) if token % 2 else token
tracing.begin(3, 5)
seen = [read(path) for path in folders.jobs_folder().glob("*/*.page")]
print([(one.head["step"], one.notes, one.lanes[0].text) for one in seen], shutil.disk_usage("/dev/shm").free >> 10)
"""


@pytest.mark.parametrize("size", ["64k", "4m"])
def test_a_rank_goes_on_where_there_is_no_memory_for_its_page(size: str) -> None:
    done = run_with_memory(size, USES_ALL)
    assert (done.returncode, done.stdout.split()[0]) == (0, "[]"), done.stderr
    assert (
        done.stderr.count("\n") == 1
        and "this rank has no page, so mpips why and mpips top cannot show it: /dev/shm" in done.stderr
    )


@pytest.mark.parametrize(("size", "left"), [("7m", 6 << 10), ("64m", 57 << 10)])
def test_pages_and_traces_leave_memory_to_mpi(size: str, left: int) -> None:
    done = run_with_memory(size, USES_ALL)
    said, free = done.stdout.rsplit(maxsplit=1)
    assert done.returncode == 0 and said == "[(5, {'loss': 1.0}, 'sum')]" and int(free) >= left, done.stderr


def test_texts_without_memory_are_left_out() -> None:
    fills = "import shutil; open('/dev/shm/x', 'wb').write(bytes(shutil.disk_usage('/dev/shm').free))"
    done = run_with_memory("7m", fills + USES_ALL)
    assert done.returncode == 0 and done.stdout.startswith("[(5, {'loss': 1.0}, '')]"), done.stderr


@pytest.mark.slow
def test_a_signal_brings_the_stack_of_a_busy_process(tmp_path: Path) -> None:
    program = """
import signal, time, threading
def busy():
    os.kill(os.getpid(), own.SIGNAL)
    while time.monotonic() < until: pass
until = time.monotonic() + 0.2
busy()
print(next(Path(sys.argv[1], "job").glob("*.stacks")).read_text())
"""
    assert "in busy" in run(tmp_path / "jobs", program).stdout


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({}, "rank 3: SIGUSR2 asks for a dump, but MPIPS_DUMP_DIR is not set: set it before the job starts"),
        ({"MPIPS_DUMP_DIR": "here"}, "rank 3: dumped to here/job/rank-3.json"),
        (
            {"MPIPS_DUMP_DIR": "/etc/hostname"},
            "rank 3: no dump: MPIPS_DUMP_DIR='/etc/hostname' cannot be written: Not a ",
        ),
        ({"MPIPS_RECORDER": "0", "MPIPS_DUMP_DIR": "here"}, "this process has no page: MPI has not started in it, or "),
    ],
)
def test_a_process_that_is_asked_for_a_dump_goes_on_and_says_where(
    variables: dict[str, str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    program = "import signal; os.kill(os.getpid(), signal.SIGUSR2); print('on')"
    done = run(tmp_path / "jobs", program, **variables)
    assert done.stdout == "on\n" and said in done.stderr, done.stderr


@pytest.mark.slow
def test_a_process_that_has_set_the_signal_back_is_not_sent_it(tmp_path: Path) -> None:
    program = """
import signal, subprocess
signal.signal(own.SIGNAL, signal.SIG_DFL)
from launch.observe.gather import gather
print([len(one.stack) for one in gather(Path(sys.argv[1], "job"), 0.1)])
"""
    assert run(tmp_path / "jobs", program).stdout == "[0]\n"


@pytest.mark.parametrize("numbers", ["loss='x'", "loss=10**400", "step=-5", "step=float('nan')"])
def test_what_is_no_number_is_not_noted(tmp_path: Path, numbers: str) -> None:
    program = f"try: own.note({numbers})\nexcept ValueError as error: print('refused')"
    assert run(tmp_path / "jobs", program).stdout == "refused\n"


def test_a_number_without_a_name_is_told_of_both_calls(tmp_path: Path) -> None:
    program = "try: own.note(3, [1.0])\nexcept TypeError as error: print(error)"
    said = run(tmp_path / "jobs", program).stdout
    assert "numbers by name, such as note(step=40, loss=0.3)" in said and "mpips.chaos.note(step, value)" in said
