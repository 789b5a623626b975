"""Reproduces MG-WFBP and iBatch: simulates the papers' scaling figures, and measures the strategies in a lab.

    python -m examples.reproduce.overlap mg-wfbp|ibatch [--out FOLDER] [--rate 100mbit] [--quick]

The simulation is that of `examples.reproduce.overlap.simulated`. The measurement runs `measured` as one MPI job on an
emulated cluster (network namespaces), with real messages and compute emulated by sleeping. It is left out, with the
reason, if this machine cannot make namespaces.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import click

from collectives.simulator.topology import parse_rate
from collectives.terminal import Interruptible, console
from examples.reproduce import lab
from examples.reproduce.overlap import mg_wfbp, simulated
from examples.reproduce.results import out_option
from launch.lab import client
from launch.lab.kernel import find_missing

# limit of a job
SECONDS = 230


class Job(NamedTuple):
    """A measurement."""

    name: str
    # options of `measured`
    options: tuple[str, ...]
    # what it shows, for the user
    shows: str
    # (model, nodes, batch): scale startups and bytes so that their ratio to compute is that of this model on MG-WFBP's
    # cluster with this number of nodes
    like: tuple[str, int, int] | None = None


HOSTS = {"mg-wfbp": 8, "ibatch": 12}
JOBS = {
    "mg-wfbp": (
        Job(
            "uniform",
            ("--setting", "uniform", "--layers", "80", "--asleep"),
            "merging pays: 80 equal layers; startups and bytes weigh against compute as those of ResNet-50, "
            "24 images a node, on 28 nodes of the paper",
            ("resnet50", 28, 24),
        ),
        Job(
            "hidden",
            ("--setting", "hidden", "--layers", "40", "--kilobytes", "16"),
            "merging does not pay: messages half as long as a layer's backward pass",
        ),
    ),
    "ibatch": (
        Job(
            "servers",
            ("--servers", "6", "--layers", "24", "--kilobytes", "128", "--topk", "0.01"),
            "6 workers, 6 servers: pulls by strategy behind one push, dense and top-k; both directions by strategy",
        ),
    ),
}
QUICK_HOSTS = 2
QUICK = {
    "mg-wfbp": (Job("uniform", ("--layers", "4", "--kilobytes", "8", "--repeats", "1"), "4 equal layers"),),
    "ibatch": (Job("servers", ("--servers", "1", "--layers", "4", "--kilobytes", "8", "--repeats", "1"), "1 server"),),
}


@click.command(cls=Interruptible, context_settings={"show_default": True})
@click.argument("paper", type=click.Choice(list(JOBS)))
@out_option
@click.option("--rate", default="100mbit", help="Rate of every link of the emulated cluster.")
@click.option("--iterations", default=4, help="Of every strategy, in turns.")
@click.option("--quick", is_flag=True, help="Few hosts and layers, once: shows that all of it works, in seconds.")
def command(paper: str, out: Path, rate: str, iterations: int, quick: bool) -> None:
    """Simulate the scaling figure of PAPER, then measure its strategies on an emulated cluster."""
    base = out / f"reproduce-{paper}"
    simulated.run(paper, Path(f"{base}.json"), Path(f"{base}.png"))
    lacking = find_missing()
    if lacking:
        reasons = "\n".join(f"  - {line}" for line in lacking)
        click.echo(f"not measured, since no emulated cluster can be made here:\n{reasons}")
        return
    hosts, jobs, iterations = (QUICK_HOSTS, QUICK[paper], 1) if quick else (HOSTS[paper], JOBS[paper], iterations)
    with lab.networks({"star": f"star:{hosts}"}, parse_rate(rate)) as names:
        for job in jobs:
            click.echo(f"\nmeasured on {hosts} emulated hosts, {rate} a link: {job.shows}")
            measure(names["star"], hosts, job, f"{base}-{job.name}", iterations)


def measure(name: str, hosts: int, job: Job, base: str, iterations: int) -> None:
    """Run `measured` on every host. It prints its results, and writes JSON, a picture and a Chrome trace."""
    stem = Path(base).resolve()
    files = ["--json", f"{stem}.json", "--plot", f"{stem}.png", "--trace", f"{stem}-trace.json"]
    program = [sys.executable, "-m", "mpips", "-m", "examples.reproduce.overlap.measured", *job.options, *_weights(job)]
    argv = client.job_command(name, hosts, [*program, "--iterations", str(iterations), *files])
    done = subprocess.run(argv, cwd=lab.ROOT, env={**os.environ, **lab.ONE_THREAD}, timeout=SECONDS, check=False)
    if done.returncode:
        raise SystemExit(f"{job.name}: the job ended with {done.returncode}")
    summary(json.loads(Path(f"{base}.json").read_text(encoding="utf-8")))


def _weights(job: Job) -> list[str]:
    if job.like is None:
        return []
    startups, volume = mg_wfbp.communication(*job.like)
    weight = startups + volume
    return ["--weight", f"{weight:.4f}", "--startups", f"{startups / weight:.4f}", "--kilobytes", "32"]


def summary(found: dict) -> None:
    """Print what the measured times mean, in words."""
    rows = {(row["pushes"], row["strategy"]): row for row in found["strategies"]}
    worst = max(abs(row["measured_s"] / row["predicted_s"] - 1) for row in rows.values())
    lines = [f"predictions within {worst:.1%}"]
    for (pushes, better), row in rows.items():
        for base in ("sequential", "single", "layerwise"):
            if better in ("merged", "ibatch", "optimal", "joint, both") and (pushes, base) in rows:
                ratio = rows[pushes, base]["measured_s"] / row["measured_s"]
                lines.append(f"{pushes}: {better} is {ratio:.2f} times as fast as {base}")
    for line in lines:
        console().print(line)


if __name__ == "__main__":
    command()
