"""A short form of every `make reproduce-*`: it ends well, and writes its JSON and its picture."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from launch import LauncherError, find
from tests.lab.conftest import ROOT

pytestmark = [pytest.mark.full, pytest.mark.lab, pytest.mark.timeout(900)]
SHORT = {
    "mg-wfbp": "--iterations 1 --rate 1gbit",
    "ibatch": "--iterations 1 --rate 1gbit",
    "bml": "--rounds 1 --rate 1gbit",
    "mxnet-mpi": "--epochs 1 --hidden 100 --rate 1gbit",
    "tensor": "--rounds 1 --rate 1gbit",
    "mlp": "--predict-only",
}
"""What makes it short; the figures are not looked at."""


def commands() -> dict[str, str]:
    """The Python words of each `reproduce-*` of the Makefile."""
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = re.findall(r"^reproduce-([\w-]+):.*\n((?:\t.*\n)+)", text, re.MULTILINE)
    return {name: re.findall(r"python (-m examples.*)", lines)[0].partition(" $(if")[0] for name, lines in targets}


def test_each_has_a_short_form() -> None:
    assert set(commands()) == set(SHORT)


@pytest.mark.parametrize("name", SHORT)
def test_it_writes_what_it_has_found(name: str, tmp_path: Path) -> None:
    try:
        find()
    except LauncherError as error:
        pytest.skip(str(error))
    words = re.sub(r"\bout\b(?=/| |$)(?<!--out)", str(tmp_path), commands()[name]).replace("$@", f"reproduce-{name}")
    argv = [sys.executable, *shlex.split(words), *shlex.split(SHORT[name])]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    written = tmp_path / f"reproduce-{name}"
    assert json.loads(written.with_suffix(".json").read_text(encoding="utf-8"))
    assert written.with_suffix(".png").stat().st_size > 1000
