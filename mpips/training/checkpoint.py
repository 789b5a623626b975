"""A Trainer's checkpoints: two files a step in one folder, each there whole or not at all; and how training goes on.

    FOLDER/step-00000120.store.safetensors      by `kv.save`: values, optimizers and their state, residuals
    FOLDER/step-00000120.trainer.safetensors    positions of all workers, and arrays that the store does not have

The second is written last: a step without it is no checkpoint. Rank 0 writes and reads both; other nodes need not see
the folder.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from safetensors import SafetensorError

import collectives
from mpips.checkpoint import file
from mpips.runtime.rendezvous import attempt
from mpips.training.exchange import Job, Update
from mpips.training.history import Position, decode

STORE, TRAINER = ".store.safetensors", ".trainer.safetensors"
STEP = re.compile(r"step-\d{8,}")
VERSION = 1


class Header(msgspec.Struct):
    """What the Trainer's file says in JSON, under the name `mpips.trainer`."""

    version: int
    update: str
    """The kind of update that was saved."""
    clients: int
    """How many workers' arrays are in the file."""
    positions: list[Any]
    """Of every worker, in rank order."""


def save(job: Job, folder: str | os.PathLike[str], position: Position, keep: int | None = None) -> str:
    """Write a checkpoint of all workers after the same step; its path without the files' endings. Collective, blocking.

    `keep`: how many of the newest checkpoints stay; None: all. ValueError or TypeError on all workers where nothing can
    be written; older checkpoints are as they were.
    """
    update = saved_by(job, "save")
    job.exchange.finish()
    name, refusal = attempt(lambda: _made(file.file_name("save", "path", folder), job.kv.rank, position.step))
    job.kv.settings.agree("save", [("path", str(name)), ("step", str(position.step))], refusal, noun="argument")
    path = os.path.join(name, f"step-{position.step:08d}")
    job.kv.save(path + STORE)
    told = job.kv.settings.agree("save", data=position.encode())
    arrays = _gathered(job.kv, update)
    header = Header(VERSION, update.name, len(update.owners()), [json.loads(data) for data in told])
    _, refusal = attempt(lambda: _write(path + TRAINER, arrays, header) if job.kv.rank == 0 else None)
    job.kv.settings.agree("save", refusal=refusal)
    if job.kv.rank == 0 and keep is not None:
        prune(name, keep)
    return path


def saved_by(job: Job, what: str) -> Update:
    """The update whose state is saved; ValueError where the exchange goes on beside the compute."""
    if job.blocking is None:
        raise ValueError(f"{what}: a Trainer with overlap= has no checkpoints, as its keys follow a plan that is made "
                         "anew: leave overlap out")
    if job.blocking.waiting:
        raise ValueError(f"{what}: {job.blocking.waiting} of {job.blocking.accumulate} batches wait for their "
                         "exchange: call it between two exchanges")
    return job.blocking.update


def load(job: Job, path: str | os.PathLike[str], begin: bool = False) -> Position | None:
    """Take everything back from the newest checkpoint of a folder, or from one of its files; this worker's position.

    Collective, blocking. `begin`: None where the folder has no checkpoint, or is not there. ValueError or TypeError on
    all workers where nothing can be read, or it does not fit. Of a job with another number of workers (of elastic
    clients) number i goes on as number i mod the number then.
    """
    update, kv = saved_by(job, "resume"), job.kv
    job.exchange.finish()
    name, refusal = attempt(lambda: file.file_name("resume", "path", path))
    found, unfit = attempt(lambda: _found(name, begin, update) if kv.rank == 0 and refusal is None else None)
    said = b"" if not found else json.dumps([found[0], msgspec.to_builtins(found[1])]).encode()
    told = kv.settings.agree("resume", [("path", name or "")], refusal or unfit, noun="argument", data=said)[0]
    if not told:
        return None
    prefix, data = json.loads(told)
    header = msgspec.convert(data, Header)
    kv.load(prefix + STORE)
    update.restore(_scattered(kv, update, prefix + TRAINER, header))
    return decode(header.positions[kv.rank % len(header.positions)])


def _made(name: str, rank: int, step: int) -> str:
    """The folder, which rank 0 makes; ValueError where it cannot be, or is that of another training."""
    if rank:
        return name
    try:
        os.makedirs(name, exist_ok=True)
    except OSError as error:
        raise ValueError(f"save: the folder {name} cannot be made: {file.why(error)}") from error
    newest = max((int(path.name.removeprefix("step-")) for path in steps_in(name)), default=0)
    if newest > step:
        raise ValueError(f"save: {name} has a checkpoint of step {newest}, and this one is of step {step}: go on from "
                         "it by resume, or give another folder")
    return name


