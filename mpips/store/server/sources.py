"""What workers push, as a server reads it: in memory of this node, or in messages from other nodes.

A push is a frame (a small message) that says where the payload is. `Pushes` makes a `Contribution` from each frame.

A worker of another node sends a block of its payload when the server has a buffer for the block and tells the worker so
(CREDIT). A payload of one block follows its frame without a credit, because a credit would have to wait in the server's
network link behind answers to workers. First values are received directly into the unit's memory. Only the end of a
generation blocks.

Memory for payloads is bounded, however many pushes are on their way. Besides weights and optimizer state, a server
needs memory for at most two copies of the model: one in sums that wait for other contributors, and one in payloads.
These payloads are those that workers send without being asked (`remote.link.UnreadPayloads`), and blocks that the
server asks for while there is room (`Buffers`). The block that a sum needs next may be asked for even without room,
unless another such block is already on its way. Its memory is freed once the block has been added. So no sum waits for
ever.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from mpips.collectives.clock import Clock
from mpips.collectives.fabric import arena
from mpips.collectives.fabric.arena import Region
from mpips.collectives.fabric.failure import is_death
from mpips.collectives.fabric.requests import cut_bytes, is_over, keep_until_complete, send
from mpips.compression import Compressor
from mpips.store.keys.key import Array
from mpips.store.keys.row_sparse import EmptyPush, RowSparse, unpacked
from mpips.store.server.unit import Contribution, Unit, UnknownError
from mpips.store.transport.frames import ALONG, ROUND_AT, Coding, Frame, Op
from mpips.store.transport.lines import Line, MessageLine
from mpips.store.transport.outbox import PLACES, header_bytes
from mpips.store.transport.pending import LOOK_SECONDS, Bytes, pull_tag, push_tag

if TYPE_CHECKING:
    from mpips.store.server.state import ServerState

# maximum number of workers' memory regions that stay mapped; it is larger on a server with many units
VIEWS = 4096
# number of unused buffers that are kept for later blocks
KEPT = 16
# number of messages with rows that may be on their way to a worker at a time
ROW_MESSAGES = 2
# At the end of a generation a server continues for this many seconds to receive messages from workers, because the
# workers wait until their messages are sent.
DRAIN_SECONDS = 0.2
# unit, position of the contributor, its contribution, priority
Push = tuple[Unit, int, Contribution, int]
# makes a contribution from the bytes of a coded payload
Read = Callable[[Array], Contribution]


class Pushes:
    """Turns push frames into contributions.

    Args:
        wholly: True if a payload that comes in messages counts only once it has arrived completely.
    """

    def __init__(self, state: ServerState, receiver: Receiver, wholly: bool = False) -> None:
        self._state = state
        self._receiver = receiver
        self.wholly = wholly
        # region of a payload -> its bytes
        self._views: dict[tuple[int, ...], Array] = {}
        self._most = VIEWS
        # frame without its round number -> its push, for payloads in shared memory, which a worker may push again
        self.known: dict[bytes, Push] = {}

    def new(self, worker: int, line: Line, data: bytes) -> Push:
        """Make the push for a frame that is not in `known`."""
        frame = Frame.of(data)
        unit = self._state.units[frame.unit]
        if worker not in unit.position:
            raise UnknownError(f"unit {frame.unit} of key {unit.key!r} takes no pushes of this worker")
        push = unit, unit.position[worker], self._source(worker, line, frame, unit), frame.priority
        if type(push[2]) in (Elements, FillingOutbox):
            if len(self.known) >= self._most:
                self.known.clear()
            self.known[data[:ROUND_AT]] = push
        return push

    def forget_others(self) -> None:
        """Forget pushes to units that no longer exist, and make room for pushes to new ones."""
        units = self._state.units
        self._most = max(VIEWS, 2 * sum(len(unit.contributors) for unit in units.values()))
        for frame in [frame for frame, push in self.known.items() if push[0].number not in units]:
            del self.known[frame]

    def _source(self, worker: int, line: Line, frame: Frame, unit: Unit) -> Contribution:
        if isinstance(line, MessageLine):
            if self.wholly:
                read = None if frame.coding == Coding.PLAIN else self._reader(frame, unit)
                return WholeMessage(self._receiver, line, worker, unit, frame, read)
            if frame.coding == Coding.PLAIN:
                return MessageBlocks(self._receiver, line, worker, unit, frame)
            return CodedMessage(self._receiver, line, worker, unit, frame, self._reader(frame, unit))
        payload = self._view(frame.region)
        if frame.coding == Coding.GROWING:
            return FillingOutbox(payload, unit.blocks, unit.block_elements, unit.stored.dtype)
        if frame.coding == Coding.PLAIN:
            return Elements(payload.view(unit.stored.dtype))
        return self._reader(frame, unit)(payload)

    def _reader(self, frame: Frame, unit: Unit) -> Read:
        """Return a function that decodes a payload with the compressor that was in use at the time of the push."""
        row = unit.row_elements if unit.stored.size % unit.row_elements == 0 else 1
        shape, dtype = (unit.stored.size // row, row), unit.stored.dtype
        if frame.coding == Coding.NOTHING:
            return lambda payload: PushedRows(EmptyPush(shape, dtype))
        if frame.coding == Coding.ROWS:
            return lambda payload: PushedRows(unpacked(payload, shape, dtype))
        compressor = self._state.compressor
        if compressor is None:
            raise UnknownError(f"a push to key {unit.key!r} is compressed, and this server knows no compression")
        return lambda payload: Compressed(payload, compressor)

    def _view(self, region: tuple[int, ...]) -> Array:
        """Return the bytes of a region. Each region is mapped only once."""
        view = self._views.get(region)
        if view is None:
            if len(self._views) >= self._most:
                self._views.clear()
            view = self._views[region] = arena.attach(Region(*region))
        return view


# ---- payloads in memory of this node


class Elements(Contribution):
    """All elements of a unit, in memory of this node."""

    def __init__(self, array: Array) -> None:
        self.array = array
        self.steady = array

    def part(self, block: int, start: int, stop: int) -> Array:
        return self.array[start:stop]


class FillingOutbox(Contribution):
    """A worker's outbox: memory into which the worker may still be copying. `begin` selects the round to read."""

    def __init__(self, outbox: Array, blocks: int, block_elements: int, dtype: np.dtype) -> None:
        header = header_bytes(blocks)
        self._words = memoryview(outbox[:header].view(np.uint64))  # type: ignore[arg-type]
        self._slots = outbox[header:].view(dtype)
        self._blocks = blocks
        self._step = block_elements
        # number of blocks in all rounds before the selected one
        self._first = 0

    def begin(self, round_: int) -> None:
        """Read this round from now on."""
        self._first = (round_ - 1) * self._blocks

    def ready(self, block: int) -> bool:
        return self._words[0] - self._first > block

    def part(self, block: int, start: int, stop: int) -> Array:
        at = self._words[PLACES + block] * self._step + start - block * self._step
        return self._slots[at : at + stop - start]


