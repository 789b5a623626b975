"""`mpips plan PROFILE.json`: the groups and predicted iteration times of every strategy."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Literal

import click
from click.core import ParameterSource
from rich.table import Table

from mpips.collectives.terminal import Interruptible, OutFile, Picture, console, show_table, write_text, writing
from mpips.overlap import networks, timeline
from mpips.overlap.planner import OverlapPlan, plans
from mpips.overlap.problem import LARGEST, TEN_GIGABIT, Groups, Profile, RingNetwork, load_profile, save_profile, shown
from mpips.overlap.strategies import STRATEGIES

# number of blanks between two columns of the table
GAP = 3
# the numbers of nodes in MG-WFBP's figure 9
DEFAULT_NODES = (4, 8, 16, 32, 64)

FILE = OutFile()
BATCH = click.IntRange(1)


class Refused(click.ClickException):
    """No plan can be made from the arguments. The command exits with code 2."""

    exit_code = 2


class Rate(click.ParamType):
    """A rate in operations a second, a finite number above 0: 1.33e12 or 1.33T."""

    name = "rate"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        found = re.fullmatch(r"([0-9.eE+-]+?) *([kMGTP]?) *(?:flop/s|op/s|flops)?", str(value).strip())
        try:
            rate = float(found[1]) * 1000 ** " kMGTP".index(found[2] or " ") if found else math.nan
        except ValueError:
            rate = math.nan
        if not 0 < rate < math.inf:
            self.fail(f"{value!r} is no rate: give a node's operations a second, as 1.33e12 or 1.33T", param, ctx)
        return rate


class Nodes(click.ParamType):
    """Numbers of nodes: 8, 4:64 (doubling), 4:64:4 (in steps of 4) or 4,6,9."""

    name = "nodes"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        try:
            sizes = parse_nodes(str(value))
        except ValueError:
            self.fail(f"{value!r} is no number of nodes: give 8, 4:64 (doubling), 4:64:4 (a step) or 4,6,9", param, ctx)
        return sizes


def parse_nodes(text: str) -> tuple[int, ...]:
    """Parse numbers of nodes. Raises ValueError if the text has no number, or a number below 1."""
    first, *rest = text.split(":")
    if not rest:
        sizes = [int(part) for part in first.split(",")]
    elif len(rest) == 1:
        sizes = [int(first)]
        while 0 < 2 * sizes[-1] <= int(rest[0]):
            sizes.append(2 * sizes[-1])
    else:
        stop, step = map(int, rest)
        sizes = list(range(int(first), stop + 1, step))
    if not sizes or min(sizes) < 1 or max(sizes) > LARGEST or (rest and int(rest[0]) < sizes[0]):
        raise ValueError(text)
    return tuple(sizes)


@click.command(cls=Interruptible)
@click.argument(
    "profile_file",
    metavar="[PROFILE.json]",
    required=False,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
)
@click.option("--model", type=click.Choice(list(networks.MODELS)), help="Plan a built-in network instead of a profile.")
@click.option(
    "--rate",
    type=Rate(),
    default="1.33T",
    show_default=True,
    help="With --model: floating point operations a second of a node, such as 1.33T or 1.33e12.",
)
@click.option("--batch", type=BATCH, default=32, show_default=True, help="With --model: examples a node and iteration.")
@click.option(
    "--save-profile", "profile_out", type=OutFile(), help="Write the profile here, to be edited or measured again."
)
@click.option(
    "--nodes", type=Nodes(), help="8, 4:64 (doubling), 4:64:4 (a step) or 4,6,9; a measured profile has one size only."
)
@click.option("--strategy", multiple=True, type=click.Choice(STRATEGIES), help="Only these (may be repeated).")
@click.option(
    "--direction",
    type=click.Choice(["push", "pull", "both"]),
    default="push",
    show_default=True,
    help="With push, backward with allreduces (network); with pull, forward with pulls (startup_s, "
    "bandwidth_Bps); with both, one after the other. The strategy joint is always both.",
)
@click.option(
    "--link",
    type=click.Choice(["shared", "duplex"]),
    default="shared",
    show_default=True,
    help="Whether pushes and pulls share the network.",
)
@click.option("--json", "json_file", type=OutFile(), help="Write the plans here.")
@click.option("--plot", type=Picture(), help="Draw the timelines of the largest number of nodes here (PNG).")
@click.option("--trace", "trace_file", type=OutFile(), help="Write those timelines as a Chrome trace.")
def command(
    profile_file: Path | None,
    model: str | None,
    rate: float,
    batch: int,
    profile_out: Path | None,
    nodes: tuple[int, ...] | None,
    strategy: tuple[str, ...],
    direction: str,
    link: str,
    json_file: Path | None,
    plot: Path | None,
    trace_file: Path | None,
) -> None:
    """Print the groups and predicted iteration times of all strategies for PROFILE.json, or for a built-in --model."""
    if (profile_file is None) == (model is None):
        raise click.UsageError("give either a PROFILE.json or --model NAME")
    context = click.get_current_context()
    for option in ("rate", "batch"):
        if profile_file and context.get_parameter_source(option) is ParameterSource.COMMANDLINE:
            raise click.UsageError(f"--{option} goes with --model: {profile_file} holds the times of its layers")
    try:
        # 10GbE as in the MG-WFBP paper, for the allreduce and for a server's link
        link_cost = TEN_GIGABIT
        profile = (
            load_profile(profile_file)
            if profile_file
            else networks.MODELS[str(model)]().profile(rate, batch, link_cost, link_cost.alpha, 1 / link_cost.beta)
        )
        found = plans(profile, strategy or STRATEGIES, direction, _sizes(profile, nodes), link)  # type: ignore[arg-type]
        if not all(each.iteration_s for each in found):
            raise ValueError(f"{profile_file}: neither layers nor messages take any time: there is nothing to plan")
    except (ValueError, OSError) as error:
        raise Refused(str(error)) from error
    _show(found, profile)
    if profile_out:
        with writing(profile_out):
            save_profile(profile, profile_out)
    if json_file:
        write_text(json_file, json.dumps([each.row() for each in found], indent=1) + "\n")
    timelines = {each.strategy: each.tasks for each in found if each.nodes == found[-1].nodes}
    if plot:
        click.echo(f"drawing {plot}", err=True)
        where = "" if found[-1].nodes is None else f", {found[-1].nodes} nodes"
        with writing(plot):
            timeline.draw(timelines, plot, f"{model or profile_file}{where}")
    if trace_file:
        with writing(trace_file):
            timeline.save_chrome(timelines, trace_file, [layer.name for layer in profile.layers])


def _sizes(profile: Profile, nodes: tuple[int, ...] | None) -> tuple[int | None, ...]:
    if isinstance(profile.network, RingNetwork):
        return nodes or DEFAULT_NODES
    if nodes and profile.network.nodes is None and profile.network.collective != "servers":
        click.echo(
            'note: the profile does not say on how many nodes a and b were measured ("nodes"), '
            "so they are taken as they are for every number of nodes",
            err=True,
        )
    return nodes or (profile.network.nodes,)


def _show(found: list[OverlapPlan], profile: Profile) -> None:
    """Show a table that fits into the terminal. Long lists of groups are shortened; --json has all groups."""
    alone = profile.forward_s + profile.backward_s
    several = len({each.direction for each in found}) > 1
    rows = [("nodes", "strategy", "iteration ms", "speedup", "hidden", "messages")]
    for each in found:
        speedup = "" if each.nodes is None else f"{each.nodes * alone / each.iteration_s:.2f}"
        nodes = "-" if each.nodes is None else str(each.nodes)
        name = f"{each.strategy}, both" if several and each.direction == "both" else each.strategy
        seconds, hidden = f"{1e3 * each.iteration_s:,.1f}", f"{each.hidden_share:.0%}"
        count = str(len(each.groups))
        if each.direction == "both":
            count = f"{len(each.push or ())} + {each.early + len(each.pull or ())}"
        rows.append((nodes, name, seconds, speedup, hidden, count))
    caption = "speedup: over one node. hidden: messages' time beside compute. groups: layers sent together"
    table = Table(caption=caption)
    terminal = console()
    room = terminal.width - GAP
    for column in zip(*rows, strict=True):
        justify: Literal["left", "right"] = "left" if column[0] == "strategy" else "right"
        table.add_column(column[0], justify=justify, no_wrap=True)
        room -= max(map(len, column)) + GAP
    table.add_column("groups", no_wrap=True, max_width=max(room, len("groups")))
    for row, each in zip(rows[1:], found, strict=True):
        early = f" (the last {each.early} pulled early)" if each.early else ""
        both = f"{_groups(each.push or ())}{early} + {_groups(each.pull or ())}"
        table.add_row(*row, both if each.direction == "both" else _groups(each.groups))
    show_table(table, terminal)


def _groups(groups: Groups) -> str:
    """Format groups. If there are more than eight, format the first four and the last three."""
    words = [shown(group) for group in groups]
    if len(words) > 8:
        words = [*words[:4], "..", *words[-3:]]
    return " ".join(words)


if __name__ == "__main__":
    command()
