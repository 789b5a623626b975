"""The `mpips` command: each subcommand lives in its own module, imported only when it is called.

Subcommands that run on several ranks take `-n/--ranks P` here. It starts P processes of their module under mpirun.
"""

from __future__ import annotations

import importlib
import re
import sys
from contextlib import suppress
from typing import Any, NamedTuple

import click

from mpips.collectives.terminal import InterruptibleGroup, Whole, format_examples
from mpips.launch.run import options_of, start


class Sub(NamedTuple):
    """A subcommand of `mpips` or `mpips bench`."""

    # the module whose `command` this is
    module: str
    # the line of help in the list of commands
    summary: str
    # command lines to show below its help
    examples: tuple[str, ...]
    # --ranks P starts P ranks of it under mpirun
    ranked: bool = False
    # its name in the module's `command`, if that is a group; otherwise ""
    case: str = ""

    @property
    def words(self) -> list[str]:
        """The arguments with which Python runs it."""
        return ["-m", self.module.removesuffix(".__main__"), *filter(None, [self.case])]


def _collective(case: str, summary: str, *lines: str) -> Sub:
    return Sub("mpips.collectives.benchmark.__main__", summary, lines, ranked=True, case=case)


COMMANDS = {
    "run": Sub(
        "mpips.launch.run",
        "Start a script as one MPI job of workers and servers.",
        ("mpips run -w 4 train.py --lr 0.1", "mpips run -n 6 -s 2 --hostfile hosts train.py    # 4 workers, 2 servers"),
    ),
    "doctor": Sub(
        "mpips.launch.doctor.__main__",
        "Check Python, MPI, memory, GPU, cores, scheduler and network.",
        ("mpips doctor", "srun -n 4 mpips doctor    # inside an allocation"),
    ),
    "script": Sub(
        "mpips.launch.batch",
        "Write a batch script for Slurm, LSF or PBS.",
        ("mpips script slurm -N 4 -s 2 -w 14 train.py > job.sh", "mpips script pbs -N 2 -n 8 -m my.module > job.sh"),
    ),
    "train": Sub(
        "mpips.mlp.__main__",
        "Train an MLP on a mesh of data and tensor parallel ranks.",
        (
            "mpips train -n 4 --data digits --hidden 512,512 --grid 2x2",
            "mpips train -n 4 --data table.csv --target price --grid auto --explain",
        ),
        ranked=True,
    ),
    "tune": Sub(
        "mpips.collectives.tuner.tune",
        "Measure which algorithm is fastest here, for `auto`.",
        ("mpips tune -n 4", "mpips tune -n 4 --dry-run"),
        ranked=True,
    ),
    "sim": Sub(
        "mpips.collectives.simulator.__main__",
        "Simulate an algorithm on a topology.",
        ("mpips sim --topology bcube:3,2 --algorithms bcube,ring --bytes 4MiB",),
    ),
    "plan": Sub(
        "mpips.overlap.__main__",
        "Group layers for overlap, from a profile.",
        ("mpips plan profile.json --nodes 8", "mpips plan --model resnet50 --nodes 4:64 --plot plan.png"),
    ),
    "why": Sub(
        "mpips.launch.observe.__main__",
        "Say why a job stands: who waits for whom, and where that rank is.",
        ("mpips why", "mpips why 4711 --json"),
        case="why",
    ),
    "top": Sub(
        "mpips.launch.observe.__main__",
        "Show the ranks of a running job.",
        ("mpips top", "mpips top 4711 --once"),
        case="top",
    ),
    "page": Sub(
        "mpips.launch.observe.__main__",
        "Serve a live page of a job for a browser.",
        ("mpips page", "mpips page 4711 --port 8080"),
        case="page",
    ),
    "trace": Sub(
        "mpips.launch.observe.__main__",
        "Write one timeline of all ranks of a running job.",
        ("mpips trace --seconds 5", "mpips trace 4711 -o step.json"),
        case="trace",
    ),
    "metrics": Sub(
        "mpips.launch.observe.__main__",
        "Export metrics of jobs for Prometheus.",
        ("mpips metrics --port 9477", "mpips metrics --dir /var/lib/node_exporter"),
        case="metrics",
    ),
    "chaos": Sub(
        "mpips.chaos.__main__",
        "Make faults in a running job by a plan, and report.",
        (
            "mpips chaos --faults 3 --every 5 --save plan.json -- mpips run -w 4 -s 2 --spares 3 train.py",
            "mpips chaos --replay plan.json --reference -- mpips run -w 4 train.py",
        ),
    ),
    "lab": Sub(
        "mpips.launch.lab.__main__",
        "An emulated cluster on this machine.",
        ("mpips lab up star:4 --rate 100mbit", "mpips lab run -n 4 -- python -m collectives.benchmark allreduce"),
    ),
}
BENCHES = {
    "allreduce": _collective(
        "allreduce",
        "Time sums over all ranks.",
        "mpips bench allreduce -n 4",
        "mpips bench allreduce -n 4 --sizes 8,1KiB,1MiB --algorithms auto,ring --check",
    ),
    "reduce_scatter": _collective(
        "reduce_scatter", "Time sums of which every rank gets a block.", "mpips bench reduce_scatter -n 4 --sizes 1MiB"
    ),
    "allgather": _collective(
        "allgather", "Time gathering every rank's block.", "mpips bench allgather -n 4 --sizes 1MiB"
    ),
    "alltoall": _collective("alltoall", "Time a block from each rank to each.", "mpips bench alltoall -n 4"),
    "broadcast": _collective("broadcast", "Time sending rank 0's array to all.", "mpips bench broadcast -n 4"),
    "reduce": _collective("reduce", "Time sums for rank 0.", "mpips bench reduce -n 4 --op max"),
    "pt2pt": _collective("pt2pt", "Time a ping-pong of ranks 0 and 1.", "mpips bench pt2pt -n 2 --sizes 8:1MiB"),
    "iallreduce": _collective(
        "iallreduce", "How much of an allreduce hides behind compute.", "mpips bench iallreduce -n 2 --sizes 4MiB"
    ),
    "kvstore": Sub(
        "mpips.bench.kvstore",
        "Time push and pull of the store.",
        ("mpips bench kvstore -n 3 --servers 1", "mpips bench kvstore -n 3 --sizes 1KiB --keys 160 --json rows.json"),
        ranked=True,
    ),
    "optimizers": Sub(
        "mpips.bench.optimizers",
        "Time optimizer updates, beside PyTorch's.",
        ("mpips bench optimizers", "mpips bench optimizers --elements 1000000 --repeats 15"),
    ),
    "mlp": Sub(
        "mpips.bench.mlp",
        "Time steps of an MLP, beside PyTorch's.",
        ("mpips bench mlp", "mpips bench mlp -n 2 --grid 1x2 --batch 1000 --width 4096"),
        ranked=True,
    ),
}
HELP = ["-h", "--help"]


