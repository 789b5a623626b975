"""Find, make, query and end labs, and watch the network of a job in a lab.

The *keeper* is the process that owns a lab. Its socket is in a folder that only the keeper's user can open. A client
enters the namespaces of the process that answers at the socket, and may do so as root. So clients accept only a keeper
that belongs to their own user. The keeper locks the lab's lock file as long as it lives. However the keeper ends, the
kernel then releases the lock. If a lock file is not locked, its lab has ended, and the socket that the lab has left
behind is removed.
"""

from __future__ import annotations

import fcntl
import json
import os
import shlex
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec

from mpips.collectives import log
from mpips.collectives.machine import find_peer, find_readable, usable_cores
from mpips.launch.lab import job
from mpips.launch.lab.job import AGENT
from mpips.launch.lab.layout import LabPlan
from mpips.launch.mpirun import find

LOG = log.get("mpips.lab")

# seconds that a lab may take to end before its keeper is killed
END_SECONDS = 10.0
LOCK = ".lock"
SOCKET = ".socket"
# Try this many times to take a lock. A process that only checks whether the lab is up holds the lock for a moment.
LOOKS = 20
LOOK_SECONDS = 0.01
# Seconds that a network may be broken before the job that runs in it is ended. TCP closes a dead connection earlier. So
# a program that notices the loss itself, by its MPI or a time limit of its own, can report the loss first.
PATIENCE = 20.0
# seconds without an answer after which TCP closes a connection, with the retries in `launch.lab.links.SETTINGS`
TCP_SECONDS = 13.0


class LabError(RuntimeError):
    """A lab cannot be made or used, or no lab with the given name is up."""


def ask(name: str, request: dict[str, Any]) -> dict[str, Any]:
    """Send a request to the keeper of a lab, and return the reply. Blocks for at most 30 seconds.

    `launch.lab.keeper.Keeper.answer` lists the requests. Raises LabError if no lab `name` is up, or if the keeper
    cannot carry out the request.
    """
    with _connect(name) as connection:
        connection.sendall(json.dumps(request).encode() + b"\n")
        reply = json.loads(connection.makefile("r").readline() or '{"error": "the keeper ended"}')
    if "error" in reply:
        raise LabError(reply["error"])
    return dict(reply)


def up(name: str, plan: LabPlan) -> socket.socket:
    """Make the lab `name`, and block until it can be used. Raises LabError if it cannot be made.

    Returns:
        A socket that holds the lab. The lab ends when the socket is closed, or when this process ends. After
        `detach(socket)` only `down` ends the lab.
    """
    listener, lock = claim_name(name)
    # The keeper inherits the socket and the lock file, so closing them in this process does not release the lock.
    with listener, open(lock):
        owner, keeper_end = socket.socketpair()
        inherited = (listener.fileno(), keeper_end.fileno())
        command = [sys.executable, "-P", "-m", "mpips.launch.lab.keeper", name, *map(str, inherited)]
        with keeper_end, tempfile.TemporaryFile("w+") as errors:
            # The keeper may outlive this process, so it must not inherit this process's output. A reader of that output
            # would wait until the keeper ends.
            silent = subprocess.DEVNULL
            process = subprocess.Popen(
                command, pass_fds=(*inherited, lock), start_new_session=True, stdin=silent, stdout=silent, stderr=errors
            )
            keeper_end.close()
            reply = None
            # A ConnectionError means that the keeper has ended. The keeper's error message is read from `errors` below.
            with suppress(ConnectionError):
                owner.sendall(msgspec.json.encode(plan) + b"\n")
                if line := owner.makefile("r").readline():
                    reply = dict(json.loads(line))
            # The process that was started above has forked the keeper and then ended. Collect its exit status.
            process.wait()
            if reply is None:
                errors.seek(0)
                reply = {"error": (errors.read().strip() or "it ended without a message").splitlines()[-1]}
    if "error" in reply:
        owner.close()
        raise LabError(f"lab {name!r} could not be made: {reply['error']}")
    LOG.info("lab %s begins: %s, %d hosts", name, plan.topology, len(plan.hosts))
    return owner


def _connect(name: str) -> socket.socket:
    labs = list_labs()
    if name not in labs:
        others = ", ".join(labs)
        others = f"there are {others}" if others else "there is none; `mpips lab up star:3` makes one"
        raise LabError(f"no lab named {name!r} is up: {others}")
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(30)
    try:
        with _open_folder() as folder:
            connection.connect(_socket_path(folder, name))
    except (ConnectionRefusedError, FileNotFoundError):
        connection.close()
        raise LabError(f"lab {name!r} is being made or ended: ask again in some seconds") from None
    if not (keeper := find_peer(connection)).ours:
        connection.close()
        raise LabError(f"the keeper of lab {name!r} is a process of user {keeper.user}, not of yours: it is not asked")
    return connection


def detach(owner: socket.socket) -> None:
    """Let the lab continue after this process ends. `owner` is the socket that `up` has returned."""
    owner.sendall(b"detach")
    owner.close()


