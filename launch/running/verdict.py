"""Decide what the end of a rank means for its job: when the job must end, its exit code, and the messages about it.

In an ordinary job the first death of a rank ends the job (`OrdinaryVerdict`). With --spares the remaining ranks go on
after a death, and the job ends when no rank has work left (`SurvivingVerdict`). A *spare* is an extra rank that waits
until it can take the place of a dead rank. Both classes have the same methods.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from mpips.launch.running.presence import Death, Presence

# Seconds after the death of a rank until `mpips run` ends the job, unless mpirun has ended it before.
AFTER_A_DEATH = 4.0
# Seconds until `mpips run` ends the job, if a rank has died before MPI has started. The time is short, because MPICH's
# mpirun does not end such a job.
BEFORE_THE_START = 1.0
# Seconds until `mpips run` ends the job, after a rank has reported a failure. The time is long, because that rank is
# itself ending the job.
AFTER_A_FAILURE = 20.0
# Seconds until `mpips run` ends the job, after deaths that leave no rank with work.
AFTER_THE_LAST = 1.5
LOST = "mpirun has lost a host"
# the exit code of a job that has lost a host, if mpirun's exit code is 0
LOST_CODE = 1
# If a signal ends a rank, MPICH's mpirun exits with the bare number of the signal. If mpirun's exit code is one of
# these numbers, a signal is assumed.
BARE_CODES = (signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGTERM)


class MpirunEnd(NamedTuple):
    """The end of mpirun, and what is known about its cause."""

    # mpirun's exit code, or minus the number of the signal that ended mpirun
    mpirun_code: int
    # the signal to `mpips run` that ended the job, or 0
    signal: int = 0
    # True if `mpips run` has ended the job because a rank died, failed or never connected
    ended_for_ranks: bool = False
    # True if mpirun has lost a host while the job was running
    lost_host: bool = False
    # True if a rank on another host has reported that the job has ended well without the lost ranks
    survivors_ended_well: bool = False
    # ssh's message about the lost host, or ""
    cause: str = ""

    @property
    def loss(self) -> str:
        """A description of how the job lost a host."""
        return f"{LOST} ({self.cause})" if self.cause else LOST


class OrdinaryVerdict:
    """The rules for the end of a job without --spares, which ends when one of its ranks dies.

    While the job runs, `end_time` tells `mpips run` when to end it, and `news` what to report. After mpirun has ended,
    `code` is the exit code of the job, and `sentence` and `death` describe why the job ended.

    Args:
        presence: What is known about the ranks on this machine: which have started, failed or died.
        roles: The role of each rank, for messages.
    """

    def __init__(self, presence: Presence, roles: Sequence[str] = ()) -> None:
        self._presence = presence
        self._roles = roles
        self._end_time = math.inf

    def end_time(self, now: float) -> float:
        """Return the time at which `mpips run` must end the job. The time is infinite as long as the job may go on.

        `now` is the current time by the same clock.
        """
        if self._presence.deaths and self._end_time == math.inf:
            delay = AFTER_A_DEATH if self._presence.started else BEFORE_THE_START
            self._end_time = now + (AFTER_A_FAILURE if self._presence.code else delay)
        return self._end_time

    def is_work_over(self) -> bool:
        """True if it is certain that no rank has work left."""
        return False

    def news(self) -> Iterator[tuple[str, str]]:
        """Yield (kind, message) for each event since the last call. Jobs that end at the first death have no events."""
        return iter(())

    def code(self, end: MpirunEnd) -> int:
        """Return the exit code of the job. After a signal the code is 128 plus the signal's number, as in shells.

        Reports of ranks count more than mpirun's exit code, because MPICH's mpirun may exit with 0 after an interrupt.
        """
        code, presence = end.mpirun_code, self._presence
        if end.signal and (code or not presence.have_all_ended_well()):
            return 128 + end.signal
        # mpirun may crash while it ends the other ranks. So prefer the code that the failing rank has sent.
        if code and presence.code:
            return presence.code
        if presence.deaths and (end.ended_for_ranks or (code and presence.deaths[0].signal == signal.SIGINT)):
            return _exit_code(presence.deaths[0])
        if end.lost_host and not code:
            return LOST_CODE
        return code if code >= 0 else 128 - code

    def sentence(self, end: MpirunEnd) -> str:
        """Return the message about the death that ended the job.

        Return "" if no death ended the job, or if the cause has already been printed.
        """
        if end.lost_host:
            return f"{end.loss}: the job has ended"
        death = self._first_death(end)
        return f"{_describe(death, self._roles, self.code(end))}: the job has ended" if death else ""

    def death(self, end: MpirunEnd) -> str:
        """Return a description of the death of a rank or the loss of a host that has ended the job, or "".

        `mpips run --restarts` starts the job again after such a death. So the exit of a rank with a code of its own
        does not count as a death: after a restart the rank would exit again.
        """
        if end.lost_host:
            return end.loss
        death = self._first_death(end)
        return _describe(death, self._roles, self.code(end)) if death and death.code is None else ""

    def _first_death(self, end: MpirunEnd) -> Death | None:
        """Return the death that ended the job. None if something else ended it, or if a rank has reported a failure.

        After a death mpirun ends the other ranks by signals. This process may see the ends of those ranks before the
        end of the rank that died first. So the order of deaths does not tell which rank died first. If a rank has the
        same exit code as mpirun, this rank died first.
        """
        deaths, code = self._presence.deaths, end.mpirun_code
        if end.signal or not deaths or self._presence.code:
            return None
        if end.ended_for_ranks:
            return deaths[0]
        exited = next((death for death in deaths if code and death.code == code), None)
        if exited or not find_signal(code):
            return exited
        return next((death for death in deaths if code <= 128 or death.signal in (0, code - 128)), None)


class SurvivingVerdict:
    """The rules for the end of a job with --spares, whose remaining ranks continue when a rank dies.

    The job ends when no rank has work left. If some ranks are on other hosts, only mpirun notices that no rank has work
    left. The methods are those of `OrdinaryVerdict`.

    Args:
        presence: What is known about the ranks on this machine.
        roles: The role of each rank, for messages.
        spares: The number of spares, which are the last ranks of the job.
    """

    def __init__(self, presence: Presence, roles: Sequence[str], spares: int) -> None:
        self._presence = presence
        self._roles = roles
        # numbers of the ranks that are not spares
        self._working = range(len(roles) - spares)
        self._spares = {*range(len(roles))} - {*self._working}
        self._all_are_local = presence.ranks_here == len(roles)
        # how many deaths `news` has yielded
        self._reported_deaths = 0
        # how many replacements by spares `news` has yielded
        self._reported_replacements = 0
        self._end_time = math.inf

    def end_time(self, now: float) -> float:
        presence = self._presence
        if presence.failed or self._first_exit() or (presence.deaths and self.is_work_over()):
            self._end_time = min(self._end_time, now + AFTER_THE_LAST)
        elif presence.code is not None:
            self._end_time = min(self._end_time, now + AFTER_A_FAILURE)
        return self._end_time

    def _first_exit(self) -> Death | None:
        """Return the first death of a rank that exited with a code other than 0, as by os._exit, or None.

        MPI does not notice such an exit, and the other ranks would wait for the rank forever.
        """
        return next((death for death in self._presence.deaths if death.code), None)

    def is_work_over(self) -> bool:
        """True if it is certain that no rank has work left.

        Also True if a rank has died before MPI has started, because the other ranks would wait for it in MPI_Init
        forever.
        """
        presence = self._presence
        begun = presence.started or not presence.deaths
        return self._all_are_local and (not begun or presence.is_idle(self._working))

    def news(self) -> Iterator[tuple[str, str]]:
        deaths = self._presence.deaths
        while self._reported_deaths < len(deaths) and self._presence.code is None:
            death = deaths[self._reported_deaths]
            self._reported_deaths += 1
            goes_on = not (self._first_exit() or self.is_work_over())
            no_spare = "; no spare is left" if goes_on and self._spares and not self._spares_left() else ""
            after = "; the others go on" if goes_on else ": the job ends"
            yield "death seen", f"{_describe(death, self._roles)}{no_spare}{after}"
        for new in self._presence.replacements[self._reported_replacements :]:
            self._reported_replacements += 1
            step = f", from step {new.step} on" if new.step >= 0 else ""
            left = self._spares_left()
            yield "place taken", f"rank {new.rank} (spare) has become a {new.role}{step}; spares left: {left}"

    def _spares_left(self) -> int:
        used = {new.rank for new in self._presence.replacements} | {death.rank for death in self._presence.deaths}
        return len(self._spares - used)

    def code(self, end: MpirunEnd) -> int:
        """Return the exit code of the job.

        This is the exit code of a rank that failed. If no rank failed, it is 0 if any rank has ended well. If a signal
        ended the job or mpirun, the code is 128 plus the signal's number.
        """
        presence = self._presence
        if end.signal and (end.mpirun_code or presence.deaths):
            return 128 + end.signal
        if end.mpirun_code < 0 and not end.ended_for_ranks:
            return 128 - end.mpirun_code
        if presence.code is not None:
            return presence.code
        if death := self._first_exit():
            return _exit_code(death)
        if end.ended_for_ranks or self._all_are_local:
            if presence.ended_well:
                return 0
            if presence.deaths:
                return _exit_code(presence.deaths[0])
        if end.ended_for_ranks:
            return 1
        if end.lost_host:
            return end.mpirun_code or LOST_CODE if self._host_loss_ended_job(end) else 0
        return end.mpirun_code if end.mpirun_code >= 0 else 128 - end.mpirun_code

    def sentence(self, end: MpirunEnd) -> str:
        presence = self._presence
        if end.mpirun_code < 0 and not end.ended_for_ranks:
            return f"mpirun was ended by {signal.Signals(-end.mpirun_code).name}: the job has ended"
        if self._host_loss_ended_job(end):
            return f"{end.loss}: the job has ended"
        if self._first_exit():
            return ""
        early = end.ended_for_ranks and not presence.started
        if not (presence.deaths or early) or presence.ended_well or presence.code is not None or end.signal:
            return ""
        return f"{'no working rank is left' if presence.started else 'MPI had not started'}: the job has ended"

    def death(self, end: MpirunEnd) -> str:
        """Return a description of the last death before the job failed, or "".

        An exception that a rank raised after deaths is taken to be their consequence, so the last death is reported.
        """
        presence = self._presence
        if end.signal or not self.code(end):
            return ""
        if self._host_loss_ended_job(end):
            return end.loss
        reported = self._reported_deaths if presence.code is not None else max(self._reported_deaths, 1)
        before = presence.deaths[:reported]
        last = next((death for death in reversed(before) if death.code is None), None)
        return _describe(last, self._roles) if last else ""

    def _host_loss_ended_job(self, end: MpirunEnd) -> bool:
        """True if mpirun has lost a host, and no rank has ended well afterwards: the loss has ended the job."""
        return end.lost_host and not (end.survivors_ended_well or self._presence.ended_well)


def _exit_code(death: Death) -> int:
    return 128 + death.signal if death.signal else death.code or 1


def _describe(death: Death, roles: Sequence[str], code: int = 0) -> str:
    """Return a description of a death: the rank and, if this is certain, how it ended.

    If the rank's own status is unknown, the signal is taken from `code`, the exit code of the job. Only 128 plus a
    number counts as a signal. A smaller code could be the bare number of a signal (MPICH) or the argument of
    `os._exit`.
    """
    role = death.role or (roles[death.rank] if death.rank < len(roles) else "")
    number, how = death.signal or code - 128, "ended without a word"
    if death.code is not None:
        how = f"left with exit code {death.code}"
    elif number in set(signal.Signals):
        how = f"was ended by {signal.Signals(number).name}"
    return f"rank {death.rank}{f' ({role})' if role else ''} {how}"


def find_signal(code: int) -> int:
    """Return the signal that ended a rank, taken from the exit code of mpirun. Return 0 if the code means no signal.

    The code is 128 plus the signal's number or, with MPICH, only the number. A negative code means that a signal ended
    mpirun itself. Such a signal is not returned.
    """
    number = code - 128 if code > 128 else code if code in BARE_CODES else 0
    return number if number in set(signal.Signals) else 0
