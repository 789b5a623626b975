"""BML's networks and formulas: the values that the paper states, and those that the simulator predicts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from collectives.simulator.simulate import SimulatedRun, simulate
from collectives.simulator.simulate import figure5 as simulated_figure5
from collectives.simulator.topology import parse
from examples.reproduce import lab, native
from examples.reproduce.flows import play_flows

STAR, BCUBE = "star:9", "bcube:3,2"
SERVER, BML = (STAR, "direct"), (BCUBE, "bcube(n=3,k=2,depth=2)")
MIB = 1 << 20
# bytes of gradient: the paper's 12.5 MB and 548 MB
LENET, VGG19 = 4 * 3_274_634, 4 * 143_667_240
# seconds to add a byte when nine hosts share the cores; at most 1 % of the smallest bound
GAMMA = 5e-10
# bytes a second of the paper's links
FORTY_GIGABIT = 5e9


class Model(NamedTuple):
    """A neural network of the paper."""

    name: str
    # bytes of its gradient
    nbytes: int
    # the paper's sub-minibatches, in rising order
    batches: tuple[int, ...]
    # shares by which BML shortened the job: the least and the largest gain that the paper states
    least: float
    most: float

    def compute_over_exchange(self) -> float:
        """Return the compute time of a sample, in units of the parameter server's exchange.

        It is fitted to the paper's least gain, which belongs to the largest batch. BML halves the exchange, so that
        gain = (1/2) / (1 + batch x this).
        """
        return (0.5 / self.least - 1) / self.batches[-1]

    def gain(self, batch: int) -> float | None:
        """Return the gain that the paper states for a batch, or None: it states two and draws the others."""
        return {self.batches[0]: self.most, self.batches[-1]: self.least}.get(batch)


MODELS = (
    Model("LeNet-5", LENET, (128, 256, 512, 1024), 0.187, 0.564),
    Model("VGG-19", VGG19, (8, 16, 32, 64), 0.292, 0.521),
)


def bound(topology: str, nbytes: int, rate: float) -> float:
    """Return the paper's GST (sections 2 and 3.2): 2 (N - 1) / (k N) x bytes / rate for N hosts with k NICs each.

    GST is the gradient synchronisation time. On the star k is 1.
    """
    network = parse(topology, rate)
    return 2 * (network.hosts - 1) / (network.levels * network.hosts) * nbytes / rate


def predict(
    topology: str, algorithm: str, nbytes: int, rate: float, alpha: float = 0.0, gamma: float = GAMMA
) -> SimulatedRun:
    """Simulate an allreduce. `rate` is in payload bytes a second. Up to 16 hosts, seconds come from `play_flows`."""
    network = parse(topology, rate)
    schedule = native.schedule(algorithm, network.hosts)
    run = simulate(schedule, network, nbytes, alpha, gamma)
    return replace(run, seconds=play_flows(schedule, network, nbytes, alpha, gamma)) if network.hosts <= 16 else run


def jobs(found: dict[str, Any], rate: float) -> list[dict[str, Any]]:
    """Return the rows of job completion time by sub-minibatch, which is the time of 1,000 iterations.

    Both models are simulated on the paper's links. LeNet-5 is also predicted and measured in the lab, if `found` has
    measurements.
    """
    rows = []
    for model in MODELS:
        exchange = {key: predict(*key, model.nbytes, FORTY_GIGABIT, gamma=0.0).seconds for key in (SERVER, BML)}
        for batch in model.batches:
            compute = batch * model.compute_over_exchange() * bound(STAR, model.nbytes, FORTY_GIGABIT)
            row = {"model": model.name, "batch": batch, "where": "simulated, 40 Gbit/s", "measured": None}
            row["paper_gain"] = model.gain(batch)
            rows.append(row | _gain({"predicted": [1000 * (compute + exchange[key]) for key in (SERVER, BML)]}))
    for batch in found["batches"] if found else ():
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
    """Add to each (parameter server, BML) pair of times the share by which BML is shorter."""
    return {**times, **{f"{name}_gain": 1 - bml / server for name, (server, bml) in times.items()}}


def models() -> list[dict[str, Any]]:
    """Return the rows of gradient synchronisation time of the paper's models on its links.

    "paper" is the paper's bound and "predicted" the simulated time, both for (parameter server, BML).
    """
    rows = []
    for model in MODELS:
        pair = (SERVER, BML)
        bounds = [bound(topology, model.nbytes, FORTY_GIGABIT) for topology, _ in pair]
        seconds = [predict(*key, model.nbytes, FORTY_GIGABIT, gamma=0.0).seconds for key in pair]
        rows.append({"model": model.name, "nbytes": model.nbytes, "paper": bounds, "predicted": seconds})
    return rows


def figure5() -> list[dict[str, Any]]:
    """Return the rows of figure 5: GST of both algorithms on both networks, with 16 and 1,024 servers.

    The unit is T_F, the time of the full gradient over one link. "paper" is the value of sections 3.2 and 3.3.
    """
    rows = []
    for run, _ in simulated_figure5(LENET, FORTY_GIGABIT):
        algorithm = "PS" if run.algorithm == "direct" else "BML"
        network = "BCube" if run.topology.startswith("bcube") else "Fat-Tree"
        gst = run.seconds * FORTY_GIGABIT / LENET
        row = {"servers": run.ranks, "case": f"{algorithm} on {network}", "network": run.topology, "gst": gst}
        rows.append(row | {"paper": paper_gst(run.ranks, algorithm, network)})
    return rows


def paper_gst(servers: int, algorithm: str, network: str) -> float:
    """Return the paper's GST in units of T_F: 2(N-1)/N, and half of that for BML on BCube, whose hosts have 2 NICs."""
    return 2 * (servers - 1) / servers / (2 if (algorithm, network) == ("BML", "BCube") else 1)