class Compressed(Contribution):
    """A unit's elements as a compressor has encoded them. `payload` is uint8."""

    coded = True

    def __init__(self, payload: Array, compressor: Compressor) -> None:
        self._payload = payload
        self._compressor = compressor

    def add_to(self, out: Array) -> None:
        self._compressor.decode(self._payload, out, add=True)


class PushedRows(Contribution):
    """Rows of a unit that consists of whole rows, or an empty push to any unit."""

    coded = True
    sparse = True

    def __init__(self, rows: RowSparse) -> None:
        self._rows = rows
        self.empty = isinstance(rows, EmptyPush)

    def add_to(self, out: Array) -> None:
        self._rows.add_to(out.reshape(self._rows.shape))

    def rows(self) -> RowSparse:
        return self._rows


# ---- payloads that come as messages


class MessageBlocks(Contribution):
    """A plain payload that comes from another node block by block."""

    local = False

    def __init__(self, receiver: Receiver, line: MessageLine, worker: int, unit: Unit, frame: Frame) -> None:
        self._receiver = receiver
        self._line = line
        self._worker = worker
        self._unit = unit
        self._round = frame.round
        self._blocks = unit.blocks if frame.coding == Coding.PLAIN else 1
        # number of blocks to ask for at a time, including the one that is needed next
        self._early = max(2, receiver.in_flight // len(unit.contributors))
        # blocks that were asked for but not taken yet; the last one has the number `_asked - 1`
        self._coming: deque[_IncomingBlock] = deque()
        self._asked = 0
        if frame.flags & ALONG:
            data = receiver.buffers.borrow(frame.nbytes, True, sent=True)
            assert data is not None
            self._coming.append(receiver.receive(data, worker, unit.number, False))
            self._asked = 1

    def ready(self, block: int) -> bool:
        """True if this block has arrived. Asks for the block, and for some of the next ones if there is room."""
        while self._asked < min(self._blocks, block + self._early) and self._ask(self._asked == block):
            self._asked += 1
        return block < self._asked and self._receiver.came(self._coming[0])

    def _ask(self, next_one: bool) -> bool:
        """Ask for the next block. Return False if there is no room for it.

        `next_one` is True if the sum needs this block now.
        """
        unit, receiver = self._unit, self._receiver
        due = next_one and unit.position.get(self._worker, unit.turn) == unit.turn
        data = receiver.buffers.borrow(self._nbytes(self._asked), due)
        if data is None:
            return False
        self._coming.append(receiver.receive(data, self._worker, unit.number, due))
        self._line.post(Op.CREDIT, unit.number, self._round, aux=self._asked)
        return True

    def _nbytes(self, block: int) -> int:
        start, stop = self._unit.bounds(block)
        return int((stop - start) * self._unit.stored.itemsize)

    def _take(self) -> Bytes:
        """Return the next block that has arrived. Its memory is reused for the next block that is asked for."""
        came = self._coming.popleft()
        self._receiver.buffers.give_back(came.data, came.due)
        return came.data

    def part(self, block: int, start: int, stop: int) -> Array:
        """Return the elements of this block, which must be ready. They are valid only until another payload is read."""
        return self._take().view(self._unit.stored.dtype)

    def drop(self) -> None:
        """Forget the blocks at the end of a generation. `Receiver.stop` handles blocks that are on their way."""
        self._coming.clear()


class CodedMessage(MessageBlocks):
    """A compressed or row-sparse payload from another node, in one message."""

    coded = True

    def __init__(
        self, receiver: Receiver, line: MessageLine, worker: int, unit: Unit, frame: Frame, read: Read
    ) -> None:
        super().__init__(receiver, line, worker, unit, frame)
        self._size = frame.nbytes
        self._read = read
        self.empty = frame.coding == Coding.NOTHING
        self.sparse = self.empty or frame.coding == Coding.ROWS

    def _nbytes(self, block: int) -> int:
        return self._size

    def part(self, block: int, start: int, stop: int) -> Array:
        raise TypeError("a coded payload has no plain elements")

    def add_to(self, out: Array) -> None:
        self._read(self._take()).add_to(out)

    def rows(self) -> RowSparse:
        """Return the payload as rows. The rows are a copy, because they are kept until the round ends."""
        return self._read(self._take().copy()).rows()


class WholeMessage(Contribution):
    """A payload that is received from another process into memory of its own, even before its turn.

    So a payload that arrives slowly does not occupy a buffer that other payloads need. `read` decodes a coded payload.
    """

    local = False

    def __init__(
        self, receiver: Receiver, line: MessageLine, worker: int, unit: Unit, frame: Frame, read: Read | None
    ) -> None:
        self._receiver = receiver
        self._line = line
        self._worker = worker
        self._unit = unit
        self._frame = frame
        # The token of a push holds the weight of its worker.
        self.quorum_weight = frame.token
        self._read = read
        self._data = np.empty(frame.nbytes, np.uint8)
        step = frame.nbytes if read is not None else unit.block_elements * unit.stored.itemsize
        self._rest = deque(cut_bytes(self._data, step))
        self._coming: deque[_IncomingBlock] = deque()
        self._asked = 0
        if frame.flags & ALONG:
            self._receive()

    def _receive(self) -> None:
        self._coming.append(self._receiver.receive(self._rest.popleft(), self._worker, self._unit.number, False))
        self._asked += 1

    def ready(self, block: int) -> bool:
        """True if the whole payload has arrived. Otherwise asks for more of it."""
        while self._coming and self._receiver.came(self._coming[0]):
            self._coming.popleft()
        while self._rest and len(self._coming) < self._receiver.in_flight:
            self._line.post(Op.CREDIT, self._unit.number, self._frame.round, aux=self._asked)
            self._receive()
        return not self._coming

    def whole(self) -> Array:
        if self._read is None:
            return self._data.view(self._unit.stored.dtype)
        total = np.zeros_like(self._unit.stored)
        self._read(self._data).add_to(total)
        return total


class _IncomingBlock(NamedTuple):
    """A block on its way to the server."""

    request: MPI.Request
    data: Bytes
    due: bool


class _Shipment(NamedTuple):
    """A unit, or rows of it, on its way to a worker. `blocks`: the blocks that have not been sent yet."""

    unit: int
    worker: int
    blocks: Iterator[Bytes]
    in_flight: int
    requests: deque[MPI.Request]


class Receiver:
    """One server's messages with payloads, from and to workers of other nodes."""

    def __init__(self, comm: MPI.Comm, in_flight: int) -> None:
        self.comm = comm
        self.in_flight = in_flight
        self.buffers = Buffers()
        self._shipping: list[_Shipment] = []
        # receives that are not complete
        self._coming: dict[int, MPI.Request] = {}
        # receives from workers that have died
        self._lost: dict[int, MPI.Request] = {}

    # ---- in

    def first(self, unit: Unit, worker: int) -> Callable[[], bool]:
        """Receive first values (SET) into the unit's memory. Return a function that is True once all have arrived."""
        slices = cut_bytes(unit.stored, unit.block_elements * unit.stored.itemsize)
        blocks = deque(self.receive(data, worker, unit.number, False) for data in slices)

        def is_there() -> bool:
            while blocks and self.came(blocks[0]):
                blocks.popleft()
            return not blocks

        return is_there

    def receive(self, data: Bytes, worker: int, unit: int, due: bool) -> _IncomingBlock:
        """Begin to receive a block."""
        request = self.comm.Irecv(data, worker, push_tag(unit))
        self._coming[id(request)] = request
        return _IncomingBlock(request, data, due)

    def came(self, block: _IncomingBlock) -> bool:
        """True if a block has arrived. Stays False if the worker has died first."""
        name = id(block.request)
        # A request is null once it has completed.
        if block.request:
            try:
                if not block.request.Test():
                    return False
            except MPI.Exception as error:
                if not is_death(error):
                    raise
                self._lost[name] = block.request
            del self._coming[name]
        return name not in self._lost

    # ---- out

    def ship(self, unit: Unit, worker: int, rows: NDArray[np.int64] | None = None) -> None:
        """Begin to send a unit, or rows of it.

        If the unit has no copy, it must not change until `delivered` returns it.
        """
        stored = unit.stored if unit.copy is None else unit.copy
        if rows is None:
            blocks: Iterator[Bytes] = iter(cut_bytes(stored, unit.block_elements * stored.itemsize))
        else:
            whole, step = stored.reshape(-1, unit.row_elements), max(1, unit.block_elements // unit.row_elements)
            blocks = (whole[rows[at : at + step]].reshape(-1).view(np.uint8) for at in range(0, len(rows), step))
        # The unit's own memory is sent at once. Rows are copied, so only a few messages with rows are sent at a time.
        shipment = _Shipment(unit.number, worker, blocks, sys.maxsize if rows is None else ROW_MESSAGES, deque())
        self._post(shipment)
        self._shipping.append(shipment)

    def _post(self, shipment: _Shipment) -> None:
        tag = pull_tag(shipment.unit)
        for block in islice(shipment.blocks, shipment.in_flight - len(shipment.requests)):
            shipment.requests.append(send(self.comm, block, shipment.worker, tag))

    def delivered(self) -> list[tuple[int, int]]:
        """Return (unit, worker) for each shipment that has been sent completely since the last call."""
        gone, rest = [], []
        for shipment in self._shipping:
            while shipment.requests and shipment.requests[0].Test():
                shipment.requests.popleft()
                self._post(shipment)
            if shipment.requests:
                rest.append(shipment)
            else:
                gone.append((shipment.unit, shipment.worker))
        self._shipping = rest
        return gone

    # ---- the end

    def done(self, lines: Iterable[Line]) -> bool:
        """True if MPI has completed all sends. Called when all workers have left."""
        self.delivered()
        return not self._shipping and all(line.done() for line in lines if isinstance(line, MessageLine))

    def stop(self, lines: Iterable[Line]) -> None:
        """Give up all receives at the end of a generation.

        First continue for a moment to receive messages from workers, because the workers wait until their messages are
        sent. Discard these messages. Memory that MPI may still use is kept alive.
        """
        distant = [line for line in lines if isinstance(line, MessageLine)]
        dropped: list[MPI.Request] = []
        clock, heard = Clock(), list(distant)
        while heard and clock.seconds() < DRAIN_SECONDS:
            for line in list(heard):
                try:
                    # Also receive, and drop, payloads that follow a frame without a credit.
                    for frame in map(Frame.of, line.read()):
                        unasked = frame.aux if frame.op == Op.SET else int(frame.op == Op.PUSH and frame.flags & ALONG)
                        tag = push_tag(frame.unit)
                        for _ in range(unasked):
                            dropped.append(self.comm.Irecv(np.empty(frame.nbytes, np.uint8), line.peer, tag))
                # The line's worker has died.
                except MPI.Exception:
                    heard.remove(line)
            time.sleep(LOOK_SECONDS)
        receives = [*self._coming.values(), *dropped]
        for request in receives:
            if not is_over(request):
                request.Cancel()
        keep_until_complete([*receives, *(request for shipment in self._shipping for request in shipment.requests)])
        for line in distant:
            line.leave()
        self._coming.clear()
        self._shipping.clear()


class Buffers:
    """Buffers for the blocks that a server receives. `limit` is their total size in bytes: the size of all units."""

    def __init__(self) -> None:
        self.limit = self.held = 0
        self._due = 0
        self._spare: list[Bytes] = []

    def borrow(self, nbytes: int, due: bool, sent: bool = False) -> Bytes | None:
        """Return a buffer, or None if there is no room.

        Args:
            due: True if a sum needs this block next.
            sent: True if the worker has sent the block already. The block then gets a buffer even if there is no room.
        """
        room = self.limit if due else self.limit // 2
        if self.held + nbytes > room and not sent and (not due or self._due):
            return None
        self.held += nbytes
        self._due += due and not sent
        for index, spare in enumerate(self._spare):
            if spare.size == nbytes:
                return self._spare.pop(index)
        return np.empty(nbytes, np.uint8)

    def give_back(self, buffer: Bytes, due: bool) -> None:
        """Give back a buffer. Its content stays valid until the next `borrow`."""
        self.held -= buffer.size
        self._due -= due
        if len(self._spare) < KEPT:
            self._spare.append(buffer)
