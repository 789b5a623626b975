"""Settings of `mpips bench overlap`: layers, and how long they compute, chosen from the network as measured. Pure.

* a network's name, as resnet50: its layers, scaled down, with so much compute that all startups and bytes of an
  iteration together are `weight` of it; how startups and bytes share that follows from the bytes a layer, or those
  follow from the share (`kilobytes`);
* uniform: a deep MLP of equal small layers under the same weight;
* hidden: equal layers whose messages are half as long as their backward pass. Merging cannot pay.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from mpips.overlap.networks import MODELS
from mpips.overlap.profile import PARAMETER_BYTES

SETTINGS = ("uniform", "hidden", *MODELS)
WEIGHT = 1.49
"""Communication of an iteration over its compute, where nothing else is said."""
FORWARD = 1 / 3
"""Of the compute."""
HIDDEN = 0.5
"""Of a layer's backward pass."""


class Shape(NamedTuple):
    """Layers of a setting: float32 elements of each, and its share of the compute."""

    elements: list[int]
    shares: np.ndarray


def shape(setting: str, layers: int, kilobytes: float) -> Shape:
    """`layers` equal layers of `kilobytes`, or a network's own with that on average."""
    per_layer = kilobytes * 1024 / PARAMETER_BYTES
    if setting in ("uniform", "hidden"):
        return Shape([max(1, round(per_layer))] * layers, np.full(layers, 1 / layers))
    table = MODELS[setting]()
    scale = per_layer * len(table.layers) / table.parameters
    flops = np.array([layer.flops for layer in table.layers], np.float64)
    return Shape([max(1, round(scale * layer.parameters)) for layer in table.layers], flops / flops.sum())


def kilobytes(startup_s: float, per_byte_s: float, share: float) -> float:
    """Of a layer, on average, so that startups are such a share of the communication of one message a layer."""
    return startup_s * (1 - share) / share / per_byte_s / 1024


def compute_seconds(setting: str, weight: float, communication_s: float) -> float:
    """Forward and backward of all layers, where one message a layer takes `communication_s` in all an iteration."""
    return communication_s / HIDDEN / (1 - FORWARD) if setting == "hidden" else communication_s / weight
