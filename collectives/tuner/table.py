"""The table of limits that decides which way a call goes, by its kind, bytes and ranks: what `auto` picks.

`node.executor` applies it on one node, where arrays in node-shared memory go direct; `runner` between nodes.

`mpips tune` (`collectives.tuner.tune`) writes it to the user's cache folder; without one the shipped values serve.
What they say of one node was measured on two cores of an AMD EPYC, the ways by the kernel's copies apart, which are
guesses. What they say of several nodes (SHIPPED_BETWEEN, `far`) is a guess after the closed forms. Rank 0's table
counts for all ranks of a communicator, so that all pick the same. By its costs `simulator.simulate.predict_seconds`
tells how long a call should take.
"""

from __future__ import annotations

import errno
import math
import os
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import msgspec
import numpy as np
from mpi4py import MPI

from mpips.collectives import files
from mpips.collectives.errors import CollectiveError, warn
from mpips.collectives.schedule.model import KINDS

See: TypeAlias = "Callable[[str, str], None]"
"""ValueError where no algorithm of the second name serves the kind of the first."""
EVERYTHING = 1 << 62
WAYS = "slots", "stages", "cross_memory", "direct"
"""Of an allreduce on one node."""


class Range(msgspec.Struct, frozen=True):
    """Vectors of up to `most` bytes, and what serves them best."""

    most: int
    algorithm: str


class LinearCost(msgspec.Struct, frozen=True):
    """seconds = alpha + beta bytes."""

    alpha: float
    beta: float


class Slots(msgspec.Struct, frozen=True):
    """Largest vectors, in bytes, that pass through slots: of any arrays, and of ordinary ones on all ranks."""

    always: int
    ordinary: int


SHIPPED_SLOTS: dict[int, Slots] = {
    2: Slots(16 << 10, 64 << 10),
    4: Slots(16 << 10, 64 << 10),
    8: Slots(8 << 10, 16 << 10),
}
CROWDED = 64 << 10, 512 << 10
"""Bytes of a rank, and of all together. Where ranks share cores, the meetings that slots save cost more than reading
as many."""
SHIPPED_CROSS_MEMORY = 4 << 20
"""Measured with 2 and 4 ranks on two cores. Where other work has emptied the caches between calls, the kernel's copies
are faster from some 256 KiB on."""
SHIPPED_MEMORY: dict[str, LinearCost] = {
    "slots 2": LinearCost(1.1e-6, 7.4e-11),
    "slots 4": LinearCost(6.5e-6, 2.8e-10),
    "direct 2": LinearCost(2.5e-6, 5.8e-11),
    "direct 4": LinearCost(16e-6, 1.2e-10),
    "stages 2": LinearCost(2.6e-6, 7.7e-11),
    "stages 4": LinearCost(18e-6, 1.9e-10),
    "cross_memory 2": LinearCost(1e-5, 8e-11),
    "cross_memory 4": LinearCost(4e-5, 2e-10),
}
SHIPPED_BETWEEN: dict[str, tuple[Range, ...]] = {
    "allreduce": (Range(32 << 10, "recursive_doubling"), Range(EVERYTHING, "hierarchical")),
    "reduce_scatter": (Range(32 << 10, "direct"), Range(EVERYTHING, "ring")),
    "allgather": (Range(32 << 10, "direct"), Range(EVERYTHING, "ring")),
    "broadcast": (Range(32 << 10, "binomial"), Range(EVERYTHING, "ring")),
    "reduce": (Range(32 << 10, "binomial"), Range(EVERYTHING, "ring")),
    "alltoall": (Range(EVERYTHING, "direct"),),
}


