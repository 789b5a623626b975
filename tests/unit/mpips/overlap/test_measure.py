"""What measured times become: the line through messages, the layers' times, the messages that are sampled."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpips.overlap import fit, measure


@given(st.floats(1e-6, 1e-1), st.floats(1e-11, 1e-6))
def test_a_line_is_found_again(startup: float, per_byte: float) -> None:
    sizes = np.array([1e2, 1e4, 1e5, 1e6])
    found = fit.line(sizes, startup + per_byte * sizes)
    assert found == pytest.approx((startup, per_byte), rel=1e-5, abs=1e-15)


def test_neither_part_of_a_line_is_negative() -> None:
    assert fit.line([1, 2, 4], [4.0, 3.0, 2.0])[1] == 0.0
    assert fit.line([1, 2, 4], [0.5, 2.0, 8.0])[0] == 0.0


def test_one_size_is_no_line() -> None:
    with pytest.raises(ValueError, match="two sizes"):
        fit.line([8, 8], [1.0, 1.0])
    with pytest.raises(ValueError, match="positive"):
        fit.line([8, 16], [0.0, 1.0])


@pytest.mark.parametrize("elements", [[5], [3, 1, 2], list(range(1, 50))])
def test_samples_reach_from_the_smallest_layer_to_all(elements: list[int]) -> None:
    groups = measure.sample_groups(elements)
    assert (1, len(elements)) in groups
    smallest = 1 + elements.index(min(elements))
    assert (smallest, smallest) in groups
    assert len(set(groups)) == len(groups)


class Sleeper:
    """A model whose layers only take time."""

    layer_elements = (4, 4, 4)
    flat_parameters = flat_gradients = np.zeros(12, np.float32)

    def loss_and_gradients(self, x, y, before=None, ready=None) -> float:
        for layer, seconds in enumerate((0.002, 0.02, 0.002)):
            before(layer)
            time.sleep(seconds)
        for layer, seconds in reversed(list(enumerate((0.002, 0.02, 0.004)))):
            time.sleep(seconds)
            ready(layer)
        return 0.0


def test_each_layer_gets_its_own_time() -> None:
    forward, backward = measure.compute(Sleeper(), np.zeros(1), np.zeros(1))
    assert int(np.argmax(forward)) == int(np.argmax(backward)) == 1
    assert all(seconds > 0 for seconds in forward + backward)
