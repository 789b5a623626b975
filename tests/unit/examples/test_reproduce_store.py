"""Measurements of what waiting costs: one that is above its limit ends the command with exit code 1."""

from __future__ import annotations

import pytest
from click.testing import CliRunner, Result

from examples.reproduce.store import idle, waiting


class World:
    """Two ranks of which this is the first."""

    size, rank = 2, 0

    def Allgather(self, mine: object, every: object) -> None:
        """Gathers nothing."""


def measured(monkeypatch: pytest.MonkeyPatch, share: float) -> list[Result]:
    """The commands, where an idle process takes that share of a core."""
    monkeypatch.setattr(idle, "share", lambda pid, shared_memory, seconds: (0.9, share))
    monkeypatch.setattr(waiting, "share", lambda engine, count, seconds, inside: share)
    with monkeypatch.context() as patched:
        patched.setattr(idle.MPI, "COMM_WORLD", World())
        done = CliRunner().invoke(idle.command, [])
    return [done, CliRunner().invoke(waiting.command, [])]


def test_a_share_above_the_limit_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    for done in measured(monkeypatch, 0.06):
        assert done.exit_code == 1
        assert " no " in done.output


def test_a_share_below_the_limit_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    for done in measured(monkeypatch, 0.01):
        assert done.exit_code == 0, done.output
        assert " yes " in done.output
