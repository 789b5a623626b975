"""The house as docs/why/architecture.md tells it: who imports whom, and that it stands outside the repository."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import mpips
from tests.mutations import MUTATIONS, misfit
from tests.tracked import list_files, tracked

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("mpips", "collectives", "launch")
# Of extras; files that import them when they are loaded are loaded for them alone.
OPTIONAL = ("prometheus_client", "cupy", "jax", "llvmlite", "mxnet", "numba", "pyroute2", "torch")
# What each package may import of the other two.
ALLOWED = {
    "collectives": ("mpips.doors",),
    "mpips": ("collectives",),
    "launch": (
        "mpips.doors",
        "mpips.store.options",
        "mpips.store.world",
        "mpips.store.checkpoint.folder",
        "collectives.simulator.topology",
        "collectives.clock",
        "collectives.errors",
        "collectives.files",
        "collectives.log",
        "collectives.machine",
        "collectives.recorder",
        "collectives.terminal",
        "collectives.fabric.process_memory",
        "collectives.kernels.engine",
        "collectives.schedule.model",
    ),
}


def imports(path: Path) -> Iterator[str]:
    """Every module that a file imports, at whatever depth of the code, with relative imports made absolute."""
    package = path.relative_to(ROOT).with_suffix("").parts[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = [*package[: len(package) - node.level + 1]] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{module}.{alias.name}" for alias in node.names)


def below_mpips(module: str) -> str:
    """A module as our own files name it, such as mpips.collectives.plan, by its place in the repository. The outer
    names `collectives` and `launch` may be a program's own, so a file of ours that uses one has no place."""
    top, _, below = module.partition(".")
    if top != "mpips":
        return f"the outer {module}"
    return below if below.partition(".")[0] in PACKAGES else module


def allowed(module: str, package: str) -> bool:
    return any(module == name or module.startswith(name + ".") for name in (package, *ALLOWED[package]))


@pytest.mark.slow
@pytest.mark.parametrize("package", PACKAGES)
def test_imports_run_one_way(package: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)} imports {module}"
        for path in tracked(ROOT / package)
        for module in imports(path)
        if module.split(".")[0] in PACKAGES and not allowed(below_mpips(module), package)
    ]
    assert not wrong, "\n".join(wrong)


def test_the_store_knows_tables_as_a_service_alone() -> None:
    """One list names it, and one call of users makes a table."""
    knows = [
        path.relative_to(ROOT).as_posix()
        for path in tracked(ROOT / "mpips" / "store")
        if any(module.startswith("mpips.tables.") for module in imports(path))
    ]
    assert sorted(knows) == ["mpips/store/api.py", "mpips/store/services.py"]


@pytest.mark.slow
def test_what_files_import_and_name_is_there() -> None:
    """Imports for types alone, too, which nobody carries out; and files that docstrings and comments name."""
    files = sorted(path for package in PACKAGES for path in tracked(ROOT / package))
    wrong = []
    for path in files:
        for module in imports(path):
            *parents, name = below_mpips(module).split(".")
            if parents and parents[0] in PACKAGES and not is_there(ROOT.joinpath(*parents), name):
                wrong.append(f"{path.relative_to(ROOT)} imports {module}")
        for named in re.findall(r"`([\w/]+\.py)`", path.read_text(encoding="utf-8")):
            if not any(str(other).endswith(f"/{named}") for other in files):
                wrong.append(f"{path.relative_to(ROOT)} names {named}")
    assert not wrong, "\n".join(wrong)


def is_there(module: Path, name: str) -> bool:
    """Return whether a package has this module, or a module this name."""
    if module.is_dir() and ((module / name).is_dir() or (module / f"{name}.py").is_file()):
        return True
    file = module / "__init__.py" if module.is_dir() else module.with_suffix(".py")
    return file.is_file() and re.search(rf"\b{name}\b", file.read_text(encoding="utf-8")) is not None


def test_no_test_module_imports_another() -> None:
    """What they share is in modules beside them."""
    wrong = [
        f"{path.relative_to(ROOT)} imports {module}"
        for path in tracked(ROOT / "tests")
        for module in imports(path)
        if module.startswith("tests.") and ".test_" in module
    ]
    assert not wrong, "\n".join(wrong)


