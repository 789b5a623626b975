"""The live page: what it shows, in a browser where there is one; and that nobody gets it without the token."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import click
import pytest

from collectives.recorder import folders
from launch.observe import live
from launch.observe.gather import gather
from launch.observe.hosts import JobView, JobWatch

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
Ranks = list[subprocess.Popen[str]]


@pytest.fixture
def address(job: Ranks) -> Iterator[str]:
    with live.serving("0", folders.jobs_folder() / "77") as shown:
        yield shown


def data(address: str, until: str = "77") -> dict[str, Any]:
    """Return the data once they hold a text."""
    limit = time.monotonic() + 20
    while True:
        with urllib.request.urlopen(address.replace("/?", "/data?"), timeout=20) as answer:
            content = answer.read().decode()
        if until in content or time.monotonic() > limit:
            found: dict[str, Any] = json.loads(content)
            return found
        time.sleep(0.1)


@pytest.mark.slow
def test_the_data_are_what_mpips_why_says_and_what_was_noted(job: Ranks, address: str) -> None:
    found = data(address, "barrier")
    assert found["kind"] == "stands" and "wait in barrier" in found["sentence"]
    assert [(one["rank"], one["role"], one["step"]) for one in found["ranks"]] == [(0, "worker", 40), (1, "server", 40)]
    sample = found["samples"][-1]
    assert sample["notes"] == {"loss": 0.25, "accuracy": 0.5} and sample["step"] == 40
    assert {"rank 0 has begun as worker", "the job is stuck"} <= {event["text"] for event in found["events"]}


def test_a_loss_that_is_no_number_is_null(monkeypatch: pytest.MonkeyPatch, job: Ranks) -> None:
    seen = gather(folders.jobs_folder() / "77", 0.0)
    odd = [one._replace(notes={"loss": float("nan"), "accuracy": float("inf")}) for one in seen]
    monkeypatch.setattr(JobWatch, "look", lambda *words, **more: JobView(odd, {}))
    history = live.History(folders.jobs_folder() / "77")
    history.look()
    found = json.loads(history.to_json(), parse_constant=lambda word: pytest.fail(word))
    assert found["samples"][-1]["notes"] == {"loss": None, "accuracy": None}


@pytest.mark.slow
def test_deaths_and_stops_are_events(job: Ranks, address: str) -> None:
    data(address, "rank 1 has begun")
    job[0].send_signal(signal.SIGSTOP)
    job[1].kill()
    job[1].wait()
    said = [event["text"] for event in data(address, "rank 1 is gone")["events"]]
    assert said.count("rank 1 is gone") == 1
    data(address, "rank 0 is stopped")
    job[0].send_signal(signal.SIGCONT)
    assert "rank 0 goes on" in [event["text"] for event in data(address, "rank 0 goes on")["events"]]


@pytest.mark.slow
@pytest.mark.parametrize("path", ["/", "/data", "/?token=", "/data?token=wrong", "/else?token=wrong"])
def test_without_the_token_there_is_nothing(address: str, path: str) -> None:
    with pytest.raises(urllib.error.HTTPError) as raised:
        urllib.request.urlopen(address.partition("/?")[0] + path, timeout=20)
    assert raised.value.code == 403 and b"77" not in raised.value.read()


@pytest.mark.slow
def test_the_page_loads_nothing_from_elsewhere(address: str) -> None:
    with urllib.request.urlopen(address, timeout=20) as answer:
        policy, content = answer.headers["Content-Security-Policy"], answer.read().decode()
    assert "default-src 'none'" in policy and "unsafe" not in policy
    assert "http" not in content.replace("http://www.w3.org/2000/svg", "") and "src=" not in content


def test_hosts_that_are_written_after_the_first_look_are_asked(job: Ranks) -> None:
    with JobWatch(folders.jobs_folder() / "77") as watch:
        assert not watch.look(0.0).unreached
        known = {"names": ["elsewhere"], "launcher": "a", "agent": ["false"], "python": sys.executable, "path": ""}
        folders.write_hosts("77", json.dumps(known))
        assert [*watch.look(0.0).unreached] == ["elsewhere"]


def test_a_rank_that_gets_its_role_later_is_told(monkeypatch: pytest.MonkeyPatch, job: Ranks) -> None:
    seen = gather(folders.jobs_folder() / "77", 0.0)
    history = live.History(folders.jobs_folder() / "77")
    for found in ([one._replace(role="") for one in seen], seen):
        monkeypatch.setattr(JobWatch, "look", lambda *words, found=found, **more: JobView(found, {}))
        history.look()
    events = [event["text"] for event in json.loads(history.to_json())["events"]]
    assert {"rank 1 has begun", "rank 0 is a worker", "rank 1 is a server"} <= {*events}


@pytest.mark.slow
@pytest.mark.skipif(not BROWSER, reason="no Chromium is installed")
@pytest.mark.parametrize("size", ["1200,900", "390,800"])
def test_a_browser_shows_the_job(job: Ranks, address: str, size: str) -> None:
    data(address, "barrier")
    page = browsed(address, size)
    assert "<title>mpips: job 77 is stuck</title>" in page and "wait in barrier" in page
    assert page.count('<tr class="culprit">') == 2 and "Loss, accuracy 0.5" in page  # each waits for the other
    assert "rank 0 has begun as worker" in page and "rank 1 has begun as server" in page
    assert '<td data-label="role" class="text">server</td>' in page


@pytest.mark.slow
@pytest.mark.skipif(not BROWSER, reason="no Chromium is installed")
def test_the_culprit_stands_out_and_not_those_who_wait(
    job: Ranks, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a job without roles has no column of roles."""
    seen = [one._replace(role="") for one in gather(folders.jobs_folder() / "77", 0.0)]
    seen[1] = seen[1]._replace(waits=())
    monkeypatch.setattr(JobWatch, "look", lambda *words, **more: JobView(seen, {}))
    data(address, '"culprits": [1]')
    page = browsed(address, "1200,900")
    rows = re.findall(r'<tr class="(\w+)"><td data-label="rank" class="">(\d)', page)
    assert rows == [("waits", "0"), ("culprit", "1")]
    assert "holds the others up" in page and "role" not in re.findall(r"<th[^>]*>(\w+)", page)


def browsed(address: str, size: str) -> str:
    """The page as Chromium has it after three seconds, without an error on its console."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        command = [
            str(BROWSER),
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-quic",
            "--no-first-run",
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-sync",
            f"--user-data-dir={folder}",
            f"--window-size={size}",
            "--virtual-time-budget=3000",
            "--enable-logging=stderr",
            "--dump-dom",
            address,
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert "CONSOLE" not in done.stderr, done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_taken_port_is_one_sentence(address: str) -> None:
    port = address.rpartition(":")[2].partition("/")[0]
    with pytest.raises(click.UsageError, match="no page can be served at"), live.serving(port, folders.jobs_folder()):
        pass
