"""The examples in the docstrings of a store and of tables give what they say."""

from __future__ import annotations

import doctest
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpips
from tests.mpi.mpips.support import WORLD, run
from tests.mpi.sizes import only_on

CALLS = [
    (kind, name)
    for kind in (mpips.KVStore, mpips.Table)
    for name, call in vars(kind).items()
    if ">>>" in (getattr(call, "__doc__", None) or "")
] + [(mpips, "pull_rows")]


@only_on(2)
@pytest.mark.parametrize("kind, name", CALLS, ids=[f"{kind.__name__}.{name}" for kind, name in CALLS])
def test_an_example_gives_what_it_says(tmp_path: Path, kind: Any, name: str) -> None:
    def body(kv: mpips.KVStore) -> str:
        names: dict[str, Any] = {"kv": kv, "np": np, "mpips": mpips, "path": str(tmp_path / "file.safetensors")}
        if kind is not mpips.KVStore:
            names["table"] = kv.table("ads", 4, learning_rate=0.5)
        report: list[str] = []
        example = doctest.DocTestParser().get_doctest(getattr(kind, name).__doc__, names, name, None, None)
        outcome = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(example, out=report.append)
        assert outcome.attempted
        return "".join(report)

    reports = WORLD.allgather(run("dist_sync", body, servers=1))
    assert not any(reports), reports


def test_calls_have_examples() -> None:
    assert len(CALLS) > 25
