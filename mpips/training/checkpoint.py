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
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

import collectives
from collectives.errors import warn
from collectives.files import ABANDONED_SECONDS, remove_abandoned
from mpips.optimizers.base import unlike
from mpips.optimizers.registry import as_data, from_data
from mpips.store.checkpoint import file
from mpips.store.checkpoint import file as tensors
from mpips.store.runtime.rendezvous import attempt
from mpips.training.callbacks import Position, decode
from mpips.training.step import Job, Update

STORE, TRAINER = ".store.safetensors", ".trainer.safetensors"
STEP = re.compile(r"step-\d{8,}")
VERSION = 1
WORD = "mpips.trainer"
"""Of the metadata, for the header."""
UPDATES = {"none": "neither clip_norm nor elastic", "none, clipped": "clip_norm", "none, elastic": "elastic"}
"""How a Trainer is asked for each way of exchange that a file names."""


class Header(msgspec.Struct):
    """Hold the JSON of the Trainer's file, under the name `mpips.trainer`."""

    version: int
    update: str
    """The kind of update that was saved."""
    clients: int
    """How many workers' arrays are in the file."""
    positions: list[Any]
    """Of every worker, in rank order."""
    optimizer: dict[str, Any] | None
    """That of every worker, as data; None where the store has it."""


class Found(NamedTuple):
    """A checkpoint that a training can go on from."""

    path: str
    """Without the files' endings."""
    header: Header
    positions: list[Position]
    """Of every worker that was saved, in rank order."""


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
    optimizer = None if update.optimizer is None else as_data(update.optimizer)
    header = Header(VERSION, update.name, len(update.owners()), [json.loads(data) for data in told], optimizer)
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


def find(job: Job, path: str | os.PathLike[str], begin: bool = False) -> Found | None:
    """The newest checkpoint of a folder, or that of one of its files, which `take` takes back. Collective, blocking.

    `begin`: None where the folder has no checkpoint, or is not there. ValueError or TypeError on all workers where
    nothing can be read, or it is not one of this Trainer.
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
    return Found(prefix, header, [decode(position) for position in header.positions])


def take(job: Job, found: Found, rates: bool = False) -> None:
    """Take back all that a checkpoint holds but the positions. Collective, blocking. Rank 0 warns where the optimizer
    of the checkpoint, which holds, is not that of the program; `rates`: a callback sets the learning rate anyway.

    ValueError on all workers, before anything has changed, where it does not fit, or cannot be read. Where another
    number of workers (of elastic clients) was saved, number i takes that of number i mod the number then.
    """
    update = saved_by(job, "resume")
    given = update.numbers
    arrays = _scattered(job.kv, update, found)
    job.kv.load(found.path + STORE)
    update.restore(arrays, None if found.header.optimizer is None else from_data(found.header.optimizer))
    said = unlike(update.numbers, given, ("rescale", "learning_rate") if rates else ("rescale",))
    if said and job.kv.rank == 0:
        warn(f"resume: {said}: the checkpoint's holds; change it by trainer.update_optimizer after trainer.resume")


def of_worker(positions: Sequence[Position], rank: int) -> Position:
    """That from which a worker goes on, of those that were saved."""
    return positions[rank % len(positions)]


def see_folder(path: str | os.PathLike[str], step: int) -> None:
    """Make the folder; ValueError or TypeError where a checkpoint of this step or a later one could not be saved."""
    name = _made(file.file_name("save", "path", path), 0, step)
    try:
        tempfile.TemporaryFile(dir=name).close()
    except OSError as error:
        raise ValueError(f"save: nothing can be written to the folder {name}: {file.why(error)}") from error


def _made(name: str, rank: int, step: int) -> str:
    """The folder, which rank 0 makes; ValueError where it cannot be, or is that of another training."""
    if rank:
        return name
    try:
        os.makedirs(name, exist_ok=True)
    except OSError as error:
        raise ValueError(f"save: the folder {name} cannot be made: {file.why(error)}") from error
    remove_abandoned(name, rf"{STEP.pattern}({re.escape(STORE)}|{re.escape(TRAINER)})", ABANDONED_SECONDS)
    newest = max((_step(path) for path in steps_in(name)), default=0)
    if newest > step:
        raise ValueError(f"save: {name} has a checkpoint of step {newest}, and this one is of step {step}: go on from "
                         "it by resume, or give another folder")
    return name


def _write(path: str, arrays: Mapping[str, np.ndarray], header: Header) -> None:
    try:
        tensors.write(path, arrays, {WORD: json.dumps(msgspec.to_builtins(header))})
    except OSError as error:
        raise ValueError(f"{path} cannot be written: {file.why(error)}") from error


def steps_in(folder: str | os.PathLike[str]) -> list[Path]:
    """The complete checkpoints of a folder, without their endings, oldest first."""
    paths = sorted(Path(folder).glob("step-*" + TRAINER), key=lambda path: (len(path.name), path.name))
    found = [path.with_name(path.name.removesuffix(TRAINER)) for path in paths]
    return [path for path in found if STEP.fullmatch(path.name) and path.with_name(path.name + STORE).is_file()]


def _step(path: Path) -> int:
    """The step of a checkpoint, or of one of its files."""
    return int(path.name.partition(".")[0].removeprefix("step-"))


def prune(folder: str, keep: int) -> None:
    """Remove all but the newest, and halves that a kill has left behind before those.

    The Trainer's file goes first, so that no half is taken for a whole.
    """
    whole = steps_in(folder)
    for path in whole[:-keep]:
        for ending in (TRAINER, STORE):
            _remove(path.with_name(path.name + ending))
    for path in Path(folder).glob("step-*" + STORE):
        prefix = path.name.removesuffix(STORE)
        half = STEP.fullmatch(prefix) and not path.with_name(prefix + TRAINER).exists()
        if half and whole and _step(path) < _step(whole[-1]):
            _remove(path)


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()


def _found(name: str, begin: bool, update: Update) -> tuple[str, Header] | None:
    """On rank 0 the checkpoint's path without endings, and its header; None where there is none, and need not be."""
    with _reading(name):
        if name.endswith(TRAINER):
            prefix = name.removesuffix(TRAINER)
        else:
            steps = steps_in(name)
            if not steps and begin and (os.path.isdir(name) or not os.path.lexists(name)):
                return None
            if not steps:
                raise ValueError(f"resume: {name} has no checkpoint of a Trainer (step-*{TRAINER}): give the folder "
                                 "that Checkpoint or Trainer.save wrote to")
            prefix = str(steps[-1])
    path = prefix + TRAINER
    with _reading(path), tensors.TensorFile(path) as found:
        header = _header(path, found.metadata.get(WORD))
        _see_update(path, header, update)
        _see_arrays(path, found.tensors, header, update)
        found.see_sums((WORD,))
    return prefix, header


