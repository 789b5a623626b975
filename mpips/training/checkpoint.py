"""A Trainer's checkpoints, with two files for each saved step. `loop.begin` continues from a checkpoint.

    FOLDER/step-00000120.store.safetensors      by `kv.save`: values, optimizers and their state, residuals
    FOLDER/step-00000120.trainer.safetensors    positions of all workers, and arrays that the store does not have

A position is a worker's place in its training. The Trainer's file is written last, so a step without this file is not a
checkpoint. Rank 0 writes and reads both files, so other nodes need not see the folder.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

import mpips.collectives as collectives
from mpips.collectives.errors import warn
from mpips.collectives.files import ABANDONED_SECONDS, remove_abandoned
from mpips.optimizers.base import unlike
from mpips.optimizers.registry import as_data, from_data
from mpips.store.checkpoint import file
from mpips.store.runtime.rendezvous import attempt
from mpips.training.step import TrainerParts
from mpips.training.updates import Update

if TYPE_CHECKING:
    from mpips.store.api import KVStore

STORE, TRAINER = ".store.safetensors", ".trainer.safetensors"
STEP = re.compile(r"step-\d{8,}")
VERSION = 1
# name of the entry in the metadata of the Trainer's file that holds the TrainerHeader
METADATA = "mpips.trainer"
# The kinds of update (ways to turn gradients into parameters, see `updates`): name in a checkpoint's file -> the
# arguments of the Trainer that select this kind
UPDATES = {
    "none": "none of clip_norm, elastic and local",
    "none, clipped": "clip_norm",
    "none, elastic": "elastic",
    "none, local": "local",
}


class Epoch(NamedTuple):
    """The results of one epoch on this worker.

    Attributes:
        epoch: The number of the epoch, from 1.
        seconds: The training time since `fit` began, without evaluation and callbacks.
        loss: The mean loss over this worker's batches, or NaN if it had no batches.
        test: The result of `evaluate` on the test data, or None.
    """

    epoch: int
    seconds: float
    loss: float
    test: dict[str, float] | None = None

    @property
    def accuracy(self) -> float | None:
        """`test["accuracy"]`, or None if it was not measured."""
        return None if self.test is None else self.test.get("accuracy")

    def value(self, monitor: str) -> float:
        """Return the measured value `monitor`: "loss", or "test_" and the name of a value of the test data.

        Raises KeyError if it was not measured.
        """
        if monitor == "loss":
            return self.loss
        return (self.test or {})[monitor.removeprefix("test_")]


@dataclass
class Position:
    """A worker's place in its training, as a checkpoint keeps it."""

    # number of the current epoch, from 1
    epoch: int = 1
    # number of batches that this worker has taken in the current epoch
    batches: int = 0
    # number of exchanges since the training began
    step: int = 0
    # seconds of training, without evaluation and callbacks
    seconds: float = 0.0
    # sum of the losses of this worker's batches in the current epoch
    loss_sum: float = 0.0
    # loss of the last batch
    last_loss: float = math.nan
    # True if a callback has ended the training
    stopped: bool = False
    # a text that describes which samples come in which step; a resume in the middle of an epoch needs the same order
    order: str = ""
    # number of samples of this epoch that all workers had used when `deal` last divided the rest of the epoch
    dealt: int = 0
    # number of batches that this worker had taken in this epoch when `deal` was last called
    since: int = 0
    history: list[Epoch] = field(default_factory=list)
    # name of a callback (its class and a number, such as "EarlyStop 0") -> its state
    callbacks: dict[str, Any] = field(default_factory=dict)

    @property
    def loss(self) -> float:
        """The mean loss of the batches that this worker has taken in this epoch."""
        return self.loss_sum / self.batches if self.batches else float("nan")

    def took(self, loss: float) -> None:
        """Record the loss of a batch that was computed: update the sum of losses and the number of batches."""
        self.last_loss = float(loss)
        self.loss_sum += self.last_loss
        self.batches += 1

    def deal(self, mini_batch: int) -> None:
        """Divide the rest of the epoch again, because the number of workers has changed.

        The rest begins at the first sample that no step has used. `mini_batch` is the number of samples that all
        workers together have taken in each step until now.
        """
        self.dealt, self.since = self.dealt + (self.batches - self.since) * mini_batch, self.batches

    def end_epoch(self, test: dict[str, float] | None) -> Epoch:
        """Add the current epoch to the history, begin the next epoch, and return the history's new entry."""
        ended = Epoch(self.epoch, self.seconds, self.loss, test)
        self.history.append(ended)
        self.epoch, self.batches, self.loss_sum, self.dealt, self.since = self.epoch + 1, 0, 0.0, 0, 0
        return ended

    def encode(self) -> bytes:
        """Return the position as JSON. Floats keep their bits, even if they are not finite."""
        return json.dumps(msgspec.to_builtins(self)).encode()


