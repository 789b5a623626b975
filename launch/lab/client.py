"""Find, make, ask and end labs, and watch the network under a job in one.

A lab is known by its keeper's socket, in a folder that is its user's alone. Who asks may be root, and enters the
namespaces of the process that answers: so the keeper has to be a process of the same user. It has the lab's lock for as
long as it lives, however it ends. A socket without such a holder is removed.
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

END_SECONDS = 10.0
LOCK, SOCKET = ".lock", ".socket"
LOOKS, LOOK_SECONDS = 20, 0.01  # at a lock that one may hold who only looks whether it is held
PATIENCE = 20.0
"""Seconds that a network may be broken: longer than TCP waits, so that a program that notices by itself, by its MPI or
by a time limit of its own, has the first word."""
TCP_SECONDS = 13.0
"""How long TCP has tried when it gives a connection up; `launch.lab.links.SETTINGS` has its retries."""


class LabError(RuntimeError):
    """A lab cannot be made, or there is none of that name."""


def ask(name: str, request: dict[str, Any]) -> dict[str, Any]:
    """Send one request (see `launch.lab.keeper.Keeper.answer`), return the reply; `LabError` with its sentence."""
    with _connect(name) as connection:
        connection.sendall(json.dumps(request).encode() + b"\n")
        reply = json.loads(connection.makefile("r").readline() or '{"error": "the keeper ended"}')
    if "error" in reply:
        raise LabError(reply["error"])
    return dict(reply)


def up(name: str, plan: LabPlan) -> socket.socket:
    """Make the lab ``name``. It ends when the socket returned is closed, or, once `detach`ed, with `down`."""
    listener, lock = claim(name)
    with listener, open(lock):  # the keeper has them, too
        owner, theirs = socket.socketpair()
        inherited = (listener.fileno(), theirs.fileno())
        command = [sys.executable, "-P", "-m", "mpips.launch.lab.keeper", name, *map(str, inherited)]
        with theirs, tempfile.TemporaryFile("w+") as words:
            silent = subprocess.DEVNULL  # it outlives the caller, whose pipes must not wait for it
            process = subprocess.Popen(
                command, pass_fds=(*inherited, lock), start_new_session=True, stdin=silent, stdout=silent, stderr=words
            )
            theirs.close()
            reply = None
            with suppress(ConnectionError):  # it has ended
                owner.sendall(msgspec.json.encode(plan) + b"\n")
                if line := owner.makefile("r").readline():
                    reply = dict(json.loads(line))
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
    """Let the lab live on without this process."""
    owner.sendall(b"detach")
    owner.close()


def down(name: str) -> None:
    """End the lab ``name`` and every process in it; returns when they have ended."""
    handle = os.pidfd_open(keeper_process(name))
    try:
        ask(name, {"do": "down"})
        _wait_for_end(handle)
        LOG.info("lab %s has ended", name)
    finally:
        os.close(handle)


def _wait_for_end(handle: int) -> None:
    """Wait until the process of ``handle`` (a pidfd) has ended, after `END_SECONDS` by killing it."""
    if not find_readable([handle], END_SECONDS):
        signal.pidfd_send_signal(handle, signal.SIGKILL)
        find_readable([handle])


def keeper_process(name: str) -> int:
    """Return the pid of the keeper of lab ``name``."""
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
    """Return the argv that runs ``program`` as an MPI job in lab ``name``, from outside it; it dies with its caller."""
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
    """Return the argv that runs ``program`` on one host of lab ``name``, or on its ``launcher``."""
    described = ask(name, {"do": "describe"})
    if host not in [*described["hosts"], "launcher"]:
        raise LabError(f"lab {name!r} has no host {host!r}: it has launcher, {', '.join(described['hosts'])}")
    if host in described["dead"]:
        raise LabError(describe_deaths(name, [host]))
    argv = list(program) if host == "launcher" else [AGENT, host, shlex.join(program)]
    return job.build_entry(keeper_process(name), argv, folder=os.getcwd(), user=os.getuid())


@contextmanager
def lab(name: str, plan: LabPlan) -> Iterator[str]:
    """Give a lab for the length of a ``with`` block; it ends with the block, or with this process."""
    with up(name, plan) as owner:
        handle = os.pidfd_open(keeper_process(name))
        try:
            yield name
        finally:
            owner.close()
            _wait_for_end(handle)
            os.close(handle)


def list_labs() -> list[str]:
    """Return the names of this user's labs."""
    with _open_folder() as folder:
        found = (name.removesuffix(LOCK) for name in os.listdir(folder) if name.endswith(LOCK))
        return sorted(name for name in found if not _remove_if_left(folder, name))


def claim(name: str) -> tuple[socket.socket, int]:
    """Return a socket for the lab `name`, and a descriptor of its lock, to be open for as long as the lab is up.
    LabError where one of that name is."""
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
    """Return the path of a lab's socket in the open folder: that one, whatever others do to its name, and never too
    long."""
    return f"/proc/self/fd/{folder}/{name}{SOCKET}"


@contextmanager
def _open_folder() -> Iterator[int]:
    """Give a descriptor of this user's folder, made if need be: below /run for root, else, or where that cannot be,
    below /tmp. LabError where another user could be behind it."""
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
    """Return a descriptor that holds the lock of lab `name`; None where another does."""
    for _ in range(LOOKS):
        lock = os.open(name + LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=folder)
        if _holds(lock) and _is_file(lock, folder, name):
            return lock
        os.close(lock)
        time.sleep(LOOK_SECONDS)
    return None


def _remove_if_left(folder: int, name: str) -> bool:
    """Return whether nobody holds the lock of lab `name`: it and the socket are removed then."""
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
    """Return whether this descriptor has the lock, or gets it at once."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_file(lock: int, folder: int, name: str) -> bool:
    """Return whether the open lock is what has the name, and no other has been made since."""
    try:
        return os.fstat(lock).st_ino == os.stat(name + LOCK, dir_fd=folder).st_ino
    except FileNotFoundError:
        return False


class NetworkWatch:
    """A watch over the first ``hosts`` hosts of lab ``name``, and over the network between them, beneath a job.

    Some MPIs never notice that it is broken, and would wait for ever. A host that the job needs may be ``dead``, or the
    network broken for ``patience`` seconds: a NIC is down, or TCP gave up a connection after the watch began.
    ``reason`` then says so in one sentence.
    """

    def __init__(
        self, name: str, hosts: int, patience: float = PATIENCE, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.reason = ""
        self.dead: list[str] = []
        self._name, self._hosts, self._patience, self._clock = name, hosts, patience, clock
        self._down: dict[tuple[str, str], float] = {}
        self._given_up: dict[str, float] = {}
        self._before = ask(name, {"do": "health", "hosts": hosts})["given_up"]

    def __call__(self) -> bool:
        """Look once. A lab that has gone is no news: its jobs went with it."""
        try:
            found = ask(self._name, {"do": "health", "hosts": self._hosts})
        except (LabError, OSError):
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
    """Return the sentence about hosts whose own process has ended."""
    return f"host {', '.join(hosts)} died: `mpips lab down --name {lab}` ends the lab, `mpips lab up` makes another"
