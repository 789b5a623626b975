"""The `mpips` command. Each subcommand has its own module, which is imported only when the subcommand is called.

Some subcommands can run on several ranks. For these, this module handles the option `-n/--ranks P`: it starts P
processes of the subcommand's module under mpirun.
"""

from __future__ import annotations

import importlib
import re
import sys
from contextlib import suppress
from typing import Any, NamedTuple

import click

from mpips.collectives.terminal import InterruptibleGroup, Whole, format_examples
from mpips.launch.run import make_options, start


class Subcommand(NamedTuple):
    """A subcommand of `mpips` or `mpips bench`."""

    # the module that defines the subcommand, as a click command named `command`
    module: str
    # the line about the subcommand in the list of commands that `mpips --help` shows
    summary: str
    # example command lines to show below the subcommand's help
    examples: tuple[str, ...]
    # True if the subcommand takes --ranks
    ranked: bool = False
    # If the module's `command` is a click group, the name of the subcommand in this group. Otherwise "".
    case: str = ""

    @property
    def python_arguments(self) -> list[str]:
        """The arguments that make Python run the subcommand."""
        return ["-m", self.module.removesuffix(".__main__"), *filter(None, [self.case])]


def _collective_benchmark(case: str, summary: str, *lines: str) -> Subcommand:
    return Subcommand("mpips.collectives.benchmark.__main__", summary, lines, ranked=True, case=case)


COMMANDS = {
    "run": Subcommand(
        "mpips.launch.run",
        "Start a script as one MPI job of workers and servers.",
        ("mpips run -w 4 train.py --lr 0.1", "mpips run -n 6 -s 2 --hostfile hosts train.py    # 4 workers, 2 servers"),
    ),
    "doctor": Subcommand(
        "mpips.launch.doctor.__main__",
        "Check Python, MPI, memory, GPU, cores, scheduler and network.",
        ("mpips doctor", "srun -n 4 mpips doctor    # inside an allocation"),
    ),
    "script": Subcommand(
        "mpips.launch.batch",
        "Write a batch script for Slurm, LSF or PBS.",
        ("mpips script slurm -N 4 -s 2 -w 14 train.py > job.sh", "mpips script pbs -N 2 -n 8 -m my.module > job.sh"),
    ),
    "train": Subcommand(
        "mpips.mlp.__main__",
        "Train an MLP on a mesh of data and tensor parallel ranks.",
        (
            "mpips train -n 4 --data digits --hidden 512,512 --grid 2x2",
            "mpips train -n 4 --data table.csv --target price --grid auto --explain",
        ),
        ranked=True,
    ),
    "tune": Subcommand(
        "mpips.collectives.tuner.tune",
        "Measure which algorithms are fastest on this machine, for `auto`.",
        ("mpips tune -n 4", "mpips tune -n 4 --dry-run"),
        ranked=True,
    ),
    "sim": Subcommand(
        "mpips.collectives.simulator.__main__",
        "Simulate an algorithm on a topology.",
        ("mpips sim --topology bcube:3,2 --algorithms bcube,ring --bytes 4MiB",),
    ),
    "plan": Subcommand(
        "mpips.overlap.__main__",
        "Group layers for overlap, from a profile.",
        ("mpips plan profile.json --nodes 8", "mpips plan --model resnet50 --nodes 4:64 --plot plan.png"),
    ),
    "why": Subcommand(
        "mpips.launch.observe.__main__",
        "Explain why a job is stuck: which rank waits for which, and where.",
        ("mpips why", "mpips why 4711 --json"),
        case="why",
    ),
    "top": Subcommand(
        "mpips.launch.observe.__main__",
        "Show the ranks of a running job.",
        ("mpips top", "mpips top 4711 --once"),
        case="top",
    ),
    "page": Subcommand(
        "mpips.launch.observe.__main__",
        "Serve a live page of a job for a browser.",
        ("mpips page", "mpips page 4711 --port 8080"),
        case="page",
    ),
    "trace": Subcommand(
        "mpips.launch.observe.__main__",
        "Write one timeline of all ranks of a running job.",
        ("mpips trace --seconds 5", "mpips trace 4711 -o step.json"),
        case="trace",
    ),
    "metrics": Subcommand(
        "mpips.launch.observe.__main__",
        "Export metrics of jobs for Prometheus.",
        ("mpips metrics --port 9477", "mpips metrics --dir /var/lib/node_exporter"),
        case="metrics",
    ),
    "chaos": Subcommand(
        "mpips.chaos.__main__",
        "Make faults in a running job by a plan, and report.",
        (
            "mpips chaos --faults 3 --every 5 --save plan.json -- mpips run -w 4 -s 2 --spares 3 train.py",
            "mpips chaos --replay plan.json --reference -- mpips run -w 4 train.py",
        ),
    ),
    "lab": Subcommand(
        "mpips.launch.lab.__main__",
        "An emulated cluster on this machine.",
        ("mpips lab up star:4 --rate 100mbit", "mpips lab run -n 4 -- python -m collectives.benchmark allreduce"),
    ),
}
BENCHES = {
    "allreduce": _collective_benchmark(
        "allreduce",
        "Time sums over all ranks.",
        "mpips bench allreduce -n 4",
        "mpips bench allreduce -n 4 --sizes 8,1KiB,1MiB --algorithms auto,ring --check",
    ),
    "reduce_scatter": _collective_benchmark(
        "reduce_scatter",
        "Time sums, of which each rank gets one block.",
        "mpips bench reduce_scatter -n 4 --sizes 1MiB",
    ),
    "allgather": _collective_benchmark(
        "allgather", "Time gathering every rank's block.", "mpips bench allgather -n 4 --sizes 1MiB"
    ),
    "alltoall": _collective_benchmark("alltoall", "Time a block from each rank to each.", "mpips bench alltoall -n 4"),
    "broadcast": _collective_benchmark(
        "broadcast", "Time sending rank 0's array to all.", "mpips bench broadcast -n 4"
    ),
    "reduce": _collective_benchmark("reduce", "Time sums for rank 0.", "mpips bench reduce -n 4 --op max"),
    "pt2pt": _collective_benchmark(
        "pt2pt", "Time a ping-pong of ranks 0 and 1.", "mpips bench pt2pt -n 2 --sizes 8:1MiB"
    ),
    "iallreduce": _collective_benchmark(
        "iallreduce", "How much of an allreduce hides behind compute.", "mpips bench iallreduce -n 2 --sizes 4MiB"
    ),
    "kvstore": Subcommand(
        "mpips.bench.kvstore",
        "Time push and pull of the store.",
        ("mpips bench kvstore -n 3 --servers 1", "mpips bench kvstore -n 3 --sizes 1KiB --keys 160 --json rows.json"),
        ranked=True,
    ),
    "optimizers": Subcommand(
        "mpips.bench.optimizers",
        "Time optimizer updates, and compare with PyTorch.",
        ("mpips bench optimizers", "mpips bench optimizers --elements 1000000 --repeats 15"),
    ),
    "mlp": Subcommand(
        "mpips.bench.mlp",
        "Time steps of an MLP, and compare with PyTorch.",
        ("mpips bench mlp", "mpips bench mlp -n 2 --grid 1x2 --batch 1000 --width 4096"),
        ranked=True,
    ),
}
HELP = ["-h", "--help"]


