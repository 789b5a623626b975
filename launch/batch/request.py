"""What a batch script asks for, in no scheduler's words."""

from __future__ import annotations

import re
import shlex
from typing import NamedTuple

from launch import survival
from launch.mpirun import NAMES, Flavour
from mpips.store.options import Options


class RequestError(ValueError):
    """A request that no scheduler could serve."""


class Request(NamedTuple):
    """A job: its roles, what each rank runs, and the room it needs. `minutes` is its time limit."""

    name: str
    options: Options
    program: tuple[str, ...]
    nodes: int
    minutes: int
    flavour: Flavour
    queue: str | None = None
    account: str | None = None
    cores_per_rank: int = 1
    gpus_per_node: int = 0
    restarts: int = 0
    requeue: bool = False
    """Whether the scheduler is to start it again, where it ends it, or has lost a node."""

    @property
    def ranks(self) -> int:
        return self.options.workers + self.options.servers + max(self.options.spares, 0)

    @property
    def ranks_per_node(self) -> int:
        return -(-self.ranks // self.nodes)


def checked(request: Request) -> Request:
    """The request itself; raises RequestError naming what cannot be."""
    if request.nodes > request.ranks:
        raise RequestError(f"{request.nodes} nodes are more than the {request.ranks} ranks of the job")
    if not re.fullmatch(r"[A-Za-z][\w.-]{0,14}", request.name):
        raise RequestError(f"{request.name!r} is no job name: a letter, then at most 14 letters, digits, '_', '.', '-'")
    if (request.restarts or request.requeue) and not (request.options.checkpoint and request.options.every):
        option = f"--restarts {request.restarts}" if request.restarts else "--requeue"
        raise RequestError(f"{option} needs --checkpoint and --every: a job goes on from what its store has saved")
    if request.options.spares >= 0 and request.flavour != "openmpi":
        name, why = NAMES[request.flavour], survival.ends_all(request.flavour)
        raise RequestError(survival.refusal(request.options.spares, name, why))
    for word in (request.queue, request.account):
        if word is not None and not re.fullmatch(r"[\w.@:-]+", word):
            raise RequestError(f"{word!r} is no name of a queue or account")
    return request


def walltime(minutes: int) -> str:
    """Hours:minutes:00."""
    return f"{minutes // 60:02d}:{minutes % 60:02d}:00"


def threads(request: Request) -> str:
    """The shell line that gives each rank as many compute threads as it has cores."""
    return f"export OMP_NUM_THREADS={request.cores_per_rank}"


def mpips_run(request: Request, hostfile: str) -> str:
    """`mpips run` over the hosts that the scheduler gave; `hostfile` is shell text."""
    options = request.options
    roles = f"--servers {options.servers} --clients {options.clients} --workers {options.workers}"
    saves = ""
    if options.checkpoint:
        folder = shlex.quote(options.checkpoint)
        saves = f" --restarts {request.restarts} --checkpoint {folder} --every {options.every}"
    spares = f" --spares {options.spares}" if options.spares >= 0 else ""
    words = f"{roles}{spares} --masters {options.masters}{saves} --hostfile {hostfile}"
    return f"mpips run {words} {shlex.join(request.program)}"


def text(directives: list[str], body: list[str]) -> str:
    """A script: directives first, then commands; the first failing command ends it."""
    return "\n".join(["#!/bin/bash", *directives, "", "set -e", *body]) + "\n"
