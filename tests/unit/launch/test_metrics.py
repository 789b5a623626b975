"""Metrics as Prometheus reads them: of living and dead ranks, in files and at a port; refusals; the dashboard."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import click
import pytest

pytest.importorskip("prometheus_client")
from prometheus_client.parser import text_string_to_metric_families

from collectives.terminal import parse_address
from launch.observe import metrics
from tests.child import ROOT

# the names of all metrics as Prometheus shows them
NAMES = {"mpips_rank_info", *(one.name + "_total" * (one.kind is metrics.COUNTER) for one in metrics.DEFINITIONS)}


def samples(text: str) -> dict[tuple[str, str], float]:
    """Return values by name and rank."""
    return {
        (one.name, one.labels["rank"]): one.value
        for family in text_string_to_metric_families(text)
        for one in family.samples
    }


def test_a_parser_reads_all_that_pages_say(job: list[subprocess.Popen[str]]) -> None:
    found = samples(metrics.text())
    assert {name for name, _ in found} == NAMES
    values = {name: value for (name, rank), value in found.items() if rank == "1"}
    assert 0 <= values.pop("mpips_exchange_age_seconds") < 60
    assert 3 <= values.pop("mpips_waiting_seconds") < 60 and 0 <= values.pop("mpips_step_age_seconds") < 60
    assert values.pop("mpips_start_time_seconds") > 1e9 and values.pop("mpips_resident_memory_bytes") > 1e6
    assert values.pop("mpips_cpu_seconds_total") >= 0
    assert values == {
        "mpips_rank_info": 1,
        "mpips_rank_up": 1,
        "mpips_rank_stopped": 0,
        "mpips_generation": 1,
        "mpips_step": 40,
        "mpips_waited_seconds_total": 1.5,
        "mpips_waits_total": 1,
        "mpips_calls_total": 34,
        "mpips_failures_total": 1,
        "mpips_checkpoints_total": 0,
        "mpips_taken_bytes_total": 1000,
        "mpips_queued": 2,
        "mpips_exchanges_total": 1,
        "mpips_exchanged_bytes_total": 4000,
        "mpips_table_room_bytes": 5000,
        "mpips_table_rows": 10,
        "mpips_table_bytes": 11,
        "mpips_table_updates_total": 12,
        "mpips_table_evicted_rows_total": 13,
        "mpips_table_refused_gradients_total": 14,
        "mpips_table_counted_ids": 15,
        "mpips_table_removed_rows_total": 16,
        "mpips_quorum_rounds_total": 8,
        "mpips_quorum_missed_rounds_total": 2,
    }
    assert {name: value for (name, rank), value in found.items() if rank == "0" and "_table_" in name and value} == {
        "mpips_table_pushed_rows_total": 17,
        "mpips_table_pulled_rows_total": 18 + 19,
        "mpips_table_in_place_rows_total": 19,
        "mpips_table_refused_pushes_total": 20,
    } | {"mpips_table_room_bytes": 5000}
    labels = [
        one.labels
        for family in text_string_to_metric_families(metrics.text())
        for one in family.samples
        if one.name in ("mpips_table_rows", "mpips_quorum_missed_rounds_total")
    ]
    assert all({"job": "77", "rank": "1", **one} in labels for one in ({"table": "users"}, {"worker": "0"}))


def test_a_dead_rank_is_down_and_its_counters_stay(job: list[subprocess.Popen[str]]) -> None:
    job[1].kill()
    job[1].wait()
    found = samples(metrics.text())
    assert (found["mpips_rank_up", "0"], found["mpips_rank_up", "1"]) == (1, 0)
    assert found["mpips_calls_total", "1"] == 34 and ("mpips_waiting_seconds", "1") not in found


def test_a_file_is_whole_and_goes_with_the_job(job: list[subprocess.Popen[str]], tmp_path: Path) -> None:
    with metrics.exporting(str(tmp_path), None, "77"):
        assert samples((tmp_path / "mpips-77.prom").read_text())["mpips_step", "0"] == 40
        assert [path.name for path in tmp_path.glob("*.prom*")] == ["mpips-77.prom"]
    assert not list(tmp_path.glob("*.prom*"))


@pytest.mark.slow
def test_a_file_has_ranks_soon_after_they_have_come(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    with metrics.exporting(str(tmp_path), None, "77"):
        file = tmp_path / "mpips-77.prom"
        assert not samples(file.read_text())
        request.getfixturevalue("job")
        limit = time.monotonic() + 5
        while len({rank for _, rank in samples(file.read_text())}) < 2:
            assert time.monotonic() < limit
            time.sleep(0.05)


@pytest.mark.slow
def test_a_port_serves_one_job(job: list[subprocess.Popen[str]]) -> None:
    with metrics.serving("127.0.0.1", 0, "77") as port, metrics.serving("127.0.0.1", 0, "78") as other:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20) as answer:
            assert samples(answer.read().decode())["mpips_step", "0"] == 40
        with urllib.request.urlopen(f"http://127.0.0.1:{other}/metrics", timeout=20) as answer:
            assert samples(answer.read().decode()) == {}
    with metrics.exporting(None, str(port), "77"):  # which is free again
        pass


@pytest.mark.slow
def test_what_cannot_be_written_or_served_is_one_sentence(tmp_path: Path) -> None:
    none = str(tmp_path / "none")
    with metrics.serving("127.0.0.1", 0) as port:
        for folder, address, said in (
            (none, None, "is not a folder: name the"),
            (None, str(port), "metrics cannot go to"),
        ):
            with pytest.raises(click.UsageError, match=said), metrics.exporting(folder, address, "1"):
                pass


@pytest.mark.parametrize(
    ("text", "address"), [("9477", ("127.0.0.1", 9477)), ("node1:80", ("node1", 80)), ("[::1]:0", ("::1", 0))]
)
def test_an_address_without_a_host_is_the_loopback(text: str, address: tuple[str, int]) -> None:
    assert parse_address(text) == address


@pytest.mark.parametrize(
    ("text", "said"),
    [
        *((text, f"'{text}' is not an address") for text in ("", "x", "1:", "-1")),
        ("99999", "'99999': a port is a number from 0 to 65535"),
    ],
)
def test_other_addresses_are_refused(text: str, said: str) -> None:
    with pytest.raises(click.UsageError, match=said):
        parse_address(text)


def board() -> list[dict[str, Any]]:
    """Return the panels of the dashboard."""
    panels: list[dict[str, Any]] = json.loads((ROOT / "examples" / "grafana.json").read_text())["panels"]
    return panels


def test_the_dashboard_asks_for_metrics_that_there_are() -> None:
    asked, there = set(re.findall(r"\bmpips_\w+", json.dumps(board()))), NAMES
    assert asked <= there
    assert {name for name in there if re.match("mpips_(table|quorum|exchange)", name)} <= asked


def test_the_dashboard_groups_by_labels_that_there_are(job: list[subprocess.Popen[str]]) -> None:
    families = text_string_to_metric_families(metrics.text())
    labels = {one.name: set(one.labels) for family in families for one in family.samples}
    for target in (target for panel in board() for target in panel["targets"]):
        groups = re.findall(r"by \(([^)]*)\) \(.*?(mpips_\w+)", target["expr"])
        grouped = [(set(words.split(", ")), labels[name]) for words, name in groups]
        assert all(words <= there for words, there in grouped), target
        shown = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
        one = grouped[0][0] if grouped else labels[re.findall(r"mpips_\w+", target["expr"])[0]]
        assert shown == one & {"job", "rank", "table", "worker"}, target


def test_the_page_lists_the_metrics_that_there_are() -> None:
    page = (ROOT / "docs" / "how-to" / "operate.md").read_text()
    assert set(re.findall(r"`(mpips_\w+)`", page)) == NAMES


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "say where: --dir DIR, --port PORT, or --once"),
        (("--once", "--port", "0"), "--once leaves at once, and --port 0 serves until Ctrl-C: leave one of them out"),
    ],
)
def test_the_command_says_what_it_lacks_or_contradicts(words: tuple[str, ...], said: str) -> None:
    command = [sys.executable, "-m", "launch.cli", "metrics", *words]
    done = subprocess.run(command, env=dict(os.environ), capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2 and said in done.stderr
