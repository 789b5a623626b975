"""Convert the state of optimizers that run on servers to the form of PyTorch's optimizers, and back.

`DistributedOptimizer.state` returns a `LiveState`. `unpack` extracts PyTorch's state from a store's file, and `pack`
writes PyTorch's state into such a file. Thanks to these functions PyTorch's `get_state_dict` and `set_state_dict` work,
and training can continue from a DDP checkpoint with servers.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mpips.optimizers.adaptive import AdaGrad, Adam, AdamW, RMSProp
from mpips.optimizers.base import Optimizer, state_dtypes
from mpips.optimizers.sgd import SGD
from mpips.store.checkpoint import file
from mpips.store.checkpoint.load import DECODERS
from mpips.store.keys.key import Name

# optimizer of the store -> PyTorch's names for the arrays of its state, in the order of the store
ARRAYS: dict[type[Optimizer], tuple[str, ...]] = {
    SGD: ("momentum_buffer",),
    AdaGrad: ("sum",),
    RMSProp: ("square_avg",),
    Adam: ("exp_avg", "exp_avg_sq"),
    AdamW: ("exp_avg", "exp_avg_sq"),
}
STEP = "step"


def array_names(record: Optimizer) -> tuple[str, ...]:
    """Return PyTorch's names of the arrays that an optimizer keeps for each parameter."""
    return () if isinstance(record, SGD) and not record.momentum else ARRAYS[type(record)]


def _counts_steps(record: Optimizer) -> bool:
    """True if PyTorch's state of this optimizer has a "step"."""
    return not isinstance(record, SGD)


def _scales(record: Optimizer) -> tuple[float, ...]:
    """Return the factors that turn the arrays of the store's optimizer into PyTorch's arrays.

    They differ from 1 only for Adam, because the store's Adam keeps the moments without the factors 1 - beta.
    """
    return (1 - record.beta1, 1 - record.beta2) if isinstance(record, Adam) else (1.0,) * len(array_names(record))


class LiveState(MutableMapping[Tensor, Any]):
    """The state of the wrapped optimizer, by parameter. If the optimizer runs on servers, all values are NaN.

    `bool()` of a LiveState is True even if it is empty. The reason is that PyTorch's `get_state_dict` and similar
    functions make an optimizer without state create one: they run a step with learning rate 0 and zero gradients. Here
    that would be a step of all workers. Momentum on servers would decay, and a step would be counted that the program
    has not made. So this class creates an initial state itself, on this worker alone and only to show it. The
    optimizer does not start from the initial state.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, records: Callable[[], Mapping[Tensor, Optimizer]]) -> None:
        """`records` returns the servers' optimizers by parameter. It is empty if the optimizer runs on this worker."""
        self._optimizer = optimizer
        self._records = records
        # the initial state, which is shown until the optimizer has a state of its own
        self._first: dict[Any, Any] = {}

    def _shown_state(self) -> MutableMapping[Any, Any]:
        if records := self._records():
            return {parameter: _blank(parameter, record) for parameter, record in records.items()}
        if self._optimizer.state:
            self._first = {}
        return self._first or self._optimizer.state

    @contextmanager
    def shown(self, state: Mapping[Any, Any] | None = None) -> Iterator[None]:
        """Within this context the wrapped optimizer has the state `state`, which comes from the servers.

        If `state` is None, the optimizer has its own state or, if that is empty, the initial state.
        """
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

            # This call does nothing if parameters have gradients. The same holds for any other optimizer.
            _init_optim_state(self._optimizer)
            self._first = dict(self._optimizer.state)
            self._optimizer.state.clear()
        return True

    def __getitem__(self, parameter: Tensor) -> Any:
        return self._shown_state()[parameter]

    def __setitem__(self, parameter: Tensor, value: Any) -> None:
        # If the servers have the state, only `load_state_dict` changes it, and this assignment is ignored.
        if not self._records():
            self._optimizer.state[parameter] = value

    def __delitem__(self, parameter: Tensor) -> None:
        del self._optimizer.state[parameter]

    def __iter__(self) -> Iterator[Any]:
        return iter(list(self._shown_state()))

    def __len__(self) -> int:
        return len(self._shown_state())

    def __repr__(self) -> str:
        return repr(dict(self))


