"""Runs BML (Wang et al., NeurIPS 2018) on an emulated BCube(3,2), and the P2P parameter server on one switch.

    python -m examples.reproduce.bml --out out [--rate 100mbit] [--rounds 5] [--simulate-only] [--quick]

Every row has the time of the paper's formula (full link rate, no latency), the time that the simulator predicts for
this network, and the measured time. The two networks take turns, round by round, and times are medians over the rounds.
Compute is emulated: ranks sleep for a given time per sample. BML runs two lanes (depth=2): while the ranks wait for
each other between two steps of a lane, the messages of the second lane are on the wire. The MPI library's own
allreduce is measured, too, with its default algorithm and with every algorithm that can be chosen.
"""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import click

from collectives.simulator.simulate import SimulatedRun
from collectives.simulator.topology import parse, parse_rate
from collectives.terminal import Interruptible
from examples.reproduce import lab, native
from examples.reproduce.bml.model import (
    BCUBE,
    BML,
    GAMMA,
    LENET,
    MIB,
    MODELS,
    SERVER,
    STAR,
    bound,
    figure5,
    jobs,
    models,
    predict,
)
from examples.reproduce.bml.picture import draw
from examples.reproduce.bml.tables import show
from examples.reproduce.native import NATIVE
from examples.reproduce.results import leave, out_option

# (network, algorithm): other algorithms, measured once at 4 MiB
OTHERS = (
    (STAR, "ring"),
    (STAR, "halving_doubling"),
    (STAR, "hierarchical(local=3)"),
    (BCUBE, "bcube(n=3,k=2)"),
    (BCUBE, "direct"),
    (BCUBE, "ring"),
)
SIZES = (MIB, 4 * MIB, LENET, 16 * MIB)


class Extent(NamedTuple):
    """The cases to measure."""

    # bytes of an exchange
    sizes: tuple[int, ...]
    # LeNet-5's sub-minibatches
    batches: tuple[int, ...]
    # (network, algorithm) pairs to measure once, as in OTHERS
    others: tuple[tuple[str, str], ...]
    # variants of the MPI library's own allreduce
    native: list[native.Variant]


def measure(rate: float, rounds: int, extent: Extent) -> dict[str, Any]:
    """Measure every case `rounds` times, with the two networks in turn.

    The result's "answers" has (topology, algorithm, nbytes, batch) -> answers of `ranks`. `batch` is 0 for an exchange
    alone. Otherwise it is LeNet-5's sub-minibatch, and the ranks sleep for its compute time before the exchange.
    """
    model = MODELS[0]
    per_sample = model.compute_over_exchange() * bound(STAR, LENET, rate)
    answers: dict[tuple[str, str, int, int], list[Any]] = {}
    alphas = []
    with lab.networks({"star": STAR, "bcube": BCUBE}, rate) as names:
        for number in range(rounds):
            for topology, name in ((STAR, names["star"]), (BCUBE, names["bcube"])):
                keys = list(_keys(topology, number == 0, extent))
                cases = [{"algorithm": k[1], "nbytes": k[2], "compute": k[3] * per_sample} for k in keys]
                found = lab.ask(name, 9, "examples.reproduce.bml.ranks", {"cases": cases})
                alphas.append(found["alpha"])
                for key, answer in zip(keys, found["cases"]):
                    answers.setdefault(key, []).append(answer)
        own = [_own(names["star"], variant) for variant in extent.native]
    return {
        "answers": answers,
        "alpha": median(alphas),
        "per_sample": per_sample,
        "native": own,
        "batches": extent.batches,
    }


def _own(name: str, variant: native.Variant) -> dict[str, Any]:
    """Measure one MPI_Allreduce of 4 MiB on the star."""
    request = {"cases": [{"algorithm": NATIVE, "nbytes": 4 * MIB, "compute": 0.0}]}
    (found,) = lab.ask(name, 9, "examples.reproduce.bml.ranks", request, variant.variables)["cases"]
    return {"name": variant.name, "like": variant.blocking} | found


def _keys(topology: str, first: bool, extent: Extent) -> list[tuple[str, str, int, int]]:
    algorithm = (SERVER if topology == STAR else BML)[1]
    keys = [(topology, algorithm, nbytes, 0) for nbytes in extent.sizes]
    if first:
        keys += [(topology, algorithm, LENET, batch) for batch in extent.batches]
        keys += [(topology, other, 4 * MIB, 0) for network, other in extent.others if network == topology]
    return keys


