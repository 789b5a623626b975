"""`mpips bench optimizers`: server-side updates beside PyTorch's fused ones, one thread each, in one run."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import click
import numpy as np
from rich.table import Table

from collectives.benchmark.harness import take_turns, time_call
from collectives.machine import check_memory
from collectives.terminal import Interruptible, OutFile, Whole, console, show_progress, show_table, write_json
from mpips import optimizers

CASES = (
    optimizers.SGD(learning_rate=0.01, momentum=0.9),
    optimizers.Adam(learning_rate=0.001),
    optimizers.SGD(learning_rate=0.01),
    optimizers.SGD(learning_rate=0.01, momentum=0.9, nesterov=True),
    optimizers.AdaGrad(learning_rate=0.01),
    optimizers.RMSProp(learning_rate=0.01),
    optimizers.AdamW(learning_rate=0.001),
)

ARRAYS = 7  # at once, where there is most: five of `measure`, and Adam's two of state
COUNT = Whole(1)
Step = Callable[[], Any]


class Case(NamedTuple):
    """One optimizer's times in ms, medians over the repeats; torch_* are None where PyTorch is not there."""

    optimizer: str
    elements: int
    mpips_ms: float
    copy_ms: float
    torch_ms: float | None
    ratio: float | None
    torch_setting: str | None
    largest_difference: float | None


def label(optimizer: optimizers.Optimizer) -> str:
    """Return the optimizer's name, with its kind of momentum."""
    name = type(optimizer).__name__
    if isinstance(optimizer, optimizers.SGD) and optimizer.momentum:
        return f"{name} nesterov" if optimizer.nesterov else f"{name} momentum"
    return name


def theirs(torch: ModuleType, optimizer: Any, weights: np.ndarray, gradient: np.ndarray, fused: bool) -> Step:
    """Return PyTorch's step for the same update, on the memory of `weights`; RuntimeError where it has no fused one."""
    parameter = torch.nn.Parameter(torch.from_numpy(weights))
    parameter.grad = torch.from_numpy(gradient)
    options: dict[str, Any] = {"lr": optimizer.learning_rate, **({"fused": True} if fused else {})}
    if isinstance(optimizer, optimizers.Adam):
        kind = torch.optim.AdamW if isinstance(optimizer, optimizers.AdamW) else torch.optim.Adam
        options |= {"betas": (optimizer.beta1, optimizer.beta2), "eps": optimizer.epsilon}
        options |= {"weight_decay": optimizer.weight_decay}
    elif isinstance(optimizer, optimizers.AdaGrad):
        kind = torch.optim.Adagrad
    elif isinstance(optimizer, optimizers.RMSProp):
        kind = torch.optim.RMSprop
        options |= {"alpha": optimizer.decay}
    else:
        kind = torch.optim.SGD
        options |= {"momentum": optimizer.momentum, "nesterov": optimizer.nesterov}
    return kind([parameter], **options).step


def measure(optimizer: optimizers.Optimizer, elements: int, repeats: int, torch: ModuleType | None) -> Case:
    """Alternate one update of each side, `repeats` times after one untimed: medians, and the largest difference."""
    rng = np.random.default_rng(0)
    start, gradient = rng.random(elements, np.float32), rng.random(elements, np.float32)
    weights, spare = start.copy(), np.zeros_like(start)
    state, numbers = optimizer.init(weights), count(1)
    steps: dict[str, Step] = {
        "mpips": lambda: optimizer.update(weights, gradient, state, next(numbers)),
        "copy": lambda: np.copyto(spare, start),
    }
    setting, other = None, start.copy()
    if torch is not None:
        try:
            steps["torch"], setting = theirs(torch, optimizer, other, gradient, fused=True), "fused"
        except (RuntimeError, TypeError):  # it has none for this optimizer on the CPU
            steps["torch"], setting = theirs(torch, optimizer, other, gradient, fused=False), "default"
    times = take_turns({name: partial(time_call, step) for name, step in steps.items()}, repeats + 1)
    median = {name: 1e3 * float(np.median(values[1:])) for name, values in times.items()}
    return Case(
        optimizer=label(optimizer),
        elements=elements,
        mpips_ms=median["mpips"],
        copy_ms=median["copy"],
        torch_ms=median.get("torch"),
        ratio=median["mpips"] / median["torch"] if torch else None,
        torch_setting=setting,
        largest_difference=float(np.abs(weights - other).max()) if torch else None,
    )


def table(cases: list[Case]) -> Table:
    """Return the cases as a table."""
    view = Table(title=f"One update of {cases[0].elements:,} float32, one thread, median ms",
                 caption="one copy: of the array, for comparison; largest difference: between the two results")
    for column in ("optimizer", "mpips", "PyTorch", "mpips / PyTorch", "one copy", "largest difference"):
        view.add_column(column, justify="left" if column == "optimizer" else "right")
    for case in cases:
        beside = "-", "-"
        if case.torch_ms is not None:
            beside = f"{case.torch_ms:.1f} ({case.torch_setting})", f"{case.ratio:.2f}"
        apart = "-" if case.largest_difference is None else f"{case.largest_difference:.1e}"
        view.add_row(case.optimizer, f"{case.mpips_ms:.1f}", *beside, f"{case.copy_ms:.1f}", apart)
    return view


def load_torch() -> tuple[ModuleType | None, str]:
    """PyTorch with one thread, or None and the reason why it is left out."""
    try:
        import torch
    except ImportError as error:
        return None, f"PyTorch is left out: {error}; install it beside mpips: pip install torch"
    torch.set_num_threads(1)
    return torch, f"PyTorch {torch.__version__}, one thread"


@click.command("optimizers", cls=Interruptible)
@click.option("--elements", default=25_000_000, type=COUNT, show_default=True, help="Elements of the array, float32.")
@click.option("--repeats", default=9, type=COUNT, show_default=True, help="Timed updates of each side, alternating.")
@click.option("--json", "json_path", type=OutFile(), help="Write the cases as JSON.")
def command(elements: int, repeats: int, json_path: Path | None) -> None:
    """Time server-side optimizer updates, beside PyTorch's fused ones where PyTorch is installed."""
    try:
        check_memory(f"--elements {elements}", 4 * elements, ARRAYS)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    torch, reason = load_torch()
    cases = []
    with show_progress("updates", len(CASES)) as begin:
        for optimizer in CASES:
            begin(label(optimizer))
            cases.append(measure(optimizer, elements, repeats, torch))
    target = console()
    show_table(table(cases), target)
    target.print(reason)
    if json_path:
        write_json(json_path, [case._asdict() for case in cases])


if __name__ == "__main__":
    command()
