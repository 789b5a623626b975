"""A ring of records: what is written is read, the newest last, and never a torn one, also while others write."""

from __future__ import annotations

import mmap
import multiprocessing
import time
from pathlib import Path

import pytest

from collectives.recorder.ring import HEAD_BYTES, RECORD_BYTES, RecordRing, form, read, read_file


def ring_of(slots: int) -> tuple[RecordRing, mmap.mmap]:
    memory = mmap.mmap(-1, HEAD_BYTES + slots * RECORD_BYTES)
    return RecordRing(memory), memory


def test_a_call_is_scheduled_started_and_completed() -> None:
    ring, memory = ring_of(8)
    call = form(7, "allreduce", "wörds", 4000, 1000, "float32", line="train.py:3")
    sequence = ring.begin(call, starts=False)
    (record,) = read(memory)
    assert (record.state, record.lane, record.operation, record.subject) == ("scheduled", 7, "allreduce", "wörds")
    assert (record.nbytes, record.elements, record.dtype, record.line) == (4000, 1000, "float32", "train.py:3")
    ring.start(sequence, 5, 2)
    assert [(one.state, one.number, one.round) for one in read(memory)] == [("started", 5, 2)]
    ring.end(sequence)
    (record,) = read(memory)
    assert record.state == "completed" and 0 < record.made_ns <= record.begun_ns <= record.ended_ns


def test_the_newest_replace_the_oldest_and_an_old_end_is_lost() -> None:
    ring, memory = ring_of(4)
    first = ring.begin(form(1, "push"))
    for number in range(1, 11):
        ring.begin(form(1, "pull"), number)
    ring.end(first)
    assert [one.number for one in read(memory)] == [7, 8, 9, 10]
    assert {one.state for one in read(memory)} == {"started"}


def test_what_is_no_ring_has_no_records(tmp_path: Path) -> None:
    (tmp_path / "other").write_bytes(b"x" * 4096)
    assert read_file(tmp_path / "other") == [] and read(b"short") == []


def write(path: Path, seconds: float) -> None:
    with path.open("r+b") as file:
        ring = RecordRing(mmap.mmap(file.fileno(), 0))
    forms = [form(letter, chr(letter) * 24, chr(letter) * 72, letter, letter, chr(letter) * 16) for letter in b"abcxyz"]
    end, number = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        number += 1
        one = forms[number % 6]
        ring.end(ring.begin(one, one[0], one[0]))


@pytest.mark.slow
def test_no_torn_record_is_read_while_another_process_writes(tmp_path: Path) -> None:
    path = tmp_path / "ring"
    path.write_bytes(bytes(HEAD_BYTES + 3 * RECORD_BYTES))
    writer = multiprocessing.get_context("fork").Process(target=write, args=(path, 1.5))
    writer.start()
    seen = set()
    while writer.is_alive():
        for one in read_file(path):
            letter = chr(one.lane)
            assert (one.number, one.round, one.nbytes, one.elements) == (one.lane,) * 4
            assert (one.operation, one.subject, one.dtype) == (letter * 24, letter * 72, letter * 16)
            assert one.ended_ns in (0, max(one.ended_ns, one.begun_ns))
            seen.add(one.sequence)
    writer.join()
    assert len(seen) > 100 and writer.exitcode == 0
