"""Tables of a store with servers, on a worker: ids are merged, spread over the servers by hash, and sent as requests.

Each worker speaks to the servers by itself, in `mpi_*` kinds, too: members of a client mostly name other rows.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpips.collectives.errors import CollectiveError, of_caller
from mpips.collectives.fabric import arena
from mpips.collectives.fabric.arena import Region, SparseFile
from mpips.collectives.fabric.tasks import Task
from mpips.collectives.recorder import page
from mpips.store.keys.key import Array
from mpips.store.remote.link import Link
from mpips.store.remote.setup import Setup
from mpips.store.roles import Layout
from mpips.store.runtime.errors import RoomError
from mpips.store.transport import frames
from mpips.store.worker.interface import KnownTable
from mpips.tables import kernels
from mpips.tables.in_place import RowsInPlace
from mpips.tables.initial import Ids, owners_of
from mpips.tables.merge import Distinct, deal, distinct, sum_into

Payload = NDArray[np.uint8]
PUSHED, ASKED, IN_PLACE, REFUSED = map(page.TABLE.index, ("pushed", "asked", "in_place", "refused_pushes"))
KEPT = 3
"""Pieces of memory that are kept for the next calls: those of two pushes and a pull in turns."""


class _Pool:
    """Memory that the node shares, for pushes and pulls one after the other: new pages cost as much as the rows."""

    def __init__(self) -> None:
        self._free: list[Payload] = []

    def borrow(self, nbytes: int) -> Payload:
        """Return memory of that size or more, uninitialised."""
        for number, memory in enumerate(self._free):
            if nbytes <= memory.nbytes <= 4 * nbytes:
                return self._free.pop(number)
        return arena.empty(nbytes + nbytes // 4, np.uint8)

    def give_back(self, memory: Payload) -> None:
        """Take memory back that nobody else reads or writes any more."""
        self._free.append(memory)
        del self._free[:-KEPT]


class _Block:
    """Memory of one push or pull: of each server its rows, then its ids, then the words of its request."""

    def __init__(
        self, pool: _Pool, found: Distinct, dim: int, dtype: np.dtype, requests: Sequence[frames.TableRequest]
    ) -> None:
        self.counts = found.counts
        words, row_bytes = list(map(frames.encode, requests)), dim * dtype.itemsize
        ids_at = [frames.ids_at(count, row_bytes) for count in self.counts]
        self._words_at = [at + 8 * count for at, count in zip(ids_at, self.counts)]
        unit = math.lcm(row_bytes, 8)
        sizes = [-(-(at + len(data)) // unit) * unit for at, data in zip(self._words_at, words)]
        *starts, total = [0, *itertools.accumulate(sizes)]
        self.memory = pool.borrow(total)
        whole = self.memory[:total]
        self.rows: Array = whole.view(dtype).reshape(-1, dim)
        """All of it as rows."""
        self._first_rows, self._ids_at = [start // row_bytes for start in starts], ids_at
        self._bodies = []
        for start, at, data in zip(starts, self._words_at, words):
            self._bodies.append(whole[start : start + at + len(data)])
            self._bodies[-1][at:] = np.frombuffer(data, np.uint8)
        first_ids = [(start + at) // 8 for start, at in zip(starts, ids_at)]
        self.places = deal(found, self._first_rows, first_ids, whole.view(np.int64))
        """Of each given id the row here."""

    def rows_of(self, server: int) -> Array:
        """Return the rows of a server's ids."""
        return self.rows[self._first_rows[server] :][: self.counts[server]]

    def body(self, server: int, with_rows: bool = True) -> tuple[Payload, int]:
        """Return what is sent to a server, and how many bytes of that are in front of the request."""
        skipped = 0 if with_rows else self._ids_at[server]
        return self._bodies[server][skipped:], self._words_at[server] - skipped


