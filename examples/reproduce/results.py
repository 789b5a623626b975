"""The files that a reproduction writes, JSON and a picture. Their folder is checked before the work begins."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from collectives.terminal import describe_unwritable, write_json, writing


class OutFolder(click.Path):
    """A click type for the folder of the results. Creates the folder. Refuses it if no files can be written there."""

    def __init__(self) -> None:
        super().__init__(file_okay=False, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        folder = Path(super().convert(value, param, ctx))
        if importlib.util.find_spec("matplotlib") is None:
            self.fail("a picture takes matplotlib: pip install matplotlib", param, ctx)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            self.fail(f"{str(folder)!r} cannot be made: {error.strerror}", param, ctx)
        if reason := describe_unwritable(folder / "results.json"):
            self.fail(f"{str(folder)!r}: a file in it {reason}", param, ctx)
        return folder


out_option = click.option("--out", type=OutFolder(), default="out", help="Folder for the results.")


def leave(folder: Path, name: str, report: dict[str, Any], draw: Callable[[dict[str, Any], Path], None]) -> None:
    """Write NAME.json and NAME.png to a folder, and print their paths. `draw` draws the report into a file.

    Raise click.ClickException if one cannot be written.
    """
    numbers, picture = folder / f"{name}.json", folder / f"{name}.png"
    write_json(numbers, report)
    with writing(picture):
        draw(report, picture)
    click.echo(f"{numbers}, {picture}")
