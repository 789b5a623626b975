"""The names of compressors: `register` names a class, and `create` makes a compressor from a name and options."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from mpips.collectives.errors import did_you_mean
from mpips.compression.compressors import Compressor, Half, Integers, OneBit, TopK, TwoBit
from mpips.optimizers.base import LEAST, MOST
from mpips.optimizers.registry import add_kind

# name in `set_gradient_compression` -> compressor class
COMPRESSORS: dict[str, type[Compressor]] = {
    "2bit": TwoBit,
    "1bit": OneBit,
    "fp16": Half,
    "int": Integers,
    "topk": TopK,
}

EXAMPLE = '{"type": "2bit", "threshold": 0.5}'

K = TypeVar("K", bound=type[Compressor])


def register(name: str) -> Callable[[K], K]:
    """Class decorator that registers a compressor, so that `{"type": name, ...}` with its options selects it.

    Put it above `@dataclass(frozen=True)`. The class must stand before the call of `mpips.create`, because servers run
    the script only up to that call, and must know the name by then. Options are finite numbers and strings.

    Raises:
        TypeError: The class is not a frozen dataclass derived from Compressor.
        ValueError: Another class already has this name.
    """
    if not isinstance(name, str):
        raise TypeError(f'register takes the name of the type, as @mpips.compression.register("sign"), not {name!r}')

    def put(kind: K) -> K:
        need = "it needs @dataclass(frozen=True), below @register, and mpips.compression.Compressor as its base"
        fits = isinstance(kind, type) and issubclass(kind, Compressor)
        add_kind(COMPRESSORS, name, kind, {need: fits}, "compression type {} is {}: choose another name")
        return kind

    return put


def create(options: Mapping[str, Any]) -> Compressor:
    """Return the compressor for a type and its options, for example `{"type": "2bit", "threshold": 0.5}`.

    Raises:
        ValueError: The type is unknown, or a value is not allowed.
        TypeError: An option is unknown, or `options` is not a mapping.

    >>> compressor = mpips.compression.create({"type": "2bit", "threshold": 0.5})
    >>> gradient = np.array([0.75, 0.25], np.float32)
    >>> residual = compressor.init(gradient)
    >>> payload = compressor.encode(gradient, residual)
    >>> received = np.zeros_like(gradient)
    >>> compressor.decode(payload, received)
    >>> received, residual
    (array([0.5, 0. ], dtype=float32), array([0.25, 0.25], dtype=float32))
    """
    if not isinstance(options, Mapping):
        named = isinstance(options, str) and options in COMPRESSORS
        example = f'{{"type": "{options}"}}' if named else EXAMPLE
        raise TypeError(f"compression is given as {example}, not as {options!r}")
    given = dict(options)
    name = given.pop("type", None)
    if name is None:
        asked = f"no key 'type', only {', '.join(map(repr, given))}" if given else "no key 'type'"
        raise ValueError(f"compression has {asked}: pass {EXAMPLE}; types are {', '.join(COMPRESSORS)}")
    if not isinstance(name, str) or name not in COMPRESSORS:
        raise ValueError(
            f"unknown compression type {name!r}{did_you_mean(name, COMPRESSORS)}: the known ones are "
            f"{', '.join(COMPRESSORS)}; register your own "
            "(@mpips.compression.register) before mpips.create in the script that servers run, too"
        )
    fields = {field.name: field for field in dataclasses.fields(COMPRESSORS[name]) if field.init}
    if unknown := sorted(map(str, set(given) - set(fields))):
        raise TypeError(f"{name} compression has no option {', '.join(unknown)}; it has {', '.join(fields) or 'none'}")
    values = {key: _value(name, key, fields[key].type, value) for key, value in given.items()}
    try:
        made = COMPRESSORS[name](**values)
    except TypeError as error:
        raise ValueError(f"{name} compression cannot be made with {values}: {error}") from error
    for option in fields:
        value = getattr(made, option)
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(
                f"{name} compression with {option}={value}: give a finite number; a checkpoint holds no other"
            )
    return made


def _value(name: str, option: str, kind: object, value: Any) -> bool | float | str:
    if kind in (float, "float"):
        try:
            return float(value)
        except (TypeError, ValueError, OverflowError):
            raise ValueError(f"{name} compression has a number as {option}, not {value!r}") from None
    if not isinstance(value, (bool, int, float, str)) or (isinstance(value, int) and not LEAST <= value <= MOST):
        raise ValueError(f"{name} compression has a number or a string as {option}, not {value!r}")
    return value


def options(compressor: Compressor) -> dict[str, Any]:
    """Return the compressor as plain data, from which `create` makes an equal compressor.

    Raises ValueError if its class is not registered.
    """
    for name, kind in COMPRESSORS.items():
        if kind is type(compressor):
            return {"type": name, **dataclasses.asdict(compressor)}
    raise ValueError(f"{type(compressor).__name__} is not registered: put @mpips.compression.register(...) above it")