class Target(NamedTuple):
    """A parsed command line."""

    # the full name of the command, such as "mpips bench mlp"
    name: str
    # the command's own arguments, without --ranks
    words: list[str]
    # number of ranks to start; None: run it in this process
    ranks: int | None


class Forward(click.Command):
    """A command that passes its arguments on to the command in the subcommand's module, except for `--ranks P`."""

    def __init__(self, group: str, name: str, sub: Sub) -> None:
        super().__init__(name, help=sub.summary, add_help_option=False)
        self._sub = sub
        self._full = f"{group} {name}"

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        if not extra.get("resilient_parsing"):
            return super().make_context(info_name, args, parent, **extra)
        # A shell asks how these words can be completed. Only the real command knows.
        target = self._target(args, parent)
        return _load(self._sub).make_context(target.name, target.words, parent, **extra)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.args = list(args)
        return []

    def invoke(self, ctx: click.Context) -> None:
        target = self._target(ctx.args, ctx.parent)
        if target.ranks is None:
            _load(self._sub, runs_here=True).main(target.words, prog_name=target.name)
        else:
            _check(self._sub, target, target.ranks)
            start(target.ranks, [*self._sub.words, *target.words], name=target.name)

    def _target(self, args: list[str], group: click.Context | None) -> Target:
        words, given = list(args), group.params if group else {}
        ranks = given.get("ranks")
        if self._sub.ranked:
            ranks = _take_ranks(words) or ranks
        # In a group that has --ranks for its other commands.
        elif ranks is not None or ("ranks" in given and _take_ranks(words)):
            raise click.UsageError(f"{self._full} is a single process and takes no --ranks")
        return Target(self._full, words, ranks)


