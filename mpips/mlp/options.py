"""The options of `mpips train`, checked before anything starts: by every rank, or by the launcher alone; its device."""

from __future__ import annotations

import importlib
import importlib.util
import math
import os
from types import SimpleNamespace
from typing import Any

import click
import numpy as np
from click.core import ParameterSource
from mpi4py import MPI

from collectives.machine import check_memory
from mpips import optimizers
from mpips.mlp.data.loading import DealRule, Opened
from mpips.mlp.data.sources import BUILT_IN, open_source
from mpips.mlp.mesh import TrainingError, agree, misfit, parse
from mpips.mlp.network import Specification, largest_slice, working_dtype
from mpips.mlp.servers import servers_misfit

OPTIMIZERS = ("sgd", "adagrad", "rmsprop", "adam", "adamw")
DEVICES = ("cpu", "gpu")
CUPY = "pip install cupy-cuda12x[ctk]"
_OF_CHECKPOINT = ("hidden", "activation", "dtype", "optimizer", "learning_rate", "momentum")


class FiniteRange(click.FloatRange):
    """A number of a range, which infinity and NaN are not."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the number, or refuse it."""
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value!r} is no finite number", param, ctx)
        return number


def check(ranks: int, **options: Any) -> None:
    """Refuse a command line that cannot be for that many ranks, by click.UsageError. Starts no MPI; for the launcher,
    which sees the files of rank 0."""
    o = SimpleNamespace(**options)
    if o.device != "cpu" and importlib.util.find_spec("cupy") is None:
        raise click.UsageError(f"--device {o.device} needs CuPy, which is not installed: {CUPY}")
    check_words(ranks, **options)
    if not (o.data in BUILT_IN or o.data.startswith("synthetic:") or os.path.isfile(o.data)):
        raise click.UsageError(f"there is no data file {o.data!r}, nor is it one of {', '.join(BUILT_IN)}")
    if o.load_path and not os.path.isfile(o.load_path):
        raise click.UsageError(f"there is no checkpoint {o.load_path!r}")
    if os.path.isfile(o.data) and not o.data.endswith(".npz"):
        try:
            open_source(o.data, words(o.target), words(o.features), o.data_directory, o.classify, o.header)
        except TrainingError as error:
            raise click.UsageError(str(error)) from None


def check_words(ranks: int, **options: Any) -> None:
    """Do the same without a look at files, which ranks may see differently: they all raise or none does."""
    o = SimpleNamespace(**options)
    try:
        widths(o.hidden)
        optimizer_of(o)
        for problem in (_mesh_problem(ranks, o), _servers_problem(o), _data_problem(o), _other_problem(o)):
            if problem:
                raise TrainingError(problem)
    except ValueError as error:
        raise click.UsageError(str(error)) from error


def given(option: str) -> bool:
    """Tell whether the user gave the option, rather than taking its default."""
    context = click.get_current_context(silent=True)
    return context is not None and context.get_parameter_source(option) is ParameterSource.COMMANDLINE


def deal_by(rule: DealRule, o: SimpleNamespace) -> None:
    """Let the options deal rows as a checkpoint's were; TrainingError where the user says otherwise."""
    for name, before in (("seed", rule.seed), ("test_share", rule.test_share)):
        if given(name) and (now := getattr(o, name)) != before:
            raise TrainingError(
                f"--{name.replace('_', '-')} {now} would mix rows for training and rows for testing: the checkpoint's "
                f"is {before}; leave the option out"
            )
        setattr(o, name, before)
    if not given("batch"):
        o.batch = rule.batch


def words(text: str) -> list[str]:
    """Return the words of an option between commas."""
    return [word.strip() for word in text.split(",") if word.strip()]


def widths(text: str) -> tuple[int, ...]:
    """Return the widths of the hidden layers."""
    try:
        found = tuple(int(word) for word in words(text))
    except ValueError:
        found = (0,)
    if any(width < 1 for width in found):
        raise TrainingError(f"--hidden {text!r} must be widths of at least 1 with commas between, for instance 512,512")
    return found


def optimizer_of(o: SimpleNamespace) -> optimizers.Optimizer:
    """Return the optimizer of the options; TrainingError where they make none."""
    if o.momentum and o.optimizer != "sgd":
        raise TrainingError(f"--momentum is for sgd, not for {o.optimizer}")
    extra = {"momentum": o.momentum} if o.optimizer == "sgd" else {}
    try:
        return optimizers.create(o.optimizer, learning_rate=o.learning_rate, **extra)
    except ValueError as error:
        raise TrainingError(str(error)) from error


