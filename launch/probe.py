"""What a rank can find out about its MPI: run on two ranks by `mpips doctor`, or on the ranks that a launcher gave it.

    mpirun -n 2 python -m launch.probe [cuda]

Rank 0 prints one line of JSON. Nothing is asked that can be tried: shared memory is written by one rank and read by the
other, and with `cuda` a device buffer makes a round trip, in a job of its own, because an MPI that cannot may crash.
"""

from __future__ import annotations

import json
import mmap
import os
import sys
from typing import Any

MARK = b"mpips-probe-0123456789"
TAG = 7
CUDA_ELEMENTS = 1 << 16


def facts() -> dict[str, Any]:
    """What the ranks of COMM_WORLD find, JSON-serialisable. Collective; `rank` is the caller's own."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    node = world.Split_type(MPI.COMM_TYPE_SHARED)
    return {
        "library": MPI.Get_library_version().strip("\x00\n ").splitlines()[0],
        "library_text": MPI.Get_library_version(),
        "standard": ".".join(map(str, MPI.Get_version())),
        "size": world.size,
        "rank": world.rank,
        "node_ranks": node.size,
        "threads": _thread_level(MPI.Query_thread()),
        "ulfm": _ulfm(world),
        "affinities": _gathered(world, sorted(os.sched_getaffinity(0))),
        "window": _window(node),
        "memfd": _memfd(node),
        "reach": _reach(node),
    }


def _thread_level(level: int) -> str:
    from mpi4py import MPI

    names = ("SINGLE", "FUNNELED", "SERIALIZED", "MULTIPLE")
    return {getattr(MPI, f"THREAD_{name}"): name for name in names}[level]


def _ulfm(world: Any) -> bool:
    """Does this MPI answer the questions of User Level Failure Mitigation?"""
    try:
        world.Is_revoked()
    except NotImplementedError:
        return False
    return True


def _window(node: Any) -> str:
    """Empty where MPI.Win.Allocate_shared gives memory that both of two ranks see, else what went wrong."""
    from mpi4py import MPI

    if node.size < 2:
        return "not tried: one rank on this node"
    window = MPI.Win.Allocate_shared(len(MARK) if node.rank == 0 else 0, 1, comm=node)
    buffer, _ = window.Shared_query(0)
    if node.rank == 0:
        buffer[:] = MARK
    window.Fence()
    seen = buffer.tobytes() == MARK
    window.Fence()
    window.Free()
    return _agreed(node, "" if seen else "a rank does not see what another wrote")


def _memfd(node: Any) -> str:
    """Empty where a rank can map the anonymous memory of another through /proc, else what went wrong."""
    if node.size < 2:
        return "not tried: one rank on this node"
    place, problem = bytearray(16), ""
    fd = -1
    if node.rank == 0:
        try:
            fd = os.memfd_create("mpips-probe")
            os.write(fd, MARK)
        except OSError as error:
            problem = str(error)
        place[:] = os.getpid().to_bytes(8, "little") + max(fd, 0).to_bytes(8, "little")
    node.Bcast(place, root=0)
    if node.rank:
        pid, number = int.from_bytes(place[:8], "little"), int.from_bytes(place[8:], "little")
        problem = _mapped(f"/proc/{pid}/fd/{number}")
    problem = _agreed(node, problem)
    if fd >= 0:
        os.close(fd)
    return problem


def _reach(node: Any) -> str:
    """Empty where the kernel copies between the ranks' own memories, else what went wrong."""
    from collectives.node import process_memory as reach

    if node.size < 2:
        return "not tried: one rank on this node"
    return "" if reach.open_to_all(node) else "not allowed here"


def _mapped(path: str) -> str:
    try:
        descriptor = os.open(path, os.O_RDWR)
        try:
            with mmap.mmap(descriptor, len(MARK)) as memory:
                return "" if memory[:] == MARK else "the bytes differ"
        finally:
            os.close(descriptor)
    except (OSError, ValueError) as error:
        return str(error)


def _agreed(comm: Any, problem: str) -> str:
    """The problem of the first rank that has one, on every rank."""
    text = bytearray(200 * comm.size)
    comm.Allgather(problem.encode()[:200].ljust(200), text)
    return next((found for i in range(comm.size) if (found := text[200 * i : 200 * (i + 1)].decode().strip())), "")


def _gathered(comm: Any, cores: list[int]) -> list[list[int]]:
    """Every rank's cores (those below 1024), gathered without pickling."""
    mask = sum(1 << core for core in cores if core < 1024).to_bytes(128, "little")
    masks = bytearray(128 * comm.size)
    comm.Allgather(mask, masks)
    numbers = (int.from_bytes(masks[128 * i : 128 * (i + 1)], "little") for i in range(comm.size))
    return [[core for core in range(1024) if number >> core & 1] for number in numbers]


def cuda() -> dict[str, Any]:
    """Collective over two ranks. A device buffer goes to rank 1, is doubled there and comes back: True only if so."""
    import cupy
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    cupy.cuda.Device(world.rank % cupy.cuda.runtime.getDeviceCount()).use()
    sent = cupy.arange(CUDA_ELEMENTS, dtype=cupy.float32)
    buffer = sent.copy() if world.rank == 0 else cupy.zeros_like(sent)
    cupy.cuda.get_current_stream().synchronize()
    if world.rank == 0:
        world.Send(buffer, 1, TAG)
        world.Recv(buffer, 1, TAG)
    else:
        world.Recv(buffer, 0, TAG)
        buffer *= 2
        cupy.cuda.get_current_stream().synchronize()
        world.Send(buffer, 0, TAG)
    return {"aware": bool((buffer == 2 * sent).all()), "rank": world.rank}


def main() -> None:
    """Prints what was found, on rank 0."""
    found = cuda() if sys.argv[1:] == ["cuda"] else facts()
    if found["rank"] == 0:
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
