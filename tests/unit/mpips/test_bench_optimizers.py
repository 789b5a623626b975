"""The optimizer benchmark runs, counts what it says, and tells why PyTorch is left out."""

from __future__ import annotations

import json
import sys

from click.testing import CliRunner

from mpips.bench.optimizers import command


def test_without_pytorch_it_says_so_and_measures_the_rest(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "torch", None)
    path = tmp_path / "optimizers.json"
    result = CliRunner().invoke(command, ["--elements", "1000", "--repeats", "1", "--json", str(path)])
    assert result.exit_code == 0, result.output
    assert "PyTorch is left out" in result.output
    cases = json.loads(path.read_text())
    assert {"SGD momentum", "Adam"} <= {case["optimizer"] for case in cases}
    assert all(case["elements"] == 1000 and case["mpips_ms"] > 0 and case["ratio"] is None for case in cases)


def test_cases_that_cannot_be_written_are_one_sentence(full_disk):
    result = CliRunner().invoke(command, ["--elements", "1000", "--repeats", "1", "--json", full_disk])
    assert result.exit_code == 1
    assert result.output.endswith(f"Error: --json {full_disk} cannot be written: No space left on device\n")


def test_more_elements_than_memory_holds_are_refused():
    result = CliRunner().invoke(command, ["--elements", "100000000000000"])
    assert result.exit_code == 2
    assert "--elements 100000000000000 takes at least 7 arrays of 400,000,000,000,000 bytes" in result.output
