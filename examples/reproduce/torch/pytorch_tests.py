"""Runs PyTorch's own distributed tests, which its wheel contains, on the backend "mpips" or on gloo.

    python -m examples.reproduce.torch.pytorch_tests [--ranks 3] [--backend gloo] [--only WORD] [--json FILE]

With `--file test_c10d_fault_tolerance.py`, which is not in the wheel, it runs the tests of that file instead. They need
PyTorch's package `expecttest`. All ranks of a job run the same tests in the same order. If a test hangs or ends the
job, it counts as failed, and the remaining tests run in a new job.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import click

from collectives.terminal import Interruptible, OutFile, write_json

RANKS_PROGRAM = "examples.reproduce.torch.pytorch_tests_ranks"


@click.command(cls=Interruptible, context_settings={"show_default": True})
@click.option("--ranks", default=3, type=click.IntRange(1))
@click.option("--backend", default="mpips", type=click.Choice(["mpips", "gloo"]))
@click.option("--only", default="", help="A part of the names.")
@click.option("--seconds", default=40, help="Longest a test may take.")
@click.option("--file", "file", default="", help="PyTorch's test/distributed/test_c10d_fault_tolerance.py (3 ranks).")
@click.option("--json", "json_path", type=OutFile())
def command(ranks: int, backend: str, only: str, seconds: int, file: str, json_path: Path | None) -> None:
    """Run PyTorch's DistributedTest, or the tests of a file of its repository, and say which tests pass."""
    found: dict[str, tuple[str, str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        lines, last = Path(folder) / "lines", ""
        while True:
            lines.write_text("")
            done = subprocess.run(
                [
                    sys.executable,
                    "-m",
                    "launch.cli",
                    "run",
                    "-w",
                    str(ranks),
                    # process groups that can be created again need an MPI with ULFM
                    *(["--spares", "0"] if file else []),
                    "-m",
                    RANKS_PROGRAM,
                    backend,
                    str(lines),
                    str(seconds),
                    last,
                    only,
                    file,
                ],
                env={**os.environ, "TEMP_DIR": folder},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                check=False,
            )
            outcomes = [json.loads(line) for line in lines.read_text().splitlines()]
            found |= {name: (outcome, why) for name, outcome, why in outcomes}
            if done.returncode == 0:
                break
            if not outcomes:
                raise click.ClickException(f"the job begins no test: {done.stderr[-2000:]}")
            last = outcomes[-1][0]
    for name, (outcome, why) in found.items():
        if outcome == "failed":
            click.echo(f"{name}: {why}")
    skipped = Counter(why for outcome, why in found.values() if outcome == "skipped")
    click.echo(", ".join(f"{count} {outcome}" for outcome, count in Counter(o for o, _ in found.values()).items()))
    click.echo("\n".join(f"  skipped {count}: {why}" for why, count in skipped.most_common()))
    if json_path:
        write_json(json_path, found)


if __name__ == "__main__":
    command()
