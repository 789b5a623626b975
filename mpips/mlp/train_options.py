"""The options of `mpips train`: how they are parsed, and checked by the launcher and by every rank before training."""

from __future__ import annotations

import importlib
import importlib.util
import math
import os
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import click
import numpy as np
from click.core import ParameterSource
from mpi4py import MPI

from mpips import optimizers
from mpips.collectives.machine import check_memory
from mpips.mlp.data.base import DataSource
from mpips.mlp.data.loading import DealRule, OpenedSource
from mpips.mlp.data.sources import BUILT_IN, open_source
from mpips.mlp.mesh import Mesh, TrainingError, attempt, misfit, parse
from mpips.mlp.network import Specification, largest_slice, working_dtype
from mpips.mlp.servers import servers_misfit

DEVICES = ("cpu", "gpu")
CUPY = "pip install cupy-cuda12x[ctk]"
# options that may not be given with --load, because the checkpoint determines them
_OF_CHECKPOINT = ("hidden", "activation", "dtype", "optimizer", "learning_rate", "momentum")


class FiniteRange(click.FloatRange):
    """A number in a range. Infinity and NaN are refused."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value!r} is no finite number", param, ctx)
        return number


def check(ranks: int, **options: Any) -> None:
    """Raise click.UsageError if a job of `ranks` ranks cannot run with these options. Starts no MPI.

    The launcher calls this function before it starts ranks. The launcher runs where rank 0 will run, so the function
    may also look at files.
    """
    o = SimpleNamespace(**options)
    if o.device != "cpu" and importlib.util.find_spec("cupy") is None:
        raise click.UsageError(f"--device {o.device} needs CuPy, which is not installed: {CUPY}")
    check_texts(ranks, **options)
    if not (o.data in BUILT_IN or o.data.startswith("synthetic:") or os.path.isfile(o.data)):
        raise click.UsageError(f"there is no data file {o.data!r}, nor is it one of {', '.join(BUILT_IN)}")
    if o.load_path and not os.path.isfile(o.load_path):
        raise click.UsageError(f"there is no checkpoint {o.load_path!r}")
    if os.path.isfile(o.data) and not o.data.endswith(".npz"):
        try:
            open_data(o)
        except TrainingError as error:
            raise click.UsageError(str(error)) from None


def check_texts(ranks: int, **options: Any) -> None:
    """Check the options without looking at files, which ranks may see differently. So all ranks raise, or none."""

    try:
        for problem in _problems(ranks, SimpleNamespace(**options)):
            raise TrainingError(problem)
    except ValueError as error:
        raise click.UsageError(str(error)) from error


def _problems(ranks: int, o: SimpleNamespace) -> Iterator[str]:
    """Yield an error message for each problem of the options. Some problems raise ValueError instead."""
    widths(o.hidden)
    optimizer_of(o)
    shape = None if o.grid_text == "auto" else parse(o.grid_text)
    if o.servers and not shape:
        yield "with --servers, give the --grid of a client, for instance 1x2"
    elif o.servers and shape:
        if problem := servers_misfit(o.servers, o.clients, *shape, ranks):
            yield problem
        if o.overlap and o.averaging == "sync" and o.servers < shape[1]:
            yield "--overlap needs a server for each slice of the network: give more --servers"
    elif o.clients > 1:
        yield "--clients are clients of --servers: give some"
    elif shape and (problem := misfit(*shape, ranks)):
        yield problem
    for name in filter(is_given, ("averaging", "every", "alpha")):
        if not o.servers:
            yield f"--{name} says what --servers do: give some"
        if o.averaging == "sync" and name != "averaging":
            yield f"--{name} is for --averaging elastic"
    if o.servers and o.dtype == "mixed":
        yield "--servers keep weights and take gradients in one dtype: choose --dtype float32, not mixed"
    if o.servers and o.explain:
        yield "--explain predicts grids without --servers: leave one of them out"
    built_in = o.data in BUILT_IN or o.data.startswith("synthetic:")
    for name in filter(is_given, ("target", "features", "header", "classify")):
        if built_in or (o.data.endswith(".npz") and name != "classify"):
            yield f"--{name} is for a {'file' if built_in else 'delimited text'}, not for {o.data}"
    if o.data.split(":")[0] == "synthetic":
        open_source(o.data)
    for name in filter(is_given, _OF_CHECKPOINT if o.load_path else ()):
        yield f"--{name.replace('_', '-')} is the checkpoint's with --load: leave it out"
    if o.device != "cpu" and o.explain:
        yield "--explain predicts for --device cpu alone: leave it out"
    if o.device != "cpu" and not shape:
        yield f"--device {o.device} needs a --grid, as auto predicts for the cpu alone: for instance --grid 2x1"


def is_given(option: str) -> bool:
    """True if the user gave the option on the command line."""
    context = click.get_current_context(silent=True)
    return context is not None and context.get_parameter_source(option) is ParameterSource.COMMANDLINE


def take_deal_rule(rule: DealRule, o: SimpleNamespace) -> None:
    """Set seed, test share and batch to those of a checkpoint, except a batch that the user gave.

    Raise TrainingError if the user gave another seed or test share. With these, rows that trained the checkpoint would
    be used for testing.
    """
    for name, before in (("seed", rule.seed), ("test_share", rule.test_share)):
        if is_given(name) and (now := getattr(o, name)) != before:
            raise TrainingError(
                f"--{name.replace('_', '-')} {now} would mix rows for training and rows for testing: the checkpoint's "
                f"is {before}; leave the option out"
            )
        setattr(o, name, before)
    if not is_given("batch"):
        o.batch = rule.batch


def open_data(o: SimpleNamespace) -> DataSource:
    return open_source(o.data, split(o.target), split(o.features), o.data_directory, o.classify, o.header)


def split(text: str) -> list[str]:
    """Split an option at its commas."""
    return [part.strip() for part in text.split(",") if part.strip()]


def widths(text: str) -> tuple[int, ...]:
    """Parse the widths of the hidden layers."""
    try:
        parsed = tuple(int(part) for part in split(text))
    except ValueError:
        parsed = (0,)
    if any(width < 1 for width in parsed):
        raise TrainingError(f"--hidden {text!r} must be widths of at least 1 with commas between, for instance 512,512")
    return parsed


def optimizer_of(o: SimpleNamespace) -> optimizers.Optimizer:
    """Make the optimizer that the options describe. Raise ValueError if the options are wrong."""
    if o.momentum and o.optimizer != "sgd":
        raise TrainingError(f"--momentum is for sgd, not for {o.optimizer}")
    extra = {"momentum": o.momentum} if o.optimizer == "sgd" else {}
    return optimizers.create(o.optimizer, learning_rate=o.learning_rate, **extra)


def too_large(
    o: SimpleNamespace, specification: Specification, opened: OpenedSource, comm: MPI.Comm, mesh: Mesh | None
) -> str | None:
    """Return an error message if the memory of a node cannot hold its ranks' weights and rows, else None. Collective.

    Called before anything large is allocated. `mesh` is None if the mesh has not been made from the options yet.
    """
    if mesh is not None:
        batch, model = mesh.batch, mesh.model
    else:
        # With --grid auto and --explain, steps are also timed for the mesh on which every rank holds the whole network.
        batch, model = (comm.size, 1) if o.grid_text == "auto" else parse(o.grid_text)
        model = 1 if o.explain else model
    sizes, columns, ranks = specification.sizes, opened.features + opened.targets, place_on_node(comm)[1]
    weights = sum(largest_slice(sizes, model, o.split)) * working_dtype(specification.dtype).itemsize
    # bytes of a rank's rows as float64, or of the numbers of all rows, which every rank permutes
    rows = 8 * max(columns * (opened.rows // batch), opened.rows)
    try:
        if o.device == "cpu":
            # twice, for weights and gradients
            check_memory(f"a network of {'-'.join(map(str, sizes))}", weights, 2, ranks)
        # twice, for the rows as read and the scaled rows
        check_memory(f"a set of {opened.rows:,} rows of {columns:,} columns", rows, 2, ranks)
    except ValueError as error:
        return str(error)
    return None


def place_on_node(comm: MPI.Comm) -> tuple[int, int]:
    """Return this rank's number on its node, and the number of ranks on the node. Collective."""
    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    place = node.rank, node.size
    node.Free()
    return place


def array_module(device: str, comm: MPI.Comm) -> ModuleType:
    """Return NumPy for "cpu". For "gpu" return CuPy, and choose this rank's GPU: the node's GPUs are dealt evenly.

    Collective. Every rank raises TrainingError if any rank has no CuPy or no GPU.
    """
    if device == "cpu":
        return np
    place, _ = place_on_node(comm)

    def load() -> ModuleType:
        try:
            module = importlib.import_module("cupy")
            module.cuda.Device(place % module.cuda.runtime.getDeviceCount()).use()
        except ImportError as error:
            raise TrainingError(f"rank {comm.rank}: device gpu needs CuPy, which is not installed: {CUPY}") from error
        except RuntimeError as error:
            raise TrainingError(f"rank {comm.rank}: device gpu finds no GPU: {error}") from error
        return module

    return attempt(comm, load)
