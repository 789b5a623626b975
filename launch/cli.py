"""The `mpips` command: each subcommand lives in its own module, imported only when it is called.

`--ranks P`, which every ranked subcommand takes here, starts P processes of that module under mpirun.
"""

from __future__ import annotations

import importlib
from typing import NamedTuple

import click

from launch.run import start


class Sub(NamedTuple):
    """A subcommand: the module of its `command`, its help, and whether `--ranks P` starts it by mpirun."""

    module: str
    summary: str
    ranked: bool = False


COMMANDS = {
    "run": Sub("launch.run", "Start a script as one MPI job of workers and servers."),
    "doctor": Sub("launch.doctor", "Check Python, MPI, memory, GPU, cores, scheduler and network."),
    "script": Sub("launch.schedulers.script", "Write a batch script for Slurm, LSF or PBS."),
    "train": Sub("mpips.parallel.__main__", "Train an MLP on a grid of batch and model parallel ranks.", ranked=True),
    "bench": Sub("collectives.bench.__main__", "Time collectives, or `kvstore` and `optimizers`.", ranked=True),
    "tune": Sub("collectives.tune", "Measure which algorithm is fastest here, for `auto`.", ranked=True),
    "sim": Sub("collectives.sim", "Simulate an algorithm on a topology."),
    "plan": Sub("mpips.overlap.__main__", "Group layers for overlap, from a profile."),
    "lab": Sub("launch.lab.__main__", "An emulated cluster on this machine."),
}
BENCHES = {
    "kvstore": Sub("mpips.bench.__main__", "Time push and pull of the store.", ranked=True),
    "optimizers": Sub("mpips.bench.optimizers", "Time optimizer updates, beside PyTorch's."),
}
"""Benchmarks of `mpips bench NAME` that are not the collectives'."""


class Forward(click.Command):
    """A command that hands its words, untouched, to the one in the module; only `--ranks P` is taken out."""

    def __init__(self, name: str, sub: Sub) -> None:
        super().__init__(name, help=sub.summary, add_help_option=False)
        self._sub = sub

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.args = list(args)
        return []

    def invoke(self, ctx: click.Context) -> None:
        words, name = ctx.args, str(self.name)
        sub = self._sub
        if name == "bench" and words and words[0] in BENCHES:
            sub, words, name = BENCHES[words[0]], words[1:], f"bench {words[0]}"
        ranks = _take_ranks(words) if sub.ranked else None
        if ranks is not None:
            _check(sub.module, f"mpips {name}", words, ranks)
            start(ranks, ["-m", sub.module.removesuffix(".__main__"), *words])
        importlib.import_module(sub.module).command.main(words, prog_name=f"mpips {name}")


def _check(path: str, name: str, words: list[str], ranks: int) -> None:
    """Says once, here, what every rank would say: `--help`, and what is wrong with the words. The module is imported
    without starting MPI; its `check(ranks, **options)`, where it has one, raises click.UsageError."""
    import mpi4py

    mpi4py.rc.initialize = False
    module = importlib.import_module(path)
    with module.command.make_context(name, list(words)) as context:
        check = getattr(module, "check", None)
        if check is not None:
            check(ranks, **context.params)


class Lazy(click.Group):
    """A group that imports a subcommand when it is named, so that `mpips --help` imports neither MPI nor NumPy."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        return Forward(name, COMMANDS[name]) if name in COMMANDS else None


def _take_ranks(words: list[str]) -> int | None:
    """Takes `--ranks P` or `--ranks=P` out of `words`, unless it stands after `--`."""
    for i, word in enumerate(words):
        if word == "--":
            return None
        if word != "--ranks" and not word.startswith("--ranks="):
            continue
        _, equals, value = word.partition("=")
        if not equals:
            value = words[i + 1] if i + 1 < len(words) else ""
        if not value.isdigit() or int(value) < 1:
            raise click.UsageError(f"--ranks must be a whole number of at least 1, not {value!r}")
        del words[i : i + (1 if equals else 2)]
        return int(value)
    return None


@click.command(cls=Lazy, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="mpips")
def main() -> None:
    """MPI parameter server and collectives runtime."""


if __name__ == "__main__":
    main()
