"""A store with servers, on a worker: how a key's value travels between the training loop and the servers.

dist_*: every worker pushes and pulls by itself. mpi_*: a client first reduces inside. With masters="one" rank 0 of the
client pushes and pulls the whole and broadcasts it (the paper, section 4.2); with masters="all" the client
reduce-scatters, every worker pushes and pulls its own slices, and an allgather puts them together, in pieces of which
several are under way, so that the phases overlap on a network. A client that shares its node with all servers reads
their memory instead of a broadcast, where the store is synchronous: nobody can overwrite it before everybody has read.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from itertools import zip_longest
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

import collectives
from collectives import arena
from collectives.arena import Region
from collectives.errors import CollectiveError, MismatchError, Withdrawn
from collectives.session import session as collectives_session
from mpips import inside, meet, messages, optimizers, short
from mpips.agreement import Agreement, Card
from mpips.arguments import Name
from mpips.compression import Compressor
from mpips.keys import Key, Part, Piece
from mpips.layout import Layout
from mpips.lines import Line
from mpips.messages import Coding, UnitCard
from mpips.optimizers import Optimizer
from mpips.row_sparse import RowSparse
from mpips.session import Session, Task
from mpips.sharding import Interval, Placement, grain_of, split, units

Array = NDArray[Any]


class Nameless(MismatchError):
    """Nobody in this client could tell which keys a push was for."""


class Served:
    """The operations of a store with servers; pushes and pulls are generators for the engine."""

    def __init__(self, layout: Layout, lines: list[Line]) -> None:
        self.layout = layout
        self.session = Session(layout, lines)
        self._placement = Placement(layout.num_servers, layout.options.big_array)
        self._groups = layout.groups()
        self._grouped = layout.kind.startswith("mpi_")
        self._all = layout.options.masters == "all"
        self._members = 1 if layout.client is None else layout.client.Get_size()
        if self._members > 1:
            collectives_session(layout.client).patient(layout.options.stall_seconds, layout.options.timeout_seconds)
        self._units = 0
        self._compressor: Compressor | None = None
        self._residuals: dict[int, Array] = {}
        near = self._everybody(self.session.all_local)
        self._near = all(near[worker] for worker in range(*layout.clients[layout.client_number]))
        self._one_node = all(near)
        self._agreement: Agreement | None = None
        if self._grouped and self._members > 1 and layout.client is not None:
            first = layout.clients[layout.client_number].start
            self._agreement = Agreement(layout.client, first, self._one_node)
        self.calling: list[Name] = []
        """The keys that the present call is yet to use, the present one first."""
        self.communicators = (("communicator", "client"),) if self._grouped else ()
        """Names of what all its operations hold collectives on."""

    def _everybody(self, flag: bool) -> list[bool]:
        assert self.layout.workers is not None
        return [data == b"1" for data in meet.exchange(self.layout.workers, b"1" if flag else b"0", "mpips.create")]

    # ---- keys

    def init(self, keys: list[Key], values: list[Array]) -> Task:
        """Make the keys on the servers, with rank 0's values. Collective over the workers."""
        cards: dict[int, list[UnitCard]] = {server: [] for server in range(self.layout.num_servers)}
        for key in keys:
            self._plan(key, cards)
        workers = self.layout.workers
        assert workers is not None
        answers: list[Any] = []
        if self.layout.rank == 0:
            for server, new in cards.items():
                answers.append((yield from self.session.request(server, messages.Create(new))) if new else None)
        told = meet.exchange(workers, msgspec.msgpack.encode(answers), "init")[0]
        created = msgspec.msgpack.decode(told, type=list[messages.Created | None])
        for server, new in cards.items():
            if self.session.lines[server].local and (where := created[server]) is not None:
                self._attach(new, where)
        for key in keys:
            self._shorten(key)
        if self.layout.rank == 0:
            for key, value in zip(keys, values, strict=True):
                yield from self.session.set(key, value.reshape(-1))
        meet.exchange(workers, b"", "init")

    def forget(self, keys: Sequence[Key]) -> Task:
        """Give up keys. Collective over the workers, who have nothing under way on them."""
        assert self.layout.workers is not None
        meet.exchange(self.layout.workers, b"", "forget")
        for server in range(self.layout.num_servers) if self.layout.rank == 0 else ():
            units = [part.number for key in keys for part in key.parts if part.server == server]
            if units:
                yield from self.session.request(server, messages.Forget(units))
        for key in keys:
            self.session.remove(key)
            for part in key.parts:
                self._residuals.pop(part.number, None)
            self._placement.free([(part.server, part.stop - part.start) for part in key.parts], key.dtype.itemsize)
        meet.exchange(self.layout.workers, b"", "forget")

    def _plan(self, key: Key, cards: dict[int, list[UnitCard]]) -> None:
        """Cut a key into pieces and units, the same on every worker."""
        options = self.layout.options
        grain = grain_of(key.shape, self.layout.num_servers) if max(map(len, self._groups)) == 1 else 1
        block_bytes = options.block_bytes if self._one_node else options.chunk_bytes
        block = max(1, block_bytes // key.dtype.itemsize)
        by_server = []
        for server, part in self._placement.place(key.shape, key.dtype.itemsize):
            first = len(key.pieces)
            chunks = 1
            if not self._one_node:
                chunks = max(1, min(32, part.size * key.dtype.itemsize // options.chunk_bytes))
            for chunk in split(part, chunks, grain):
                if chunk.size or not part.size:
                    self._plan_piece(key, server, chunk, grain, block, cards[server])
            by_server.append(key.pieces[first:])
        # In turn, so that the few pieces under way keep all servers busy; in one order everywhere, as servers take few.
        key.pieces = [piece for row in zip_longest(*by_server) for piece in row if piece is not None]
        key.pushes = [part for piece in key.pieces for part in piece.pushes]
        self.session.add(key)

    def _plan_piece(
        self, key: Key, server: int, chunk: Interval, grain: int, block: int, cards: list[UnitCard]
    ) -> None:
        rank = self.layout.rank
        members = self._groups[self.layout.client_number] if self._grouped else [rank]
        slices = split(chunk, len(members), grain)
        piece = Piece([s.start for s in slices] + [chunk.stop], [], len(key.pieces))
        row_elements = int(np.prod(key.shape[1:], dtype=np.int64)) if key.shape else 1
        for unit in units(0, server, chunk, self._groups, grain):
            card = UnitCard(
                self._units, key.name, key.dtype.name, unit.start, unit.stop, max(1, row_elements), block,
                unit.contributors,
            )  # fmt: skip
            self._units += 1
            cards.append(card)
            part = Part(
                card.number, server, unit.start, unit.stop, self.session.lines[server], unit.contributors,
                block, max(1, -(-unit.size // block)),
            )  # fmt: skip
            key.parts.append(part)
            if rank in unit.contributors:
                part.mine = 1 + unit.contributors.index(rank)
                key.pushes.append(part)
                piece.pushes.append(part)
        key.pieces.append(piece)

    def _attach(self, cards: list[UnitCard], created: messages.Created) -> None:
        dtypes = [messages.dtype_of(card.dtype) for card in cards]
        first_words, _, first_bytes, _ = messages.arrange(cards, [dtype.itemsize for dtype in dtypes])
        words = arena.attach(Region(*created.words)).view(np.uint64)
        values = arena.attach(Region(*created.values))
        for card, dtype, word, byte in zip(cards, dtypes, first_words, first_bytes, strict=True):
            part = self.session.part(card.number)
            part.words = memoryview(words[word : word + 1 + len(card.contributors)])  # type: ignore[arg-type]
            part.stored = values[byte : byte + (card.stop - card.start) * dtype.itemsize].view(dtype)

    def _shorten(self, key: Key) -> None:
        """Find out whether pushes and pulls of the key can take the short way."""
        plain = not self._grouped and not self.layout.asynchronous and self._compressor is None
        near = plain and self.session.all_local
        key.short = short.make(self.session, key, self.layout.options.small_bytes) if near else None

    # ---- pushes

    def push(self, key: Key, flat: Array, priority: int, wait: bool = True) -> Task:
        """Contribute `flat` (1-D) to the key's next round."""
        round_ = self.session.begin(key, not self._grouped)
        if not self._grouped:
            return self._contribute(key, round_, flat, priority, wait)
        if self._all:
            tasks = [self._push_piece(key, round_, piece, flat, priority) for piece in key.pieces]
            return self._pipeline(key, "push", True, tasks)
        if self._in_pieces(key):
            tasks = [self._push_piece_by_master(key, round_, piece, flat, priority) for piece in key.pieces]
            return self._pipeline(key, "push", True, tasks)
        return self._push_master(key, round_, flat, priority)

    def _in_pieces(self, key: Key) -> bool:
        """Whether a client on several nodes handles the key as a pipeline."""
        return not self._one_node and len(key.pieces) > 1 and self._members > 1

    # ---- calls that cannot be made

    def collective(self, pushes: bool) -> bool:
        """Whether the other members of the client take part in this worker's pushes, or pulls."""
        return self._members > 1 and (pushes or not self._near or self.layout.asynchronous)

    def refuse(self, what: str, keys: Sequence[Key], pushes: bool, sentence: str, event: str) -> Task:
        """This worker's arguments are bad: tell those who wait. MismatchError where others take part in the call."""
        if self.collective(pushes):
            card = Card(what, [key.name for key in keys], pushes, sentence)
            yield from self._collective(card, sentence, lambda: None)
        for key in keys if pushes else ():
            self.skip(key, sentence, event)

    def skip(self, key: Key, sentence: str, event: str = "") -> None:
        """Count a push of the key that cannot be made: the round fails for all others."""
        self.session.begin(key, False)
        self.session.refuse(key, sentence, event)

    def fail(self, name: Name, count: int, sentence: str, event: str) -> None:
        """Skip pushes of a key until `count` are counted; one where that is 0."""
        key = self.session.key(name)
        if key is not None:
            for _ in range(count - key.round if count else 1):
                self.skip(key, sentence, event)

    def _agreed(self, key: Key, what: str, pushes: bool, call: Callable[[], object]) -> Task:
        """What all members of a client do together: they see that they do the same, or all raise.

        On one node `call` does it; between nodes the caller does, afterwards.
        """
        if self._agreement is None:
            call()
            return
        card = Card(what, self.calling or [key.name], pushes)
        yield from self._collective(card, f"{what} of {key.name!r}", call)

    def _collective(self, card: Card, text: str, call: Callable[[], object]) -> Task:
        agreement = self._agreement
        assert agreement is not None
        fallback = ""
        if agreement.one_node:
            agreement.note(text)
            try:
                if card.refusal:
                    collectives_session(self.layout.client).refuse(card.refusal)
                call()
                same = agreement.noted()
            except Withdrawn:
                raise
            except MismatchError as error:
                same, fallback = False, str(error)
        else:
            same = yield from agreement.same(text)
        if not same:
            self._disagree(agreement, card, fallback)

    def _disagree(self, agreement: Agreement, card: Card, fallback: str) -> None:
        """All members tell what they called; what any would push fails its next round on all clients; all raise."""
        sentence, cards = agreement.explain(card, fallback)
        counted = card.keys[0] if card.pushes and not card.refusal else None  # by `begin`
        names = {name for other in cards if other.pushes for name in other.keys}
        for name in sorted(names, key=str):
            key = self.session.key(name)
            if key is not None:
                key.round += name != counted
                self.session.refuse(key, sentence, f"client {self.layout.client_number} call {agreement.calls}")
        self.calling = []
        raise (MismatchError if names or not card.pushes else Nameless)(sentence)

    def _contribute(
        self, key: Key, round_: int, flat: Array, priority: int, wait: bool, own: bool = False,
        parts: Sequence[Part] | None = None, base: int = 0,
    ) -> Task:  # fmt: skip
        """Push `flat`, which holds the key's elements from `base` on."""
        session = self.session
        parts = key.pushes if parts is None else parts
        payloads = [(part, flat[part.start - base : part.stop - base]) for part in parts]
        if self._compressor is None or key.dtype.kind != "f":
            yield from session.push(key, round_, payloads, priority, wait, own)
            return
        for part, values in payloads:
            yield from session.drained(key, round_ - 1, [part])
            residual = self._residuals.get(part.number)
            if residual is None:
                residual = self._residuals[part.number] = self._compressor.init(values)
            payload = self._compressor.encode(values, residual)
            yield from session.push_coded(key, round_, part, payload, Coding.COMPRESSED, priority)

    def _push_master(self, key: Key, round_: int, flat: Array, priority: int) -> Task:
        """The client's sum goes to its rank 0, and from there to the servers."""
        comm = self.layout.client
        assert comm is not None
        if comm.Get_size() == 1:
            yield from self._contribute(key, round_, flat, priority, True)
            return
        piece = key.pieces[0]
        total = None
        if key.pushes:
            if piece.reduced is None:
                piece.reduced = arena.empty(key.size, key.dtype)
            total = piece.reduced
            yield from self.session.drained(key, round_ - 1, key.pushes, alone=False)
        out = total if total is not None else flat if flat.flags.writeable else np.empty_like(flat)
        yield from self._agreed(key, "push", True, lambda: collectives.reduce(flat, comm, out=out))
        if not self._one_node:
            yield from inside.reduce(comm, flat, total)
        if total is not None:
            yield from self._contribute(key, round_, total, priority, False, own=True)

    def _push_piece(self, key: Key, round_: int, piece: Piece, flat: Array, priority: int) -> Task:
        """The client's sum of a piece, scattered: every member pushes its own slice."""
        comm = self.layout.client
        assert comm is not None
        start, stop = piece.cuts[0], piece.cuts[-1]
        rank = comm.Get_rank()
        mine = Interval(piece.cuts[rank], piece.cuts[rank + 1])
        if piece.reduced is None:
            piece.reduced = arena.empty(mine.size, key.dtype)
        reduced = piece.reduced
        yield from self.session.drained(key, round_ - 1, piece.pushes, alone=False)
        if self._one_node:
            yield from self._agreed(
                key, "push", True, lambda: collectives.reduce_scatter(flat[start:stop], comm, out=reduced)
            )
        else:
            cuts = [cut - start for cut in piece.cuts]
            yield from inside.reduce_scatter(comm, flat[start:stop], reduced, cuts, piece.number)
        yield from self._contribute(
            key, round_, reduced, priority, False, own=True, parts=piece.pushes, base=mine.start
        )

    def _push_piece_by_master(self, key: Key, round_: int, piece: Piece, flat: Array, priority: int) -> Task:
        """The client's sum of a piece goes to its rank 0, and from there to the servers."""
        comm = self.layout.client
        assert comm is not None
        start, stop = piece.cuts[0], piece.cuts[-1]
        total = None
        if piece.pushes:
            if piece.reduced is None:
                piece.reduced = arena.empty(stop - start, key.dtype)
            total = piece.reduced
            yield from self.session.drained(key, round_ - 1, piece.pushes, alone=False)
        yield from inside.reduce_to_first(comm, flat[start:stop], total, piece.number)
        if total is not None:
            yield from self._contribute(key, round_, total, priority, False, own=True, parts=piece.pushes, base=start)

    def push_rows(self, key: Key, rows: RowSparse, priority: int) -> Task:
        """Contribute rows to the key's next round; every worker that contributes sends the rows of its units."""
        round_ = self.session.begin(key)
        row = max(1, key.size // max(1, key.shape[0]))
        whole_rows = all(part.start % row == 0 and part.stop % row == 0 for part in key.parts)
        if self._grouped or self._compressor is not None or not whole_rows:
            key.round -= 1
            return self.push(key, rows.to_dense().reshape(-1), priority)
        return self._push_rows(key, round_, rows.merged(), row, priority)

    def _push_rows(self, key: Key, round_: int, rows: RowSparse, row: int, priority: int) -> Task:
        for part in key.pushes:
            chosen = rows.between(part.start // row, part.stop // row)
            yield from self.session.drained(key, round_ - 1, [part])
            payload = np.concatenate(
                [chosen.rows.view(np.uint8), np.ascontiguousarray(chosen.values).reshape(-1).view(np.uint8)]
            )
            yield from self.session.push_coded(
                key, round_, part, payload, Coding.ROWS, priority, count=len(chosen.rows)
            )

    # ---- pulls

    def pull(self, key: Key, flat: Array) -> Task:
        """Read the key into `flat` (1-D) on every worker that calls."""
        if not self._grouped or (self._near and not self.layout.asynchronous):
            return self.session.pull(key, flat, key.parts)
        if self._all or self._in_pieces(key):
            return self._pipeline(key, "pull", False, [self._pull_piece(key, piece, flat) for piece in key.pieces])
        return self._pull_master(key, flat)

    def pull_rows(self, key: Key, out: Array, ids: Array) -> Task:
        """Write rows of the key into `out`, (len(ids), ...)."""
        whole = np.empty(key.shape, key.dtype)
        yield from self.pull(key, whole.reshape(-1))
        out[...] = whole[ids]

    def _pull_master(self, key: Key, flat: Array) -> Task:
        comm = self.layout.client
        assert comm is not None
        failure = None
        if not self._one_node:
            yield from self._agreed(key, "pull", False, lambda: None)
        if comm.Get_rank() == 0:
            failure = yield from self._caught(self.session.pull(key, flat, key.parts))
        if self._one_node:
            yield from self._agreed(key, "pull", False, lambda: collectives.broadcast(flat, comm))
        elif comm.Get_size() > 1:
            yield from inside.broadcast(comm, flat)
        self._raise(key, failure)

    def _pull_piece(self, key: Key, piece: Piece, flat: Array) -> Task:
        comm = self.layout.client
        assert comm is not None
        failure = yield from self._caught(self.session.pull(key, flat, piece.pushes))
        start, stop = piece.cuts[0], piece.cuts[-1]
        if self._one_node:
            yield from self._agreed(key, "pull", False, lambda: collectives.allgather(flat[start:stop], comm))
        elif not self._all:
            yield from inside.spread(comm, flat[start:stop], piece.number)
        elif comm.Get_size() > 1:
            cuts = [cut - start for cut in piece.cuts]
            yield from inside.allgather(comm, flat[start:stop], cuts, piece.number)
        self._raise(key, failure)

    def _caught(self, task: Task) -> Generator[None, None, CollectiveError | None]:
        """Run a task to its end; its error is raised after the client's collective, so that no member waits for it."""
        try:
            yield from task
        except CollectiveError as error:
            return error
        return None

    def _raise(self, key: Key, failure: CollectiveError | None) -> None:
        if failure is not None:
            raise failure
        self.session.check(key)

    def pushpull(self, key: Key, flat: Array, out: Array, priority: int) -> Task:
        """Push, then pull, in one: nothing waits between the two, and pieces go through both by themselves."""
        if self._grouped and (self._all or self._in_pieces(key)) and not self._near:
            round_ = self.session.begin(key, False)
            tasks = [self._through(key, round_, piece, flat, out, priority) for piece in key.pieces]
            return self._pipeline(key, "pushpull", True, tasks)
        if not self._grouped and not self._one_node and not self.layout.asynchronous and len(key.pieces) > 1:
            round_ = self.session.begin(key)
            return self._together([self._through_alone(key, round_, p, flat, out, priority) for p in key.pieces])
        return self._push_then_pull(key, flat, out, priority)

    def _through(self, key: Key, round_: int, piece: Piece, flat: Array, out: Array, priority: int) -> Task:
        push = self._push_piece if self._all else self._push_piece_by_master
        yield from push(key, round_, piece, flat, priority)
        yield from self._pull_piece(key, piece, out)

    def _through_alone(self, key: Key, round_: int, piece: Piece, flat: Array, out: Array, priority: int) -> Task:
        """One piece of a worker without a client: later pieces go to the server while this one's answer comes."""
        push = self._contribute(key, round_, flat, priority, False, parts=piece.pushes)
        yield from self.session.exchange(key, push, out, piece.pushes)

    def _push_then_pull(self, key: Key, flat: Array, out: Array, priority: int) -> Task:
        yield from self.push(key, flat, priority, wait=self.layout.asynchronous)
        yield from self.pull(key, out)

    def _pipeline(self, key: Key, what: str, pushes: bool, tasks: list[Task]) -> Task:
        """The pieces of a key in a client; between nodes the members compare their calls once, beforehand."""
        if not self._one_node:
            yield from self._agreed(key, what, pushes, lambda: None)
        yield from self._together(tasks)

    def _together(self, tasks: list[Task]) -> Task:
        """Run tasks with a few under way; each has tags of its own."""
        if len(tasks) == 1:
            yield from tasks[0]
            return
        waiting = list(reversed(tasks))
        running: list[Generator[None, None, None]] = []
        while waiting or running:
            while waiting and len(running) < (1 if self._one_node else self.layout.options.chunks_in_flight):
                running.append(waiting.pop())
            still = []
            for task in running:
                if next(task, self) is None:
                    still.append(task)
            running = still
            if running:
                yield

    # ---- settings

    def settle(self, keys: Sequence[Key]) -> Task:
        """Wait until the servers have read everything that this worker has pushed, and if asynchronous, applied it."""
        if self.layout.asynchronous:
            for server in range(self.layout.num_servers):
                yield from self.session.request(server, messages.Flush())
            return
        for key in keys:
            yield from self.session.drained(key, key.round, key.pushes, alone=False)

    def set_optimizer(self, optimizer: Optimizer) -> Task:
        yield from self._tell(messages.SetOptimizer(optimizers.encode(optimizer)))

    def set_compression(self, options: dict[str, Any], compressor: Compressor) -> Task:
        """From the next push on; residuals start at zero."""
        self._compressor = compressor
        self._residuals.clear()
        self.session.for_each_key(self._shorten)
        yield from self._tell(messages.SetCompression(options))

    def _tell(self, request: Any) -> Task:
        """Rank 0 tells all servers; nobody goes on before they have done it."""
        assert self.layout.workers is not None
        failure = b""
        if self.layout.rank == 0:
            try:
                for server in range(self.layout.num_servers):
                    yield from self.session.request(server, request)
            except ValueError as error:
                failure = str(error).encode()
        failure = meet.exchange(self.layout.workers, failure, "set_optimizer")[0]
        if failure:
            raise ValueError(failure.decode())

    def states(self, keys: Sequence[Key]) -> Generator[None, None, dict[Any, tuple[int, list[Array]]]]:
        """Each key's step and optimizer state, put together from all servers; on rank 0 only."""
        result = {}
        for key in keys:
            step, pieces = 0, []
            for part in key.parts:
                state = yield from self.session.request(part.server, messages.GetState(part.number))
                step = max(step, state.step)
                pieces.append(
                    [np.frombuffer(data, messages.dtype_of(name)) for data, name in zip(state.arrays, state.dtypes)]
                )
            slots = max(len(piece) for piece in pieces)
            result[key.name] = step, [np.concatenate([piece[i] for piece in pieces]) for i in range(slots)]
        return result

    def put_states(self, keys: Sequence[Key], states: dict[Any, tuple[int, list[Array]]]) -> Task:
        """Give every unit its part of the states; on rank 0 only."""
        for key in keys:
            step, arrays = states[key.name]
            for part in key.parts:
                cut = [array[part.start : part.stop] for array in arrays]
                state = messages.StatePart(step, [a.dtype.name for a in cut], [a.tobytes() for a in cut])
                yield from self.session.request(part.server, messages.PutState(part.number, state))

    def residuals(self, keys: Sequence[Key]) -> Array | None:
        """What compression kept back of this client's pushes, one key behind the other; None where nothing is
        compressed. Collective over the client."""
        if self._compressor is None:
            return None
        kept = np.zeros(sum(key.size for key in keys))
        base = 0
        for key in keys:
            for part in key.pushes:
                if part.number in self._residuals:
                    kept[base + part.start : base + part.stop] = self._residuals[part.number]
            base += key.size
        if self._members > 1:
            assert self.layout.client is not None
            collectives.allreduce(kept, self.layout.client)
        return kept

    def put_residuals(self, keys: Sequence[Key], values: Sequence[Array]) -> None:
        """Give every part that this worker pushes what was kept back of it."""
        assert self._compressor is not None
        for key, value in zip(keys, values, strict=True):
            for part in key.pushes:
                kept = value[part.start : part.stop].astype(key.dtype)
                residual = self._residuals[part.number] = self._compressor.init(kept)
                residual[...] = value[part.start : part.stop]

    def meet(self, what: str) -> Task:
        """MismatchError everywhere in a client of which others are in a push, or a pull."""
        if self._agreement is not None:
            agree = collectives_session(self.layout.client).agree
            yield from self._collective(Card(what, [], False), what, lambda: agree(f"{what} of the store"))

    def finish(self) -> None:
        self.session.goodbye()
