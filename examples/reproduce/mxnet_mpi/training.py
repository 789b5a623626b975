"""The paper's six modes of training in a lab: their measured curves, predicted epochs, and the paper's claims.

The time of an epoch is predicted as the compute time of the workers, measured without messages, plus the exchanges of
the epoch. An exchange takes as long as the links allow (`predicted.exchange`). There are two predictions: with push and
pull overlapped, and with the pull after the push, as the modes call them. Servers answer some chunks early, so the
measured time lies between the two. It may be off by some percent: seconds are those of worker 0, whose last exchange
need not be the last of all, and Python takes some time between the exchanges.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any, NamedTuple

from examples.reproduce import lab
from examples.reproduce.cores import idle_share, processor
from examples.reproduce.mxnet_mpi.predicted import Exchange, exchange
from launch.lab import client
from mpips.store.keys.sharding import Placement
from mpips.store.options import Options

# iterations between two exchanges of elastic averaging, as in `mpips.optimizers.elastic`
INTERVAL = 64

WORKERS, SERVERS, CLIENTS = 12, 2, 2
BATCH = 16
# iterations of an epoch; the digits have 1,437 training images
ITERATIONS = 1437 // (WORKERS * BATCH)
# end of the names of the modes with emulated compute
COMPUTING = ", computing"
# emulated compute: an iteration then computes four times as long as a client's ring takes
SAMPLE_SECONDS = 0.02


class Mode(NamedTuple):
    """A mode of the paper, and the example that runs it. The paper has one master in each client."""

    name: str
    script: str
    kind: str
    clients: int
    masters: str = "one"

    @property
    def options(self) -> Options:
        return Options(servers=SERVERS, workers=WORKERS, clients=self.clients, masters=self.masters)


MODES = tuple(
    Mode(f"{group}-{algorithm.upper()}", f"examples/{algorithm}.py", f"{group}_{order}", clients)
    for group, clients in (("dist", 1), ("mpi", CLIENTS))
    for algorithm, order in (("sgd", "sync"), ("asgd", "async"), ("esgd", "async"))
)
ALL_MASTERS = Mode("mpi-SGD, all masters", "examples/sgd.py", "mpi_sync", CLIENTS, "all")


def train(name: str, mode: Mode, epochs: int, hidden: int, limit: float, sample_seconds: float = 0.0) -> dict[str, Any]:
    """Train in one mode. The row has "curve", [(seconds, test accuracy)] by epoch, and "idle" of the whole job."""
    arguments = ["--lines", "1", "--epochs", str(epochs), "--hidden", str(hidden), "--batch-size", str(BATCH)]
    arguments += ["--sample-seconds", str(sample_seconds), "--kind", mode.kind]
    before = processor()
    program = [sys.executable, "-m", "mpips", str(lab.ROOT / mode.script), *arguments]
    argv = client.job_command(name, WORKERS + SERVERS, program)
    variables = {**os.environ, **lab.ONE_THREAD, **mode.options.environment(), "PYTHONPATH": str(lab.ROOT)}
    done = subprocess.run(argv, cwd=lab.ROOT, env=variables, capture_output=True, text=True, timeout=limit)
    if done.returncode:
        raise SystemExit(f"{mode.name} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    after = processor()
    records = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    curve = [(r["seconds"], r["test_accuracy"]) for r in records]
    row = {"mode": mode.name + (COMPUTING if sample_seconds else ""), "curve": curve}
    row |= {"epoch_seconds": curve[-1][0] / len(curve)}
    return row | {"idle": idle_share(before, after)}


def computing(name: str, hidden: int) -> float:
    """Measure the compute time of an epoch, with all workers at once and without messages, in seconds."""
    request = {"hidden": hidden, "batch": BATCH, "iterations": ITERATIONS, "repeats": 3}
    return float(lab.ask(name, WORKERS, "examples.reproduce.mxnet_mpi.compute_ranks", request)["seconds"])


class Epoch(NamedTuple):
    """The predicted seconds of an epoch: with push and pull overlapped, and with the pull after the push."""

    overlapped: float
    in_turn: float


def predicted(mode: Mode, epochs: int, hidden: int, rate: float, compute: float) -> Epoch:
    """Predict the mean time of an epoch when a mode runs `epochs` epochs.

    Args:
        rate: Payload bytes a second of a link.
        compute: Compute seconds of an epoch.
    """
    dist, elastic = mode.name.startswith("dist"), "ESGD" in mode.name
    overlapped, in_turn = (synchronisation(mode, hidden, rate, whole) for whole in (False, True))
    # Workers of dist modes that do not wait for each other can fill the servers' links: an exchange then takes as long
    # as the bytes of the fullest link.
    once = overlapped.bound if dist and "-SGD" not in mode.name else overlapped.seconds
    exchanges: float = ITERATIONS
    if elastic:
        exchanges = -(-ITERATIONS * epochs // INTERVAL) / epochs
        compute += 0.0 if dist else ITERATIONS * client_sum(mode, hidden, rate)
    return Epoch(compute + exchanges * once, compute + exchanges * in_turn.seconds)


def client_sum(mode: Mode, hidden: int, rate: float) -> float:
    """Return the seconds in which a client of mpi-ESGD sums its gradients."""
    return exchange(sum(sizes(hidden)), WORKERS, 0, mode.clients, "all", rate).seconds


def synchronisation(mode: Mode, hidden: int, rate: float, whole: bool) -> Exchange:
    """Simulate a push and pull of the neural network, `whole` (pull after push) or in chunks.

    Small arrays lie whole on one server, so servers hold different amounts. The result is the longer of two exchanges:
    all bytes spread evenly over the servers, and those of the fullest server alone.
    """
    options = mode.options
    clients = WORKERS if mode.name.startswith("dist") else mode.clients
    place = Placement(SERVERS, options.big_array)
    for nbytes in sizes(hidden):
        place.place([nbytes // 4], 4)
    loads = ((sum(place.loads), SERVERS), (max(place.loads), 1))
    found = []
    for nbytes, servers in loads:
        chunks = 1 if whole else -(-nbytes // options.chunk_bytes)
        in_flight = options.chunks_in_flight
        found.append(exchange(nbytes, WORKERS, servers, clients, mode.masters, rate, chunks, in_flight))
    return max(found)


def sizes(hidden: int) -> tuple[int, ...]:
    """Return the bytes of the neural network's arrays, in the order in which the store gets them."""
    return (4 * 64 * hidden, 4 * hidden, 4 * 10 * hidden, 4 * 10)


