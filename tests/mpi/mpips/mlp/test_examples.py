"""The examples in docstrings of calls of `mpips.mlp`."""

import doctest
import inspect
from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI

import mpips
import mpips.mlp

from .support import shared_folder

CALLS = {name: getattr(mpips.mlp, name) for name in mpips.mlp.__all__}
CALLS |= {f"MLP.{name}": getattr(mpips.mlp.MLP, name) for name in ("loss_and_gradients", "predict", "accuracy")}
EXAMPLES = {name: call for name, call in CALLS.items() if ">>> " in (inspect.getdoc(call) or "")}


def test_every_public_call_has_an_example():
    assert sorted(CALLS.keys() - EXAMPLES.keys()) == ["TrainingError"]


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_gives_what_it_says(name, tmp_path, tmp_path_factory):
    # Each rank writes a text of its own; a checkpoint is written by all together.
    folder = tmp_path if name == "TextSource" else Path(shared_folder(tmp_path_factory))
    names = {"mpips": mpips, "np": np, "MPI": MPI, "folder": folder}
    test = doctest.DocTestParser().get_doctest(inspect.getdoc(EXAMPLES[name]), names, name, None, None)
    output = []
    results = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(test, out=output.append)
    assert results.attempted and not results.failed, "".join(output)
