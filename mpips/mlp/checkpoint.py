"""Checkpoints (safetensors) of a network and its optimizer. They can be written on one mesh and read on another."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from itertools import pairwise
from types import ModuleType
from typing import TypeVar

import msgspec
import numpy as np
from mpi4py import MPI

from mpips.collectives import log
from mpips.mlp.data.loading import Data, DealRule, Scaling
from mpips.mlp.mesh import Mesh, TrainingError, agree, attempt
from mpips.mlp.network import Network, Specification, Split, check, splits, working_dtype
from mpips.mlp.parallel import on_host, put
from mpips.mlp.perceptron import MLP
from mpips.mlp.servers import Servers
from mpips.mlp.training import Worker
from mpips.optimizers import Optimizer, decode, encode
from mpips.optimizers.base import initial
from mpips.store.checkpoint.file import TensorFile, why, write
from mpips.store.options import MOST

T = TypeVar("T")
# key of the header in the file's metadata
HEADER = "mpips"
# prefix of the tensors that hold the data's scaling
SCALING = "scaling."
# dtypes that a tensor of a checkpoint may have
FLOATS = re.compile(r"b?float\d+")
LOG = log.get("mpips.mlp")


class CheckpointHeader(msgspec.Struct):
    """The metadata of a checkpoint."""

    specification: Specification
    # `mpips.optimizers.encode` of the optimizer, in hex
    optimizer: str
    # number of steps taken
    updates: int
    # in mixed precision: (loss scale, updates without overflow since the scale changed)
    loss_scale: tuple[float, int] | None = None
    # the rule by which rows were dealt to the ranks; None if the checkpoint was saved without data
    rule: DealRule | None = None
    # names of the classes 0, 1, ...; empty if the classes have no names
    labels: tuple[str, ...] = ()


def collect(worker: Worker) -> MLP:
    """Return the whole trained network, on every rank, as an MLP that computes by NumPy.

    Collective over the mesh; blocking. With elastic averaging the clients' networks differ, and every rank returns the
    network of its own client.

    >>> model, rows = mpips.mlp.MLP([4, 16, 1]), lambda: mpips.mlp.open_source("synthetic:400,4,1")
    >>> mesh = mpips.mlp.Mesh(batch=MPI.COMM_WORLD.size)
    >>> worker = mpips.mlp.train(model, rows, mesh, epochs=1, batch=40).worker
    >>> mpips.mlp.collect(worker).predict(np.zeros((2, 4))).shape
    (2, 1)
    """
    model = MLP(*worker.network.specification)
    for index, target in enumerate(model.parameters):
        whole = _gather(worker, index, worker.network.flat_parameters)
        if worker.mesh.model_index == 0:
            target[...] = whole
        worker.mesh.model_comm.Bcast(target, root=0)
    return model


def save_checkpoint(path: str, worker: Worker, data: Data | None = None) -> None:
    """Write the network, the optimizer with its state, and the rules by which rows were scaled and dealt to ranks.

    Collective over the mesh; blocking. Layers are gathered one after another on rank 0, which must have memory for the
    whole network and state. Rank 0 writes a temporary file beside `path` and renames it, so an old checkpoint survives
    a failure. If servers keep the optimizer state, they send it. With elastic averaging, the network and state of the
    first client are written.

    Args:
        path: The file, safetensors.
        worker: What to save: `train(...).worker`.
        data: The rows that the network was trained on. Without them, a later run can neither scale nor deal rows as
            this run did.

    Raises:
        TrainingError: On every rank, if the file cannot be written.

    >>> model, rows = mpips.mlp.MLP([4, 16, 1]), lambda: mpips.mlp.open_source("synthetic:400,4,1")
    >>> mesh = mpips.mlp.Mesh(batch=MPI.COMM_WORLD.size)
    >>> worker = mpips.mlp.train(model, rows, mesh, epochs=1, batch=40).worker
    >>> mpips.mlp.save_checkpoint(str(folder / "mlp.safetensors"), worker)
    """
    state = worker.update.fetch()
    arrays: dict[str, np.ndarray] = {}
    if worker.mesh.batch_index == 0:
        flats = {"": worker.network.flat_parameters}
        flats |= {f"state{slot}.": array for slot, array in enumerate(state)}
        for prefix, flat in flats.items():
            for index, name in enumerate(MLP(*worker.network.specification).names):
                arrays[f"{prefix}{name}"] = _gather(worker, index, flat)
    problem = None
    if worker.mesh.comm.rank == 0:
        if data is not None:
            arrays |= {f"{SCALING}{name}": array for name, array in data.scaling._asdict().items()}
        scale = worker.update.loss_scale
        header = CheckpointHeader(
            worker.network.specification,
            encode(worker.optimizer).hex(),
            worker.updates,
            None if scale is None else (scale.scale, scale.good),
            None if data is None else data.rule,
            worker.labels,
        )
        try:
            write(path, arrays, {HEADER: msgspec.json.encode(header).decode()})
            LOG.info("checkpoint %s is written after %d updates", path, worker.updates)
        except OSError as error:
            problem = f"checkpoint {path} cannot be written: {why(error)}"
    agree(worker.mesh.comm, problem)


def load_checkpoint(
    path: str,
    mesh: Mesh,
    mode: str = "pairs",
    xp: ModuleType = np,
    overlap: bool | None = None,
    half: bool | None = None,
    servers: Servers | None = None,
) -> Worker:
    """Return a worker that continues training from a checkpoint: give it to `train`.

    Collective over the mesh; blocking. The mesh may differ from the mesh of the run that wrote the checkpoint. Each
    rank reads only its slice.

    Args:
        path: A file that `save_checkpoint` wrote. Every rank must be able to read it.
        mode: How model ranks cut the layers: "pairs" or "columns".
        xp: The array module that computes: NumPy or CuPy.
        overlap: As in `train`.
        half: As in `train`.
        servers: As in `train`.

    Raises:
        TrainingError: On every rank, if any rank cannot read the file or the file is not such a checkpoint.

    >>> model, rows = mpips.mlp.MLP([4, 16, 1]), lambda: mpips.mlp.open_source("synthetic:400,4,1")
    >>> mesh = mpips.mlp.Mesh(batch=MPI.COMM_WORLD.size)
    >>> worker = mpips.mlp.train(model, rows, mesh, epochs=1, batch=40).worker
    >>> mpips.mlp.save_checkpoint(str(folder / "mlp.safetensors"), worker)
    >>> worker = mpips.mlp.load_checkpoint(str(folder / "mlp.safetensors"), mesh)
    >>> len(mpips.mlp.train(model, rows, mesh, epochs=2, worker=worker, batch=40).epochs)
    2
    """

    def check_file(file: TensorFile) -> tuple[CheckpointHeader, Optimizer]:
        header = _read_header(file)
        optimizer = _check_tensors(file, header)
        file.check_sums((HEADER,), warns=mesh.comm.rank == 0)
        return header, optimizer

    header, optimizer = _read(path, mesh.comm, check_file)

    def start(network: Network) -> None:
        _read(path, mesh.comm, lambda file: _fill(file, network, {"": network.flat_parameters}))

    worker = Worker(MLP(*header.specification, xp=xp), mesh, optimizer, mode, overlap, half, servers, start)
    worker.updates, worker.rule, worker.labels = header.updates, header.rule, header.labels
    if worker.update.loss_scale is not None and header.loss_scale is not None:
        worker.update.loss_scale.scale, worker.update.loss_scale.good = header.loss_scale
    state = optimizer.init(worker.network.flat_parameters)
    flats = {f"state{slot}.": array for slot, array in enumerate(state)}
    _read(path, mesh.comm, lambda file: _fill(file, worker.network, flats))
    worker.update.restore(state, header.updates)
    LOG.info("checkpoint %s is read, of %d updates", path, header.updates)
    return worker


def read_header(path: str, comm: MPI.Comm) -> CheckpointHeader:
    """Return the metadata of a checkpoint. Collective; every rank raises TrainingError if any rank cannot read it."""
    return _read(path, comm, _read_header)


def read_scaling(path: str, comm: MPI.Comm) -> Scaling | None:
    """Return the scaling of a checkpoint's inputs and targets, or None if it was saved without data. Collective."""

    def get(file: TensorFile) -> Scaling | None:
        _check_tensors(file, _read_header(file))
        if f"{SCALING}x_mean" not in file.tensors:
            return None
        return Scaling(*(file.get(f"{SCALING}{name}") for name in Scaling._fields))

    return _read(path, comm, get)


