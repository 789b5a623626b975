"""How long a wait may last, as the environment says."""

from __future__ import annotations

import pytest

from collectives import watch


def test_seconds_are_read(monkeypatch):
    monkeypatch.setenv("MPIPS_STALL_SECONDS", "2.5")
    monkeypatch.delenv("MPIPS_TIMEOUT_SECONDS", raising=False)
    assert watch.limits() == (2.5, 0)


@pytest.mark.parametrize("name", ["MPIPS_STALL_SECONDS", "MPIPS_TIMEOUT_SECONDS"])
def test_what_is_no_number_is_named(monkeypatch, name):
    monkeypatch.setenv(name, "5x")
    with pytest.raises(ValueError, match=f"{name} is '5x': set a number of seconds"):
        watch.limits()
