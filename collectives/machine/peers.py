"""Who is at the other end of a Unix socket: the kernel says it, so nobody can claim to be another.

Abstract sockets and some folders are open to all users of a machine. Who listens there admits `ours` alone.
"""

from __future__ import annotations

import os
import socket
import struct
from typing import NamedTuple

CREDENTIALS = struct.Struct("iII")  # as of SO_PEERCRED


class Peer(NamedTuple):
    """The process at the other end, as this process sees it: 0 where it is of a PID namespace that is out of sight."""

    pid: int
    user: int

    @property
    def ours(self) -> bool:
        """Whether it belongs to the user of this process."""
        return self.user == os.geteuid()


def peer(line: socket.socket) -> Peer:
    """Return who made this connection, or, on the side that made it, who listens."""
    pid, user, _ = CREDENTIALS.unpack(line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size))
    return Peer(pid, user)
