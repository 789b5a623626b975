"""Processes of a job: `create` makes workers and servers of them, and an uncaught exception on one ends them all."""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING, Any

from collectives.errors import of_caller
from mpips import layout as layouts
from mpips import meet, world
from mpips import options as option_table
from mpips.connect import connect
from mpips.cores import Seat
from mpips.layout import Layout
from mpips.options import OptionError, Options
from mpips.pure import Pure
from mpips.served import Served
from mpips.server import Server
from mpips.store import KVStore

if TYPE_CHECKING:
    from mpi4py import MPI

_open: list[Seat] = []
"""That of the store with servers, where this process has one open."""


def create(kind: str, comm: MPI.Comm | None = None, **options: Any) -> KVStore:
    """Make the store of a job. Collective over `comm` (COMM_WORLD; `local`: this process alone); blocking.

    Options by name or `MPIPS_*` variable, see `mpips.options`. On a worker it returns the store. A server serves inside
    this call and leaves it by SystemExit(0) when all workers have closed theirs or ended. Raises TypeError where `kind`
    is no string and OptionError, the same on every rank, where options are bad or differ.
    """
    from mpi4py import MPI

    chosen, word, refusal = None, "", ""
    try:
        word = option_table.kind_of(kind)
        chosen = option_table.read(options)
        option_table.check_kind(word, options)
    except OptionError as error:
        refusal = str(error)
    if word == "local":
        if chosen is None or refusal:
            raise OptionError(refusal)
        alone = layouts.create(MPI.COMM_SELF, word, Options(stall_seconds=chosen.stall_seconds))
        return KVStore(alone, Pure(alone))
    if comm is None:
        comm = MPI.COMM_WORLD
        if cause := world.lost(os.environ, MPI.Get_library_version(), comm.Get_size()):
            raise of_caller(RuntimeError(cause))
    if _open:
        still = "this process has a store with servers open; close() it before the next create"
        raise of_caller(RuntimeError(still))
    layout = layouts.create(comm, word, chosen, refusal)
    if not layout.num_servers:
        return KVStore(layout, Pure(layout))
    lines, rings = connect(layout)
    seat = Seat(layout)
    if layout.is_server:
        try:
            Server(layout, lines, rings, seat).serve()
        finally:
            seat.leave()
        _part(layout)
        raise SystemExit(0)
    _open.append(seat)
    return KVStore(layout, Served(layout, lines, seat.shared))


def closed(layout: Layout, unfinished: bool) -> None:
    """A worker's store has said goodbye: meet the others and the servers a last time, and free the communicators.
    `unfinished` as in `Layout.free`."""
    if not layout.num_servers:
        layout.free(unfinished)
        return
    _open.pop().leave()
    _part(layout, unfinished)


def _part(layout: Layout, unfinished: bool = False) -> None:
    """All ranks end together: nobody's memory or messages are needed any more."""
    meet.exchange(layout.world, b"", "close", stall_seconds=math.inf)
    layout.free(unfinished)