@contextlib.contextmanager
def _reading(path: str) -> Iterator[None]:
    """Whatever goes wrong in reading is a ValueError, which all workers can be told."""
    try:
        yield
    except (ValueError, TypeError):
        raise
    except Exception as error:
        raise ValueError(f"{path} cannot be read: {file.why(error)}") from error


def _header(path: str, text: str | None) -> Header:
    try:
        header = msgspec.convert(json.loads(text or ""), Header)
        for position in header.positions:
            decode(position)
    except ValueError as error:
        raise ValueError(f"{path} was not written by a Trainer: {error}") from error
    if header.version != VERSION or not header.positions:
        raise ValueError(f"{path} has version {header.version}, this program reads version {VERSION}")
    return header


def _see_update(path: str, header: Header, update: Update) -> None:
    """ValueError where gradients were exchanged in another way, or the workers had another optimizer."""
    if header.update != update.name:
        raise ValueError(f"{path} was saved with {UPDATES.get(header.update, header.update)}, and this Trainer has "
                         f"{UPDATES.get(update.name, update.name)}: give clip_norm and elastic as they were")
    if update.optimizer is None:
        return
    there, here = (type(each).__name__ for each in (from_data(header.optimizer), update.optimizer))
    if there != here:
        raise ValueError(f"{path} was saved with the optimizer {there}, and this Trainer has {here}: give the one that "
                         "it was saved with")


def _see_arrays(path: str, found: Mapping[str, tensors.Tensor], header: Header, update: Update) -> None:
    """ValueError where names, shapes or dtypes in the file are not those of this Trainer."""
    numbers = range(min(max(header.clients, 1), len(found) + 1))  # beyond these one is not there
    there = {name: str(tensor) for name, tensor in found.items()}
    here = {
        f"{number}/{name}": str(tensors.Tensor(array.dtype, array.shape))
        for number in numbers for name, array in update.arrays().items()
    }  # fmt: skip
    for name in sorted({*there, *here}):
        if there.get(name) != here.get(name):
            raise ValueError(f"{path}: {name} is {there.get(name, 'not there')} in the file and "
                             f"{here.get(name, 'not there')} in this Trainer: give model and optimizer as they were")


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


def _scattered(kv: Any, update: Update, found: Found) -> dict[str, np.ndarray] | None:
    """This worker's arrays, which rank 0 reads; None where the store has all. ValueError on all where it cannot."""
    owners, clients = update.owners(), found.header.clients
    if not owners:
        return None
    mine = max(number for number, owner in enumerate(owners) if owner <= kv.rank) % clients
    result: dict[str, np.ndarray] = {}
    for number in range(clients):
        arrays = {name: np.empty(array.shape, array.dtype) for name, array in update.arrays().items()}
        read = partial(_read, found.path + TRAINER, number, arrays)
        _, refusal = attempt(read) if kv.rank == 0 else (None, None)
        kv.settings.agree("resume", refusal=refusal)
        for name, array in arrays.items():
            if kv.num_workers > 1:
                collectives.broadcast(array, kv.layout.workers, root=0, label=f"resume: {name}")
        if number == mine:
            result = arrays
    return result


def _read(path: str, number: int, arrays: Mapping[str, np.ndarray]) -> None:
    """One client's arrays of the file."""
    with _reading(path), tensors.TensorFile(path) as found:
        for name, array in arrays.items():
            array[...] = found.get(f"{number}/{name}")
