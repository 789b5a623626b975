"""`mpips.create`: turns processes into workers and servers of a store, or adds a store on the same servers."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, NoReturn, TypeVar

from mpi4py import MPI

from mpips.collectives.errors import StallError, of_caller
from mpips.collectives.fabric.failure import CommCreationGuard, find_deaths, survives_deaths
from mpips.collectives.recorder.own import Marks
from mpips.ending.process import say_role
from mpips.store import options as known_options
from mpips.store import roles, world
from mpips.store.api import Generations, KVStore
from mpips.store.checkpoint import resume
from mpips.store.checkpoint.resume import RegularSaves
from mpips.store.options import OptionError, Options
from mpips.store.ranks import keep_layout
from mpips.store.recovery.recover import Member, StandBy, wait_for_role
from mpips.store.remote.store import RemoteStore
from mpips.store.replicated.store import ReplicatedStore
from mpips.store.roles import CorePinning, Layout
from mpips.store.runtime.errors import Step, StoreError
from mpips.store.runtime.generation import Generation
from mpips.store.server.loop import Server, serve
from mpips.store.transport.frames import OpenStore
from mpips.store.worker.interface import Recovered
from mpips.store.worker.route import Route
from mpips.store.worker.store import WorkerStore

Create = TypeVar("Create", bound=Callable[..., Any])


@dataclass
class _Open:
    """An open store with servers, as this worker keeps it."""

    # the communicator that was passed to `create`
    comm: MPI.Intracomm
    layout: Layout
    store: KVStore
    served: RemoteStore


_open: list[_Open] = []
# folders into which stores of this process save themselves, including closed stores
_folders: set[str] = set()
# the core that this process is bound to, while it has a store with servers (at most one entry)
_seats: list[CorePinning] = []
# the number of spares of the one store of this process that survives deaths (at most one entry)
_surviving: list[int] = []


def _watched(call: Create) -> Create:
    """Wrap `create` if `mpips chaos` watches the job, so that it reports this rank and the stores that it creates."""
    if world.WATCHED not in os.environ:
        return call
    from mpips.chaos.injector import watched

    return watched(call)


@_watched
def create(kind: str, comm: MPI.Intracomm | None = None, **options: Any) -> KVStore:
    """Create a store. Collective over `comm`; blocking.

    On a worker the call returns the store. On a server it does not return: it serves this store, and every store that
    the workers create on the same `comm` later, and raises SystemExit(0) when all workers have closed their stores or
    exited. A spare waits inside the call until it takes the place of a rank that has died.

    Args:
        kind: "local", "dist_sync", "dist_async", "mpi_sync" or "mpi_async".
        comm: The ranks of the store. None: COMM_WORLD. A `local` store always has this process alone.
        options: See `mpips.store.options`. An option may also be given by its `MPIPS_*` variable. An argument overrides
            the variable.

    Raises:
        TypeError: `kind` is not a string.
        OptionError: Options are bad or differ between ranks. Every rank raises the same error.
    """
    word, chosen, refusal = _asked(kind, options)
    if word == "local":
        if chosen is None or refusal:
            raise OptionError(refusal)
        layout = roles.create(MPI.COMM_SELF, word, Options(stall_seconds=chosen.stall_seconds))
        generation = Generation(layout)
        return _opened(MPI.COMM_SELF, layout, generation, ReplicatedStore(layout, generation))
    if _surviving:
        raise of_caller(RuntimeError(f"create: a job with spares={_surviving[0]} has one store, which was made before"))
    if comm is None:
        comm = MPI.COMM_WORLD
        if cause := world.lost(os.environ, MPI.Get_library_version(), comm.Get_size()):
            raise of_caller(RuntimeError(cause))
    before = _serving(comm)
    # The servers are still inside their first `create`, so ask them to take part in the creation of the new store.
    if before is not None:
        if chosen is not None and not refusal:
            refusal = _unfit(chosen, before.layout)
        asked = asdict(chosen or Options())
        before.store.worker.run("create", before.served.open_store(OpenStore(word, asked)))
    with _all_alive(comm, chosen):
        layout = roles.create(comm, word, chosen, refusal or _unable(chosen))
        keep_layout(layout)
        if layout.survives:
            _surviving.append(layout.spares)
        generation = Generation(layout)
        member = _begun(layout, generation)
    if isinstance(member, Server):
        _serve(member, lambda asked: _one_more(comm, layout, asked))
    if isinstance(member, StandBy):
        return _Spare(layout, generation, member).wait()
    return _opened(comm, layout, generation, member)


def _asked(kind: str, options: dict[str, Any]) -> tuple[str, Options | None, str]:
    """Return the kind, the options, and an error message if the options are bad, otherwise "".

    The message is not raised here: all ranks raise it together, in `roles.create`.
    """
    word, chosen = "", None
    try:
        word = known_options.kind_of(kind)
        chosen = known_options.read(options)
        known_options.check_kind(word, options)
        known_options.check_saves(chosen)
    except OptionError as error:
        return word, chosen, str(error)
    return word, chosen, ""


def _store(
    layout: Layout,
    backend: RemoteStore | ReplicatedStore,
    generation: Generation,
    closed: Step,
    saves: Callable[[WorkerStore], RegularSaves] | None = None,
    joined: Recovered | None = None,
) -> KVStore:
    """Assemble a worker's store.

    Args:
        closed: Called when the store has been closed.
        saves: Makes the schedule by which the store saves itself. None: the store does not save itself.
        joined: The content of a running store in which this worker has taken a dead worker's place. None: a new store.
    """
    worker = WorkerStore(layout, backend, generation)
    worker.operations.checks_finite = layout.options.check_finite
    route = Route(worker.keys, worker.engine.under_way, worker.operations, backend, layout.lane)
    if saves is not None:
        worker.regular = saves(worker)
        route.save_regularly(worker.regular)
    if joined is not None or worker.restored.names:
        route.before_a_push(worker.pushes)
    generations = Generations(worker, backend, closed)
    if joined is not None:
        generations.join(joined)
    return KVStore(worker, route, generations)


def _begun(layout: Layout, generation: Generation) -> Server | StandBy | RemoteStore | ReplicatedStore:
    """Make the object for this rank's role in the first generation of a store. Collective, blocking.

    In a store that survives deaths this function waits until all ranks are ready. Otherwise a rank could begin to use
    the store while another still makes communicators. The ranks wait in a rendezvous outside of MPI. `_all_alive` calls
    MPI's `Agree` afterwards, but a long wait inside `Agree` is not safe if a rank dies.
    """
    member: Server | StandBy | RemoteStore | ReplicatedStore
    with generation.failing(roles.WHAT):
        seat = _seat(layout, generation) if layout.num_servers else None
        if layout.is_spare:
            member = StandBy(layout, generation)
        elif seat is None:
            member = ReplicatedStore(layout, generation)
        else:
            shared = seat.shared
            member = RemoteStore(layout, generation, shared) if layout.is_worker else Server(layout, seat, generation)
            member.begin()
        if layout.survives:
            generation.meet(b"", roles.WHAT, everybody=True)
    return member


def _opened(
    comm: MPI.Intracomm, layout: Layout, generation: Generation, member: RemoteStore | ReplicatedStore
) -> KVStore:
    """Return this worker's store, loaded from the store's checkpoint folder if it has one.

    Collective over the workers, blocking.
    """
    with generation.failing(roles.WHAT):
        store = _store(layout, member, generation, _closer(layout, generation), _saves(layout))
    if isinstance(member, RemoteStore):
        _open.append(_Open(comm, layout, store, member))
    return store


def _saves(layout: Layout) -> Callable[[WorkerStore], RegularSaves] | None:
    """Return a function that loads a store from its checkpoint folder and begins its regular saves.

    Return None if the store has no folder, if it does not span all ranks of the job, or if an earlier store of this
    process has used the same folder.
    """
    folder = layout.options.checkpoint
    if not folder:
        return None
    if folder in _folders or layout.world.Get_size() < MPI.COMM_WORLD.Get_size():
        resume.tell_spares(layout, None)
        return None
    _folders.add(folder)

    def begin(worker: WorkerStore) -> RegularSaves:
        worker.base, worker.restored = resume.resume(worker)
        worker.resumed = worker.base
        resume.tell_spares(layout, worker.base)
        return RegularSaves(worker, worker.base)

    return begin


def _saves_from(step: int) -> Callable[[WorkerStore], RegularSaves]:
    """Return a function that begins the regular saves of a worker that joins a running store, resumed from `step`."""

    def begin(worker: WorkerStore) -> RegularSaves:
        worker.base = step
        return RegularSaves(worker, step)

    return begin


def _closer(layout: Layout, generation: Generation) -> Callable[[], None]:
    """Return the function that is called when a worker's store has been closed.

    The function closes the generation. If this was the last open store with servers, it also undoes the core binding.
    """

    def close() -> None:
        _open[:] = [other for other in _open if other.layout is not layout]
        if not _open:
            _rise()
        generation.close()

    return close


def _unable(options: Options | None) -> str:
    """Return the reason why this MPI cannot run a store with `spares`, or "" if it can or `spares` is not set."""
    return "" if options is None or options.spares < 0 else why_deaths_end_job(f"spares={options.spares}")


def why_deaths_end_job(wish: str) -> str:
    """Return the reason why this MPI cannot keep the job alive after a death, which `wish` needs.

    Return "" if it can.
    """
    if not survives_deaths():
        return (
            f"{wish} needs an MPI in which a death ends no job: Open MPI with ULFM, as `mpips run --spares` or "
            "`mpirun --with-ft ulfm` starts it; `mpips run --restarts` serves under any MPI"
        )
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        return f"{wish} needs MPI_THREAD_MULTIPLE, which this MPI does not give"
    return ""


@contextmanager
def _all_alive(comm: MPI.Intracomm, options: Options | None) -> Iterator[None]:
    """Let all ranks agree whether the store that is created in the block was created on all of them.

    Without this agreement, a death during `create` could leave one rank with a store that survives the death, and
    another rank without a store. If a rank dies inside the block, all ranks raise StoreError. But if a rank does not
    come in time, StallError is raised without an agreement, because that rank would not take part in it either. Does
    nothing in a store without spares.
    """
    if options is None or options.spares < 0 or _unable(options):
        yield
        return
    raised: Exception | None = None
    making = CommCreationGuard(comm)
    try:
        with making:
            try:
                yield
            # All ranks raise this error, so no communicator has to be revoked.
            except OptionError as error:
                raised = error
    except StallError:
        raise
    except Exception as error:
        raised = error
    try:
        all_made = bool(comm.Agree(not making.broken))
    # A rank has died. `Agree` raises this on all ranks.
    except MPI.Exception:
        all_made = False
    if not all_made and (dead := find_deaths(comm)):
        why = f"rank {dead[0]} has died before the store was there, and nobody has its place: start the job again"
        raise StoreError(f"create: {why}") from raised
    if raised is None and not all_made:
        raised = StoreError("create: another rank could not make the store, as its own error says")
    if raised is not None:
        raise raised


# The recorder stores what a spare does under this number. It is larger than the numbers of stores.
LANE = 5 << 61


class _Spare:
    """This rank while it is a spare.

    If the store saves itself, the constructor waits until worker 0 reports the step from which the store has resumed.
    """

    def __init__(self, layout: Layout, generation: Generation, stands_by: StandBy) -> None:
        self._layout = layout
        self._generation = generation
        self._seat = _seat(layout, generation) if layout.num_servers else None
        self._stands_by: StandBy | None = stands_by
        with generation.failing(roles.WHAT):
            step = resume.hear_step(layout, generation) if layout.options.checkpoint else None
        self._saves = None if step is None else _saves_from(step)

    def wait(self) -> KVStore:
        """Wait until this rank takes a dead worker's place, and return the store. Blocking.

        Raise SystemExit(0) if the store ends before that. If this rank takes a server's place, serve, and raise
        SystemExit(0) when the store has ended.
        """
        layout, generation, what = self._layout, self._generation, "the wait of a spare"
        marks = Marks(LANE)
        marks.word[0] = marks.new_token(what)
        with generation.failing(what):
            became = wait_for_role(generation, self._member)
        marks.close()
        self._stands_by = None
        if became is None:
            _rise()
            generation.close()
            raise SystemExit(0)
        member, recovered = became
        if isinstance(member, Server):
            say_role("server")
            _serve(member)
        assert isinstance(member, RemoteStore | ReplicatedStore)
        role = "worker" if len(layout.clients) == 1 else f"worker of client {layout.client_number}"
        say_role(role, recovered.rounds.step)
        return _store(layout, member, generation, _closer(layout, generation), self._saves, recovered)

    def _member(self) -> Member[Any]:
        """Make the object for this rank's role in the generation that is about to begin."""
        layout, generation, seat, stands_by = self._layout, self._generation, self._seat, self._stands_by
        assert stands_by is not None
        if layout.is_spare:
            return stands_by
        if seat is None:
            return ReplicatedStore(layout, generation)
        if layout.is_worker:
            return RemoteStore(layout, generation, seat.shared, stands_by.old_memory)
        return Server(layout, seat, generation, stands_by.old_memory)