def _read(path: str, comm: MPI.Comm, get: Callable[[TensorFile], T]) -> T:
    """Run `get` on a checkpoint, on every rank. Collective.

    Every rank raises TrainingError if any rank cannot read the file.
    """

    def read() -> T:
        try:
            with TensorFile(path) as file:
                return get(file)
        except (ValueError, TypeError) as error:
            raise TrainingError(f"checkpoint {error}") from error

    return attempt(comm, read)


def _read_header(file: TensorFile) -> CheckpointHeader:
    """Return the metadata. Raise ValueError if the file is not a checkpoint of a network."""
    try:
        header = msgspec.json.decode(file.metadata.get(HEADER, ""), type=CheckpointHeader)
        check(header.specification)
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{file.path} cannot be read: it was not written by mpips train: {error}") from error
    if len(header.labels) > header.specification.sizes[-1]:
        many = f"{len(header.labels)} labels and {header.specification.sizes[-1]} outputs"
        raise ValueError(f"{file.path} has {many}: save it anew")
    scale, good = header.loss_scale or (1.0, 0)
    for name, number in (("updates", header.updates), ("good steps", good)):
        if not 0 <= number <= MOST:
            raise ValueError(f"{file.path} has {name} {number}: give a whole number in [0, 2**63)")
    if not 0 < scale < math.inf:
        raise ValueError(f"{file.path} has a loss scale of {scale}: give a number above 0")
    return header


