"""Ranks that have not been heard yet, as their Python is just starting: found among our descendants.

One that ends before it could say that it is there is missed by the others for ever, while they start MPI.
"""

from __future__ import annotations

import os
import select
from collections.abc import Container, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from launch.running import descendants
from launch.running.presence import Death, status_of
from mpips.store.world import launched_as


class Unheard:
    """The processes of this machine that a launcher has made ranks, with these variables of the job among theirs."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._mark = {f"{name}={value}" for name, value in environment.items()}
        self._known: dict[int, tuple[int, int]] = {}
        """Of each process the rank, and a descriptor (pidfd) by which it is seen to end."""

    def ranks(self) -> set[int]:
        """Return the ranks that were there at the last look."""
        return {rank for rank, _ in self._known.values()}

    def look(self, heard: Container[int]) -> Iterator[Death]:
        """Yield the ranks, but for those that are `heard` by now, that have ended since the last look."""
        for pid in set(descendants.find()) - self._known.keys():
            rank = self._rank(pid)
            if rank >= 0 and rank not in heard:
                with suppress(OSError):  # it has ended
                    self._known[pid] = rank, os.pidfd_open(pid)
        for pid, (rank, descriptor) in list(self._known.items()):
            ended = bool(select.select([descriptor], [], [], 0)[0])
            if ended and rank not in heard and (status := status_of(pid, descriptor)) != 0:
                yield Death(rank, status)
            if ended or rank in heard:
                os.close(descriptor)
                del self._known[pid]

    def close(self) -> None:
        for _, descriptor in self._known.values():
            os.close(descriptor)
        self._known.clear()

    def _rank(self, pid: int) -> int:
        """The rank that a process is; -1 where it is none."""
        try:
            words = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            return -1
        place = launched_as(dict(word.partition("=")[::2] for word in words if "=" in word))
        return place[0] if place and self._mark <= set(words) else -1
