"""Files that mpips writes: whole or not at all, through no link that somebody has planted, with the mode they had."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from collectives import files
from tests.internals import ROOT

NOBODY = 65534


def test_planted_links_are_not_followed(tmp_path):
    theirs, path = tmp_path / "theirs", tmp_path / "x"
    theirs.write_text("theirs")
    for name in ("x", "x.part", "x.tmp"):
        (tmp_path / name).symlink_to(theirs)
    files.write(path, b"mine")
    assert theirs.read_text() == "theirs"
    assert path.read_text() == "mine" and not path.is_symlink()


def test_an_unfinished_file_has_a_name_that_differs_each_time(tmp_path):
    names = set()
    for _ in range(3):
        file = files.NewFile(tmp_path / "x")
        names.update(os.listdir(tmp_path))
        file.abandon()
    assert len(names) == 3 and not os.listdir(tmp_path)


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o444])
def test_the_mode_stays(tmp_path, mode):
    path = tmp_path / "x"
    path.write_text("old")
    path.chmod(mode)
    file = files.NewFile(path)
    assert stat.S_IMODE(os.fstat(file.fd).st_mode) == mode  # nobody can look into it meanwhile
    files.write_all(file.fd, b"new")
    file.finish()
    assert path.read_text() == "new" and stat.S_IMODE(path.stat().st_mode) == mode


def test_what_a_kill_left_goes_and_what_is_being_written_stays(tmp_path):
    left, other, old = tmp_path / f"x.{'a' * 16}.part", tmp_path / f"y.{'a' * 16}.part", tmp_path / "x.part"
    for path in (left, other, old):
        path.write_text("half")
        os.utime(path, (1, 1))
    writing = files.NewFile(tmp_path / "x")
    assert not left.exists() and other.exists() and old.exists()
    os.utime(writing.fd, (1, 1))
    files.write(tmp_path / "x", b"whole")
    writing.finish()
    assert sorted(os.listdir(tmp_path)) == ["x", "x.part", other.name]


def test_streams_are_written_as_they_are(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.append((tmp_path / "pipe").read_bytes()))
    reader.start()
    files.write(tmp_path / "pipe", b"words")
    reader.join(10)
    assert read == [b"words"] and stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)
    code = "from collectives import files\nfor name in ('/dev/null', '/dev/stdout'):\n    files.write(name, b'words')"
    with open(tmp_path / "out", "w") as out:
        subprocess.run([sys.executable, "-c", code], stdout=out, check=True, timeout=60, cwd=ROOT)
    assert (tmp_path / "out").read_text() == "words" and stat.S_ISCHR(os.stat("/dev/null").st_mode)


@pytest.mark.skipif(os.getuid() != 0, reason="becomes another user")
def test_a_file_in_a_folder_that_takes_no_new_one_is_written(tmp_path):
    folder = tmp_path / "closed"
    folder.mkdir()
    for name in ("mine", "link"):
        (folder / name).write_text("something long")
        os.chown(folder / name, NOBODY, NOBODY)
    (folder / "planted").symlink_to(folder / "link")
    for each in (folder, *folder.parents):
        if each != Path("/") and each.stat().st_uid == 0 and not each.stat().st_mode & stat.S_ISVTX:
            each.chmod(each.stat().st_mode | 0o055)
    pid = os.fork()
    if not pid:
        code = 1
        try:
            os.setuid(NOBODY)
            files.write(folder / "mine", b"new")
            try:
                files.write(folder / "planted", b"new")
            except PermissionError:
                code = 0
        finally:
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0
    assert (folder / "mine").read_text() == "new" and (folder / "link").read_text() == "something long"


def test_a_full_disk_leaves_what_was_there(tmp_path):
    """As a limit on the bytes of a file, which fails as a full disk does."""
    code = """
import resource, signal, sys
from collectives import files
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
    files.write(sys.argv[1], bytes(5000))
except OSError as error:
    print(error.strerror)
"""
    (tmp_path / "x").write_text("old")
    run = [sys.executable, "-c", code, tmp_path / "x"]
    done = subprocess.run(run, capture_output=True, text=True, check=True, timeout=60, cwd=ROOT)
    assert done.stdout == "File too large\n"
    assert os.listdir(tmp_path) == ["x"] and (tmp_path / "x").read_text() == "old"


@pytest.mark.slow
def test_two_writers_at_once_leave_one_of_both(tmp_path):
    ends = time.monotonic() + 0.5

    def write(number):
        while time.monotonic() < ends:
            files.write(tmp_path / "x", bytes([number]) * 5000)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert os.listdir(tmp_path) == ["x"] and len(set((tmp_path / "x").read_bytes())) == 1
