"""Copies longer than the last cache go past it, where glibc takes the cache for larger than it is."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from collectives import machine
from collectives.machine import SYSCONF_LEVEL3, THRESHOLD, TUNABLES, choose_long_copies, correct_threshold, past_caches

MIB = 1 << 20


def test_a_cache_taken_for_a_larger_one_is_corrected():
    corrected = {TUNABLES: f"glibc.cpu.x86_non_temporal_threshold={24 * MIB:#x}"}
    assert correct_threshold(384 * MIB, 32 * MIB, {}) == corrected


@pytest.mark.parametrize("real", [96 * MIB, 480 * MIB])
def test_of_a_cache_that_many_share_a_part_counts(real):
    assert correct_threshold(480 * MIB, real, {}) == {TUNABLES: f"glibc.cpu.x86_non_temporal_threshold={24 * MIB:#x}"}


@pytest.mark.parametrize(
    "believed, real",
    [(24 * MIB, 480 * MIB), (32 * MIB, 32 * MIB), (0, 32 * MIB), (-1, 32 * MIB), (384 * MIB, 0)],
)
def test_a_cache_that_is_right_or_unknown_is_left_alone(believed, real):
    assert correct_threshold(believed, real, {}) == {}


def test_what_the_user_set_stays():
    other = "glibc.malloc.check=3"
    assert correct_threshold(384 * MIB, 32 * MIB, {TUNABLES: "glibc.cpu.x86_non_temporal_threshold=0x8000000"}) == {}
    assert correct_threshold(384 * MIB, 32 * MIB, {TUNABLES: other})[TUNABLES].split(":")[0] == other


@pytest.mark.parametrize(("value", "nbytes"), [
    ("glibc.cpu.x86_non_temporal_threshold=0x1800000", 24 * MIB),
    ("glibc.malloc.check=3:glibc.cpu.x86_non_temporal_threshold=1048576", MIB),
])  # fmt: skip
def test_a_process_knows_which_copies_go_past_its_caches(value, nbytes):
    assert past_caches({TUNABLES: value}) == nbytes


@pytest.mark.parametrize(("believed", "nbytes"), [(32 * MIB, 24 * MIB), (0, sys.maxsize), (-1, sys.maxsize)])
@pytest.mark.parametrize("value", ["", "glibc.malloc.check=3", f"{THRESHOLD}=much:{THRESHOLD}=0"])
def test_where_nobody_set_it_glibc_takes_three_quarters_of_the_cache_it_knows(monkeypatch, believed, nbytes, value):
    monkeypatch.setattr(os, "sysconf", {SYSCONF_LEVEL3: believed}.__getitem__)
    assert past_caches({TUNABLES: value}) == nbytes


def test_a_machine_without_that_file_sets_nothing(monkeypatch, tmp_path):
    monkeypatch.setattr(machine, "LEVEL3", tmp_path / "size")
    assert choose_long_copies({}) == {}


def test_a_process_with_the_variable_starts():
    variables = {**os.environ, **correct_threshold(384 * MIB, 32 * MIB, {})}
    done = subprocess.run([sys.executable, "-c", "print(1)"], env=variables, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("1\n", "")
