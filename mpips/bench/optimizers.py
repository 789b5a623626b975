"""`mpips bench optimizers`: times optimizer updates by NumPy, by compiled kernels and by PyTorch, one thread each."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import click
import numpy as np
from mpi4py import MPI
from rich.table import Table

from mpips import optimizers
from mpips.collectives.benchmark.harness import TimedCall, measure
from mpips.collectives.kernels import engine
from mpips.collectives.machine import check_memory
from mpips.collectives.terminal import Interruptible, OutFile, Whole, console, show_progress, show_table, write_json

# the optimizers whose updates by a sum of several gradients are also timed
SUMS = optimizers.SGD(learning_rate=0.01, momentum=0.9), optimizers.Adam(learning_rate=0.01)
CASES = (
    *SUMS,
    optimizers.SGD(learning_rate=0.01, momentum=0.9, nesterov=True),
    *(optimizers.OPTIMIZERS[name](learning_rate=0.01) for name in optimizers.of_gradients() if name != "adam"),
)
CONTRIBUTORS = (2, 4, 8)
SUM_ELEMENTS = (1 << 14, 1 << 18, 1 << 22, 1 << 24)
# The largest number of arrays that are in memory at a time. measure_update() of Adam needs this many: for its own
# update, the timed copy, and the states of PyTorch's three settings.
ARRAYS = 22
COUNT = Whole(1)
# PyTorch's implementations of an optimizer
# fused: one kernel; foreach: a call for each operation, on all arrays; default: a call for each operation and array
SETTINGS: dict[str, dict[str, bool]] = {"fused": {"fused": True}, "foreach": {"foreach": True}, "default": {}}


class UpdateTiming(NamedTuple):
    """The times of one update in ms, as medians over the repeats. None means that this way to update is missing."""

    optimizer: str
    elements: int
    # number of gradients that are summed for the update
    gradients: int
    numpy_ms: float
    compiled_ms: float | None
    # time of a copy of as many bytes as one pass of the update reads and writes
    copy_ms: float
    # time by PyTorch's setting "fused", and by the faster one of its settings "default" and "foreach"
    fused_ms: float | None
    other_ms: float | None
    # time of mpips (by the compiled kernel if there is one, else by NumPy) / time of PyTorch's fastest setting
    ratio: float | None
    # largest difference between the weights of mpips and of PyTorch after three updates
    largest_difference: float | None


def label(optimizer: optimizers.Optimizer) -> str:
    """Return the optimizer's name and its kind of momentum, such as "SGD nesterov"."""
    name = type(optimizer).__name__
    if isinstance(optimizer, optimizers.SGD) and optimizer.momentum:
        return f"{name} nesterov" if optimizer.nesterov else f"{name} momentum"
    return name


def theirs(torch: ModuleType, optimizer: Any, weights: np.ndarray, gradient: np.ndarray, **setting: bool) -> TimedCall:
    """Return PyTorch's step for the same update, in the memory of `weights`.

    Raise TypeError if PyTorch has no such optimizer, or RuntimeError or TypeError if it does not take these settings.
    """
    parameter = torch.nn.Parameter(torch.from_numpy(weights))
    parameter.grad = torch.from_numpy(gradient)
    options: dict[str, Any] = {"lr": optimizer.learning_rate, **setting}
    if isinstance(optimizer, optimizers.Adam):
        kind = torch.optim.AdamW if isinstance(optimizer, optimizers.AdamW) else torch.optim.Adam
        options |= {"betas": (optimizer.beta1, optimizer.beta2), "eps": optimizer.epsilon}
        options |= {"weight_decay": optimizer.weight_decay}
    elif isinstance(optimizer, optimizers.AdaGrad):
        kind = torch.optim.Adagrad
    elif isinstance(optimizer, optimizers.RMSProp):
        kind = torch.optim.RMSprop
        options |= {"alpha": optimizer.decay}
    elif not isinstance(optimizer, optimizers.SGD):
        raise TypeError(f"PyTorch has no {type(optimizer).__name__}")
    else:
        kind = torch.optim.SGD
        options |= {"momentum": optimizer.momentum, "nesterov": optimizer.nesterov}
    return kind([parameter], **options).step


