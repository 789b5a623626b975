"""The state of optimizers that run on servers, in the form in which PyTorch's optimizers have it.

`LiveState` is what `DistributedOptimizer.state` gives. `unpack` takes PyTorch's state out of a store's file, and `pack`
puts it back. So PyTorch's `get_state_dict` and `set_state_dict` serve, and checkpoints of DDP can go on with servers.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from mpips.optimizers.adaptive import AdaGrad, Adam, AdamW, RMSProp
from mpips.optimizers.base import Optimizer, state_dtypes
from mpips.optimizers.sgd import SGD
from mpips.store.checkpoint import file
from mpips.store.keys.key import Name

ARRAYS: dict[type[Optimizer], tuple[str, ...]] = {
    SGD: ("momentum_buffer",),
    AdaGrad: ("sum",),
    RMSProp: ("square_avg",),
    Adam: ("exp_avg", "exp_avg_sq"),
    AdamW: ("exp_avg", "exp_avg_sq"),
}
"""PyTorch's names of the arrays of a record's state, in the order of the record."""
STEP = "step"


def array_names(record: Optimizer) -> tuple[str, ...]:
    """PyTorch's names of the arrays that an optimizer has for each parameter."""
    return () if isinstance(record, SGD) and not record.momentum else ARRAYS[type(record)]


def _counts_steps(record: Optimizer) -> bool:
    """True where PyTorch's state has a "step"."""
    return not isinstance(record, SGD)


def _scales(record: Optimizer) -> tuple[float, ...]:
    """The factor of each array that makes it PyTorch's: Adam's records keep the moments without these factors."""
    return (1 - record.beta1, 1 - record.beta2) if isinstance(record, Adam) else (1.0,) * len(array_names(record))


