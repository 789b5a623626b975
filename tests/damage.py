"""Damage files at random, to test their readers: flip bits, replace bytes, or change values in JSON."""

from __future__ import annotations

import json
import random
import tracemalloc
from collections.abc import Callable
from typing import Any

# values that a reader of JSON may not expect
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
# bytes of memory that Python itself may take while it reads a small file
MARGIN = 256 << 10


def flipped(data: bytes, rng: random.Random) -> bytes:
    """Return `data` with one flipped bit."""
    changed = bytearray(data)
    changed[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def torn(data: bytes, rng: random.Random) -> bytes:
    """Return `data` with some bytes changed, removed, inserted or repeated."""
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
    """Return parsed JSON in which one value, at any depth, is replaced or removed. A string may contain JSON, too."""
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
    """Return the content of a JSON file with damaged bytes, with a changed value, or nested very deeply."""
    if rng.random() < 0.02:
        return b"[" * 100_000
    if rng.random() < 0.3:
        return torn(data, rng)
    return json.dumps(reworded(json.loads(data), rng)).encode()


def damaged_tensors(data: bytes, rng: random.Random) -> bytes:
    """Return the content of a safetensors file with damaged bytes or a damaged header."""
    if rng.random() < 0.3:
        return torn(data, rng)
    count = int.from_bytes(data[:8], "little")
    header = damaged_json(data[8 : 8 + count], rng)
    return len(header).to_bytes(8, "little") + header + data[8 + count :]


def refused(
    read: Callable[[], object], limit: int, error: type[Exception] | tuple[type[Exception], ...], always: bool = False
) -> str | None:
    """Read a damaged file, and return the message of the error, or None if the file could be read.

    Asserts that the reader raises no other error, that the message is one line, and that the reader takes at most
    `limit` bytes of memory plus `MARGIN`. The limit applies if the file is refused or, with `always`, in any case.

    Args:
        read: Reads the file.
        limit: Bytes of memory.
        error: The errors that the reader may raise.
        always: The limit also applies if the file can be read.
    """
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
