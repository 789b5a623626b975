"""Find, make, ask and end labs. A lab is known by its keeper's socket, in a folder that is its user's alone.

Who asks may be root, and enters the namespaces of whoever answers: so the keeper has to be a process of the same user.
"""

from __future__ import annotations

import json
import os
import select
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from collectives.machine.cores import usable
from collectives.machine.peers import peer
from launch.lab import job, sockets
from launch.lab.files import AGENT
from launch.lab.health import died
from launch.lab.plan import LabPlan, encode
from launch.lab.sockets import LabError, names
from launch.mpirun import find

END_SECONDS = 10.0


def _connect(name: str) -> socket.socket:
    labs = names()
    if name not in labs:
        others = ", ".join(labs)
        others = f"there are {others}" if others else "there is none; `mpips lab up star:3` makes one"
        raise LabError(f"no lab named {name!r} is up: {others}")
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(30)
    try:
        sockets.connect(connection, name)
    except (ConnectionRefusedError, FileNotFoundError):
        connection.close()
        raise LabError(f"lab {name!r} is being made or ended: ask again in some seconds") from None
    if not (keeper := peer(connection)).ours:
        connection.close()
        raise LabError(f"the keeper of lab {name!r} is a process of user {keeper.user}, not of ours: it is not asked")
    return connection


def keeper_process(name: str) -> int:
    """The pid of the keeper of lab ``name``."""
    with _connect(name) as connection:
        if not (keeper := peer(connection).pid):
            raise LabError(f"lab {name!r} was made outside this PID namespace: enter it from there")
        return keeper


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
    listener, lock = sockets.claim(name)
    with listener, open(lock):  # the keeper has them, too
        owner, theirs = socket.socketpair()
        inherited = (listener.fileno(), theirs.fileno())
        command = [sys.executable, "-P", "-m", "launch.lab.keeper", name, *map(str, inherited)]
        with theirs, tempfile.TemporaryFile("w+") as words:
            silent = subprocess.DEVNULL  # it outlives the caller, whose pipes must not wait for it
            process = subprocess.Popen(
                command, pass_fds=(*inherited, lock), start_new_session=True, stdin=silent, stdout=silent, stderr=words
            )
            theirs.close()
            reply = _first_word(owner, plan)
            process.wait()
            if reply is None:
                words.seek(0)
                reply = {"error": (words.read().strip() or "it ended without a word").splitlines()[-1]}
    if "error" in reply:
        owner.close()
        raise LabError(f"lab {name!r} could not be made: {reply['error']}")
    return owner


def _first_word(owner: socket.socket, plan: LabPlan) -> dict[str, Any] | None:
    """Send a keeper its plan; what it answers, None where it has ended before."""
    try:
        owner.sendall(encode(plan).encode() + b"\n")
        line = owner.makefile("r").readline()
    except ConnectionError:
        return None
    return dict(json.loads(line)) if line else None


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
    finally:
        os.close(handle)


def _wait_for_end(handle: int) -> None:
    """Wait until the process of ``handle`` (a pidfd) has ended, after `END_SECONDS` by killing it."""
    if not select.select([handle], [], [], END_SECONDS)[0]:
        signal.pidfd_send_signal(handle, signal.SIGKILL)
        select.select([handle], [], [])


def job_command(
    name: str,
    ranks: int,
    program: Sequence[str],
    *,
    per_host: int = 1,
    mpirun: str | None = None,
    extra: Sequence[str] = (),
) -> list[str]:
    """The argv that runs ``program`` as an MPI job in lab ``name``, from outside it; it dies with its caller."""
    described = ask(name, {"do": "describe"})
    hosts, needed = described["hosts"], -(-ranks // per_host)
    if dead := [host for host in hosts[:needed] if host in described["dead"]]:
        raise LabError(died(name, dead))
    launcher = find(mpirun)
    cores = usable()
    environment = job.defaults(launcher, os.environ)
    argv = job.command(
        launcher, hosts, ranks, program, per_host=per_host, cores=cores, environment=environment, extra=extra
    )
    return job.enter(keeper_process(name), argv, folder=os.getcwd(), user=os.getuid())


def host_command(name: str, host: str, program: Sequence[str]) -> list[str]:
    """The argv that runs ``program`` on one host of lab ``name``, or on its ``launcher``."""
    described = ask(name, {"do": "describe"})
    if host not in [*described["hosts"], "launcher"]:
        raise LabError(f"lab {name!r} has no host {host!r}: it has launcher, {', '.join(described['hosts'])}")
    if host in described["dead"]:
        raise LabError(died(name, [host]))
    argv = list(program) if host == "launcher" else [AGENT, host, shlex.join(program)]
    return job.enter(keeper_process(name), argv, folder=os.getcwd(), user=os.getuid())


@contextmanager
def lab(name: str, plan: LabPlan) -> Iterator[str]:
    """A lab for the length of a ``with`` block; it ends with the block, or with this process."""
    with up(name, plan) as owner:
        handle = os.pidfd_open(keeper_process(name))
        try:
            yield name
        finally:
            owner.close()
            _wait_for_end(handle)
            os.close(handle)
