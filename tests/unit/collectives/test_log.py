"""The log: what is shown and written, by which variables, beside a program's own configuration; and one file of all."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from collectives import log
from mpips.store.options import OptionError
from mpips.store.options import read as read_options
from tests.child import outside

LINE = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z process \d+ \(\d+\.\d{3} s\) "
SPEAK = """
from collectives import log
LOG = log.get("mpips.spoken")
LOG.debug("small"); LOG.info("of %d rows", 3); LOG.warning("two\\nlines")
"""
PLACED = f"""
from collectives import log
state = log.rank_state
state.name, state.rank, state.role, state.generation, state.step = "rank 4", 4, "server", 2, 7
{SPEAK}
try:
    raise KeyError("lost")
except KeyError:
    LOG.exception("caught")
"""


def spoken(program: str = SPEAK, **variables: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**outside(), **variables},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done


def test_warnings_alone_are_shown_where_nothing_is_asked() -> None:
    assert spoken().stderr == "two\nlines\n"


@pytest.mark.slow
def test_a_program_that_logs_at_info_has_only_its_own_lines_unless_it_asks() -> None:
    own = "import logging\nlogging.basicConfig(level=logging.INFO, format='%(message)s')\n"
    asks = "logging.getLogger('mpips').setLevel(logging.INFO)\n"
    assert spoken(own + SPEAK).stderr == "two\nlines\n"
    assert spoken(own + asks + SPEAK).stderr == "of 3 rows\ntwo\nlines\n"
    assert spoken(own + SPEAK + asks + "LOG.info('later')\n").stderr == "two\nlines\nlater\n"


@pytest.mark.parametrize(("level", "shown"), [("debug", 4), ("info", 3), ("warning", 2)])
def test_lines_of_a_level_say_when_who_and_what(level: str, shown: int) -> None:
    lines = spoken(MPIPS_LOG=level).stderr.splitlines()
    assert len(lines) == shown, lines
    assert re.fullmatch(f"{LINE}mpips.spoken warning: two", lines[-2]) and lines[-1] == "    lines"
    assert level == "warning" or re.fullmatch(f"{LINE}mpips.spoken: of 3 rows", lines[-3])


def test_a_line_says_where_in_its_work_a_rank_is() -> None:
    lines = spoken(PLACED, MPIPS_LOG="info").stderr.splitlines()
    where = r"rank 4 \(server, generation 2, step 7, \d+\.\d{3} s\) mpips.spoken"
    assert re.fullmatch(f"{where}: of 3 rows", lines[0][28:])
    assert re.match(f"{where} error: caught", lines[3][28:])
    assert lines[-1] == "    KeyError: 'lost'"


@pytest.mark.slow
@pytest.mark.parametrize("where", ["the root", "mpips"])
def test_a_program_that_configures_logging_gets_each_record_once(where: str) -> None:
    own = f"""
import logging
handler = logging.StreamHandler()
handler.setFormatter(logging.Formatter("own %(rank)d %(step)d %(message)s"))
logging.getLogger({"" if where == "the root" else where!r}).addHandler(handler)
"""
    for order in (own + PLACED, PLACED.replace("LOG.debug", own + "LOG.debug")):
        lines = spoken(order, MPIPS_LOG="info").stderr.splitlines()
        assert lines[:3] == ["own 4 7 rank 4: of 3 rows", "own 4 7 rank 4: two", "lines"], lines
        assert sum("of 3 rows" in line for line in lines) == 1


def test_json_lines_are_objects(tmp_path: Path) -> None:
    spoken(PLACED, MPIPS_LOG_DIR=str(tmp_path / "new" / "folder"), MPIPS_LOG_FORMAT="json")
    (file,) = (tmp_path / "new" / "folder").iterdir()
    found = [json.loads(line) for line in file.read_text().splitlines()]
    assert file.name == "rank-4.jsonl" and file.stat().st_mode & 0o77 == 0
    assert [one["message"] for one in found] == ["of 3 rows", "two\nlines", "caught"]
    assert found[0] | {"rank": 4, "role": "server", "generation": 2, "step": 7, "level": "info"} == found[0]
    assert "KeyError: 'lost'" in found[2]["error"] and found[2]["level"] == "error"


def test_a_folder_takes_the_lines_and_leaves_warnings_on_the_terminal(tmp_path: Path) -> None:
    done = spoken(PLACED, MPIPS_LOG_DIR=str(tmp_path))
    assert "of 3 rows" in (tmp_path / "rank-4.log").read_text()
    assert "of 3 rows" not in done.stderr and "two" in done.stderr


def test_a_folder_that_cannot_be_written_is_said_once_and_the_program_goes_on(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = spoken(PLACED + "print('on')", MPIPS_LOG_DIR=str(tmp_path / "file" / "below"))
    assert done.stdout == "on\n" and done.stderr.count("the log is not written any more") == 1


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_is_said_once(tmp_path: Path) -> None:
    (tmp_path / "rank-4.log").symlink_to("/dev/full")
    done = spoken(PLACED + "print('on')", MPIPS_LOG_DIR=str(tmp_path))
    assert done.stdout == "on\n" and done.stderr.count("the log is not written any more") == 1


def test_a_link_that_another_user_has_planted_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "other").write_text("")
    (tmp_path / "rank-4.log").symlink_to(tmp_path / "other")
    spoken(PLACED, MPIPS_LOG_DIR=str(tmp_path))
    assert (tmp_path / "other").read_text() == ""


@pytest.mark.parametrize(("variable", "word"), [("MPIPS_LOG", "loud"), ("MPIPS_LOG_FORMAT", "xml")])
def test_an_unknown_word_is_refused_with_the_known_ones(variable: str, word: str) -> None:
    with pytest.raises(OptionError, match=f"{variable}='{word}' is unknown: give "):
        read_options({}, {variable: word})
    assert "Traceback" not in spoken(**{variable: word}).stderr


def test_files_are_joined_by_time(tmp_path: Path) -> None:
    (tmp_path / "rank-0.log").write_text("2026-11-27T10:00:00.000001Z a\n    more\n2026-11-27T10:00:03.000000Z d\n")
    (tmp_path / "rank-1.log").write_text("2026-11-27T10:00:00.000002Z b\n2026-11-27T10:00:02.000000Z c")
    made = log.merge(tmp_path, "text")
    assert made is not None and [line[28:] or line for line in made.read_text().splitlines()] == [
        "a",
        "    more",
        "b",
        "c",
        "d",
    ]
    made.write_text("another's")
    with pytest.raises(FileExistsError):
        log.merge(tmp_path, "text")
    assert made.read_text() == "another's"
    assert log.merge(tmp_path / "rank-0.log" / "..", "json") is None
