"""Push and pull whole keys, either as a single worker (`SingleWorker`) or as a member of a client (`Client`).

A *client* is a group of workers, its *members*, that sum their gradients before they push. With masters="one" rank 0 of
the client pushes the members' sum, and broadcasts the values that it pulls (the paper, section 4.2). With masters="all"
the client does a reduce-scatter, every member pushes and pulls its own slice, and an allgather puts the slices
together. Between nodes the client handles a key piece by piece, so that these steps overlap.

If a client of a synchronous store is on one node with all servers, each member pulls by reading the servers' memory.

Small keys of one list travel as one vector (`VectorMemory`), because the cost of a collective of a small key is mostly
latency (MG-WFBP, section 4, merges small gradients for the same reason). Servers and optimizers still see every key by
itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np

from mpips.collectives.fabric import arena
from mpips.collectives.fabric.tasks import Task, run_together
from mpips.store.keys.key import Array, Key, Piece
from mpips.store.remote.members import ClientCall, Members, label
from mpips.store.remote.sparse import RowTransfers
from mpips.store.remote.transfers import Pull, Push
from mpips.store.roles import Layout


class SingleWorker(RowTransfers):
    """The pushes and pulls of a worker that is not in a client.

    `one_node`: True if all workers and servers share a node.
    """

    def __init__(self, layout: Layout, push: Push, pull: Pull, one_node: bool) -> None:
        super().__init__(layout, push, pull, None)
        self._one_node = one_node

    def push(self, keys: Sequence[Key], flats: Sequence[Array], priority: int) -> Task[None]:
        """Push all keys. The task sends every key before it waits for any of them."""
        return run_together(
            [self._push.push_part(key, 0, flat, priority, key.pushes) for key, flat in zip(keys, flats)]
        )

    def pull(self, keys: Sequence[Key], outs: Sequence[Array]) -> Task[None]:
        """Pull all keys. The task asks for every key before it waits for any of them."""
        return run_together([self._pull.pull_part(key, out, key.shards) for key, out in zip(keys, outs)])

    def pushpull(self, keys: Sequence[Key], flats: Sequence[Array], outs: Sequence[Array], priority: int) -> Task[None]:
        """Push and pull all keys. Keys do not wait for each other."""
        each = zip(keys, flats, outs, strict=True)
        return run_together([self._pushpull_key(key, flat, out, priority) for key, flat, out in each])

    def _pushpull_key(self, key: Key, flat: Array, out: Array, priority: int) -> Task[None]:
        """Push and pull a key. Between nodes, push later pieces while the answers to earlier pieces arrive."""
        if self._one_node or self._asynchronous or len(key.pieces) == 1:
            # If the arrays overlap, writing the first elements of the result may destroy later elements of `flat` that
            # servers still have to read. So wait until they have read `flat`.
            wait = self._asynchronous or (out is not flat and np.may_share_memory(flat, out))
            yield from self._push.push_part(key, 0, flat, priority, key.pushes, wait=wait)
            yield from self._pull.pull_part(key, out, key.shards)
            return
        key.round = round_ = key.round + 1
        pushes = [self._push.push_part(key, round_, flat, priority, piece.pushes, wait=False) for piece in key.pieces]
        pairs = zip(key.pieces, pushes, strict=True)
        yield from run_together([self._pull.exchange(key, push, out, piece.pushes) for piece, push in pairs])


class Client(RowTransfers):
    """The pushes and pulls of one member of a client with several members.

    `direct`: True if every member pulls by reading the servers' memory.
    """

    def __init__(self, layout: Layout, push: Push, pull: Pull, members: Members, direct: bool) -> None:
        super().__init__(layout, push, pull, members)
        self._direct = direct
        self._rank = members.rank
        self._all = layout.options.masters == "all"
        self._call = members.call
        self._abreast = 1 if members.one_node else layout.options.chunks_in_flight
        self._vectors = VectorMemory(members.one_node)

    # ---- one key

    def push_key(self, key: Key, flat: Array, priority: int) -> Task[None]:
        """Contribute the members' sum of `flat` (1-D) to the key's next round."""
        key.round += 1
        call = self._call(label("push", [key]))
        yield from call.run(self._some([self._push_piece(call, key, piece, flat, priority) for piece in key.pieces]))

    def _pull_key(self, key: Key, out: Array) -> Task[None]:
        """Read the key into `out` (1-D), in a client that is not `direct`."""
        call = self._call(label("pull", [key]))
        yield from call.run(self._some([self._pull_piece(call, key, piece, out) for piece in key.pieces]))

    def _pushpull_key(self, key: Key, flat: Array, out: Array, priority: int) -> Task[None]:
        """Push and pull, in a client that is not `direct`. Pieces do not wait for each other."""
        key.round += 1
        call = self._call(label("pushpull", [key]))
        yield from call.run(self._some([self._through(call, key, piece, flat, out, priority) for piece in key.pieces]))

    def _through(self, call: ClientCall, key: Key, piece: Piece, flat: Array, out: Array, priority: int) -> Task[None]:
        yield from self._push_piece(call, key, piece, flat, priority)
        yield from self._pull_piece(call, key, piece, out)

    def _push_piece(self, call: ClientCall, key: Key, piece: Piece, flat: Array, priority: int) -> Task[None]:
        """Sum a piece over the members, and push the part of the sum that this member owns, without copying it."""
        start, stop = piece.cuts[0], piece.cuts[-1]
        flat = flat[start:stop]
        if self._all:
            start, stop = piece.cuts[self._rank], piece.cuts[self._rank + 1]
        total = None
        if self._all or self._rank == 0:
            if piece.reduced is None:
                piece.reduced = arena.empty(stop - start, key.dtype)
            total = piece.reduced
            yield from self._push.wait_until_read(key.round - 1, piece.pushes)
        if self._all:
            assert total is not None
            yield from call.reduce_scatter(piece, flat, total)
        else:
            yield from call.reduce(piece, flat, total)
        if total is not None:
            yield from call.agreed()
            yield from self._push.push_part(key, key.round, total, priority, piece.pushes, start, wait=False, own=True)

    def _pull_piece(self, call: ClientCall, key: Key, piece: Piece, out: Array) -> Task[None]:
        """Read the part of a piece that this member owns. Then exchange parts, so that all members have the piece."""
        if piece.pushes:
            yield from self._pull.pull_part(key, out, piece.pushes)
        whole = out[piece.cuts[0] : piece.cuts[-1]]
        yield from call.allgather(piece, whole) if self._all else call.broadcast(piece, whole)

    def _some(self, tasks: list[Task[None]]) -> Task[None]:
        """Run tasks in order: one at a time on one node, a few at a time between nodes.

        Between nodes tasks can overlap, because each has its own message tags.
        """
        return run_together(tasks, self._abreast)

    # ---- lists

    def push(self, keys: Sequence[Key], flats: Sequence[Array], priority: int) -> Task[None]:
        """Push keys in this order. Small keys of one dtype travel as one vector."""
        for chosen in self._steps(keys):
            if len(chosen) > 1:
                yield from self._push_vector([keys[i] for i in chosen], [flats[i] for i in chosen], priority)
                continue
            key, flat = keys[chosen[0]], flats[chosen[0]]
            left = self.push_key(key, flat, priority) if key.fast is None else key.fast.post(flat, priority)
            if left is not None:
                yield from left

    def pull(self, keys: Sequence[Key], outs: Sequence[Array]) -> Task[None]:
        """Pull keys in this order."""
        if self._direct:
            yield from run_together(self._read_directly(keys, outs))
            return
        for chosen in self._steps(keys):
            if len(chosen) == 1:
                yield from self._pull_key(keys[chosen[0]], outs[chosen[0]])
            else:
                yield from self._pull_vector([keys[i] for i in chosen], [outs[i] for i in chosen])

    def _read_directly(self, keys: Sequence[Key], outs: Sequence[Array]) -> list[Task[None]]:
        """Pull keys one by one until a pull would have to wait. Return tasks for that key and all later keys."""
        left: list[Task[None]] = []
        for key, out in zip(keys, outs, strict=True):
            task = self._pull.pull_part(key, out, key.shards) if left or key.fast is None else key.fast.pull(out)
            if task is not None:
                left.append(task)
        return left

    def pushpull(self, keys: Sequence[Key], flats: Sequence[Array], outs: Sequence[Array], priority: int) -> Task[None]:
        """Push and pull keys in this order.

        In a `direct` client all keys are pushed before the first is pulled. Otherwise a key that is not in a vector is
        pulled right after its push, and keys in vectors are pulled at the end.
        """
        if self._direct:
            yield from self.push(keys, flats, priority)
            yield from self.pull(keys, outs)
            return
        chosen_together = []
        for chosen in self._steps(keys):
            if len(chosen) == 1:
                yield from self._pushpull_key(keys[chosen[0]], flats[chosen[0]], outs[chosen[0]], priority)
            else:
                yield from self._push_vector([keys[i] for i in chosen], [flats[i] for i in chosen], priority)
                chosen_together.append(chosen)
        for chosen in chosen_together:
            yield from self._pull_vector([keys[i] for i in chosen], [outs[i] for i in chosen])

    def _steps(self, keys: Sequence[Key]) -> Sequence[Sequence[int]]:
        """Return the indices of the keys in groups. The keys of a group are sent together, and groups in this order."""
        if self._all:
            return [[place] for place in range(len(keys))]
        return steps(keys)

    def _push_vector(self, keys: Sequence[Key], flats: Sequence[Array], priority: int) -> Task[None]:
        """Push keys of one dtype. The members sum their arrays as one vector."""
        vector, total, parts = self._vectors.lay(flats)
        for key in keys:
            key.round += 1
        call = self._call(label("push", keys))
        master = self._rank == 0
        yield from call.run(call.reduce(keys[0].pieces[0], vector, total if master else None))
        if master:
            for key in keys:
                yield from self._push.wait_until_read(key.round - 1, key.pushes)
            pairs = zip(keys, parts, strict=True)
            yield from run_together(
                [self._push.push_part(key, key.round, part, priority, key.pushes, own=True) for key, part in pairs]
            )

    def _pull_vector(self, keys: Sequence[Key], outs: Sequence[Array]) -> Task[None]:
        """Read keys of one dtype. Rank 0 broadcasts their values as one vector."""
        vector, _, slices = self._vectors.room(outs)
        call = self._call(label("pull", keys))
        if self._rank == 0:
            pairs = zip(keys, slices, strict=True)
            yield from run_together([self._pull.pull_part(key, vector[each], key.shards) for key, each in pairs])
        yield from call.run(call.broadcast(keys[0].pieces[0], vector))
        for out, each in zip(outs, slices, strict=True):
            out[...] = vector[each]


# True or False, for keys with or without a fast path -> the largest size in bytes of a key that travels in a vector. A
# longer key travels alone, because a copy into the vector takes as much time as the vector saves.
SMALL_BYTES = {True: 1 << 14, False: 1 << 16}
# the largest size of a vector, in bytes
MOST_BYTES = 1 << 20


def steps(keys: Sequence[Key]) -> list[list[int]]:
    """Return groups of indices of keys. The keys of a group travel together, and the groups in this order.

    For equal `keys` every worker gets an equal result.
    """
    result: list[list[int]] = []
    open_: dict[np.dtype, tuple[list[int], int]] = {}
    for place, key in enumerate(keys):
        if not 0 < key.nbytes <= SMALL_BYTES[key.fast is not None]:
            result.append([place])
            continue
        step, nbytes = open_.get(key.dtype, ([], 0))
        if not step or nbytes + key.nbytes > MOST_BYTES:
            step, nbytes = [], 0
            result.append(step)
        step.append(place)
        open_[key.dtype] = step, nbytes + key.nbytes
    return result


class VectorMemory:
    """Memory for the vector in which small keys travel together, and for the vector's sum. Every call reuses it.

    `shared`: True to allocate the vector in memory that all processes of the node can read.
    """

    def __init__(self, shared: bool) -> None:
        self._empty = arena.empty if shared else np.empty
        self._memory: dict[np.dtype, tuple[Array, Array]] = {}

    def room(self, like: Sequence[Array]) -> tuple[Array, Array, list[slice]]:
        """Return a vector for all these 1-D arrays of one dtype, a vector for its sum, and the slice of each array."""
        dtype, cuts = like[0].dtype, [0, *accumulate(array.size for array in like)]
        if dtype not in self._memory or self._memory[dtype][0].size < cuts[-1]:
            size = max(cuts[-1], MOST_BYTES // dtype.itemsize)
            try:
                vector = self._empty(size, dtype)
            # The node's shared memory is full. Collectives also accept ordinary memory.
            except MemoryError:
                vector = np.empty(size, dtype)
            self._memory[dtype] = vector, np.empty(size, dtype)
        vector, total = (memory[: cuts[-1]] for memory in self._memory[dtype])
        return vector, total, [slice(*ends) for ends in pairwise(cuts)]

    def lay(self, values: Sequence[Array]) -> tuple[Array, Array, list[Array]]:
        """Copy arrays into a vector. Return the vector, the memory for its sum, and each array's part of the sum."""
        vector, total, slices = self.room(values)
        np.concatenate(values, out=vector)
        return vector, total, [total[each] for each in slices]
