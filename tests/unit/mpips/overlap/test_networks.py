"""Layer tables: totals that the papers and their implementations state."""

from __future__ import annotations

import pytest

from mpips.overlap import MODELS, Ring
from mpips.overlap.networks import googlenet


@pytest.mark.parametrize(
    "name, parameters, tensors",
    [
        ("lenet5", 3_274_634, 8),
        ("googlenet", 13_378_280, 128),
        ("inception-v3", 27_161_264, 292),
        ("resnet50", 25_557_032, 161),
        ("vgg19", 143_667_240, 38),
    ],
)
def test_parameters(name: str, parameters: int, tensors: int) -> None:
    table = MODELS[name]()
    assert (table.parameters, table.tensors) == (parameters, tensors)


def test_vgg19_22k_differs_in_its_last_layer_only() -> None:
    small, large = MODELS["vgg19"](), MODELS["vgg19-22k"]()
    assert small.layers[:-1] == large.layers[:-1]
    assert round(large.parameters / 1e6) == 229


def test_vgg19_first_dense_layer() -> None:
    assert max(layer.parameters for layer in MODELS["vgg19"]().layers) == 102_764_544


@pytest.mark.parametrize(
    "name, products", [("googlenet", 1.59e9), ("inception-v3", 5.73e9), ("resnet50", 4.1e9), ("vgg19", 19.6e9)]
)
def test_products_of_one_forward_pass(name: str, products: float) -> None:
    assert MODELS[name]().flops / 2 == pytest.approx(products, rel=0.01)


def test_blocks_keep_the_totals() -> None:
    for model in MODELS.values():
        table = model()
        blocks = table.blocks()
        assert (blocks.parameters, blocks.tensors, blocks.flops) == (table.parameters, table.tensors, table.flops)
    assert len(googlenet(heads=False).blocks().layers) == 12  # iBatch, figure 4


def test_profile_times_come_from_operations() -> None:
    table = MODELS["lenet5"]()
    found = table.profile(1e9, 10, Ring(1e-5, 1e-9, 0), 1e-3, 1e9)
    assert found.forward_s == pytest.approx(table.flops * 10 / 1e9)
    assert found.backward_s == pytest.approx(2 * found.forward_s)
    assert [layer.parameters for layer in found.layers] == [layer.parameters for layer in table.layers]