def down(name: str) -> None:
    """End the lab `name` and every process in it. Blocks until all of these processes have ended."""
    handle = os.pidfd_open(find_keeper(name))
    try:
        ask(name, {"do": "down"})
        _wait_for_end(handle)
        LOG.info("lab %s has ended", name)
    finally:
        os.close(handle)


def _wait_for_end(handle: int) -> None:
    """Wait until the process of the pidfd `handle` has ended. Kill it after `END_SECONDS`."""
    if not find_readable([handle], END_SECONDS):
        signal.pidfd_send_signal(handle, signal.SIGKILL)
        find_readable([handle])


def find_keeper(name: str) -> int:
    """Return the pid of the keeper of lab `name`.

    Raises LabError if no lab `name` is up, or if the keeper is in a PID namespace that this process cannot see.
    """
    with _connect(name) as connection:
        if not (keeper := find_peer(connection).pid):
            raise LabError(f"lab {name!r} was made outside this PID namespace: enter it from there")
        return keeper


def job_command(
    name: str,
    ranks: int,
    program: Sequence[str],
    *,
    per_host: int = 1,
    mpirun: str | None = None,
    extra: Sequence[str] = (),
) -> list[str]:
    """Return the command that runs `program` as an MPI job in lab `name`.

    Run the command outside the lab. The job ends when the process that runs the command ends.

    Args:
        name: The name of the lab.
        ranks: Number of ranks.
        program: The command that each rank runs.
        per_host: Number of ranks on each host.
        mpirun: Path of the mpirun. By default `launch.find` chooses it.
        extra: Further arguments for mpirun.

    Raises:
        LabError: No lab `name` is up, or a host that the job needs is dead.
        LauncherError: There is no usable mpirun.
        ValueError: The lab has too few hosts.
    """
    described = ask(name, {"do": "describe"})
    hosts, needed = described["hosts"], -(-ranks // per_host)
    if dead := [host for host in hosts[:needed] if host in described["dead"]]:
        raise LabError(describe_deaths(name, dead))
    launcher = find(mpirun)
    argv = job.build_job(
        launcher,
        hosts,
        ranks,
        program,
        per_host=per_host,
        cores=usable_cores(),
        environment=job.choose_variables(launcher, os.environ),
        extra=extra,
    )
    return job.build_entry(find_keeper(name), argv, folder=os.getcwd(), user=os.getuid())


def host_command(name: str, host: str, program: Sequence[str]) -> list[str]:
    """Return the command that runs `program` on one host of lab `name`. Run the command outside the lab.

    The host "launcher" has the bridges and runs mpirun. Raises LabError if the lab has no host `host`, or if that host
    is dead.
    """
    described = ask(name, {"do": "describe"})
    if host not in [*described["hosts"], "launcher"]:
        raise LabError(f"lab {name!r} has no host {host!r}: it has launcher, {', '.join(described['hosts'])}")
    if host in described["dead"]:
        raise LabError(describe_deaths(name, [host]))
    argv = list(program) if host == "launcher" else [AGENT, host, shlex.join(program)]
    return job.build_entry(find_keeper(name), argv, folder=os.getcwd(), user=os.getuid())


@contextmanager
def lab(name: str, plan: LabPlan) -> Iterator[str]:
    """Context manager that makes a lab. The lab ends at the end of the block, or when this process ends."""
    with up(name, plan) as owner:
        handle = os.pidfd_open(find_keeper(name))
        try:
            yield name
        finally:
            owner.close()
            _wait_for_end(handle)
            os.close(handle)


def list_labs() -> list[str]:
    """Return the names of this user's labs. Removes the files of labs that have ended."""
    with _open_folder() as folder:
        names = (name.removesuffix(LOCK) for name in os.listdir(folder) if name.endswith(LOCK))
        return sorted(name for name in names if not _remove_if_ended(folder, name))


def claim_name(name: str) -> tuple[socket.socket, int]:
    """Reserve the name of a new lab. Raises LabError if a lab of that name is up.

    Returns:
        The lab's bound socket, and a file descriptor of the lab's lock file. The file must stay open as long as the lab
        is up.
    """
    with _open_folder() as folder:
        lock = _take_lock(folder, name)
        if lock is None:
            raise LabError(f"a lab named {name!r} is up already; `mpips lab down --name {name}` ends it")
        with suppress(FileNotFoundError):
            os.unlink(name + SOCKET, dir_fd=folder)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(_socket_path(folder, name))
        return listener, lock


def _socket_path(folder: int, name: str) -> str:
    """Return a path to a lab's socket through the file descriptor of the open folder.

    Such a path leads to the folder that was checked, even if somebody puts another folder in its place. The path is
    also short enough for a socket address.
    """
    return f"/proc/self/fd/{folder}/{name}{SOCKET}"


@contextmanager
def _open_folder() -> Iterator[int]:
    """Context manager that opens this user's folder of labs, and yields its file descriptor.

    Makes the folder if it is missing: for root in /run if /run is writable, otherwise in /tmp. Raises LabError if
    another user owns the folder or can open it.
    """
    user = os.geteuid()
    path = Path(f"/tmp/mpips-{user}")
    try:
        if user == 0 and os.access("/run", os.W_OK):
            path = Path("/run/mpips")
        with suppress(FileExistsError):
            path.mkdir(0o700)
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise LabError(f"the folder of labs, {path}, cannot be made or opened: {error.strerror}") from None
    try:
        status = os.fstat(folder)
        if status.st_uid != user:
            raise LabError(
                f"{path} belongs to user {status.st_uid}, and should belong to user {user}, whose labs it is for: "
                "its owner or root must remove it"
            )
        if status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise LabError(f"other users can open {path}, and through it your labs: chmod 700 {path}")
        yield folder
    finally:
        os.close(folder)


def _take_lock(folder: int, name: str) -> int | None:
    """Lock the lock file of lab `name`, and return its file descriptor.

    Return None if another process has locked the file.
    """
    for _ in range(LOOKS):
        lock = os.open(name + LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=folder)
        if _try_lock(lock) and _has_name(lock, folder, name):
            return lock
        os.close(lock)
        time.sleep(LOOK_SECONDS)
    return None


def _remove_if_ended(folder: int, name: str) -> bool:
    """If no process has locked the lock file of lab `name`, remove the lock file and the socket, and return True."""
    try:
        lock = os.open(name + LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    except OSError:
        return True
    try:
        if not _try_lock(lock):
            return False
        if _has_name(lock, folder, name):
            for ending in (SOCKET, LOCK):
                with suppress(FileNotFoundError):
                    os.unlink(name + ending, dir_fd=folder)
        return True
    finally:
        os.close(lock)


def _try_lock(lock: int) -> bool:
    """Try to lock a file without waiting. True if this process now holds the lock."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _has_name(lock: int, folder: int, name: str) -> bool:
    """True if the open lock file has not been removed from the folder.

    The result is False if the file was removed, even if a new lock file has the same name now.
    """
    try:
        return os.fstat(lock).st_ino == os.stat(name + LOCK, dir_fd=folder).st_ino
    except FileNotFoundError:
        return False


class NetworkWatch:
    """Watches the hosts and the network of a job in a lab. A call checks both, and returns True if the job must end.

    Some MPIs never notice a broken network, and would wait forever. The job must end if a host that it needs is dead,
    or if the network has been broken for `patience` seconds. A network counts as broken if a NIC is down, or if TCP has
    closed a connection for lack of an answer since this object was made.

    Args:
        name: The name of the lab.
        hosts: How many hosts the job uses. These are the first hosts of the lab.
        patience: Seconds that the network may be broken.
        clock: A function that returns the time in seconds.

    Attributes:
        reason: The error message about what is broken, or "".
        dead: Names of the dead hosts that the job needs.
    """

    def __init__(
        self, name: str, hosts: int, patience: float = PATIENCE, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.reason = ""
        self.dead: list[str] = []
        self._name = name
        self._hosts = hosts
        self._patience = patience
        self._clock = clock
        # (host, NIC) -> the time at which the NIC was first seen down
        self._down: dict[tuple[str, str], float] = {}
        # host -> the time since which one of its TCP connections has had no answer
        self._given_up: dict[str, float] = {}
        # host -> how many connections TCP on this host had closed for lack of an answer before this object was made
        self._before = ask(name, {"do": "health", "hosts": hosts})["given_up"]

    def __call__(self) -> bool:
        """Check the hosts and the network once. Return True if the job must end."""
        try:
            health = ask(self._name, {"do": "health", "hosts": self._hosts})
        except (LabError, OSError):
            # The lab has ended, and its jobs have ended with it. There is nothing left to end.
            return False
        now, self.dead = self._clock(), health["dead"]
        self._down = {(host, nic): self._down.get((host, nic), now) for host, nic in health["down"]}
        for host, count in health["given_up"].items():
            if count > self._before[host]:
                self._given_up.setdefault(host, now - TCP_SECONDS)
        self.reason = self._describe_problem(now)
        return bool(self.reason)

    def _describe_problem(self, now: float) -> str:
        option = f"--name {self._name}"
        if self.dead:
            return describe_deaths(self._name, self.dead)
        for (host, nic), since in self._down.items():
            if now - since >= self._patience:
                return (
                    f"NIC {nic} of host {host} has been down for {now - since:.0f} s, and the job across it was ended; "
                    f"`mpips lab link {option} {host} {nic} up` sets it up again, --patience lets a job wait longer"
                )
        for host, since in self._given_up.items():
            if now - since >= self._patience:
                return (
                    f"TCP on host {host} has given up a connection after {TCP_SECONDS:.0f} s without an answer, and "
                    f"the job across it was ended; `mpips lab status {option}` shows NICs that are down, and "
                    f"`mpips lab link {option} HOST NIC up` gives one its routes back"
                )
        return ""


def describe_deaths(lab: str, hosts: Sequence[str]) -> str:
    """Return the error message about dead hosts of a lab. A host is dead if its process has ended."""
    return f"host {', '.join(hosts)} died: `mpips lab down --name {lab}` ends the lab, `mpips lab up` makes another"
