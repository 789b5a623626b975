"""Sizes and lists as people write them: "4KiB", "1KiB:64MiB:4", "ring,bcube(n=2,k=2)", and sizes back to words."""

from __future__ import annotations

import re

UNITS = {
    "": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40,
}  # fmt: skip
MOST = 10**18
"""Bytes, so that counts of them fit 64-bit integers."""


def parse_bytes(text: str) -> int:
    """4096 from "4096", "4KiB" or "4 kib"; 4,000,000 from "4MB". ValueError for anything else, or above `MOST`."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    if not match or match.group(2).upper() not in UNITS:
        raise ValueError(f"{text!r} is no size: write 4096, 4KiB, 4MiB, 1GiB, 1TiB or 4MB")
    found = float(match.group(1)) * UNITS[match.group(2).upper()]
    if found > MOST:
        raise ValueError(f"{text!r} is above {MOST:.0e} bytes, the most there is")
    return int(found)


def parse_sizes(text: str) -> list[int]:
    """Return sizes in bytes: "1KiB,4MiB", "1KiB:64MiB" in steps of 4, "1KiB:64MiB:2" in steps of 2, or both.

    A list may hold ranges: "8,1KiB:64MiB".
    """
    return [size for part in text.split(",") for size in _parse_range(part)]


def _parse_range(text: str) -> list[int]:
    if ":" not in text:
        return [parse_bytes(text)]
    first, last, *rest = text.split(":")
    factor = int(rest[0]) if rest and rest[0].isdigit() else 4
    low, high = parse_bytes(first), parse_bytes(last)
    if factor < 2 or len(rest) > 1 or (rest and not rest[0].isdigit()) or low < 1 or high < low:
        raise ValueError(
            f"{text!r} is no range of sizes: write MIN:MAX or MIN:MAX:FACTOR, with 1 <= MIN <= MAX, FACTOR >= 2"
        )
    sizes = [low]
    while sizes[-1] * factor <= high:
        sizes.append(sizes[-1] * factor)
    return sizes


def parse_counts(text: str, itemsize: int, element: str) -> list[int]:
    """The sizes of `parse_sizes` in elements of so many bytes; ValueError for one that is no whole number of them."""
    sizes = parse_sizes(text)
    for size in sizes:
        if size < itemsize or size % itemsize:
            raise ValueError(
                f"--sizes {text}: a {element} takes {itemsize} bytes: pass multiples of that from {itemsize} on, not "
                f"{show_bytes(size)}"
            )
    return [size // itemsize for size in sizes]


def show_bytes(nbytes: int) -> str:
    """Return "4 MiB" for 4194304, "548 MB" for 548000000, and the number of bytes where no unit divides it."""
    binary = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))
    units = (*binary, (10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (1, "B"))
    fitting = [f"{nbytes // unit} {name}" for unit, name in units if nbytes >= unit and nbytes % unit == 0]
    return min(fitting, key=lambda text: len(text.split()[0]), default="0 B")


def split_words(text: str) -> list[str]:
    """Return the comma-separated words of `text`, not split inside brackets: "ring,bcube(n=2,k=2)"."""
    words, depth = [""], 0
    for letter in text:
        depth += (letter == "(") - (letter == ")")
        if letter == "," and depth == 0:
            words.append("")
        else:
            words[-1] += letter
    return [word.strip() for word in words if word.strip()]
