"""What every test may use: one BLAS thread a process, and the mark `core`."""

from __future__ import annotations

import os
from collections import Counter

import pytest

# Ranks share the cores: one BLAS thread each, set before NumPy loads.
for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(name, "1")


@pytest.hookimpl(tryfirst=True)  # before marks choose tests
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of a test marked `core(count)` the first `count` cases stay in `make test`, and the others become slow."""
    counts = Counter[str]()
    for item in items:
        core = item.get_closest_marker("core")
        if core is not None and item.get_closest_marker("full") is None:
            test = item.nodeid.partition("[")[0]
            counts[test] += 1
            if counts[test] > core.args[0]:
                item.add_marker("slow")
