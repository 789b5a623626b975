"""`python -m mpips.overlap.reproduce mg-wfbp|ibatch`: a paper's scaling figure, simulated."""

from __future__ import annotations

import json
from pathlib import Path

import click
from rich.console import Console

from . import figures, ibatch, mg_wfbp

PAPERS = {"mg-wfbp": mg_wfbp.reproduce, "ibatch": ibatch.reproduce}


@click.command()
@click.argument("paper", type=click.Choice(list(PAPERS)))
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Write all values here.")
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), help="Write the figure here (PNG).")
def command(paper: str, json_file: Path | None, plot: Path | None) -> None:
    """Simulate the scaling figure of PAPER and put its stated values beside ours and the optimum's."""
    figure = PAPERS[paper]()
    figures.show(figure, Console())
    if json_file:
        json_file.write_text(json.dumps(figure.as_dict(), indent=1) + "\n", encoding="utf-8")
    if plot:
        figures.draw(figure, plot)


if __name__ == "__main__":
    command()
