"""The paper's formulas by hand, buckets, and how long a step takes with messages between and beside its computation."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpips.mlp.mesh import Spans, factorings, parse
from mpips.mlp.network import Specification, largest_slice
from mpips.mlp.parallel import BUCKET_BYTES, buckets
from mpips.mlp.prediction import (
    LinkCost,
    StepEvent,
    allreduce_seconds,
    exchange_seconds,
    gather_seconds,
    messages,
    step_seconds,
    time_events,
)
from mpips.optimizers import SGD

LINK = LinkCost(alpha=1e-3, beta=1e-6)
SECOND = LinkCost(alpha=1.0, beta=0.0)
BESIDE, BEHIND = Spans(True, True), Spans(False, False)


def test_allreduce_and_gather_seconds():
    assert allreduce_seconds(4, 1000, LINK) == pytest.approx(2 * (2e-3 + 1e-6 * 750))
    assert allreduce_seconds(5, 0, LINK) == pytest.approx(2 * 3e-3)
    assert allreduce_seconds(1, 1000, LINK) == 0
    assert gather_seconds(2, 1000, LINK) == pytest.approx(1e-3 + 1e-6 * 500)


def test_columns_exchange_three_terms_a_layer():
    found = messages([16, 100, 50, 2], 2, samples=10, itemsize=4, mode="columns")  # no gradient of the inputs
    assert sorted(found) == [("gather", 80), ("gather", 2000), ("gather", 4000), ("sum", 2000), ("sum", 4000)]


def test_a_pair_needs_one_sum_forward_and_backward():
    first = [("sum", 2000)]  # the second layer's outputs; the first layer's inputs need no gradient
    assert messages([16, 100, 50], 2, samples=10, itemsize=4) == first
    second = messages([16, 100, 50, 100, 40], 2, samples=10, itemsize=4)
    assert second == [*first, ("sum", 2000), ("sum", 1600)]
    assert messages([16, 100, 50], 1, samples=10, itemsize=4) == []
    assert exchange_seconds(second[:2], 2, LINK) == pytest.approx(2 * 2 * (1e-3 + 1e-6 * 1000))


def test_the_largest_slice_is_counted():
    assert largest_slice([4, 3, 2], 1) == [12 + 3, 6 + 2]
    assert largest_slice([4, 3, 2], 2, "columns") == [8 + 2, 3 + 1]
    assert largest_slice([4, 3, 2], 2, "pairs") == [8 + 2, 4 + 2]


def test_meshes_are_all_factorings_and_read_from_text():
    assert factorings(6) == [(6, 1), (3, 2), (2, 3), (1, 6)]
    assert factorings(7) == [(7, 1), (1, 7)]
    assert parse("4x2") == (4, 2)
    for text in ("4", "4x", "0x2", "x2", "2x2x2", "-1x2"):
        with pytest.raises(ValueError, match="BATCHxMODEL"):
            parse(text)


@given(st.lists(st.integers(0, 200_000), min_size=1, max_size=8))
def test_buckets_are_whole_layers_from_the_last(elements):
    found = buckets(elements, 4)
    cuts = np.cumsum([0, *elements])
    expected = cuts[-1]
    for layer, start, stop in found:
        assert (start, stop) == (cuts[layer], expected)
        expected = start
    assert expected == 0
    assert found[-1][0] == 0
    assert all((stop - start) * 4 >= BUCKET_BYTES for _, start, stop in found[:-1])


def test_a_reduction_hides_behind_later_computation():
    events = [
        StepEvent("gradient", 1, 5.0),
        StepEvent("gradient", 0, 3.0),
        StepEvent("reduced", 1, 0.0),
        StepEvent("reduced", 0, 1.0),
        StepEvent("end", 0, 1.0),
    ]
    reductions = {1: 4.0, 0: 2.0}
    assert step_seconds(events, 1, SECOND, 4, reductions, BEHIND) == 5 + 3 + 4 + 1 + 2 + 1
    # Layer 1 travels from 5 to 9 and is updated until 10; layer 0, ready at 8, travels from 9 to 11.
    assert step_seconds(events, 1, SECOND, 4, reductions, BESIDE) == 11 + 1


def test_a_model_sum_hides_behind_the_weight_gradient():
    events = [StepEvent("sum", 8, 1.0), StepEvent("start", 8, 2.0), StepEvent("wait", 0, 1.5), StepEvent("end", 0, 1.0)]
    assert step_seconds(events, 2, SECOND, 4, {0: 0.0}, BEHIND) == 1 + 2 + 2 + 2 + 1.5 + 1
    assert step_seconds(events, 2, SECOND, 4, {0: 0.0}, BESIDE) == 1 + 2 + 2 + max(2, 1.5) + 1


@pytest.mark.parametrize("mode", ["pairs", "columns"])
def test_a_trace_holds_the_messages_of_the_formulas(mode):
    sizes = (6, 40, 40, 40, 3)
    cut = buckets([1] * 4, 4)
    events = time_events(Specification(sizes, "relu", "l2", "float32", 1), 2, 10, 20, SGD(), mode, cut, beside=True)
    moved = sorted(
        ("sum" if e.kind == "start" else e.kind, 4 * e.number) for e in events if e.kind in ("gather", "sum", "start")
    )
    assert moved == sorted(messages(sizes, 2, 10, 4, mode))
    assert [e.number for e in events if e.kind == "gradient"] == [3, 2, 1, 0]
    assert [e.number for e in events if e.kind == "reduced"] == [layer for layer, _, _ in cut]
    assert all(e.compute >= 0 for e in events)
