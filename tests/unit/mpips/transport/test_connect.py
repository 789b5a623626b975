"""Where a processor may reorder stores, a store does without rings, and says so."""

from __future__ import annotations

import platform
from types import SimpleNamespace

import pytest

from collectives.fabric import arena
from mpips.store.transport import lines as connect
from mpips.store.transport import lines as ring


@pytest.fixture
def weak(monkeypatch):
    monkeypatch.setattr(ring, "ORDERED_STORES", False)
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")


def layout(rank=0, nodes=(0, 0)):
    return SimpleNamespace(rank=rank, nodes=nodes, same_node=lambda a, b: nodes[a] == nodes[b])


def test_memory_that_stores_may_be_reordered_in_is_not_shared(weak):
    region = arena.locate(arena.empty(64, "u1"))
    assert connect._try(layout(), 1, region) is None


def test_the_user_hears_of_it_once(weak):
    with pytest.warns(RuntimeWarning, match="aarch64.*by messages"):
        connect._see_order(layout())


@pytest.mark.parametrize("silent", [layout(rank=1), layout(nodes=(0, 1))])
def test_whom_it_does_not_concern_hears_nothing(weak, silent, recwarn):
    connect._see_order(silent)
    assert not recwarn.list


def test_nobody_hears_of_it_where_order_is_kept(monkeypatch, recwarn):
    monkeypatch.setattr(ring, "ORDERED_STORES", True)
    connect._see_order(layout())
    assert not recwarn.list
