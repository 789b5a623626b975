"""The tuning table: `auto` looks up how to run a call, by its kind, its bytes and the number of ranks.

Between nodes, `runner` looks up an algorithm. On one node, `node.executor` looks up a *way* to move the data:

    slots          through small buffers in node-shared memory, for short vectors;
    stages         through buffers in node-shared memory, block by block, for ordinary arrays;
    cross_memory   by the kernel, which copies between the processes, for ordinary arrays;
    direct         without copies, for arrays in node-shared memory that are too long for slots.

`mpips tune` (`collectives.tuner.tune`) writes a table to the user's cache folder. Without such a table the values in
this module are used. The values for one node were measured on two cores of an AMD EPYC, except the times of the
kernel's copies, which are guesses. The values for several nodes (SHIPPED_BETWEEN, `far`) are guesses from the closed
forms.

All ranks of a communicator use rank 0's table, because they must choose the same way.
`simulator.simulate.predict_seconds` predicts the time of a call from the costs in the table.
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

# check(kind, algorithm): raises ValueError if there is no such algorithm for the kind
Check: TypeAlias = "Callable[[str, str], None]"
EVERYTHING = 1 << 62
# how an allreduce on one node can move its data; see the module's docstring
WAYS = "slots", "stages", "cross_memory", "direct"


class Range(msgspec.Struct, frozen=True):
    """The fastest algorithm for vectors of up to `most` bytes."""

    most: int
    algorithm: str


class LinearCost(msgspec.Struct, frozen=True):
    """The cost of an operation on b bytes: alpha + beta b seconds."""

    alpha: float
    beta: float


class Slots(msgspec.Struct, frozen=True):
    """The sizes in bytes up to which vectors pass through slots.

    Attributes:
        always: The limit for arrays of any kind.
        ordinary: The limit if the arrays of all ranks are ordinary, not node-shared. It is at least `always`.
    """

    always: int
    ordinary: int


SHIPPED_SLOTS: dict[int, Slots] = {
    2: Slots(2 << 10, 64 << 10),
    4: Slots(2 << 10, 64 << 10),
    8: Slots(2 << 10, 16 << 10),
}
# The limits of slots for ordinary arrays if ranks share cores: the bytes of a rank's vector, and those of all vectors.
# Calls through slots need fewer barriers. On shared cores, barriers are so slow that up to this size it is faster to
# read all vectors from the slots.
CROWDED = 64 << 10, 512 << 10
# the limit of slots for arrays of any kind if ranks share cores
CROWDED_ALWAYS = 2 << 10
# Measured with 2 and 4 ranks on two cores. If other work empties the caches between calls, the kernel's copies are
# faster from some 256 KiB on.
SHIPPED_CROSS_MEMORY = 4 << 20
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
    """Measurements of this machine.

    Attributes:
        slots: On one node: number of ranks -> limits of vectors that pass through slots.
        cross_memory: On one node: number of ranks -> bytes of the whole vector from which on the kernel copies ordinary
            arrays between processes. Shorter arrays pass through stages or slots.
        between: Between nodes: "KIND NODESxRANKS" -> algorithms by size.
        memory: On one node: "WAY RANKS" -> the cost of an allreduce by this way (one of `WAYS`).
        near: The cost of a message inside a node.
        far: The cost of a message between nodes.
        gamma: The seconds to add a byte.
    """

    slots: dict[int, Slots] = {}
    cross_memory: dict[int, int] = {}
    between: dict[str, tuple[Range, ...]] = {}
    memory: dict[str, LinearCost] = msgspec.field(default_factory=SHIPPED_MEMORY.copy)
    near: LinearCost = LinearCost(6e-7, 1.2e-10)
    far: LinearCost = LinearCost(2e-5, 1e-9)
    gamma: float = 5e-11

    def slot_limits(self, ranks: int, crowded: bool) -> Slots:
        """Return the limits of vectors that pass through slots.

        `crowded` is True if ranks share cores. It matters only if the table has no result for this number of ranks.
        """
        if ranks in self.slots:
            return self.slots[ranks]
        if crowded:
            limit = min(CROWDED[0], CROWDED[1] // ranks)
            return Slots(min(limit, CROWDED_ALWAYS), limit)
        return SHIPPED_SLOTS[min(SHIPPED_SLOTS, key=lambda known: abs(known - ranks))]

    def cross_memory_from(self, ranks: int) -> int:
        """Return the size, in bytes of the whole vector, from which on the kernel copies ordinary arrays.

        The limit is the same whether or not ranks share cores.
        """
        return self.cross_memory.get(ranks, SHIPPED_CROSS_MEMORY)

    def best_between(self, kind: str, nodes: int, ranks: int, nbytes: int) -> str:
        """Return the fastest algorithm for a call of ranks on several nodes."""
        ranges = self.between.get(f"{kind} {nodes}x{ranks}", SHIPPED_BETWEEN[kind])
        return next(entry.algorithm for entry in ranges if nbytes <= entry.most)


def path() -> Path:
    """Return the path of the user's table: $XDG_CACHE_HOME/mpips/collectives.json, by default under ~/.cache."""
    # For a user without a home folder, expanduser returns "~".
    home = Path(os.path.expanduser("~"))
    caches = os.environ.get("XDG_CACHE_HOME") or (home if home.is_absolute() else Path("/nonexistent")) / ".cache"
    return Path(caches) / "mpips" / "collectives.json"


