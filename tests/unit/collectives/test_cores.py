"""How many cores a process may use, by the files of control groups in a folder that stands for a machine's root."""

import os
from pathlib import Path

import pytest

from collectives.machine import Quota, bound_cores, find_quota, usable_cores

V1 = "32 31 0:29 {mounted} /sys/fs/cgroup/cpu,cpuacct rw,relatime - cgroup cgroup rw,cpu,cpuacct\n"
V2 = "41 31 0:38 {mounted} /sys/fs/cgroup rw,relatime shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
NOISE = "22 1 0:20 / /proc rw,nosuid - proc proc rw\n33 31 0:30 / /sys/fs/cgroup/cpuset rw - cgroup cgroup rw,cpuset\n"


def machine(root: Path, version: int, group: str, quotas: dict[str, str], mounted: str = "/") -> Path:
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
@pytest.mark.parametrize(("group", "quotas", "mounted", "cores"), [
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
])  # fmt: skip
def test_a_quota_bounds_cores(
    tmp_path: Path, version: int, group: str, quotas: dict[str, str], mounted: str, cores: int | None
) -> None:
    root = machine(tmp_path, version, group, quotas, mounted)
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