def _blank(parameter: Tensor, record: Optimizer) -> dict[str, Tensor]:
    """Return a state with the names and shapes of the servers' state. All values share one NaN, to save memory."""
    blank = torch.full((), float("nan"))
    step = {STEP: blank} if _counts_steps(record) else {}
    dtypes = state_dtypes(record, np.dtype(str(parameter.dtype).removeprefix("torch.")))
    return step | {
        name: blank.to(_torch_dtype(dtype)).expand(parameter.shape)
        for name, dtype in zip(array_names(record), dtypes, strict=True)
    }


def unpack(
    data: bytes, parameters: Mapping[Name, Tensor], records: Mapping[Tensor, Optimizer]
) -> dict[Tensor, dict[str, Tensor]]:
    """Extract PyTorch's state, by parameter, from the file of a store.

    A parameter that was not updated yet gets a state of zeros and step 0. If it is frozen, it gets no state.

    Args:
        data: The content of the file.
        parameters: The parameter of each key.
        records: The servers' optimizer of each parameter.
    """
    header, arrays = _read(data)
    states: dict[Tensor, dict[str, Tensor]] = {}
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
            states[parameter] = state
    return states


def pack(
    data: bytes,
    parameters: Mapping[Name, Tensor],
    records: Mapping[Tensor, Optimizer],
    states: Mapping[str, Mapping[str, Any]],
) -> bytes:
    """Return the content of a store's file in which PyTorch's states replace the store's.

    Args:
        data: The content of the file.
        parameters: The parameter of each key.
        records: The servers' optimizer of each parameter.
        states: PyTorch's state of each key.

    Raises:
        ValueError: A state lacks an array, or an array has another shape than its parameter.
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
            # The store keeps no arrays for a parameter before its first update.
            saved.step, given = 0, []
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
    """Return the states in an optimizer's `state_dict` by key. `keys[i]` is the key of its i-th parameter."""
    ids = [each for group in state_dict["param_groups"] for each in group["params"]]
    return {key: state_dict["state"][each] for each, key in zip(ids, keys) if each in state_dict["state"]}


def _array_of(key: str, name: str, parameter: Tensor, state: Mapping[str, Any]) -> Tensor:
    given = state.get(name)
    # PyTorch's SGD has no momentum before its first step.
    if given is None and name == "momentum_buffer":
        return torch.zeros_like(parameter)
    if not isinstance(given, Tensor):
        names = ", ".join(map(repr, state))
        raise ValueError(
            f"load_state_dict: the state of parameter {key!r} has no tensor {name!r}, it has {names}: "
            "load what the same kind of optimizer gave"
        )
    if given.shape != parameter.shape:
        raise ValueError(
            f"load_state_dict: {name!r} of parameter {key!r} has shape {tuple(given.shape)}, and the "
            f"parameter {tuple(parameter.shape)}: load what was saved of this model"
        )
    return given.detach()


def _read(data: bytes) -> tuple[file.StoreHeader, dict[str, np.ndarray]]:
    """Return the header and the arrays of a store's file. It needs no checks, because the store has just written it."""
    start = file.LENGTH_BYTES + int.from_bytes(data[: file.LENGTH_BYTES], "little")
    entries = json.loads(data[file.LENGTH_BYTES : start])
    header = file.decode_header(entries.pop("__metadata__")[file.STORE].encode(), DECODERS)
    arrays = {}
    for name, entry in entries.items():
        first, last = entry["data_offsets"]
        line = np.frombuffer(data[start + first : start + last], file.DTYPES[entry["dtype"]])
        arrays[name] = line.reshape(entry["shape"])
    return header, arrays


def _torch_dtype(dtype: np.dtype) -> torch.dtype:
    torch_dtype: torch.dtype = getattr(torch, dtype.name)
    return torch_dtype
