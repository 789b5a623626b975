"""Watch the network under a job in a lab: some MPIs never notice that it is broken, and would wait for ever."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from launch.lab import client
from launch.lab.health import died

PATIENCE = 20.0
"""Seconds that a network may be broken: longer than TCP waits, so that a program that notices by itself, by its MPI or
by a time limit of its own, has the first word."""
TCP_SECONDS = 13.0
"""How long TCP has tried when it gives a connection up; `launch.lab.network.SETTINGS` has its retries."""


class NetworkWatch:
    """Whether a host that a job on the first ``hosts`` hosts of lab ``name`` needs is ``dead``, or the network between
    them has been broken for ``patience`` seconds: a NIC is down, or TCP gave up a connection after the watch began.
    ``reason`` then says so in one sentence."""

    def __init__(
        self, name: str, hosts: int, patience: float = PATIENCE, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.reason = ""
        self.dead: list[str] = []
        self._name, self._hosts, self._patience, self._clock = name, hosts, patience, clock
        self._down: dict[tuple[str, str], float] = {}
        self._given_up: dict[str, float] = {}
        self._before = self._ask()["given_up"]

    def __call__(self) -> bool:
        """Look once. A lab that has gone is no news: its jobs went with it."""
        try:
            found = self._ask()
        except (client.LabError, OSError):
            return False
        now, self.dead = self._clock(), found["dead"]
        self._down = {(host, nic): self._down.get((host, nic), now) for host, nic in found["down"]}
        for host, count in found["given_up"].items():
            if count > self._before[host]:
                self._given_up.setdefault(host, now - TCP_SECONDS)
        self.reason = self._say(now)
        return bool(self.reason)

    def _ask(self) -> dict[str, Any]:
        return client.ask(self._name, {"do": "health", "hosts": self._hosts})

    def _say(self, now: float) -> str:
        named = f"--name {self._name}"
        if self.dead:
            return died(self._name, self.dead)
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
