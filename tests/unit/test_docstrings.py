"""Docstrings begin with a verb in the imperative, and their first sentence is short."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CLAUSE = re.compile(r"(What|Whether|How|Where|Who|Whose|When|By what|The same)\b")
SENTENCE = re.compile(r".*?\.(?=\s|$)|.*", re.DOTALL)
MOST_WORDS = 25
CLAUSES_LEFT, LONG_LEFT = 0, 36
"""How many docstrings still break each rule. These numbers may only fall: lower them where you mend some."""


def docstrings() -> list[tuple[str, str]]:
    """Return place and text of every docstring of the packages."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return [
        (f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}", text)
        for package in ("collectives", "mpips", "launch")
        for path in sorted((ROOT / package).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, kinds) and (text := ast.get_docstring(node))
    ]


def test_docstrings_open_with_no_clause() -> None:
    wrong = [f"{place}: {text.splitlines()[0]}" for place, text in docstrings() if CLAUSE.match(text)]
    assert len(wrong) <= CLAUSES_LEFT, "\n".join(wrong)


def test_first_sentences_are_short() -> None:
    firsts = [(place, SENTENCE.match(text)[0]) for place, text in docstrings()]
    wrong = [f"{place}: {first}" for place, first in firsts if len(first.split()) > MOST_WORDS]
    assert len(wrong) <= LONG_LEFT, "\n".join(wrong)