class CommandLine(NamedTuple):
    """A parsed command line."""

    # the full name of the command, such as "mpips bench mlp"
    name: str
    # the command's own arguments, without --ranks
    arguments: list[str]
    # number of ranks to start; None: run the command in this process
    ranks: int | None


class ForwardingCommand(click.Command):
    """A command that passes its arguments, except for `--ranks P`, on to the command in a subcommand's module."""

    def __init__(self, group: str, name: str, subcommand: Subcommand) -> None:
        super().__init__(name, help=subcommand.summary, add_help_option=False)
        self._subcommand = subcommand
        self._full_name = f"{group} {name}"

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        if not extra.get("resilient_parsing"):
            return super().make_context(info_name, args, parent, **extra)
        # With resilient_parsing, a shell asks how the arguments can be completed. Only the module of the subcommand
        # knows its options, so load it.
        line = self._parse(args, parent)
        return _load(self._subcommand).make_context(line.name, line.arguments, parent, **extra)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.args = list(args)
        return []

    def invoke(self, ctx: click.Context) -> None:
        line = self._parse(ctx.args, ctx.parent)
        if line.ranks is None:
            _load(self._subcommand, starts_mpi=True).main(line.arguments, prog_name=line.name)
        else:
            _check_before_start(self._subcommand, line, line.ranks)
            start(line.ranks, [*self._subcommand.python_arguments, *line.arguments], name=line.name)

    def _parse(self, args: list[str], group: click.Context | None) -> CommandLine:
        arguments, group_options = list(args), group.params if group else {}
        ranks = group_options.get("ranks")
        if self._subcommand.ranked:
            ranks = _take_ranks(arguments) or ranks
        # The user has given --ranks to a command of the group that does not take it.
        elif ranks is not None or ("ranks" in group_options and _take_ranks(arguments)):
            raise click.UsageError(f"{self._full_name} is a single process and takes no --ranks")
        return CommandLine(self._full_name, arguments, ranks)


