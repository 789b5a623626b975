"""`mpips run --restarts`: a job that a death has ended starts again, and goes on from its newest checkpoint.

A *death* means that a signal has ended a rank or mpirun, or that a host no longer answers. A job whose program raises
an exception or exits with a code of its own is not started again, because it would do the same again. A job that a
signal to this command has ended is not started again either. With spares the other ranks first go on without the dead
one, and the job starts again only if they cannot.
"""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from mpips.collectives import log
from mpips.launch.hosts import Host, Placed
from mpips.launch.mpirun import Flavour, Job, Launcher, LauncherError, Machine, ask, build
from mpips.launch.running.process import Ended, tell
from mpips.launch.running.verdict import signal_in
from mpips.store.checkpoint import folder as files
from mpips.store.options import Options

LOG = log.get("mpips.launch")

# seconds for a host to answer
LIMIT = 20.0
# The program that tries whether a host answers. It must last a moment: Open MPI's mpirun may wait for ever for a
# program on another host that ends at once.
LASTING = ("sleep", "1")
# Exit codes of mpirun after a signal has ended a rank on another host, besides those that contain the signal's number.
# With Open MPI, 14 means that another rank has noticed first, and has ended the job with MPI_ERR_UNKNOWN.
KILLED_ELSEWHERE: dict[Flavour, tuple[int, ...]] = {"openmpi": (14,), "mpich": (), "intel": (255,)}


def check(options: Options, restarts: int) -> None:
    """Raise LauncherError if --restarts, --checkpoint and --every are not given together as they must be."""
    for name, value in (("checkpoint", options.checkpoint), ("every", options.every)):
        if restarts and not value:
            raise LauncherError(
                f"--restarts {restarts} needs --{name}: a job goes on from what its store has saved, as with "
                "--checkpoint DIR --every 100"
            )
    if bool(options.checkpoint) != bool(options.every):
        raise LauncherError(
            f"--checkpoint {options.checkpoint or '(none)'} and --every {options.every}: give both, a folder and the "
            "number of rounds between two saves"
        )


def until_it_ends(
    start: Callable[[Options], Ended],
    fitting: Callable[[Options], Options],
    options: Options,
    restarts: int,
    remote: bool,
    flavour: Flavour,
) -> int:
    """Run a job, and start it again after deaths. Blocks until it has ended for good, and returns its last exit code.

    Args:
        start: Runs the job once, with these options.
        fitting: Returns the options with which the job fits on the hosts that answer now. Raises LauncherError if it
            cannot go on. Called only if `remote`.
        options: The options of the first start.
        restarts: Start again at most this many times.
        remote: Some ranks are, or may be, on other hosts.
        flavour: The MPI, which decides what an exit code of mpirun means.
    """
    wanted, ended, left = options, start(options), restarts
    while ended.code and not ended.heard and left:
        # If the roles must change, a host has stopped answering. That counts as a death even if mpirun's exit code does
        # not tell of one.
        changed, failure = options, ""
        if remote:
            try:
                changed = fitting(wanted)
            except LauncherError as error:
                failure = str(error)
        why = reason(ended, remote, flavour) or ("a host does not answer" if changed != options or failure else "")
        if not why or failure:
            tell(f"mpips: the job cannot start again: {failure}" if why else "")
            break
        left -= 1
        step = files.newest_step(options.checkpoint)
        begin = "its beginning" if step is None else f"step {step}"
        spares = f" --spares {changed.spares}" if changed.spares >= 0 else ""
        roles = f", with -w {changed.workers} -s {changed.servers}{spares} on the hosts that answer"
        tell(
            f"mpips: {why}: the job starts again from {begin}, restart {restarts - left} of {restarts}"
            f"{roles if changed != options else ''}"
        )
        options = changed
        LOG.info(
            "restart %d of %d: %s, %d workers, %d servers",
            restarts - left,
            restarts,
            why,
            options.workers,
            options.servers,
        )
        ended = start(options)
    tell(ended.sentence)
    if ended.heard and (step := files.newest_step(options.checkpoint)):
        tell(f"mpips: step {step} is saved in {options.checkpoint}: the same command goes on from there")
    return ended.code


def reason(ended: Ended, remote: bool, flavour: Flavour) -> str:
    """Return a description of the death that has ended a job, or "" if no known death has ended it.

    `remote`: some ranks were on other hosts. Only mpirun's exit code tells about their deaths.
    """
    if not ended.code or ended.heard:
        return ""
    if ended.death:
        return ended.death
    if ended.returned < 0 and ended.code == 128 - ended.returned:
        return f"mpirun was ended by signal {-ended.returned}"
    if remote and (number := signal_in(ended.returned)):
        return f"a rank of another host was ended by signal {number}"
    if remote and ended.returned in KILLED_ELSEWHERE[flavour]:
        return f"mpirun has left with code {ended.returned}, as after the death of a rank"
    return ""


def answering(
    hosts: Sequence[Host], launcher: Launcher, machine: Machine, extra: Sequence[str] = ()
) -> tuple[Host, ...]:
    """Return the hosts on which this mpirun can start a process now. Blocks for little more than `LIMIT` at most."""
    with ThreadPoolExecutor(max(1, len(hosts))) as pool:
        answers = list(pool.map(lambda host: _answers(host.name, launcher, machine, extra), hosts))
    return tuple(host for host, answer in zip(hosts, answers) if answer)


def _answers(host: str, launcher: Launcher, machine: Machine, extra: Sequence[str]) -> bool:
    if host in ("localhost", socket.gethostname()):
        return True
    argv = build(launcher, Job(1, LASTING, {}, (Placed(host, 1),), extra=tuple(extra)), machine)
    try:
        return ask(argv, LIMIT).returncode == 0
    except subprocess.TimeoutExpired:
        return False


def fit(options: Options, hosts: Sequence[Host]) -> Options:
    """Return the options with roles reduced until the job fits on these hosts.

    Gives up spares first, then workers, and servers last. At least one worker stays, and at least one server if there
    were any. Raises LauncherError if the hosts cannot hold even that.
    """
    if not hosts:
        raise LauncherError("no host answers")
    if any(host.slots is None for host in hosts):
        return options
    slots, workers, servers = sum(host.slots or 0 for host in hosts), options.workers, options.servers
    spares = min(options.spares, max(0, slots - workers - servers))
    if slots < workers + servers:
        workers = max(1, slots - servers)
        servers = min(servers, slots - workers)
    if options.servers and not servers:
        raise LauncherError(f"the hosts that answer have {slots} slots, and a worker and a server need 2")
    clients = min(options.clients, workers)
    return replace(options, workers=workers, servers=servers, clients=clients, spares=spares)
