"""Arithmetic of ours ignores floating-point errors, in any thread, and leaves the program's settings as they are."""

from __future__ import annotations

import threading
import warnings

import ml_dtypes
import numpy as np
import pytest

from collectives.kernels import quiet, sums


@pytest.fixture(params=[True, False], ids=["by context", "as before NumPy 2"])
def loud(request, monkeypatch):
    """NumPy raises, and warnings are errors."""
    monkeypatch.setattr(quiet, "BY_CONTEXT", request.param and quiet.BY_CONTEXT)
    with np.errstate(all="raise"), warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", ml_dtypes.bfloat16])
@pytest.mark.parametrize("n, parts", [(3, 2), (3, 5), (70_000, 5)])
def test_sums_overflow(loud, n, parts, dtype):
    most = ml_dtypes.finfo(dtype).max
    every, out = [np.full(n, most, dtype) for _ in range(parts)], np.empty(n, dtype)
    sums.perform(sums.steps(np.add, every, out, divisor=parts))
    assert np.isinf(out.astype(np.float64)).all()
    sums.add_parts(every, out)
    assert np.isinf(out.astype(np.float64)).all()
    sums.perform(sums.steps(np.multiply, [np.full(n, ml_dtypes.finfo(dtype).tiny, dtype)] * parts, out))
    assert not out.any()


def test_the_programs_settings_stay(loud):
    big = np.full(3, 3e38, np.float32)
    before = np.geterr()
    assert np.isinf(quiet.quietly(np.add, big, big)).all()
    assert np.isinf(quiet.quiet(lambda: quiet.quietly(np.add, big, big))()).all()
    assert np.isinf(quiet.quietly(lambda: quiet.quietly(np.add, big, big))).all()
    assert np.geterr() == before
    with pytest.raises(FloatingPointError):
        np.add(big, big)
    with pytest.raises(ZeroDivisionError):  # what else is raised comes out
        quiet.quietly(lambda: 1 // 0)


def test_threads_do_so_at_once(loud):
    big, found = np.full(2_000_000, 3e38, np.float32), []  # long enough for NumPy to let others run

    def add():
        for _ in range(5):
            found.append(bool(np.isinf(quiet.quietly(np.add, big, big)).all()))

    threads = [threading.Thread(target=add) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == [True] * 15
