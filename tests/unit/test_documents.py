"""Documents point at things that are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import collectives

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document: Path) -> None:
    text = re.sub(r"```.*?```", "", document.read_text(encoding="utf-8"), flags=re.DOTALL)
    targets = [target.split("#")[0] for target in re.findall(r"\]\(([^)\s]+)\)", text)]
    local = [target for target in targets if target and not target.startswith(("http://", "https://", "mailto:"))]
    missing = [target for target in local if not (document.parent / target).exists()]
    assert not missing, f"{document.name} links to {missing}"


def test_the_rooms_of_the_house_are_there() -> None:
    text = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    packages = ("collectives", "mpips", "launch", "tests")
    names = re.findall(r"`([\w/]+(?:\.py|/))`", text)
    assert len(names) > 40
    modules = [path.name for package in packages[:3] for path in (ROOT / package).glob("[!_]*.py")]
    assert [name for name in modules if name not in names] == []
    missing = [name for name in names if not any((ROOT / package / name).exists() for package in (*packages, "."))]
    assert not missing


def test_every_call_is_in_a_table() -> None:
    text = (ROOT / "mpips" / "store.py").read_text(encoding="utf-8")
    store = re.findall(r"^    def ([a-z]\w+)\(self", text, re.MULTILINE)
    collective = [name for name in collectives.__all__ if name.islower()]
    for document, names in {"kvstore.md": store, "algorithms.md": collective}.items():
        table = " ".join(line for line in (ROOT / "docs" / document).read_text("utf-8").splitlines() if line[:1] == "|")
        assert len(names) > 5
        assert [name for name in names if not re.search(rf"`{name}\b", table)] == []
