"""BML (Wang et al., NeurIPS 2018) on an emulated BCube(3,2) beside the P2P parameter server on one switch.

    python -m examples.reproduce.bml --out out [--rate 100mbit] [--rounds 5] [--simulate-only]

Every row has what the paper's formula says (full link rate, no latency), what the simulator predicts for this network,
and what was measured. The two networks take turns, round by round; figures are medians over the rounds. Compute is
emulated: ranks sleep for a given time per sample. BML runs two lanes a thread (depth=2): while ranks wait for each
other between two steps of one, the other's messages are on the wire. The MPI's own allreduce stands beside, as it comes
and with every algorithm that can be forced on it.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import click

from collectives.simulator.clocks import Run, simulate
from collectives.simulator.flows import play
from collectives.simulator.predict import figure5 as simulated_figure5
from collectives.simulator.topology import parse, parse_rate
from collectives.terminal.console import Interruptible
from examples.reproduce import lab, native
from examples.reproduce.native import NATIVE

STAR, BCUBE = "star:9", "bcube:3,2"
SERVER, BML = (STAR, "direct"), (BCUBE, "bcube(n=3,k=2,depth=2)")
OTHERS = (
    (STAR, "ring"),
    (STAR, "halving_doubling"),
    (STAR, "hierarchical(local=3)"),
    (BCUBE, "bcube(n=3,k=2)"),
    (BCUBE, "direct"),
    (BCUBE, "ring"),
)
MIB = 1 << 20
LENET, VGG19 = 4 * 3_274_634, 4 * 143_667_240  # bytes of gradient: the paper's 12.5 MB and 548 MB
SIZES = (MIB, 4 * MIB, LENET, 16 * MIB)
GAMMA = 5e-10  # seconds to add a byte, when nine hosts share the cores; 1 % of the smallest bound at most
FORTY_GIGABIT = 5e9  # the paper's links, bytes a second


class Model(NamedTuple):
    """A network of the paper: its gradient, its sub-minibatches, and how much BML shortened the job, least and most."""

    name: str
    nbytes: int
    batches: tuple[int, ...]
    least: float
    most: float

    def compute_over_exchange(self) -> float:
        """Seconds per sample, in units of the parameter server's exchange, such that exchanging in half the time
        shortens the job with the largest batch by the paper's least gain: gain = (1/2) / (1 + batch x this)."""
        return (0.5 / self.least - 1) / self.batches[-1]

    def gain(self, batch: int) -> float | None:
        """The paper's gain: its most with the smallest batch, its least with the largest; others it only draws."""
        return {self.batches[0]: self.most, self.batches[-1]: self.least}.get(batch)


MODELS = (
    Model("LeNet-5", LENET, (128, 256, 512, 1024), 0.187, 0.564),
    Model("VGG-19", VGG19, (8, 16, 32, 64), 0.292, 0.521),
)


def bound(topology: str, nbytes: int, rate: float) -> float:
    """2 (N - 1) / (k N) x bytes / rate, k NICs a host: the paper's GST (sections 2 and 3.2), k = 1 on the star."""
    network = parse(topology, rate)
    return 2 * (network.hosts - 1) / (network.levels * network.hosts) * nbytes / rate


def predict(topology: str, algorithm: str, nbytes: int, rate: float, alpha: float = 0.0, gamma: float = GAMMA) -> Run:
    """The simulator's answer; `rate` is the payload's. A network as small as the lab's is played message by message."""
    network = parse(topology, rate)
    schedule = native.schedule(algorithm, network.hosts)
    run = simulate(schedule, network, nbytes, alpha, gamma)
    return replace(run, seconds=play(schedule, network, nbytes, alpha, gamma)) if network.hosts <= 16 else run


def measure(rate: float, rounds: int) -> dict[str, Any]:
    """{(topology, algorithm, nbytes, batch): answers}, and alpha: every case `rounds` times, the networks taking turns.

    batch is 0 for the exchange alone, else LeNet-5's sub-minibatch, whose compute is slept before the exchange.
    """
    model = MODELS[0]
    per_sample = model.compute_over_exchange() * bound(STAR, LENET, rate)
    answers: dict[tuple[str, str, int, int], list[Any]] = {}
    alphas = []
    with lab.networks({"star": STAR, "bcube": BCUBE}, rate) as names:
        for number in range(rounds):
            for topology, name in ((STAR, names["star"]), (BCUBE, names["bcube"])):
                keys = list(_keys(topology, number == 0))
                cases = [{"algorithm": k[1], "nbytes": k[2], "compute": k[3] * per_sample} for k in keys]
                found = lab.ask(name, 9, "examples.reproduce.allreduce_ranks", {"cases": cases})
                alphas.append(found["alpha"])
                for key, answer in zip(keys, found["cases"]):
                    answers.setdefault(key, []).append(answer)
        own = [_own(names["star"], variant) for variant in native.variants()]
    return {"answers": answers, "alpha": median(alphas), "per_sample": per_sample, "native": own}


def _own(name: str, variant: native.Variant) -> dict[str, Any]:
    """One MPI_Allreduce of 4 MiB on the star."""
    request = {"cases": [{"algorithm": NATIVE, "nbytes": 4 * MIB, "compute": 0.0}]}
    (found,) = lab.ask(name, 9, "examples.reproduce.allreduce_ranks", request, variant.variables)["cases"]
    return {"name": variant.name, "like": variant.blocking} | found


