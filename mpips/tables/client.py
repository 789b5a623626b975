"""The worker's side of tables: merge repeated ids, find their servers (`keys.row_sums`), and send requests.

Each worker sends requests to the servers itself. Even in `mpi_*` stores the members of a client do not sum their
gradients first. They mostly name different rows, so the sum would save little.

Servers may refuse a round of a table if they lack memory for its new rows. So each answer to a push grants *room*, the
number of ids that the worker may push next without asking for memory (see `rounds`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mpips.collectives.errors import CollectiveError, of_caller
from mpips.collectives.fabric import arena
from mpips.collectives.fabric.tasks import Task
from mpips.collectives.recorder import own as recorder
from mpips.collectives.recorder import page
from mpips.store.keys.key import Array
from mpips.store.keys.row_sums import Distinct, Ids, Places, distinct, last_places, owners_of, sum_into
from mpips.store.remote.link import ServerLink
from mpips.store.remote.setup import Setup
from mpips.store.roles import Layout
from mpips.store.runtime.errors import RoomError
from mpips.store.transport import frames
from mpips.tables import eviction, halves, kernels, messages
from mpips.tables.in_place import RowsInPlace
from mpips.tables.initial import FirstValues
from mpips.tables.messages import decode_answer

Payload = NDArray[np.uint8]
# Indices in `KnownTable.numbers`.
PUSHED, ASKED, IN_PLACE, REFUSED = map(page.TABLE.index, ("pushed", "asked", "in_place", "refused_pushes"))
# The number of pieces of memory that are kept for later calls. Three are enough to alternate two pushes and a pull.
KEPT = 3


class _Pool:
    """Shared memory of the node, from which pushes and pulls borrow pieces.

    Memory is reused because the first access to new memory pages takes as long as copying the rows.
    """

    def __init__(self) -> None:
        self._free: list[Payload] = []

    def borrow(self, nbytes: int) -> Payload:
        """Return uninitialised memory of at least this size."""
        for number, memory in enumerate(self._free):
            if nbytes <= memory.nbytes <= 4 * nbytes:
                return self._free.pop(number)
        return arena.empty(nbytes + nbytes // 4, np.uint8)

    def give_back(self, memory: Payload) -> None:
        """Take back memory that no server reads or writes any more."""
        self._free.append(memory)
        del self._free[:-KEPT]


def deal(found: Distinct, first_rows: Sequence[int], first_words: Sequence[int], words: Ids) -> Places:
    """Lay out the ids of a push or a pull, server by server, in memory with a section for each server.

    Each distinct id gets a row in the section of its server. This row is the place for the values of the id. The ids of
    each server are written into `words`, in the order of their rows.

    Args:
        found: The distinct ids of the call, and the server of each.
        first_rows: For each server, the number of the row for its first id. Its other ids get the rows after that row.
        first_words: For each server, the index in `words` of its first id.
        words: The array into which the ids are written.

    Returns:
        For each id that the caller has passed, repeated ids included, the number of its row.
    """
    if len(found.per_server) == 1:
        words[first_words[0] :][: len(found.ids)] = found.ids
        return found.places + first_rows[0] if first_rows[0] else found.places
    rows = np.empty(len(found.ids), np.int64)
    for server, count in enumerate(found.per_server):
        chosen = np.flatnonzero(found.owners == server)
        rows[chosen] = first_rows[server] + np.arange(count)
        words[first_words[server] :][:count] = found.ids[chosen]
    return rows[found.places]


class _TableShare(NamedTuple):
    """The rows of one table in a push or a pull."""

    ids: Distinct
    # number of values in a row
    dim: int
    dtype: np.dtype
    # a score for each id of a push, if the table evicts by score; if an id repeats, its last score is used
    scores: Array | None = None
    # for each distinct id the index of its last occurrence in the call; only needed for scores
    last: Places | None = None


class _Block:
    """The memory of a push or a pull, with a section for each server.

    A section has the rows of each table, then the ids of these rows, then the encoded request to the server. A server
    on this node reads gradients from its section, or writes rows into it.

    Args:
        parts: The rows of each table.
        requests: For each server, a list with its request for each table. The request is None if the server has none of
            the table's ids. If there are several tables, all requests are pulls.
    """

    def __init__(
        self,
        pool: _Pool,
        parts: Sequence[_TableShare],
        requests: Sequence[Sequence[messages.PushRows | messages.PullRows | None]],
    ) -> None:
        row_bytes = [part.dim * part.dtype.itemsize for part in parts]
        self._per_server = [part.ids.per_server for part in parts]
        # for each table, a list with the number of the first row for each server; then the same with the first id
        self._first_rows: list[list[int]] = [[] for _ in parts]
        first_ids: list[list[int]] = [[] for _ in parts]
        # for each server, the offsets of its part of the memory, its ids and its request, and the encoded request
        places: list[tuple[int, int, int, bytes]] = []
        end, unit = 0, math.lcm(row_bytes[0], 8)
        for server, asked in enumerate(requests):
            at = start = _round_up(end, unit)
            for size, counts, request, first in zip(row_bytes, self._per_server, asked, self._first_rows):
                # The rows of a table begin at a multiple of the row size, so that the whole memory can be viewed as
                # rows of this table.
                at = _round_up(at, size)
                first.append(at // size)
                if isinstance(request, messages.PullRows):
                    request.rows_at = at - start
                at += counts[server] * size
            at = ids_at = _round_up(at, 8)
            for part, first in zip(parts, first_ids):
                first.append(at // 8)
                at += (8 if part.scores is None else 16) * part.ids.per_server[server]
            data = _encode(asked)
            places.append((start, ids_at, at, data))
            end = at + len(data)
        end = _round_up(end, 8)
        self.memory = pool.borrow(end)
        # for each server, its part of the memory, and the offsets of its ids and its request in this part
        self._bodies: list[tuple[Payload, int, int]] = []
        for start, ids_at, at, data in places:
            body = self.memory[start : at + len(data)]
            body[at - start :] = np.frombuffer(data, np.uint8)
            self._bodies.append((body, ids_at - start, at - start))
        words = self.memory[:end].view(np.int64)
        # for each table, the whole memory viewed as rows of the table; only some of these rows are used
        self.rows: list[Array] = []
        # for each table, an array with the index in `rows` of the row of each id of the caller
        self.places: list[Places] = []
        for part, size, first_row, first_id in zip(parts, row_bytes, self._first_rows, first_ids):
            whole = self.memory[: end // size * size]
            self.rows.append(whole.view(part.dtype).reshape(-1, part.dim))
            self.places.append(deal(part.ids, first_row, first_id, words))
            if part.scores is not None:
                first_scores = [at + count for at, count in zip(first_id, part.ids.per_server)]
                score_places = deal(part.ids, first_scores, first_id, words)
                words.view(np.float64)[score_places[part.last]] = part.scores[part.last]

    def rows_of(self, number: int, server: int) -> Array:
        """Return the rows of one table in a server's section. `number` is the index of the table in `parts`."""
        return self.rows[number][self._first_rows[number][server] :][: self._per_server[number][server]]

    def body(self, server: int, with_rows: bool = True) -> tuple[Payload, int]:
        """Return the bytes to send to a server, and the number of bytes in front of the request.

        Args:
            with_rows: False to leave out the rows, for a pull from a server on another node.
        """
        body, ids_at, request_at = self._bodies[server]
        skipped = 0 if with_rows else ids_at
        return body[skipped:], request_at - skipped


