"""Write a recorded equation as the text of a kernel: a loop over elements, over a sum, or over rows of a table.

A kernel's arguments are weights, arrays of state, gradients and numbers, all 1-D. In its text `w_all` is an array, `w_`
the part of it that an inner loop covers, and `w` an element. 16-bit floats come as their bits, and are reckoned in as
float32. `lines` are those of `Tape.loop`.
"""

from __future__ import annotations

from collections.abc import Sequence

from mpips.optimizers.trace import Tape

TILE = 1024
"""Elements of several gradients that are summed before weights are updated by them: they stay in a core's first cache.
"""
LONG_TILE, MANY_PARTS = 16 * 1024, 5
"""Elements for so many gradients: memory is read in longer runs, and the sum stays in the second cache."""
READ_AT_ONCE = 8
"""Gradients that one loop adds: LLVM compares no more arrays before it takes several elements at once."""
WIDE = {"float16": "float32", "bfloat16": "float32", "float32": "float32", "float64": "float64"}
"""Dtypes of weights that kernels know, and what they reckon in."""


def update_text(tape: Tape, lines: Sequence[str], dtype: str) -> str:
    """Return the kernel that updates by one gradient."""
    return "\n".join([
        *_head(tape, dtype, ["g0"], []),
        *[f"    {name}_ = {name}_all" for name in [*_arrays(tape), "g0"]],
        "    for i in range(w_.size):",
        f"        g = {_widened('g0_[i]', dtype)}",
        *_update(tape, lines, dtype, "        "),
    ])  # fmt: skip


def sum_text(tape: Tape, lines: Sequence[str], dtype: str, parts: int) -> str:
    """Return the kernel that updates by the sum of gradients, added from first to last."""
    tile = TILE if parts < MANY_PARTS else LONG_TILE
    gradients, adding = _gradients(parts), []
    total = _widened("g0_[i]", dtype)
    for number, gradient in enumerate(gradients[1:], 1):
        total = _added(total, f"{gradient}_[i]", dtype)
        if number % READ_AT_ONCE == 0 or number == parts - 1:
            adding += ["        for i in range(w_.size):", f"            total[i] = {total}"]
            total = "total[i]"
    return "\n".join([
        *_head(tape, dtype, gradients, []),
        f"    total = np.empty({tile}, np.{WIDE[dtype]})",
        f"    for start in range(0, w_all.size, {tile}):",
        f"        stop = min(start + {tile}, w_all.size)",
        *[f"        {name}_ = {name}_all[start:stop]" for name in [*_arrays(tape), *gradients]],
        *adding,
        "        for i in range(w_.size):",
        "            g = total[i]",
        *_update(tape, lines, dtype, "            "),
    ])  # fmt: skip


def rows_text(tape: Tape, lines: Sequence[str], dtype: str, parts: int) -> str:
    """Return the kernel that updates rows of a table by the sum of gradients of some rows each.

    More arguments follow: `columns`, the elements of a row, and `r0, ...`, the rows of each gradient, ascending.
    """
    gradients, adding, least = _gradients(parts), [], []
    for number, gradient in enumerate(gradients):
        rows, at = f"r{number}", f"k{number}"
        least += [f"        if {at} < {rows}.size:", f"            row = min(row, {rows}[{at}])"]
        total = _added("total[i]", "g_[i]", dtype) if number else _widened("g_[i]", dtype)
        adding += [
            f"        if {at} < {rows}.size and {rows}[{at}] == row:",
            f"            g_ = {gradient}_all[{at} * columns : ({at} + 1) * columns]",
            "            for i in range(columns):",
            f"                total[i] = {total}",
            f"            {at} += 1",
            *([] if number else ["        else:", "            total[:] = 0"]),
        ]
    return "\n".join([
        *_head(tape, dtype, gradients, ["columns", *[f"r{number}" for number in range(parts)]]),
        f"    total = np.empty(columns, np.{WIDE[dtype]})",
        *[f"    k{number} = 0" for number in range(parts)],
        "    while True:",
        "        row = w_all.size",
        *least,
        "        if row == w_all.size:",
        "            break",
        *adding,
        *[f"        {name}_ = {name}_all[row * columns : (row + 1) * columns]" for name in _arrays(tape)],
        "        for i in range(columns):",
        "            g = total[i]",
        *_update(tape, lines, dtype, "            "),
    ])  # fmt: skip


def _arrays(tape: Tape) -> list[str]:
    """Return the names of what is updated."""
    return ["w", *[f"s{slot}" for slot in range(tape.slots)]]


def _gradients(parts: int) -> list[str]:
    return [f"g{part}" for part in range(parts)]


def _head(tape: Tape, dtype: str, gradients: Sequence[str], more: Sequence[str]) -> list[str]:
    arguments = [*[f"{name}_all" for name in [*_arrays(tape), *gradients]], "c", *more]
    return [
        f"def kernel({', '.join(arguments)}):",
        f"    one, zero = np.{WIDE[dtype]}(1), np.{WIDE[dtype]}(0)",
        *[f"    c{i} = c[{i}]" for i in range(len(tape.scalars))],
    ]


def _update(tape: Tape, lines: Sequence[str], dtype: str, indent: str) -> list[str]:
    """Return the lines that update element i by the gradient `g`."""
    states = _arrays(tape)[1:]
    narrow = f"narrow_{dtype}" if "16" in dtype else ""
    update = [
        f"w = {_widened('w_[i]', dtype)}", *[f"{name} = {name}_[i]" for name in states], *lines,
        f"w_[i] = {narrow}(w)", *[f"{name}_[i] = {name}" for name in states],
    ]  # fmt: skip
    return [*[indent + line for line in update], ""]


def _widened(element: str, dtype: str) -> str:
    """Return what an element is reckoned in as."""
    return f"widen_{dtype}({element})" if "16" in dtype else element


def _added(total: str, element: str, dtype: str) -> str:
    """Return the sum, rounded to the dtype."""
    added = f"{total} + {_widened(element, dtype)}"
    return f"widen_{dtype}(narrow_{dtype}({added}))" if "16" in dtype else f"({added})"
