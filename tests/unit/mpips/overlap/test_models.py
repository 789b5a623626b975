"""The package's names without MPI; models: arrays laid out flat, what is missing, and networks that are built in."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpips.mlp.perceptron import MLP
from mpips.overlap import MODELS, RingNetwork, check_model, lay_out


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
    for word in [*words, 'the page "Plan overlap from a profile"']:
        assert word in str(error.value)


def test_a_model_in_layers_passes() -> None:
    check_model(Net(FIVE, FIVE, [2, 3]), "auto")
    check_model(MLP((3, 4, 2)), "auto")


PLANNING = """
import sys
from mpips.overlap import Layer, LinearNetwork, Profile, load_profile, plan, plans, save_profile
profile = Profile((Layer("a", 10, 0.5, 1.0), Layer("b", 10, 0.5, 1.0)), LinearNetwork(0.1, 0.01), 0.1, 100.0)
save_profile(profile, sys.argv[1])
assert load_profile(sys.argv[1]) == profile
print(len(plans(profile)), plan(profile, "optimal").push, "mpi4py.MPI" in sys.modules)
"""


def test_planning_loads_no_mpi(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PLANNING, str(tmp_path / "job.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "5 ((1, 1), (2, 2)) False\n", done.stderr


@pytest.mark.parametrize("name, parameters, tensors", [("lenet5", 3_274_634, 8), ("resnet50", 25_557_032, 161)])
def test_built_in_networks_weigh_what_papers_state(name: str, parameters: int, tensors: int) -> None:
    table = MODELS[name]()
    assert (table.parameters, table.tensors) == (parameters, tensors)
    found = table.profile(1e9, 10, RingNetwork(1e-5, 1e-9, 0), 1e-3, 1e9)
    assert found.forward_s == pytest.approx(table.flops * 10 / 1e9)
    assert found.backward_s == pytest.approx(2 * found.forward_s)
    assert [layer.parameters for layer in found.layers] == [layer.parameters for layer in table.layers]
