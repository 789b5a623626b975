"""The examples in docstrings of calls that need no ranks."""

import doctest
import inspect
from pathlib import Path

import numpy as np
import pytest

import mpips
import mpips.chaos
import mpips.compression
import mpips.mlp
import mpips.optimizers
import mpips.overlap
import mpips.training

EXAMPLES = {
    f"{module.__name__}.{name}": getattr(module, name)
    for module in (mpips.chaos, mpips.compression, mpips.optimizers, mpips.overlap, mpips.training)
    for name in module.__all__
    if ">>> " in (inspect.getdoc(getattr(module, name)) or "")
} | {"mpips.register_init": mpips.register_init}


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_gives_what_it_says(name: str, tmp_path: Path) -> None:
    names = {"mpips": mpips, "np": np, "folder": tmp_path}
    test = doctest.DocTestParser().get_doctest(inspect.getdoc(EXAMPLES[name]) or "", names, name, None, None)
    output: list[str] = []
    options = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
    results = doctest.DocTestRunner(optionflags=options).run(test, out=output.append)
    assert results.attempted and not results.failed, "".join(output)
