"""What happens to files: flipped bits, and bytes or words of JSON in place of others, by a seed."""

from __future__ import annotations

import json
import random
import tracemalloc
from collections.abc import Callable
from typing import Any

NASTY = (
    None,
    True,
    0,
    -1,
    1,
    7,
    2**31,
    2**63 - 1,
    2**63,
    2**70,
    -(2**70),
    0.5,
    -0.0,
    1e300,
    -1e300,
    float("nan"),
    float("inf"),
    "",
    "x",
    "float32",
    "\0",
    "\ud800",
    "9" * 400,
    [],
    [[]],
    {},
    {"": ""},
    {"name": "sgd", "options": {}},
    {"schedule": "cosine"},
    {"schedule": []},
)
MARGIN = 256 << 10
"""Bytes that Python itself may take in reading a small file."""


def flipped(data: bytes, rng: random.Random) -> bytes:
    """The same with one bit turned."""
    changed = bytearray(data)
    changed[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def torn(data: bytes, rng: random.Random) -> bytes:
    """The same with some bytes turned, taken out, put in, doubled or moved."""
    at, count = rng.randrange(len(data)), 1 + int(rng.expovariate(0.2))
    piece = data[at : at + count]
    return rng.choice(
        [
            lambda: flipped(data, rng),
            lambda: data[:at],
            lambda: data[:at] + data[at + count :],
            lambda: data[:at] + rng.randbytes(count) + data[at + count :],
            lambda: data[:at] + rng.randbytes(count) + data[at:],
            lambda: data[:at] + piece * 3 + data[at + count :],
            lambda: data[:at] + bytes([rng.choice(b'0123456789-eE".,:[]{}\0\xff')]) + data[at + 1 :],
        ]
    )()


def reworded(value: Any, rng: random.Random) -> Any:
    """JSON data with another value, or none, somewhere in it; words that are JSON themselves are reworded inside."""
    if isinstance(value, (dict, list)) and value and rng.random() < 0.9:
        place = rng.choice(list(value) if isinstance(value, dict) else range(len(value)))
        changed = value.copy()
        if rng.random() < 0.1:
            del changed[place]
        else:
            changed[place] = reworded(value[place], rng)
        return changed
    if isinstance(value, str) and value[:1] in ("{", "[") and rng.random() < 0.9:
        return json.dumps(reworded(json.loads(value), rng))
    return rng.choice(NASTY)


def damaged_json(data: bytes, rng: random.Random) -> bytes:
    """A file of JSON, torn or reworded, or nested without an end."""
    if rng.random() < 0.02:
        return b"[" * 100_000
    if rng.random() < 0.3:
        return torn(data, rng)
    return json.dumps(reworded(json.loads(data), rng)).encode()


def damaged_tensors(data: bytes, rng: random.Random) -> bytes:
    """A file of safetensors, torn, or with a header that is reworded or another one."""
    if rng.random() < 0.3:
        return torn(data, rng)
    count = int.from_bytes(data[:8], "little")
    header = damaged_json(data[8 : 8 + count], rng)
    return len(header).to_bytes(8, "little") + header + data[8 + count :]


def refused(
    read: Callable[[], object], limit: int, error: type[Exception] | tuple[type[Exception], ...], always: bool = False
) -> str | None:
    """The sentence with which a file is refused, by this error alone, having taken at most `limit` bytes of memory and
    a margin; None where it is taken, which may take more unless `always`."""
    tracemalloc.start()
    sentence = None
    try:
        read()
    except error as refusal:
        sentence = str(refusal)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (sentence is None and not always) or peak <= limit + MARGIN, f"{peak} bytes were taken: {sentence}"
    if sentence is not None:
        assert sentence and "\n" not in sentence.strip(), sentence
    return sentence
