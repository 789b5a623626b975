"""Checkpoints (safetensors) of the whole network and its optimizer: written from any mesh, read on any other."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
from mpi4py import MPI
from safetensors import SafetensorError, safe_open

from mpips.checkpoint.file import write
from mpips.optimizers import decode, encode

from .agreement import agree
from .communication import on_host, put
from .data.minibatches import Rule
from .data.part import Data, Scaling
from .mesh import Mesh
from .network.mlp import MLP
from .network.network import Network
from .network.specification import Specification
from .network.splits import Split
from .worker import UpdateServers, Worker


class _Header(msgspec.Struct):
    specification: Specification
    optimizer: str
    updates: int
    loss_scale: tuple[float, int] | None = None
    rule: Rule | None = None
    labels: tuple[str, ...] = ()


def collect(worker: Worker) -> MLP:
    """The whole trained network, on every rank. Collective over the mesh."""
    model = MLP(*worker.network.specification)
    for layer in range(len(worker.network.splits)):
        for kind, target in (("weight", model.parameters[2 * layer]), ("bias", model.parameters[2 * layer + 1])):
            whole = _gather(worker, layer, kind, worker.network.flat_parameters)
            if worker.mesh.model_index == 0:
                target[...] = whole
            worker.mesh.model_comm.Bcast(target, root=0)
    return model


def save(path: str, worker: Worker, data: Data | None = None) -> None:
    """Write the whole network, the optimizer with its state, and how the data were scaled and dealt. Collective over
    the mesh.

    Layers go one after the other to rank 0, which writes the file beside `path` and renames it. Raises
    TrainingError on every rank where the file cannot be written. Servers send what they keep of the state. With elastic
    averaging network and state are the first client's.
    """
    state = worker.update.fetch()
    arrays: dict[str, np.ndarray] = {}
    if worker.mesh.batch_index == 0:
        flats = {"": worker.network.flat_parameters}
        flats |= {f"state{slot}.": array for slot, array in enumerate(state)}
        for prefix, flat in flats.items():
            for layer in range(len(worker.network.splits)):
                for kind in ("weight", "bias"):
                    arrays[f"{prefix}layer{layer}.{kind}"] = _gather(worker, layer, kind, flat)
    problem = None
    if worker.mesh.comm.rank == 0:
        if data is not None:
            arrays |= {f"scaling.{name}": array for name, array in data.scaling._asdict().items()}
        problem = _write(path, arrays, worker, None if data is None else data.rule)
    agree(worker.mesh.comm, problem)


def specification(path: str, comm: MPI.Comm) -> Specification:
    """The network of a checkpoint. Collective; TrainingError on every rank where it cannot be read."""
    return _read_header(path, comm).specification


def rule(path: str, comm: MPI.Comm) -> Rule | None:
    """By what the rows were dealt that trained a checkpoint; None where it was saved without data. Collective."""
    return _read_header(path, comm).rule


def labels(path: str, comm: MPI.Comm) -> tuple[str, ...]:
    """What the data of a checkpoint call its classes, in their order; 0, 1, ... where it does not say. Collective."""
    header = _read_header(path, comm)
    return header.labels or tuple(str(number) for number in range(header.specification.sizes[-1]))


def scaling(path: str, comm: MPI.Comm) -> Scaling | None:
    """The scaling that a checkpoint's inputs and targets have; None where it was saved without data. Collective."""
    found, problem = None, None
    try:
        with safe_open(path, "np") as file:
            names = file.keys()
            if "scaling.x_mean" in names:
                found = Scaling(*(file.get_tensor(f"scaling.{name}") for name in Scaling._fields))
    except (OSError, SafetensorError) as error:
        problem = f"checkpoint {path} cannot be read: {error}"
    agree(comm, problem)
    return found


