"""Layer tables of the papers' networks: parameters and operations, computed from the architecture."""

from __future__ import annotations

from collections.abc import Callable

from .googlenet import googlenet
from .inception import inception_v3
from .lenet import lenet5
from .resnet import resnet50
from .table import CountedLayer, Table
from .vgg import vgg19, vgg19_22k

MODELS: dict[str, Callable[[], Table]] = {
    "lenet5": lenet5,
    "googlenet": googlenet,
    "inception-v3": inception_v3,
    "resnet50": resnet50,
    "vgg19": vgg19,
    "vgg19-22k": vgg19_22k,
}
"""Name -> table."""

__all__ = ["MODELS", "CountedLayer", "Table", "googlenet"]