def _serve(server: Server, opened: Callable[[OpenStore], Server | None] | None = None) -> NoReturn:
    """Serve until all workers have left, then raise SystemExit(0). See `server.loop.serve` for `opened`."""
    serve([server], opened)
    _rise()
    raise SystemExit(0)


def _one_more(comm: MPI.Intracomm, first: Layout, asked: OpenStore) -> Server | None:
    """On a server, help to create another store that the workers have asked for. Return None if it is refused."""
    refusal, chosen = "", None
    try:
        chosen = known_options.read(asked.options, {})
        refusal = _unfit(chosen, first)
    except OptionError as error:
        refusal = str(error)
    try:
        layout = roles.create(comm, asked.kind, chosen, refusal)
    # All workers raise the same error.
    except OptionError:
        return None
    server = _begun(layout, Generation(layout))
    assert isinstance(server, Server)
    return server


def workers_of(comm: MPI.Intracomm) -> MPI.Intracomm:
    """Return the workers' communicator of the store with servers that is open on `comm`, or `comm` if there is none.

    Servers do not run the program, so only the workers make a call that "all ranks" of the program make.
    """
    found = next((other for other in _open if MPI.Comm.Compare(comm, other.comm) == MPI.IDENT), None)
    return comm if found is None or found.layout.workers is None else found.layout.workers


