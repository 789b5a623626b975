"""What a model offers for overlap: arrays laid out flat, and a sentence where something is missing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mpips.mlp.network import MLP
from mpips.overlap import check_model, lay_out


def test_views_of_all_layers_fill_the_flat_array() -> None:
    flat, views, elements = lay_out([[(2, 3), (3,)], [(1,)], [(3, 1, 2), ()]], "float64", np.zeros)
    assert elements == [9, 1, 7]
    assert [[view.shape for view in layer] for layer in views] == [[(2, 3), (3,)], [(1,)], [(3, 1, 2), ()]]
    for number, view in enumerate(view for layer in views for view in layer):
        view[...] = number
    assert flat.tolist() == [0] * 6 + [1] * 3 + [2] + [3] * 6 + [4]
    assert flat.dtype == np.float64


class Net:
    def __init__(self, parameters: Any, gradients: Any, elements: list[int]) -> None:
        self.flat_parameters, self.flat_gradients, self.layer_elements = parameters, gradients, elements

    def loss_and_gradients(self, x: Any, y: Any, before: Any = None, ready: Any = None) -> float:
        return 0.0


class Silent(Net):
    def loss_and_gradients(self, x: Any, y: Any) -> float:  # type: ignore[override]
        return 0.0


FIVE = np.zeros(5)


@pytest.mark.parametrize(
    "model, words",
    [
        (object(), ["object has no flat_parameters, flat_gradients, layer_elements, loss_and_gradients"]),
        (Silent(FIVE, FIVE, [2, 3]), ["Silent calls no before and no ready in loss_and_gradients"]),
        (Net(FIVE, np.zeros(4), [2, 3]), ["5 elements in layer_elements", "flat_parameters 5, flat_gradients 4"]),
        (Net(FIVE, FIVE, [5, 0]), ["a layer without parameters"]),
        (Net(FIVE, FIVE.astype(np.float32), [5]), ["float64 in flat_parameters but float32 in flat_gradients"]),
        (Net(FIVE, np.zeros(10)[::2], [5]), ["flat_gradients that is not 1-D and contiguous"]),
    ],
)
def test_what_is_missing_is_said(model: Any, words: list[str]) -> None:
    with pytest.raises(ValueError, match="overlap='auto' needs a model in layers") as error:
        check_model(model, "overlap='auto'")
    for word in [*words, "docs/how-to/overlap.md"]:
        assert word in str(error.value)


def test_a_model_in_layers_passes() -> None:
    check_model(Net(FIVE, FIVE, [2, 3]), "auto")
    check_model(MLP((3, 4, 2)), "auto")