def decode(data: object) -> Position:
    """Return the Position in decoded JSON data. Raises ValueError if the data are not a Position."""
    try:
        return msgspec.convert(data, Position)
    except msgspec.ValidationError as error:
        raise ValueError(f"a worker's position is not as a Trainer writes it: {error}") from error


class TrainerHeader(msgspec.Struct):
    """The header of the Trainer's file, as JSON. It holds everything except the arrays."""

    version: int
    # the name of the update that was saved, a key of UPDATES
    update: str
    # number of workers that have arrays in the file
    clients: int
    # the positions of all workers, in rank order
    positions: list[Any]
    # the optimizer that runs on every worker, as plain data, or None if the store runs the optimizer
    optimizer: dict[str, Any] | None


class FoundCheckpoint(NamedTuple):
    """A checkpoint that was found and checked."""

    # the path of the checkpoint's two files, without their endings
    path: str
    header: TrainerHeader
    # the saved positions of all workers, in rank order
    positions: list[Position]


def save(parts: TrainerParts, folder: str | os.PathLike[str], position: Position, keep: int | None = None) -> str:
    """Write a checkpoint. All workers must have made the same steps. See `Trainer.save`. Collective, blocking."""
    update = update_to_save(parts, "save")
    parts.exchange.finish()
    name, refusal = attempt(lambda: _make_folder(file.file_name("save", "path", folder), parts.kv.rank, position.step))
    parts.kv.worker.agree("save", [("path", str(name)), ("step", str(position.step))], refusal, noun="argument")
    path = os.path.join(name, f"step-{position.step:08d}")
    parts.kv.save(path + STORE)
    positions = [json.loads(data) for data in parts.kv.worker.agree("save", data=position.encode())]
    arrays = _gather_arrays(parts.kv, update)
    optimizer = None if update.optimizer is None else as_data(update.optimizer)
    header = TrainerHeader(VERSION, update.name, len(update.owners()), positions, optimizer)

    def write() -> None:
        try:
            file.write(path + TRAINER, arrays, {METADATA: json.dumps(msgspec.to_builtins(header))})
        except OSError as error:
            raise ValueError(f"{path + TRAINER} cannot be written: {file.why(error)}") from error

    _, refusal = attempt(write) if parts.kv.rank == 0 else (None, None)
    parts.kv.worker.agree("save", refusal=refusal)
    if parts.kv.rank == 0 and keep is not None:
        prune(name, keep)
    return path


def update_to_save(parts: TrainerParts, what: str) -> Update:
    """Return the update whose state a checkpoint saves.

    Raises ValueError if a checkpoint is not possible. That is the case with overlap, or while accumulated batches wait
    for their exchange. `what` is the name of the call, for error messages.
    """
    if parts.blocking is None:
        raise ValueError(
            f"{what}: a Trainer with overlap= has no checkpoints, as its keys follow a plan that is made "
            "anew: leave overlap out"
        )
    if parts.blocking.waiting:
        raise ValueError(
            f"{what}: {parts.blocking.waiting} of {parts.blocking.accumulate} batches wait for their "
            "exchange: call it between two exchanges"
        )
    return parts.blocking.update


def find(parts: TrainerParts, path: str | os.PathLike[str], begin: bool = False) -> FoundCheckpoint | None:
    """Find a checkpoint, and check that it fits this Trainer. Collective, blocking.

    If the checkpoint cannot be read or does not fit, all workers raise ValueError or TypeError.

    Args:
        path: A folder, whose newest checkpoint is taken, or one file step-*.trainer.safetensors.
        begin: If True, return None when the folder does not exist or has no checkpoint. If False, raise an error then.
    """
    update, kv = update_to_save(parts, "resume"), parts.kv
    parts.exchange.finish()
    name, refusal = attempt(lambda: file.file_name("resume", "path", path))
    found, unfit = attempt(lambda: _find_file(name, begin, update) if kv.rank == 0 and refusal is None else None)
    message = b"" if not found else json.dumps([found[0], msgspec.to_builtins(found[1])]).encode()
    message = kv.worker.agree("resume", [("path", name or "")], refusal or unfit, noun="argument", data=message)[0]
    if not message:
        return None
    prefix, data = json.loads(message)
    header = msgspec.convert(data, TrainerHeader)
    return FoundCheckpoint(prefix, header, [decode(position) for position in header.positions])


