"""The documents: links, programs, calls, commands, options and errors that they show are there."""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import click
import pytest

import collectives
from docs.hooks import commands, docstrings
from tests.tracked import tracked

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
DOCUMENTS = [path for path in tracked(ROOT, "*.md") if path.parent == ROOT or DOCS in path.parents]
PACKAGES = ("collectives", "mpips", "launch")
each_document = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))


def read(*path: str) -> str:
    return DOCS.joinpath(*path).read_text(encoding="utf-8")


def table(text: str) -> str:
    """The lines of tables."""
    return "\n".join(line for line in text.splitlines() if line[:1] == "|")


def test_every_page_is_in_the_list_of_pages() -> None:
    listed = re.findall(r"[:-] ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(listed) == sorted(page.relative_to(DOCS).as_posix() for page in tracked(DOCS, "*.md"))


@each_document
def test_links_lead_somewhere(document: Path) -> None:
    text = re.sub(r"```.*?```", "", document.read_text(encoding="utf-8"), flags=re.DOTALL)
    targets = [target.split("#")[0] for target in re.findall(r"\]\(([^)\s]+)\)", text)]
    local = [target for target in targets if target and not target.startswith(("http://", "https://", "mailto:"))]
    missing = [target for target in local if not (document.parent / target).exists()]
    assert not missing, f"{document.name} links to {missing}"


@pytest.mark.slow
def test_the_page_of_files_is_made_from_docstrings() -> None:
    done = subprocess.run([sys.executable, str(ROOT / "docs" / "hooks" / "tables.py"), "--check"], timeout=60)
    assert not done.returncode, "run python docs/hooks/tables.py"


def test_the_architecture_names_files_that_are_there() -> None:
    names = re.findall(r"`([\w/]+(?:\.py|/))`", read("why", "architecture.md"))
    places = (*PACKAGES, "mpips/store", "tests", ".")
    assert [name for name in names if not any((ROOT / place / name).exists() for place in places)] == []


# what names on pages begin with that are not of the packages
FOREIGN = ("kv", "numpy", "np", "os", "torch", "jax", "MPI", "dist", "examples", "tests", "net")


def names_in(tree: ast.AST) -> set[str]:
    """What a piece of code defines, assigns, imports or uses."""
    words: set[str] = set()
    for node in ast.walk(tree):
        for field in ("name", "id", "attr", "arg", "asname"):
            if isinstance(word := getattr(node, field, None), str):
                words.add(word.rpartition(".")[2])
    return words


@cache
def owners() -> tuple[dict[str, set[str]], dict[str, set[str]]]:
    """By the name of each folder, module and class of the packages what is in it, and the bases of each class."""
    inside: dict[str, set[str]] = {}
    bases: dict[str, set[str]] = {}
    for path in (path for package in PACKAGES for path in tracked(ROOT / package)):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        module = path.parent.name if path.stem == "__init__" else path.stem
        inside.setdefault(module, set()).update(names_in(tree))
        inside.setdefault(path.parent.name, set()).add(path.stem)
        inside.setdefault(path.parent.parent.name, set()).add(path.parent.name)
        for node in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
            inside.setdefault(node.name, set()).update(names_in(node))
            bases.setdefault(node.name, set()).update(base.id for base in node.bases if isinstance(base, ast.Name))
    inside["mpips"] |= {*PACKAGES}  # which installed lie in it
    return inside, bases


def lacks(owner: str, name: str) -> bool:
    inside, bases = owners()
    return name not in inside[owner] and all(lacks(base, name) for base in bases.get(owner, ()) if base in inside)


@pytest.mark.slow
def test_names_on_the_pages_of_why_are_in_the_code() -> None:
    """Each `owner.name`, and the first word of each line of a walk."""
    inside, _ = owners()
    code = "".join(path.read_text(encoding="utf-8") for path in tracked(ROOT))
    words, wrong = {*re.findall(r"\w+", code)}, []
    for page in (page for page in tracked(DOCS / "why", "*.md") if page.name != "files.md"):  # made of docstrings
        text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        names = re.findall(r"`([A-Za-z_][\w.]*\w)(?:\(.*?\))?`", text)
        names += re.findall(r"^    (\w+(?:\.\w+)+) {2,}", text, re.MULTILINE)
        for name in names:
            *parents, last = name.split(".")
            if last in ("py", "md", "json", "toml") or name.partition(".")[0] in FOREIGN:
                continue
            steps = zip(parents, [*parents[1:], last])
            if last not in words or any(owner not in inside or lacks(owner, part) for owner, part in steps):
                wrong.append(f"{page.name}: {name}")
    assert not wrong


def test_every_call_is_in_a_table() -> None:
    text = (ROOT / "mpips" / "store" / "api.py").read_text(encoding="utf-8")
    store = re.findall(r"^    def ([a-z]\w+)\(self", text.partition("\nclass Generations")[0], re.MULTILINE)
    collective = [name for name in collectives.__all__ if name.islower()]
    for page, names in {"store.md": store, "collectives.md": collective}.items():
        assert len(names) > 5
        assert [name for name in names if not re.search(rf"`{name}\b", table(read("reference", page)))] == []


def test_pages_that_the_code_names_are_there() -> None:
    files = [path for folder in (*PACKAGES, "examples", "tests", "net") for path in tracked(ROOT / folder)]
    texts = {path: path.read_text(encoding="utf-8") for path in [*files, ROOT / "pyproject.toml"]}
    named = {(path, page) for path, text in texts.items() for page in re.findall(r"\bdocs/[\w/-]+\.md\b", text)}
    assert [f"{path.relative_to(ROOT)}: {page}" for path, page in named if not (ROOT / page).is_file()] == []


@pytest.mark.slow
def test_messages_name_pages_by_their_titles() -> None:
    """The folder of documents is not installed. Docstrings of modules are read where it is."""
    listed = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    titles = {*re.findall(r"^ +- ([^:\n]+): \S+\.md$", listed, re.MULTILINE)}
    opening = {
        ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")), clean=False)
        for package in PACKAGES
        for path in tracked(ROOT / package)
    }
    said = [text for text in sentences() if text not in opening]
    assert [text for text in said if re.search(r"\bdocs/[\w/-]+", text)] == []
    named = [page for text in said for page in re.findall(r'\bthe page "([^"]+)"', text)]
    assert len(named) > 3 and {*named} <= titles, named


# ---- programs: that those of the tutorials run is seen by tests/mpi/launch/test_documents.py


@each_document
def test_what_programs_name_is_there(document: Path) -> None:
    for block in re.findall(r"```python\n(.*?)```", document.read_text(encoding="utf-8"), re.DOTALL):
        missing = [f"{module}.{name}" for module, name in named(ast.parse(block)) if not offers(module, name)]
        assert not missing, f"{document.name}: {missing}\n{block}"


def named(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """What a program takes of our packages: modules and names in them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in PACKAGES:
            yield from ((node.module, alias.name) for alias in node.names)
        elif isinstance(node, ast.Attribute) and ast.unparse(node).split(".")[0] in PACKAGES:
            words = ast.unparse(node).split("(")[0].split(".")
            depth = next(i for i in range(len(words), 0, -1) if path_of(".".join(words[:i])))
            if depth < len(words):
                yield ".".join(words[:depth]), words[depth]


def path_of(module: str) -> Path | None:
    """The file of a module."""
    base = ROOT.joinpath(*module.split("."))
    return next((path for path in (base.with_suffix(".py"), base / "__init__.py") if path.is_file()), None)


@cache
def public(module: str) -> frozenset[str]:
    """The names that a module offers, without importing it: those of extras are there, too."""
    path = path_of(module)
    assert path is not None, module
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return frozenset(re.findall(r"'(\w+)'", ast.unparse(node.value)))
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            found.add(ast.unparse(node.targets[0] if isinstance(node, ast.Assign) else node.target))
    return frozenset(found)


def offers(module: str, name: str) -> bool:
    return name in public(module) or path_of(f"{module}.{name}") is not None


def test_docstrings_become_markdown() -> None:
    text = "Sums x.\n\n>>> f(1)\n2\n\nx      an array\n       of floats"
    assert docstrings.markdown(text) == "Sums x.\n\n```pycon\n>>> f(1)\n2\n```\n\n- **x**: an array of floats"
    assert docstrings.markdown("One line.\n\n    code(x)\n    more") == "One line.\n\n    code(x)\n    more"


# ---- commands


@pytest.mark.slow
def test_every_command_shows_its_help() -> None:
    assert set(commands.commands()) - shown() == set()


def options_of(command: click.Command) -> list[click.Option]:
    """Those of a command and of all below it."""
    below = command.commands.values() if isinstance(command, click.Group) else ()
    own = [option for option in command.params if isinstance(option, click.Option)]
    return [*own, *(option for each in below for option in options_of(each))]


def shown() -> set[tuple[str, ...]]:
    """The commands whose help the reference shows."""
    return {tuple(words.split()) for words in commands.MARK.findall(read("reference", "commands.md"))}


@each_document
def test_commands_and_their_options_are_there(document: Path) -> None:
    text = re.sub(r"\\\n\s*", " ", document.read_text(encoding="utf-8"))
    lines = re.findall(r"^ {4,}(?:\$ |)(mpips [a-z].*)$", text, re.MULTILINE)
    lines += re.findall(r"`(mpips [a-z][^`]*)`", text)
    wrong = [f"{line}: {fault}" for line in lines for fault in faults(shlex.split(line.partition("  #")[0].strip()))]
    assert not wrong, "\n".join(wrong)


def faults(words: list[str]) -> Iterator[str]:
    """What is wrong with the words of a command, up to the program that it starts."""
    known, depth = shown(), 1
    while depth < len(words) and tuple(words[1 : depth + 1]) in known:
        depth += 1
    command = tuple(words[1:depth])
    if not command:
        yield "no such command"
        return
    listed = re.findall(r"^  (-.*?)(?:  |$)", commands.help_of(*command).partition("\nOptions:\n")[2], re.MULTILINE)
    options = {option for line in listed for option in re.findall(r"--?[a-zA-Z][\w-]*", line)}
    for word in words[depth:]:
        if word in ("--", "#") or word.endswith(".py") or (word == "-m" and "-m" not in options):
            return
        if re.match(r"--?[a-zA-Z]", word) and word.partition("=")[0] not in options:
            yield f"no option {word}"


def test_faults_of_commands_are_found() -> None:
    assert list(faults(["mpips", "run", "-w", "2", "--servers=1", "train.py", "--lr", "1"])) == []
    assert list(faults(["mpips", "run", "--sevrers", "2", "train.py"])) == ["no option --sevrers"]
    assert list(faults(["mpips", "lab", "up", "star:2", "--speed", "1"])) == ["no option --speed"]
    assert list(faults(["mpips", "fly"])) == ["no such command"]


# ---- errors


@pytest.mark.slow
def test_the_sentences_of_errors_are_in_the_code() -> None:
    said = sentences()
    shown = re.findall(r"^\| `([^`]*…[^`]*|[^`]* [^`]*)` \|", read("reference", "errors.md"), re.MULTILINE)
    assert len(shown) > 40
    patterns = {one: re.compile(".*".join(re.escape(part) for part in re.split("…+", one))) for one in shown}
    assert [one for one, pattern in patterns.items() if not any(pattern.search(text) for text in said)] == []


def sentences() -> list[str]:
    """Every text in the code, with … where a value is put in."""
    found = []
    for path in (path for package in PACKAGES for path in tracked(ROOT / package)):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                found.append("".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found