def _keys(topology: str, first: bool) -> list[tuple[str, str, int, int]]:
    algorithm = (SERVER if topology == STAR else BML)[1]
    keys = [(topology, algorithm, nbytes, 0) for nbytes in SIZES]
    if first:
        keys += [(topology, algorithm, LENET, batch) for batch in MODELS[0].batches]
        keys += [(topology, other, 4 * MIB, 0) for network, other in OTHERS if network == topology]
    return keys


def exchanges(found: dict[str, Any], rate: float) -> list[dict[str, Any]]:
    """Rows of gradient synchronisation time."""
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
    """Rows of the MPI's own allreduce, 4 MiB on the star."""
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


def nics(topology: str, run: Run, counted: list[dict[str, list[int]]]) -> list[dict[str, Any]]:
    """Payload bytes through every NIC, out of the host and into it: (counted, what the schedule sends over that link).

    ``difference`` is the larger of the two, as a share of the theory, or of an average link's where a NIC has less."""
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


def jobs(found: dict[str, Any], rate: float) -> list[dict[str, Any]]:
    """Rows of job completion time, 1,000 times the seconds of an iteration, by sub-minibatch: both models simulated on
    the paper's links, LeNet-5 also predicted and measured here."""
    rows = []
    for model in MODELS:
        exchange = {key: predict(*key, model.nbytes, FORTY_GIGABIT, gamma=0.0).seconds for key in (SERVER, BML)}
        for batch in model.batches:
            compute = batch * model.compute_over_exchange() * bound(STAR, model.nbytes, FORTY_GIGABIT)
            row = {"model": model.name, "batch": batch, "where": "simulated, 40 Gbit/s", "measured": None}
            row["paper_gain"] = model.gain(batch)
            rows.append(row | _gain({"predicted": [1000 * (compute + exchange[key]) for key in (SERVER, BML)]}))
    for batch in MODELS[0].batches if found else ():
        compute = batch * found["per_sample"]
        times = {"predicted": [], "measured": []}
        for key in (SERVER, BML):
            run = predict(*key, LENET, rate * lab.EFFICIENCY, found["alpha"])
            times["predicted"].append(1000 * (compute + run.seconds))
            times["measured"].append(1000 * found["answers"][(*key, LENET, batch)][0]["seconds"])
        row = {"model": "LeNet-5", "batch": batch, "where": f"lab, {8e-6 * rate:g} Mbit/s"}
        rows.append(row | {"paper_gain": MODELS[0].gain(batch)} | _gain(times))
    return rows


def _gain(times: dict[str, list[float]]) -> dict[str, Any]:
    """(parameter server, BML) pairs, and by how much BML is shorter."""
    return {**times, **{f"{name}_gain": 1 - bml / server for name, (server, bml) in times.items()}}


def models() -> list[dict[str, Any]]:
    """Rows of gradient synchronisation time of the paper's networks on its links, simulated: (parameter server, BML)
    pairs of the paper's bound and of the prediction."""
    rows = []
    for model in MODELS:
        pair = (SERVER, BML)
        bounds = [bound(topology, model.nbytes, FORTY_GIGABIT) for topology, _ in pair]
        seconds = [predict(*key, model.nbytes, FORTY_GIGABIT, gamma=0.0).seconds for key in pair]
        rows.append({"model": model.name, "nbytes": model.nbytes, "paper": bounds, "predicted": seconds})
    return rows


def figure5() -> list[dict[str, Any]]:
    """GST of both algorithms on both networks with 16 and with 1,024 servers, in units of T_F, the time of the full
    gradient over one link, beside what the paper's sections 3.2 and 3.3 say."""
    rows = []
    for run, _ in simulated_figure5(LENET, FORTY_GIGABIT):
        algorithm = "PS" if run.algorithm == "direct" else "BML"
        network = "BCube" if run.topology.startswith("bcube") else "Fat-Tree"
        gst = run.seconds * FORTY_GIGABIT / LENET
        row = {"servers": run.ranks, "case": f"{algorithm} on {network}", "network": run.topology, "gst": gst}
        rows.append(row | {"paper": paper_gst(run.ranks, algorithm, network)})
    return rows


def paper_gst(servers: int, algorithm: str, network: str) -> float:
    """In units of T_F: 2(N-1)/N, and 1/k of it, k = 2, for BML on BCube; the server there takes "double" of that."""
    return 2 * (servers - 1) / servers / (2 if (algorithm, network) == ("BML", "BCube") else 1)


@click.command(cls=Interruptible, context_settings={"show_default": True})
@click.option("--rate", default="100mbit", help="Of every link of the lab.")
@click.option("--rounds", type=click.IntRange(1), default=5, help="How often the networks take turns.")
@click.option("--simulate-only", is_flag=True, help="No lab: predictions alone.")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default=Path("out"))
def command(rate: str, rounds: int, simulate_only: bool, out: Path) -> None:
    """BML's results, predicted and measured on an emulated network."""
    speed = parse_rate(rate)
    found = {} if simulate_only else measure(speed, rounds)
    rows = exchanges(found, speed) if found else []
    ratios = []
    for nbytes in SIZES if rows else ():
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
    from examples.reproduce.bml_tables import show

    show(report)
    out.mkdir(parents=True, exist_ok=True)
    (out / "reproduce-bml.json").write_text(json.dumps(report, indent=1))
    from examples.reproduce.bml_picture import draw

    draw(report, out / "reproduce-bml.png")
    click.echo(f"{out / 'reproduce-bml.json'}, {out / 'reproduce-bml.png'}")


if __name__ == "__main__":
    command()
