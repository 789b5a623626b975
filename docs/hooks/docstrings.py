"""An extension of griffe: docstrings of this project as Markdown.

A line `name   what it is` with its deeper continuation lines becomes an item of a list, and a line that begins with
`>>>` becomes a block of code with what follows it.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

NAMED = re.compile(r"(\w[\w, *]*?) {2,}(\S.*)")


class Docstrings(griffe.Extension):
    """Rewrites every docstring when it is read."""

    def on_instance(self, *, obj: Any, **_: Any) -> None:
        """Called for every module, class, function and attribute."""
        if obj.docstring is not None:
            obj.docstring.value = markdown(obj.docstring.value)


def markdown(text: str) -> str:
    """The docstring as Markdown."""
    return "\n\n".join(map(_paragraph, re.split(r"\n{2,}", text)))


def _paragraph(text: str) -> str:
    lines = text.split("\n")
    if lines[0].startswith(">>> "):
        return "\n".join(["```pycon", *lines, "```"])
    if not NAMED.fullmatch(lines[0]) or not all(line.startswith("  ") or NAMED.fullmatch(line) for line in lines):
        return text
    items: list[str] = []
    for line in lines:
        if found := NAMED.fullmatch(line):
            items.append(f"- **{found[1]}**: {found[2]}")
        else:
            items[-1] += f" {line.strip()}"
    return "\n".join(items)
