"""A compressor of a user's own, and residuals by name."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from mpips import compression


@compression.register("sign")
@dataclass(frozen=True)
class Sign(compression.Compressor):
    """The sign of every element times `size`, a byte each."""

    size: float = 1.0

    def max_bytes(self, n):
        return n

    def fill(self, residual, payload):
        signs = payload.view(np.int8)
        signs[...] = np.sign(residual)
        residual -= self.size * signs

    def read(self, payload, out, add):
        if not add:
            out[...] = 0
        out += np.asarray(self.size * payload.view(np.int8), out.dtype)


def test_it_is_made_by_name_and_sends_with_feedback():
    compressor = compression.create({"type": "sign", "size": 2})
    assert compressor == Sign(2.0)
    assert compression.create(compression.options(compressor)) == compressor
    gradient, residual = np.array([3.0, -0.5, 0.0]), np.zeros(3)
    out = np.ones(3)
    compressor.decode(compressor.encode(gradient, residual), out)
    np.testing.assert_array_equal(out, [3, -1, 1])
    np.testing.assert_array_equal(residual, [1, 1.5, 0])


def test_an_unknown_type_says_how_to_register():
    with pytest.raises(ValueError, match=r"'sing'.*2bit.*sign.*@mpips.compression\.register.*mpips\.create"):
        compression.create({"type": "sing"})


@pytest.mark.parametrize("size", [float("inf"), "nan", 10**400])
def test_a_number_that_no_checkpoint_holds_is_refused(size):
    with pytest.raises(ValueError, match="size"):
        compression.create({"type": "sign", "size": size})


def test_what_its_methods_raise_names_them():
    with pytest.raises(ValueError, match=r"Sign\.fill failed for 3 elements: .*: "):
        Sign("2").encode(np.ones(3), np.ones(3))
    with pytest.raises(ValueError, match=r"Sign\.read failed for 3 elements: ValueError: .*read-only"):
        Sign().decode(np.zeros(3, np.uint8), np.broadcast_to(1.0, 3))


def test_options_of_every_compressor_are_plain_data():
    for name in ("2bit", "1bit", "fp16", "int", "topk"):
        compressor = compression.create({"type": name})
        assert compression.options(compressor)["type"] == name
        assert compression.create(compression.options(compressor)) == compressor


def test_what_cannot_be_registered_is_told_why():
    @dataclass(frozen=True)
    class Lone:
        pass

    class Plain(compression.Compressor):
        pass

    for kind in (Lone, Plain, 3):
        with pytest.raises(TypeError, match="Compressor as its base"):
            compression.register("lone")(kind)
    with pytest.raises(TypeError, match=r'register\("sign"\)'):
        compression.register(Lone)
    with pytest.raises(ValueError, match="'2bit' is mpips"):
        compression.register("2bit")(Sign)
    with pytest.raises(ValueError, match="Mine is not registered"):
        compression.options(dataclass(frozen=True)(type("Mine", (Sign,), {}))())


def test_every_name_has_a_residual_of_its_own():
    residuals = compression.Residuals(compression.create({"type": "2bit", "threshold": 1}))
    assert residuals.get("w") is None
    np.testing.assert_array_equal(residuals.decoded("w", np.array([1.5, 0.25], np.float32)), [1, 0])
    np.testing.assert_array_equal(residuals.get("w"), [0.5, 0.25])
    np.testing.assert_array_equal(residuals.decoded("b", np.zeros(3, np.float32)), 0)
    payload = residuals.payload("w", np.array([0.5, 0.25], np.float32))
    np.testing.assert_array_equal(residuals.get("w"), [0, 0.5])
    out = np.zeros(2, np.float32)
    residuals.compressor.decode(payload, out)
    np.testing.assert_array_equal(out, [1, 0])
    residuals.forget(["w", "never there"])
    assert residuals.get("w") is None


def test_a_residual_can_be_put_back():
    residuals = compression.Residuals(compression.create({"type": "fp16"}))
    saved = np.array([0.25, -0.5])
    residuals.put(7, saved, np.dtype(np.float16))
    assert residuals.get(7).dtype == np.float32
    saved[...] = 0
    np.testing.assert_array_equal(residuals.decoded(7, np.zeros(2, np.float16)), [0.25, -0.5])
    np.testing.assert_array_equal(residuals.get(7), 0)