def exchanges(found: dict[str, Any], rate: float) -> list[dict[str, Any]]:
    """Return the rows of gradient synchronisation time."""
    rows = []
    for (topology, algorithm, nbytes, batch), answers in sorted(found["answers"].items(), key=_order):
        if batch:
            continue
        run = predict(topology, algorithm, nbytes, rate * lab.EFFICIENCY, found["alpha"])
        row = {"topology": topology, "algorithm": algorithm, "nbytes": nbytes, "bound": bound(topology, nbytes, rate)}
        row |= {"predicted": run.seconds, "measured": median(a["seconds"] for a in answers)}
        row |= {"all": [a["seconds"] for a in answers], "idle": median(a["idle"] for a in answers)}
        rows.append(row | {"nics": nics(topology, run, answers[-1]["nics"])})
    return rows


def natives(found: dict[str, Any], rate: float) -> list[dict[str, Any]]:
    """Return the rows of the MPI library's own allreduce, of 4 MiB on the star."""
    rows = []
    for one in found["native"]:
        run = predict(STAR, one["like"], 4 * MIB, rate * lab.EFFICIENCY, found["alpha"])
        row = {"topology": STAR, "algorithm": f"{NATIVE}, {one['name']}", "nbytes": 4 * MIB}
        row |= {"bound": bound(STAR, 4 * MIB, rate), "predicted": run.seconds}
        rows.append(row | {"measured": one["seconds"], "all": [one["seconds"]], "idle": one["idle"], "nics": []})
    return rows


def _order(item: Any) -> tuple[int, str, str, int]:
    topology, algorithm, nbytes, _ = item[0]
    return (0 if (topology, algorithm) in (SERVER, BML) else 1, topology, algorithm, nbytes)


def nics(topology: str, run: SimulatedRun, counted: list[dict[str, list[int]]]) -> list[dict[str, Any]]:
    """Return a row for every NIC: payload bytes out of the host and into it, as (counted, sent by the schedule).

    "difference" is the larger difference of the two directions, as a share of the schedule's bytes over that link, or
    of an average link if that is more.
    """
    theory: dict[tuple[str, str], list[float]] = {}
    for link, expected in zip(parse(topology).links, run.link_bytes):
        out = link.source.startswith("h")
        host = link.source if out else link.target
        theory.setdefault((host, f"d{link.level}"), [0.0, 0.0])[0 if out else 1] = float(expected)
    rows = []
    for (host, nic), expected in sorted(theory.items()):
        pairs = list(zip(counted[int(host[1:])][nic], expected))
        off = max(abs(have - want) / max(want, run.link_bytes.mean()) for have, want in pairs)
        rows.append({"host": host, "nic": nic, "out": pairs[0], "in": pairs[1], "difference": off})
    return rows


@click.command(cls=Interruptible, context_settings={"show_default": True})
@click.option("--rate", default="100mbit", help="Of every link of the lab.")
@click.option("--rounds", type=click.IntRange(1), default=5, help="How often the networks take turns.")
@click.option("--simulate-only", is_flag=True, help="No lab: predictions alone.")
@click.option("--quick", is_flag=True, help="4 MiB alone, once: shows that all of it works, in seconds.")
@out_option
def command(rate: str, rounds: int, simulate_only: bool, quick: bool, out: Path) -> None:
    """BML's results, predicted and measured on an emulated network."""
    speed = parse_rate(rate)
    if quick:
        rounds, extent = 1, Extent((4 * MIB,), (), (), native.variants()[:1])
    else:
        extent = Extent(SIZES, MODELS[0].batches, OTHERS, native.variants())
    found = {} if simulate_only else measure(speed, rounds, extent)
    rows = exchanges(found, speed) if found else []
    ratios = []
    for nbytes in extent.sizes if rows else ():
        server, bml = (
            next(r for r in rows if (r["topology"], r["algorithm"]) == key and r["nbytes"] == nbytes)
            for key in (SERVER, BML)
        )
        ratios.append({"nbytes": nbytes} | {k: bml[k] / server[k] for k in ("measured", "predicted", "bound")})
    report = {
        "rate": speed,
        "rounds": rounds,
        "alpha": found.get("alpha"),
        "gamma": GAMMA,
        "efficiency": lab.EFFICIENCY,
    }
    report |= {"exchanges": rows, "ratios": ratios, "jobs": jobs(found, speed)}
    report["native"] = natives(found, speed) if found else []
    report["models"], report["figure5"] = models(), figure5()
    show(report)
    leave(out, "reproduce-bml", report, draw)


if __name__ == "__main__":
    command()
