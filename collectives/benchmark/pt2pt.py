"""Ping-pong between ranks 0 and 1 over the MPI: half of the round trip, for blocking and for persistent messages."""

from __future__ import annotations

from typing import Any

import numpy as np
from mpi4py import MPI

from collectives.benchmark.harness import Timing, measure


def ping_pong(comm: MPI.Comm, x: np.ndarray[Any, Any], budget_s: float) -> dict[str, Timing]:
    """One-way times by the way of sending. Collective: ranks beyond the second only wait. ValueError with one rank."""
    if comm.size < 2:
        raise ValueError("a point-to-point case needs two ranks: start it with --ranks 2")
    here = comm.rank
    partner = 1 - here if here < 2 else MPI.PROC_NULL
    send, receive = comm.Send_init(x, partner), comm.Recv_init(x, partner)
    first, second = (send, receive) if here == 0 else (receive, send)

    def blocking() -> None:
        if here == 0:
            comm.Send(x, 1)
            comm.Recv(x, 1)
        elif here == 1:
            comm.Recv(x, 0)
            comm.Send(x, 0)

    def persistent() -> None:
        if here < 2:
            first.Start()
            first.Wait()
            second.Start()
            second.Wait()

    try:
        timings = measure(comm, [blocking, persistent], budget_s)
    finally:
        send.Free()
        receive.Free()
    half = [Timing(t.least / 2, t.median / 2, t.p99 / 2, t.samples) for t in timings]
    return {"blocking": half[0], "persistent": half[1]}
