"""The keeper: the process that owns a lab, and that answers requests about it.

The namespaces of a lab have no names. So the kernel removes the lab as soon as the keeper has ended, for whatever
reason. The keeper is process 1 of its own PID namespace, so the kernel also kills the jobs in the lab. Clients find the
keeper by a socket in a folder of the keeper's user (see `launch.lab.client`). The keeper locks the lab's lock file as
long as it lives. Each request is a line of JSON, and each reply is a line of JSON.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import msgspec

from mpips.collectives.machine import find_peer, find_readable
from mpips.launch.lab import job, kernel
from mpips.launch.lab.client import describe_deaths
from mpips.launch.lab.layout import LabNic, LabPlan, choose_window, find_crossed_nics
from mpips.launch.lab.links import add_neighbours_and_routes, apply_settings, build, read_counters


def start_host(name: str, window: int) -> int:
    """Start the process that holds the namespaces of a host, and return its pid once the namespaces are ready.

    The process creates its own network, mount and UTS namespaces, and then sleeps until it is killed.

    Args:
        name: The host's name.
        window: How many bytes a TCP connection of the host may have in flight.

    Raises:
        RuntimeError: The namespaces cannot be made.
    """
    ready, done = os.pipe()
    process = os.fork()
    if process == 0:
        os.close(ready)
        _be_host(name, window, done)
    os.close(done)
    with os.fdopen(ready) as pipe:
        error = pipe.read()
    if error != "ready":
        raise RuntimeError(f"host {name}: {error or 'ended at once'}")
    return process


def _be_host(name: str, window: int, done: int) -> None:
    try:
        kernel.unshare(kernel.NEW_NET | kernel.NEW_MOUNT | kernel.NEW_UTS)
        kernel.set_hostname(name)
        kernel.set_process_name(f"lab-{name}")
        kernel.mount_virtual("sysfs", "/sys")
        job.make_own_folder()
        apply_settings(window)
        os.write(done, b"ready")
    except OSError as error:
        os.write(done, str(error).encode())
        os._exit(1)
    os.close(done)
    os.closerange(3, 256)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        signal.pause()


class Keeper:
    """Makes a lab when it is constructed, and answers requests about the lab."""

    def __init__(self, name: str, plan: LabPlan) -> None:
        self.name = name
        self._plan = plan
        job.write_hosts(plan)
        self._processes = [start_host(host.name, choose_window(plan)) for host in plan.hosts]
        self._outer, self._links = build(plan, self._processes)
        job.write_agent(plan, self._processes)
        # the counters of each host's interfaces at the last reset
        self._baseline = self._counters()
        # number of hosts that a job uses -> the (host, NIC) pairs that the job's traffic passes
        self._crossed: dict[int, list[tuple[str, LabNic]]] = {}

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the reply to a request. The request's field "do" is one of:

        - "describe": return the names of all hosts, and of the dead hosts.
        - "status": return the hosts, and their NICs with rates, states, and bytes since the last reset.
        - "reset": count bytes from zero again.
        - "link" with "host", "nic", "up" and "share": set a NIC ("all": all NICs) up or down, with a share of its rate.
        - "health" with "hosts": return what is broken between the first "hosts" hosts (see `_check_health`).
        - "clear" with "job": kill all processes of a job.

        If the request cannot be carried out, the reply has the field "error".
        """
        match request["do"]:
            case "describe":
                names = [host.name for host in self._plan.hosts]
                return {"name": self.name, "topology": self._plan.topology, "hosts": names, "dead": self._dead()}
            case "status":
                return self._status()
            case "reset":
                self._baseline = self._counters()
                return {}
            case "link":
                return self._set_link(request["host"], request["nic"], request["up"], request.get("share", 1.0))
            case "health":
                return self._check_health(request["hosts"])
            case "clear":
                return {"killed": job.end_all(request["job"])}
        return {"error": f"the keeper of lab {self.name!r} does not know the request {request['do']!r}"}

    def _counters(self) -> list[dict[str, dict[str, int]]]:
        return [read_counters(links) for links in self._links]

    def _status(self) -> dict[str, Any]:
        hosts = []
        for host, process, now, before in zip(self._plan.hosts, self._processes, self._counters(), self._baseline):
            nics = []
            for nic in host.nics:
                moved = {key: now[nic.name][key] - before[nic.name][key] for key in ("sent", "received", "dropped")}
                record = {"name": nic.name, "level": nic.level, "switch": nic.switch, "address": nic.address}
                nics.append(record | {"rate": nic.rate, "up": bool(now[nic.name]["up"])} | moved)
            names = {"name": host.name, "vip": host.vip, "management": host.management}
            hosts.append(names | {"alive": kernel.is_alive(process), "nics": nics})
        return {"name": self.name, "topology": self._plan.topology, "hosts": hosts}

    def _dead(self) -> list[str]:
        return [host.name for host, process in zip(self._plan.hosts, self._processes) if not kernel.is_alive(process)]

    def _set_link(self, name: str, nic: str, up: bool, share: float) -> dict[str, Any]:
        if name in self._dead():
            return {"error": describe_deaths(self.name, [name])}
        for host, links in zip(self._plan.hosts, self._links):
            if host.name == name and (nics := [n for n in host.nics if nic in (n.name, "all")]):
                for each in nics:
                    # A rate limit applies only to what an interface sends. So the limit of the NIC is for the bytes
                    # that the host sends, and the limit of the switch's port for the bytes that the host receives.
                    links.set(each.name, state="up" if up else "down")
                    links.shape(each.name, round(each.rate * share))
                    self._outer.shape(each.port, round(each.rate * share))
                if up:
                    states = read_counters(links)
                    up_nics = [each.name for each in host.nics if states[each.name]["up"]]
                    add_neighbours_and_routes(links, host, up_nics)
                return {}
        return {"error": f"lab {self.name!r} has no NIC {nic!r} on a host {name!r}"}

    def _check_health(self, hosts: int) -> dict[str, Any]:
        """Return what is broken between the first `hosts` hosts.

        "down" is a list of the NICs that are down. "dead" is a list of the dead hosts among these hosts and among the
        hosts that relay traffic between them. "given_up" maps each host to the number of connections that TCP on this
        host has ever closed because the other side did not answer.
        """
        if hosts not in self._crossed:
            self._crossed[hosts] = find_crossed_nics(self._plan, hosts)
        down = [(host, nic.name) for host, nic in self._crossed[hosts] if kernel.is_unplugged(nic.port)]
        used = list(zip(self._plan.hosts[:hosts], self._processes))
        needed = {host.name for host, _ in used} | {host for host, _ in self._crossed[hosts]}
        given_up = {host.name: kernel.count_given_up(process) for host, process in used}
        return {"down": down, "dead": [name for name in self._dead() if name in needed], "given_up": given_up}


