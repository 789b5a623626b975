"""Buckets of gradients, and how long a step takes with messages between and beside its computation."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpips.mlp.mesh import Spans
from mpips.mlp.network.layers import Specification
from mpips.mlp.parallel import BUCKET_BYTES, Bucket, buckets
from mpips.mlp.prediction import Costs, Event, Link, messages, replay, trace
from mpips.optimizers import SGD

LINK = Link(alpha=1.0, beta=0.0)
BESIDE, BEHIND = Spans(True, True), Spans(False, False)


@given(st.lists(st.integers(0, 200_000), min_size=1, max_size=8))
def test_buckets_are_whole_layers_from_the_last_to_the_first(elements):
    found = buckets(elements, 4)
    cuts = np.cumsum([0, *elements])
    stop = cuts[-1]
    for bucket in found:
        assert (bucket.start, bucket.stop) == (cuts[bucket.layer], stop)
        stop = bucket.start
    assert stop == 0
    assert found[-1].layer == 0
    assert all((bucket.stop - bucket.start) * 4 >= BUCKET_BYTES for bucket in found[:-1])


def test_a_reduction_is_hidden_behind_what_is_computed_after_its_gradient():
    events = [Event("gradient", 1, 5.0), Event("gradient", 0, 3.0), Event("reduced", 0, 0.0),
              Event("reduced", 1, 1.0), Event("end", 0, 1.0)]  # fmt: skip
    costs = Costs(1, LINK, 4, [4.0, 2.0], [Bucket(1, 10, 20), Bucket(0, 0, 10)])
    assert replay(events, costs, BEHIND) == 5 + 3 + 4 + 1 + 2 + 1
    # Bucket 0 travels from 5 to 9 and is updated until 10; bucket 1, ready at 8, travels from 9 to 11.
    assert replay(events, costs, BESIDE) == 11 + 1


def test_a_model_sum_is_hidden_behind_the_weight_gradient():
    events = [Event("sum", 8, 1.0), Event("start", 8, 2.0), Event("wait", 0, 1.5), Event("end", 0, 1.0)]
    costs = Costs(2, LINK, 4, [0.0], [Bucket(0, 0, 1)])
    assert replay(events, costs, BEHIND) == 1 + 2 + 2 + 2 + 1.5 + 1
    assert replay(events, costs, BESIDE) == 1 + 2 + 2 + max(2, 1.5) + 1


@pytest.mark.parametrize("mode", ["pairs", "columns"])
def test_a_trace_holds_the_messages_of_the_formulas(mode):
    sizes = (6, 40, 40, 40, 3)
    cut = buckets([1] * 4, 4)
    events = trace(Specification(sizes, "relu", "l2", "float32", 1), 2, 10, 20, SGD(), mode, cut, beside=True)
    moved = sorted(("sum" if e.kind == "start" else e.kind, 4 * e.number) for e in events
                   if e.kind in ("gather", "sum", "start"))  # fmt: skip
    assert moved == sorted((m.kind, m.size) for m in messages(sizes, 2, 10, 4, mode))
    assert [e.number for e in events if e.kind == "gradient"] == [3, 2, 1, 0]
    assert [e.number for e in events if e.kind == "reduced"] == list(range(len(cut)))
    assert all(e.compute >= 0 for e in events)
