"""What counts as an array, and what is refused with which words."""

import numpy as np
import pytest

from collectives import arrays
from collectives.call import operation


def test_a_vector_by_address_is_the_same_memory():
    x = np.arange(12.0).reshape(3, 4)
    flat = arrays.flat(x, "x", written=True)
    flat.vector()[5] = -1
    assert x[1, 1] == -1
    assert (flat.n, flat.dtype) == (12, x.dtype)


def test_no_elements():
    assert arrays.flat(np.empty((0, 3)), "x", written=True).vector().size == 0


@pytest.mark.parametrize("x, words", [(np.ones((4, 4))[:, :2], "contiguous copy"), (np.ones(3, object), "objects")])
def test_refused(x, words):
    with pytest.raises(ValueError, match=words):
        arrays.flat(x, "x", written=False)


@pytest.mark.parametrize("dtype", ["U3", "S3", "M8[D]", "m8[s]"])
def test_words_and_dates_are_no_numbers(dtype):
    with pytest.raises(ValueError, match="use a numeric type"):
        arrays.flat(np.zeros(3, dtype), "x", written=False)


def test_what_lies_below_a_mask_is_no_number():
    with pytest.raises(TypeError, match="out is a masked array, whose mask would be lost: pass its filled"):
        arrays.host(np.ma.masked_array(np.ones(3), [0, 1, 0]), "out")


def test_read_only_is_refused_only_where_written():
    x = np.ones(3)
    x.flags.writeable = False
    arrays.flat(x, "x", written=False)
    with pytest.raises(ValueError, match="read-only"):
        arrays.flat(x, "x", written=True)


@pytest.mark.parametrize("x", [None, 3, "text", [1.0]])
def test_no_array(x):
    with pytest.raises(TypeError, match=type(x).__name__):
        arrays.host(x)


@pytest.mark.parametrize(
    "name, dtype, words",
    [
        ("xor", "float32", "choose one of"),
        ("sum", "complex64", "complex64"),
        ("sum", ">f4", "float32"),
        ("mean", "int32", "divide"),
        ("sum", "bool", "bool"),
    ],
)
def test_operations_refused(name, dtype, words):
    with pytest.raises(ValueError, match=words):
        operation(name, np.dtype(dtype))


LAYOUTS = [
    "<f8",
    ">f8",
    "<i8",
    "<u2",
    ">u2",
    "V8",
    [("x", "<f8")],
    [("x", ">f8")],
    [("y", "<f8")],
    [("x", "<f4"), ("y", "<f4")],
    [("y", "<f4"), ("x", "<f4")],
    [("x", "<f4", (2,))],
    [("x", [("y", ">f8")])],
    {"names": ["x"], "formats": ["<f4"], "offsets": [4], "itemsize": 8},
]


def test_a_type_has_the_name_of_no_other():
    names = [arrays.type_name(np.dtype(layout)) for layout in LAYOUTS]
    assert len(set(names)) == len(LAYOUTS), names
    assert arrays.type_name(np.dtype({"names": ["x"], "formats": ["<f8"]}, align=True)) == names[6]
    assert [arrays.type_name(np.dtype(name)) for name in ("float32", "longlong")] == ["float32", "int64"]
