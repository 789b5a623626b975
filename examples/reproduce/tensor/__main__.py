"""Measures allreduce of tensors on emulated hosts (MXNET-MPI, section 7.3): figure 15's scaling, figures 17 to 20.

    python -m examples.reproduce.tensor --out out [--rate 200mbit] [--vectors 2] [--rounds 3] [--quick]

Every host has a tensor of two vectors. `multi_ring` is the paper's algorithm. Its rivals are `reg` (reduce, the MPI
library's allreduce, spread), `host_ring` (the paper's omp_ring) and `vector_ring` (Baidu's). `reg` is measured with the
MPI library's default algorithm and with its best one. Beside every time is that of the model. Where the paper's result
does not appear on this network, the program explains it from the model.
"""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from collectives.simulator.topology import parse_rate
from collectives.terminal import Interruptible
from examples.reproduce import lab, native
from examples.reproduce.results import leave, out_option
from examples.reproduce.tensor.model import BLOCKING, MODELS, Memory, Network, piped, staged
from examples.reproduce.tensor.picture import draw

HOSTS = (2, 4, 8)
MIB = 1 << 20
SIZES = (4 * MIB, 16 * MIB, 64 * MIB)
REG, BEST = "reg", "reg, best algorithm"
# rival -> its time over multi_ring's (section 7.3)
# reg's is from images a second in figure 15, vector_ring's from allreduces in figure 20, with 4 and more hosts.
PAPER = {REG: 2.0, "vector_ring": 6.0}
QUICK_HOSTS, QUICK_SIZES = (2, 4), (MIB, 4 * MIB)
# bytes a second of the 100 Gbit/s links of the paper's nodes
PAPER_RATE = 12.5e9


def measure(name: str, p: int, vectors: int, rounds: int, sizes: tuple[int, ...]) -> dict[str, Any]:
    """Measure all algorithms and sizes on p hosts of the lab `name`.

    Return {"cases": (algorithm, nbytes) -> answer of `ranks`, "alpha", "memory", "best": (call, variant)}.
    """
    best = _best(name, p, vectors, sizes[0])
    cases: dict[tuple[str, int], Any] = {}
    ours = [(algorithm, nbytes) for nbytes in sizes for algorithm in (*MODELS, REG)]
    found = _ask(name, p, vectors, rounds, ours, {})
    cases |= dict(zip(ours, found["cases"]))
    call, variant = best
    rivals = [(call, nbytes) for nbytes in sizes]
    for (_, nbytes), answer in zip(rivals, _ask(name, p, vectors, rounds, rivals, variant.variables)["cases"]):
        cases[BEST, nbytes] = answer
    return {"cases": cases, "alpha": found["alpha"], "memory": Memory(*found["memory"]), "best": best}


def _ask(
    name: str, p: int, vectors: int, rounds: int, cases: list[tuple[str, int]], variables: dict[str, str]
) -> dict[str, Any]:
    largest = max(nbytes for _, nbytes in cases)
    listed = [
        {"algorithm": algorithm, "nbytes": nbytes, "repeats": rounds if nbytes < largest else 1}
        for algorithm, nbytes in cases
    ]
    request = {"vectors": vectors, "cases": listed}
    return dict(lab.ask(name, p, "examples.reproduce.tensor.ranks", request, variables))


def _best(name: str, p: int, vectors: int, nbytes: int) -> tuple[str, native.Variant]:
    """Find the fastest call (blocking or not) and algorithm of the MPI library for `nbytes` bytes."""
    times = {}
    for variant in native.variants():
        found = _ask(name, p, vectors, 1, [(BLOCKING, nbytes), (REG, nbytes)], variant.variables)["cases"]
        for call, answer in zip((BLOCKING, REG), found):
            times[call, variant.name] = (min(answer["seconds"]), call, variant)
    _, call, variant = min(times.values(), key=lambda one: one[0])
    return call, variant


def model(algorithm: str, net: Network, nbytes: int, vectors: int, memory: Memory, best: Any) -> float:
    """Predict the seconds of an allreduce. `best` is the result of `_best`."""
    if algorithm in MODELS:
        return MODELS[algorithm](net, nbytes, vectors, memory)
    call, variant = best if algorithm == BEST else (REG, native.variants()[0])
    like = variant.blocking if call == BLOCKING else variant.immediate
    return staged(net, nbytes, memory, like) if call == BLOCKING else piped(net, nbytes, memory, like)


