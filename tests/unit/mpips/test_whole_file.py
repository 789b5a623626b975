"""Files that appear whole or not at all."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from mpips import whole_file


def test_a_file_takes_the_place_of_the_one_before(tmp_path: Path) -> None:
    target = tmp_path / "x"
    for text in ("one", "two"):
        whole_file.put(target, lambda name, text=text: Path(name).write_text(text))  # type: ignore[misc]
        assert target.read_text() == text
    assert os.listdir(tmp_path) == ["x"]


def test_what_was_there_stays_where_writing_fails(tmp_path: Path) -> None:
    target = tmp_path / "x"
    target.write_text("kept")

    def fails(name: str) -> None:
        Path(name).write_text("half")
        raise OSError("the disk is full")

    with pytest.raises(OSError, match="the disk is full"):
        whole_file.put(target, fails)
    assert target.read_text() == "kept"


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=f"there is no folder {tmp_path / 'nowhere'}: make it first"):
        whole_file.put(tmp_path / "nowhere" / "x", lambda name: Path(name).write_text("x"))


def test_what_is_no_file_is_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(OSError, match="pipe is there and no regular file"):
        whole_file.put(pipe, lambda name: Path(name).write_text("x"))
    assert stat.S_ISFIFO(pipe.stat().st_mode)
