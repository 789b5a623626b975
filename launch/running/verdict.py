"""Ranks' ends and what they mean for a job: when it has to be ended, its exit code, and the messages about it.

In an ordinary job the first death of a rank ends the job (`OneDeathEnds`). With --spares the other ranks go on, and the
job ends when no rank is left that works (`OthersGoOn`). Both classes have the same methods.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from mpips.launch.running.presence import Death, Presence

# How many seconds mpirun has to end the job by itself:
# after the death of a rank,
AFTER_A_DEATH = 4.0
# after a death before MPI has started, when MPICH's mpirun does not end the job,
BEFORE_THE_START = 1.0
# after a rank has said that it fails: it is then ending the job itself,
AFTER_A_FAILURE = 20.0
# and after deaths that leave no rank that works.
AFTER_THE_LAST = 1.5
LOST = "mpirun has lost a host"
# the exit code of a job that has lost a host, if mpirun's is 0
LOST_CODE = 1
# MPICH's mpirun exits with the number of the signal that ended a rank. These numbers are taken for signals.
BARE_CODES = (signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGTERM)


class End(NamedTuple):
    """The end of mpirun."""

    # its exit code, or minus the number of the signal that ended it
    returned: int
    # the signal to `mpips run` that ended the job, or 0
    heard: int = 0
    # `mpips run` has ended the job because of its ranks
    deserted: bool = False
    # mpirun has lost a host, and nobody had ended the job before
    lost: bool = False
    # the ranks on other hosts have said that the job has ended well
    well: bool = False
    # what ssh has said about the lost host
    cause: str = ""

    @property
    def loss(self) -> str:
        """The sentence about the lost host."""
        return f"{LOST} ({self.cause})" if self.cause else LOST


class OneDeathEnds:
    """The verdict on a job that ends when one of its ranks dies. `roles[i]` is the role of rank i."""

    def __init__(self, presence: Presence, roles: Sequence[str] = ()) -> None:
        self._presence = presence
        self._roles = roles
        self._due = math.inf

    def due(self, now: float) -> float:
        """Return the time at which `mpips run` has to end the job. Infinite as long as it may go on."""
        if self._presence.deaths and self._due == math.inf:
            waits = AFTER_A_DEATH if self._presence.started else BEFORE_THE_START
            self._due = now + (AFTER_A_FAILURE if self._presence.code else waits)
        return self._due

    def nobody_works(self) -> bool:
        """True if it is certain that no rank is left that has something to do."""
        return False

    def news(self) -> Iterator[tuple[str, str]]:
        """Yield what has happened since the last call in a job that goes on: the kind of event, and a sentence."""
        return iter(())

    def code(self, end: End) -> int:
        """Return the exit code of the job, in the way of shells: 128 plus the number of a signal.

        What ranks have said counts more than mpirun's exit code, which may be 0 after an interrupt (MPICH).
        """
        code, presence = end.returned, self._presence
        if end.heard and (code or not presence.everyone_left_well()):
            return 128 + end.heard
        # mpirun may have crashed while it ended the other ranks, so the rank's own code is preferred.
        if code and presence.code:
            return presence.code
        if presence.deaths and (end.deserted or (code and presence.deaths[0].signal == signal.SIGINT)):
            return _code_of(presence.deaths[0])
        if end.lost and not code:
            return LOST_CODE
        return code if code >= 0 else 128 - code

    def sentence(self, end: End) -> str:
        """Return the sentence about the death that ended the job, or "" if none did or if it was printed already."""
        if end.lost:
            return f"{end.loss}: the job has ended"
        death = self._first(end)
        return f"{_named(death, self._roles, self.code(end))}: the job has ended" if death else ""

    def death(self, end: End) -> str:
        """Return a description of the death of a rank or the loss of a host that has ended the job, or "".

        A rank that exited with a code of its own does not count: a restart would only repeat that.
        """
        if end.lost:
            return end.loss
        death = self._first(end)
        return _named(death, self._roles, self.code(end)) if death and death.code is None else ""

    def _first(self, end: End) -> Death | None:
        """Return the death that ended the job, or None if something else did or if a rank has reported its failure.

        mpirun ends the other ranks by signals, and they may be seen to end before the one that died first. So the order
        of deaths does not tell which was the first. A rank whose exit code is also mpirun's was the first.
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
    """The verdict on a job whose other ranks go on when one dies. The last `spares` ranks are spares.

    It ends at the latest when no rank works any more. If some ranks are on other hosts, only mpirun can tell that.
    """

    def __init__(self, presence: Presence, roles: Sequence[str], spares: int) -> None:
        self._presence = presence
        self._roles = roles
        # the ranks that work from the beginning
        self._working = range(len(roles) - spares)
        self._spares = {*range(len(roles))} - {*self._working}
        self._all_here = presence.here == len(roles)
        # how many deaths, and how many places taken by spares, `news` has yielded
        self._told = 0
        self._placed = 0
        self._due = math.inf

    def due(self, now: float) -> float:
        presence = self._presence
        if presence.failed or self._leaver() or (presence.deaths and self.nobody_works()):
            self._due = min(self._due, now + AFTER_THE_LAST)
        elif presence.code is not None:
            self._due = min(self._due, now + AFTER_A_FAILURE)
        return self._due

    def _leaver(self) -> Death | None:
        """Return the first death of a rank that exited with a code, as by os._exit, or None.

        MPI does not notice such a death, and the other ranks would wait for that rank.
        """
        return next((death for death in self._presence.deaths if death.code), None)

    def nobody_works(self) -> bool:
        """True if it is certain that no rank is left that works.

        Also true if a rank has died before MPI has started, because the others wait for it in the start of MPI.
        """
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
        """Return the exit code of the job: that of a rank that failed, or else 0 if any rank has ended well.

        A job whose mpirun was killed has failed.
        """
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
        """Return a description of the last death before the job failed, or "".

        If a rank raised an exception after deaths, the others could not go on without the dead ranks. So the exception
        counts as a consequence of the last death.
        """
        presence = self._presence
        if end.heard or not self.code(end):
            return ""
        if self._lost(end):
            return end.loss
        before = presence.deaths[: self._told] if presence.code is not None else presence.deaths[: max(self._told, 1)]
        last = next((death for death in reversed(before) if death.code is None), None)
        return _named(last, self._roles) if last else ""

    def _lost(self, end: End) -> bool:
        """True if the loss of a host has ended the job. It has not if any other rank has ended well."""
        return end.lost and not (end.well or self._presence.well)


def _code_of(death: Death) -> int:
    return 128 + death.signal if death.signal else death.code or 1


def _named(death: Death, roles: Sequence[str], code: int = 0) -> str:
    """Return a description of a death: the rank, and how it has ended as far as that is certain.

    `code` is mpirun's exit code, which tells the signal if the rank's status is not known. Only 128 plus a number is
    taken for a signal. A lower code may be the number of a signal (MPICH) or that of `os._exit`.
    """
    role = death.role or (roles[death.rank] if death.rank < len(roles) else "")
    number, how = death.signal or code - 128, "ended without a word"
    if death.code is not None:
        how = f"left with exit code {death.code}"
    elif number in set(signal.Signals):
        how = f"was ended by {signal.Signals(number).name}"
    return f"rank {death.rank}{f' ({role})' if role else ''} {how}"


def signal_in(code: int) -> int:
    """Return the number of the signal that has ended a rank, from mpirun's exit code; 0 if it does not tell of one.

    The code is 128 plus the number, or under MPICH the number alone. A code below 0 means a signal to mpirun itself.
    """
    number = code - 128 if code > 128 else code if code in BARE_CODES else 0
    return number if number in set(signal.Signals) else 0
