"""Simulates a scaling figure of MG-WFBP or iBatch, and compares it with the optimum.

python -m examples.reproduce.overlap.simulated mg-wfbp|ibatch [--json FILE] [--plot FILE]
"""

from __future__ import annotations

import json
from pathlib import Path

import click

from collectives.terminal import Interruptible, OutFile, Picture, console, write_text, writing
from examples.reproduce.overlap import figures, ibatch, mg_wfbp

PAPERS = {"mg-wfbp": mg_wfbp.reproduce, "ibatch": ibatch.reproduce}


@click.command(cls=Interruptible)
@click.argument("paper", type=click.Choice(list(PAPERS)))
@click.option("--json", "json_file", type=OutFile(), help="Write all values here.")
@click.option("--plot", type=Picture(), help="Write the figure here (PNG).")
def command(paper: str, json_file: Path | None, plot: Path | None) -> None:
    """Simulate the scaling figure of PAPER and put its stated values beside ours and the optimum's."""
    run(paper, json_file, plot)


def run(paper: str, json_file: Path | None, plot: Path | None) -> None:
    """Simulate the figure of a paper, print it, and write it to files if they are given."""
    figure = PAPERS[paper]()
    figures.show(figure, console())
    if json_file:
        write_text(json_file, json.dumps(figure.as_dict(), indent=1) + "\n")
    if plot:
        with writing(plot):
            figures.draw(figure, plot)


if __name__ == "__main__":
    command()