def rows(found: dict[str, Any], p: int, rate: float, vectors: int) -> list[dict[str, Any]]:
    """Return a row for each size and algorithm. "times" and "predicted_times" are ratios to multi_ring's time."""
    net, memory = Network(p, rate * lab.EFFICIENCY, found["alpha"]), found["memory"]
    made = []
    for (algorithm, nbytes), answer in found["cases"].items():
        row = {"hosts": p, "nbytes": nbytes, "algorithm": algorithm, "bound": 2 * (p - 1) / p * nbytes / rate}
        row["predicted"] = model(algorithm, net, nbytes, vectors, memory, found["best"])
        made.append(row | {"measured": median(answer["seconds"]), "all": answer["seconds"], "idle": answer["idle"]})
    for row in made:
        ours = next(r for r in made if r["nbytes"] == row["nbytes"] and r["algorithm"] == "multi_ring")
        row["times"] = row["measured"] / ours["measured"]
        row["predicted_times"] = row["predicted"] / ours["predicted"]
    order = {algorithm: place for place, algorithm in enumerate((*MODELS, REG, BEST))}
    return sorted(made, key=lambda row: (row["nbytes"], order[row["algorithm"]]))


def reasons(report: dict[str, Any]) -> list[str]:
    """Explain from the model why factors of the paper do not appear here, for most hosts and the largest vectors."""
    p, nbytes = (max(row[key] for row in report["rows"]) for key in ("hosts", "nbytes"))
    vectors = report["vectors"]
    of = {r["algorithm"]: r for r in report["rows"] if r["hosts"] == p and r["nbytes"] == nbytes}
    memory = Memory(*report["memory"][str(p)])
    busy = nbytes * (memory.gather + memory.spread)
    fast = Network(p, PAPER_RATE, 0.0)
    ring = MODELS["multi_ring"](fast, nbytes, vectors, memory)
    quick = {a: MODELS[a](fast, nbytes, vectors, memory) / ring for a in ("host_ring", "vector_ring")}
    least, more = 2 * (p - 1) / p, 2 * (p * vectors - 1) / (p * vectors)
    return [
        f"reg against multi_ring, {p} hosts, {nbytes / MIB:g} MiB: measured {of[REG]['times']:.2f}, model "
        f"{of[REG]['predicted_times']:.2f}, paper {PAPER[REG]:g}. The MPI's choice of algorithm decides: "
        f"a tree sends whole vectors, a ring 2(p-1)/p = {least:.2f} of one.",
        f"With the MPI's best algorithm ({report['best'][str(p)]}): measured {of[BEST]['times']:.2f}, model "
        f"{of[BEST]['predicted_times']:.2f}: it sends the same bytes. What multi_ring hides behind them, reducing "
        f"and spreading {vectors} vectors, takes {busy:.3f} s of {of['host_ring']['measured']:.2f} s "
        f"({100 * busy / of['host_ring']['measured']:.1f} %): slow links leave nothing to gain. On links of 100 Gbit/s "
        f"and this memory the model gives host_ring / multi_ring = {quick['host_ring']:.2f}.",
        f"vector_ring against multi_ring: measured {of['vector_ring']['times']:.2f}, model "
        f"{of['vector_ring']['predicted_times']:.2f}, paper {PAPER['vector_ring']:g}. A ring through every vector "
        f"sends 2(pk-1)/(pk) = {more:.3f} vectors instead of {least:.3f}, in {vectors} times as many steps; its copies "
        "in each step hide behind nothing, but cost little beside such links. On links of "
        f"100 Gbit/s and this memory the model gives {quick['vector_ring']:.2f}; the paper's copies crossed NVLink and "
        "were made by one thread block.",
    ]


def paper(algorithm: str, hosts: int) -> str:
    """Return the paper's value for an algorithm's time over multi_ring's, as text, or "" if it gives none.

    It draws figures 17 to 19 and says that its ring is the fastest. Figure 20 has 4 and more hosts.
    """
    if algorithm == "vector_ring":
        return f"{PAPER[algorithm]:g}" if hosts >= 4 else ""
    return {"multi_ring": "1", "host_ring": "> 1", REG: "> 1"}.get(algorithm, "")


