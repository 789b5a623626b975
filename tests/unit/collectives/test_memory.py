"""What memory cannot hold is refused with a sentence, and nothing else is."""

from __future__ import annotations

import pytest

from collectives import machine


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "total_memory", lambda: 4 << 30)


def test_what_fits_passes_and_one_array_more_does_not() -> None:
    machine.check_memory("--sizes 1GiB", 1 << 30, 2, 2)
    said = r"--sizes 1GiB takes at least 5 arrays of 1,073,741,824 bytes, 5\.0 GiB, and this machine has 4\.0 GiB"
    with pytest.raises(ValueError, match=said):
        machine.check_memory("--sizes 1GiB", 1 << 30, 5)


def test_all_ranks_of_the_machine_count() -> None:
    with pytest.raises(ValueError, match=r"3 arrays of 1,073,741,824 bytes on each of 2 ranks, 6\.0 GiB"):
        machine.check_memory("--sizes 1GiB", 1 << 30, 3, 2)


@pytest.mark.parametrize("name", machine.LOCAL_SIZES)
def test_the_launcher_says_how_many_ranks_are_here(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for each in machine.LOCAL_SIZES:
        monkeypatch.delenv(each, raising=False)
    assert machine.count_local_ranks() == 1
    monkeypatch.setenv(name, "3")
    assert machine.count_local_ranks() == 3
