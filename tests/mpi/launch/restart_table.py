"""A training under `mpips run --restarts` whose ranks are killed at random, beside one that nobody disturbs.

    python -m tests.mpi.launch.restart_table [--kills 20] [--seed 1] [--kind dist_sync] [--servers 2] [--workers 3]

Prints a line a kill, and the loss of every 20th step of both; the exit code is 0 where all losses and the parameters
are the same to the last bit, and all kills have been made. `training` is the program that both run.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tests.child import outside

STEPS, EVERY = 200, 5
ALL_KILLED = "all-killed"  # a file without which nobody makes the last step
LOWER_AT = 30  # the step before which the learning rate becomes lower


class Run(NamedTuple):
    """What has become of a training. `losses` are rank 0's, by step, as hexadecimal numbers, and by a comma, the digest
    of the parameters after it."""

    code: int
    losses: dict[int, str]
    said: str
    kills: int
    seconds: float


def training(folder: str, kind: str, steps: int, pause: float) -> None:
    """A rank of the training: every process leaves its number in the folder, worker 0 a line a step."""
    import mpips  # a server stays in `create`
    from mpips.store.world import launched_as

    rank, _ = launched_as(os.environ) or (0, 1)
    place = Path(folder)
    (place / f"rank{rank}.new").write_text(str(os.getpid()))
    (place / f"rank{rank}.new").rename(place / f"rank{rank}.pid")
    kv = mpips.create(kind)
    weights = {"w": np.linspace(-1, 1, 20_011, dtype=np.float32), "b": np.ones((7, 3), np.float32)}
    kv.init(list(weights), list(weights.values()))
    kv.set_optimizer("adam", learning_rate=0.05)
    step, stale = kv.resumed, True
    while step < steps:
        while step == steps - 1 and not (place / ALL_KILLED).exists():
            time.sleep(0.01)
        try:
            if stale:
                kv.pull(list(weights), list(weights.values()))
                stale = False
            if step == LOWER_AT:
                kv.update_optimizer(learning_rate=0.02)
            grads = [_gradient(array, step, kv.rank) for array in weights.values()]
            kv.pushpull(list(weights), grads, out=list(weights.values()))
        except mpips.StoreError:
            if not kv.layout.survives:
                raise
            step, stale = kv.recover().step, True
            continue
        if kv.rank == 0:
            loss = sum(float(np.square(array, dtype=np.float64).mean()) for array in weights.values())
            digest = hashlib.sha1(b"".join(array.tobytes() for array in weights.values())).hexdigest()
            with open(place / "losses", "a") as file:
                file.write(f"{step} {loss.hex()},{digest}\n")
        step += 1
        time.sleep(pause)


def _gradient(weights: np.ndarray, step: int, rank: int) -> np.ndarray:
    noise = np.random.default_rng([step, rank]).standard_normal(weights.shape, np.float32)
    return weights + 0.1 * noise


def run(
    folder: Path,
    words: list[str],
    *,
    kind: str = "dist_sync",
    servers: int = 2,
    workers: int = 3,
    steps: int = STEPS,
    pause: float = 0.0,
    kills: int = 0,
    seed: int = 0,
    limit: float = 150,
    shown: bool = False,
    program: list[str] | None = None,
) -> Run:
    """Run the training by `mpips run` with more words, and kill a rank now and then until that was done `kills` times.
    Blocking."""
    folder.mkdir(exist_ok=True)
    script = program or [
        "-m",
        "tests.mpi.launch.restart_table",
        "--training",
        str(folder),
        "--kind",
        kind,
        "--steps",
        str(steps),
        "--pause",
        str(pause),
    ]
    argv = [sys.executable, "-m", "launch.cli", "run", "-w", str(workers), "-s", str(servers), *words, *script]
    begun, draw, done = time.monotonic(), random.Random(seed), 0
    with open(folder / "said", "w") as said:
        job = subprocess.Popen(argv, env=outside(), cwd=folder, stdout=said, stderr=said)
        try:
            while done < kills and job.poll() is None and time.monotonic() - begun < limit:
                done += _kill(folder, draw, draw.randrange(servers + workers), done, shown, steps)
            (folder / ALL_KILLED).touch()
            job.wait(max(1.0, limit - (time.monotonic() - begun)))
        finally:
            job.kill()
            job.wait()
    text = (folder / "said").read_text().replace("\0", "")  # Open MPI ends some lines by it
    return Run(job.returncode, losses(folder), text, done, time.monotonic() - begun)


def losses(folder: Path) -> dict[int, str]:
    """What worker 0 has written, the last where a step was made again; ValueError where that came out another way."""
    found: dict[int, str] = {}
    for line in (folder / "losses").read_text().splitlines() if (folder / "losses").exists() else ():
        step, _, text = line.partition(" ")
        if found.setdefault(int(step), text) != text:
            raise ValueError(f"step {step} came to {found[int(step)]}, and when made again to {text}")
    return found


def _kill(folder: Path, draw: random.Random, rank: int, number: int, shown: bool, last: int) -> int:
    """Wait until the job has made some steps since it began, up to a while longer than saves take, or stands before the
    last one, and kill one rank; 1 where that was done."""
    name = folder / f"rank{rank}.pid"
    before, steps, wait = len(_steps(folder)), draw.randrange(1, 25), time.monotonic() + 60
    while (len(made := _steps(folder)[before:]) < steps and last - 2 not in made) or not name.exists():
        if time.monotonic() > wait:
            return 0
        time.sleep(0.002)
    pid = int(name.read_text())
    for file in folder.glob("rank*.pid"):
        file.unlink()
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return 0
    if shown:
        print(f"kill {number + 1}: rank {rank}, {len(made)} steps after the last kill", flush=True)
    return 1


def _steps(folder: Path) -> list[int]:
    """Return the steps that worker 0 has made so far, one after the other."""
    file = folder / "losses"
    return [int(line.split()[0]) for line in file.read_text().split("\n")[:-1]] if file.exists() else []


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("kills", 20), ("seed", 1), ("servers", 2), ("workers", 3), ("steps", STEPS)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--kind", default="dist_sync")
    parser.add_argument("--pause", type=float, default=0.01)
    parser.add_argument("--training", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.training:
        training(asked.training, asked.kind, asked.steps, asked.pause)
        return 0
    roles = {"kind": asked.kind, "servers": asked.servers, "workers": asked.workers, "steps": asked.steps}
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        plain = run(place / "plain", [], **roles)
        words = ["--restarts", str(2 * asked.kills + 1), "--checkpoint", str(place / "saved"), "--every", str(EVERY)]
        killed = run(
            place / "killed",
            words,
            pause=asked.pause,
            kills=asked.kills,
            seed=asked.seed,
            limit=170,
            shown=True,
            **roles,
        )
    for line in re.findall(r"^mpips: .*starts again.*$", killed.said, re.MULTILINE):
        print(line)
    for step in range(0, asked.steps, 20):
        one, other = (float.fromhex(it.losses.get(step, "nan,").partition(",")[0]) for it in (plain, killed))
        print(f"step {step:4d}: loss {one:.12f} undisturbed, {other:.12f} with kills")
    same = plain.losses == killed.losses and len(plain.losses) == asked.steps
    print(
        f"{killed.kills} kills, {killed.said.count('starts again')} restarts, exit code {killed.code}, "
        f"{killed.seconds:.0f} s beside {plain.seconds:.0f} s: losses and parameters of {len(killed.losses)} steps "
        f"{'equal' if same else 'DIFFER'}"
    )
    return 0 if same and not killed.code and killed.kills == asked.kills else 1


if __name__ == "__main__":
    sys.exit(main())
