"""Measurements of what waiting costs: one that is above its limit ends the command with exit code 1."""

from __future__ import annotations

import pytest
from click.testing import CliRunner
from mpi4py import MPI

from examples.reproduce.store import idle, waiting
from tests.mpi.sizes import only_on


@only_on(2)
@pytest.mark.parametrize("share, code", [(0.06, 1), (0.01, 0)])
def test_a_share_above_the_limit_fails(monkeypatch, share, code):
    """Rank 0 prints the table of idle servers, and every rank that of its own waiting."""
    monkeypatch.setattr(idle, "share", lambda pid, shared_memory, seconds: (0.9, share))
    monkeypatch.setattr(waiting, "share", lambda engine, count, seconds, inside: share)
    first = MPI.COMM_WORLD.rank == 0
    server, own = CliRunner().invoke(idle.command, []), CliRunner().invoke(waiting.command, [])
    assert server.exit_code == (code if first else 0), server.output
    assert own.exit_code == code, own.output
    for output in [own.output, server.output][: 1 + first]:
        assert (" no " if code else " yes ") in output
