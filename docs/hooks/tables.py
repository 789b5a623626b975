"""Write docs/why/files.md, the house folder by folder, from the first lines of docstrings. `make docs` runs it."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "why" / "files.md"
PACKAGES = ("collectives", "mpips", "launch")
OPENING = """# Files, folder by folder

Made from docstrings by `python docs/hooks/tables.py`; a test holds it to them.
[Architecture](architecture.md) says why the code is divided so.
"""


def first_line(path: Path) -> str:
    """Return the first sentence of a module's docstring, on one line."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return " ".join(text.split("\n\n")[0].split()).replace("|", "\\|").partition(". ")[0].rstrip(".:")


def page() -> str:
    """Return the whole page: a heading for each package, a table for each folder."""
    parts = [OPENING]
    for package in PACKAGES:
        folders = sorted({path.parent for path in (ROOT / package).rglob("*.py")})
        for folder in folders:
            name, depth = folder.relative_to(ROOT).as_posix(), len(folder.relative_to(ROOT).parts)
            files = sorted(path for path in folder.glob("*.py") if path.name != "__init__.py")
            opening = first_line(folder / "__init__.py") if (folder / "__init__.py").is_file() else ""
            parts.append(f"{'#' * min(depth + 1, 4)} {name}\n\n{opening}.\n" if opening else f"## {name}\n")
            if files:
                rows = [f"| `{path.name}` | {first_line(path)} |" for path in files]
                parts.append("\n".join(["| file | holds |", "|---|---|", *rows]) + "\n")
    return "\n".join(parts)


def main() -> None:
    """Write the page, or with --check end with 1 where it is out of date."""
    text = page()
    if "--check" in sys.argv:
        sys.exit(PAGE.read_text(encoding="utf-8") != text)
    PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
