"""Find, make, ask and end labs, and watch the network under a job in one.

A lab is found by the socket of its keeper, the process that owns it, in a folder that only its user can open. Clients
may be root, and enter the namespaces of the process that answers, so they accept only a keeper of the same user. The
keeper holds the lock of the lab as long as it lives, however it ends. A socket whose lock nobody holds is removed.
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

# how long a lab may take to end before its keeper is killed
END_SECONDS = 10.0
LOCK = ".lock"
SOCKET = ".socket"
# A lock may be held for a moment by a process that only looks whether it is held, so try this often to take it.
LOOKS = 20
LOOK_SECONDS = 0.01
# How long a network may be broken before the job in it is ended. Longer than TCP tries, so that a program that notices
# by itself, through its MPI or a limit of its own, reports it first.
PATIENCE = 20.0
# how long TCP tries before it gives up a connection, with the retries in `launch.lab.links.SETTINGS`
TCP_SECONDS = 13.0


class LabError(RuntimeError):
    """A lab cannot be made or used, or there is no lab of that name."""


def ask(name: str, request: dict[str, Any]) -> dict[str, Any]:
    """Send a request to the keeper of a lab, and return the reply. Blocks for at most 30 seconds.

    For requests see `launch.lab.keeper.Keeper.answer`. Raises LabError if there is no such lab or the keeper refuses.
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
        A socket. The lab ends when it is closed, or when this process ends. After `detach` it ends only by `down`.
    """
    listener, lock = claim(name)
    # The keeper inherits both, so closing them here does not release the lock.
    with listener, open(lock):
        owner, theirs = socket.socketpair()
        inherited = (listener.fileno(), theirs.fileno())
        command = [sys.executable, "-P", "-m", "mpips.launch.lab.keeper", name, *map(str, inherited)]
        with theirs, tempfile.TemporaryFile("w+") as words:
            # The keeper may outlive its caller, and whoever reads the caller's output must not wait for it.
            silent = subprocess.DEVNULL
            process = subprocess.Popen(
                command, pass_fds=(*inherited, lock), start_new_session=True, stdin=silent, stdout=silent, stderr=words
            )
            theirs.close()
            reply = None
            # A ConnectionError means that the keeper has ended. Its error message is read below.
            with suppress(ConnectionError):
                owner.sendall(msgspec.json.encode(plan) + b"\n")
                if line := owner.makefile("r").readline():
                    reply = dict(json.loads(line))
            # This waits for the process that forks the keeper, which has ended by now, not for the keeper.
            process.wait()
            if reply is None:
                words.seek(0)
                reply = {"error": (words.read().strip() or "it ended without a word").splitlines()[-1]}
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
        raise LabError(f"the keeper of lab {name!r} is a process of user {keeper.user}, not of ours: it is not asked")
    return connection


def detach(owner: socket.socket) -> None:
    """Let the lab go on when this process ends."""
    owner.sendall(b"detach")
    owner.close()


def down(name: str) -> None:
    """End the lab `name` and every process in it. Blocks until they have ended."""
    handle = os.pidfd_open(keeper_process(name))
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


def keeper_process(name: str) -> int:
    """Return the pid of the keeper of lab `name`. Raises LabError if there is no such lab or it is out of sight."""
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
    """Return the command that runs `program` as an MPI job in lab `name`, to be run outside the lab.

    The job ends when the process that has run the command ends.

    Args:
        name: The lab.
        ranks: Number of ranks.
        program: The command that each rank runs.
        per_host: Ranks on each host.
        mpirun: Path of the mpirun; by default the one that `launch.find` finds.
        extra: Further words for mpirun.

    Raises:
        LabError: There is no such lab, or a host that the job needs is dead.
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
        environment=job.defaults(launcher, os.environ),
        extra=extra,
    )
    return job.build_entry(keeper_process(name), argv, folder=os.getcwd(), user=os.getuid())


def host_command(name: str, host: str, program: Sequence[str]) -> list[str]:
    """Return the command that runs `program` on one host of lab `name`, to be run outside the lab.

    The host "launcher" is where the bridges and mpirun are. Raises LabError if there is no such host, or if it is dead.
    """
    described = ask(name, {"do": "describe"})
    if host not in [*described["hosts"], "launcher"]:
        raise LabError(f"lab {name!r} has no host {host!r}: it has launcher, {', '.join(described['hosts'])}")
    if host in described["dead"]:
        raise LabError(describe_deaths(name, [host]))
    argv = list(program) if host == "launcher" else [AGENT, host, shlex.join(program)]
    return job.build_entry(keeper_process(name), argv, folder=os.getcwd(), user=os.getuid())


@contextmanager
def lab(name: str, plan: LabPlan) -> Iterator[str]:
    """Context manager that makes a lab. The lab ends with the block, or when this process ends."""
    with up(name, plan) as owner:
        handle = os.pidfd_open(keeper_process(name))
        try:
            yield name
        finally:
            owner.close()
            _wait_for_end(handle)
            os.close(handle)


def list_labs() -> list[str]:
    """Return the names of this user's labs. Removes the files of labs that have ended."""
    with _open_folder() as folder:
        found = (name.removesuffix(LOCK) for name in os.listdir(folder) if name.endswith(LOCK))
        return sorted(name for name in found if not _remove_if_left(folder, name))


