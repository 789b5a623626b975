"""Make the communicator of a process group anew from living processes: PyTorch's interface for faults.

A process group that was initialized with `enable_reconfigure=True` has a `Member`. Each process gives its *handle* (a
short text) to the others, by a store of the program. Then all processes of the next group pass the same list of handles
and the same number, the *uuid*, to `reconfigure`. The list may lack processes of the old group, and have others of the
job, so the old group's communicator is of no use. Neither is MPI_COMM_WORLD: once one of its ranks has died, Open MPI
refuses all calls that would make a communicator from it, also one without that rank. So the communicator is made by
MPI_Comm_create_from_group, which needs no other communicator.

A process may die at any moment of an *attempt* to make the group:

1. The members first tell each other that they have come, by notes. These are small messages on MPI_COMM_WORLD, which
   still works between living ranks. No rank waits for a note inside of MPI.
2. MPI_Comm_create_from_group takes a few milliseconds. If a member dies meanwhile, it never returns on the others. So
   it runs in a thread, which sleeps for good in that case.
3. The other communicators of the group are made in a `CommCreationGuard`.
4. The members tell each other that they have the group. A member that sees a death until then gives the attempt up, and
   tells the others why.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple
from weakref import WeakValueDictionary

import msgspec
from mpi4py import MPI

from mpips.collectives import log
from mpips.collectives.clock import Clock
from mpips.collectives.errors import KINDS, CollectiveError, MismatchError, format_ranks, kind_index
from mpips.collectives.fabric.failure import DEATH_SECONDS, CommCreationGuard, dead_ranks, guard_comm
from mpips.collectives.fabric.requests import ranks_of_job, receive_next, send_to_all
from mpips.collectives.fabric.wait import NAP_AFTER_BETWEEN_NODES, Limits, drive, read_limits, wait_until
from mpips.collectives.recorder import own as recorder
from mpips.ending.process import say_role
from mpips.store.ranks import size as count_workers
from mpips.store.world import WATCHED
from mpips.torch.process_group import GroupJobs
from mpips.torch.tensors import ArgumentError

LOG = log.get("mpips.torch")
PREFIX = "mpips"
# the tag of notes on MPI_COMM_WORLD
TAG = 7302
# What a note says: its sender has called `reconfigure`, has the group, or has given the attempt up. CREATED is never
# said: it stands for the step between the first two.
ARRIVED, CREATED, MADE, GIVEN_UP = range(4)


class Handle(NamedTuple):
    """What the text of a handle says."""

    # the MPI job, as its launcher names it
    job: str
    # the rank in MPI_COMM_WORLD
    rank: int
    # the number of the `Member` in its process
    member: int
    # how many attempts the member had begun when it was asked for the handle
    attempts: int

    def __str__(self) -> str:
        return f"{PREFIX}:{self.job}:{self.rank}:{self.member}:{self.attempts}"

    @classmethod
    def parse(cls, text: str) -> Handle:
        """Raise ArgumentError if `text` is no handle of this job."""
        prefix, _, rest = text.partition(":")
        job, *numbers = rest.rsplit(":", 3)
        if prefix != PREFIX or len(numbers) < 3 or not all(number.isdigit() for number in numbers):
            raise ArgumentError(
                f"reconfigure: {text!r} is no handle of mpips: pass what get_reconfigure_handle returned"
            )
        if job != _job():
            raise ArgumentError(
                f"reconfigure: handle {text!r} is of another MPI job: processes of two jobs form no group"
            )
        return cls(job, *map(int, numbers))


def _job() -> str:
    return os.environ.get("PMIX_NAMESPACE", "")


class Note(msgspec.Struct, array_like=True):
    """A message between two members."""

    # the receiver's number in its process
    member: int
    uuid: int
    # ARRIVED, MADE or GIVEN_UP
    step: int
    # ARRIVED: the digest of the handles. GIVEN_UP: the reason.
    text: str = ""
    # GIVEN_UP: the index of the error in `KINDS`
    kind: int = 0


class Member:
    """This process as a member of a process group that can be reconfigured. Creating one is local."""

    def __init__(self) -> None:
        self._number = next(_numbers)
        self._attempts = 0
        # the uuids of all attempts, and the uuid of the one that is under way
        self._used: set[int] = set()
        self._present: int | None = None
        # True once this process has been in a group
        self._has_joined = False
        # uuid -> (rank in MPI_COMM_WORLD, step) -> the note
        self._notes: dict[int, dict[tuple[int, int], Note]] = {}
        _members[self._number] = self

    @property
    def handle(self) -> Handle:
        """This process's handle for the next attempt."""
        return Handle(_job(), MPI.COMM_WORLD.rank, self._number, self._attempts)

    def check(self, uuid: int, texts: Iterable[str]) -> list[Handle]:
        """Return the handles in the order of the new ranks. Local.

        A set of handles is ordered by the ranks of the job. If this process has to refuse the handles, the other
        members are told, so that they do not wait for it.

        Raises:
            ArgumentError: `uuid` or a handle cannot be used. Nothing was changed.
        """
        handles = [Handle.parse(text) for text in texts]
        if not isinstance(texts, Sequence):
            handles.sort()
        if refusal := self._refuse(uuid, handles):
            sentence = f"reconfigure (uuid {uuid}): rank {MPI.COMM_WORLD.rank} of the job has refused: {refusal}"
            self.send(handles, Note(0, uuid, GIVEN_UP, sentence))
            raise ArgumentError(f"reconfigure: {refusal}")
        return handles

    def _refuse(self, uuid: int, handles: Sequence[Handle]) -> str:
        """Return the reason why this process cannot be in a group of these handles, or ""."""
        own, ranks = self.handle, [handle.rank for handle in handles]
        if uuid in self._used:
            return f"uuid {uuid} was already used: pass a new one"
        if twice := [rank for rank in ranks if ranks.count(rank) > 1]:
            return f"rank {twice[0]} of the job is there twice: pass one handle of each process"
        given = next((handle for handle in handles if handle[:3] == own[:3]), None)
        if given is None:
            return f"no handle is that of this process, rank {own.rank} of the job: pass {str(own)!r}, too"
        if given != own:
            return (
                f"the handle {str(given)!r} of rank {own.rank} of the job is stale, it is {str(own)!r} now: ask for "
                "new handles before each reconfigure"
            )
        dead = sorted({*ranks} & {*dead_ranks(MPI.COMM_WORLD)})
        return f"{_have_died(dead)}: leave its handle out" if dead else ""

    def make(self, uuid: int, handles: Sequence[Handle], seconds: float, timeout_seconds: float) -> GroupJobs:
        """Make the communicator of these members, in this order. Collective over the members, blocking.

        Args:
            uuid, handles: As `check` has accepted them, the same on all members.
            seconds: The longest time that this may take.
            timeout_seconds: The timeout of the group's operations.

        Raises:
            MismatchError: Another member passes other handles.
            StallError: A member has not come in time.
            CollectiveError: A member has died or has given up. Whatever is raised is raised on all members, as long as
                they are waiting.
        """
        clock = Clock()
        self._attempts += 1
        self._used.add(uuid)
        self._present = uuid
        attempt = _Attempt(self, uuid, handles, seconds)
        LOG.info("reconfigure (uuid %d) begins: ranks %s of the job", uuid, attempt.ranks)
        try:
            jobs = attempt.run(timeout_seconds)
        except BaseException as error:
            raise attempt.give_up(error) from None
        finally:
            self._present = None
            self._notes.pop(uuid, None)
        recorder.clear_failures()
        LOG.info(
            "reconfigured (uuid %d) in %.3f s: rank %d of %d", uuid, clock.seconds(), jobs.comm.rank, jobs.comm.size
        )
        if not self._has_joined and MPI.COMM_WORLD.rank >= count_workers():
            say_role("worker")
        self._has_joined = True
        if WATCHED in os.environ:
            from mpips.chaos.injector import join_group

            join_group(jobs.comm.rank, jobs.comm.size)
        return jobs

    def name_deaths(self, comm: MPI.Intracomm) -> str:
        """Return which processes of a communicator have died, as the end of a sentence, or ""."""
        dead = ranks_of_job(comm, dead_ranks(comm))
        return f", because {_have_died(dead)}" if dead else ""

    def send(self, handles: Iterable[Handle], note: Note) -> None:
        """Send a note to these members, except this one. Does not block."""
        for handle in handles:
            if handle.rank != MPI.COMM_WORLD.rank:
                note.member = handle.member
                send_to_all(MPI.COMM_WORLD, msgspec.msgpack.encode(note), [handle.rank], TAG)

    def keep(self, rank: int, note: Note) -> None:
        """Keep a note from a rank of the job, unless it is of an attempt that is over."""
        if note.uuid == self._present or note.uuid not in self._used:
            self._notes.setdefault(note.uuid, {})[rank, note.step] = note

    def notes_of(self, uuid: int) -> dict[tuple[int, int], Note]:
        return self._notes.setdefault(uuid, {})


