"""The driver of the tests ends what it starts, its log is text, and sources are compiled once."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from io import BytesIO
from itertools import product
from pathlib import Path

import pytest

from tests import child
from tests.report import Result, counted, record, unfinished
from tests.run import ALL, CORE, REST, ROOT, SLOW, Choice, compile_once, main, numbers, parts, turn

LEAVES_ONE_BEHIND = """
import subprocess, sys
left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
print(left.pid, flush=True)
"""


def refused(monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    """The driver ends with exit code 2 before it runs anything."""
    monkeypatch.setattr(sys, "argv", ["tests.run", *words])
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2


def run(code: str, limit: float, tmp_path: Path) -> tuple[int, str]:
    out = BytesIO()
    return child.run([sys.executable, "-c", code], limit, tmp_path, out), out.getvalue().decode()


def test_what_is_no_text_is_left_out_and_the_exit_code_comes_back(tmp_path: Path) -> None:
    code = r"import os, sys; os.write(1, b'a\0b\x1b[1mc\n'); os.write(2, b'd\n'); sys.exit(3)"
    assert run(code, 30, tmp_path) == (3, "ab[1mc\nd\n")


@pytest.mark.slow
def test_a_run_past_its_limit_is_ended_and_says_so(tmp_path: Path) -> None:
    started = time.monotonic()
    code, text = run("import time; print('begun', flush=True); time.sleep(60)", 2, tmp_path)
    assert code == 1 and time.monotonic() - started < 30
    assert "begun" in text and "not done after" in text


@pytest.mark.parametrize("forbidden", [True, False])
def test_bytecode_outlives_a_process_also_where_none_is_to_lie_beside_the_sources(
    forbidden: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = {"PYTHONDONTWRITEBYTECODE": "1" if forbidden else ""}
    monkeypatch.setattr(os, "environ", {k: v for k, v in os.environ.items() if k != "PYTHONPYCACHEPREFIX"} | words)
    compile_once(str(tmp_path / "kept"))
    Path(tmp_path, "module.py").touch()
    assert run("import module", 30, tmp_path)[0] == 0
    kept, beside = (len(list(Path(tmp_path, folder).rglob("module*.pyc"))) for folder in ("kept", "__pycache__"))
    assert (kept, beside) == ((1, 0) if forbidden else (0, 1))


@pytest.mark.slow
def test_what_is_left_behind_is_named_and_ended(tmp_path: Path) -> None:
    code, text = run(LEAVES_ONE_BEHIND, 30, tmp_path)
    alone = re.search(r"^(\d+)$", text, re.MULTILINE)
    assert alone is not None
    pid = int(alone[1])
    assert code == 0 and f"left behind, ended: process {pid}" in text
    for _ in range(100):
        if not os.path.exists(f"/proc/{pid}") or "Z" in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2]:
            return
        time.sleep(0.05)
    raise AssertionError(f"process {pid} lives")


def test_a_run_that_broke_off_counts_as_failed_and_a_report_names_its_failures(tmp_path: Path) -> None:
    report = tmp_path / "0.xml"
    assert counted("x", report, 139, 1.0).failures == ("exit code 139: it did not come to its end",)
    left = counted("x", report, 0, 1.0)  # a test has left by os._exit(0)
    assert (left.failed, left.failures) == (1, ("exit code 0: it did not come to its end",))
    report.write_text(
        '<testsuites><testsuite><testcase classname="tests.unit.test_a" name="test_b" time="2.5">'
        '<failure message="assert 1 == 2&#10;more">...</failure></testcase>'
        '<testcase classname="tests.unit.test_a" name="test_c" time="0.1"/></testsuite></testsuites>'
    )
    result = counted("x", report, 1, 1.0)
    assert (result.passed, result.failed) == (1, 1)
    assert result.failures == ("tests/unit/test_a.py::test_b: assert 1 == 2",)


def test_of_a_rank_that_did_not_come_to_its_end_one_sees_where_it_was(tmp_path: Path) -> None:
    code = (
        "import faulthandler, sys, threading, time\n"
        "threading.Thread(target=time.sleep, args=(9,), daemon=True).start()\n"
        "def waits(): faulthandler.dump_traceback(open(sys.argv[1], 'w'))\n"
        "def test(): waits()\n"
        "def pytest_pyfunc_call(): test()\n"
        "pytest_pyfunc_call()\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "0.stack")], check=True)
    for name, text in {"0.now": "a.py::test", "1.now": "a.py::test", "1.stack": "", "2.now": "b", "2.xml": ""}.items():
        (tmp_path / name).write_text(text)
    assert unfinished(tmp_path) == (
        "rank 0 was in a.py::test, in waits (<string>:3), in test (<string>:4)",
        "rank 1 was in a.py::test",
    )


@pytest.mark.parametrize("text", ["x", "0", "", "2,", "-1", "1.5", "2,0"])
def test_numbers_of_ranks_start_at_one(
    text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    refused(monkeypatch, "--stages", "mpi", f"--ranks={text}")
    assert f"{text!r} is no list of numbers of ranks from 1 on" in capsys.readouterr().err


def test_stages_have_names(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    refused(monkeypatch, "--stages", "unit,mpl")
    assert "'unit,mpl' is no list of lint, unit, lab, mpi" in capsys.readouterr().err


def test_ranks_as_make_writes_them() -> None:
    assert numbers("1,2,3,4,5,7") == [1, 2, 3, 4, 5, 7]


def test_each_number_of_ranks_has_one_mpi_in_turn() -> None:
    counts, pythons = [1, 2, 3, 4, 7], ["a", "b"]
    runs = {count: [python for python in pythons if turn(python, count, pythons, counts)] for count in counts}
    assert runs == {1: ["a"], 2: ["b"], 3: ["a"], 4: ["b"], 7: ["a"]}
    assert all(turn("a", count, ["a"], counts) for count in counts)


def test_unit_tests_are_cut_into_runs_that_hold_each_file_once() -> None:
    places = [ROOT / place for of_a_run in parts("unit", Choice()).values() for place in of_a_run]
    found = [file for place in places for file in (place.rglob("test_*.py") if place.is_dir() else [place])]
    assert sorted(found) == sorted((ROOT / "tests" / "unit").rglob("test_*.py"))
    assert len(parts("unit", Choice(("tests/unit/test_child.py::test_stages_have_names",)))) == 1


def test_words_for_pytest() -> None:
    assert Choice(("-k", "mpips")).of("tests/mpi") == ["-m", CORE, "-k", "mpips", "tests/mpi"]
    file = "tests/unit/test_child.py::x"
    assert Choice((file,), "all").of("tests/unit") == ["-m", ALL, file]


@pytest.mark.parametrize("new", [False, True])
def test_core_and_rest_run_each_test_once_between_them_where_the_core_runs_any(new: bool) -> None:
    core, rest = (Choice((), part).of(new=new)[1] for part in ("core", "rest"))
    assert (core, rest) == (CORE, REST if new else SLOW)
    for slow, full, huge in product((False, True), repeat=3):
        ran = [eval(words, {}, {"slow": slow, "full": full, "huge": huge}) for words in (core, rest)]
        assert sum(ran) == 0 if full or huge else sum(ran) == 1 or (new and not slow)


IGNORES = """
import signal, subprocess, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)  # as a shell without job control does for what it starts with &
from tests import child, run
sys.argv = ["tests.run", "--stages", "lint"]
run.tool = lambda *_: run.Result("", int(not child.run([sys.executable, "-c",
    "import signal; assert signal.getsignal(signal.SIGINT) is signal.default_int_handler"], 60, run.ROOT)), 0)
sys.exit(run.main())
"""


def test_tests_hear_interrupts_also_where_the_driver_was_started_to_ignore_them() -> None:
    done = subprocess.run([sys.executable, "-c", IGNORES], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stdout.endswith(" passed, 0 failed\n"), done.stdout + done.stderr


def test_what_several_runs_have_found_is_summed(tmp_path: Path) -> None:
    for part, failed in (("core", 0), ("rest", 1)):
        record(tmp_path / "record", part, 90.0, [Result("a", 3, failed, 2, 7.0, ("why",) * failed, ((0.1, "test"),))])
    words = [sys.executable, "-m", "tests.report", str(tmp_path / "record")]
    assert subprocess.run(words, cwd=ROOT, capture_output=True, text=True).stdout == (
        "\n2 parts in 3 minutes\nall: 6 passed, 1 failed, 4 skipped\n"
    )