def _serving(comm: MPI.Intracomm) -> _Open | None:
    """Return the store that is open on `comm`, or None.

    The servers of an open store are serving, so they take part in a new store only if they are asked. Raise
    RuntimeError if `comm` contains servers of a store that is open on another communicator, because these servers could
    not take part in a call on `comm`.
    """
    for other in _open:
        if MPI.Comm.Compare(comm, other.comm) == MPI.IDENT:
            return other
    here = comm.Get_group()
    for other in _open:
        servers = list(range(other.layout.num_workers, other.layout.world.Get_size()))
        there = other.layout.world.Get_group()
        if any(rank != MPI.UNDEFINED for rank in there.Translate_ranks(servers, here)):
            busy = "this communicator has servers of an open store, which serve"
            raise of_caller(RuntimeError(f"{busy}: make the next store on the communicator that the first was made on"))
    return None


def _unfit(options: Options, first: Layout) -> str:
    """Return the reason why servers of the open store `first` cannot serve a second one with these options, or ""."""
    if options.servers == first.num_servers:
        return ""
    return (
        f"servers={options.servers}, but this communicator has a store with servers={first.num_servers} open: ask for "
        "as many, or make a store without servers on kv.layout.workers"
    )


def _seat(layout: Layout, generation: Generation) -> CorePinning:
    """Return the core binding of this process. The first store with servers makes it.

    Collective over the layout's ranks, blocking.
    """
    if not _seats:
        _seats.append(CorePinning(layout, generation))
    return _seats[0]


def _rise() -> None:
    """Undo the core binding, after this process' last store with servers has been closed."""
    while _seats:
        _seats.pop().leave()
