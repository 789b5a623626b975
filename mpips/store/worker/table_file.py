"""A table in a file: rank 0 reads all rows from the servers, piece by piece, or gives them rows anew.

The file (safetensors, with checksums) holds `ids`, `values`, and what the optimizer keeps: `state0`, `state1`,
`counts`. Rows stand in any order. A word of the metadata says what table it is.
"""

from __future__ import annotations

import contextlib
import math

import msgspec
import numpy as np

from collectives.errors import CollectiveError, of_caller
from collectives.fabric.tasks import Task
from mpips.store.checkpoint.file import Tensor, TensorFile, Writer, file_name, why
from mpips.store.runtime.rendezvous import attempt
from mpips.store.tables import row_optimizers
from mpips.store.tables.rows import arrays_of
from mpips.store.transport import frames
from mpips.store.worker.interface import Tables
from mpips.store.worker.settings import Settings

WORD = "mpips.table"
PIECE_BYTES = 1 << 22


class _Header(msgspec.Struct):
    """Say of what table a file is."""

    dim: int
    dtype: str
    optimizer: str
    updates: int
    version: int = 1


def save(settings: Settings, card: frames.MakeTable, pushes: int, path: object) -> None:
    """Write a table into a file. Collective; see `Table.save`."""
    what = f"save of table {card.table!r}"
    with contextlib.ExitStack() as stack:
        name, refusal = attempt(lambda: file_name(what, "path", path))
        writer, unfit = attempt(lambda: _opened(name) if name and settings.layout.rank == 0 else None)
        if writer is not None:
            stack.callback(writer.abandon)
        _meet(settings, what, name, pushes, refusal or unfit)
        tables = settings.backend.tables
        assert tables is not None
        settings.run(what, tables.at_rank_0(lambda: _written(tables, card, writer), what))


def load(settings: Settings, card: frames.MakeTable, pushes: int, path: object) -> None:
    """Read a table from a file. Collective; see `Table.load`."""
    what = f"load of table {card.table!r}"
    with contextlib.ExitStack() as stack:
        name, refusal = attempt(lambda: file_name(what, "path", path))
        file, unfit = attempt(lambda: _fitting(card, what, name, stack) if name and settings.layout.rank == 0 else None)
        _meet(settings, what, name, pushes, refusal or unfit)
        tables = settings.backend.tables
        assert tables is not None
        settings.run(what, tables.at_rank_0(lambda: _loaded(tables, card, file), what))


def _meet(settings: Settings, what: str, name: str | None, pushes: int, refusal: BaseException | None) -> None:
    """All workers come with the same path; ValueError on all where, in rounds, one has pushed more often."""
    settings.finish()
    told = settings.agree(what, [("path", name or "")], refusal, noun="argument", data=b"%d" % pushes)
    for rank, theirs in enumerate(told):
        if theirs != told[0] and not settings.layout.asynchronous:
            raise of_caller(ValueError(
                f"{what}: rank 0 has pushed {int(told[0])} times and rank {rank} {int(theirs)}: call it after the same "
                "step"
            ))  # fmt: skip


def _opened(path: str) -> Writer:
    try:
        return Writer(path)
    except OSError as error:
        raise ValueError(f"{path} cannot be written: {why(error)}") from error


def _written(tables: Tables, card: frames.MakeTable, writer: Writer | None) -> Task[bytes]:
    assert writer is not None
    stats = yield from tables.stats(card.table)
    count = sum(part.rows for part in stats)
    kinds = arrays_of(card.dim, np.dtype(card.dtype), row_optimizers.decode(card.optimizer, card.numbers))
    header = _Header(card.dim, card.dtype, card.optimizer, max(part.updates for part in stats))
    places = {name: Tensor(dtype, (count, *shape)) for name, (dtype, shape) in kinds.items()}
    writer.begin(places, {WORD: msgspec.json.encode(header).decode()})
    for name, (dtype, shape) in kinds.items():
        step, written = max(1, PIECE_BYTES // (dtype.itemsize * math.prod(shape))), 0
        for server, part in enumerate(stats):
            for start in range(0, part.top, step):
                data = np.frombuffer((yield from tables.read(card.table, server, name, start, start + step)), dtype)
                writer.write(name, written, data)
                written += data.size
    try:
        writer.finish()
    except OSError as error:
        raise ValueError(f"{writer.path} cannot be written: {why(error)}") from error
    return b""


def _fitting(card: frames.MakeTable, what: str, path: str, stack: contextlib.ExitStack) -> TensorFile:
    """Return the file; ValueError where it is damaged, or of another table."""
    file = stack.enter_context(TensorFile(path))
    if WORD not in file.metadata:
        raise ValueError(f"{what}: {path} was not written by save of a table")
    header = _header(file)
    for word in ("dim", "dtype", "optimizer"):
        theirs, ours = getattr(header, word), getattr(card, word)
        if theirs != ours:
            raise ValueError(f"{what}: {path} has {word} {theirs}, and the table {ours}: make it as it was saved")
    file.see_sums(())
    count = file.tensors["ids"].shape[0] if "ids" in file.tensors else 0
    kinds = arrays_of(card.dim, np.dtype(card.dtype), row_optimizers.decode(card.optimizer, card.numbers))
    expected = {name: Tensor(dtype, (count, *shape)) for name, (dtype, shape) in kinds.items()}
    if file.tensors != expected:
        raise ValueError(f"{what}: {path} holds {sorted(file.tensors)}, and not what its header promises: save it anew")
    return file


def _loaded(tables: Tables, card: frames.MakeTable, file: TensorFile | None) -> Task[bytes]:
    assert file is not None
    row_bytes = sum(tensor.nbytes for tensor in file.tensors.values()) // max(1, file.tensors["ids"].shape[0])
    step = max(1, PIECE_BYTES // max(1, row_bytes))
    try:
        yield from tables.reset(card.table, _header(file).updates)
        for start in range(0, file.tensors["ids"].shape[0], step):
            piece = slice(start, start + step)
            yield from tables.put(card.table, {name: file.get(name, piece) for name in file.tensors})
    except ValueError as error:  # some rows are gone by now
        if isinstance(error, CollectiveError):
            raise
        raise CollectiveError(f"table {card.table!r} is loaded in part: {error}") from error
    return b""


def _header(file: TensorFile) -> _Header:
    try:
        return msgspec.json.decode(file.metadata[WORD], type=_Header)
    except msgspec.DecodeError as error:
        raise ValueError(f"{file.path} has a header of a table that cannot be read: {error}") from error
