"""Find an address of rank 0's host to which all ranks can connect, for libraries that need TCP besides MPI."""

from __future__ import annotations

import fcntl
import os
import socket
import struct

import numpy as np
from mpi4py import MPI

from mpips.collectives.errors import format_ranks, of_caller
from mpips.store.world import MASTER

# the most bytes that rank 0's port and addresses may take in the broadcast
WORDS = 2048
# number of the ioctl SIOCGIFADDR
ADDRESS_OF_NIC = 0x8915
CONNECT_SECONDS = 3.0


def find_address(who: str, world: MPI.Intracomm = MPI.COMM_WORLD) -> str:
    """Return rank 0's first address to which all ranks can connect. Collective, blocking.

    `who` is the name of the call that needs the address, for the error message. If not all ranks can connect to any
    address, every rank raises RuntimeError.
    """
    node = world.Split_type(MPI.COMM_TYPE_SHARED)
    # All ranks are on one host.
    if node.size == world.size:
        node.Free()
        return "127.0.0.1"
    first = node.rank == 0
    node.Free()
    with socket.create_server(("", 0), backlog=4096) as listener:
        told = bytearray(WORDS)
        if world.rank == 0:
            text = " ".join([str(listener.getsockname()[1]), *_addresses()])[:WORDS].encode()
            told[: len(text)] = text
        world.Bcast(told)
        port, *addresses = told.rstrip(b"\0").decode().split()
        lacking: list[int] = []
        for address in addresses:
            # One rank of each host tries to connect on behalf of all ranks of its host.
            fine = np.empty(world.size, np.int8)
            world.Allgather(np.array([not first or _can_connect(address, int(port))], np.int8), fine)
            lacking = np.flatnonzero(fine == 0).tolist()
            if not lacking:
                return address
    where = f"{', '.join(addresses)} (at the last {format_ranks(lacking)} cannot)"
    raise of_caller(
        RuntimeError(
            f"{who}: not all ranks can connect to rank 0 at {where}: set {MASTER} to "
            "an address of rank 0's host that all hosts reach"
        )
    )


def _addresses() -> list[str]:
    """Return names and addresses of this host, the likeliest first.

    First comes the address that the user has set, then the host's name, then the addresses of its NICs.
    """
    names = [os.environ.get(MASTER, ""), socket.gethostname()]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, nic in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(any_socket, ADDRESS_OF_NIC, struct.pack("256s", nic.encode()[:15]))
            except OSError:
                # This NIC has no address.
                continue
            names.append(socket.inet_ntoa(answer[20:24]))
    usable = [name for name in names if name and name != "localhost" and not name.startswith("127.")]
    return list(dict.fromkeys(usable))


def _can_connect(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), CONNECT_SECONDS).close()
    except OSError:
        return False
    return True
