"""Compares the loss curve of every mesh of 1 to 8 ranks with that of the serial run, over 3 epochs.

    python -m examples.reproduce.mlp.grids [--ranks 1,2,3,4,5,6,7,8] [--data-directory DIR] [--json FILE]

The runs cover airfoil (if its file is there) and digits, float64 and float32, and both split modes. They also cover
widths that the ranks divide evenly, widths that they do not, and layers with fewer neurons than ranks. The exit code is
1 if the curve of a mesh differs by more than 1e-10 (float64) or 1e-4 (float32).
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import click
import msgspec
from rich.table import Table

from collectives.terminal import Interruptible, OutFile, WholeList, show_table, write_json
from launch import Job, build, find, this_machine

# dtype -> largest difference allowed
TOLERANCE = {"float64": 1e-10, "float32": 1e-4}


def ran(ranks: int, directory: str) -> list[dict]:
    """Run a job of `grids_ranks` and return its rows."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder, "answer.json")
        program = (sys.executable, "-m", "examples.reproduce.mlp.grids_ranks", directory, str(answer))
        job = Job(ranks, program, {"OMP_NUM_THREADS": "1"})
        subprocess.run(build(find(python=sys.executable), job, this_machine()), check=True, timeout=200)
        return msgspec.json.decode(answer.read_bytes())


def table(rows: list[dict]) -> Table:
    """Build the table of the largest difference of each mesh."""
    shown = Table(title="largest |loss - serial loss| over data sets, splits and widths")
    for column in ("processes", "grid", "runs", *TOLERANCE):
        shown.add_column(column, justify="right")
    for processes, mesh in dict.fromkeys((row["processes"], row["grid"]) for row in rows):
        mine = [row for row in rows if (row["processes"], row["grid"]) == (processes, mesh)]
        worst = [max(row["difference"] for row in mine if row["dtype"] == dtype) for dtype in TOLERANCE]
        shown.add_row(str(processes), mesh, str(len(mine)), *(f"{each:.1e}" for each in worst))
    return shown


@click.command(cls=Interruptible, context_settings={"show_default": True})
@click.option("-n", "--ranks", default="1,2,3,4,5,6,7,8", type=WholeList(), help="Numbers of ranks, commas between.")
@click.option("--data-directory", default=".", help="Where airfoil_self_noise.dat lies.")
@click.option("--json", "json_path", type=OutFile())
def command(ranks: tuple[int, ...], data_directory: str, json_path: Path | None) -> None:
    """Compare every mesh with the serial run."""
    rows = [row for count in ranks for row in ran(count, data_directory)]
    if not rows:
        raise click.ClickException(
            f"no data set was found: install scikit-learn, for its digits, or put airfoil_self_noise.dat into "
            f"{data_directory!r}, or name its folder with --data-directory"
        )
    show_table(table(rows))
    off = [row for row in rows if not row["difference"] <= TOLERANCE[row["dtype"]]]
    sets = ", ".join(dict.fromkeys(row["data"] for row in rows))
    print(f"{len(rows)} runs on {sets}; {len(off)} off by more than {TOLERANCE}")
    if json_path:
        write_json(json_path, {"tolerance": TOLERANCE, "rows": rows})
    sys.exit(1 if off else 0)


if __name__ == "__main__":
    command()