def _encode(requests: Sequence[messages.PushRows | messages.PullRows | None]) -> bytes:
    """Encode the requests to one server. If a call pulls several tables, their requests are encoded as one message."""
    if len(requests) == 1:
        return frames.encode(requests[0]) if requests[0] is not None else b""
    return frames.encode(
        messages.PullTables([request for request in requests if isinstance(request, messages.PullRows)])
    )


def _round_up(number: int, unit: int) -> int:
    return -(-number // unit) * unit


@dataclass
class KnownTable:
    """A worker's record of a table."""

    # the description of the table that was sent to the servers
    card: messages.MakeTable
    # number of rounds that this worker has pushed; after `recover`, the number of those rounds that still count
    round: int = 0
    # number of refused rounds that this worker knows of
    refusals: int = 0
    # number of times that the rows were loaded from a file
    loads: int = 0
    # server -> number of ids that this worker may push there next without asking for memory
    room: dict[int, int] = field(default_factory=dict)
    noun = "table"

    @functools.cached_property
    def numbers(self) -> memoryview:
        """Counts of this worker's calls of the table, in memory that other processes read to observe the job.

        The indices are `PUSHED`, `ASKED`, `IN_PLACE` and `REFUSED`. `recorder.page.TABLE` explains these counts.
        """
        return recorder.table_numbers(self.name)

    @property
    def name(self) -> str:
        return self.card.table

    def note_load(self) -> None:
        """Note that rows were loaded from a file. Servers have then withdrawn the room that they had granted."""
        self.loads, self.room = self.loads + 1, {}


class RowsPush(NamedTuple):
    """A worker's contribution to the next round of a table: a push, or a call of `set` or `remove`.

    Attributes:
        rows: Gradients, or with `sets` the values to set, (k, dim). None if the rows of the ids are removed.
        scores: A score for each id (k,), if the table evicts by score.
    """

    table: KnownTable
    ids: Ids
    rows: Array | None
    scores: Array | None = None
    sets: bool = False


class RemoteTables:
    """The worker's side of all tables of a store: makes, pushes and pulls tables by requests to the servers.

    Ids are int64 arrays of shape (k,) in any order, and may repeat. Rows are arrays of shape (k, dim).
    """

    service = "tables"

    def __init__(self, layout: Layout, link: ServerLink, setup: Setup) -> None:
        self._link = link
        self._setup = setup
        self._layout = layout
        self._servers = layout.num_servers
        self._freezes = 0
        self._pool = _Pool()
        # the tables that exist on all servers, by name
        self.known: dict[str, KnownTable] = {}
        # Table -> memory that servers of this node may still read: of the last push, and of unanswered pushes.
        self._pushes: dict[str, list[Payload]] = {}
        # Memory that servers may still write: of unanswered pulls, and of pulls that an error has ended.
        self._pulls: dict[int, Payload] = {}
        # table -> its rows in the memory of each server; only used if all servers are on this node
        self._in_place: dict[str, list[RowsInPlace]] = {}

    def renew(self) -> None:
        """Forget the memory of old pushes and pulls for the next generation.

        Called when servers no longer use this memory.
        """
        self._servers = self._layout.num_servers
        self._pushes.clear()
        self._pulls.clear()
        self._in_place.clear()

    def make(self, card: messages.MakeTable) -> Task[None]:
        """Make a table on all servers. Collective. Raises ValueError on all workers if a server cannot make it."""
        yield from self._setup.at_rank_0(lambda: self._setup.tell_all(card), f"table {card.table!r}")
        kernels.load(np.dtype(card.dtype), [*kernels.OF_WORKERS, *FirstValues(card).loops])
        self.known[card.table] = KnownTable(card)

    def update(self, table: str, numbers: bytes) -> Task[None]:
        """Change hyperparameters of a table's optimizer on all servers. Collective."""
        request = messages.UpdateTable(table, numbers)
        yield from self._setup.at_rank_0(lambda: self._setup.tell_all(request), f"update_optimizer of table {table!r}")

    def push(self, pushes: Sequence[RowsPush]) -> Task[None]:
        """Contribute to the next round of each table, on every server.

        When the task is over, the arrays may be overwritten. Raises RoomError if servers refuse this round or an
        earlier one. Then none of these pushes counts, and the `round` of each table is the last round that counts.
        """
        merged = [distinct(push.ids, self._servers) for push in pushes]
        rooms = [push.table.room.get(server, 0) for push in pushes for server in range(self._servers)]
        counts = [count for ids_of in merged for count in ids_of.per_server]
        adds = any(push.rows is not None for push in pushes)
        if adds and any(count > room for count, room in zip(counts, rooms)):
            yield from self._ask_for_room([push.table for push in pushes], merged)
        sent = [self._send(push, ids_of) for push, ids_of in zip(pushes, merged)]
        every: list[Any] = []
        for (table, ids, *_), tokens in zip(pushes, sent):
            every += (answers := (yield from self._answers(tokens)))
            self._take_room(table, answers)
            if len(table.room) == self._servers:
                table.round += 1
                table.numbers[PUSHED] += len(ids)
                memories = self._pushes.get(table.name, [])
                # The answer means that the previous push has been applied, so its memory is free.
                for memory in memories[:-1]:
                    self._pool.give_back(memory)
                del memories[:-1]
        yield from self._check_refused(every)

    def _send(self, push: RowsPush, ids: Distinct) -> list[int]:
        """Send a push to all servers. Return the tokens of the answers."""
        table, rows = push.table, push.rows
        time = eviction.now() if table.card.evict_after else 0
        if rows is None:
            parts = [ids.ids[ids.owners == server].tobytes() for server in range(self._servers)]
            removals = [messages.RemoveRows(table.name, part, table.refusals, time) for part in parts]
            return [self._link.post_request(server, removal) for server, removal in enumerate(removals)]
        requests = [[messages.PushRows(table.name, count, table.refusals, push.sets, time)] for count in ids.per_server]
        last = last_places(push.ids)[1] if push.sets or push.scores is not None else None
        block = _Block(self._pool, [_TableShare(ids, rows.shape[1], rows.dtype, push.scores, last)], requests)
        if push.sets:
            block.rows[0][block.places[0][last]] = rows[last]
        else:
            (halves.sum_into if halves.is_half(rows.dtype) else sum_into)(block.rows[0], rows, block.places[0])
        self._pushes.setdefault(table.name, []).append(block.memory)
        return [self._link.post_request_with(server, *block.body(server)) for server in range(self._servers)]

    def _ask_for_room(self, tables: Sequence[KnownTable], merged: Sequence[Distinct]) -> Task[None]:
        """Ask all servers for memory for the rows of these ids. Raises RoomError if a server does not have enough."""
        sent = []
        for table, ids in zip(tables, merged):
            parts = [ids.ids[ids.owners == server].tobytes() for server in range(self._servers)]
            asked = [messages.AskForRoom(table.name, table.round, part, table.refusals) for part in parts]
            sent.append([self._link.post_request(server, request) for server, request in enumerate(asked)])
        every: list[Any] = []
        for table, tokens in zip(tables, sent):
            every += (answers := (yield from self._answers(tokens)))
            self._take_room(table, answers)
        step = [(table.name, table.round + 1, table.refusals + 1) for table in tables]
        yield from self._check_refused(every, step)

    def _take_room(self, table: KnownTable, answers: Sequence[Any]) -> None:
        """Note the number of ids that this worker may push to each server next without asking for memory."""
        granted = (
            (server, answer) for server, answer in enumerate(answers) if isinstance(answer, messages.RoomGranted)
        )
        table.room = {server: answer.ids for server, answer in granted}

    def _check_refused(self, answers: Sequence[Any], step: Sequence[messages.TableRound] = ()) -> Task[None]:
        """Raise RoomError if a server has refused a round. Before that, let all servers drop the round.

        Args:
            answers: The servers' answers to a request.
            step: The rounds that this worker was about to push together. If a server refuses one of them, the servers
                drop all of them and tell the other workers.
        """
        refusals = [answer for answer in answers if isinstance(answer, messages.RoundRefused)]
        if not refusals:
            return
        # In an asynchronous store a refusal concerns only this worker's own push, which was not sent.
        if not self._layout.asynchronous:
            for refusal in refusals:
                yield from self._drop(list(refusal.step or step), refusal.why)
        # Servers that have granted room keep memory for the rows of this step. Forget their grants, so that the next
        # push asks all servers again, even if it is smaller.
        for name, *_ in step if self._layout.asynchronous else ():
            self.known[name].room = {}
            self.known[name].numbers[REFUSED] += 1
        raise of_caller(RoomError(refusals[0].why))

    def _drop(self, step: list[messages.TableRound], why: str) -> Task[None]:
        """Let all servers drop the rounds of a step. Reduce this worker's count of pushes accordingly."""
        for name, round_, refusals in step:
            table = self.known[name]
            if refusals <= table.refusals:
                continue
            yield from self._ask_all(messages.RefuseRound(name, round_, refusals, why, step))
            table.refusals, table.round, table.room = refusals, round_ - 1, {}
            table.numbers[REFUSED] += 1
            for memory in self._pushes.pop(name, []):
                self._pool.give_back(memory)

    def _answers(self, tokens: Sequence[int]) -> Task[list[Any]]:
        """Wait for the answers to these tokens."""
        answers = []
        for token in tokens:
            answers.append((yield from self._link.wait_for_answer(token, decode_answer)))
        return answers

    def _ask_all(self, request: messages.TableRequest) -> Task[list[Any]]:
        """Send a request to all servers, and wait for their answers."""
        return self._answers([self._link.post_request(server, request) for server in range(self._servers)])

    def pull(self, pulls: Sequence[tuple[KnownTable, Ids, Array]]) -> Task[None]:
        """For each (table, ids, out), write the rows of `ids` into `out`.

        The rows contain all earlier pushes of this worker.

        Raises RoomError if one of these pushes was refused.
        """
        options = self._layout.options
        # Read in place only if servers never delay pulls. They may delay pulls because of `staleness`, or because a
        # round counts only once the mirror has it.
        near = options.staleness < 0 and not options.mirrors and self._link.all_local
        asked = []
        for table, ids, out in pulls:
            if near and kernels.read_rows.ready(out) and (yield from self._read_in_place(table, ids, out)):
                table.numbers[IN_PLACE] += len(ids)
            else:
                asked.append((table, ids, out))
        if asked:
            yield from self._ask_for_rows(asked)

    def _ask_for_rows(self, pulls: Sequence[tuple[KnownTable, Ids, Array]]) -> Task[None]:
        """Pull rows by one request to each server."""
        parts = [_TableShare(distinct(ids, self._servers), out.shape[1], out.dtype) for _, ids, out in pulls]
        local = [line.local for line in self._link.lines]
        # Ask only the servers that own the ids. If a table has no ids, ask the first server, because its answer says
        # whether the worker's last push was accepted.
        requests = [
            [
                messages.PullRows(table.name, table.round, count, local[server], table.refusals)
                if (count := part.ids.per_server[server]) or not (server or len(ids))
                else None
                for (table, ids, _), part in zip(pulls, parts)
            ]
            for server in range(self._servers)
        ]
        block = _Block(self._pool, parts, requests)
        self._pulls[id(block.memory)] = block.memory
        servers = [server for server in range(self._servers) if any(requests[server])]
        tokens = [self._link.post_request_with(server, *block.body(server, local[server])) for server in servers]
        every: list[Any] = []
        for server, answer in zip(servers, (yield from self._answers(tokens))):
            answers = answer.answers if isinstance(answer, messages.TablesPulled) else [answer]
            numbers = [number for number, request in enumerate(requests[server]) if request is not None]
            for number, one in zip(numbers, answers):
                if isinstance(one, frames.Bytes):
                    rows = block.rows_of(number, server)
                    rows[...] = np.frombuffer(one.data, rows.dtype).reshape(rows.shape)
            every += answers
        del self._pulls[id(block.memory)]
        yield from self._check_refused(every)
        for number, (table, ids, out) in enumerate(pulls):
            # Without mode="clip" NumPy would first write into a copy of `out`, to leave `out` unchanged if an index is
            # wrong.
            np.take(block.rows[number], block.places[number], axis=0, out=out, mode="clip")
            table.numbers[ASKED] += len(ids)
        self._pool.give_back(block.memory)

    def exists(self, table: KnownTable, ids: Ids, out: NDArray[np.bool_]) -> Task[None]:
        """Write into `out` which ids have a row, after all earlier pushes of this worker.

        Raises RoomError like `pull`.
        """
        asked = [
            (chosen, self._link.post_request(server, messages.HasRows(table.name, table.round, part, table.refusals)))
            for server, chosen in enumerate(self._spread(ids))
            for part in [ids[chosen].tobytes()]
            # As in `pull`, ask the first server if the call has no ids.
            if part or not (server or len(ids))
        ]
        answers = yield from self._answers([token for _, token in asked])
        for (chosen, _), answer in zip(asked, answers):
            if isinstance(answer, frames.Bytes):
                out[chosen] = np.frombuffer(answer.data, np.bool_)
        yield from self._check_refused(answers)

    def _read_in_place(self, table: KnownTable, ids: Ids, out: Array) -> Task[bool]:
        """Read rows in the servers' memory.

        Return False if that failed and the worker must ask the servers. Possible reasons: the rows have changed
        meanwhile, the table's rows are elsewhere now, or a round was refused.
        """
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
        """Map a table's rows in the servers' memory. Return an empty list if they cannot be mapped."""
        places = yield from self._ask_all(messages.LocateTable(table.name))
        try:
            parts = [
                RowsInPlace(at, table.card, self._layout.num_workers, (server, self._servers))
                for server, at in enumerate(places)
            ]
        except (CollectiveError, OSError):
            return []
        self._in_place[table.name] = parts
        return parts

    def tell_wait(self, tables: Sequence[KnownTable]) -> None:
        """Tell a server that this worker has waited long in calls of these tables.

        The server then looks for workers that wait for one another in a circle. Only the first server gets the message.
        Every worker pushes to every server, so the first server knows of all pushes.
        """
        for table in () if self._layout.asynchronous else tables:
            self._link.post_request(0, messages.WaitForTable(table.name, table.round, table.refusals))

    def stats(self, table: KnownTable, ahead: int = 0) -> Task[list[messages.TableStats]]:
        """Return each server's figures after this worker's pushes so far and `ahead` further ones.

        Raises RoomError like `pull`.
        """
        answers = yield from self._ask_all(messages.GetTableStats(table.name, table.round + ahead, table.refusals))
        yield from self._check_refused(answers)
        return answers

    def freeze(self, tables: Sequence[str], since: int = 0, export: int = -1) -> Task[FrozenOnServers]:
        """Let the servers keep a copy of the tables as they are now. The caller reads the copy piece by piece.

        Only one worker calls this. For `since` and `export` see `FreezeTables`.
        """
        self._freezes += 1
        answers = yield from self._ask_all(messages.FreezeTables(self._freezes, list(tables), since, export))
        parts = {name: [answer.tables[number] for answer in answers] for number, name in enumerate(tables)}
        return FrozenOnServers(self._link, self._freezes, parts)

    def reset(self, table: str, updates: int, time: int) -> Task[None]:
        """Let all servers drop the rows of a table, and set the number and the time of its updates.

        Called by one worker.
        """
        yield from self._ask_all(messages.ResetTable(table, updates, time))

    def end_load(self, table: str) -> Task[None]:
        """Tell all servers that they have all rows of a load. Only one worker calls this."""
        yield from self._ask_all(messages.EndLoad(table))

    def put_rows(self, table: str, arrays: Mapping[str, Array]) -> Task[None]:
        """Send rows to the servers that they belong to. Only one worker calls this.

        `arrays` has every array of the table, by name, for these rows.
        """
        tokens = []
        for server, chosen in enumerate(self._spread(arrays["ids"])):
            parts = {name: values[chosen].tobytes() for name, values in arrays.items()}
            tokens.append(self._link.post_request(server, messages.PutRows(table, parts)))
        yield from self._answers(tokens)

    def at_rank_0(self, do: Callable[[], Task[bytes]], what: str) -> Task[bytes]:
        """Run `do` on rank 0, and return its result or raise its error on all workers. See `Setup.at_rank_0`."""
        return self._setup.at_rank_0(do, what)

    def _spread(self, ids: Ids) -> list[NDArray[np.int64]]:
        """Return a list: for each server, the indices of the ids that belong to it."""
        owners = owners_of(ids, self._servers)
        return [np.flatnonzero(owners == server) for server in range(self._servers)]


class FrozenOnServers:
    """Copies of tables at one moment, which the servers keep.

    Attributes:
        parts: Name of a table -> one entry for each server, in the order of the servers.
    """

    def __init__(self, link: ServerLink, number: int, parts: Mapping[str, Sequence[messages.FrozenTable]]) -> None:
        self._link = link
        self._number = number
        self.parts = parts

    def read(
        self, table: str, server: int, start: int, stop: int, names: Sequence[str] = ()
    ) -> Task[Mapping[str, bytes]]:
        """Return rows at positions [start, stop) on a server. `names` are the arrays to read; empty means all.

        Positions must be read in ascending order, because the server forgets positions that have been read.
        """
        request = messages.ReadTable(self._number, table, start, stop, list(names))
        arrays: dict[str, bytes] = (yield from self._link.request(server, request, decode_answer)).arrays
        return arrays

    def dropped(self, table: str, server: int) -> Task[bytes]:
        """Return the ids that a server has dropped, as bytes."""
        request = messages.ReadDropped(self._number, table)
        ids: bytes = (yield from self._link.request(server, request, decode_answer)).data
        return ids

    def release(self) -> Task[None]:
        """Let the servers drop the copies."""
        for server in range(len(self._link.lines)):
            yield from self._link.request(server, messages.ThawTables(self._number), decode_answer)
