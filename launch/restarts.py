"""`mpips run --restarts`: start a job again after a death, from its newest checkpoint.

A *death* means that a signal has ended a rank or mpirun, or that a host no longer answers. The job is not started again
in two cases. In the first case the program raised an exception or exited with a code of its own, and would do so again.
In the second case a signal to `mpips run` ended the job. With spares the remaining ranks first try to go on without the
dead rank, and the job starts again only if they cannot.
"""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from mpips.collectives import log
from mpips.launch.hosts import Host, RankBlock
from mpips.launch.mpirun import Flavour, Job, Launcher, LauncherError, Machine, build, run_tool
from mpips.launch.running.process import JobEnd, print_error
from mpips.launch.running.verdict import find_signal
from mpips.store.checkpoint import folder as files
from mpips.store.options import Options

LOG = log.get("mpips.launch")

# seconds that a host may take to answer
LIMIT = 20.0
# The program that tests whether a host answers. It must run for a moment: if a program on another host ends at once,
# Open MPI's mpirun may wait for it forever.
PROBE = ("sleep", "1")
# Exit codes of mpirun after a signal has ended a rank on another host. Exit codes that contain the signal's number are
# not listed. With Open MPI, 14 means that another rank noticed the death first and ended the job with MPI_ERR_UNKNOWN.
CODES_AFTER_REMOTE_DEATH: dict[Flavour, tuple[int, ...]] = {"openmpi": (14,), "mpich": (), "intel": (255,)}


def check(options: Options, restarts: int) -> None:
    """Raise LauncherError if the options --restarts, --checkpoint and --every do not fit together.

    --restarts needs the other two, and these two need each other.
    """
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


def run_with_restarts(
    start: Callable[[Options], JobEnd],
    fit_to_hosts: Callable[[Options], Options],
    options: Options,
    restarts: int,
    remote: bool,
    flavour: Flavour,
) -> int:
    """Run a job, and start it again after deaths. Blocks until the last run has ended, and returns its exit code.

    Args:
        start: Runs the job once with the given options.
        fit_to_hosts: Takes `options` and returns options with which the job fits on the hosts that answer now. Raises
            LauncherError if the job cannot run on these hosts. Called only if `remote` is True.
        options: The options of the first start.
        restarts: The number of times that the job may start again.
        remote: True if some ranks are, or may be, on other hosts.
        flavour: The MPI. The meaning of mpirun's exit codes depends on it.
    """
    wanted, left = options, restarts
    end = start(options)
    while end.code and not end.signal and left:
        # A host that has stopped answering counts as a death, whatever mpirun's exit code is. In that case
        # `fit_to_hosts` returns other roles, or raises an error.
        changed, failure = options, ""
        if remote:
            try:
                changed = fit_to_hosts(wanted)
            except LauncherError as error:
                failure = str(error)
        why = describe_death(end, remote, flavour) or (
            "a host does not answer" if changed != options or failure else ""
        )
        if not why or failure:
            print_error(f"mpips: the job cannot start again: {failure}" if why else "")
            break
        left -= 1
        step = files.newest_step(options.checkpoint)
        start_point = "its beginning" if step is None else f"step {step}"
        spares = f" --spares {changed.spares}" if changed.spares >= 0 else ""
        roles = f", with -w {changed.workers} -s {changed.servers}{spares} on the hosts that answer"
        print_error(
            f"mpips: {why}: the job starts again from {start_point}, restart {restarts - left} of {restarts}"
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
        end = start(options)
    print_error(end.sentence)
    if end.signal and (step := files.newest_step(options.checkpoint)):
        print_error(f"mpips: step {step} is saved in {options.checkpoint}: the same command goes on from there")
    return end.code


def describe_death(end: JobEnd, remote: bool, flavour: Flavour) -> str:
    """Return a description of the death that has ended a job, or "" if no death has ended the job.

    If `remote` is True, some ranks were on other hosts, and only mpirun's exit code reports the deaths of these ranks.
    """
    if not end.code or end.signal:
        return ""
    if end.death:
        return end.death
    code = end.mpirun_code
    if code < 0 and end.code == 128 - code:
        return f"mpirun was ended by signal {-code}"
    if remote and (number := find_signal(code)):
        return f"a rank of another host was ended by signal {number}"
    if remote and code in CODES_AFTER_REMOTE_DEATH[flavour]:
        return f"mpirun has left with code {code}, as after the death of a rank"
    return ""


def find_answering_hosts(
    hosts: Sequence[Host], launcher: Launcher, machine: Machine, extra: Sequence[str] = ()
) -> tuple[Host, ...]:
    """Return the hosts on which this mpirun can start a process now. Blocks for about `LIMIT` seconds at most."""
    with ThreadPoolExecutor(max(1, len(hosts))) as pool:
        answers = list(pool.map(lambda host: _answers(host.name, launcher, machine, extra), hosts))
    return tuple(host for host, answer in zip(hosts, answers) if answer)


def _answers(host: str, launcher: Launcher, machine: Machine, extra: Sequence[str]) -> bool:
    if host in ("localhost", socket.gethostname()):
        return True
    argv = build(launcher, Job(1, PROBE, {}, (RankBlock(host, 1),), extra=tuple(extra)), machine)
    try:
        return run_tool(argv, LIMIT).returncode == 0
    except subprocess.TimeoutExpired:
        return False


def reduce_roles(options: Options, hosts: Sequence[Host]) -> Options:
    """Return the options with the numbers of ranks reduced until the job fits on these hosts.

    The number of spares is reduced first, then the number of workers, then the number of servers. At least one worker
    stays, and at least one server if the job has servers. Raises LauncherError if the hosts cannot hold even these.
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