def _write(path: str, arrays: Mapping[str, np.ndarray], header: Header) -> None:
    try:
        file.write(path, arrays, {"mpips.trainer": json.dumps(msgspec.to_builtins(header))})
    except OSError as error:
        raise ValueError(f"{path} cannot be written: {file.why(error)}") from error


def steps_in(folder: str | os.PathLike[str]) -> list[Path]:
    """The complete checkpoints of a folder, without their endings, oldest first."""
    paths = sorted(Path(folder).glob("step-*" + TRAINER), key=lambda path: (len(path.name), path.name))
    found = [path.with_name(path.name.removesuffix(TRAINER)) for path in paths]
    return [path for path in found if STEP.fullmatch(path.name) and path.with_name(path.name + STORE).is_file()]


def prune(folder: str, keep: int) -> None:
    """Remove all but the newest; the Trainer's file goes first, so that no half is taken for a whole."""
    old = steps_in(folder)[:-keep]
    for path in old:
        for ending in (TRAINER, STORE):
            with contextlib.suppress(OSError):
                path.with_name(path.name + ending).unlink()


def _found(name: str, begin: bool, update: Update) -> tuple[str, Header] | None:
    """On rank 0 the checkpoint's path without endings, and its header; None where there is none, and need not be."""
    if name.endswith(TRAINER):
        prefix = name.removesuffix(TRAINER)
    else:
        steps = steps_in(name)
        if not steps and begin and (os.path.isdir(name) or not os.path.lexists(name)):
            return None
        if not steps:
            raise ValueError(f"resume: {name} has no checkpoint of a Trainer (step-*{TRAINER}): give the folder that "
                             "Checkpoint or Trainer.save wrote to")
        prefix = str(steps[-1])
    header = _read(prefix + TRAINER)
    if header.update != update.name:
        raise ValueError(f"{prefix}{TRAINER} was saved by a Trainer that exchanges as {header.update!r}, and this one "
                         f"does as {update.name!r}: give clip_norm and elastic as they were")
    return prefix, header


def _read(path: str) -> Header:
    try:
        with file.opened(path) as tensors:
            text = (tensors.metadata() or {})["mpips.trainer"]
        header = msgspec.convert(json.loads(text), Header)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path} cannot be read: {file.why(error)}") from error
    except (KeyError, ValueError) as error:
        raise ValueError(f"{path} was not written by a Trainer: {error}") from error
    if header.version != VERSION or not header.positions:
        raise ValueError(f"{path} has version {header.version}, this program reads version {VERSION}")
    for position in header.positions:
        decode(position)
    return header


def _gathered(kv: Any, update: Update) -> dict[str, np.ndarray]:
    """On rank 0 the arrays of all owners, as "0/name"; what it says of them on others is of no use."""
    found: dict[str, np.ndarray] = {}
    for number, owner in enumerate(update.owners()):
        for name, array in update.arrays().items():
            if owner:
                array = array if kv.rank == owner else np.empty_like(array)
                collectives.broadcast(array, kv.layout.workers, root=owner, label=f"save: {name} of rank {owner}")
            if kv.rank == 0:
                found[f"{number}/{name}"] = array.copy() if array.ndim else array
    return found


def _scattered(kv: Any, update: Update, path: str, header: Header) -> dict[str, np.ndarray] | None:
    """This worker's arrays, which rank 0 reads; None where the store has all."""
    owners = update.owners()
    if not owners:
        return None
    mine = max(number for number, owner in enumerate(owners) if owner <= kv.rank) % header.clients
    result: dict[str, np.ndarray] = {}
    shapes = {name: (array.shape, array.dtype) for name, array in update.arrays().items()}
    with contextlib.ExitStack() as stack:
        tensors = stack.enter_context(file.opened(path)) if kv.rank == 0 else None
        for number in range(header.clients):
            for name, (shape, dtype) in shapes.items():
                array = np.empty(shape, dtype)
                if tensors is not None:
                    array[...] = tensors.get_tensor(f"{number}/{name}")
                if kv.num_workers > 1:
                    collectives.broadcast(array, kv.layout.workers, root=0, label=f"resume: {name}")
                if number == mine:
                    result[name] = array
    return result