# the numbers of the members that this process makes
_numbers = itertools.count()
_members: WeakValueDictionary[int, Member] = WeakValueDictionary()
_receiving = threading.Lock()


def _receive_notes() -> None:
    """Give all notes that have come to their members. Does not block."""
    with _receiving:
        while (message := receive_next(MPI.COMM_WORLD, TAG)) is not None:
            rank, data = message
            note = msgspec.msgpack.decode(data, type=Note)
            if (member := _members.get(note.member)) is not None:
                member.keep(rank, note)


# What failed attempts have made: other processes may still read there that the attempt has failed.
_failed: list[GroupJobs] = []


class _Attempt:
    """One attempt to make a group, and the `RankGroup` of its waits."""

    nap_after = NAP_AFTER_BETWEEN_NODES

    def __init__(self, member: Member, uuid: int, handles: Sequence[Handle], seconds: float) -> None:
        self._member = member
        self._uuid = uuid
        self._handles = handles
        self._what = f"reconfigure (uuid {uuid})"
        self._clock = Clock()
        self._seconds = seconds
        self._digest = hashlib.blake2b(" ".join(map(str, handles)).encode(), digest_size=16).hexdigest()
        # the ranks in MPI_COMM_WORLD, in the order of the new ranks
        self.ranks = [handle.rank for handle in handles]
        self.limits = Limits()
        # what the present wait is for
        self._awaited: tuple[int, Collection[int]] = (ARRIVED, ())
        self._jobs: GroupJobs | None = None

    def run(self, timeout_seconds: float) -> GroupJobs:
        """Make the group. Blocking."""
        everybody = range(len(self.ranks))
        self._tell(everybody, ARRIVED, self._digest)
        self._wait(ARRIVED, everybody)
        first = self._create(everybody)
        clock, left = Clock(), self._seconds - self._clock.seconds()
        with CommCreationGuard(first, lambda: clock.seconds() > left or bool(self._dead())) as guard:
            # The first communicator has another number on each rank. Open MPI 5.0 does not find it by that number when
            # another rank revokes it. Its copy has the same number on all ranks.
            self._jobs = jobs = GroupJobs(guard_comm(first.Dup()), timeout_seconds)
            self._tell(everybody, MADE)
            self._wait(MADE, everybody)
        if guard.broken:
            raise CollectiveError(self._death() or f"{self._what} has taken longer than {self._seconds:.3g} s")
        first.Free()
        return jobs

    def _create(self, everybody: Collection[int]) -> MPI.Intracomm:
        """Make the communicator of all members. Collective over them, blocking."""
        made: list[MPI.Intracomm | Exception] = []

        def create() -> None:
            world = MPI.COMM_WORLD.Get_group()
            members = world.Incl(self.ranks)
            try:
                # The digest differs in each attempt, because the handles do.
                made.append(MPI.Intracomm.Create_from_group(members, f"mpips {self._digest}"))
            except Exception as error:
                made.append(error)

        threading.Thread(target=create, name="mpips reconfigure", daemon=True).start()
        self._wait(CREATED, everybody, lambda: bool(made))
        if isinstance(made[0], Exception):
            raise made[0]
        return made[0]

    def give_up(self, error: BaseException) -> BaseException:
        """Tell the other members that the attempt has failed on this one. Return the error to raise."""
        if isinstance(error, MPI.Exception):
            error = self._explain(error)
        told = error if isinstance(error, CollectiveError) else None
        sentence = str(told or f"{self._what}: rank {MPI.COMM_WORLD.rank} of the job has given up: {error!r}")
        self._tell(range(len(self.ranks)), GIVEN_UP, sentence, kind_index(error))
        if self._jobs is not None:
            # Another member may have the group already, if all have made it.
            self._jobs.end(sentence)
            _failed.append(self._jobs)
        return error

    def _explain(self, error: MPI.Exception) -> CollectiveError:
        """Return the error that tells why MPI has raised. The report of a death may come later than MPI's error."""
        clock = Clock()
        while not (said := self._said()) and not self._dead() and clock.seconds() < DEATH_SECONDS:
            _receive_notes()
            time.sleep(1e-3)
        return said or CollectiveError(self._death() or f"{self._what} has failed in MPI: {error}")

    def _tell(self, places: Iterable[int], step: int, text: str = "", kind: int = 0) -> None:
        """Send a note to the members with these new ranks. Does not block."""
        self._member.send([self._handles[place] for place in places], Note(0, self._uuid, step, text, kind))

    def _wait(self, step: int, places: Collection[int], ready: Callable[[], bool] | None = None) -> None:
        """Wait until these members have said that they are at `step`, or until `ready()`. Blocking."""
        ranks = [self.ranks[place] for place in places if self.ranks[place] != MPI.COMM_WORLD.rank]
        self._awaited = step, ranks
        left = max(self._seconds - self._clock.seconds(), 1e-3)
        self.limits = Limits(read_limits().stall_seconds, left)

        def has_come() -> bool:
            _receive_notes()
            self.look(0.0)
            return not self.late() if ready is None else ready()

        drive(wait_until(has_come), self, self._what)

    def late(self) -> list[int]:
        """Return the ranks of the job from which the awaited notes have not come."""
        (step, ranks), notes = self._awaited, self._member.notes_of(self._uuid)
        return [rank for rank in ranks if (rank, step) not in notes]

    def look(self, waited: float) -> None:
        """Raise if a member has given up, passes other handles, or has died."""
        if (error := self._said()) is not None:
            raise error
        if self.late() and (death := self._death()):
            raise CollectiveError(death)

    def _said(self) -> CollectiveError | None:
        """Return the error of which the notes tell, or None."""
        notes = self._member.notes_of(self._uuid)
        for (rank, step), note in sorted(notes.items(), key=lambda item: item[0]):
            if step == GIVEN_UP:
                return KINDS[note.kind](note.text)
            if step == ARRIVED and (rank not in self.ranks or note.text != self._digest):
                return MismatchError(
                    f"{self._what}: ranks {rank} and {MPI.COMM_WORLD.rank} of the job pass different handles, or "
                    "a different order: pass the same list on all"
                )
        return None

    def _dead(self) -> list[int]:
        return sorted({*self.ranks} & {*dead_ranks(MPI.COMM_WORLD)})

    def _death(self) -> str:
        """Return a sentence that names the members that have died, or ""."""
        dead = self._dead()
        return f"{self._what}: {_have_died(dead)} meanwhile: reconfigure without what has died" if dead else ""


def _have_died(ranks: Sequence[int]) -> str:
    return f"{format_ranks(ranks)} of the job {'have' if len(ranks) > 1 else 'has'} died"
