"""Ranks' ends and what they mean for a job: when it has to be ended, its exit code, and what is said.

Without survival the job ends with the first rank that dies. With it the others go on, and the job ends when nobody is
left who works.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from mpips.launch.running.presence import Death, Presence

AFTER_A_DEATH = 4.0  # seconds for mpirun to end a job, one of whose ranks has died, by itself
BEFORE_THE_START = 1.0  # the same before MPI has started: MPICH's does not end it
AFTER_A_FAILURE = 20.0  # the same where a rank said before that it ends the job: that is under way
AFTER_THE_LAST = 1.5  # the same where ranks have died and nobody who is left works
LOST = "mpirun has lost a host"
LOST_CODE = 1  # of such a job, where mpirun leaves with 0
BARE_CODES = (signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGTERM)


class End(NamedTuple):
    """The end of mpirun.

    Its return code, below 0 for a signal; the signal that we were sent to end the job; whether we have ended it because
    of its ranks; whether it has lost a host before; whether the others ended well; and what ssh has said of the host.
    """

    returned: int
    heard: int = 0
    deserted: bool = False
    lost: bool = False
    well: bool = False
    cause: str = ""

    @property
    def loss(self) -> str:
        """A lost host in words."""
        return f"{LOST} ({self.cause})" if self.cause else LOST


class OneDeathEnds:
    """A job that ends when one of its ranks dies. `roles[i]` is what rank i is."""

    def __init__(self, presence: Presence, roles: Sequence[str] = ()) -> None:
        self._presence, self._roles = presence, roles
        self._due = math.inf

    def due(self, now: float) -> float:
        """Return from when on the job has to be ended; infinite while it may go on."""
        if self._presence.deaths and self._due == math.inf:
            waits = AFTER_A_DEATH if self._presence.started else BEFORE_THE_START
            self._due = now + (AFTER_A_FAILURE if self._presence.code else waits)
        return self._due

    def nobody_works(self) -> bool:
        """Return whether it is sure that no rank is left that has something to do."""
        return False

    def news(self) -> Iterator[tuple[str, str]]:
        """Yield what ranks have come to since, while the job goes on: the kind of it, and a sentence."""
        return iter(())

    def code(self, end: End) -> int:
        """Return the exit code of the job, as of a shell. Ranks know better than mpirun: MPICH's may have 0 after an
        interrupt."""
        code, presence = end.returned, self._presence
        if end.heard and (code or not presence.everyone_left_well()):
            return 128 + end.heard
        if code and presence.code:  # mpirun may have crashed while it ended the others
            return presence.code
        if presence.deaths and (end.deserted or (code and presence.deaths[0].signal == signal.SIGINT)):
            return _code_of(presence.deaths[0])
        if end.lost and not code:
            return LOST_CODE
        return code if code >= 0 else 128 - code

    def sentence(self, end: End) -> str:
        """Return what is to be said of a death that ended the job; "" where nothing is."""
        if end.lost:
            return f"{end.loss}: the job has ended"
        death = self._first(end)
        return f"{_named(death, self._roles, self.code(end))}: the job has ended" if death else ""

    def death(self, end: End) -> str:
        """Return who has died, and how, where a signal to a rank has ended the job; else ""."""
        if end.lost:
            return end.loss
        death = self._first(end)
        return _named(death, self._roles, self.code(end)) if death and death.code is None else ""

    def _first(self, end: End) -> Death | None:
        """Return the rank that died first, where that ended the job and nobody has said it yet.

        The others are ended by mpirun's signals, and may be seen to end before it. So one that left with the code that
        mpirun has is the first.
        """
        deaths, code = self._presence.deaths, end.returned
        if end.heard or not deaths or self._presence.code:
            return None
        if end.deserted:
            return deaths[0]
        left = next((death for death in deaths if code and death.code == code), None)
        if left or not signal_in(code):
            return left
        return next((death for death in deaths if code <= 128 or death.signal in (0, code - 128)), None)


class OthersGoOn:
    """A job whose other ranks go on when some die. It ends, at the latest, when none of its ranks on this machine
    works any more; where ranks are on others, too, only mpirun knows. `spares` are the last ranks."""

    def __init__(self, presence: Presence, roles: Sequence[str], spares: int) -> None:
        self._presence, self._roles = presence, roles
        self._working = range(len(roles) - spares)
        self._spares = {*range(len(roles))} - {*self._working}
        self._all_here = presence.here == len(roles)
        self._told = self._placed = 0
        self._due = math.inf

    def due(self, now: float) -> float:
        presence = self._presence
        if presence.failed or self._leaver() or (presence.deaths and self.nobody_works()):
            self._due = min(self._due, now + AFTER_THE_LAST)
        elif presence.code is not None:
            self._due = min(self._due, now + AFTER_A_FAILURE)
        return self._due

    def _leaver(self) -> Death | None:
        """Return the first rank that left with an exit code, as by os._exit.

        MPI does not take it for dead, and the others would wait for it.
        """
        return next((death for death in self._presence.deaths if death.code), None)

    def nobody_works(self) -> bool:
        """Also where one has died before MPI had started: the others wait for it there."""
        presence = self._presence
        begun = presence.started or not presence.deaths
        return self._all_here and (not begun or presence.is_idle(self._working))

    def news(self) -> Iterator[tuple[str, str]]:
        deaths = self._presence.deaths
        while self._told < len(deaths) and self._presence.code is None:
            death, self._told = deaths[self._told], self._told + 1
            goes_on = not (self._leaver() or self.nobody_works())
            none = "; no spare is left" if goes_on and self._spares and not self._spares_left() else ""
            after = "; the others go on" if goes_on else ": the job ends"
            yield "death seen", f"{_named(death, self._roles)}{none}{after}"
        for taken in self._presence.taken[self._placed :]:
            self._placed += 1
            step, left = f", from step {taken.step} on" if taken.step >= 0 else "", self._spares_left()
            yield "place taken", f"rank {taken.rank} (spare) has become a {taken.role}{step}; spares left: {left}"

    def _spares_left(self) -> int:
        used = {taken.rank for taken in self._presence.taken} | {death.rank for death in self._presence.deaths}
        return len(self._spares - used)

    def code(self, end: End) -> int:
        """Return that of a rank that failed; else 0 where one ended well. A killed mpirun is a failure, too."""
        presence = self._presence
        if end.heard and (end.returned or presence.deaths):
            return 128 + end.heard
        if end.returned < 0 and not end.deserted:
            return 128 - end.returned
        if presence.code is not None:
            return presence.code
        if leaver := self._leaver():
            return _code_of(leaver)
        if end.deserted or self._all_here:
            if presence.well:
                return 0
            if presence.deaths:
                return _code_of(presence.deaths[0])
        if end.deserted:
            return 1
        if end.lost:
            return end.returned or LOST_CODE if self._lost(end) else 0
        return end.returned if end.returned >= 0 else 128 - end.returned

    def sentence(self, end: End) -> str:
        presence = self._presence
        if end.returned < 0 and not end.deserted:
            return f"mpirun was ended by {signal.Signals(-end.returned).name}: the job has ended"
        if self._lost(end):
            return f"{end.loss}: the job has ended"
        if self._leaver():
            return ""
        early = end.deserted and not presence.started
        if not (presence.deaths or early) or presence.well or presence.code is not None or end.heard:
            return ""
        return f"{'no rank is left that works' if presence.started else 'MPI had not started'}: the job has ended"

    def death(self, end: End) -> str:
        """Return the last one before the job failed: an exception after deaths tells that the others could not go
        on."""
        presence = self._presence
        if end.heard or not self.code(end):
            return ""
        if self._lost(end):
            return end.loss
        before = presence.deaths[: self._told] if presence.code is not None else presence.deaths[: max(self._told, 1)]
        last = next((death for death in reversed(before) if death.code is None), None)
        return _named(last, self._roles) if last else ""

    def _lost(self, end: End) -> bool:
        """Return whether the job ended with a host. Where one that was left has ended well, it did not."""
        return end.lost and not (end.well or self._presence.well)


def _code_of(death: Death) -> int:
    return 128 + death.signal if death.signal else death.code or 1


def _named(death: Death, roles: Sequence[str], code: int = 0) -> str:
    """Return who died, and what is sure of how: as it was seen, or by mpirun's exit code.

    128 and a number stands for a signal, as in shells. A lower code does not say whether it is a signal's number, as
    MPICH has it, or that of `os._exit`.
    """
    role = death.role or (roles[death.rank] if death.rank < len(roles) else "")
    number, how = death.signal or code - 128, "ended without a word"
    if death.code is not None:
        how = f"left with exit code {death.code}"
    elif number in set(signal.Signals):
        how = f"was ended by {signal.Signals(number).name}"
    return f"rank {death.rank}{f' ({role})' if role else ''} {how}"


def signal_in(code: int) -> int:
    """Return the signal of a rank that mpirun's exit code tells of; 0 for none.

    It is 128 and its number, or, as MPICH has it, the number alone. A code below 0 is of a signal that ended mpirun
    itself.
    """
    number = code - 128 if code > 128 else code if code in BARE_CODES else 0
    return number if number in set(signal.Signals) else 0