def test_the_reader_of_imports_sees_them_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    file = tmp_path / "collectives" / "deep" / "x.py"
    file.parent.mkdir(parents=True)
    file.write_text("import mpips.store.api as s\nfrom .. import cost\ndef f():\n    from mpips.store import options\n")
    assert list(imports(file)) == ["mpips.store.api", "collectives.cost", "mpips.store.options"]
    assert below_mpips("mpips.collectives.plan") == "collectives.plan"
    assert not allowed(below_mpips("collectives.plan"), "mpips")
    assert not allowed(below_mpips("mpips.launch.run"), "mpips")
    assert not allowed("mpips.store.options", "collectives")
    assert allowed("mpips.store.options.Options", "launch")
    assert not allowed("mpips.optionsx", "launch")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project as pip installs it, without its requirements."""
    folder = tmp_path_factory.mktemp("installed")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    source = tmp_path_factory.mktemp("source")
    for name in ("setup.py", "pyproject.toml", "README.md", *PACKAGES):
        (source / name).symlink_to(ROOT / name)
    subprocess.run([*pip, "--target", str(folder), str(source)], check=True, cwd=folder, timeout=180)
    return folder


def outside(home: Path, code: str) -> str:
    """What `code` prints where the project is found in this folder alone."""
    environment = {"PYTHONPATH": str(home), "PATH": "/usr/bin:/bin", "HOME": str(home)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=home, env=environment, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.slow
@pytest.mark.parametrize("package", PACKAGES)
def test_installed_outside_the_repository(installed: Path, package: str) -> None:
    assert outside(installed, f"import {package}; print({package}.__file__)").startswith(str(installed))
    home = installed if package == "mpips" else installed / "mpips"
    missing = [
        str(path.relative_to(ROOT))
        for path in tracked(ROOT / package, "*")
        if path.suffix in (".py", ".json", ".typed") and not (home / path.relative_to(ROOT)).is_file()
    ]
    assert not missing, f"not in the installed package: {missing}"


@pytest.mark.slow
def test_the_page_of_the_package_leads_nowhere_into_the_clone(installed: Path) -> None:
    (metadata,) = installed.glob("mpips-*.dist-info/METADATA")
    text = metadata.read_text(encoding="utf-8")
    assert "Author: The mpips developers\n" in text and "## Read on" in text
    assert re.findall(r"\]\((?!https?:)[^)]*\)", text) == []


def test_a_source_distribution_has_all_that_git_tracks() -> None:
    """setuptools adds packages and what builds them by itself."""
    words = (ROOT / "MANIFEST.in").read_text(encoding="utf-8").split()
    by_itself = {*PACKAGES, "setup.py", "pyproject.toml", "README.md", "MANIFEST.in"}
    places = {path.relative_to(ROOT).parts[0] for path in list_files(ROOT)}
    assert [place for place in sorted(places - by_itself) if not {place, f"{place}/run"} & {*words}] == []


OF_THE_PROGRAM = {
    "collectives.py": "WHOSE = 'program'",
    "launch/config.py": "WHOSE = 'program'",  # a folder without __init__.py
    "train.py": """
import sys
if "first" in sys.argv:
    import collectives
import mpips
from mpips.collectives import schedule
from mpips.launch import this_machine
import collectives
from launch.config import WHOSE
print(collectives.WHOSE, WHOSE, schedule.__name__, this_machine.__module__)
""",
}


@pytest.mark.parametrize("words", [["train.py"], ["train.py", "first"], ["-m", "mpips", "train.py"], ["-m", "train"]])
@pytest.mark.parametrize("where", [pytest.param("installed", marks=pytest.mark.slow), "clone"])
def test_files_of_the_program_may_have_the_names_of_our_packages(
    request: pytest.FixtureRequest, tmp_path: Path, words: list[str], where: str
) -> None:
    for name, text in OF_THE_PROGRAM.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    home = request.getfixturevalue("installed") if where == "installed" else ROOT
    environment = {"PYTHONPATH": str(home), "PATH": "/usr/bin:/bin"}
    command = [sys.executable, *words]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=180)
    assert done.stdout.split() == ["program", "program", "mpips.collectives.schedule", "mpips.launch.machine"], done


@pytest.mark.slow
def test_the_outer_names_are_other_names_of_the_same_modules(installed: Path) -> None:
    code = (
        "import collectives.errors, launch.machine, mpips.collectives.errors as inner; "
        "print(collectives.errors is inner, collectives.MismatchError is inner.MismatchError, launch.machine.__name__)"
    )
    assert outside(installed, code) == "True True mpips.launch.machine"
    assert sorted(path.name for path in (installed / "collectives").glob("*.py")) == ["__init__.py"]


def test_the_launcher_starts_neither_mpi_nor_numpy() -> None:
    code = "import sys, launch.cli, launch.run; print([m for m in ('mpi4py.MPI', 'numpy') if m in sys.modules])"
    assert outside(ROOT, code) == "[]"


@pytest.mark.slow
def test_what_files_import_when_they_are_loaded_is_installed_with_the_package() -> None:
    required = re.search(r"install_requires=\[(.*?)\]", (ROOT / "setup.py").read_text(encoding="utf-8"), re.DOTALL)
    assert required
    known = {*sys.stdlib_module_names, *PACKAGES, *OPTIONAL, *re.findall(r'"(\w+)[<>=]', required[1])}
    for package in PACKAGES:
        for path in tracked(ROOT / package):
            for node in ast.parse(path.read_text(encoding="utf-8")).body:
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                if isinstance(node, ast.ImportFrom) and not node.level:
                    names = [node.module or ""]
                missing = {name.partition(".")[0] for name in names} - known
                assert not missing, f"{path}: {missing}"


@pytest.mark.parametrize("package", ["mpips", "collectives", "mpips.mlp", "mpips.overlap"])
def test_a_shell_completes_public_names_alone(package: str) -> None:
    module = importlib.import_module(package)
    assert dir(module) == sorted(module.__all__)
    assert all(getattr(module, name) is not None for name in dir(module))
    with pytest.raises(AttributeError, match="has no attribute 'bucket'"):
        module.bucket  # noqa: B018


def test_every_mutation_has_one_place() -> None:
    assert not [sentence for mutation in MUTATIONS if (sentence := misfit(mutation))]


def test_the_version_is_one() -> None:
    words = [sys.executable, "setup.py", "--version"]
    told = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60).stdout.split()[-1]
    assert mpips.__version__ == told and f"\nversion: {told}\n" in (ROOT / "CITATION.cff").read_text()