def take(parts: TrainerParts, found: FoundCheckpoint, rates: bool = False) -> None:
    """Restore everything that a checkpoint holds except the positions. Collective, blocking.

    If the checkpoint's optimizer differs from the program's, the checkpoint's optimizer is used, and rank 0 warns. If
    the checkpoint has arrays of n workers (or clients, with `elastic`) and n differs from the current number, worker i
    takes the arrays of worker i modulo n.

    Args:
        rates: True if a callback sets the learning rate anyway, so that no warning is needed if only this differs.

    Raises:
        ValueError: The checkpoint does not fit or cannot be read. All workers raise it, and nothing has changed.
    """
    update = update_to_save(parts, "resume")
    given = update.numbers
    arrays = _scatter_arrays(parts.kv, update, found)
    parts.kv.load(found.path + STORE)
    update.restore(arrays, None if found.header.optimizer is None else from_data(found.header.optimizer))
    difference = unlike(update.numbers, given, ("rescale", "learning_rate") if rates else ("rescale",))
    if difference and parts.kv.rank == 0:
        warn(
            f"resume: {difference}: the checkpoint's holds; change it by trainer.update_optimizer after trainer.resume"
        )


def position_of(positions: Sequence[Position], rank: int) -> Position:
    """Return the saved position that this worker continues from."""
    return positions[rank % len(positions)]


def check_folder(path: str | os.PathLike[str], step: int) -> None:
    """Make the folder. Raise ValueError or TypeError if a checkpoint of this step could not be saved in it."""
    name = _make_folder(file.file_name("save", "path", path), 0, step)
    try:
        tempfile.TemporaryFile(dir=name).close()
    except OSError as error:
        raise ValueError(f"save: nothing can be written to the folder {name}: {file.why(error)}") from error


def _make_folder(name: str, rank: int, step: int) -> str:
    """Make the folder on rank 0, and return its name.

    Raises ValueError if the folder cannot be made, or if it has checkpoints of a later step.
    """
    if rank:
        return name
    try:
        os.makedirs(name, exist_ok=True)
    except OSError as error:
        raise ValueError(f"save: the folder {name} cannot be made: {file.why(error)}") from error
    remove_abandoned(name, rf"{STEP.pattern}({re.escape(STORE)}|{re.escape(TRAINER)})", ABANDONED_SECONDS)
    newest = max((_step(path) for path in steps_in(name)), default=0)
    if newest > step:
        raise ValueError(
            f"save: {name} has a checkpoint of step {newest}, and this one is of step {step}: go on from "
            "it by resume, or give another folder"
        )
    return name


def steps_in(folder: str | os.PathLike[str]) -> list[Path]:
    """Return the paths of the complete checkpoints in a folder, oldest first, without the endings of the files."""
    paths = sorted(Path(folder).glob("step-*" + TRAINER), key=lambda path: (len(path.name), path.name))
    prefixes = [path.with_name(path.name.removesuffix(TRAINER)) for path in paths]
    return [path for path in prefixes if STEP.fullmatch(path.name) and path.with_name(path.name + STORE).is_file()]


def _step(path: Path) -> int:
    """Return the step number of a checkpoint, or of one of its files."""
    return int(path.name.partition(".")[0].removeprefix("step-"))


def prune(folder: str, keep: int) -> None:
    """Remove all but the newest `keep` checkpoints. Also remove older store files without a Trainer's file.

    A store file without a Trainer's file is left behind if the job is killed while it saves. Of each checkpoint, the
    Trainer's file is removed first, so that an incomplete checkpoint is never taken for a complete one.
    """
    whole = steps_in(folder)
    for path in whole[:-keep]:
        for ending in (TRAINER, STORE):
            with contextlib.suppress(OSError):
                path.with_name(path.name + ending).unlink()
    for path in Path(folder).glob("step-*" + STORE):
        prefix = path.name.removesuffix(STORE)
        half = STEP.fullmatch(prefix) and not path.with_name(prefix + TRAINER).exists()
        if half and whole and _step(path) < _step(whole[-1]):
            with contextlib.suppress(OSError):
                path.unlink()


def _find_file(name: str, begin: bool, update: Update) -> tuple[str, TrainerHeader] | None:
    """Return a checkpoint's path without endings, and its header. Only rank 0 calls this. Arguments as in `find`."""
    with _reading(name):
        if name.endswith(TRAINER):
            prefix = name.removesuffix(TRAINER)
        else:
            steps = steps_in(name)
            if not steps and begin and (os.path.isdir(name) or not os.path.lexists(name)):
                return None
            if not steps:
                raise ValueError(
                    f"resume: {name} has no checkpoint of a Trainer (step-*{TRAINER}): give the folder "
                    "that Checkpoint or Trainer.save wrote to"
                )
            prefix = str(steps[-1])
    path = prefix + TRAINER
    with _reading(path), file.TensorFile(path) as opened:
        header = _read_header(path, opened.metadata.get(METADATA))
        _check_update(path, header, update)
        _check_arrays(path, opened.tensors, header, update)
        opened.check_sums((METADATA,))
    return prefix, header


