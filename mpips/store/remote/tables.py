"""Tables of a store with servers, on a worker: ids are merged, spread over the servers by hash, and sent as requests.

Each worker speaks to the servers by itself, in `mpi_*` kinds, too: members of a client mostly name other rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives.fabric.tasks import Task
from mpips.store.remote.link import Link
from mpips.store.remote.setup import Setup
from mpips.store.roles import Layout
from mpips.store.tables.initial import Ids, owners_of
from mpips.store.tables.rows import merged
from mpips.store.transport import frames

Array = NDArray[Any]


class RemoteTables:
    """Make, push and pull tables. Ids are int64 (k,), any order, repeats allowed; rows are (k, dim)."""

    def __init__(self, layout: Layout, link: Link, setup: Setup) -> None:
        self._link, self._setup, self._servers = link, setup, layout.num_servers

    def make(self, card: frames.MakeTable) -> Task[None]:
        """Make a table on all servers. Collective; ValueError on all workers where a server cannot."""
        yield from self._setup.at_rank_0(lambda: self._setup.tell_all(card), f"table {card.table!r}")

    def push(self, table: str, ids: Ids, gradients: Array) -> Task[None]:
        """Contribute to the table's next round, on every server; over when the servers have it."""
        ids, gradients = merged(ids, gradients)
        tokens = []
        for server, chosen in enumerate(self._spread(ids)):
            request = frames.PushRows(table, ids[chosen].tobytes(), gradients[chosen].tobytes())
            tokens.append(self._link.order(server, request))
        for token in tokens:
            yield from self._link.answer(token)

    def pull(self, table: str, round_: int, ids: Ids, out: Array) -> Task[None]:
        """Write the rows of `ids` into `out`, after so many of this worker's pushes."""
        wanted, places = np.unique(ids, return_inverse=True)
        rows = np.empty((len(wanted), out.shape[1]), out.dtype)
        asked = [
            (chosen, self._link.order(server, frames.PullRows(table, round_, wanted[chosen].tobytes())))
            for server, chosen in enumerate(self._spread(wanted)) if len(chosen)
        ]  # fmt: skip
        for chosen, token in asked:
            answer = yield from self._link.answer(token)
            rows[chosen] = np.frombuffer(answer.data, out.dtype).reshape(-1, out.shape[1])
        np.take(rows, places.reshape(-1), axis=0, out=out, mode="clip")  # NumPy would copy `out` to raise in time

    def stats(self, table: str) -> Task[list[frames.TableStats]]:
        """Return what each server holds of the table."""
        tokens = [self._link.order(server, frames.GetTableStats(table)) for server in range(self._servers)]
        found = []
        for token in tokens:
            found.append((yield from self._link.answer(token)))
        return found

    def read(self, table: str, server: int, array: str, start: int, stop: int) -> Task[bytes]:
        """Return rows [start, stop) of an array of the table, as they lie on one server."""
        answer = yield from self._link.request(server, frames.ReadTable(table, array, start, stop))
        data: bytes = answer.data
        return data

    def reset(self, table: str, updates: int) -> Task[None]:
        """Let all servers forget the table's rows. For one worker."""
        for server in range(self._servers):
            yield from self._link.request(server, frames.ResetTable(table, updates))

    def put(self, table: str, arrays: Mapping[str, Array]) -> Task[None]:
        """Give the servers rows: all arrays of the table by name. For one worker."""
        tokens = []
        for server, chosen in enumerate(self._spread(arrays["ids"])):
            parts = {name: values[chosen].tobytes() for name, values in arrays.items()}
            tokens.append(self._link.order(server, frames.PutRows(table, parts)))
        for token in tokens:
            yield from self._link.answer(token)

    def at_rank_0(self, do: Callable[[], Task[bytes]], what: str) -> Task[bytes]:
        """Let rank 0 do it, as `Setup.at_rank_0`. Collective."""
        return self._setup.at_rank_0(do, what)

    def _spread(self, ids: Ids) -> list[NDArray[np.int64]]:
        """Return for each server the places in `ids` of its rows."""
        owners = owners_of(ids, self._servers)
        return [np.flatnonzero(owners == server) for server in range(self._servers)]
