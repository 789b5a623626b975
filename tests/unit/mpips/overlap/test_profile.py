"""Profiles: the file's round trip, what a network costs at a size, and errors that name what is wrong."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpips.overlap import (
    LinearNetwork,
    RingNetwork,
    create_profile,
    load_profile,
    profile_from_dict,
    save_profile,
)

GOOD: dict[str, Any] = {
    "layers": [
        {"name": "conv", "parameters": 100, "forward_s": 0.01, "backward_s": 0.02},
        {"name": "fc", "parameters": 1000, "forward_s": 0.001, "backward_s": 0.002},
    ],
    "network": {"alpha": 1e-5, "beta": 1e-9, "gamma": 1e-10, "collective": "ring"},
    "startup_s": 0.001,
    "bandwidth_Bps": 1e9,
}


def changed(path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    data = copy.deepcopy(GOOD)
    place = data
    for key in path[:-1]:
        place = place[key]
    if value is KeyError:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return data


def test_file_round_trip(tmp_path: Path) -> None:
    first = profile_from_dict(GOOD)
    save_profile(first, tmp_path / "p.json")
    assert load_profile(tmp_path / "p.json") == first
    measured = profile_from_dict(GOOD | {"network": {"a": 1e-4, "b": 1e-9}, "nodes": 8})
    save_profile(measured, tmp_path / "q.json")
    assert load_profile(tmp_path / "q.json") == measured
    ring = profile_from_dict(GOOD | {"network": {"a": 1e-4, "b": 1e-9, "collective": "ring"}, "nodes": 8})
    save_profile(ring, tmp_path / "s.json")
    assert load_profile(tmp_path / "s.json") == ring != measured
    served = profile_from_dict(GOOD | {"network": {"a": 1e-4, "b": 1e-9, "collective": "servers"}, "nodes": 8})
    save_profile(served, tmp_path / "r.json")
    assert load_profile(tmp_path / "r.json") == served != measured


def test_stages_price_bytes() -> None:
    found = profile_from_dict(GOOD)
    pull, push = found.pull(), found.push(4)
    np.testing.assert_allclose(pull.transfer, [400 / 1e9, 4000 / 1e9])
    np.testing.assert_allclose(pull.compute, [0.01, 0.001])
    np.testing.assert_allclose(push.compute, [0.02, 0.002])
    assert push.startup == pytest.approx(6 * 1e-5)
    np.testing.assert_allclose(push.transfer, np.array([400, 4000]) * (2 * 0.75 * 1e-9 + 0.75 * 1e-10))


@pytest.mark.parametrize("nodes, seconds", [(2, 90.52e-6), (4, 271.56e-6), (8, 633.64e-6)])
def test_ring_startups_of_the_paper(nodes: int, seconds: float) -> None:
    assert RingNetwork(45.26e-6, 0, 0).at(nodes)[0] == pytest.approx(seconds)


def test_a_measured_ring_rescales() -> None:
    ring = RingNetwork(1e-5, 1e-9, 3e-10)
    measured = LinearNetwork(*ring.at(8), nodes=8, collective="ring")
    assert measured.at(32) == pytest.approx(ring.at(32))
    assert LinearNetwork(1.0, 2.0).at(32) == (1.0, 2.0)


@pytest.mark.parametrize(
    "path, value, words",
    [
        (("layers",), KeyError, ["layers is missing"]),
        (("layers",), [], ["at least one layer"]),
        (("layers", 1, "backward_s"), KeyError, ["layers[1] (fc)", "backward_s is missing"]),
        (("layers", 0, "forward_s"), -0.5, ["layers[0] (conv)", "forward_s", "-0.5", "negative"]),
        (("layers", 0, "parameters"), -3, ["layers[0] (conv)", "parameters", "-3"]),
        (("layers", 0, "parameters"), 1.5, ["layers[0] (conv)", "1.5", "whole"]),
        (("layers", 0, "forward_s"), math.nan, ["layers[0] (conv)", "forward_s", "nan"]),
        (("layers", 0, "forward_s"), math.inf, ["forward_s", "inf"]),
        (("layers", 0, "forward_s"), "fast", ["forward_s", "'fast'"]),
        (("layers", 0, "name"), KeyError, ["layers[0]", "name is missing"]),
        (("layers", 0, "params"), 3, ["layers[0] (conv)", "'params'", "known are"]),
        (("network",), KeyError, ["network is missing"]),
        (("network", "beta"), KeyError, ["network", "beta is missing"]),
        (("network", "alpha"), math.nan, ["network", "alpha", "nan"]),
        (("network", "collective"), "tree", ["network", "'tree'", "'ring'"]),
        (("network",), {"a": 1.0}, ["network", "b is missing"]),
        (("network",), {"a": 1.0, "b": 1.0, "collective": "tree"}, ["network", "'tree'", "allreduce, servers, ring"]),
        (("startup_s",), KeyError, ["startup_s is missing"]),
        (("startup_s",), -1, ["startup_s", "-1"]),
        (("bandwidth_Bps",), 0, ["bandwidth_Bps", "0"]),
        (("bandwidth_Bps",), KeyError, ["bandwidth_Bps is missing"]),
        (("nodes",), 0, ["nodes", "0"]),
        (("nodes",), True, ["nodes", "True"]),
        (("nodes",), 10**400, ["nodes", "1329 bits"]),
        (("layers", 0, "parameters"), 10**400, ["layers[0] (conv)", "parameters", "1329 bits"]),
        (("layers", 0, "backward_s"), 1e300, ["layers[0] (conv)", "backward_s", "1e+300"]),
        (("bandwidth_Bps",), 1e-300, ["bandwidth_Bps", "1e-300"]),
    ],
)
def test_errors_name_the_value(path: tuple[Any, ...], value: Any, words: list[str]) -> None:
    with pytest.raises(ValueError) as error:
        profile_from_dict(changed(path, value))
    for word in words:
        assert word in str(error.value)


def test_columns_of_different_lengths_are_named() -> None:
    with pytest.raises(ValueError, match=r"names has 2.*parameters has 2.*forward_s has 1.*backward_s has 2"):
        create_profile(["a", "b"], [1, 2], [0.1], [0.1, 0.2], LinearNetwork(0, 0), 0, 1)


def test_a_ring_needs_a_number_of_nodes() -> None:
    with pytest.raises(ValueError, match="number of nodes"):
        profile_from_dict(GOOD).push()
