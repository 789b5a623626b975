"""Horovod's `init`, ranks and sizes, and its process sets (groups of ranks)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mpi4py import MPI

from mpips.collectives.communicator import communicator
from mpips.collectives.errors import of_caller
from mpips.collectives.fabric.requests import ArrivalBarrier
from mpips.collectives.fabric.wait import read_limits
from mpips.horovod.negotiation import Negotiator
from mpips.torch.backend import check_joined


class ProcessSet:
    """A group of ranks that run operations among themselves.

    A process set can be used after `init(process_sets=...)` or `add_process_set` has registered it.

    Args:
        ranks_or_comm: Ranks in the communicator of `init`, or an mpi4py communicator whose ranks form the set.
    """

    def __init__(self, ranks_or_comm: Iterable[int] | MPI.Comm) -> None:
        if isinstance(ranks_or_comm, MPI.Comm):
            world = MPI.COMM_WORLD.group
            places = MPI.Group.Translate_ranks(ranks_or_comm.group, list(range(ranks_or_comm.size)), world)
            ranks_or_comm = [int(place) for place in places]
        self.ranks = sorted(ranks_or_comm)
        if any(not isinstance(rank, int) for rank in self.ranks):
            raise of_caller(ValueError(f"ProcessSet: {self.ranks}: pass a list of ranks, or an mpi4py communicator"))
        # None unless the set is registered; the global set has 0
        self.process_set_id: int | None = None
        # None unless the set is registered and this process belongs to it
        self.negotiator: Negotiator | None = None

    def size(self) -> int | None:
        """Return the number of ranks in the set, or None if the set is not registered."""
        return None if self.process_set_id is None else len(self.ranks)

    def rank(self) -> int | None:
        """Return this process's rank in the set, or None if the set is not registered or lacks this process."""
        return self.ranks.index(rank()) if self.process_set_id is not None and self.included() else None

    def included(self) -> bool:
        """True if this process belongs to the process set."""
        return rank() in self.ranks

    def members(self) -> Negotiator:
        """Return the set's negotiator, which runs its operations.

        Raises ValueError if the set is not registered, or lacks this process.
        """
        _initialized_world()
        if self.process_set_id is None:
            raise of_caller(ValueError(f"{self} is not alive: pass it to hvd.add_process_set() on all ranks first"))
        if self.negotiator is None:
            raise of_caller(ValueError(f"{self} has not rank {rank()}: call this on its ranks alone"))
        return self.negotiator

    def __str__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"


# init() sets the ranks of this set.
global_process_set = ProcessSet([])
# process_set_id -> registered set
_sets: dict[int, ProcessSet] = {}
# Number of sets registered so far, not counting the global set. It gives the next process_set_id. Ids are never reused.
_created = 0
_comm: MPI.Intracomm | None = None


def init(comm: MPI.Intracomm | None = None, process_sets: Sequence[ProcessSet] | None = None) -> None:
    """Start Horovod's API on all ranks of a communicator. Collective, blocking. A second call does nothing.

    Args:
        comm: An mpi4py communicator. None means COMM_WORLD.
        process_sets: Sets to register. "dynamic", which Horovod needs for `add_process_set`, registers none.

    Raises:
        ValueError: `comm` is not an mpi4py communicator.
        RuntimeError: A launcher such as torchrun has started processes that MPI has not joined.
    """
    global _comm
    if _comm is not None:
        return
    if comm is not None and not isinstance(comm, MPI.Intracomm):
        raise of_caller(
            ValueError(
                f"hvd.init: comm is of type {type(comm).__name__}: pass an mpi4py communicator, and "
                "for some of its ranks use process_sets"
            )
        )
    check_joined()
    _comm = MPI.COMM_WORLD if comm is None else comm
    ArrivalBarrier(_comm, "hvd.init").wait(read_limits())
    global_process_set.ranks = list(range(_comm.size))
    _bring_to_life(global_process_set, 0)
    if process_sets == "dynamic":
        process_sets = ()
    for process_set in process_sets or ():
        add_process_set(process_set)


def shutdown() -> None:
    """Abandon operations in flight, and end all process sets. Local. `init` may be called again."""
    global _comm
    for process_set in list(_sets.values()):
        _end(process_set)
    _comm = None


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Register a process set, given as a `ProcessSet` or as a list of ranks. Collective over all ranks, blocking.

    Raises ValueError if a set of the same ranks is already registered, or if a rank does not exist.
    """
    global _created
    world = _initialized_world()
    added = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    if any(not 0 <= rank < world.size for rank in added.ranks) or not added.ranks:
        raise of_caller(ValueError(f"add_process_set: ranks are {added.ranks}: choose from 0 to {world.size - 1}"))
    for other in _sets.values():
        if other.ranks == added.ranks:
            raise of_caller(ValueError(f"add_process_set: {other} has these ranks already: use it"))
    _created += 1
    _bring_to_life(added, _created)
    return added


def remove_process_set(process_set: ProcessSet) -> bool:
    """Remove a process set. All ranks must call this.

    Return False if the set is not registered or is the global set, which cannot be removed.
    """
    if not process_set.process_set_id:
        return False
    _end(process_set)
    return True


def is_initialized() -> bool:
    """True if `init` has been called."""
    return _comm is not None


def rank() -> int:
    """Return this process's rank in the communicator of `init`."""
    return _initialized_world().rank


def size() -> int:
    """Return the number of ranks in the communicator of `init`."""
    return _initialized_world().size


def local_rank() -> int:
    """Return this process's rank among the ranks on its node."""
    nodes, own = _nodes()
    return nodes[:own].count(nodes[own])


def local_size() -> int:
    """Return the number of ranks on this node."""
    nodes, own = _nodes()
    return nodes.count(nodes[own])


def cross_rank() -> int:
    """Return this node's position among the nodes that have a process with the same local rank."""
    nodes, own = _nodes()
    return [node for node in sorted(set(nodes)) if nodes.count(node) > local_rank()].index(nodes[own])


def cross_size() -> int:
    """Return the number of nodes that have a process with the same local rank as this process."""
    nodes, _ = _nodes()
    return sum(nodes.count(node) > local_rank() for node in set(nodes))


def is_homogeneous() -> bool:
    """True if all nodes have the same number of ranks."""
    nodes, _ = _nodes()
    return len({nodes.count(node) for node in nodes}) == 1


def world_comm() -> MPI.Intracomm:
    """Return the communicator of all ranks. Operations in the background do not use it."""
    return _initialized_world()


def _initialized_world() -> MPI.Intracomm:
    if _comm is None:
        raise of_caller(ValueError("Horovod has not been initialized: call hvd.init() first"))
    return _comm


def _nodes() -> tuple[list[int], int]:
    """Return the node number of each rank, and this process's rank."""
    world = _initialized_world()
    return list(communicator(world).node_of), world.rank


def _bring_to_life(process_set: ProcessSet, number: int) -> None:
    """Register a set under a number, and create its negotiator. Collective over all ranks, blocking."""
    world = _initialized_world()
    comm = world.Create(world.group.Incl(process_set.ranks))
    process_set.process_set_id = number
    _sets[number] = process_set
    if isinstance(comm, MPI.Intracomm) and comm != MPI.COMM_NULL:
        process_set.negotiator = Negotiator(comm, process_set.ranks, read_limits().timeout_seconds)


def _end(process_set: ProcessSet) -> None:
    """Unregister a set, and free its negotiator. Local."""
    if process_set.process_set_id is not None:
        del _sets[process_set.process_set_id]
    if process_set.negotiator is not None:
        process_set.negotiator.close()
    process_set.process_set_id, process_set.negotiator = None, None
