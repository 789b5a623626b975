"""What the package keeps for a communicator: its nodes, the room of this one, its plans. Made at first use."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any, NoReturn
from weakref import WeakSet

import numpy as np
from mpi4py import MPI

from collectives.choice import Choice
from collectives.errors import CollectiveError, MismatchError, StallError
from collectives.started import Started, close
from collectives.transport.cards import REFUSED, STALLED, WITHDRAWN, Card
from collectives.transport.room import Room
from collectives.tuner import table
from collectives.tuner.table import Table
from collectives.watch import SPIN, Agreed, Arrival, Patience, Watch, drive, limits

MOST_PLANS = 1024
LOOK_SECONDS = 1e-3  # between two looks around of a rank that tests what it has started
UNUSABLE = "this communicator is unusable after: {}"
FREED = "the communicator has been freed: use one that is still there, and make plans on it anew"
_recent: tuple[MPI.Comm | None, Session | None] = (None, None)
"""The last answer of `session`, which is mostly the next one too."""


@cache
def _key() -> int:
    """Under what communicators keep their session. Made at first use, so that importing this module starts no MPI."""
    return MPI.Comm.Create_keyval(delete_fn=lambda comm, key, session: session.close())


def session(comm: MPI.Comm | None, known_table: Table | None = None) -> Session:
    """The session of a communicator (None: COMM_WORLD). The first call for a communicator is collective, blocking.

    StallError there means that a rank had not come within the limits of the environment. A later call waits on for it,
    so the communicator is as good as before; what else the ranks do together on it must come after. `known_table`, the
    same on all ranks, counts in the first call, in place of the user's.
    """
    global _recent
    before, known = _recent
    if comm is before and known is not None and known.open:
        return known
    given, comm = comm, MPI.COMM_WORLD if comm is None else comm
    try:
        found: Any = comm.Get_attr(_key())
    except MPI.Exception:
        raise MismatchError(FREED) from None
    if not isinstance(found, Session):
        if not isinstance(comm, MPI.Intracomm):
            raise MismatchError("an intercommunicator has no collectives here: merge it first")
        found = _meet_and_open(comm, found, known_table)
    _recent = (given, found)
    return found


def _meet_and_open(comm: MPI.Intracomm, arrival: Arrival | None, known_table: Table | None) -> Session:
    """Wait for all ranks, from where an earlier call gave up, and make the session."""
    if arrival is None:
        arrival = Arrival(comm)
        comm.Set_attr(_key(), arrival)
    arrival.wait(*limits())
    made = Session(comm, known_table)
    comm.Set_attr(_key(), made)
    return made


class Session:
    """One communicator. `room` holds the ranks of this node; it is everybody when `nodes` is 1."""

    def __init__(self, comm: MPI.Intracomm, known_table: Table | None):
        self.comm = comm.Dup()
        self.rank, self.size = comm.rank, comm.size
        self.stall_seconds, self.timeout_seconds = limits()
        node = self.comm.Split_type(MPI.COMM_TYPE_SHARED)
        names = np.empty(node.size, np.int64)
        node.Allgather(np.array([self.rank], np.int64), names)
        room = Room.open(node, names.tolist())
        if room is None:
            node.Free()
            node = self.comm.Split(self.rank)
            room = Room.open(node, [self.rank])
            assert room is not None
        self.node, self.room = node, room
        self.node_of = self._nodes()
        self.nodes = len(set(self.node_of))
        room.whole = self.nodes == 1
        self.across = self._across()
        self.watch = Watch(self.comm, self.stall_seconds, self.timeout_seconds) if self.nodes > 1 else None
        self.table = known_table or table.shared(self.comm)
        self.plans: dict[Any, Any] = {}
        self.by_address: dict[Any, Any] = {}
        self.made: WeakSet[Any] = WeakSet()
        """Plans that hold something of MPI, kept here or by the user."""
        self._active: list[Started] = []
        self._due = 0.0
        self._choices: dict[str, Choice] = {}
        self._broken = ""
        self.open = True
        self.meanwhile: Callable[[], None] = lambda: None
        """Called now and then while this rank waits for others of its node."""
        self.tags_dealt = 0
        """To plans, whose messages they keep apart."""

    @property
    def active(self) -> list[Started]:
        """What has been started and is not done."""
        return self._active

    @active.setter
    def active(self, operations: list[Started]) -> None:
        self._active = operations
        self.room.hold(bool(operations or self._broken))

    @property
    def broken(self) -> str:
        """Why nothing more can be done on this communicator; "" while it can."""
        return self._broken

    @broken.setter
    def broken(self, why: str) -> None:
        self._broken = why
        self.room.hold(bool(self._active or why))

    def patient(self, stall_seconds: float, timeout_seconds: float) -> None:
        """How long a wait may last before it warns, and before it raises (0: never)."""
        for one in (self, self.watch):
            if one is not None:
                one.stall_seconds, one.timeout_seconds = stall_seconds, timeout_seconds

    def meet_always(self) -> None:
        """Calls compiled from here on return on no rank before all have come to them, for who counts on that; all ranks
        say so at the same place."""
        self.room.meets_always = True

    def _nodes(self) -> list[int]:
        """For each rank the lowest rank of its node."""
        first = np.array([min(self.room.names)], np.int64)
        everybody = np.empty(self.size, np.int64)
        self.comm.Allgather(first, everybody)
        return everybody.tolist()

    def _across(self) -> MPI.Comm | None:
        """The ranks with this one's place in their nodes, one a node; None where nodes differ in size. Collective."""
        if self.nodes == 1 or len({self.node_of.count(node) for node in self.node_of}) > 1:
            return None
        return self.comm.Split(self.room.rank, self.rank)

    def close(self) -> None:
        """When the user's communicator is freed: collective, as that is. What has been given up may still be under way
        on the communicators that carry messages: they stay."""
        self.open, given_up = False, self.broken
        self.broken = FREED
        self._give_up(MismatchError(FREED))
        if MPI.Is_finalized():
            return
        self._let_go()
        if self.watch is not None:
            self.watch.free()
        self.room.close()
        self.node.Free()
        for comm in (self.across, self.comm):
            if comm is not None and not given_up:
                comm.Free()

    def choice(self, text: str, handicaps: Sequence[float] = (1.0, 1.0)) -> Choice:
        """Which way serves a sort of call best. The first where ranks do not meet in one room: another may block in
        MPI, and must not before all have come."""
        return self._choices.setdefault(text, Choice(self.comm, handicaps, decided=self.nodes > 1))

    # Agreement

    def agree(self, text: str) -> None:
        """Collective, blocking: MismatchError on every rank unless all bring the same text."""
        if self.watch is not None:
            self._tell(self.watch.agree, text)
        elif self.size > 1:
            self._meet(Card(text))

    def _tell(self, say: Callable[[str], None], text: str) -> None:
        """Say it through the watch, between nodes: after a mismatch, of which all ranks hear, they go on as one."""
        try:
            say(text)
        except Agreed:
            self._renew()
            raise

    def refuse(self, sentence: str) -> NoReturn:
        """This rank cannot do what is asked: it and all others raise MismatchError with the same sentence."""
        if self.size > 1:
            if self.watch is not None:
                self._tell(self.watch.refuse, sentence)
            self.finish_started()
            self._meet(Card(sentence, refused=REFUSED))
        raise MismatchError(sentence)

    def _meet(self, card: Card) -> None:
        def steps() -> Iterator[None]:
            room = self.room
            yield from room.caught_up()
            room.enter(room.publish(card))
            yield from room.meet()
            room.cards(room.tokens_now())

        self.drive(steps(), card.text)

    def _renew(self) -> None:
        """Messages of the failed operation may still be on their way: leave them behind on the old communicator. Ranks
        that had entered it on their node and others that had not go on as one."""
        assert self.watch is not None
        self.comm = self.watch.comm.Dup()
        self.across = self._across()
        self._choices.clear()
        counts = np.array([self.room.operation, self.room.phase], np.int64)
        self.node.Allreduce(MPI.IN_PLACE, counts, MPI.MAX)
        self.room.skip_to(*counts.tolist())
        self._let_go()
        self._give_up(CollectiveError("given up, as another collective failed"))

    def _let_go(self) -> None:
        """Plans give back what they hold of the communicators."""
        for plan in list(self.made):
            plan.release()
        self.plans.clear()
        self.by_address.clear()

    def _give_up(self, error: CollectiveError) -> None:
        given_up = [operation for operation in self.active if not operation.done]
        for operation in given_up:
            operation.done, operation.error = True, error
        self.active = []
        for operation in given_up:  # or the garbage collector would, and wait then for who has long left
            close(operation.steps)

    # Running

    def patience(self, what: str) -> Patience:
        if self.watch is not None:
            return self.watch.patience(what, self.watch.late)
        return Patience(what, self.room.late, self.stall_seconds, self.timeout_seconds, self._keep_moving)

    def _keep_moving(self, waited: float) -> None:
        """A peer may need this rank's MPI to get its earlier messages before it can come, or comes no more."""
        self.comm.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG)
        self.meanwhile()
        if gone := self.room.gone():
            if gone.refused == WITHDRAWN:
                raise CollectiveError(gone.text)
            self._part(gone.text, gone.refused)
        if sentence := self.room.astray():
            self._part(sentence, REFUSED)

    def _part(self, sentence: str, why: int) -> NoReturn:
        """Ranks have made different numbers of calls, and so cannot go on as one."""
        self._break(sentence, why)
        raise (MismatchError if why == REFUSED else StallError)(sentence)

    def drive(self, steps: Iterator[None], what: str) -> None:
        """Run an operation to its end, or give it up."""
        try:
            self.run(steps, what)
        except BaseException as error:
            self.leave(what, error)
            close(steps)
            raise

    def leave(self, what: str, error: BaseException) -> None:
        """An operation has raised: see that nobody counts on this rank, nor this rank on the communicator if some are
        still in the operation."""
        room, sentence = self.room, self.room.given_up(what, error)
        taken_back, room.taken_back = room.taken_back, False  # who comes learns
        if taken_back or isinstance(error, (MismatchError, StallError)):  # of which all know
            pass
        elif isinstance(error, CollectiveError):
            self._break(str(error))
        elif self.size > 1 and not (self.watch is None and room.withdraw(sentence)):
            self._break(sentence)
        if room.lost:
            self._break(sentence)
        room.taken_back = False

    def _break(self, sentence: str, why: int = WITHDRAWN) -> None:
        """Nothing more can be done on this communicator, nor what was started on it and waits for its turn; who waits
        for this rank hears why."""
        if not self.broken:
            self.broken = sentence
            try:
                self._tell_gone(sentence, why)
            except KeyboardInterrupt:
                self._tell_gone(sentence, why)
                raise
        self._give_up(CollectiveError(UNUSABLE.format(self.broken)))

    def _tell_gone(self, sentence: str, why: int) -> None:
        if self.watch is None:
            self.room.go(sentence, why)
        else:
            self.watch.leave(sentence)

    def run(self, steps: Iterator[None], what: str) -> None:
        """Run an operation to its end; who calls this gives up what raises, by `leave`."""
        try:
            while True:
                try:
                    return drive(steps, lambda: self.patience(what), min(self.room.spins, SPIN))
                except StallError as error:
                    if self._stalled(error):
                        raise
        except Agreed:
            self._renew()
            raise
        except MismatchError as error:
            if self.watch is not None:  # seen in the room of this node: the other nodes do not know
                self._tell(self.watch.object, str(error))
            raise

    def _stalled(self, error: StallError) -> bool:
        """Whether the operation has failed; not so if those have come meanwhile for whom this rank waited."""
        if self.watch is None and self.room.ahead is None and not self.room.complete():
            return self.room.withdraw(str(error))
        self._break(str(error), STALLED if self.room.ahead is not None else WITHDRAWN)
        return True

    def check_usable(self) -> None:
        if not self.open:
            raise MismatchError(FREED)
        if self.broken:
            raise CollectiveError(UNUSABLE.format(self.broken))

    def start(self, operation: Started) -> None:
        """Begin a run. Exclusive runs of one session take turns in the order in which they were started."""
        self.active = [*self.active, operation]
        self.advance()

    def abandon(
        self, what: str, operation: Started | None, before: Sequence[Started], error: BaseException
    ) -> None:
        """The start of `operation`, after those `before` it, has raised."""
        if operation is None:
            self.leave(what, error)
        elif not operation.done:
            self._give_up_front(operation, [*before, operation], error)

    def advance(self) -> None:
        """Move what has been started, as far as it goes without waiting."""
        taken = False
        try:
            for operation in self.active:
                if not (operation.done or (operation.exclusive and taken)):
                    self._step(operation)
                    taken = taken or (operation.exclusive and not operation.done)
        finally:
            self.active = [operation for operation in self.active if not operation.done]

    def look(self, what: str) -> None:
        """Hear now and then, beside compute, of ranks that do nothing more here; who waits does so anyway."""
        if time.monotonic() < self._due:
            return
        self._due = time.monotonic() + LOOK_SECONDS
        try:
            if self.watch is None:
                self._keep_moving(0.0)
            else:
                self.watch.look(0.0)
        except Agreed:
            self._renew()
            raise
        except CollectiveError as error:
            self.leave(what, error)
            raise

    def _step(self, operation: Started) -> None:
        try:
            operation.step()
        except BaseException as error:
            if not operation.done:  # interrupted before or after the step itself
                operation.give_up(error)
                close(operation.steps)
            self.leave(operation.what, error)
            raise
        if operation.error is not None:
            self.leave(operation.what, operation.error)

    def finish(self, operation: Started) -> None:
        """Run until `operation`, and with it what it has to wait for, is done; raises its error."""

        def steps() -> Iterator[None]:
            while not operation.done:
                self.advance()
                yield
            if operation.error is not None:
                raise operation.error

        before = list(self.active)
        try:
            self.run(steps(), operation.what)
        except BaseException as error:
            if not operation.done:
                self._give_up_front(operation, before, error)
            raise

    def _give_up_front(self, operation: Started, before: Sequence[Started], error: BaseException) -> None:
        """A wait for `operation` has been interrupted, or took too long: in a step of what was under way, or between
        the steps of `operation` or, where it is not yet its turn, of the one before."""
        front = next((one for one in before if one.given_up_for is error), None)
        if front is None:
            waiting = (one for one in self.active if one.exclusive)
            front = next(waiting, operation) if operation.exclusive else operation
            front.give_up(error)
            close(front.steps)
            self.active = [one for one in self.active if one is not front]
            self.leave(front.what, error)
        if front is not operation and not isinstance(error, StallError):
            self._break(self.room.given_up(operation.what, error))

    def finish_started(self) -> None:
        """Run all that has been started to its end."""
        while self.active:
            self.finish(self.active[-1])