def serve(keeper: Keeper, listener: socket.socket, owner: socket.socket | None) -> None:
    """Answer requests until a request is "down", or until the other end of `owner` is closed.

    After the message "detach" has arrived over `owner`, only the request "down" ends the lab.
    """
    while True:
        waiting = [listener] if owner is None else [listener, owner]
        ready = find_readable(file.fileno() for file in waiting)
        if owner is not None and owner.fileno() in ready:
            if owner.recv(16) != b"detach":
                return
            owner.close()
            owner = None
        if listener.fileno() in ready:
            connection, _ = listener.accept()
            with connection:
                connection.settimeout(5)
                with suppress(TimeoutError, ConnectionError):
                    if find_peer(connection).ours and not _serve_one(keeper, connection):
                        return


def _serve_one(keeper: Keeper, connection: socket.socket) -> bool:
    """Answer one request. Return False if the request was "down".

    An exception must not end the keeper, because the lab would end with the keeper. So the exception is sent as an
    error reply.
    """
    line = connection.makefile("rb").readline()
    if not line:
        return True
    goes_on = True
    try:
        request = json.loads(line)
        goes_on = request["do"] != "down"
        reply = keeper.answer(request) if goes_on else {}
    except Exception as error:
        text = line.decode(errors="replace").strip()
        reply = {"error": f"lab {keeper.name!r} cannot do {text}: {type(error).__name__}: {error}"}
    connection.sendall(json.dumps(reply).encode() + b"\n")
    return goes_on


@contextmanager
def ending_with(owner: socket.socket) -> Iterator[None]:
    """Context manager in which this process ends at once when the other end of `owner` is closed.

    The kernel reports this by SIGIO, which interrupts whatever the process is doing.
    """

    def end_if_closed(*_: object) -> None:
        try:
            hung_up = not owner.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        if hung_up:
            os._exit(1)

    signal.signal(signal.SIGIO, end_if_closed)
    fcntl.fcntl(owner, fcntl.F_SETOWN, os.getpid())
    flags = fcntl.fcntl(owner, fcntl.F_GETFL)
    fcntl.fcntl(owner, fcntl.F_SETFL, flags | os.O_ASYNC)
    # The other end may have been closed before SIGIO was set up.
    end_if_closed()
    yield
    fcntl.fcntl(owner, fcntl.F_SETFL, flags)
    signal.signal(signal.SIGIO, signal.SIG_IGN)


def main() -> None:
    """Run `python -m launch.lab.keeper NAME LISTENER OWNER`.

    LISTENER and OWNER are file descriptors of inherited sockets. The plan of the lab arrives as a line over OWNER. The
    keeper answers with "{}" once the lab is ready, or with an error.
    """
    name = sys.argv[1]
    listener, owner = (socket.socket(fileno=int(number)) for number in sys.argv[2:4])
    with owner.makefile("r") as lines:
        plan = msgspec.json.decode(lines.readline(), type=LabPlan)
    try:
        kernel.new_machine(os.getuid(), os.getgid())
        # Only the child process continues. It is process 1 of the new PID namespace.
        if os.fork():
            os._exit(0)
        kernel.keep_mounts_private()
        for filesystem, target in (("proc", "/proc"), ("sysfs", "/sys"), ("tmpfs", job.SHARED_FOLDER)):
            kernel.mount_virtual(filesystem, target)
        kernel.set_hostname("launcher")
        apply_settings(choose_window(plan))
        kernel.set_process_name(f"lab-{name}")
        signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        with ending_with(owner):
            keeper = Keeper(name, plan)
    except Exception as error:
        owner.sendall(json.dumps({"error": f"{type(error).__name__}: {error}"}).encode() + b"\n")
        raise SystemExit(1) from error
    listener.listen()
    owner.sendall(b"{}\n")
    serve(keeper, listener, owner)


if __name__ == "__main__":
    main()
