"""Kill a rank at a random moment, many times: does its page name the operation that it was in?

    python -m examples.reproduce.store.killed [--kills 50]

The killed rank is in turn a worker, a server, a spare and a member of a client. Just before each call, and again after
it, a worker writes the number of the operation into a file of its own. These numbers are the truth, which the recorder
does not know. A worker's page is right if it names the operation whose number was written last. If the kill came after
this number was written but before the call began, the page names the operation before: such kills are counted
separately. A server's page is right if it names the sum of a key that the truth allows: no older sum than one that a
worker has already read, and no newer one than all workers have begun to push.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from collectives.recorder import folders, page

ROLES = ("worker", "server", "spare", "client member")
# key -> elements
KEYS = {"w": 10, "b": 1000, "long": 300_000}
# more operations than a job gets to
MOST = 200_000
# the number of operations that every worker must have begun before a kill
WARM = 20


def operations() -> list[tuple[str, str]]:
    """Return the operations, (call, key), that every worker calls. They are the same in every process."""
    chance, found = random.Random(7), []
    while len(found) < MOST:
        key = chance.choice(list(KEYS))
        found += chance.choice([[("pushpull", key)], [("push", key), ("pull", key)], [("barrier", "")]])
    return found


def work(folder: Path, kind: str) -> None:
    """Run as a worker: call one operation after another until the job ends. Write the truth to `folder`."""
    import mpips

    kv = mpips.create(kind)
    arrays = {key: np.ones(size, np.float32) for key, size in KEYS.items()}
    for key, array in arrays.items():
        kv.init(key, array)
    path = folder / f"{os.getpid()}.truth"
    path.write_bytes(bytes(16))
    with path.open("r+b") as file:
        truth = memoryview(mmap.mmap(file.fileno(), 16)).cast("Q")
    for number, (call, key) in enumerate(operations(), 1):
        arguments = (key, arrays[key]) if key else ()
        truth[0] = number
        getattr(kv, call)(*arguments)
        truth[1] = number


def truths(folder: Path) -> dict[int, tuple[int, int]]:
    """Return a dict from a worker's process to the numbers of the operations that it last began and last ended."""
    found = {int(path.stem): np.fromfile(path, np.uint64, 2).tolist() for path in folder.glob("*.truth")}
    return {pid: (words[0], words[1]) for pid, words in found.items() if len(words) == 2}


def sums(calls: Sequence[tuple[str, str]]) -> list[str]:
    """Return the keys that these calls push, in order."""
    return [key for call, key in calls if call in ("push", "pushpull")]


def kill(role: str, folder: Path, chance: random.Random) -> tuple[str, str]:
    """Run a job and kill a rank of this role in it. Return the verdict of `judge`, and the text of the rank's page."""
    shape = ["-w", "4", "-c", "2", "-s", "1"] if role == ROLES[3] else ["-w", "2", "-s", "1", "--spares", "1"]
    words = [
        sys.executable,
        "-m",
        "launch.cli",
        "run",
        *shape,
        "-m",
        "examples.reproduce.store.killed",
        "--work",
        str(folder),
        "--kind",
        "mpi_sync" if role == ROLES[3] else "dist_sync",
    ]
    job = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    pages = folders.jobs_folder() / str(job.pid)
    try:
        await_work(folder, 4 if role == ROLES[3] else 2, job)
        time.sleep(chance.uniform(0.0, 0.5))
        ranks = {int(path.stem): seen for path in pages.glob(f"*{folders.PAGE}") if (seen := page.read(path))}
        wanted = role if role in ("server", "spare") else "worker"
        pid = chance.choice([pid for pid, seen in ranks.items() if seen.identity.get("role", "").startswith(wanted)])
        os.kill(pid, signal.SIGKILL)
        # Wait until it is a zombie. If its launcher has collected it already, its folder in /proc is gone.
        with suppress(FileNotFoundError, ProcessLookupError):
            while " Z " not in (Path("/proc") / str(pid) / "stat").read_text():
                time.sleep(0.001)
        last = page.read(pages / f"{pid}{folders.PAGE}")
        # After this the workers have come to a standstill.
        time.sleep(0.5)
        assert last is not None
        lane = max((lane for lane in last.lanes if lane.text), key=lambda lane: lane.identity)
        return judge(role, pid, lane, truths(folder)), lane.text
    finally:
        job.terminate()
        try:
            job.wait(30)
        finally:
            job.kill()


def judge(role: str, pid: int, lane: page.LastCall, truth: dict[int, tuple[int, int]]) -> str:
    """Compare the page of a killed rank with the truth. Return "right", "between" or "wrong".

    "between" means that a worker's page names the operation before, because the worker had written the number of the
    next operation but not begun it.
    """
    calls = operations()
    if role == "spare":
        return "right" if lane.text == "the wait of a spare" else "wrong"
    if role == "server":
        least = max(len(sums(calls[:ended])) - (calls[ended - 1][0] == "push") for _, ended in truth.values() if ended)
        most = min(len(sums(calls[:begun])) for begun, _ in truth.values())
        allowed = [f"sum of key {key!r}" for key in sums(calls[: MOST // 10])[least - 1 : most]]
        return "right" if lane.text in allowed else "wrong"
    number = truth[pid][0]
    named = [f"{call} of key {key!r}" if key else call for call, key in calls[max(0, number - 2) : number]]
    return "right" if lane.text == named[-1] else "between" if lane.text == named[0] else "wrong"


def await_work(folder: Path, workers: int, job: subprocess.Popen[bytes]) -> None:
    """Wait until all workers have begun WARM operations."""
    limit = time.monotonic() + 120
    while len(now := truths(folder)) < workers or min(begun for begun, _ in now.values()) < WARM:
        if job.poll() is not None or time.monotonic() > limit:
            raise RuntimeError(f"the job has not begun to work: {now}")
        time.sleep(0.01)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--kills", type=int, default=50)
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--work", type=Path)
    options.add_argument("--kind", default="dist_sync")
    asked = options.parse_args()
    if asked.work is not None:
        work(asked.work, asked.kind)
        return
    chance = random.Random(asked.seed)
    counts: dict[str, dict[str, int]] = {role: {"right": 0, "between": 0, "wrong": 0} for role in ROLES}
    for number in range(asked.kills):
        role = ROLES[number % len(ROLES)]
        with tempfile.TemporaryDirectory() as folder:
            verdict, said = kill(role, Path(folder), chance)
        counts[role][verdict] += 1
        print(f"{number + 1} {role}: {verdict}: {said}", flush=True)
    print(json.dumps(counts))


if __name__ == "__main__":
    main()
