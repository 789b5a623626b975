"""The workers of a client, who make their calls together: all see that they do the same, or all raise one sentence."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any

from numpy.typing import NDArray

from collectives.errors import CollectiveError, MismatchError
from collectives.started import agree
from mpips import bridge, meet
from mpips.agreement import Agreement, Card
from mpips.arguments import Name
from mpips.keys import Key, Piece
from mpips.layout import Layout
from mpips.lines import Line
from mpips.session import Session, Task

Array = NDArray[Any]
Failing = Generator[bool | None, None, CollectiveError | None]


class Nameless(MismatchError):
    """Nobody in this client could tell which keys a push was for."""


class Members:
    """One worker among the members of its client."""

    def __init__(self, layout: Layout, lines: list[Line]) -> None:
        self.layout = layout
        self.session = Session(layout, lines)
        self._grouped = layout.kind.startswith("mpi_")
        self._members = 1 if layout.client is None else layout.client.Get_size()
        if self._members > 1:
            assert layout.client is not None
            bridge.patient(layout.client, layout.options.stall_seconds, layout.options.timeout_seconds)
        near = self._everybody(self.session.all_local)
        self._near = all(near[worker] for worker in range(*layout.clients[layout.client_number]))
        self.one_node = all(near)
        self._agreement: Agreement | None = None
        if self._grouped and self._members > 1 and layout.client is not None:
            first = layout.clients[layout.client_number].start
            self._agreement = Agreement(layout.client, first, self.one_node, layout.options)
        self._joined = False
        self.calling: list[Name] = []
        """The keys that the present call is yet to use, the present one first."""
        self.communicators = (("communicator", "client"),) if self._grouped else ()
        """Names of what all its operations hold collectives on."""

    def _everybody(self, flag: bool) -> list[bool]:
        assert self.layout.workers is not None
        return [data == b"1" for data in meet.exchange(self.layout.workers, b"1" if flag else b"0", "mpips.create")]

    def waits_for(self, worker: int) -> bool:
        """Whether this worker is in a call that waits for that one, a member of its client."""
        return self._joined and worker in range(*self.layout.clients[self.layout.client_number])

    @property
    def unfinished(self) -> bool:
        """Whether MPI still has to do with a call of the client that was given up."""
        return self._agreement is not None and self._agreement.unfinished

    def meanwhile(self, look: Callable[[], None]) -> None:
        """What to call now and then while this worker waits for the other members of its client in shared memory."""
        if self._members > 1:
            assert self.layout.client is not None
            bridge.meanwhile(self.layout.client, look)

    def collective(self, pushes: bool) -> bool:
        """Whether the other members of the client take part in this worker's pushes, or pulls."""
        return self._members > 1 and (pushes or not self._near or self.layout.asynchronous)

    def refuse(self, what: str, keys: Sequence[Key], pushes: bool, sentence: str, event: str) -> Task:
        """This worker's arguments are bad: tell those who wait. MismatchError where others take part in the call."""
        if self.collective(pushes):
            card = Card(what, [key.name for key in keys], pushes, sentence)
            yield from self._collective(card, sentence, lambda: None)
        for key in keys if pushes else ():
            self.skip(key, sentence, event)

    def skip(self, key: Key, sentence: str, event: str = "") -> None:
        """Count a push of the key that cannot be made: the round fails for all others."""
        self.session.begin(key, False)
        self.session.refuse(key, sentence, event)

    def fail(self, name: Name, count: int, sentence: str, event: str) -> None:
        """Skip pushes of a key until `count` are counted; one where that is 0."""
        key = self.session.key(name)
        if key is not None:
            for _ in range(count - key.round if count else 1):
                self.skip(key, sentence, event)

    def _card(self, keys: Sequence[Key], what: str, pushes: bool) -> Card:
        """What this worker calls of keys that go together."""
        return Card(what, self.calling or [key.name for key in keys], pushes, together=len(keys))

    def _agreed(self, keys: Sequence[Key], what: str, pushes: bool, call: Callable[[], object]) -> Task:
        """On one node, what all members of a client do together: they see that they do the same, or all raise."""
        if self._agreement is None:
            call()
            return
        card = self._card(keys, what, pushes)
        yield from self._collective(card, card.text, call)

    def _collective(self, card: Card, text: str, call: Callable[[], object]) -> Task:
        agreement = self._agreement
        assert agreement is not None
        self._joined = True
        try:
            fallback = yield from agreement.guarded(card, text, call)
        finally:
            self._joined = False
        if fallback is not None:
            self._disagree(agreement, card, fallback)

    def _compared(self, keys: Sequence[Key], what: str, pushes: bool, task: Task) -> Task:
        """Between nodes, what all members of a client do together: they compare their calls beside it, and where these
        differ all give up and raise. Until then nothing reaches the servers that needs all members."""
        agreement = self._agreement
        if agreement is None:
            yield from task
            return
        card = self._card(keys, what, pushes)
        agreement.compare(card.text)
        steps = self._unless_they_differ(agreement, card, any(0 in key.shape for key in keys), task)
        try:
            agreement.look()
            for _ in steps:
                agreement.look()
                yield False
        except BaseException as error:
            if not isinstance(error, CollectiveError):
                agreement.give_up(f"its {card.shown}", error)
            for key in keys if pushes and isinstance(error, CollectiveError) else ():
                key.excused = max(key.excused, key.round)  # it needs no second sentence, from the servers
            steps.close()
            task.close()
            raise

    def _unless_they_differ(self, agreement: Agreement, card: Card, empty: bool, task: Task) -> Task:
        same: bool | None = None
        failure: CollectiveError | None = None
        while empty and same is None:  # no message of the members holds back what goes to the servers
            same = agreement.compared()
            yield False
        try:
            for moved in task if same is not False else ():
                same = agreement.compared() if same is None else same
                if same is False:
                    break
                yield moved
        except CollectiveError as error:
            failure = error
        while same is None:
            same = agreement.compared()
            if same is None:
                yield False
        if not same:
            task.close()
            self._disagree(agreement, card, "")
        if failure is not None:
            raise failure

    def _tag(self, piece: Piece) -> int:
        """The tag of a piece's messages inside the client in this call."""
        return piece.number if self._agreement is None else self._agreement.tag(piece.number)

    def _disagree(self, agreement: Agreement, card: Card, fallback: str) -> None:
        """All members tell what they called; what any would push fails its next round on all clients; all raise."""
        sentence, cards = agreement.explain(card, fallback)
        counted = card.keys[: card.together] if card.pushes and not card.refusal else []  # by `begin`
        names = {name for other in cards if other.pushes for name in other.keys}
        for name in sorted(names, key=str):
            key = self.session.key(name)
            if key is not None:
                key.round += name not in counted
                self.session.refuse(key, sentence, f"client {self.layout.client_number} call {agreement.calls}")
        self.calling = []
        raise (MismatchError if names or not card.pushes else Nameless)(sentence)

    def _agreed_rows(self, key: Key, what: str, pushes: bool) -> Task:
        """All members of the client exchange rows of the key now, or all raise."""
        agree = self._agree
        yield from self._agreed([key], what, pushes, lambda: agree(f"{what} of {key.name!r}"))

    def _agree(self, text: str) -> None:
        assert self.layout.client is not None
        agree(bridge.living(self.layout.client), text)

    def _raising(self, task: Failing) -> Task:
        """Raise at the end what the task returns."""
        failure = yield from task
        if failure is not None:
            raise failure

    def _caught(self, task: Task) -> Failing:
        """Run a task to its end; its error is raised after the client's collective, so that no member waits for it."""
        try:
            yield from task
        except CollectiveError as error:
            return error
        return None

    def _raise(self, keys: Sequence[Key], failure: CollectiveError | None) -> None:
        """Raise a failure, or what has made a round of these keys fail: once for all of them."""
        for key in keys if failure is None else ():
            try:
                self.session.check(key)
            except CollectiveError as error:
                failure = failure or error
        if failure is not None:
            raise failure

    def meet(self, what: str) -> Task:
        """MismatchError everywhere in a client of which others are in a push, or a pull."""
        if self._agreement is not None:
            agree = self._agree
            yield from self._collective(Card(what, [], False), what, lambda: agree(f"{what} of the store"))