def too_large(
    specification: Specification, opened: Opened, batch: int, model: int, split: str, ranks: int, on_host: bool = True
) -> str | None:
    """Say why `ranks` ranks of one machine cannot hold a mesh of batch x model; None where nothing speaks against it.

    Asked before anything large is made.
    """
    sizes, columns = specification.sizes, opened.features + opened.targets
    weights = sum(largest_slice(sizes, model, split)) * working_dtype(specification.dtype).itemsize
    rows = 8 * max(columns * (opened.rows // batch), opened.rows)  # float64 values, or the numbers of all rows
    try:
        if on_host:  # weights and gradients
            check_memory(f"a network of {'-'.join(map(str, sizes))}", weights, 2, ranks)
        check_memory(f"a set of {opened.rows:,} rows of {columns:,} columns", rows, 2, ranks)  # as read, and scaled
    except ValueError as error:
        return str(error)
    return None


def array_module(device: str, comm: MPI.Comm) -> Any:
    """Return NumPy for "cpu"; CuPy for "gpu", on a GPU that this rank shares with as few ranks as can be.

    Collective; TrainingError on every rank where one of them has no CuPy or no GPU.
    """
    if device == "cpu":
        return np
    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    place = node.rank
    node.Free()
    module, problem = None, None
    try:
        module = importlib.import_module("cupy")
        module.cuda.Device(place % module.cuda.runtime.getDeviceCount()).use()
    except ImportError:
        problem = f"rank {comm.rank}: device gpu needs CuPy, which is not installed: {CUPY}"
    except RuntimeError as error:
        problem = f"rank {comm.rank}: device gpu finds no GPU: {error}"
    agree(comm, problem)
    return module


def _mesh_problem(ranks: int, o: SimpleNamespace) -> str | None:
    """Say why the mesh and the servers do not fit the ranks; None where they do."""
    if o.servers and o.grid_text == "auto":
        return "with --servers, give the --grid of a client, for instance 1x2"
    shape = None if o.grid_text == "auto" else parse(o.grid_text)
    if o.servers and shape:
        return servers_misfit(o.servers, o.clients, *shape, ranks)
    if o.clients > 1:
        return "--clients are clients of --servers: give some"
    return misfit(*shape, ranks) if shape else None


def _servers_problem(o: SimpleNamespace) -> str | None:
    if not o.servers and (lonely := [name for name in ("averaging", "every", "alpha") if given(name)]):
        return f"--{lonely[0]} says what --servers do: give some"
    if o.averaging == "sync" and (lonely := [name for name in ("every", "alpha") if given(name)]):
        return f"--{lonely[0]} is for --averaging elastic"
    if o.servers and o.dtype == "mixed":
        return "--servers keep weights and take gradients in one dtype: choose --dtype float32, not mixed"
    if o.servers and o.overlap and o.averaging == "sync" and o.servers < parse(o.grid_text)[1]:
        return "--overlap needs a server for each slice of the network: give more --servers"
    if o.servers and o.explain:
        return "--explain predicts grids without --servers: leave one of them out"
    return None


def _data_problem(o: SimpleNamespace) -> str | None:
    chosen = [name for name in ("target", "features", "header", "classify") if given(name)]
    built_in = o.data in BUILT_IN or o.data.startswith("synthetic:")
    if chosen and (built_in or (o.data.endswith(".npz") and chosen != ["classify"])):
        return f"--{chosen[0]} is for a {'file' if built_in else 'delimited text'}, not for {o.data}"
    if o.data.split(":")[0] == "synthetic":
        open_source(o.data)
    return None


def _other_problem(o: SimpleNamespace) -> str | None:
    if o.load_path and (fixed := [name for name in _OF_CHECKPOINT if given(name)]):
        return f"--{fixed[0].replace('_', '-')} is the checkpoint's with --load: leave it out"
    if o.device != "cpu" and o.explain:
        return "--explain predicts for --device cpu alone: leave it out"
    if o.device != "cpu" and o.grid_text == "auto":
        return f"--device {o.device} needs a --grid, as auto predicts for the cpu alone: for instance --grid 2x1"
    return None