def reached(row: dict[str, Any], target: float) -> tuple[int, float] | None:
    """Return (epochs, seconds) after which the test accuracy first reached the target, or None."""
    found = (number for number, (_, accuracy) in enumerate(row["curve"], 1) if accuracy >= target)
    epochs = next(found, None)
    return None if epochs is None else (epochs, row["curve"][epochs - 1][0])


class Claim(NamedTuple):
    """A claim of the paper about the ratio of two modes' times."""

    figure: int
    # "epoch": seconds of an epoch; "accuracy": seconds to the target accuracy
    what: str
    # the ratio is that of mode `of` over mode `over`
    of: str
    over: str
    # the paper's value, as text
    paper: str


# Sections 7.1 and 7.2. For figures 11 to 14 the text says only which mode is first, and that two epochs are the same.
CLAIMS = (
    Claim(12, "epoch", "dist-SGD", "mpi-SGD", "6 (drawn)"),
    Claim(12, "epoch", "dist-SGD", ALL_MASTERS.name, ""),
    Claim(12, "epoch", "dist-ASGD", "mpi-ASGD", "> 1"),
    Claim(12, "epoch", "mpi-SGD", "mpi-ASGD", "> 1"),
    Claim(12, "epoch", "dist-ESGD", "mpi-ESGD", "1"),
    Claim(12, "epoch", f"dist-ESGD{COMPUTING}", f"mpi-ESGD{COMPUTING}", "1"),
    Claim(11, "accuracy", "dist-SGD", "mpi-SGD", "> 1"),
    Claim(11, "accuracy", "dist-ASGD", "mpi-ASGD", "> 1"),
    Claim(11, "accuracy", "mpi-ASGD", "mpi-SGD", "> 1"),
    Claim(13, "accuracy", "dist-ESGD", "mpi-ESGD", "> 1"),
    Claim(13, "accuracy", f"dist-ESGD{COMPUTING}", f"mpi-ESGD{COMPUTING}", "> 1"),
    Claim(14, "accuracy", "mpi-SGD", "mpi-ESGD", "> 1"),
)


def claims(rows: list[dict[str, Any]], target: float) -> list[dict[str, Any]]:
    """Return a row for each claim about modes that were measured, with the predicted and measured ratio.

    Only epochs are predicted (with pull after push). "measured" is None if a mode has not reached the target.
    """
    of = {row["mode"]: row for row in rows}
    found = []
    for claim in CLAIMS:
        if claim.of not in of or claim.over not in of:
            continue
        first, second = of[claim.of], of[claim.over]
        row = claim._asdict() | {"predicted": None}
        if claim.what == "epoch":
            row["predicted"] = first["predicted"].in_turn / second["predicted"].in_turn
            row["measured"] = first["epoch_seconds"] / second["epoch_seconds"]
        else:
            ends = [reached(each, target) for each in (first, second)]
            row["measured"] = ends[0][1] / ends[1][1] if ends[0] and ends[1] else None
        found.append(row)
    return found
