"""`mpips sim`: predicts the time of a collective on a network that need not exist."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import click
import numpy as np
from rich.progress import Progress
from rich.table import Table

from mpips.collectives import files
from mpips.collectives.schedule.model import KINDS
from mpips.collectives.simulator.cost import LinkCost
from mpips.collectives.simulator.simulate import Prediction, figure5, predict
from mpips.collectives.simulator.topology import Topology, parse, parse_rate
from mpips.collectives.terminal import (
    Interruptible,
    OutFile,
    Picture,
    Seconds,
    Whole,
    console,
    parse_sizes,
    show_bytes,
    show_table,
    split_words,
    write_json,
    writing,
)

TIME = Seconds(zero=True)
# With more ranks, clocks and links might not fit into memory.
MOST_RANKS = 1 << 20
# From this number of ranks on, a simulation may take long enough for a progress bar.
MANY = 2048


@click.command(cls=Interruptible)
@click.option("--topology", default="bcube:3,2", show_default=True, help="One of star:N, fattree:K, bcube:N,K.")
@click.option(
    "--algorithms",
    "--algorithm",
    "algorithms",
    default=("bcube",),
    show_default=True,
    multiple=True,
    help="A list such as bcube,ring; repeatable.",
)
@click.option("--collective", type=click.Choice(KINDS), default="allreduce", show_default=True)
@click.option(
    "--bytes", "sizes", default="548MB", show_default=True, help="A list of sizes and of ranges MIN:MAX[:FACTOR]."
)
@click.option("--rate", default="10gbit", show_default=True, help="Rate of every link, in each direction.")
@click.option("--beta", type=Seconds(), help="Seconds per byte, instead of --rate.")
@click.option("--alpha", default=0.0, type=TIME, show_default=True, help="Seconds per message.")
@click.option("--gamma", default=0.0, type=TIME, show_default=True, help="Seconds to add a byte.")
@click.option("--per-host", default=1, type=Whole(1), show_default=True, help="Ranks on each host.")
@click.option("--near-alpha", default=0.0, type=TIME, show_default=True, help="Seconds per message inside a host.")
@click.option("--near-beta", default=0.0, type=TIME, show_default=True, help="Seconds per byte inside a host.")
@click.option("--figure5", "figure", is_flag=True, help="Figure 5 of the BML paper, for --bytes and --rate.")
@click.option("--json", "json_path", type=OutFile(), help="Write the rows as JSON.")
@click.option("--plot", "plot_path", type=Picture(), help="Draw the times (PNG).")
def command(
    topology: str,
    algorithms: tuple[str, ...],
    collective: str,
    sizes: str,
    rate: str,
    beta: float | None,
    alpha: float,
    gamma: float,
    per_host: int,
    near_alpha: float,
    near_beta: float,
    figure: bool,
    json_path: Path | None,
    plot_path: Path | None,
) -> None:
    """Simulate a collective on a topology. Also show its time by formula (closed form), if there is a formula.

    The time of a message is alpha, plus its bytes divided by its share of the links' rate.
    """
    try:
        speed = 1 / beta if beta else parse_rate(rate)
        if figure:
            _figure5(_sizes(sizes)[0], speed, json_path, plot_path)
            return
        near = LinkCost(near_alpha, near_beta)
        model = partial(predict, alpha=alpha, gamma=gamma, near=near, per_host=per_host)
        network = _network(topology, speed, per_host)
        rows = [
            _predicted(model, network, collective, algorithm, nbytes)
            for algorithm in [word for text in algorithms for word in split_words(text)]
            for nbytes in _sizes(sizes)
        ]
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    _print(rows)
    if json_path:
        write_json(json_path, [asdict(row) for row in rows])
    if plot_path:
        click.echo(f"drawing {plot_path}", err=True)
        _draw(rows, plot_path)


def _network(topology: str, rate: float, per_host: int) -> Topology:
    try:
        network = parse(topology, rate)
    except ValueError as error:
        raise ValueError(f"--topology: {error}") from None
    if network.hosts * per_host > MOST_RANKS:
        raise ValueError(f"--per-host {per_host} on {network.hosts:,} hosts: at most {MOST_RANKS:,} ranks in all")
    return network


def _sizes(text: str) -> list[int]:
    try:
        sizes = parse_sizes(text)
    except ValueError as error:
        raise ValueError(f"--bytes: {error}") from None
    if min(sizes) < 1:
        raise ValueError(f"--bytes {text}: sizes must be at least 1 byte")
    return sizes


def _predicted(
    model: Callable[..., Prediction], network: Topology, kind: str, algorithm: str, nbytes: int
) -> Prediction:
    title, screen = f"{algorithm} on {network.name}", console(stderr=True)
    if network.hosts >= MANY and not screen.is_terminal:
        screen.print(f"{title}: {show_bytes(nbytes)}", markup=False)
    with Progress(console=screen, transient=True, disable=network.hosts < MANY) as bar:
        task = bar.add_task(title, total=1.0)
        with np.errstate(over="ignore", invalid="ignore"):
            row = model(network, kind, algorithm, nbytes, progress=lambda done: bar.update(task, completed=done))
    if not math.isfinite(row.seconds):
        raise ValueError("--alpha, --beta and --gamma (or --near-*) give a time too large to compute: lower them")
    return row


def _print(rows: Sequence[Prediction]) -> None:
    kinds = ", ".join(dict.fromkeys(row.collective for row in rows))
    caption = (
        "closed form: by formula, if there is one; algbw: size / simulated time; busiest link: bytes that it carries"
    )
    table = Table("topology", "algorithm", title=f"{kinds}, simulated", caption=caption)
    for title in ("ranks", "size", "simulated ms", "closed form ms", "algbw GB/s", "busiest link MB"):
        table.add_column(title, justify="right")
    for row in rows:
        form = "-" if row.closed_form is None else f"{1e3 * row.closed_form:,.3f}"
        bandwidth = f"{row.bytes / row.seconds / 1e9:.3f}" if row.seconds else "-"
        numbers = [f"{row.ranks:,}", show_bytes(row.bytes), f"{1e3 * row.seconds:,.3f}", form, bandwidth]
        table.add_row(row.topology, row.algorithm, *numbers, f"{row.busiest_link_bytes / 1e6:,.3f}")
    show_table(table)


def _figure5(nbytes: int, rate: float, json_path: Path | None, plot_path: Path | None) -> None:
    rows = figure5(nbytes, rate)
    full = nbytes / rate
    table = Table(
        "servers",
        "topology",
        "algorithm",
        title=f"BML, figure 5: time over TF = {1e3 * full:,.1f} ms",
        caption="TF: all bytes over one link",
    )
    for title in ("simulated", "paper's text", "over BML on BCube"):
        table.add_column(title, justify="right")
    # The last row of each number of ranks is BML on BCube, and overwrites the entries of the other rows.
    best = {row.ranks: row.seconds for row, _ in rows}
    for row, paper_seconds in rows:
        name = {"direct": "parameter server"}.get(row.algorithm, "BML")
        ratio = f"{row.seconds / best[row.ranks]:.2f}"
        shares = [f"{seconds / full:.4f}" for seconds in (row.seconds, paper_seconds)]
        table.add_row(f"{row.ranks:,}", row.topology, name, *shares, ratio)
    show_table(table)
    if json_path:
        write_json(json_path, [{**asdict(row), "paper_seconds": paper_seconds} for row, paper_seconds in rows])
    if plot_path:
        _draw_bars(rows, full, plot_path)


def _draw(rows: Sequence[Prediction], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4.2), layout="constrained")
    axes = figure.add_subplot(xscale="log", yscale="log", xlabel="bytes", ylabel="seconds", title=rows[0].topology)
    for algorithm in dict.fromkeys(row.algorithm for row in rows):
        line = [row for row in rows if row.algorithm == algorithm]
        (drawn,) = axes.plot([r.bytes for r in line], [r.seconds for r in line], "o", label=algorithm)
        forms = [(r.bytes, r.closed_form) for r in line if r.closed_form is not None]
        axes.plot(*np.array(forms).reshape(-1, 2).T, color=drawn.get_color())
    axes.grid(alpha=0.3)
    axes.legend(title="points: simulated; lines: closed form", fontsize=8, title_fontsize=8)
    with writing(path):
        files.write_picture(path, figure, dpi=130)


def _draw_bars(rows: Sequence[tuple[Prediction, float]], full: float, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.2), layout="constrained")
    for place, servers in enumerate(dict.fromkeys(row.ranks for row, _ in rows)):
        of_size = [(row, paper_seconds) for row, paper_seconds in rows if row.ranks == servers]
        names = [f"{'PS' if row.algorithm == 'direct' else 'BML'}\n{row.topology}" for row, _ in of_size]
        axes = figure.add_subplot(1, 2, place + 1, title=f"{servers:,} servers", ylabel="time / TF", ylim=(0, 2.6))
        axes.bar(names, [row.seconds / full for row, _ in of_size], label="simulated")
        axes.plot(names, [paper_seconds / full for _, paper_seconds in of_size], "k_", ms=30, label="paper's text")
        axes.legend(fontsize=8, markerscale=0.5)
    with writing(path):
        files.write_picture(path, figure, dpi=130)


if __name__ == "__main__":
    command(prog_name="python -m collectives.simulator")
