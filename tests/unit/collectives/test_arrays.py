"""Names of element types: no two types whose bytes mean something else share one."""

import numpy as np

from collectives import arrays

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
