"""The `mpips` command: each subcommand lives in its own module, imported only when it is called.

`--ranks P`, which every ranked subcommand takes here, starts P processes of that module under mpirun.
"""

from __future__ import annotations

import difflib
import importlib
import sys
from contextlib import suppress
from typing import Any, NamedTuple

import click

from collectives.terminal.stdout import lasting
from launch.process import INTERRUPTED
from launch.run import options_of, start


class Sub(NamedTuple):
    """A subcommand: the module of its `command`, its help, and whether `--ranks P` starts it by mpirun."""

    module: str
    summary: str
    ranked: bool = False


COMMANDS = {
    "run": Sub("launch.run", "Start a script as one MPI job of workers and servers."),
    "doctor": Sub("launch.doctor.__main__", "Check Python, MPI, memory, GPU, cores, scheduler and network."),
    "script": Sub("launch.batch.command", "Write a batch script for Slurm, LSF or PBS."),
    "train": Sub("mpips.mlp.__main__", "Train an MLP on a grid of batch and model parallel ranks.", ranked=True),
    "bench": Sub("collectives.benchmark.__main__", "Time collectives, or `kvstore` and `optimizers`.", ranked=True),
    "tune": Sub("collectives.tuner.command", "Measure which algorithm is fastest here, for `auto`.", ranked=True),
    "sim": Sub("collectives.simulator.command", "Simulate an algorithm on a topology."),
    "plan": Sub("mpips.overlap.__main__", "Group layers for overlap, from a profile."),
    "lab": Sub("launch.lab.__main__", "An emulated cluster on this machine."),
}
BENCHES = {
    "kvstore": Sub("mpips.bench.__main__", "Time push and pull of the store.", ranked=True),
    "optimizers": Sub("mpips.bench.optimizers", "Time optimizer updates, beside PyTorch's."),
}
"""Benchmarks of `mpips bench NAME` that are not the collectives'."""
HELP = ["-h", "--help"]
OURS = ("mpips", "collectives", "launch")


class Target(NamedTuple):
    """What a line of words means: the command's full name, the command, its own words, and the ranks to start."""

    name: str
    sub: Sub
    words: list[str]
    ranks: int | None


class Forward(click.Command):
    """A command that hands its words, untouched, to the one in the module; only `--ranks P` is taken out."""

    def __init__(self, name: str, sub: Sub) -> None:
        super().__init__(name, help=sub.summary, add_help_option=False)
        self._sub = sub

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        if not extra.get("resilient_parsing"):
            return super().make_context(info_name, args, parent, **extra)
        target = self._target(args)  # a shell asks how to complete these words
        return _load(target.sub).make_context(target.name, target.words, parent, **extra)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.args = list(args)
        return []

    def invoke(self, ctx: click.Context) -> None:
        target = self._target(ctx.args)
        if target.ranks is None:
            _load(target.sub, runs_here=True).main(target.words, prog_name=target.name)
        else:
            _check(target, target.ranks)
            module = target.sub.module.removesuffix(".__main__")
            start(target.ranks, ["-m", module, *target.words], name=target.name)

    def _target(self, args: list[str]) -> Target:
        name, sub, words = f"mpips {self.name}", self._sub, list(args)
        ranks = _take_ranks(words) if sub.ranked else None
        if self.name == "bench" and words and words[0] in BENCHES:
            name, sub = f"{name} {words[0]}", BENCHES[words.pop(0)]
        if ranks is not None and not sub.ranked:
            raise click.UsageError(f"{name} is a single process and takes no --ranks")
        return Target(name, sub, words, ranks)


class Lazy(click.Group):
    """A group that imports a subcommand when it is named, so that `mpips --help` imports neither MPI nor NumPy."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:  # while a command is imported
            sys.exit(INTERRUPTED)

    def main(self, *args: Any, **options: Any) -> Any:
        with lasting():
            return super().main(*args, **options)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        return Forward(name, COMMANDS[name]) if name in COMMANDS else None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        near = difflib.get_close_matches(args[0], COMMANDS, 1)
        if args[0] not in COMMANDS and near and not ctx.resilient_parsing:
            ctx.fail(f"No such command {args[0]!r}. Did you mean {near[0]!r}?")
        return super().resolve_command(ctx, args)


def _take_ranks(words: list[str]) -> int | None:
    """Takes `--ranks P` or `--ranks=P` out of `words`, unless it stands after `--`."""
    ours = words[: words.index("--")] if "--" in words else words
    place = next((i for i, word in enumerate(ours) if word.partition("=")[0] == "--ranks"), None)
    if place is None:
        return None
    _, equals, value = words[place].partition("=")
    if not equals:
        value = "".join(words[place + 1 : place + 2])
    if not value.isdigit() or int(value) < 1:
        raise click.UsageError(f"--ranks must be a whole number of at least 1, not {value!r}")
    del words[place : place + (1 if equals else 2)]
    return int(value)


def _load(sub: Sub, runs_here: bool = False) -> click.Command:
    """The command of the module, which is imported without starting MPI unless it is to run here; its help names
    `--ranks`, though it never sees that option."""
    if not runs_here:
        with suppress(ImportError):  # the command says so
            import mpi4py

            mpi4py.rc.initialize = False
    try:
        command: click.Command = importlib.import_module(sub.module).command
    except (ImportError, RuntimeError) as error:  # mpi4py's where there is no MPI is a RuntimeError
        if (getattr(error, "name", None) or "").partition(".")[0] in OURS:
            raise
        why = "; ".join(str(error).splitlines())
        raise click.UsageError(f"a part of this installation is missing ({why}): see `mpips doctor`") from None
    command.context_settings["help_option_names"] = HELP
    if sub.ranked and all(option.name != "ranks" for option in command.params):
        text = "start that many ranks under mpirun"
        command.params.insert(1, click.Option(["--ranks"], type=click.IntRange(1), expose_value=False, help=text))
    return command


def _check(target: Target, ranks: int) -> None:
    """Says once, here, what every rank would say: `--help`, and what is wrong with the words and MPIPS_* variables.
    The module's `check(ranks, **options)`, where it has one, raises click.UsageError."""
    with _load(target.sub).make_context(target.name, list(target.words)) as context:
        options_of({})
        check = getattr(sys.modules[target.sub.module], "check", None)
        if check is not None:
            check(ranks, **context.params)


def _version(ctx: click.Context, option: click.Parameter, wanted: bool) -> None:
    """Prints the versions of mpips and of the Python under it."""
    if wanted and not ctx.resilient_parsing:
        from importlib import metadata

        try:
            version = metadata.version("mpips")
        except metadata.PackageNotFoundError:
            version = "(not installed)"
        click.echo(f"mpips {version}, Python {sys.version.split()[0]} ({sys.executable})")
        ctx.exit()


@click.command(cls=Lazy, context_settings={"help_option_names": HELP})
@click.option("--version", is_flag=True, callback=_version, is_eager=True, expose_value=False, help="Show versions.")
def main() -> None:
    """MPI parameter server and collectives runtime.

    Every command has a --help (-h). Completion in bash: eval "$(_MPIPS_COMPLETE=bash_source mpips)", zsh_source in zsh.
    """


if __name__ == "__main__":
    main(prog_name="mpips")
