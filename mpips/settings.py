"""What all keys of a store with servers have in common: optimizer, compression, and their state to be saved."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

import collectives
from collectives.errors import of_caller
from mpips import messages, optimizers
from mpips.compression import Compressor
from mpips.keys import Key, Part
from mpips.optimizers import Optimizer
from mpips.placing import Placing
from mpips.session import Task

Array = NDArray[Any]


class Settings(Placing):
    """Settings that the workers make together, and state that goes to files and comes back."""

    def settle(self, keys: Sequence[Key]) -> Task:
        """Wait until the servers have read everything that this worker has pushed, and if asynchronous, applied it."""
        if self.layout.asynchronous:
            for server in range(self.layout.num_servers):
                yield from self.session.request(server, messages.Flush())
            return
        for key in keys:
            yield from self.session.drained(key, key.round, key.pushes, alone=False)

    def set_optimizer(self, optimizer: Optimizer) -> Task:
        yield from self._tell("set_optimizer", messages.SetOptimizer(optimizers.encode(optimizer)))
        self._updated = True
        self.session.for_each_key(self._shorten)

    def check_updated(self, what: str) -> None:
        """ValueError where nothing would apply a push."""
        if not self._updated:
            raise of_caller(ValueError(f"{what}: an asynchronous store needs an optimizer; call set_optimizer first"))

    def set_compression(self, options: dict[str, Any], compressor: Compressor) -> Task:
        """From the next push on; residuals start at zero."""
        self._compressor = compressor
        self._residuals.clear()
        self.session.for_each_key(self._shorten)
        yield from self._tell("set_gradient_compression", messages.SetCompression(options))

    def _tell(self, what: str, request: Any) -> Task:
        """Rank 0 tells all servers; nobody goes on before they have done it."""
        yield from self._from_rank_0(self._told(request), what)

    def _told(self, request: Any) -> Task:
        for server in range(self.layout.num_servers):
            yield from self.session.request(server, request)

    def states(self, keys: Sequence[Key]) -> Generator[bool | None, None, dict[Any, tuple[int, list[Array]]]]:
        """Each key's step and optimizer state, put together from all servers; on rank 0 only."""
        found: dict[int, messages.StatePart] = {}
        asked = ((self._get_state(part, found), _nbytes(key, part)) for key in keys for part in key.parts)
        yield from self.session.in_window(asked)
        return {key.name: _joined([found[part.number] for part in key.parts]) for key in keys}

    def _get_state(self, part: Part, found: dict[int, messages.StatePart]) -> Task:
        found[part.number] = yield from self.session.request(part.server, messages.GetState(part.number))

    def put_states(self, keys: Sequence[Key], states: dict[Any, tuple[int, list[Array]]]) -> Task:
        """Give every unit its part of the states; on rank 0 only."""
        told = (
            (self._put_state(part, *states[key.name]), _nbytes(key, part)) for key in keys for part in key.parts
        )
        yield from self.session.in_window(told)

    def _put_state(self, part: Part, step: int, arrays: list[Array]) -> Task:
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


def _nbytes(key: Key, part: Part) -> int:
    """Bytes of a unit's state, at most: no optimizer keeps more than two arrays."""
    return 2 * (part.stop - part.start) * key.dtype.itemsize


def _joined(parts: list[messages.StatePart]) -> tuple[int, list[Array]]:
    """A key's step and state from those of its units; one that was not updated yet has none."""
    pieces = [
        [np.frombuffer(data, messages.dtype_of(name)) for data, name in zip(part.arrays, part.dtypes)] for part in parts
    ]
    slots = max(len(piece) for piece in pieces)
    return max(part.step for part in parts), [np.concatenate([piece[i] for piece in pieces]) for i in range(slots)]
