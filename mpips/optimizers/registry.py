"""Find optimizers and schedules by name, and encode them for messages and files (as msgpack, never pickle)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec
import numpy as np

from mpips.collectives.errors import did_you_mean
from mpips.optimizers.base import LEAST, MOST, Optimizer, initial, known

# lower-case name -> optimizer class: the classes of mpips, and those that the program has registered
OPTIMIZERS: dict[str, type] = {}

# lower-case name -> optimizer class of mpips, even if a class of the program has taken the name in OPTIMIZERS
_BUILT_IN: dict[str, type] = {}

# lower-case name -> schedule class
SCHEDULES: dict[str, type] = {}

T = TypeVar("T", bound=type)


class _Record(msgspec.Struct):
    name: str
    options: dict[str, Any]
    # True if the class is the program's own, False if it is of mpips. None in files of older versions.
    own: bool | None = None


def register(kind: T) -> T:
    """Make an optimizer or a schedule known by the lower-case name of its class. Use it as a decorator.

    Put it above `@dataclass(frozen=True)`, before `mpips.create`: servers run the script up to that call, and so learn
    the name. An optimizer has the methods `init` and `update`, a schedule has `at`. Options may be finite numbers,
    flags, strings, None, schedules, and tuples of these. An optimizer class may have the name of an optimizer of mpips.
    The name then stands for the new class.

    Raises:
        TypeError: The class is not a frozen dataclass, or lacks the methods.
        ValueError: Another class of the program, or a schedule of mpips, has the name.
    """
    methods = (hasattr(kind, "init") and hasattr(kind, "update")) or hasattr(kind, "at")
    table = OPTIMIZERS if hasattr(kind, "update") else SCHEDULES
    needs = {
        "it needs @dataclass(frozen=True), below @register": True,
        "an optimizer needs init(weights) and update(weights, gradient, state, step), "
        "a schedule needs at(step)": methods,
    }
    name = getattr(kind, "__name__", "").lower()
    # An optimizer of mpips never blocks a name. It may be newer than the program, and the program must keep working.
    taken = {key: each for key, each in table.items() if _BUILT_IN.get(key) is not each}
    add_kind(taken, name, kind, needs, "the name {} is that of {}: choose another")
    table[name] = kind
    if table is OPTIMIZERS and kind.__module__.startswith("mpips."):
        _BUILT_IN[name] = kind
    return kind


def of_gradients() -> list[str]:
    """Return the names of mpips' own optimizers that follow a gradient at a learning rate."""
    fields = {name: [field.name for field in dataclasses.fields(kind)] for name, kind in _BUILT_IN.items()}
    return [name for name, names in fields.items() if "learning_rate" in names]


def add_kind(table: dict[str, Any], name: str, kind: Any, needs: Mapping[str, bool], taken: str) -> None:
    """Add a frozen dataclass to a registry of names.

    Args:
        table: The registry: name -> class.
        needs: Requirement in words -> True if it is met. An error tells the first requirement that is not met.
        taken: Text of the error if another class has the name. It has two places ({}), for the name and that class.

    Raises:
        TypeError: `kind` is not a frozen dataclass, or a requirement is not met.
        ValueError: Another class has the name.
    """
    parameters = vars(kind).get("__dataclass_params__") if isinstance(kind, type) else None
    frozen = parameters is not None and parameters.frozen
    if unmet := [need for need, met in needs.items() if not (frozen and met)]:
        raise TypeError(f"{getattr(kind, '__name__', repr(kind))} cannot be registered: {unmet[0]}")
    other = table.get(name)
    if other is not None and (other.__module__, other.__qualname__) != (kind.__module__, kind.__qualname__):
        raise ValueError(taken.format(repr(name), f"{other.__module__}.{other.__qualname__}"))
    table[name] = kind


def create(optimizer: str | Optimizer, **options: Any) -> Optimizer:
    """Return the optimizer with this name (in any case) and these options. An optimizer is returned as it is.

    The optimizer is tried on two weights, so that a wrong option raises an error in this call and not on a server.

    Raises:
        ValueError: The name is unknown (the known ones are listed), a value is not allowed, or the trial fails.
        TypeError: An option is unknown or is not plain data, the class is not registered, or a class is given instead
            of an instance.
    """
    if isinstance(optimizer, type):
        raise TypeError(f"give an optimizer, {optimizer.__name__}(...), not the class {optimizer.__name__}")
    if isinstance(optimizer, str):
        kind = OPTIMIZERS.get(optimizer.lower())
        if kind is None:
            raise ValueError(
                f"unknown optimizer {optimizer!r}{did_you_mean(optimizer, OPTIMIZERS)}: the known ones are "
                f"{', '.join(OPTIMIZERS)}; register your own "
                "(@mpips.optimizers.register) before mpips.create"
            )
        return _make(kind, options)
    if not isinstance(optimizer, Optimizer):
        raise ValueError(
            f"{_short_text(optimizer)} is no optimizer of mpips: give a name and numbers, as 'sgd', learning_rate=0.1; "
            f"the known ones are {', '.join(OPTIMIZERS)}"
        )
    if options:
        names = ", ".join(sorted(options))
        raise TypeError(
            f"options ({names}) go with an optimizer's name, not with a {_short_text(optimizer)} made already"
        )
    if type(optimizer) not in (*OPTIMIZERS.values(), *_BUILT_IN.values()):
        raise TypeError(f"{_short_text(optimizer)} is not registered: put @mpips.optimizers.register above its class")
    return _check_by_trial(optimizer)