class Commands(InterruptibleGroup):
    """A group that imports a subcommand when it is named, so that `mpips --help` imports neither MPI nor NumPy."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)


def _take_ranks(words: list[str]) -> int | None:
    """Remove `-n P`, `--ranks P` or `--ranks=P` from `words`, and return P; None if it is not there.

    What follows `--` is left alone. Raises UsageError if P is not a positive number.
    """
    ours = words[: words.index("--")] if "--" in words else words
    for place, word in enumerate(ours):
        if not (found := re.fullmatch(r"(--ranks|-n)(?:=(.*)|(\d+))?", word)):
            continue
        option, assigned, joined = found.groups()
        value = assigned if assigned is not None else joined
        count = 1 if value is not None else 2
        if value is None:
            value = "".join(words[place + 1 : place + 2])
        if not value.isdigit() or int(value) < 1:
            raise click.UsageError(f"{option} must be a whole number of at least 1, not {value!r}")
        del words[place : place + count]
        return int(value)
    return None


def _load(sub: Sub, runs_here: bool = False) -> click.Command:
    """Import the module of a subcommand and return its command. MPI starts only with `runs_here`.

    Adds the examples to its help. Adds `--ranks` if the command is ranked, though the command never gets that option.
    """
    if not runs_here:
        # Without mpi4py the command itself prints what is missing.
        with suppress(ImportError):
            import mpi4py

            mpi4py.rc.initialize = False
    try:
        command: Any = importlib.import_module(sub.module).command
    # mpi4py raises RuntimeError if it finds no MPI library.
    except (ImportError, RuntimeError) as error:
        if (getattr(error, "name", None) or "").partition(".")[0] == "mpips":
            raise
        why = "; ".join(str(error).splitlines())
        raise click.UsageError(f"a part of this installation is missing ({why}): see `mpips doctor`") from None
    found: click.Command = command.commands[sub.case] if sub.case else command
    found.context_settings["help_option_names"] = HELP
    found.epilog = format_examples(*sub.examples)
    if sub.ranked and all(option.name != "ranks" for option in found.params):
        found.params.insert(0, _ranks_option(expose_value=False))
    return found


def _ranks_option(**more: Any) -> click.Option:
    return click.Option(["-n", "--ranks"], type=Whole(1), help="Start that many ranks under mpirun.", **more)


def _check(sub: Sub, target: Target, ranks: int) -> None:
    """Handle here, once, what every rank would print: `--help`, and errors in arguments and MPIPS_* variables.

    Calls `check(ranks, **options)` of the module, if it has one, which raises click.UsageError.
    """
    with _load(sub).make_context(target.name, list(target.words)) as context:
        options_of({})
        check = getattr(sys.modules[sub.module], "check", None)
        if check is not None:
            case = {"collective": sub.case} if sub.case else {}
            check(ranks, **case, **context.params)


def _version(ctx: click.Context, option: click.Parameter, wanted: bool) -> None:
    """Print the versions of mpips and of the Python under it."""
    if wanted and not ctx.resilient_parsing:
        from importlib import metadata

        try:
            version = metadata.version("mpips")
        except metadata.PackageNotFoundError:
            version = "(not installed)"
        click.echo(f"mpips {version}, Python {sys.version.split()[0]} ({sys.executable})")
        ctx.exit()


bench = Commands(
    "bench",
    commands={name: Forward("mpips bench", name, sub) for name, sub in BENCHES.items()},
    params=[_ranks_option()],
    short_help="Time collectives, the store, optimizers or MLPs.",
    help="Benchmarks, each with a --help of its own: collectives beside the MPI's own calls, the store beside bare "
    "copies, optimizers and MLPs beside PyTorch's.",
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
    cls=Commands,
    commands={name: bench if name == "bench" else Forward("mpips", name, COMMANDS[name]) for name in _ORDER},
    context_settings={"help_option_names": HELP},
    epilog=format_examples("mpips doctor", "mpips run -w 4 -s 1 train.py"),
)
@click.option("--version", is_flag=True, callback=_version, is_eager=True, expose_value=False, help="Show versions.")
def main() -> None:
    """MPI parameter server and collectives runtime.

    Every command has a --help (-h). Completion in bash: eval "$(_MPIPS_COMPLETE=bash_source mpips)", zsh_source in zsh.
    """


if __name__ == "__main__":
    main(prog_name="mpips")
