"""The paper's formulas, worked examples by hand."""

import pytest

from mpips.mlp.mesh import factorings, parse
from mpips.mlp.prediction import (
    Link,
    Message,
    allreduce_seconds,
    broadcast_seconds,
    exchange_seconds,
    gather_seconds,
    messages,
    parameter_bytes,
    scatter_seconds,
    way_seconds,
)

LINK = Link(alpha=1e-3, beta=1e-6)


def test_allreduce_and_gather_seconds():
    assert allreduce_seconds(4, 1000, LINK) == pytest.approx(2 * (2e-3 + 1e-6 * 750))
    assert allreduce_seconds(5, 0, LINK) == pytest.approx(2 * 3e-3)
    assert allreduce_seconds(1, 1000, LINK) == 0
    assert gather_seconds(2, 1000, LINK) == pytest.approx(1e-3 + 1e-6 * 500)


def test_columns_exchange_three_terms_a_layer_but_no_gradient_of_the_inputs():
    found = messages([16, 100, 50, 2], 2, samples=10, itemsize=4, mode="columns")
    assert sorted(found) == sorted(
        [
            Message("gather", 4000),
            Message("gather", 2000),
            Message("gather", 80),
            Message("sum", 4000),
            Message("sum", 2000),
        ]
    )


def test_a_pair_of_layers_needs_one_sum_forward_and_one_backward():
    first = [Message("sum", 2000)]  # the second layer's outputs; the first layer's inputs need no gradient
    assert messages([16, 100, 50], 2, samples=10, itemsize=4) == first
    second = messages([16, 100, 50, 100, 40], 2, samples=10, itemsize=4)
    assert second == [*first, Message("sum", 2000), Message("sum", 1600)]
    assert messages([16, 100, 50], 1, samples=10, itemsize=4) == []
    assert exchange_seconds(second[:2], 2, LINK) == pytest.approx(2 * 2 * (1e-3 + 1e-6 * 1000))


def test_parameters_are_those_of_the_largest_slice():
    assert parameter_bytes([4, 3, 2], 1, 8) == 8 * (12 + 3 + 6 + 2)
    assert parameter_bytes([4, 3, 2], 2, 8, "columns") == 8 * (8 + 2 + 3 + 1)
    assert parameter_bytes([4, 3, 2], 2, 8, "pairs") == 8 * (8 + 2 + 4 + 2)


def test_the_way_of_the_data_follows_the_cost_rule():
    # Equal where data = alpha / (beta (nb nm - max(nb, nm))), the paper's section 7: 4 x 2 ranks, 250 bytes.
    assert scatter_seconds(4, 2, 250, LINK.alpha, LINK.beta) == pytest.approx(
        broadcast_seconds(4, 2, 250, LINK.alpha, LINK.beta)
    )
    assert cheaper(4, 2, 249) == "scatter"
    assert cheaper(4, 2, 251) == "broadcast"
    assert cheaper(8, 1, 1e9) == "scatter"


def cheaper(batch, model, data):
    costs = way_seconds(batch, model, data, LINK)
    return min(costs, key=costs.__getitem__)


def test_meshes_are_all_factorings_and_are_read_from_text():
    assert factorings(6) == [(6, 1), (3, 2), (2, 3), (1, 6)]
    assert factorings(7) == [(7, 1), (1, 7)]
    assert parse("4x2") == (4, 2)
    for text in ("4", "4x", "0x2", "x2", "2x2x2", "-1x2"):
        with pytest.raises(ValueError, match="BATCHxMODEL"):
            parse(text)