def _make(kind: type, options: dict[str, Any]) -> Optimizer:
    known(kind, options)
    return _check_by_trial(kind(**options))


def _check_by_trial(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer, after checking that it can be sent and saved, and that it can update two weights."""
    _options(optimizer)
    weights = np.array([1, -1], np.float32)
    try:
        with np.errstate(all="ignore"):
            optimizer.update(weights, -weights, initial(optimizer, weights), 1)
    except Exception as error:
        raise ValueError(f"{optimizer!r} cannot update two weights: {type(error).__name__}: {error}") from error
    return optimizer


def _short_text(thing: object) -> str:
    """Describe an object in a few words, however long its repr is: `None`, `3`, or its class."""
    if thing is None or isinstance(thing, (bool, int, float)):
        return repr(thing)
    kind = type(thing)
    return f"{kind.__module__}.{kind.__qualname__}"


def as_data(optimizer: Optimizer) -> dict[str, Any]:
    """Return the optimizer as plain data: its name and its options. `from_data` makes an equal optimizer from it."""
    record = create(optimizer)
    return {"name": type(record).__name__.lower(), "options": _options(record), "own": _is_own(record)}


def describe(optimizer: Optimizer | None) -> str:
    """Describe an optimizer by a text. Two ranks get equal texts only if the classes and options are equal."""
    own = optimizer is not None and _is_own(optimizer)
    return f"{type(optimizer).__module__}.{optimizer!r}" if own else repr(optimizer)


def _is_own(optimizer: Optimizer) -> bool:
    """True if the optimizer's class is defined by the user's program, not by mpips."""
    return type(optimizer) not in _BUILT_IN.values()


def from_data(data: object) -> Optimizer:
    """Return the optimizer that `as_data` described.

    Raises ValueError or TypeError for other data or an unknown name.
    """
    return _from_record(msgspec.convert(data, _Record))


def encode(optimizer: Optimizer) -> bytes:
    """Return the optimizer as msgpack, for messages."""
    return msgspec.msgpack.encode(as_data(optimizer))


def decode(data: bytes) -> Optimizer:
    """Return the optimizer that `encode` wrote. Raises ValueError or TypeError for other data or an unknown name."""
    return _from_record(msgspec.msgpack.decode(data, type=_Record))


def _from_record(record: _Record) -> Optimizer:
    kind = (_BUILT_IN if record.own is False else OPTIMIZERS).get(record.name)
    if kind is None or (record.own and kind is _BUILT_IN.get(record.name)):
        raise ValueError(
            f"optimizer {record.name!r} is not known here: register it (@mpips.optimizers.register) before "
            "mpips.create in the script that servers run, too"
        )
    options = {name: _from_plain(value) for name, value in record.options.items()}
    try:
        return _make(kind, options)
    except (TypeError, ValueError) as error:
        raise ValueError(f"the optimizer that is registered here as {record.name!r} is another one: {error}") from None


def encode_numbers(numbers: Mapping[str, Any]) -> bytes:
    """Encode the options that `update_optimizer` changes (name -> value) as msgpack. A value may be a schedule."""
    return msgspec.msgpack.encode({name: _plain(name, value) for name, value in numbers.items()})


def decode_numbers(data: bytes) -> dict[str, Any]:
    """Return the options that `encode_numbers` wrote."""
    return {name: _from_plain(value) for name, value in msgspec.msgpack.decode(data, type=dict[str, Any]).items()}


def _options(record: Any) -> dict[str, Any]:
    """Return the options of an optimizer or schedule as plain data.

    Raises TypeError or ValueError for an option that cannot be sent or saved.
    """
    fields = [field.name for field in dataclasses.fields(record) if field.init]
    return {name: _plain(name, getattr(record, name)) for name in fields}


def _plain(option: str, value: object) -> Any:
    """Return an option as plain data. A schedule becomes a dict of its name and its options."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"option {option}={value}: give a finite number; a checkpoint holds no other")
    if isinstance(value, int) and not LEAST <= value <= MOST:
        raise ValueError(f"option {option}={value} does not fit into 64 bits: give a smaller number")
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (tuple, list)):
        return [_plain(option, part) for part in value]
    name = type(value).__name__.lower()
    if SCHEDULES.get(name) is type(value):
        return {"schedule": name, "options": _options(value)}
    raise TypeError(
        f"an option of an optimizer is a number, a flag, a string or a registered schedule, not a {_short_text(value)}"
    )


def _from_plain(value: object) -> object:
    """Convert plain data that `_plain` has returned back to the option."""
    if isinstance(value, list):
        return tuple(_from_plain(part) for part in value)
    if not isinstance(value, dict):
        return value
    name = value.get("schedule")
    if name not in SCHEDULES:
        raise ValueError(
            f"schedule {name!r} is not known here: register it (@mpips.optimizers.register) before mpips.create in the "
            "script that servers run, too"
        )
    return SCHEDULES[name](**{option: _from_plain(part) for option, part in value["options"].items()})
