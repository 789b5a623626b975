"""Try out MPI on a few ranks: two that `mpips doctor` starts, or those that a launcher has started.

    mpirun -n 2 python -m launch.doctor.probe [cuda]
    mpirun -n 3 --with-ft ulfm python -m launch.doctor.probe death

Rank 0 prints the result as one line of JSON. Without an argument the ranks try, among other things, to write and read
shared memory. With `cuda`, a device buffer is sent to the other rank and back. With `death`, a rank is killed. The
tests `cuda` and `death` run as separate jobs, because an MPI that does not support them may crash.
"""

from __future__ import annotations

import json
import mmap
import os
import signal
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpi4py import MPI

MARK = b"mpips-probe-0123456789"
TAG = 7
CUDA_ELEMENTS = 1 << 16
LEVELS = ("SINGLE", "FUNNELED", "SERIALIZED", "MULTIPLE")
ALONE = "not tried: one rank on this node"


def examine() -> dict[str, Any]:
    """Examine MPI on COMM_WORLD. The result can be written as JSON.

    Collective. All ranks get the same values, except for "rank", the caller's own rank. "window", "memfd" and "reach"
    stand for three ways in which ranks can share memory. The value "" means that this way works, and any other text is
    the reason why it does not.
    """
    from mpi4py import MPI

    from mpips.collectives.fabric import process_memory

    world = MPI.COMM_WORLD
    node = world.Split_type(MPI.COMM_TYPE_SHARED)
    alone = ALONE if node.size < 2 else ""
    return {
        "library": MPI.Get_library_version().strip("\x00\n ").splitlines()[0],
        "library_text": MPI.Get_library_version(),
        "standard": ".".join(map(str, MPI.Get_version())),
        "size": world.size,
        "rank": world.rank,
        "node_ranks": node.size,
        "threads": {getattr(MPI, f"THREAD_{name}"): name for name in LEVELS}[MPI.Query_thread()],
        "affinities": world.allgather(sorted(os.sched_getaffinity(0))),
        "window": alone or _check_window(node),
        "memfd": alone or _check_memfd(node),
        "denied": _substitute_folder(),
        "reach": alone or ("" if process_memory.all_reachable(node) else "not allowed here"),
    }


def _check_window(node: MPI.Comm) -> str:
    """Return "" if the ranks of a node share the memory of MPI.Win.Allocate_shared, otherwise the reason why not."""
    from mpi4py import MPI

    window = MPI.Win.Allocate_shared(len(MARK) if node.rank == 0 else 0, 1, comm=MPI.Intracomm(node))
    buffer, _ = window.Shared_query(0)
    if node.rank == 0:
        buffer[:] = MARK
    window.Fence()
    is_shared = buffer.tobytes() == MARK
    window.Fence()
    window.Free()
    return _first_problem(node, "" if is_shared else "a rank does not see what another wrote")


def _check_memfd(node: MPI.Comm) -> str:
    """Return "" if rank 0 can make memory by memfd_create, and other ranks can map it through /proc.

    Otherwise return the reason why not.
    """
    from mpips.collectives.machine import open_memory

    path, problem, fd = "", "", -1
    try:
        if node.rank == 0:
            fd = open_memory()
            os.write(fd, MARK)
            path = f"/proc/{os.getpid()}/fd/{fd}"
    except OSError as error:
        problem = error.strerror or str(error)
    path = node.bcast(path)
    if node.rank and path:
        try:
            with open(path, "r+b") as file, mmap.mmap(file.fileno(), len(MARK)) as memory:
                problem = "" if memory[:] == MARK else "the bytes differ"
        except (OSError, ValueError) as error:
            problem = str(error)
    problem = _first_problem(node, problem)
    with suppress(OSError):
        os.close(fd)
    return problem


def _substitute_folder() -> str:
    """Return the folder in which `open_memory` makes files when memfd_create is denied.

    Returns "" if memfd_create works, or if `open_memory` cannot make files either.
    """
    from mpips.collectives.machine import open_memory

    with suppress(OSError):
        fd = open_memory()
        try:
            path = os.readlink(f"/proc/self/fd/{fd}")
        finally:
            os.close(fd)
        return "" if path.startswith("/memfd:") else os.path.dirname(path)
    return ""


def _first_problem(comm: MPI.Comm, problem: str) -> str:
    """Return, on every rank, the problem of the lowest rank that has a problem. Return "" if no rank has one."""
    return next(filter(None, comm.allgather(problem)), "")


def cuda() -> dict[str, Any]:
    """Send a device buffer to rank 1, double it there and send it back. Collective over two ranks.

    On rank 0, "aware" in the result is True if the right values have come back.
    """
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


def death() -> dict[str, Any]:
    """Kill the last rank, and let the other two form a new communicator. Collective over three ranks.

    In the result, "left" is the size of the new communicator, and "seconds" is the time from the death until the
    communicator was made.
    """
    from mpi4py import MPI

    world = MPI.COMM_WORLD.Dup()
    start = world.allreduce(time.time(), MPI.MAX)
    if world.rank == world.size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with suppress(MPI.Exception):
        while True:
            world.Allreduce(MPI.IN_PLACE, bytearray(1), MPI.BOR)
    world.Revoke()
    survivors = world.Shrink()
    survivors.Barrier()
    return {"left": survivors.size, "seconds": time.time() - start, "rank": world.rank}


def main() -> None:
    """Run the test that the arguments name, and print its result on rank 0."""
    result = {"cuda": cuda, "death": death}.get(" ".join(sys.argv[1:]), examine)()
    if result["rank"] == 0:
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