class OrderedGroup(InterruptibleGroup):
    """A group that lists its commands in the order in which they were added."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)


def _take_ranks(arguments: list[str]) -> int | None:
    """Remove `-n P`, `--ranks P` or `--ranks=P` from the arguments, and return P. Return None without such an option.

    Arguments after `--` stay as they are. Raises UsageError if P is not a positive number.
    """
    options = arguments[: arguments.index("--")] if "--" in arguments else arguments
    for index, argument in enumerate(options):
        if not (match := re.fullmatch(r"(--ranks|-n)(?:=(.*)|(\d+))?", argument)):
            continue
        option, assigned, joined = match.groups()
        value = assigned if assigned is not None else joined
        count = 1 if value is not None else 2
        if value is None:
            value = "".join(arguments[index + 1 : index + 2])
        if not value.isdigit() or int(value) < 1:
            raise click.UsageError(f"{option} must be a whole number of at least 1, not {value!r}")
        del arguments[index : index + count]
        return int(value)
    return None


def _load(subcommand: Subcommand, starts_mpi: bool = False) -> click.Command:
    """Import the module of a subcommand and return its command. With `starts_mpi` the module may start MPI.

    Adds the examples to the help. For a subcommand that takes --ranks, this also adds the option `--ranks` to the help,
    although this module has already handled it.
    """
    if not starts_mpi:
        # If mpi4py is missing, ignore that here: the import below fails with a message.
        with suppress(ImportError):
            import mpi4py

            mpi4py.rc.initialize = False
    try:
        command: Any = importlib.import_module(subcommand.module).command
    # mpi4py raises RuntimeError if it finds no MPI library.
    except (ImportError, RuntimeError) as error:
        if (getattr(error, "name", None) or "").partition(".")[0] == "mpips":
            raise
        why = "; ".join(str(error).splitlines())
        raise click.UsageError(f"a part of this installation is missing ({why}): see `mpips doctor`") from None
    chosen: click.Command = command.commands[subcommand.case] if subcommand.case else command
    chosen.context_settings["help_option_names"] = HELP
    chosen.epilog = format_examples(*subcommand.examples)
    if subcommand.ranked and all(option.name != "ranks" for option in chosen.params):
        chosen.params.insert(0, _ranks_option(expose_value=False))
    return chosen


def _ranks_option(**settings: Any) -> click.Option:
    return click.Option(["-n", "--ranks"], type=Whole(1), help="Start this many ranks under mpirun.", **settings)


def _check_before_start(subcommand: Subcommand, line: CommandLine, ranks: int) -> None:
    """Print once what every rank would otherwise print: `--help`, and errors in arguments and MPIPS_* variables.

    If the subcommand's module has a function `check(ranks, **options)`, call this function. It raises click.UsageError
    if the options do not fit the number of ranks.
    """
    with _load(subcommand).make_context(line.name, list(line.arguments)) as context:
        make_options({})
        check = getattr(sys.modules[subcommand.module], "check", None)
        if check is not None:
            case = {"collective": subcommand.case} if subcommand.case else {}
            check(ranks, **case, **context.params)


def _print_version(ctx: click.Context, option: click.Parameter, is_set: bool) -> None:
    """Print the versions of mpips and of Python, and exit."""
    if is_set and not ctx.resilient_parsing:
        from importlib import metadata

        try:
            version = metadata.version("mpips")
        except metadata.PackageNotFoundError:
            version = "(not installed)"
        click.echo(f"mpips {version}, Python {sys.version.split()[0]} ({sys.executable})")
        ctx.exit()


bench = OrderedGroup(
    "bench",
    commands={name: ForwardingCommand("mpips bench", name, subcommand) for name, subcommand in BENCHES.items()},
    params=[_ranks_option()],
    short_help="Time collectives, the store, optimizers or MLPs.",
    help="Benchmarks, each with its own --help. Collectives are compared with those of MPI, the store with plain "
    "copies, optimizers and MLPs with those of PyTorch.",
    epilog=format_examples("mpips bench allreduce -n 4", "mpips bench kvstore -n 3 --servers 1"),
    context_settings={"help_option_names": HELP},
)
_ORDER = (
    "run",
    "doctor",
    "script",
    "train",
    "bench",
    "tune",
    "sim",
    "plan",
    "chaos",
    "lab",
    "why",
    "top",
    "page",
    "trace",
    "metrics",
)


@click.command(
    cls=OrderedGroup,
    commands={name: bench if name == "bench" else ForwardingCommand("mpips", name, COMMANDS[name]) for name in _ORDER},
    context_settings={"help_option_names": HELP},
    epilog=format_examples("mpips doctor", "mpips run -w 4 -s 1 train.py"),
)
@click.option(
    "--version", is_flag=True, callback=_print_version, is_eager=True, expose_value=False, help="Show versions."
)
def main() -> None:
    """MPI parameter server and collectives runtime.

    Every command has a --help (-h). Completion in bash: eval "$(_MPIPS_COMPLETE=bash_source mpips)", zsh_source in zsh.
    """


if __name__ == "__main__":
    main(prog_name="mpips")
