"""The machine: what memory cannot hold is refused with a sentence, and nothing else is.

Copies longer than the last cache go past it, where glibc takes the cache for larger than it is.

How many cores a process may use, by the files of control groups in a folder that stands for a machine's root.
"""

from __future__ import annotations

import fcntl
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from collectives import machine
from collectives.machine import (
    SYSCONF_LEVEL3,
    THRESHOLD,
    TUNABLES,
    Quota,
    bound_cores,
    choose_long_copies,
    correct_threshold,
    find_quota,
    find_readable,
    past_caches,
    usable_cores,
)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "total_memory", lambda: 4 << 30)


def test_what_fits_passes_and_one_array_more_does_not(small: None) -> None:
    machine.check_memory("--sizes 1GiB", 1 << 30, 2, 2)
    said = r"--sizes 1GiB takes at least 5 arrays of 1,073,741,824 bytes, 5\.0 GiB, and this machine has 4\.0 GiB"
    with pytest.raises(ValueError, match=said):
        machine.check_memory("--sizes 1GiB", 1 << 30, 5)


def test_all_ranks_of_the_machine_count(small: None) -> None:
    with pytest.raises(ValueError, match=r"3 arrays of 1,073,741,824 bytes on each of 2 ranks, 6\.0 GiB"):
        machine.check_memory("--sizes 1GiB", 1 << 30, 3, 2)


