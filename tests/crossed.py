"""Count the files that a call crosses, with a profiler: `python -m tests.crossed [CASE ...] [-v]`.

Each case starts a job by `mpips run`. A file counts if one of its functions runs during the call, on the worker that
calls or on a server. Functions that servers run all the time, even without a call, do not count, except for the loop
of the server. Of five calls, the one with the fewest files counts.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
# All code is below this folder, because collectives and launch are links in it.
PACKAGES = f"{ROOT / 'mpips'}{os.sep}"
LOOP = "mpips/store/server/loop.py"
TEXT: Any = {"text": True, "capture_output": True}
JOB = ("-m", "tests.crossed", "--job")
# A flag of code objects (CO_NEWLOCALS). Functions have it, the bodies of modules and classes do not.
NEWLOCALS = 2
NODES = {"MPIPS_SHARED_MEMORY": "0"}
# case -> (options of `mpips run`, description, environment variables, the number of files to aim at)
CASES: dict[str, tuple[str, str, dict[str, str], int]] = {
    "pushpull": ("-w 2 -s 1", "a pushpull on a node", {}, 11),
    "push": ("-w 2 -s 1", "a push between nodes", NODES, 14),
    "recover": ("-w 2 -s 2 --spares 0", "recover() after a server's death", {}, 20),
    "backward": ("-w 2", "the backward pass of a DataParallel", {}, 8),
    "train": ("-n 1", "mpips train", {}, 20),
}


@cache
def place_of(file: str) -> str:
    """Return the path of a file relative to the repository. Links are followed."""
    return os.path.relpath(os.path.realpath(file), ROOT)


class Crossed:
    """A profiler that records the functions that run while it is `on`, with their files."""

    def __init__(self) -> None:
        self.functions: set[str] = set()
        self.windows: list[list[str]] = []
        self.on = False

    def profile(self, frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if self.on and event == "call" and code.co_flags & NEWLOCALS and code.co_filename.startswith(PACKAGES):
            self.functions.add(f"{place_of(code.co_filename)}:{code.co_qualname}")

    def turn(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal: SIGUSR1 begins a recording, SIGUSR2 ends it and writes it to a file."""
        self.on = number == signal.SIGUSR1
        if not self.on:
            self.write()

    def write(self) -> None:
        self.windows.append(sorted(self.functions))
        self.functions.clear()
        (Path(os.environ["CROSSED"]) / f"{os.getpid()}.json").write_text(json.dumps(self.windows))


@contextlib.contextmanager
def counted(crossed: Crossed, others: list[int]) -> Iterator[None]:
    """Context manager that records functions in this process and in the processes `others`."""
    for other in others:
        with contextlib.suppress(ProcessLookupError):
            os.kill(other, signal.SIGUSR1)
    time.sleep(0.1)
    crossed.on = True
    yield
    crossed.on = False
    time.sleep(0.1)
    for other in others:
        with contextlib.suppress(ProcessLookupError):
            os.kill(other, signal.SIGUSR2)
    time.sleep(0.3)
    crossed.write()


def job(case: str) -> None:
    """Run one rank of a case."""
    crossed = Crossed()
    place = Path(os.environ["CROSSED"])
    signal.signal(signal.SIGUSR1, crossed.turn)
    signal.signal(signal.SIGUSR2, crossed.turn)
    sys.setprofile(crossed.profile)
    threading.setprofile(crossed.profile)
    (place / f"{os.getpid()}.pid").touch()
    {"backward": backward, "train": train}.get(case, store)(case, crossed)


def pids(place: Path) -> list[int]:
    """Return the pids of the other processes of the job, except workers of a store."""
    return [pid for path in place.glob("*.pid") if (pid := int(path.stem)) != os.getpid()]


def store(case: str, crossed: Crossed) -> None:
    """Push and pull one key, or recover after the death of a server."""
    import mpips

    place = Path(os.environ["CROSSED"])
    kv = mpips.create("dist_sync")
    (place / f"{os.getpid()}.pid").rename(place / f"{os.getpid()}.worker")
    value, out = np.ones(1000, np.float32), np.zeros(1000, np.float32)
    kv.init("w", value)
    kv.set_optimizer("sgd", learning_rate=0.1)
    for _ in range(5):
        kv.pushpull("w", value, out=out)
    kv.barrier()
    first = kv.rank == 0
    if case == "recover":
        if first:
            os.kill(pids(place)[0], signal.SIGKILL)
        try:
            # Call until this worker notices the death.
            while True:
                kv.pushpull("w", value, out=out)
        except mpips.StoreError:
            with counted(crossed, pids(place)) if first else contextlib.nullcontext():
                kv.recover()
    else:
        call = (lambda: kv.push("w", value)) if case == "push" else (lambda: kv.pushpull("w", value, out=out))
        if first:
            with counted(crossed, pids(place)):
                time.sleep(0.2)
        for _ in range(5):
            kv.barrier()
            if first:
                # In this time the other worker makes its call.
                time.sleep(0.2)
                with counted(crossed, pids(place)):
                    call()
            else:
                call()
    kv.barrier()
    time.sleep(1)
    kv.close()


def backward(case: str, crossed: Crossed) -> None:
    """Run the backward pass of a small network."""
    import torch

    import mpips.torch

    torch.distributed.init_process_group("mpips")
    model = mpips.torch.DataParallel(torch.nn.Sequential(torch.nn.Linear(50, 50), torch.nn.Linear(50, 50)))
    # Count the fifth pass: the earlier ones also compare parameters and plan buckets.
    for turn in range(5):
        loss = model(torch.ones(4, 50)).sum()
        with counted(crossed, []) if turn == 4 else contextlib.nullcontext():
            loss.backward()


def train(case: str, crossed: Crossed) -> None:
    """Train as `mpips train` does."""
    import runpy

    sys.argv = ["train", *["--data", "digits", "--hidden", "16", "--epochs", "1", "--batch", "100"]]
    crossed.on = True
    with contextlib.suppress(SystemExit):
        runpy.run_module("mpips.mlp", run_name="__main__")
    crossed.write()


def main() -> None:
    """Run the cases that the arguments name, or all, and print a table."""
    names = [name for name in sys.argv[1:] if name != "-v"] or list(CASES)
    for name in names:
        options, description, variables, aim = CASES[name]
        with tempfile.TemporaryDirectory() as place:
            run = [sys.executable, "-m", "launch.cli", "run", *options.split()]
            environment = {**os.environ, **variables, "CROSSED": place}
            done = subprocess.run([*run, *JOB, name], cwd=ROOT, env=environment, timeout=120, **TEXT)
            files: set[str] = set()
            for path in Path(place).glob("*.json"):
                idle, *calls = [set(window) for window in json.loads(path.read_text())]
                alone = min((call - idle for call in calls), key=len) if calls else idle
                files |= {function.partition(":")[0] for function in alone}
                files |= {LOOP for function in idle if function.startswith(LOOP)}
        print(f"{description:36} {len(files):3} files, {aim} asked" + ("" if files else f"\n{done.stderr[-2000:]}"))
        if "-v" in sys.argv:
            print("".join(f"    {file}\n" for file in sorted(files)))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--job"]:
        job(sys.argv[2])
    else:
        main()