class TuningTable(msgspec.Struct, frozen=True):
    """Measurements of this machine, by the number of ranks (of one node, or NODESxRANKS between nodes).

    On one node:
    `slots`          vectors of up to so many bytes pass through slots (see `Slots`);
    `cross_memory`   ordinary arrays go by the kernel's copies between processes, and not through stages, where the
                     whole vector has at least so many bytes;
    `memory`         "WAY RANKS" -> time of an allreduce by slots, stages, cross_memory or direct.
    Between nodes:
    `between`        "KIND NODESxRANKS" -> algorithms by size.
    Both:
    `near`, `far`, `gamma`   cost of a message inside a node and between nodes, and of adding a byte.
    """

    slots: dict[int, Slots] = {}
    cross_memory: dict[int, int] = {}
    between: dict[str, tuple[Range, ...]] = {}
    memory: dict[str, LinearCost] = msgspec.field(default_factory=SHIPPED_MEMORY.copy)
    near: LinearCost = LinearCost(6e-7, 1.2e-10)
    far: LinearCost = LinearCost(2e-5, 1e-9)
    gamma: float = 5e-11

    def slot_limits(self, ranks: int, crowded: bool) -> Slots:
        """Return the largest vectors that go through slots; `crowded` where ranks share cores, which a measurement
        knows."""
        if ranks in self.slots:
            return self.slots[ranks]
        if crowded:
            limit = min(CROWDED[0], CROWDED[1] // ranks)
            return Slots(limit, limit)
        return SHIPPED_SLOTS[min(SHIPPED_SLOTS, key=lambda known: abs(known - ranks))]

    def cross_memory_from(self, ranks: int) -> int:
        """Return the bytes of the whole vector from which on ordinary arrays go by the kernel's copies between
        processes, whether ranks share cores or not."""
        return self.cross_memory.get(ranks, SHIPPED_CROSS_MEMORY)

    def best_between(self, kind: str, nodes: int, ranks: int, nbytes: int) -> str:
        """Return the algorithm for ranks on several nodes."""
        ranges = self.between.get(f"{kind} {nodes}x{ranks}", SHIPPED_BETWEEN[kind])
        return next(entry.algorithm for entry in ranges if nbytes <= entry.most)


def path() -> Path:
    """Return where the user's table is kept: $XDG_CACHE_HOME/mpips/collectives.json, by default under ~/.cache."""
    home = Path(os.path.expanduser("~"))  # "~" for a user without one
    caches = os.environ.get("XDG_CACHE_HOME") or (home if home.is_absolute() else Path("/nonexistent")) / ".cache"
    return Path(caches) / "mpips" / "collectives.json"


def load(see: See) -> TuningTable:
    """Return the user's table, or the shipped one where `tune` has not run; CollectiveError where the file is spoilt.
    `see` is `schedule.catalog.see_named`."""
    file = path()
    try:
        return _checked(msgspec.json.decode(file.read_bytes(), type=TuningTable), see)
    except (FileNotFoundError, NotADirectoryError):
        return TuningTable()
    except (msgspec.MsgspecError, ValueError, RecursionError, OSError) as error:
        raise CollectiveError(f"cannot read {file}: {error}; delete it, or make another with `mpips tune`") from error


def _checked(table: TuningTable, see: See) -> TuningTable:
    """Return the same; ValueError where an entry is none that `tune` writes."""
    for ranks, limit in (*((ranks, slots.always) for ranks, slots in table.slots.items()), *table.cross_memory.items()):
        if ranks < 1 or not 0 <= limit <= EVERYTHING:
            raise ValueError(f"of {ranks} ranks it says {limit} bytes")
    if any(slots.ordinary < slots.always for slots in table.slots.values()):
        raise ValueError("fewer ordinary arrays go through slots than any arrays")
    lines = {"near": table.near, "far": table.far, "gamma": LinearCost(0.0, table.gamma), **table.memory}
    for name, line in lines.items():
        if name in table.memory and not re.fullmatch(rf"({'|'.join(WAYS)}) [1-9]\d{{0,6}}", name):
            raise ValueError(f"{name!r} is no way and number of ranks")
        if not (0 <= line.alpha < math.inf and 0 <= line.beta < math.inf):
            raise ValueError(f"{name} takes {line.alpha} s and {line.beta} s a byte")
    for key, ranges in table.between.items():
        kind = key.partition(" ")[0]
        if kind not in KINDS or not re.fullmatch(r"\w+ [1-9]\d{0,6}x[1-9]\d{0,6}", key):
            raise ValueError(f"{key!r} is no collective, nodes and ranks")
        if not ranges or ranges[-1].most < EVERYTHING:
            raise ValueError(f"{key} has no algorithm for long vectors")
        for each in ranges:
            see(kind, each.algorithm)
    return table


def usable(see: See) -> TuningTable:
    """Return the user's table; where its file is spoilt, a RuntimeWarning and the shipped one: nobody needs a cache."""
    try:
        return load(see)
    except CollectiveError as error:
        warn(f"{error}; the shipped table serves")
        return TuningTable()


def save(table: TuningTable) -> Path:
    """Write the table for later runs; gives back where. CollectiveError where it cannot be written."""
    file = path()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        files.write(file, msgspec.json.format(msgspec.json.encode(table)))
    except OSError as error:
        raise _unwritable(file, error) from error
    return file


def see_writable() -> None:
    """Make the folder that `save` writes to; CollectiveError where it cannot be written."""
    file = path()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=file.parent):
            pass
        if file.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    except OSError as error:
        raise _unwritable(file, error) from error


def _unwritable(file: Path, error: OSError) -> CollectiveError:
    return CollectiveError(f"cannot write {file}: {error.strerror}; set XDG_CACHE_HOME to a folder that can be written")


def shared(comm: MPI.Comm, read: Callable[[], TuningTable]) -> TuningTable:
    """Rank 0's table, as `read` there gives it, on every rank, or its CollectiveError. Collective, blocking."""
    message = b""
    if comm.rank == 0:
        try:
            message = b"+" + msgspec.json.encode(read())
        except CollectiveError as error:
            message = b"-" + str(error).encode()
    size = np.array([len(message)], np.int64)
    comm.Bcast(size)
    raw = np.frombuffer(message, np.uint8).copy() if comm.rank == 0 else np.empty(int(size[0]), np.uint8)
    comm.Bcast(raw)
    answer = raw.tobytes()
    if answer[:1] == b"-":
        raise CollectiveError(answer[1:].decode())
    return msgspec.json.decode(answer[1:], type=TuningTable)