@pytest.mark.parametrize("name", machine.LOCAL_SIZES)
def test_the_launcher_says_how_many_ranks_are_here(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for each in machine.LOCAL_SIZES:
        monkeypatch.delenv(each, raising=False)
    assert machine.count_local_ranks() == 1
    monkeypatch.setenv(name, "3")
    assert machine.count_local_ranks() == 3


MIB = 1 << 20


def test_a_cache_taken_for_a_larger_one_is_corrected():
    corrected = {TUNABLES: f"glibc.cpu.x86_non_temporal_threshold={24 * MIB:#x}"}
    assert correct_threshold(384 * MIB, 32 * MIB, {}) == corrected


@pytest.mark.parametrize("real", [96 * MIB, 480 * MIB])
def test_of_a_cache_that_many_share_a_part_counts(real):
    assert correct_threshold(480 * MIB, real, {}) == {TUNABLES: f"glibc.cpu.x86_non_temporal_threshold={24 * MIB:#x}"}


@pytest.mark.parametrize(
    "believed, real",
    [(24 * MIB, 480 * MIB), (32 * MIB, 32 * MIB), (0, 32 * MIB), (-1, 32 * MIB), (384 * MIB, 0)],
)
def test_a_cache_that_is_right_or_unknown_is_left_alone(believed, real):
    assert correct_threshold(believed, real, {}) == {}


def test_what_the_user_set_stays():
    other = "glibc.malloc.check=3"
    assert correct_threshold(384 * MIB, 32 * MIB, {TUNABLES: "glibc.cpu.x86_non_temporal_threshold=0x8000000"}) == {}
    assert correct_threshold(384 * MIB, 32 * MIB, {TUNABLES: other})[TUNABLES].split(":")[0] == other


@pytest.mark.parametrize(
    ("value", "nbytes"),
    [
        ("glibc.cpu.x86_non_temporal_threshold=0x1800000", 24 * MIB),
        ("glibc.malloc.check=3:glibc.cpu.x86_non_temporal_threshold=1048576", MIB),
    ],
)
def test_a_process_knows_which_copies_go_past_its_caches(value, nbytes):
    assert past_caches({TUNABLES: value}) == nbytes


@pytest.mark.parametrize(("believed", "nbytes"), [(32 * MIB, 24 * MIB), (0, sys.maxsize), (-1, sys.maxsize)])
@pytest.mark.parametrize("value", ["", "glibc.malloc.check=3", f"{THRESHOLD}=much:{THRESHOLD}=0"])
def test_where_nobody_set_it_glibc_takes_three_quarters_of_the_cache_it_knows(monkeypatch, believed, nbytes, value):
    monkeypatch.setattr(os, "sysconf", {SYSCONF_LEVEL3: believed}.__getitem__)
    assert past_caches({TUNABLES: value}) == nbytes


def test_a_machine_without_that_file_sets_nothing(monkeypatch, tmp_path):
    monkeypatch.setattr(machine, "LEVEL3", tmp_path / "size")
    assert choose_long_copies({}) == {}


def test_a_process_with_the_variable_starts():
    variables = {**os.environ, **correct_threshold(384 * MIB, 32 * MIB, {})}
    done = subprocess.run([sys.executable, "-c", "print(1)"], env=variables, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("1\n", "")


V1 = "32 31 0:29 {mounted} /sys/fs/cgroup/cpu,cpuacct rw,relatime - cgroup cgroup rw,cpu,cpuacct\n"
V2 = "41 31 0:38 {mounted} /sys/fs/cgroup rw,relatime shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
NOISE = "22 1 0:20 / /proc rw,nosuid - proc proc rw\n33 31 0:30 / /sys/fs/cgroup/cpuset rw - cgroup cgroup rw,cpuset\n"


def make_root(root: Path, version: int, group: str, quotas: dict[str, str], mounted: str = "/") -> Path:
    """A machine's root: a process of `group`, and a quota, "spent period", for each folder below the mount."""
    (root / "proc/self").mkdir(parents=True)
    lines = {1: f"5:cpuset:/\n4:cpu,cpuacct:{group}\n0::/\n", 2: f"0::{group}\n"}
    (root / "proc/self/cgroup").write_text(lines[version])
    (root / "proc/self/mountinfo").write_text(NOISE + {1: V1, 2: V2}[version].format(mounted=mounted))
    for folder, text in quotas.items():
        place = root / ("sys/fs/cgroup/cpu,cpuacct" if version == 1 else "sys/fs/cgroup") / folder
        place.mkdir(parents=True, exist_ok=True)
        if version == 2:
            (place / "cpu.max").write_text(text + "\n")
        else:
            spent, period = text.replace("max", "-1").split()
            (place / "cpu.cfs_quota_us").write_text(spent + "\n")
            (place / "cpu.cfs_period_us").write_text(period + "\n")
    return root


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(
    ("group", "quotas", "mounted", "cores"),
    [
        pytest.param("/job", {"job": "150000 100000"}, "/", 1, id="rounded down"),
        pytest.param("/job", {"job": "20000 100000"}, "/", 1, id="at least one"),
        pytest.param("/job", {"job": "250000 50000"}, "/", 5, id="another period"),
        pytest.param("/job", {"job": "max 100000"}, "/", None, id="none"),
        pytest.param("/job/step", {"job": "300000 100000", "job/step": "max 100000"}, "/", 3, id="a parent's"),
        pytest.param("/job/step", {"job": "300000 100000", "job/step": "200000 100000"}, "/", 2, id="the smaller"),
        pytest.param("/", {"": "200000 100000"}, "/", 2, id="the root of a container's own view"),
        pytest.param("/docker/a", {"": "200000 100000"}, "/docker/a", 2, id="a container mounts its group"),
        pytest.param("/docker/a/b", {"": "max 100000", "b": "100000 100000"}, "/docker/a", 1, id="a group below that"),
        pytest.param("/../job", {"": "400000 100000"}, "/", 4, id="outside of what is seen"),
        pytest.param("/job", {"other": "100000 100000"}, "/", None, id="another's"),
        pytest.param("/job", {"job": "100000 0"}, "/", None, id="no period"),
    ],
)
def test_a_quota_bounds_cores(
    tmp_path: Path, version: int, group: str, quotas: dict[str, str], mounted: str, cores: int | None
) -> None:
    root = make_root(tmp_path, version, group, quotas, mounted)
    found = find_quota(root)
    assert (found.cores if found else None) == cores
    affinity = len(os.sched_getaffinity(0))
    assert usable_cores(root) == min(affinity, cores or affinity)


def test_a_machine_without_control_groups_has_no_quota(tmp_path: Path) -> None:
    assert find_quota(tmp_path) is None


def test_processes_of_one_group_share_its_quota() -> None:
    assert bound_cores(8, [Quota(2, 1), Quota(2, 1)]) == 2
    assert bound_cores(8, [Quota(2, 1), Quota(2, 7)]) == 4
    assert bound_cores(8, [Quota(2, 1), None]) == 8
    assert bound_cores(8, []) == 8
    assert bound_cores(1, [Quota(2, 1)]) == 1


MEMORY = {
    1: (
        "31 31 0:29 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n",
        "3:memory:/job/step\n0::/\n",
        "sys/fs/cgroup/memory",
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        "total_inactive_file",
    ),
    2: (
        "41 31 0:38 / /sys/fs/cgroup rw,relatime - cgroup2 cgroup2 rw\n",
        "0::/job/step\n",
        "sys/fs/cgroup",
        "memory.max",
        "memory.current",
        "inactive_file",
    ),
}


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(
    "limits, total, free",
    [
        ({"job": 900, "job/step": 700}, 700, 600),
        ({"job": 500, "job/step": 700}, 500, 400),
        ({"job": None, "job/step": 700}, 700, 600),
        ({"job": None, "job/step": None}, None, 3000),
        ({}, None, 3000),
    ],
    ids=str,
)
def test_a_control_group_bounds_memory(
    tmp_path: Path, version: int, limits: dict[str, int | None], total: int | None, free: int
) -> None:
    """In MiB: of the machine 3,000 are free; each group has taken 150, of which 50 are files that nobody reads."""
    mounts, groups, place, most, taken, files = MEMORY[version]
    swap = 200 if version == 2 and total else 300
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(groups)
    (tmp_path / "proc/self/mountinfo").write_text(mounts)
    (tmp_path / "proc/meminfo").write_text(
        f"MemTotal: 4096000 kB\nMemAvailable: {3000 << 10} kB\nSwapTotal: 0 kB\nSwapFree: {300 << 10} kB\n"
    )
    for folder, limit in limits.items():
        (where := tmp_path / place / folder).mkdir(parents=True, exist_ok=True)
        none = "max" if version == 2 else str((1 << 63) - 4096)
        (where / most).write_text(f"{none if limit is None else limit * MIB}\n")
        (where / taken).write_text(f"{150 * MIB}\n")
        if version == 2:
            (where / "memory.swap.max").write_text("max\n" if limit is None else f"{swap * MIB}\n")
            (where / "memory.swap.current").write_text("0\n")
        (where / "memory.stat").write_text(f"cache {100 * MIB}\n{files} {50 * MIB}\n")
    assert machine.free_memory(tmp_path) == free * MIB
    assert machine.free_swap(tmp_path) == (0 if version == 1 and total else swap * MIB)
    whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert machine.total_memory(tmp_path) == (whole if total is None else total * MIB)


def test_descriptors_above_1023_are_waited_for() -> None:
    least = 1 << 10
    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] <= least + 1:
        pytest.skip("no process has so many here")
    reader, writer = os.pipe()
    high = fcntl.fcntl(reader, fcntl.F_DUPFD, least)
    try:
        assert find_readable([high], 0.01) == []
        os.write(writer, b"1")
        assert find_readable([high]) == [high]
        os.read(high, 1)
        os.close(writer)
        assert find_readable([high], 10) == [high]
    finally:
        os.close(reader)
        os.close(high)
