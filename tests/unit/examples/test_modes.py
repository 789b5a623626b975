"""All loops of the examples train with the momentum that the command line asks for (fault 29: some left it out)."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

pytest.importorskip("sklearn", reason="the digits come with scikit-learn")
sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples"))
import mpips
import task


class Seen(Exception):
    """The optimizer that a loop made."""


def seen(*args: Any, **options: Any) -> None:
    raise Seen(options)


@pytest.mark.parametrize("momentum", [0.0, 0.7])
@pytest.mark.parametrize(
    "example, kind", [("sgd", "dist_sync"), ("asgd", "dist_async"), ("asgd", "mpi_async"), ("esgd", "mpi_async"),
                      ("pure_mpi", "")],
)  # fmt: skip
def test_a_loop_takes_the_momentum_of_the_command_line(
    example: str, kind: str, momentum: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = MagicMock(num_workers=4, rank=0)
    store.layout.clients, store.layout.client.Get_size.return_value = [0, 1], 2
    module = importlib.import_module(example)
    monkeypatch.setattr(mpips, "create", lambda *words, **options: store, raising=False)
    monkeypatch.setattr(module, "SGD", seen)
    with pytest.raises(Seen) as caught:
        module.main(task.Settings(kind=kind, momentum=momentum, hidden=2))
    assert caught.value.args[0]["momentum"] == momentum
