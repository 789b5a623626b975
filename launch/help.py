"""Examples at the end of a command's help."""

from __future__ import annotations


def examples(*lines: str) -> str:
    """The epilog of a click command: each example on a line of its own."""
    title = "Example:" if len(lines) == 1 else "Examples:"
    return "\n".join(["\b", title, *(f"  {line}" for line in lines)])