def scaling(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of figure 15 for a plain tensor: tensors of all hosts synchronised in a second.

    They are for the largest vectors, with (predicted, measured) values of multi_ring and reg. The paper trains a neural
    network instead.
    """
    nbytes = max(r["nbytes"] for r in rows)
    of = {(r["hosts"], r["algorithm"]): r for r in rows if r["nbytes"] == nbytes}
    found = []
    for p in dict.fromkeys(hosts for hosts, _ in of):
        ring, reg = ([p / of[p, name][key] for key in ("predicted", "measured")] for name in ("multi_ring", REG))
        times = [a / b for a, b in zip(ring, reg)]
        found.append({"hosts": p, "multi_ring": ring, "reg": reg, "times": times})
    return found


def show(report: dict[str, Any]) -> None:
    """Print the tables and what they mean."""
    console = Console(width=140)
    console.print(_allreduces(report))
    console.print(
        "bound: 2(p-1)/p bytes / rate.  times of multi_ring's: figures 17 to 20; the paper draws them, and "
        "its text has 6 for a ring through every vector and calls its ring the best.  idle: of the "
        "machine's cores; blocking MPI calls spin."
    )
    console.print(_scaling(report["scaling"], max(r["nbytes"] for r in report["rows"])))
    console.print('paper: "nearly twice", images a second of ResNet-50; other figures are drawn.')
    for line in report["reasons"]:
        console.print(f"- {line}")


def _allreduces(report: dict[str, Any]) -> Table:
    title = f"Allreduce of {report['vectors']} vectors a host, links of {8e-6 * report['rate']:g} Mbit/s (seconds)"
    table = Table(title=title)
    for title in (
        "hosts",
        "MiB",
        "algorithm",
        "bound",
        "predicted",
        "measured",
        "/ predicted",
        "times of multi_ring's: paper",
        "predicted",
        "measured",
        "idle",
    ):
        table.add_column(title, justify="left" if title == "algorithm" else "right")
    last = None
    for r in report["rows"]:
        if last not in (None, (r["hosts"], r["nbytes"])):
            table.add_section()
        last = (r["hosts"], r["nbytes"])
        name = f"{r['algorithm']}: {report['best'][str(r['hosts'])]}" if r["algorithm"] == BEST else r["algorithm"]
        seconds = [f"{r[key]:.3f}" for key in ("bound", "predicted", "measured")]
        times = (paper(r["algorithm"], r["hosts"]), f"{r['predicted_times']:.2f}", f"{r['times']:.2f}")
        words = (*seconds, f"{r['measured'] / r['predicted']:.3f}", *times)
        table.add_row(str(r["hosts"]), f"{r['nbytes'] / MIB:g}", name, *words, f"{100 * r['idle']:.0f} %")
    return table


def _scaling(rows: list[dict[str, Any]], nbytes: int) -> Table:
    table = Table(title=f"Figure 15: tensors of {nbytes / MIB:g} MiB a second, all hosts together")
    for title in (
        "hosts",
        "multi_ring: predicted",
        "measured",
        "reg: predicted",
        "measured",
        "multi_ring / reg: paper",
        "predicted",
        "measured",
    ):
        table.add_column(title, justify="right")
    for r in rows:
        said = f"{PAPER[REG]:g}" if r is rows[-1] else "drawn"
        rates = [f"{value:.2f}" for key in ("multi_ring", "reg") for value in r[key]]
        table.add_row(str(r["hosts"]), *rates, said, *(f"{value:.2f}" for value in r["times"]))
    return table


@click.command(cls=Interruptible, context_settings={"show_default": True})
@click.option("--rate", default="200mbit", help="Of every link of the lab.")
@click.option("--vectors", type=click.IntRange(2), default=2, help="Vectors of every host.")
@click.option("--rounds", type=click.IntRange(1), default=3, help="How often each is measured; the largest once.")
@click.option("--quick", is_flag=True, help="2 and 4 hosts and small tensors, once: shows that all of it works.")
@out_option
def command(rate: str, vectors: int, rounds: int, quick: bool, out: Path) -> None:
    """Allreduce of tensors: the paper's algorithm and its rivals, measured and predicted."""
    speed = parse_rate(rate)
    hosts, lengths, rounds = (QUICK_HOSTS, QUICK_SIZES, 1) if quick else (HOSTS, SIZES, rounds)
    report: dict[str, Any] = {"rate": speed, "vectors": vectors, "rows": [], "memory": {}, "alpha": {}, "best": {}}
    with lab.networks({"star": f"star:{hosts[-1]}"}, speed) as names:
        for p in hosts:
            found = measure(names["star"], p, vectors, rounds, lengths)
            report["rows"] += rows(found, p, speed, vectors)
            call, variant = found["best"]
            report["best"][str(p)] = f"{variant.name}, {'blocking' if call == BLOCKING else 'non-blocking'}"
            report["memory"][str(p)], report["alpha"][str(p)] = list(found["memory"]), found["alpha"]
    report["scaling"], report["reasons"] = scaling(report["rows"]), reasons(report)
    show(report)
    leave(out, "reproduce-tensor", report, draw)


if __name__ == "__main__":
    command()
