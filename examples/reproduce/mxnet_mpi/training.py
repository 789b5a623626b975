"""The paper's six modes of training in a lab: their curves, what their epochs should take, what the paper says of them.

Seconds an epoch are predicted as what the workers compute, measured without messages, and as many exchanges as an epoch
has, each as long as the links allow (`mpips.predict.exchange`), twice: with push and pull overlapped, and one after the
other, as the modes call them. Where chunks are answered early a mode lies between, but for some percent: seconds are
those of worker 0, whose last exchange need not be the last of all, and Python between the exchanges takes its own.
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

INTERVAL = 64
"""Iterations between two exchanges of elastic averaging: `mpips.optimizers.elastic` has the same."""

WORKERS, SERVERS, CLIENTS = 12, 2, 2
BATCH = 16
ITERATIONS = 1437 // (WORKERS * BATCH)  # of an epoch of the digits
COMPUTING = ", computing"
"""Ends the names of the modes whose compute is emulated."""
SAMPLE_SECONDS = 0.02  # emulated compute: an iteration then computes four times as long as a client's ring takes


class Mode(NamedTuple):
    """A mode of the paper: its example, and its clients; the paper has one master a client."""

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
    """The curve of one mode: [(seconds, test accuracy)], an entry an epoch; idle cores, over the whole job."""
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
    """Seconds that an epoch's iterations take all workers at once, without a message."""
    request = {"hidden": hidden, "batch": BATCH, "iterations": ITERATIONS, "repeats": 3}
    return float(lab.ask(name, WORKERS, "examples.reproduce.mxnet_mpi.compute_ranks", request)["seconds"])


class Epoch(NamedTuple):
    """Seconds of an epoch, with push and pull overlapped, and one after the other."""

    overlapped: float
    in_turn: float


def predicted(mode: Mode, epochs: int, hidden: int, rate: float, compute: float) -> Epoch:
    """For an epoch of so many; `rate` is the payload's, `compute` the seconds an epoch computes. Workers of dist modes
    that do not wait for each other can fill the servers' links, so that an exchange is the fullest link's bytes."""
    dist, elastic = mode.name.startswith("dist"), "ESGD" in mode.name
    overlapped, in_turn = (synchronisation(mode, hidden, rate, whole) for whole in (False, True))
    once = overlapped.bound if dist and "-SGD" not in mode.name else overlapped.seconds
    exchanges: float = ITERATIONS
    if elastic:
        exchanges = -(-ITERATIONS * epochs // INTERVAL) / epochs
        compute += 0.0 if dist else ITERATIONS * client_sum(mode, hidden, rate)
    return Epoch(compute + exchanges * once, compute + exchanges * in_turn.seconds)


def client_sum(mode: Mode, hidden: int, rate: float) -> float:
    """Seconds in which a client of mpi-ESGD sums its gradients."""
    return exchange(sum(sizes(hidden)), WORKERS, 0, mode.clients, "all", rate).seconds


def synchronisation(mode: Mode, hidden: int, rate: float, whole: bool) -> Exchange:
    """One push and pull of the network, `whole` or in chunks: the longer of all bytes, spread evenly over the servers,
    and what the fullest server keeps, alone (small weights lie whole on one server)."""
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
    """Bytes of the network's arrays, in the order in which the store is told them."""
    return (4 * 64 * hidden, 4 * hidden, 4 * 10 * hidden, 4 * 10)


def reached(row: dict[str, Any], target: float) -> tuple[int, float] | None:
    """(epochs, seconds) after which the test accuracy first was the target; None: never."""
    found = (number for number, (_, accuracy) in enumerate(row["curve"], 1) if accuracy >= target)
    epochs = next(found, None)
    return None if epochs is None else (epochs, row["curve"][epochs - 1][0])


class Claim(NamedTuple):
    """What the paper says of one mode against another: `of` over `over`, epochs or times to the target."""

    figure: int
    what: str
    of: str
    over: str
    paper: str


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
"""Sections 7.1 and 7.2. Of figures 11 to 14 the text has who is before whom, and that two epochs are the same."""


def claims(rows: list[dict[str, Any]], target: float) -> list[dict[str, Any]]:
    """Every claim with what was predicted (epochs, push and pull in turn) and measured; None where a mode has not
    reached the target. Only of modes that have a row."""
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