def measure_update(
    optimizer: optimizers.Equation, elements: int, repeats: int, torch: ModuleType | None, gradients: int = 1
) -> UpdateTiming:
    """Time an update by NumPy, by the kernel and by PyTorch, and a copy of as many bytes, in `repeats` rounds."""
    rng = np.random.default_rng(0)
    weights = rng.random(elements, np.float32)
    # An update reads every array, and writes every array except the gradients.
    passes = gradients + 2 + 2 * optimizer.slots
    source, target = (np.ones(elements * passes // 2, np.float32) for _ in range(2))
    parts = [rng.random(elements, np.float32) for _ in range(gradients)]
    state, numbers = optimizer.init(weights), count(1)

    def by_numpy() -> None:
        with engine.numpy_only():
            optimizer.update_by_sum(weights, parts, state, next(numbers))

    steps: dict[str, TimedCall] = {"copy": lambda: np.copyto(target, source), "numpy": by_numpy}
    kernel = optimizer.prepare(weights.dtype, gradients)
    engine.load_all()
    if kernel is not None and kernel.call is not None:
        steps["compiled"] = lambda: optimizer.update_by_sum(weights, parts, state, next(numbers))
    if torch is not None:
        for name, setting in SETTINGS.items():
            # PyTorch does not have every optimizer in every setting on the CPU.
            with contextlib.suppress(RuntimeError, TypeError):
                steps[name] = theirs(torch, optimizer, weights, parts[0], **setting)
    timings = measure(MPI.COMM_SELF, list(steps.values()), 0.0, repeats)
    median = {name: 1e3 * timing.median for name, timing in zip(steps, timings, strict=True)}
    others = [median[name] for name in ("foreach", "default") if name in median]
    best = min([*others, median.get("fused", math.inf)])
    return UpdateTiming(
        optimizer=label(optimizer),
        elements=elements,
        gradients=gradients,
        numpy_ms=median["numpy"],
        compiled_ms=median.get("compiled"),
        copy_ms=median["copy"],
        fused_ms=median.get("fused"),
        other_ms=min(others, default=None),
        ratio=median.get("compiled", median["numpy"]) / best if others else None,
        largest_difference=None if torch is None else largest_difference(optimizer, torch),
    )


def largest_difference(optimizer: optimizers.Equation, torch: ModuleType) -> float | None:
    """Return the largest difference between the weights of mpips and of PyTorch after three updates.

    Weights and gradients are random numbers in [0, 1).

    Return None if PyTorch has no such optimizer.
    """
    rng = np.random.default_rng(0)
    weights, gradient = rng.random(10_000, np.float32), rng.random(10_000, np.float32)
    other, state = weights.copy(), optimizer.init(weights)
    try:
        step = theirs(torch, optimizer, other, gradient)
    except TypeError:
        return None
    for number in (1, 2, 3):
        optimizer.update(weights, gradient, state, number)
        step()
    return float(np.abs(weights - other).max())


def show_updates(cases: Sequence[UpdateTiming]) -> Table:
    """Build the table of updates by one gradient."""
    view = Table(
        title=f"One update of {cases[0].elements:,} float32, one thread, median ms",
        caption="copy: of as many bytes as one pass reads and writes; ratio: of the engine that serves, to the "
        "best of PyTorch; difference: the largest between its weights and ours after three updates",
    )
    columns = ("optimizer", "NumPy", "compiled", "copy", "PyTorch fused", "PyTorch other", "ratio", "difference")
    for column in columns:
        view.add_column(column, justify="left" if column == "optimizer" else "right")
    for case in cases:
        times = case.numpy_ms, case.compiled_ms, case.copy_ms, case.fused_ms, case.other_ms
        shown = "-" if case.largest_difference is None else f"{case.largest_difference:.0e}"
        view.add_row(case.optimizer, *map(in_ms, times), "-" if case.ratio is None else f"{case.ratio:.2f}", shown)
    return view


def show_sums(cases: Sequence[UpdateTiming]) -> Table:
    """Build the table of updates by sums of gradients."""
    view = Table(title="Sum of several gradients and update, one thread, median ms")
    for column in ("optimizer", "elements", "gradients", "NumPy", "compiled", "copy", "times as fast"):
        view.add_column(column, justify="left" if column == "optimizer" else "right")
    for case in cases:
        faster = "-" if case.compiled_ms is None else f"{case.numpy_ms / case.compiled_ms:.1f}"
        times = map(in_ms, (case.numpy_ms, case.compiled_ms, case.copy_ms))
        view.add_row(case.optimizer, f"{case.elements:,}", str(case.gradients), *times, faster)
    return view


def in_ms(time: float | None) -> str:
    """Format a time with about three digits."""
    return "-" if time is None else f"{time:.{1 if time >= 10 else 2 if time >= 1 else 3}f}"


def load_torch() -> tuple[ModuleType | None, str]:
    """Return PyTorch, set to one thread, and its version; or None and the reason why it is left out."""
    try:
        import torch
    except ImportError as error:
        return (
            None,
            f"PyTorch is left out: {error}; install it: pip install torch --index-url https://download.pytorch.org/whl/cpu",
        )
    torch.set_num_threads(1)
    return torch, f"PyTorch {torch.__version__}, one thread"


@click.command("optimizers", cls=Interruptible)
@click.option("--elements", default=25_000_000, type=COUNT, show_default=True, help="Elements of the array, float32.")
@click.option("--repeats", default=9, type=COUNT, show_default=True, help="Timed updates of each side, alternating.")
@click.option("--json", "json_path", type=OutFile(), help="Write the cases as JSON.")
def command(elements: int, repeats: int, json_path: Path | None) -> None:
    """Time the updates of a server's optimizers by NumPy, by compiled kernels, and by PyTorch if it is installed."""
    try:
        check_memory(f"--elements {elements}", 4 * elements, ARRAYS)
        engine.chosen_engine()
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    torch, reason = load_torch()
    sizes = sorted({min(size, elements) for size in SUM_ELEMENTS})
    sums = [(optimizer, size, gradients) for optimizer in SUMS for size in sizes for gradients in CONTRIBUTORS]
    updates, summed = [], []
    with show_progress("updates", len(CASES) + len(sums)) as begin:
        for optimizer in CASES:
            begin(label(optimizer))
            updates.append(measure_update(optimizer, elements, repeats, torch))
        for optimizer, size, gradients in sums:
            begin(f"{label(optimizer)} by {gradients} gradients of {size:,}")
            summed.append(measure_update(optimizer, size, repeats, None, gradients))
    target = console()
    show_table(show_updates(updates), target)
    show_table(show_sums(summed), target)
    target.print(reason, markup=False)
    target.print(f"compiled: {engine.status().reason}", markup=False)
    if json_path:
        write_json(json_path, [case._asdict() for case in (*updates, *summed)])


if __name__ == "__main__":
    command()