class LiveState(MutableMapping[Tensor, Any]):
    """The state of the wrapped optimizer, by parameter; that of an optimizer on servers has NaN in place of values.

    It is true while nothing is in it. PyTorch's `get_state_dict`, and its like, make a step with rate 0 and gradients
    of zeros where an optimizer has no state yet, so that it gets one. That step would be one of all workers: momentum
    on servers would decay, and a step would be counted that the program has not made. So this makes a first state to
    show, on this worker alone, and the optimizer itself begins without it.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, records: Callable[[], Mapping[Tensor, Optimizer]]) -> None:
        """`records` returns those of the servers by parameter; nothing where the optimizer runs on this worker."""
        self._optimizer, self._records = optimizer, records
        self._first: dict[Any, Any] = {}

    def _there(self) -> MutableMapping[Any, Any]:
        if records := self._records():
            return {parameter: _blank(parameter, record) for parameter, record in records.items()}
        if self._optimizer.state:
            self._first = {}
        return self._first or self._optimizer.state

    @contextmanager
    def shown(self, state: Mapping[Any, Any] | None = None) -> Iterator[None]:
        """Let the wrapped optimizer have this state within, of servers; or, where it has none yet, the first one."""
        kept = self._optimizer.state
        extra = state if state is not None else self._first if not kept else {}
        kept.update(extra)
        try:
            yield
        finally:
            for parameter in extra:
                del kept[parameter]

    def __bool__(self) -> bool:
        if not self._records() and not self._optimizer.state:
            from torch.distributed.checkpoint.state_dict import _init_optim_state

            _init_optim_state(self._optimizer)  # as for any other optimizer; nothing where there are gradients
            self._first = dict(self._optimizer.state)
            self._optimizer.state.clear()
        return True

    def __getitem__(self, parameter: Tensor) -> Any:
        return self._there()[parameter]

    def __setitem__(self, parameter: Tensor, value: Any) -> None:
        if not self._records():  # else of no effect: `load_state_dict` gives servers a state
            self._optimizer.state[parameter] = value

    def __delitem__(self, parameter: Tensor) -> None:
        del self._optimizer.state[parameter]

    def __iter__(self) -> Iterator[Any]:
        return iter(list(self._there()))

    def __len__(self) -> int:
        return len(self._there())

    def __repr__(self) -> str:
        return repr(dict(self))


def _blank(parameter: Tensor, record: Optimizer) -> dict[str, Tensor]:
    """The names and shapes of a state on servers, with NaN: no memory is used for it."""
    blank = torch.full((), float("nan"))
    found = {STEP: blank} if _counts_steps(record) else {}
    dtypes = state_dtypes(record, np.dtype(str(parameter.dtype).removeprefix("torch.")))
    return found | {
        name: blank.to(_torch_dtype(dtype)).expand(parameter.shape)
        for name, dtype in zip(array_names(record), dtypes, strict=True)
    }


def unpack(
    data: bytes, parameters: Mapping[Name, Tensor], records: Mapping[Tensor, Optimizer]
) -> dict[Tensor, dict[str, Tensor]]:
    """Return PyTorch's state by parameter, from the file of a store; `parameters` by key, `records` the optimizers.

    A parameter that has not been updated has zeros and step 0, unless it is frozen.
    """
    header, arrays = _read(data)
    found: dict[Tensor, dict[str, Tensor]] = {}
    for saved in header.records:
        parameter = parameters.get(saved.key)
        if parameter is None or not (saved.state or parameter.requires_grad):
            continue
        record = records[parameter]
        state = {STEP: torch.tensor(float(saved.step))} if _counts_steps(record) else {}
        dtypes = state_dtypes(record, np.dtype(saved.dtype))
        for slot, (name, scale, dtype) in enumerate(zip(array_names(record), _scales(record), dtypes, strict=True)):
            state[name] = torch.zeros(saved.shape, dtype=_torch_dtype(dtype))
            if saved.state:
                line = torch.from_numpy(arrays[file.state_name(saved.key, slot)].copy())
                state[name].view(-1).copy_(line).mul_(scale)
        if state:
            found[parameter] = state
    return found


def pack(
    data: bytes,
    parameters: Mapping[Name, Tensor],
    records: Mapping[Tensor, Optimizer],
    states: Mapping[str, Mapping[str, Any]],
) -> bytes:
    """Return the file of a store with PyTorch's states, by key, in place of its own.

    ValueError where a state lacks an array, or one has another shape.
    """
    header, arrays = _read(data)
    for saved in header.records:
        parameter = parameters.get(saved.key)
        if parameter is None:
            continue
        for slot in range(len(saved.state)):
            del arrays[file.state_name(saved.key, slot)]
        record, state = records[parameter], states.get(str(saved.key), {})
        given = [_array_of(str(saved.key), name, parameter, state) for name in array_names(record)] if state else []
        saved.step = int(state.get(STEP, 1 if state else 0))
        if not saved.step or not (_counts_steps(record) or any(each.any() for each in given)):
            saved.step, given = 0, []  # as before the first update
        dtypes = state_dtypes(record, np.dtype(saved.dtype))[: len(given)]
        saved.state = [dtype.name for dtype in dtypes]
        for slot, (array, scale, dtype) in enumerate(zip(given, _scales(record), dtypes)):
            line = array.double().div(scale).to(_torch_dtype(dtype))
            arrays[file.state_name(saved.key, slot)] = line.contiguous().view(-1).numpy()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "store.safetensors")
        file.write(path, arrays, file.metadata(header))
        return path.read_bytes()


def states_by_key(state_dict: Mapping[str, Any], keys: Sequence[str]) -> dict[str, Mapping[str, Any]]:
    """Return the states in an optimizer's `state_dict` by key; ids there are numbers, or names of parameters."""
    ids = [each for group in state_dict["param_groups"] for each in group["params"]]
    return {key: state_dict["state"][each] for each, key in zip(ids, keys) if each in state_dict["state"]}


def _array_of(key: str, name: str, parameter: Tensor, state: Mapping[str, Any]) -> Tensor:
    given = state.get(name)
    if given is None and name == "momentum_buffer":  # PyTorch's SGD has none before its first step
        return torch.zeros_like(parameter)
    if not isinstance(given, Tensor):
        found = ", ".join(map(repr, state))
        raise ValueError(
            f"load_state_dict: the state of parameter {key!r} has no tensor {name!r}, it has {found}: "
            "load what the same kind of optimizer gave"
        )
    if given.shape != parameter.shape:
        raise ValueError(
            f"load_state_dict: {name!r} of parameter {key!r} has shape {tuple(given.shape)}, and the "
            f"parameter {tuple(parameter.shape)}: load what was saved of this model"
        )
    return given.detach()


def _read(data: bytes) -> tuple[file.Header, dict[str, np.ndarray]]:
    """Return the header and the arrays of a store's file, which the store has just written."""
    start = file.LENGTH_BYTES + int.from_bytes(data[: file.LENGTH_BYTES], "little")
    entries = json.loads(data[file.LENGTH_BYTES : start])
    header = msgspec.json.decode(entries.pop("__metadata__")[file.STORE], type=file.Header)
    arrays = {}
    for name, entry in entries.items():
        first, last = entry["data_offsets"]
        line = np.frombuffer(data[start + first : start + last], file.DTYPES[entry["dtype"]])
        arrays[name] = line.reshape(entry["shape"])
    return header, arrays


def _torch_dtype(dtype: np.dtype) -> torch.dtype:
    found: torch.dtype = getattr(torch, dtype.name)
    return found
