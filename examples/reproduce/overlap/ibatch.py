"""iBatch, figure 5: simulated speedups of the default, layer by layer, iBatch and the optimum on 1 to 72 nodes.

Every node is a worker and a server (BigDL). In an iteration it pulls (N - 1) / N of the parameters, and pushes as much.
The strategy decides how pulls overlap with the forward pass. Pushes follow the backward pass without overlap, as the
paper says of figure 5. The 72 nodes are on 8 blades with 10 Gbit/s each, so a node has 10 Gbit/s / ceil(N / 8). A
message costs a startup for every server, because it looks up each of them.

The paper gives no compute times. Here the compute time of each network on one node is fitted to the default's speedup
on 30 nodes, and the startup for a server to the speedup of layer by layer on 72 nodes (VGG19-22K). All else is
predicted. The paper also says that layer by layer scales better than the default on 30 nodes, and then states smaller
numbers for it. Both are compared as stated.

The stated speedups of VGG19-22K on 72 nodes, 26 (default) and 45 (iBatch), cannot both follow from the paper's own
Eq. 4. From one to the other, an iteration saves 72 C / 26 - 72 C / 45 = 1.17 C, where C is the compute time of a node.
But hiding pulls behind the forward pass saves at most the forward pass, which is less than C.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from examples.reproduce.overlap.figures import Comparison, Figure, Point, speedup
from examples.reproduce.overlap.networks import MODELS, blocks, googlenet
from examples.reproduce.overlap.rivals import PARTITIONS
from mpips.overlap.networks import LayerTable
from mpips.overlap.problem import PARAMETER_BYTES, Problem, makespan

BLADES, BLADE_BYTES_PER_S = 8, 10e9 / 8
NODES = (1, 6, 12, 18, 24, 30, 36, 42, 48, 54, 60, 66, 72)
NAMES = {"sequential": "default", "layerwise": "layer by layer", "ibatch": "iBatch", "optimal": "optimal"}
# speedups that the paper states: (default, layer by layer, iBatch) on 30 nodes
STATED_30 = {
    "googlenet": (26, 25, 29),
    "inception-v3": (25, 24, 28),
    "vgg19": (23, 22, 26),
    "vgg19-22k": (22, 21, 25),
}
# the same for VGG19-22K on 72 nodes
STATED_72 = (26, 32, 45)
# share of the forward pass in the compute time: backward takes twice as long as forward
FORWARD_SHARE = 1 / 3


def reproduce() -> Figure:
    """Fit the constants, then simulate every strategy on every number of nodes. Takes about a second."""
    startup = fit_startup()
    compute = {model: fit_compute(model, startup) for model in STATED_30}
    points = tuple(
        _point(model, strategy, nodes, compute[model], startup)
        for model in STATED_30
        for strategy in NAMES
        for nodes in NODES
    )
    settings = {
        "network": "8 blades with 10 Gbit/s each, nodes share them equally; every node is worker and server",
        "startup": f"{startup * 1e3:.2f} ms a message and server (fitted: VGG19-22K, layer by layer, 72 nodes)",
        "compute": {model: f"{seconds:.2f} s (fitted: default, 30 nodes)" for model, seconds in compute.items()},
        "impossible": "26 and 45 on 72 nodes differ by more than Eq. 4 can save (see docs/why/papers/ibatch.md)",
    }
    title = "iBatch, figure 5: simulated parameter server, pulls overlapped, pushes not"
    return Figure(title, settings, points, tuple(_comparisons(points)))


def fit_compute(model: str, startup: float) -> float:
    """Return the compute seconds at which the default reaches its stated speedup on 30 nodes (in closed form)."""
    nodes, stated = 30, STATED_30[model][0]
    exposed = 2 * (startup * nodes + float(_transfer(_table(model), nodes).sum()))
    return exposed / (nodes / stated - 1)


def fit_startup() -> float:
    """Return the startup seconds at which layer by layer reaches its stated speedup on 72 nodes (by bisection)."""
    few, many = 1e-5, 1.0
    for _ in range(40):
        middle = (few * many) ** 0.5
        compute = fit_compute("vgg19-22k", middle)
        if _point("vgg19-22k", "layerwise", 72, compute, middle).speedup > STATED_72[1]:
            few = middle
        else:
            many = middle
    return few


def _table(model: str) -> LayerTable:
    """Return a model with its blocks as layers, as the paper counts: its GoogLeNet has 12 (figure 4)."""
    return blocks(googlenet(heads=False) if model == "googlenet" else MODELS[model]())


def _transfer(table: LayerTable, nodes: int) -> NDArray[np.float64]:
    share = BLADE_BYTES_PER_S / math.ceil(nodes / BLADES)
    nbytes = PARAMETER_BYTES * np.array([layer.parameters for layer in table.layers], np.float64)
    return nbytes * (nodes - 1) / nodes / share


def _pull(table: LayerTable, nodes: int, compute: float, startup: float) -> Problem:
    forward = [compute * FORWARD_SHARE * layer.flops / table.flops for layer in table.layers]
    return Problem.of(forward, startup * nodes, _transfer(table, nodes))


def _point(model: str, strategy: str, nodes: int, compute: float, startup: float) -> Point:
    if nodes == 1:
        return Point(model, NAMES[strategy], 1, compute, 1.0)
    pull = _pull(_table(model), nodes, compute, startup)
    push = pull.startup + float(pull.transfer.sum())
    seconds = makespan(pull, PARTITIONS[strategy](pull)) + compute * (1 - FORWARD_SHARE) + push
    return Point(model, NAMES[strategy], nodes, seconds, nodes * compute / seconds)


def _comparisons(points: tuple[Point, ...]) -> list[Comparison]:
    rows = []
    stated = [(model, 30, values) for model, values in STATED_30.items()] + [("vgg19-22k", 72, STATED_72)]
    for model, nodes, values in stated:
        for name, value in zip(("default", "layer by layer", "iBatch"), values):
            ours = speedup(points, model, name, nodes)
            best = speedup(points, model, "optimal", nodes) if name == "iBatch" else None
            fitted = (nodes, name) in ((30, "default"), (72, "layer by layer"))
            rows.append(Comparison(f"{model}, {nodes} nodes: speedup of {name}", value, ours, best, fitted))
    return rows