def load(
    path: str, mesh: Mesh, mode: str = "pairs", xp: Any = np, overlap: bool | None = None, half: bool | None = None,
    servers: UpdateServers | None = None,
) -> Worker:  # fmt: skip
    """This rank's slice of a saved network, ready to go on training on `mesh`. Collective; each rank reads only
    its slice. `overlap`, `half`, `servers`: see `train`."""
    header = _read_header(path, mesh.comm)
    optimizer = decode(bytes.fromhex(header.optimizer))

    def start(network: Network) -> None:
        _read(path, mesh, network, {"": network.flat_parameters})

    worker = Worker(MLP(*header.specification, xp=xp), mesh, optimizer, mode, overlap, half, servers, start)
    worker.updates, worker.rule, worker.labels = header.updates, header.rule, header.labels
    if worker.update.loss_scale is not None and header.loss_scale is not None:
        worker.update.loss_scale.scale, worker.update.loss_scale.good = header.loss_scale
    state = optimizer.init(worker.network.flat_parameters)
    _read(path, mesh, worker.network, {f"state{slot}.": array for slot, array in enumerate(state)})
    worker.update.restore(state, header.updates)
    return worker


def _read(path: str, mesh: Mesh, network: Network, flats: dict[str, Any]) -> None:
    """This rank's slice of arrays laid out as the flat parameters, by the prefix of their names. Collective."""
    problem = None
    try:
        with safe_open(path, "np") as file:
            for prefix, flat in flats.items():
                for layer, split in enumerate(network.splits):
                    for kind, view in zip(("weight", "bias"), network.views(flat)[2 * layer : 2 * layer + 2]):
                        if view.size:  # an idle rank holds an empty slice, which the library refuses to read
                            put(file.get_slice(f"{prefix}layer{layer}.{kind}")[_where(split, kind)], view)
    except (OSError, ValueError, SafetensorError) as error:
        problem = f"checkpoint {path} cannot be read: {error}"
    agree(mesh.comm, problem)


def _read_header(path: str, comm: MPI.Comm) -> _Header:
    header, problem = None, None
    try:
        with safe_open(path, "np") as file:
            header = msgspec.json.decode((file.metadata() or {}).get("mpips", ""), type=_Header)
    except (OSError, SafetensorError, msgspec.MsgspecError) as error:
        problem = f"checkpoint {path} cannot be read: {error}"
    agree(comm, problem)
    assert header is not None
    return header


def _where(split: Split, kind: str) -> tuple[slice, ...]:
    rows, columns = slice(*split.outputs), slice(*split.inputs)
    return (rows, columns) if kind == "weight" else (rows,)


def _gather(worker: Worker, layer: int, kind: str, flat: np.ndarray) -> np.ndarray:
    """The whole weight or bias of a layer at model index 0, of an array laid out as the parameters; empty elsewhere."""
    network, comm = worker.network, worker.mesh.model_comm
    mine = on_host(network.views(flat)[2 * layer + (kind == "bias")])
    whole_shape = (network.sizes[layer + 1], network.sizes[layer]) if kind == "weight" else (network.sizes[layer + 1],)
    cut = network.splits[layer].kind
    if cut == "whole" or (cut == "rows" and kind == "bias"):
        return mine.copy()
    parts = [_where(each[layer], kind) for each in network.splits_of_all()]
    counts = [int(np.prod([cut.stop - cut.start for cut in part])) for part in parts]
    received = np.empty(sum(counts), flat.dtype) if comm.rank == 0 else None
    comm.Gatherv(np.ascontiguousarray(mine), [received, counts, None, MPI._typedict[flat.dtype.char]], root=0)
    if received is None:
        return np.empty(0, flat.dtype)
    whole, offset = np.empty(whole_shape, flat.dtype), 0
    for part, count in zip(parts, counts):
        whole[part] = received[offset : offset + count].reshape(whole[part].shape)
        offset += count
    return whole


def _write(path: str, arrays: dict[str, np.ndarray], worker: Worker, rule: Rule | None) -> str | None:
    optimizer = encode(worker.optimizer).hex()
    scale = worker.update.loss_scale
    header = _Header(
        worker.network.specification, optimizer, worker.updates, None if scale is None else (scale.scale, scale.good),
        rule, worker.labels,
    )  # fmt: skip
    try:
        write(path, arrays, {"mpips": msgspec.json.encode(header).decode()})
    except OSError as error:
        return f"checkpoint {path} cannot be written: {error}"
    return None