class RemoteTables:
    """Make, push and pull tables. Ids are int64 (k,), any order, repeats allowed; rows are (k, dim)."""

    def __init__(self, layout: Layout, link: Link, setup: Setup) -> None:
        self._link, self._setup, self._layout, self._servers = link, setup, layout, layout.num_servers
        self._freezes = 0
        self._pool = _Pool()
        self.cards: list[frames.MakeTable] = []
        """The tables that there are, on all servers,"""
        self.known: Mapping[str, KnownTable] = {}
        """and as the worker knows them, by name."""
        self._pushes: dict[str, list[Payload]] = {}
        """Memory that servers of this node may still read: the last push of each table, and those under way."""
        self._pulls: dict[int, Payload] = {}
        """Memory that servers may still write: of pulls under way, and of those that an error has ended."""
        self._in_place: dict[str, list[RowsInPlace]] = {}
        """Of each table its rows on every server, where all are of this node."""

    def renew(self) -> None:
        """Begin anew, in the next generation: servers have let go of this worker's memory."""
        self._servers = self._layout.num_servers
        self._pushes.clear()
        self._pulls.clear()
        self._in_place.clear()

    def make(self, card: frames.MakeTable) -> Task[None]:
        """Make a table on all servers. Collective; ValueError on all workers where a server cannot."""
        yield from self._setup.at_rank_0(lambda: self._setup.tell_all(card), f"table {card.table!r}")
        kernels.load(np.dtype(card.dtype), kernels.OF_WORKERS, kernels.LOADED_SECONDS)
        self.cards.append(card)

    def update(self, table: str, numbers: bytes) -> Task[None]:
        """Have all servers update rows with other numbers of the optimizer. Collective."""
        request = frames.UpdateTable(table, numbers)
        yield from self._setup.at_rank_0(lambda: self._setup.tell_all(request), f"update_optimizer of table {table!r}")

    def push(self, pushes: Sequence[tuple[KnownTable, Ids, Array]]) -> Task[None]:
        """Contribute to the next round of each table, on every server; over when the servers have it. RoomError: see
        `Tables`."""
        found = [distinct(ids, self._servers) for _, ids, _ in pushes]
        rooms = [table.room.get(server, 0) for table, *_ in pushes for server in range(self._servers)]
        if any(count > room for count, room in zip((count for one in found for count in one.counts), rooms)):
            yield from self._ask_for_room([table for table, *_ in pushes], found)
        sent = [self._send(table, one, gradients) for (table, _, gradients), one in zip(pushes, found)]
        every: list[Any] = []
        for (table, ids, _), tokens in zip(pushes, sent):
            every += (answers := (yield from self._answers(tokens)))
            self._take_room(table, answers)
            if len(table.room) == self._servers:
                table.round += 1
                table.numbers[PUSHED] += len(ids)
                kept = self._pushes[table.name]
                for memory in kept[:-1]:  # those have been applied
                    self._pool.give_back(memory)
                del kept[:-1]
        yield from self._see_refused(every)

    def _send(self, table: KnownTable, found: Distinct, gradients: Array) -> list[int]:
        """Send a push to all servers; return what their answers are told by."""
        requests = [frames.PushRows(table.name, count, table.refusals) for count in found.counts]
        block = _Block(self._pool, found, gradients.shape[1], gradients.dtype, requests)
        sum_into(block.rows, gradients, block.places)
        self._pushes.setdefault(table.name, []).append(block.memory)
        return [self._link.post_request_with(server, *block.body(server)) for server in range(self._servers)]

    def _ask_for_room(self, tables: Sequence[KnownTable], found: Sequence[Distinct]) -> Task[None]:
        """Have memory for rows of these ids in all tables, on all servers; RoomError where one has none."""
        sent = []
        for table, one in zip(tables, found):
            parts = [one.ids[one.owners == server].tobytes() for server in range(self._servers)]
            asked = [frames.AskForRoom(table.name, table.round, part, table.refusals) for part in parts]
            sent.append([self._link.post_request(server, request) for server, request in enumerate(asked)])
        every: list[Any] = []
        for table, tokens in zip(tables, sent):
            every += (answers := (yield from self._answers(tokens)))
            self._take_room(table, answers)
        step = [(table.name, table.round + 1, table.refusals + 1) for table in tables]
        yield from self._see_refused(every, step)

    def _take_room(self, table: KnownTable, answers: Sequence[Any]) -> None:
        """See how much may be pushed to a table next."""
        granted = ((server, answer) for server, answer in enumerate(answers) if isinstance(answer, frames.RoomGranted))
        table.room = {server: answer.ids for server, answer in granted}

    def _see_refused(self, answers: Sequence[Any], step: Sequence[frames.TableRound] = ()) -> Task[None]:
        """RoomError where a server has refused a round, which all servers drop before, with the others of its step.

        `step`: what this worker would push now, which others hear of then."""
        refusals = [answer for answer in answers if isinstance(answer, frames.RoundRefused)]
        if not refusals:
            return
        if not self._layout.asynchronous:  # else it is this worker's push alone, and was not sent
            for told in refusals:
                yield from self._drop(list(told.step or step), told.why)
        for name, *_ in step if self._layout.asynchronous else ():
            # Servers that have said yes keep memory for the rows of this step. Others, though no more, are asked for.
            self.known[name].room = {}
            self.known[name].numbers[REFUSED] += 1
        raise of_caller(RoomError(refusals[0].why))

    def _drop(self, step: list[frames.TableRound], why: str) -> Task[None]:
        """Have all servers drop rounds of a step, and go on from before them."""
        for name, round_, refusals in step:
            table = self.known[name]
            if refusals <= table.refusals:
                continue
            request = frames.RefuseRound(name, round_, refusals, why, step)
            yield from self._answers([self._link.post_request(server, request) for server in range(self._servers)])
            table.refusals, table.round, table.room = refusals, round_ - 1, {}
            table.numbers[REFUSED] += 1
            for memory in self._pushes.pop(name, []):
                self._pool.give_back(memory)

    def _answers(self, tokens: Sequence[int]) -> Task[list[Any]]:
        """Return what all servers answer."""
        found = []
        for token in tokens:
            found.append((yield from self._link.wait_for_answer(token)))
        return found

    def pull(self, table: KnownTable, ids: Ids, out: Array) -> Task[None]:
        """Write the rows of `ids` into `out`, after this worker's pushes. RoomError: see `Tables`."""
        options = self._layout.options
        free = options.staleness < 0 and not options.mirrors  # a round counts once its mirror has it
        near = free and self._link.all_local and kernels.read_rows.ready(out)
        if near and (yield from self._read_in_place(table, ids, out)):
            table.numbers[IN_PLACE] += len(ids)
            return
        found, local = distinct(ids, self._servers), [line.local for line in self._link.lines]
        requests = [
            frames.PullRows(table.name, table.round, count, near, table.refusals)
            for count, near in zip(found.counts, local)
        ]
        block = _Block(self._pool, found, out.shape[1], out.dtype, requests)
        self._pulls[id(block.memory)] = block.memory
        asked = [  # without ids one server is asked for none: it says whether the worker's last push counts
            (server, self._link.post_request_with(server, *block.body(server, local[server])))
            for server, count in enumerate(block.counts)
            if count or not (server or len(ids))
        ]
        answers = yield from self._answers([token for _, token in asked])
        for (server, _), answer in zip(asked, answers):
            if isinstance(answer, frames.Bytes):
                block.rows_of(server)[...] = np.frombuffer(answer.data, out.dtype).reshape(-1, out.shape[1])
        del self._pulls[id(block.memory)]
        yield from self._see_refused(answers)
        np.take(block.rows, block.places, axis=0, out=out, mode="clip")  # NumPy would copy `out` to raise in time
        self._pool.give_back(block.memory)
        table.numbers[ASKED] += len(ids)

    def _read_in_place(self, table: KnownTable, ids: Ids, out: Array) -> Task[bool]:
        """Read rows in the servers' memory; False where others change them meanwhile, they are gone, or a round was
        refused."""
        parts = self._in_place.get(table.name, [])
        if not parts or not all(part.valid for part in parts):
            parts = yield from self._locate(table)
        for part in parts:
            while (now := part.round_with(self._layout.rank, table.round)) < 0:
                if self._layout.asynchronous or not part.valid or part.refusals > table.refusals:
                    return False
                yield False
            if not part.read(now, ids, out):
                return False
        return bool(parts)

    def _locate(self, table: KnownTable) -> Task[list[RowsInPlace]]:
        """Return a table's rows in the servers' memory; none where that cannot be mapped."""
        parts, card, kind = [], table.card, np.dtype(table.card.dtype)
        for server in range(self._servers):
            found = yield from self._link.request(server, frames.LocateTable(table.name))
            try:
                parts.append(
                    RowsInPlace(
                        SparseFile.opened(Region(*found.file)),
                        found.places,
                        found.capacity,
                        self._layout.num_workers,
                        card.dim,
                        kind,
                        card.key,
                        card.bound,
                        (server, self._servers),
                    )
                )
            except (CollectiveError, OSError):  # no addresses, or another container
                return []
        self._in_place[table.name] = parts
        return parts

    def tell_wait(self, tables: Sequence[KnownTable]) -> None:
        """This worker's program has waited long for what it has called of these tables: servers look for circles."""
        for table in () if self._layout.asynchronous else tables:  # the first server knows all
            self._link.post_request(0, frames.WaitForTable(table.name, table.round, table.refusals))

    def stats(self, table: KnownTable, ahead: int = 0) -> Task[list[frames.TableStats]]:
        """Return what each server holds of the table after this worker's pushes. RoomError: see `Tables`."""
        request = frames.GetTableStats(table.name, table.round + ahead, table.refusals)
        tokens = [self._link.post_request(server, request) for server in range(self._servers)]
        found = yield from self._answers(tokens)
        yield from self._see_refused(found)
        return found

    def freeze(self, tables: Sequence[str], since: int = 0, export: int = -1) -> Task[FrozenOnServers]:
        """Let the servers keep rows of tables as they are now. For one worker. `since`, `export`: `FreezeTables`."""
        self._freezes += 1
        found: list[list[frames.FrozenTable]] = []
        for server in range(self._servers):
            request = frames.FreezeTables(self._freezes, list(tables), since, export)
            answer = yield from self._link.request(server, request)
            found.append(answer.tables)
        parts = {name: [part[number] for part in found] for number, name in enumerate(tables)}
        return FrozenOnServers(self._link, self._freezes, parts)

    def reset(self, table: str, updates: int) -> Task[None]:
        """Let all servers forget the table's rows. For one worker."""
        for server in range(self._servers):
            yield from self._link.request(server, frames.ResetTable(table, updates))

    def end_load(self, table: str) -> Task[None]:
        """Let the servers know that they have all rows of the table. For one worker."""
        for server in range(self._servers):
            yield from self._link.request(server, frames.EndLoad(table))

    def put_rows(self, table: str, arrays: Mapping[str, Array]) -> Task[None]:
        """Give the servers rows: all arrays of the table by name. For one worker."""
        tokens = []
        for server, chosen in enumerate(self._spread(arrays["ids"])):
            parts = {name: values[chosen].tobytes() for name, values in arrays.items()}
            tokens.append(self._link.post_request(server, frames.PutRows(table, parts)))
        yield from self._answers(tokens)

    def at_rank_0(self, do: Callable[[], Task[bytes]], what: str) -> Task[bytes]:
        """Let rank 0 do it, as `Setup.at_rank_0`. Collective."""
        return self._setup.at_rank_0(do, what)

    def _spread(self, ids: Ids) -> list[NDArray[np.int64]]:
        """Return for each server the places in `ids` of its rows."""
        owners = owners_of(ids, self._servers)
        return [np.flatnonzero(owners == server) for server in range(self._servers)]


class FrozenOnServers:
    """Tables as they were at one moment. `parts`: of each what every server has, in their order."""

    def __init__(self, link: Link, number: int, parts: Mapping[str, Sequence[frames.FrozenTable]]) -> None:
        self._link, self._number, self.parts = link, number, parts

    def read(
        self, table: str, server: int, start: int, stop: int, names: Sequence[str] = ()
    ) -> Task[Mapping[str, bytes]]:
        """Return rows that lie at [start, stop) on a server, of these arrays or of all. What lies before was read."""
        request = frames.ReadTable(self._number, table, start, stop, list(names))
        arrays: dict[str, bytes] = (yield from self._link.request(server, request)).arrays
        return arrays

    def dropped(self, table: str, server: int) -> Task[bytes]:
        """Return the ids that were dropped on a server."""
        ids: bytes = (yield from self._link.request(server, frames.ReadDropped(self._number, table))).data
        return ids

    def release(self) -> Task[None]:
        """Let the servers forget it."""
        for server in range(len(self._link.lines)):
            yield from self._link.request(server, frames.ThawTables(self._number))
