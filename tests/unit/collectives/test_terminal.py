"""Plain text for files and ranks, progress as lines, and files that are refused before the work is done."""

from __future__ import annotations

import importlib
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from collectives import terminal as console


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*console.RANK_VARIABLES, "COLUMNS", "NO_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("FORCE_COLOR", "1")  # what standard output claims to be: a terminal


def shown(text: str, capsys: pytest.CaptureFixture[str]) -> str:
    console.console().print(text)
    return capsys.readouterr().out


@pytest.mark.parametrize("name", console.RANK_VARIABLES)
def test_ranks_print_plain_text(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert "\x1b[" in shown("[bold red]x[/]", capsys)
    monkeypatch.setenv(name, "0")
    assert shown("[bold red]x[/]", capsys) == "x\n"


def test_plain_lines_are_not_cut_at_80_columns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("FORCE_COLOR")
    line = " ".join(["word"] * 30)
    assert shown(line, capsys).splitlines() == [line]
    monkeypatch.setenv("COLUMNS", "40")  # what `mpips ... --ranks` says of its own terminal
    assert max(map(len, shown(line, capsys).splitlines())) <= 40


def test_progress_of_ranks_is_a_line_a_step(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PMI_RANK", "0")
    with console.show_progress("work", 2) as begin:
        begin("a")
        begin("b")
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.splitlines() == ["work: a, 1 of 2", "work: b, 2 of 2"]


def test_progress_is_told_by_one_rank(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with console.show_progress("work", 3, shown=False) as begin:
        begin("a")
    assert capsys.readouterr().err == ""


def given(kind: click.ParamType, value: str) -> Result:
    @click.command()
    @click.option("--x", type=kind)
    def command(x: object) -> None:
        click.echo(repr(x))

    return CliRunner().invoke(command, ["--x", value])


def test_files_are_refused_before_the_work(tmp_path: Path) -> None:
    assert given(console.OutFile(), str(tmp_path / "x.json")).output == f"{tmp_path / 'x.json'!r}\n"
    assert "no folder" in given(console.OutFile(), str(tmp_path / "none" / "x.json")).output
    assert given(console.OutFile(), str(tmp_path)).exit_code == 2
    assert ".png" in given(console.Picture(), str(tmp_path / "x.txt")).output


@pytest.mark.parametrize("name", ["new/", "new/.", "file/", "folder", "folder/", "none/new/"])
@pytest.mark.parametrize("rank", [False, True])
def test_a_folder_is_no_file(name: str, rank: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    if rank:
        monkeypatch.setenv("PMI_RANK", "0")
    refused = given(console.OutFile(), f"{tmp_path}/{name}")
    assert refused.exit_code == 2
    assert "names a folder" in refused.output or "is a directory" in refused.output
    assert "names a folder" in str(console.describe_unwritable(f"{tmp_path}/{name}"))


def test_a_rank_leaves_the_folder_to_the_one_that_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PMIX_RANK", "1")
    assert given(console.OutFile(), str(tmp_path / "none" / "x.json")).exit_code == 0


def test_a_file_that_cannot_be_written_is_told_with_its_option(full_disk: str) -> None:
    @click.command()
    @click.option("--csv", "other", type=console.OutFile())
    @click.option("--json", "path", type=console.OutFile())
    def command(other: Path | None, path: Path) -> None:
        console.write_text(path, "1\n")

    done = CliRunner().invoke(command, ["--csv", full_disk, "--json", full_disk])
    assert done.exit_code == 1
    assert done.output == f"Error: --json {full_disk} cannot be written: No space left on device\n"


def test_a_library_that_writes_for_no_command_names_the_file(full_disk: str) -> None:
    with pytest.raises(click.ClickException, match=f"^{full_disk} cannot be written: No space left on device$"):
        console.write_text(Path(full_disk), "1\n")


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "soon"])
def test_seconds_are_above_zero(value: str) -> None:
    assert given(console.Seconds(), "0.5").output == "0.5\n"
    assert value in given(console.Seconds(), value).output


def test_some_times_may_be_zero() -> None:
    assert given(console.Seconds(zero=True), "0").output == "0.0\n"
    assert "at least 0" in given(console.Seconds(zero=True), "-1").output


@pytest.mark.parametrize("rank", ["0", "1"])
def test_an_interrupt_is_told_by_rank_0_alone(
    rank: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setenv("PMI_RANK", rank)
    with pytest.raises(SystemExit) as end:
        console.RankedCommand("train", callback=interrupted).main([], "mpips train")
    assert end.value.code == 130
    assert ("mpips train: interrupted" in capsys.readouterr().err) == (rank == "0")


@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_refusal_of_all_ranks_is_told_by_rank_0_and_its_code_left_where_the_launcher_asks(
    rank: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused() -> None:
        raise click.UsageError("no")

    command = console.RankedCommand("train", callback=refused)
    monkeypatch.setenv("PMI_RANK", rank)
    with pytest.raises(SystemExit) as end:
        command.main([], "mpips train")
    assert end.value.code == 2
    assert capsys.readouterr().err.count("Error: no") == (rank == "0")
    monkeypatch.setenv(console.CODE_FILE, str(tmp_path / "code"))
    with pytest.raises(SystemExit) as end:
        command.main([], "mpips train")
    assert end.value.code == 0
    assert (tmp_path / "code").read_bytes() == b"\2"
    monkeypatch.setenv(console.CODE_FILE, str(tmp_path / "nowhere" / "code"))
    with pytest.raises(SystemExit) as end:
        command.main([], "mpips train")
    assert end.value.code == 2


ALONE = [
    "examples.reproduce.overlap.gap",
    "examples.reproduce.overlap.simulated",
    "examples.reproduce.overlap.__main__",
    "examples.reproduce.store.beside_mxnet",
    "examples.reproduce.store.idle",
    "examples.reproduce.store.waiting",
    "examples.reproduce.settings",
    "examples.reproduce.allreduce.__main__",
    "examples.reproduce.bml.__main__",
    "examples.reproduce.mlp.__main__",
    "examples.reproduce.mlp.grids",
    "examples.reproduce.mlp.lab",
    "examples.reproduce.mxnet_mpi.__main__",
    "examples.reproduce.tensor.__main__",
    "examples.reproduce.overlap.measured",
    "launch.batch",
]


@pytest.mark.parametrize("module", ALONE)
def test_an_interrupt_of_a_module_is_that_of_a_command(
    module: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(**_: object) -> None:
        raise KeyboardInterrupt

    found = vars(importlib.import_module(module))
    command = next(found[name] for name in ("command", "main") if isinstance(found.get(name), click.Command))
    if isinstance(command, click.Group):
        command = next(iter(command.commands.values()))
    monkeypatch.setattr(command, "callback", interrupted)
    context = command.make_context(module, [], resilient_parsing=True)
    with pytest.raises(SystemExit) as end:
        command.invoke(context)
    assert end.value.code == 130
    assert f"{module}: interrupted" in capsys.readouterr().err
