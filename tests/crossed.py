"""Show the functions and files that a call crosses, by a profiler: `python -m tests.crossed [CASE ...] [-v | --page]`.

The cases start jobs of `mpips run`. Files are counted on the worker that calls and on the servers together: those whose
functions run meanwhile, and the server's loop. Functions that run while nobody calls do not count, as a server looks
around all the time. The shortest of five calls counts. -v lists the functions in the order of their first call. --page
writes these lists to docs/why/walks.md.
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
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = f"{ROOT / 'mpips'}{os.sep}"  # collectives is a link in it
LOOP = "mpips/store/server/loop.py"
TEXT: Any = {"text": True, "capture_output": True}
JOB = ("-m", "tests.crossed", "--job")
NEWLOCALS = 2  # of code: the flag of functions, which modules and classes have not
NODES = {"MPIPS_SHARED_MEMORY": "0"}
PAGE = ROOT / "docs/why/walks.md"
OPENING = """# Walks

The functions that a call runs, in the order of their first call. Indentation shows who calls whom. Made by
`python -m tests.crossed --page`, with a profiler, on 2 workers. [Architecture](architecture.md) says why the way is so.
"""


class Case(NamedTuple):
    """A call whose way is shown."""

    # arguments of `mpips run`
    options: str
    title: str
    # environment variables of the job
    variables: dict[str, str]
    # the most files that the way is meant to cross
    aim: int


CASES = {
    "pushpull": Case("-w 2 -s 1", "A pushpull on a node", {}, 12),
    "push": Case("-w 2 -s 1", "A push between nodes", NODES, 22),
    "table": Case("-w 2 -s 1", "A push of rows to a table", {}, 16),
    "recover": Case("-w 2 -s 2 --spares 0", "recover() after a server's death", {}, 40),
    "backward": Case("-w 2", "The backward pass of a DataParallel", {}, 7),
    "train": Case("-n 1", "mpips train", {}, 30),
}
# the cases whose walks the page shows
SHOWN = ("pushpull", "push", "table", "backward")


@cache
def place_of(file: str) -> str:
    """The path of a file of ours in the repository."""
    return os.path.relpath(os.path.realpath(file), ROOT)


class Crossed:
    """The functions that run while `on`, in the order of their first call."""

    def __init__(self) -> None:
        # file and name of a function -> how many functions of the packages are above it in the stack
        self.functions: dict[str, int] = {}
        self.windows: list[dict[str, int]] = []
        self.on = False

    def profile(self, frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if self.on and event == "call" and is_ours(frame) and not code.co_name.startswith("<"):
            name = f"{place_of(code.co_filename)}:{code.co_qualname}"
            if name not in self.functions:
                depth, above = 0, frame.f_back
                while above is not None:
                    depth += is_ours(above) and not above.f_code.co_name.startswith("<")
                    above = above.f_back
                self.functions[name] = depth

    def turn(self, number: int, frame: FrameType | None) -> None:
        """Begin at SIGUSR1, end at SIGUSR2 and write down what was crossed."""
        self.on = number == signal.SIGUSR1
        if not self.on:
            self.write()

    def write(self) -> None:
        self.windows.append(self.functions)
        self.functions = {}
        (Path(os.environ["CROSSED"]) / f"{os.getpid()}.json").write_text(json.dumps(self.windows))


def is_ours(frame: FrameType) -> bool:
    """True if a function of the packages runs in the frame, and not the body of a module or class."""
    return bool(frame.f_code.co_flags & NEWLOCALS) and frame.f_code.co_filename.startswith(PACKAGES)


@contextlib.contextmanager
def counted(crossed: Crossed, others: list[int]) -> Iterator[None]:
    """Count here and in the processes `others` while the block runs."""
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
    """Be one rank of a case."""
    crossed = Crossed()
    place = Path(os.environ["CROSSED"])
    signal.signal(signal.SIGUSR1, crossed.turn)
    signal.signal(signal.SIGUSR2, crossed.turn)
    sys.setprofile(crossed.profile)
    threading.setprofile(crossed.profile)
    (place / f"{os.getpid()}.pid").touch()
    {"backward": backward, "train": train}.get(case, store)(case, crossed)


def pids(place: Path) -> list[int]:
    """Return the processes of the job but this one."""
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
    table = kv.table("rows", dim=4) if case == "table" else None
    ids, rows = np.arange(100), np.ones((100, 4), np.float32)
    for _ in range(5):
        kv.pushpull("w", value, out=out)
    kv.barrier()
    first = kv.rank == 0
    if case == "recover":
        if first:
            os.kill(pids(place)[0], signal.SIGKILL)
        try:
            while True:  # until the death is heard
                kv.pushpull("w", value, out=out)
        except mpips.StoreError:
            with counted(crossed, pids(place)) if first else contextlib.nullcontext():
                kv.recover()
    else:
        calls: dict[str, Callable[[], object]] = {
            "push": lambda: kv.push("w", value),
            "table": lambda: table.push(ids, rows),  # type: ignore[union-attr]
            "pushpull": lambda: kv.pushpull("w", value, out=out),
        }
        call = calls[case]
        call()
        if first:
            with counted(crossed, pids(place)):
                time.sleep(0.2)
        for _ in range(5):
            kv.barrier()
            if first:
                time.sleep(0.2)  # the other worker pushes meanwhile
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
    for turn in range(5):  # the fifth compares no parameters, and plans no buckets
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


def walk(name: str) -> tuple[list[tuple[str, dict[str, int]]], set[str]]:
    """Run a case. Return (who, its functions) for the worker and the servers, and the files that they cross."""
    case = CASES[name]
    with tempfile.TemporaryDirectory() as place:
        run = [sys.executable, "-m", "launch.cli", "run", *case.options.split()]
        environment = {**os.environ, **case.variables, "CROSSED": place}
        done = subprocess.run([*run, *JOB, name], cwd=ROOT, env=environment, timeout=120, **TEXT)
        workers = {path.stem for path in Path(place).glob("*.worker")}
        walks: list[tuple[str, dict[str, int]]] = []
        files: set[str] = set()
        for path in sorted(Path(place).glob("*.json"), key=lambda path: path.stem not in workers):
            idle, *calls = json.loads(path.read_text())
            alone = [{function: depth for function, depth in call.items() if function not in idle} for call in calls]
            shortest = min(alone, key=len) if alone else idle
            if shortest:
                walks.append(("worker" if path.stem in workers or not workers else "server", shortest))
            files |= {function.partition(":")[0] for function in shortest}
            files |= {LOOP for function in idle if function.startswith(LOOP)}
    if not files:
        raise SystemExit(done.stderr[-2000:])
    return walks, files


def lines(functions: Mapping[str, int]) -> Iterator[str]:
    """Yield a line for each function: its module and name, indented by its depth."""
    least = min(functions.values())
    for function, depth in functions.items():
        file, _, name = function.partition(":")
        module = file.removesuffix(".py").replace("/", ".").removeprefix("mpips.").removeprefix("store.")
        yield f"    {'  ' * min(depth - least, 12)}{module}: {name.replace('.<locals>', '')}"


def main() -> None:
    """Run the cases, and print a table; or with --page write the page."""
    names = [name for name in sys.argv[1:] if not name.startswith("-")] or list(CASES)
    page = [OPENING]
    for name in names:
        case = CASES[name]
        walks, files = walk(name)
        print(f"{case.title:40} {len(files):3} files, at most {case.aim} wanted", flush=True)
        parts = [f"On the {who}:\n\n" + "\n".join(lines(functions)) + "\n" for who, functions in walks]
        if "-v" in sys.argv:
            print("\n".join(parts))
        if name in SHOWN:
            page.append(f"## {case.title}\n\nIt crosses {len(files)} files.\n\n" + "\n".join(parts))
    if "--page" in sys.argv:
        PAGE.write_text("\n".join(page), encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--job"]:
        job(sys.argv[2])
    else:
        main()
