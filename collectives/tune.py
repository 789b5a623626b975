"""What `auto` picks: a small table."""

from __future__ import annotations

from typing import Any, NamedTuple

from mpi4py import MPI


class Table(NamedTuple):
    """`eager_bytes[i]`: vectors up to this size go through slots when 2, 3-4, 5-8, more ranks share the node.
    `between`: (up to so many bytes, algorithm) for ranks on several nodes, ascending; the last serves all above."""

    eager_bytes: tuple[int, ...] = (32 << 10, 16 << 10, 8 << 10, 4 << 10)
    between: tuple[tuple[int, str], ...] = ((32 << 10, "native"), (1 << 62, "ring"))

    def between_nodes(self, nbytes: int) -> str:
        """The algorithm for a vector of so many bytes between ranks on several nodes."""
        return next(name for most, name in self.between if nbytes <= most)

    def eager(self, ranks: int) -> int:
        return self.eager_bytes[min(len(self.eager_bytes) - 1, max(0, (ranks - 1).bit_length() - 1))]


def shared_table(comm: MPI.Comm) -> Table:
    """The table of rank 0, on every rank. Collective."""
    return Table()


def predict(table: Table, call: Any, nodes: int) -> float | None:
    return None