def claim(name: str) -> tuple[socket.socket, int]:
    """Take the name of a lab, and raise LabError if a lab of that name is up.

    Returns:
        The bound socket of the lab, and a descriptor of its lock. The descriptor must stay open as long as the lab is
        up.
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
    """Return a path of a lab's socket through the descriptor of the open folder.

    So it leads to that folder even if somebody replaces it, and it is never too long for a socket address.
    """
    return f"/proc/self/fd/{folder}/{name}{SOCKET}"


@contextmanager
def _open_folder() -> Iterator[int]:
    """Context manager for a descriptor of this user's folder of labs, which is made if it is missing.

    It is in /run for root, and otherwise, or if /run is not writable, in /tmp. Raises LabError if another user owns it
    or can open it.
    """
    user = os.geteuid()
    place = Path(f"/tmp/mpips-{user}")
    try:
        if user == 0 and os.access("/run", os.W_OK):
            place = Path("/run/mpips")
        with suppress(FileExistsError):
            place.mkdir(0o700)
        folder = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise LabError(f"labs are found in the folder {place}, which cannot be had ({error.strerror})") from None
    try:
        status = os.fstat(folder)
        if status.st_uid != user:
            raise LabError(
                f"{place} belongs to user {status.st_uid}, not to user {user}, whose labs it should hold: "
                "let it be removed by its owner or by root"
            )
        if status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise LabError(f"{place} is open to other users, and holds what leads into labs: chmod 700 {place}")
        yield folder
    finally:
        os.close(folder)


def _take_lock(folder: int, name: str) -> int | None:
    """Take the lock of lab `name`, and return its descriptor; None if another process holds the lock."""
    for _ in range(LOOKS):
        lock = os.open(name + LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=folder)
        if _holds(lock) and _is_file(lock, folder, name):
            return lock
        os.close(lock)
        time.sleep(LOOK_SECONDS)
    return None


def _remove_if_left(folder: int, name: str) -> bool:
    """True if nobody holds the lock of lab `name`. Its lock file and socket are removed then."""
    try:
        lock = os.open(name + LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    except OSError:
        return True
    try:
        if not _holds(lock):
            return False
        if _is_file(lock, folder, name):
            for ending in (SOCKET, LOCK):
                with suppress(FileNotFoundError):
                    os.unlink(name + ending, dir_fd=folder)
        return True
    finally:
        os.close(lock)


def _holds(lock: int) -> bool:
    """Try to lock the file without waiting. True if this descriptor now has the lock."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_file(lock: int, folder: int, name: str) -> bool:
    """True if the open lock file still is the one with this name, and has not been removed and made anew."""
    try:
        return os.fstat(lock).st_ino == os.stat(name + LOCK, dir_fd=folder).st_ino
    except FileNotFoundError:
        return False


class NetworkWatch:
    """A watch over the hosts and the network of a job in a lab. Call it now and then; True means that the job must end.

    Some MPIs never notice a broken network, and would wait for ever. The watch returns True if a host that the job
    needs is dead, or if the network has been broken for `patience` seconds: a NIC is down, or TCP has given up a
    connection since the watch began.

    Args:
        name: The lab.
        hosts: The job uses the first `hosts` hosts.
        patience: Seconds that the network may be broken.
        clock: Returns the time in seconds.

    Attributes:
        reason: The sentence that says what is broken, or "".
        dead: Names of the hosts that the job needs and that are dead.
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
        # (host, NIC) -> since when it has been down
        self._down: dict[tuple[str, str], float] = {}
        # host -> since when a connection of it has had no answer
        self._given_up: dict[str, float] = {}
        # host -> connections that it had given up before the watch began
        self._before = ask(name, {"do": "health", "hosts": hosts})["given_up"]

    def __call__(self) -> bool:
        """Look once. True if the job must end."""
        try:
            found = ask(self._name, {"do": "health", "hosts": self._hosts})
        except (LabError, OSError):
            # The lab has gone, and its jobs have gone with it.
            return False
        now, self.dead = self._clock(), found["dead"]
        self._down = {(host, nic): self._down.get((host, nic), now) for host, nic in found["down"]}
        for host, count in found["given_up"].items():
            if count > self._before[host]:
                self._given_up.setdefault(host, now - TCP_SECONDS)
        self.reason = self._say(now)
        return bool(self.reason)

    def _say(self, now: float) -> str:
        named = f"--name {self._name}"
        if self.dead:
            return describe_deaths(self._name, self.dead)
        for (host, nic), since in self._down.items():
            if now - since >= self._patience:
                return (
                    f"NIC {nic} of host {host} has been down for {now - since:.0f} s, and the job across it was ended; "
                    f"`mpips lab link {named} {host} {nic} up` sets it up again, --patience lets a job wait longer"
                )
        for host, since in self._given_up.items():
            if now - since >= self._patience:
                return (
                    f"TCP on host {host} has given up a connection after {TCP_SECONDS:.0f} s without an answer, and "
                    f"the job across it was ended; `mpips lab status {named}` shows NICs that are down, and "
                    f"`mpips lab link {named} HOST NIC up` gives one its routes back"
                )
        return ""


def describe_deaths(lab: str, hosts: Sequence[str]) -> str:
    """Return the sentence about hosts of a lab that are dead: the process that holds their namespaces has ended."""
    return f"host {', '.join(hosts)} died: `mpips lab down --name {lab}` ends the lab, `mpips lab up` makes another"