@contextlib.contextmanager
def _reading(path: str) -> Iterator[None]:
    """Turn any error that occurs while reading into a ValueError, which can be sent to all workers."""
    try:
        yield
    except (ValueError, TypeError):
        raise
    except Exception as error:
        raise ValueError(f"{path} cannot be read: {file.why(error)}") from error


def _read_header(path: str, text: str | None) -> TrainerHeader:
    try:
        header = msgspec.convert(json.loads(text or ""), TrainerHeader)
        for position in header.positions:
            decode(position)
    except ValueError as error:
        raise ValueError(f"{path} was not written by a Trainer: {error}") from error
    if header.version != VERSION or not header.positions:
        raise ValueError(f"{path} has version {header.version}, this program reads version {VERSION}")
    return header


def _check_update(path: str, header: TrainerHeader, update: Update) -> None:
    """Raise ValueError if the checkpoint has another kind of update, or its workers ran another optimizer."""
    if header.update != update.name:
        raise ValueError(
            f"{path} was saved with {UPDATES.get(header.update, header.update)}, and this Trainer has "
            f"{UPDATES.get(update.name, update.name)}: give clip_norm, elastic and local as they were"
        )
    if update.optimizer is None:
        return
    saved, own = (type(each).__name__ for each in (from_data(header.optimizer), update.optimizer))
    if saved != own:
        raise ValueError(
            f"{path} was saved with the optimizer {saved}, and this Trainer has {own}: give the one that "
            "it was saved with"
        )


def _check_arrays(path: str, tensors: Mapping[str, file.Tensor], header: TrainerHeader, update: Update) -> None:
    """Raise ValueError if the names, shapes or dtypes in the file differ from those of this Trainer."""
    # Do not trust `header.clients`, which may be huge. To find a missing tensor, it is enough to look for one client
    # more than the file has tensors.
    numbers = range(min(max(header.clients, 1), len(tensors) + 1))
    saved = {name: str(tensor) for name, tensor in tensors.items()}
    wanted = {
        f"{number}/{name}": str(file.Tensor(array.dtype, array.shape))
        for number in numbers
        for name, array in update.arrays().items()
    }
    for name in sorted({*saved, *wanted}):
        if saved.get(name) != wanted.get(name):
            raise ValueError(
                f"{path}: {name} is {saved.get(name, 'not there')} in the file and "
                f"{wanted.get(name, 'not there')} in this Trainer: give model and optimizer as they were"
            )


def _gather_arrays(kv: KVStore, update: Update) -> dict[str, np.ndarray]:
    """Gather the arrays of all owners on rank 0, with names such as "0/name", where 0 is the number of the owner.

    On other ranks the result is incomplete and must not be used.
    """
    arrays_of_all: dict[str, np.ndarray] = {}
    for number, owner in enumerate(update.owners()):
        for name, array in update.arrays().items():
            if owner:
                array = array if kv.rank == owner else np.empty_like(array)
                collectives.broadcast(array, kv.layout.workers, root=owner, label=f"save: {name} of rank {owner}")
            if kv.rank == 0:
                arrays_of_all[f"{number}/{name}"] = array.copy() if array.ndim else array
    return arrays_of_all


def _scatter_arrays(kv: KVStore, update: Update, found: FoundCheckpoint) -> dict[str, np.ndarray] | None:
    """Return this worker's arrays from a checkpoint, or None if the store holds everything. Rank 0 reads the file.

    All workers raise ValueError if reading fails.
    """
    owners, clients = update.owners(), found.header.clients
    if not owners:
        return None
    own_number = max(number for number, owner in enumerate(owners) if owner <= kv.rank) % clients
    own_arrays: dict[str, np.ndarray] = {}
    for number in range(clients):
        arrays = {name: np.empty(array.shape, array.dtype) for name, array in update.arrays().items()}
        read = partial(_read, found.path + TRAINER, number, arrays)
        _, refusal = attempt(read) if kv.rank == 0 else (None, None)
        kv.worker.agree("resume", refusal=refusal)
        for name, array in arrays.items():
            if kv.num_workers > 1:
                collectives.broadcast(array, kv.layout.workers, root=0, label=f"resume: {name}")
        if number == own_number:
            own_arrays = arrays
    return own_arrays


def _read(path: str, number: int, arrays: Mapping[str, np.ndarray]) -> None:
    """Read the arrays of one client from the file."""
    with _reading(path), file.TensorFile(path) as opened:
        for name, array in arrays.items():
            array[...] = opened.get(f"{number}/{name}")
