"""Create the communicator of a process group again, from living processes: PyTorch's interface for faults.

A process group that was initialized with `enable_reconfigure=True` has a `GroupMember`. Each process gives its *handle*
(a short text) to the others, through a store that the program has. Then all processes of the next group pass the same
list of handles and the same number, the *uuid*, to `reconfigure`. The list may leave out processes of the old group and
contain other processes of the job, so the old group's communicator cannot serve. Neither can MPI_COMM_WORLD: once one
of its ranks has died, Open MPI refuses to make any communicator from it, even one without the dead rank.
(MPI_Comm_create_from_group, which needs no communicator, sometimes hangs in Open MPI 5.0.11, even if no process dies.)
So, while all ranks are alive, each rank makes a communicator with each other rank (`_pairs`). The communicator of two
living ranks contains no dead rank, so MPI accepts it. Two groups are merged by a communicator of their first ranks.

A process may die at any moment of an *attempt* to make the group:

1. The members first tell each other that they have called `reconfigure`, by notes. These are small messages on
   MPI_COMM_WORLD, which still works between living ranks. No rank waits for a note inside of MPI.
2. Single members are merged into groups of two, these into groups of four, and so on (`_merge_all`). The first ranks of
   two groups connect these by a copy of their pair's communicator. They make the copy when both have said that they are
   ready. If one of them dies, the other gets an error.
3. All other communicators are made in a `CommCreationGuard`, which revokes them on a death, so that no rank waits.
4. The members tell each other that they have the group. A member that sees a death before it has heard this from all
   members gives the attempt up, and tells the others why.

Steps 2 to 4 run in a thread. Sometimes a call of MPI does not return although its communicator was revoked. The thread
is then abandoned, and the caller gets an error.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple, TypeVar
from weakref import WeakValueDictionary

import msgspec
from mpi4py import MPI

from mpips.collectives import log
from mpips.collectives.clock import Clock
from mpips.collectives.errors import KINDS, CollectiveError, MismatchError, StallError, format_ranks, kind_index
from mpips.collectives.fabric.failure import DEATH_SECONDS, CommCreationGuard, dead_ranks, guard_comm
from mpips.collectives.fabric.requests import ArrivalBarrier, ranks_of_job, receive_next, send_to_all
from mpips.collectives.fabric.wait import NAP_AFTER_BETWEEN_NODES, Limits, drive, read_limits, wait_until
from mpips.collectives.recorder import own as recorder
from mpips.ending.process import say_role
from mpips.store.ranks import size as count_workers
from mpips.store.world import WATCHED
from mpips.torch.jobs import GroupJobs
from mpips.torch.tensors import ArgumentError

T = TypeVar("T")
LOG = log.get("mpips.torch")
PREFIX = "mpips"
# the tag of notes on MPI_COMM_WORLD, and of the calls that make communicators
TAG = 7302
# What a note reports: its sender has called `reconfigure` (ARRIVED), can make a communicator with the receiver (READY),
# makes it now (COPYING), has the group (MADE), or has given the attempt up (GIVEN_UP).
ARRIVED, READY, COPYING, MADE, GIVEN_UP = range(5)
# seconds between two checks of the thread that makes a group, and seconds that it may take to end after a death
JOIN_SECONDS, GIVING_UP_SECONDS = 2e-3, 2.0
# another rank of the job -> the communicator of this rank and that one; the lower rank of the job is rank 0
_pairs: dict[int, MPI.Intracomm] = {}


def make_pairs() -> None:
    """Make a communicator for each pair of ranks of the job. Collective over MPI_COMM_WORLD, blocking.

    A second call does nothing, and is local.

    Raises:
        CollectiveError: A rank died before all pairs were connected.
    """
    world = MPI.COMM_WORLD
    if _pairs or world.size == 1:
        return
    try:
        ArrivalBarrier(world, "init_process_group").wait(read_limits())
        everybody = world.Get_group()
        # All ranks make their pairs in the same order. So no rank waits for a rank that already waits in a later pair.
        for other in range(world.size):
            if other != world.rank:
                pair = everybody.Incl(sorted((other, world.rank)))
                _pairs[other] = world.Create_group(pair, TAG)
                pair.Free()
        everybody.Free()
    except MPI.Exception as error:
        _pairs.clear()
        why = _have_died(dead_ranks(world)) if dead_ranks(world) else str(error)
        sentence = f"init_process_group: {why}, before all ranks were connected: start the job again"
        raise CollectiveError(sentence) from None


class MemberHandle(NamedTuple):
    """A handle: the text that names a `GroupMember` to other processes, taken apart into its fields."""

    # the MPI job, as its launcher names it
    job: str
    # the rank in MPI_COMM_WORLD
    rank: int
    # the number of the `GroupMember` in its process, which may have several process groups
    member: int
    # number of attempts that the member had begun when it was asked for the handle
    attempts: int

    def __str__(self) -> str:
        return f"{PREFIX}:{self.job}:{self.rank}:{self.member}:{self.attempts}"

    @classmethod
    def parse(cls, text: str) -> MemberHandle:
        """Parse the text of a handle. Raise ArgumentError if `text` is not a handle of this job."""
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
    """A message that tells another `GroupMember` how far the sender is in an attempt to make a group.

    Its sender is the rank of MPI_COMM_WORLD that MPI reports for the message.
    """

    # the number (`MemberHandle.member`) of the receiving `GroupMember`: one process may have several
    member: int
    # the number of the attempt
    uuid: int
    # ARRIVED, READY, COPYING, MADE or GIVEN_UP
    step: int
    # In ARRIVED, the digest of the handles that the sender passes, so that the receiver can compare it with its own. In
    # GIVEN_UP, the message of the error. In other notes it is empty.
    text: str = ""
    # in GIVEN_UP, the index of the error's class in `KINDS`
    kind: int = 0


class GroupMember:
    """This process as a member of a process group that can be reconfigured. Creating one is local."""

    def __init__(self) -> None:
        self._number = next(_numbers)
        self._attempts = 0
        # the uuids of all attempts, and the uuid of the one that is under way
        self._used: set[int] = set()
        self._present: int | None = None
        # True once this process has been in a group
        self._has_joined = False
        # uuid of an attempt -> (the sender's rank in MPI_COMM_WORLD, `Note.step`) -> the note
        self._notes: dict[int, dict[tuple[int, int], Note]] = {}
        _members[self._number] = self

    @property
    def handle(self) -> MemberHandle:
        """This process's handle for the next attempt."""
        return MemberHandle(_job(), MPI.COMM_WORLD.rank, self._number, self._attempts)

    def check(self, uuid: int, texts: Iterable[str]) -> list[MemberHandle]:
        """Return the handles in the order of the new ranks. Local.

        A set of handles is ordered by the ranks of the job. If this process's own handle is among them and the handles
        cannot be used, this process tells the other members, so that they do not wait for it.

        Raises:
            ArgumentError: `uuid` or a handle cannot be used. Nothing was changed.
        """
        handles = [MemberHandle.parse(text) for text in texts]
        if not isinstance(texts, Sequence):
            handles.sort()
        if refusal := self._refuse(uuid, handles):
            sentence = f"reconfigure (uuid {uuid}): rank {MPI.COMM_WORLD.rank} of the job has refused: {refusal}"
            if any(handle[:3] == self.handle[:3] for handle in handles):
                self.send(handles, Note(0, uuid, GIVEN_UP, sentence))
            raise ArgumentError(f"reconfigure: {refusal}")
        return handles

    def _refuse(self, uuid: int, handles: Sequence[MemberHandle]) -> str:
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
        if any(maker.is_alive() for maker in _given_up):
            return (
                f"rank {own.rank} of the job is still in MPI for an earlier attempt, during which a process has died "
                "or given up, and can make no other group: leave its handle out, and end its process"
            )
        dead = sorted({*ranks} & {*dead_ranks(MPI.COMM_WORLD)})
        return f"{_have_died(dead)}: leave its handle out" if dead else ""

    def make(self, uuid: int, handles: Sequence[MemberHandle], seconds: float, timeout_seconds: float) -> GroupJobs:
        """Make the communicator of these members, in this order. Collective over the members, blocking.

        Args:
            uuid, handles: As `check` has accepted them, the same on all members.
            seconds: The longest time that this may take.
            timeout_seconds: The timeout of the group's operations.

        Raises:
            MismatchError: Another member passes other handles.
            StallError: The members have not made the group in time.
            CollectiveError: A member has died or has given up. All members that are still waiting raise an error, too.
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

    def send(self, handles: Iterable[MemberHandle], note: Note) -> None:
        """Send a note to these members, except this one. Does not block."""
        for handle in handles:
            if handle.rank != MPI.COMM_WORLD.rank:
                note.member = handle.member
                send_to_all(MPI.COMM_WORLD, msgspec.msgpack.encode(note), [handle.rank], TAG)

    def keep(self, rank: int, note: Note) -> None:
        """Store a note that a rank of the job has sent, unless it belongs to an attempt that is over."""
        if note.uuid == self._present or note.uuid not in self._used:
            self._notes.setdefault(note.uuid, {})[rank, note.step] = note

    def notes_of(self, uuid: int) -> dict[tuple[int, int], Note]:
        return self._notes.setdefault(uuid, {})


# the numbers of the members that this process makes
_numbers = itertools.count()
_members: WeakValueDictionary[int, GroupMember] = WeakValueDictionary()
_receiving = threading.Lock()


def _receive_notes() -> None:
    """Receive all notes that have arrived, and hand each to the `GroupMember` that it names. Does not block."""
    with _receiving:
        while (message := receive_next(MPI.COMM_WORLD, TAG)) is not None:
            rank, data = message
            note = msgspec.msgpack.decode(data, type=Note)
            if (member := _members.get(note.member)) is not None:
                member.keep(rank, note)


# Threads of failed attempts. They may never return from MPI, because Open MPI does not always end a call whose
# communicator was revoked. A process that has such a thread makes no other group, because it could wait for ever.
_given_up: list[threading.Thread] = []
# The jobs of failed attempts. They are kept, because other processes may still read in their shared memory that the
# attempt has failed.
_failed: list[GroupJobs] = []


def call_in_thread(make: Callable[[], T], failure: Callable[[], CollectiveError | None]) -> T:
    """Call `make`, which makes communicators, in a thread of its own, and return its result. Blocking.

    `failure` is called again and again, and returns why `make` can only fail, or None. If it has returned an error for
    some seconds and `make` has still not returned, then the thread is abandoned, and this function raises the error.
    """
    made: list[T] = []
    errors: list[BaseException] = []

    def call() -> None:
        try:
            made.append(make())
        except BaseException as error:
            errors.append(error)

    maker = threading.Thread(target=call, name="mpips new communicators", daemon=True)
    maker.start()
    hopeless = Clock()
    while maker.is_alive():
        maker.join(JOIN_SECONDS)
        if (why := failure()) is None:
            hopeless = Clock()
        elif hopeless.seconds() > GIVING_UP_SECONDS and not made and not errors:
            _given_up.append(maker)
            raise why
    if errors:
        raise errors[0]
    return made[0]


class _Attempt:
    """One attempt to make a group, and the `RankGroup` of its waits."""

    nap_after = NAP_AFTER_BETWEEN_NODES

    def __init__(self, member: GroupMember, uuid: int, handles: Sequence[MemberHandle], seconds: float) -> None:
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
        # communicators of the merges, which are not needed any more when all members have the group
        self._steps: list[MPI.Comm] = []
        # what this member waits for now: a step (`Note.step`), and the ranks of the job that have to report it
        self._awaited: tuple[int, Collection[int]] = (ARRIVED, ())
        self._jobs: GroupJobs | None = None

    def run(self, timeout_seconds: float) -> GroupJobs:
        """Make the group. Blocking."""
        everybody = range(len(self.ranks))
        self._tell(everybody, ARRIVED, self._digest)
        self._wait(ARRIVED, everybody)

        def failure() -> CollectiveError | None:
            _receive_notes()
            return self._failure()

        return call_in_thread(lambda: self._make(everybody, timeout_seconds), failure)

    def _make(self, everybody: Collection[int], timeout_seconds: float) -> GroupJobs:
        """Make the communicators, and wait until all members have them. Collective over the members, blocking."""
        own = MPI.COMM_SELF.Dup()
        with CommCreationGuard(own, lambda: self._failure() is not None) as guard:
            self._jobs = jobs = GroupJobs(self._merge_all(own), timeout_seconds, outlived=True)
            self._tell(everybody, MADE)
            self._wait(MADE, everybody)
        if guard.broken:
            raise self._failure() or CollectiveError(f"{self._what} has failed")
        for comm in self._steps:
            comm.Free()
        return jobs

    def _merge_all(self, own: MPI.Intracomm) -> MPI.Intracomm:
        """Merge communicators of single members into one of all. Collective over the members, blocking.

        In each round, members [low, middle) and [middle, high) are merged. So the new ranks have the order of the
        handles.
        """
        size, me = len(self.ranks), self.ranks.index(MPI.COMM_WORLD.rank)
        comm, width = own, 1
        while width < size:
            low = me // (2 * width) * (2 * width)
            middle = low + width
            if middle < size:
                is_upper = me >= middle
                bridge, far = MPI.COMM_SELF, 0
                if me in (low, middle):
                    bridge = self._copy_pair(low if is_upper else middle)
                    far = 1 - bridge.rank
                inter = guard_comm(comm.Create_intercomm(0, bridge, far, TAG))
                self._steps += [inter, comm]
                comm = guard_comm(inter.Merge(is_upper))
            width *= 2
        return comm

    def _copy_pair(self, other: int) -> MPI.Intracomm:
        """Make a communicator of this member and another one. Blocking.

        Once both members have said that they are ready, both call Dup, whatever else happens. If only one of them did,
        its call would match the other member's call of a later attempt. This also holds if this process is stopped
        (SIGSTOP) before it learns that the other member is ready, and the other member gives up while it waits in Dup.
        """
        self._tell([other], READY)
        self._wait(READY, [other])
        self._tell([other], COPYING)
        copy = guard_comm(_pairs[self.ranks[other]].Dup())
        self._steps.append(copy)
        return copy

    def give_up(self, error: BaseException) -> BaseException:
        """Tell the other members that the attempt has failed on this member. Return the error to raise."""
        if isinstance(error, MPI.Exception):
            error = self._explain(error)
        told = error if isinstance(error, CollectiveError) else None
        sentence = str(told or f"{self._what}: rank {MPI.COMM_WORLD.rank} of the job has given up: {error!r}")
        self._tell(range(len(self.ranks)), GIVEN_UP, sentence, kind_index(error))
        if self._jobs is not None:
            # If all members have made the group, another member may already use it.
            self._jobs.end(sentence)
            _failed.append(self._jobs)
        return error

    def _explain(self, error: MPI.Exception) -> CollectiveError:
        """Return the error that explains why a call of MPI has failed. Blocking.

        The report of a death may come later than MPI's error, so wait for it for a moment.
        """
        clock = Clock()
        while not (failure := self._failure()) and clock.seconds() < DEATH_SECONDS:
            _receive_notes()
            time.sleep(1e-3)
        return failure or CollectiveError(f"{self._what} has failed in MPI: {error}")

    def _tell(self, places: Iterable[int], step: int, text: str = "", kind: int = 0) -> None:
        """Send a note to the members with these new ranks. Does not block."""
        self._member.send([self._handles[place] for place in places], Note(0, self._uuid, step, text, kind))

    def _wait(self, step: int, places: Collection[int]) -> None:
        """Wait until the members with these new ranks have reported `step`. Blocking."""
        ranks = [self.ranks[place] for place in places if self.ranks[place] != MPI.COMM_WORLD.rank]
        self._awaited = step, ranks
        left = max(self._seconds - self._clock.seconds(), 1e-3)
        self.limits = Limits(read_limits().stall_seconds, left)

        def have_come() -> bool:
            _receive_notes()
            self.look(0.0)
            return not self.late()

        drive(wait_until(have_come), self, self._what)

    def late(self) -> list[int]:
        """Return the ranks of the job from which the awaited notes have not come."""
        (step, ranks), notes = self._awaited, self._member.notes_of(self._uuid)
        return [rank for rank in ranks if (rank, step) not in notes]

    def look(self, waited: float) -> None:
        """Raise if a member has given up, passes other handles, or has died.

        After this member has reported READY (`_copy_pair`), only the member that it waits for is checked. Once that
        member makes the communicator, nothing is checked any more.
        """
        step, awaited = self._awaited
        notes = self._member.notes_of(self._uuid)
        if step == READY and all((rank, COPYING) in notes for rank in awaited):
            return
        counted = awaited if step == READY else self.ranks
        if (error := self._said(counted)) is not None:
            raise error
        if self.late() and {*counted} & {*self._dead()}:
            raise self._death()

    def _failure(self) -> CollectiveError | None:
        """Return the error of an attempt that can only fail, or None."""
        if self._dead():
            return self._death()
        if (said := self._said()) is not None or self._clock.seconds() <= self._seconds:
            return said
        return StallError(f"{self._what} has taken longer than {self._seconds:.3g} s")

    def _said(self, ranks: Collection[int] | None = None) -> CollectiveError | None:
        """Return the error that the notes of these ranks of the job (None: of all members) report, or None."""
        notes = self._member.notes_of(self._uuid)
        for (rank, step), note in sorted(notes.items(), key=lambda item: item[0]):
            if step == GIVEN_UP and rank in (self.ranks if ranks is None else ranks):
                return KINDS[note.kind](note.text)
            if step == ARRIVED and (rank not in self.ranks or note.text != self._digest):
                return MismatchError(
                    f"{self._what}: ranks {rank} and {MPI.COMM_WORLD.rank} of the job pass different handles, or "
                    "a different order: pass the same list on all"
                )
        return None

    def _dead(self) -> list[int]:
        return sorted({*self.ranks} & {*dead_ranks(MPI.COMM_WORLD)})

    def _death(self) -> CollectiveError:
        return CollectiveError(f"{self._what}: {_have_died(self._dead())} meanwhile: reconfigure without what has died")


def _have_died(ranks: Sequence[int]) -> str:
    return f"{format_ranks(ranks)} of the job {'have' if len(ranks) > 1 else 'has'} died"