def load(check: Check) -> TuningTable:
    """Return the user's table, or the shipped table if `mpips tune` has not run.

    Args:
        check: `schedule.catalog.check_algorithm`.

    Raises:
        CollectiveError: The file cannot be read, or is damaged.
    """
    file = path()
    try:
        return _check_entries(msgspec.json.decode(file.read_bytes(), type=TuningTable), check)
    except (FileNotFoundError, NotADirectoryError):
        return TuningTable()
    except (msgspec.MsgspecError, ValueError, RecursionError, OSError) as error:
        raise CollectiveError(f"cannot read {file}: {error}; delete it, or make another with `mpips tune`") from error


def _check_entries(table: TuningTable, check: Check) -> TuningTable:
    """Return the table, or raise ValueError if it has an entry that `mpips tune` would not write."""
    for ranks, limit in (*((ranks, slots.always) for ranks, slots in table.slots.items()), *table.cross_memory.items()):
        if ranks < 1 or not 0 <= limit <= EVERYTHING:
            raise ValueError(f"for {ranks} ranks it has a limit of {limit} bytes")
    if any(slots.ordinary < slots.always for slots in table.slots.values()):
        raise ValueError("its limit for ordinary arrays in slots is below that for all arrays")
    lines = {"near": table.near, "far": table.far, "gamma": LinearCost(0.0, table.gamma), **table.memory}
    for name, line in lines.items():
        if name in table.memory and not re.fullmatch(rf"({'|'.join(WAYS)}) [1-9]\d{{0,6}}", name):
            raise ValueError(f"{name!r} is not a way and a number of ranks")
        if not (0 <= line.alpha < math.inf and 0 <= line.beta < math.inf):
            raise ValueError(f"{name} takes {line.alpha} s and {line.beta} s a byte")
    for key, ranges in table.between.items():
        kind = key.partition(" ")[0]
        if kind not in KINDS or not re.fullmatch(r"\w+ [1-9]\d{0,6}x[1-9]\d{0,6}", key):
            raise ValueError(f"{key!r} is not a collective, nodes and ranks")
        if not ranges or ranges[-1].most < EVERYTHING:
            raise ValueError(f"{key} has no algorithm for long vectors")
        for each in ranges:
            check(kind, each.algorithm)
    return table


def load_or_warn(check: Check) -> TuningTable:
    """Return the user's table. If its file is damaged, warn and return the shipped table, so that the job can go on."""
    try:
        return load(check)
    except CollectiveError as error:
        warn(f"{error}; using the shipped table")
        return TuningTable()


def save(table: TuningTable) -> Path:
    """Write a table for later runs. Return its path, or raise CollectiveError if it cannot be written."""
    file = path()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        files.write(file, msgspec.json.format(msgspec.json.encode(table)))
    except OSError as error:
        raise _unwritable(file, error) from error
    return file


def check_writable() -> None:
    """Make the folder that `save` writes to. Raise CollectiveError if the table cannot be written there."""
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


def broadcast_table(comm: MPI.Comm, read: Callable[[], TuningTable]) -> TuningTable:
    """Return rank 0's table on every rank. Collective and blocking.

    Args:
        read: Reads the table; called on rank 0 only.

    Raises:
        CollectiveError: `read` has raised this error on rank 0. All ranks raise the same error.
    """
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
