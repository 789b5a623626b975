"""A server's rounds have the same bits by compiled kernels and by NumPy, however contributions come."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from dataclasses import dataclass

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from collectives.kernels import engine
from mpips import RowSparse, optimizers
from mpips.optimizers import SGD, Adam, Add
from mpips.optimizers.equation import prepare
from mpips.store.keys.row_sparse import packed, sum_of, unpacked, update_rows
from mpips.store.server.sources import Elements, PushedRows
from tests.unit.mpips.server.machine import Arriving, Growing, Machine, long_from

pytest.importorskip("numba")
if engine.status().engine != "numba":
    pytest.skip(engine.status().reason, allow_module_level=True)

DTYPES = {name: np.dtype(getattr(ml_dtypes, name, name)) for name in ("float32", "float64", "float16", "bfloat16")}
MOMENTUM, ADAM, ADD = SGD(0.1, momentum=0.9, weight_decay=0.01), Adam(0.1, rescale=0.5), Add()
CASES = [
    *[(MOMENTUM, "float32", count) for count in (1, 2, 3, 8, 9, 19)],
    (ADAM, "float32", 3),
    (ADAM, "float64", 2),
    (ADAM, "float16", 3),
    (ADAM, "bfloat16", 19),
    (ADD, "float16", 2),
    (ADD, "bfloat16", 1),
]
COLUMNS = 3


@pytest.fixture(scope="module", autouse=True)
def kernels():
    """All kernels are there before any test."""
    for optimizer, name, count in CASES:
        prepare(optimizer, DTYPES[name], count)
        prepare(optimizer, DTYPES[name], 2)
        if name != "float32" or count in (1, 3, 8):
            table = np.zeros((4, COLUMNS), DTYPES[name])
            one = RowSparse(np.arange(1), table[:1], table.shape)
            update_rows(optimizer, table, one, optimizer.init(table.reshape(-1)), 1)
    engine.load_all()


def bits(array):
    """The bits of an array, in which all NaN are alike."""
    return np.where(np.isnan(array.astype(np.float64)), 1, array.view(f"u{array.itemsize}")).tolist()


def numbers(rng, size, dtype):
    """Numbers of which some are odd."""
    odd = [0.0, -0.0, -0.0, -0.0, 1e-45, 6e-8, -65504.0, 3e38, np.inf, np.nan]
    return np.where(rng.random(size) < 0.3, rng.choice(odd, size), rng.normal(size=size)).astype(dtype)


def source(kind, rng, unit):
    """A contribution that comes in one of several ways."""
    if kind == "rows":
        rows = np.flatnonzero(rng.random(unit.stored.size // COLUMNS) < 0.6)
        values = numbers(rng, (len(rows), COLUMNS), unit.stored.dtype)
        shape = (unit.stored.size // COLUMNS, COLUMNS)
        return PushedRows(unpacked(packed(RowSparse(rows, values, shape)), shape, unit.stored.dtype))
    values = numbers(rng, unit.stored.size, unit.stored.dtype)
    return Elements(values) if kind == "there" else {"growing": Growing, "message": Arriving}[kind](values, [99])


def rounds(optimizer, dtype, kinds, rows, block, threads, asynchronous, seed):
    """The bits of values and state after three rounds."""
    machine = Machine(rows * COLUMNS, block, len(kinds), asynchronous, optimizer, threads=threads, dtype=dtype)
    rng = np.random.default_rng(seed)
    for _ in range(3):
        for worker, kind in enumerate(kinds):
            machine.push(worker, source(kind, rng, machine.unit))
            machine.work()
    return [bits(array) for array in (machine.unit.stored, *machine.unit.state)]


KINDS = ("there", "growing", "message", "rows")
WAYS = st.sampled_from([*[(kind,) for kind in KINDS], KINDS[:2], KINDS])


@pytest.mark.slow
@given(
    st.sampled_from(CASES),
    WAYS,
    st.integers(1, 40),
    st.integers(2, 50),
    st.integers(1, 3),
    st.booleans(),
    st.integers(0, 999),
)
def test_rounds_have_the_same_bits(case, ways, rows, block, threads, asynchronous, seed):
    optimizer, name, count = case
    kinds = np.random.default_rng(seed).choice(ways, count)
    arguments = optimizer, DTYPES[name], kinds, rows, block, threads, asynchronous, seed
    with long_from(bytes_=16), np.errstate(all="ignore"):
        compiled = rounds(*arguments)
        with engine.numpy_only():
            assert rounds(*arguments) == compiled


@pytest.mark.slow
@given(st.sampled_from(CASES), st.integers(1, 20), st.integers(0, 999))
def test_rows_have_the_same_bits(case, table, seed):
    """Repeated and unsorted ones, too; nothing else changes."""
    rng, (optimizer, name, count) = np.random.default_rng(seed), case
    ends = []
    with np.errstate(all="ignore"):
        before = numbers(rng, (table, COLUMNS), DTYPES[name])
        pushed = [rng.integers(table, size=rng.integers(6)) for _ in range(count)]
        parts = [RowSparse(one, numbers(rng, (len(one), COLUMNS), before.dtype), before.shape) for one in pushed]
        for by_numpy in (False, True):
            weights, state = before.copy(), optimizer.init(before.reshape(-1))
            with engine.numpy_only() if by_numpy else nullcontext():
                for step in (1, 2):
                    update_rows(optimizer, weights, sum_of(parts), state, step)
            ends.append([bits(array) for array in (weights, *state)])
    assert ends[0] == ends[1]
    left = np.setdiff1d(np.arange(table), np.concatenate(pushed))
    assert bits(weights[left]) == bits(before[left])


@dataclass(frozen=True)
class Drift(optimizers.Equation):
    """Known to no other test: its kernels are asked for here alone."""

    rate: float = 0.5

    def equation(self, w, g, state, numbers):
        return np.sign(w) * np.where(g < w, g, w) - np.where(abs(g) > w, abs(g), w) * self.rate, ()


@pytest.mark.parametrize(
    "options, dtype, parts",
    [({}, "float32", 4), ({"asynchronous": True}, "float64", 1), ({"remote": [1]}, "float16", 2)],
)
def test_kernels_are_asked_for_before_anything_is_pushed(caplog, options, dtype, parts):
    caplog.set_level(logging.INFO, "mpips.kernels")
    Machine(workers=4, optimizer=Drift(), dtype=DTYPES[dtype], **options)
    engine.load_all()
    (text,) = [text for text in caplog.messages if "Drift" in text and "is ready" in text]
    assert f"Drift of {parts} {dtype}" in text
