"""The pages of the documentation with their blocks of code, and the examples in docstrings."""

from __future__ import annotations

import doctest
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.tracked import tracked

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([ROOT / "README.md", *tracked(ROOT / "docs", "*.md")])


def programs(page: Path) -> dict[str, str]:
    """Return name -> text, for the blocks of a page whose first line is a comment with the name of a file."""
    blocks = re.findall(r"```\w+\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    return {match[1]: block for block in blocks if (match := re.match(r"# (\w+\.\w+)\n", block))}


def blocks(page: Path) -> Iterator[str]:
    """Yield the blocks of code of a page, fenced or indented. Lines that end with a backslash are joined."""
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    for fenced, indented in re.findall(r"^```[^\n]*\n(.*?)^```|^((?:    [^\n]*\n)+)", text, re.MULTILINE | re.DOTALL):
        yield fenced or indented


def failed_examples(call: Any, **names: Any) -> str:
    """Run the examples of a docstring, in which `names` are known. Return what is wrong with them, or ""."""
    test = doctest.DocTestParser().get_doctest(call.__doc__, names, call.__name__, None, None)
    reports: list[str] = []
    options = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
    outcome = doctest.DocTestRunner(optionflags=options).run(test, out=reports.append)
    return "".join(reports) if outcome.attempted else f"{call.__name__} has no example"