def _check_tensors(file: TensorFile, header: CheckpointHeader) -> Optimizer:
    """Return the optimizer. Raise ValueError if a tensor of the network or of the optimizer's state is missing."""
    try:
        optimizer = decode(bytes.fromhex(header.optimizer))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{file.path}: {error}") from error
    sizes, dtype = header.specification.sizes, working_dtype(header.specification.dtype)
    # A damaged header may claim a billion layers. Refuse it before making a name for each layer.
    if len(sizes) > len(file.tensors) + 1:
        raise ValueError(f"{file.path} has {len(file.tensors)} tensors, too few for {len(sizes)} sizes: save it anew")
    slots = len(initial(optimizer, np.zeros(1, dtype)))
    shapes: dict[str, tuple[int, ...]] = {}
    for prefix in ("", *(f"state{slot}." for slot in range(slots))):
        for layer, (inputs, outputs) in enumerate(pairwise(sizes)):
            shapes |= {f"{prefix}layer{layer}.weight": (outputs, inputs), f"{prefix}layer{layer}.bias": (outputs,)}
    if f"{SCALING}x_mean" in file.tensors:
        for axis in "xy":
            mean = file.tensors.get(f"{SCALING}{axis}_mean")
            shapes |= dict.fromkeys([f"{SCALING}{axis}_mean", f"{SCALING}{axis}_std"], mean.shape if mean else (1,))
    for name, shape in shapes.items():
        tensor = file.tensors.get(name)
        if tensor is None or tensor.shape != shape or not FLOATS.fullmatch(tensor.dtype.name):
            stored = "not there" if tensor is None else str(tensor)
            raise ValueError(f"{file.path}: {name} is {stored}, and floats of shape {shape} are needed: save anew")
    return optimizer


def _fill(file: TensorFile, network: Network, flats: dict[str, np.ndarray]) -> None:
    """Read this rank's slices of the tensors.

    `flats` maps a prefix of tensor names to the array to fill, which is laid out as `Network.flat_parameters`.
    """
    for prefix, flat in flats.items():
        for index, (name, view) in enumerate(zip(MLP(*network.specification).names, network.views(flat))):
            # With more ranks than neurons, some slices are empty.
            if view.size:
                rows, *columns = _place(network.splits[index // 2], index)
                put(file.get(f"{prefix}{name}", rows)[(slice(None), *columns)], view)


def _place(split: Split, index: int) -> tuple[slice, ...]:
    """Return the slice of parameter `index` that a rank holds. Weights have even indices, biases odd indices."""
    rows, columns = slice(*split.outputs), slice(*split.inputs)
    return (rows,) if index % 2 else (rows, columns)


def _gather(worker: Worker, index: int, flat: np.ndarray) -> np.ndarray:
    """Gather the whole of parameter `index` on the rank with model index 0. Collective over the model communicator.

    `flat` is an array laid out as the flat parameters. Other ranks return a copy of the parameter if they hold all of
    it, else an empty array.
    """
    network, comm, layer = worker.network, worker.mesh.model_comm, index // 2
    own = on_host(network.views(flat)[index])
    kind = network.splits[layer].kind
    if kind == "whole" or (kind == "rows" and index % 2):
        return own.copy()
    everywhere = [splits(network.sizes, network.parts, part, network.mode)[layer] for part in range(network.parts)]
    parts = [_place(split, index) for split in everywhere]
    counts = [int(np.prod([cut.stop - cut.start for cut in part])) for part in parts]
    received = np.empty(sum(counts), flat.dtype) if comm.rank == 0 else None
    comm.Gatherv(np.ascontiguousarray(own), None if received is None else [received, counts], root=0)
    if received is None:
        return np.empty(0, flat.dtype)
    whole, offset = np.empty((network.sizes[layer + 1], network.sizes[layer])[: own.ndim], flat.dtype), 0
    for part, count in zip(parts, counts):
        whole[part] = received[offset : offset + count].reshape(whole[part].shape)
        offset += count
    return whole
