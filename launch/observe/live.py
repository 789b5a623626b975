"""Serve a live web page about one job: its ranks, what they do, the job's loss, and a list of events.

A thread of `mpips run` or `mpips page` reads once a second the files in memory in which the ranks write what they do,
and keeps a history. The browser gets the history as JSON. The server answers only requests that contain its secret
token, which is part of the address that it prints.
"""

from __future__ import annotations

import hmac
import json
import math
import secrets
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import click

from mpips.collectives.terminal import parse_address, without_signals
from mpips.launch.observe.explain import as_json, explain
from mpips.launch.observe.gather import Rank, read_end
from mpips.launch.observe.hosts import JobWatch

LOOK_SECONDS = 1.0
# If the job is stuck, the ranks are asked for their stacks. At least this many seconds pass between two such requests.
STACK_SECONDS = 5.0
# `Explanation.kind` -> the text of the event that is shown when the job gets into this state
EVENTS = {
    "stands": "the job is stuck",
    "slow": "one rank slows down the others",
    "ended": "the job has ended",
    "runs": "the job goes on",
}
MOST_SAMPLES = 900
MOST_EVENTS = 200


class History:
    """The history of a job: events, and samples of the job's speed and of the numbers that its program reports.

    One thread calls `look`, and the threads of the server call `to_json`.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._watch = JobWatch(folder)
        # protects the attributes that `to_json` reads
        self._lock = threading.Lock()
        # the ranks in the last sample: number of a rank -> rank
        self._before: dict[int, Rank] = {}
        # `Explanation.kind` of the last sample
        self._kind = ""
        # the time at which ranks were last asked for their stacks
        self._stacks_time = 0.0
        # the time of the last sample
        self._look_time = 0.0
        # the state of the job, in the form that `explain.as_json` returns
        self._state: dict[str, Any] = {"job": folder.name, "kind": "begins", "sentence": ""}
        self._state |= {"culprits": [], "ranks": []}
        self._samples: deque[dict[str, Any]] = deque(maxlen=MOST_SAMPLES)
        self._events: deque[dict[str, Any]] = deque(maxlen=MOST_EVENTS)

    def look(self) -> None:
        """Take a sample of the job. Blocks for 0.2 s, or longer if another host answers late or the job is stuck."""
        ranks, unreached = self._watch.look(0.2, stacks=False)
        if not ranks:
            return
        explanation = explain(self._folder.name, ranks, read_end(self._folder), unreached)
        now = time.time()
        if explanation.kind == "stands" and now - self._stacks_time > STACK_SECONDS:
            self._stacks_time = now
            ranks, unreached = self._watch.look(0.2)
            explanation = explain(self._folder.name, ranks, read_end(self._folder), unreached)
        with self._lock:
            for text in self._changes(ranks, explanation.kind):
                self._events.append({"time": now, "text": text})
            self._samples.append(self._sample(ranks, now))
            # While the job is stuck, keep the state of the last sample that had stacks.
            if explanation.kind != self._kind or explanation.kind != "stands" or any(rank.stack for rank in ranks):
                self._state = as_json(self._folder.name, explanation, ranks, unreached)
            self._kind = explanation.kind
            self._before = {rank.rank: rank for rank in ranks}
            self._look_time = now

    def close(self) -> None:
        """End the connections to other hosts."""
        self._watch.close()

    def to_json(self) -> bytes:
        """Return the state of the job, the samples and the events as JSON."""
        with self._lock:
            content = {**self._state, "samples": list(self._samples), "events": list(self._events), "now": time.time()}
        return json.dumps(content).encode()

    def _sample(self, ranks: Sequence[Rank], now: float) -> dict[str, Any]:
        steps = [rank.step for rank in ranks if rank.step >= 0]
        before = [rank.step for rank in self._before.values() if rank.step >= 0]
        rate = (
            (max(steps) - max(before)) / (now - self._look_time) if steps and before and now > self._look_time else None
        )
        noted = next((rank.notes for rank in ranks if rank.notes), {})
        # JSON has no NaN.
        notes = {name: number if math.isfinite(number) else None for name, number in noted.items()}
        return {
            "time": now,
            "step": max(steps, default=None),
            "steps_per_second": rate,
            "notes": notes,
            "waiting": {rank.rank: round(rank.waiting, 3) for rank in ranks if rank.lives},
        }

    def _changes(self, ranks: Sequence[Rank], kind: str) -> Iterator[str]:
        """Yield the text of each event since the last sample."""
        if kind != self._kind:
            yield EVENTS[kind]
        for rank in ranks:
            old, name = self._before.get(rank.rank), f"rank {rank.rank}"
            if old is None:
                yield f"{name} has begun{f' as {rank.role}' if rank.role else ''}"
                continue
            if rank.pid != old.pid:
                yield f"{name} has been replaced by process {rank.pid}"
            elif old.role == "spare" and rank.role not in ("", "spare"):
                yield f"{name}, a spare, has become {rank.role} {rank.member}"
            elif not old.role and rank.role:
                yield f"{name} is a {rank.role}"
            elif old.lives and not rank.lives:
                yield f"{name} is gone"
            if rank.lives and rank.stopped != old.stopped:
                yield f"{name} {'is stopped' if rank.stopped else 'goes on'}"
            if rank.generation > max(old.generation, 0):
                yield f"{name} is in generation {rank.generation}"
            if rank.checkpoints > old.checkpoints:
                yield f"{name} has written checkpoint {rank.checkpoints}"


class _Handler(BaseHTTPRequestHandler):
    """Serves the page and its data to a browser."""

    server: _Server

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        token = parse_qs(parts.query).get("token", [""])[0]
        if not hmac.compare_digest(token.encode(), self.server.token.encode()):
            self._answer(HTTPStatus.FORBIDDEN, "text/plain", b"This page needs the token of its address.\n")
        elif parts.path == "/":
            nonce = secrets.token_urlsafe(12)
            content = files("mpips.launch.observe").joinpath("live.html").read_text(encoding="utf-8")
            self._answer(HTTPStatus.OK, "text/html", content.replace("NONCE", nonce).encode(), nonce)
        elif parts.path == "/data":
            self._answer(HTTPStatus.OK, "application/json", self.server.history.to_json())
        else:
            self._answer(HTTPStatus.NOT_FOUND, "text/plain", b"There is / and /data.\n")

    def _answer(self, status: HTTPStatus, kind: str, content: bytes, nonce: str = "") -> None:
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("X-Content-Type-Options", "nosniff")
        source = f"'nonce-{nonce}'" if nonce else "'none'"
        policy = f"default-src 'none'; script-src {source}; style-src {source}; connect-src 'self'"
        self.send_header("Content-Security-Policy", policy)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Log no requests, because the job writes to the same terminal."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, address: tuple[str, int], history: History) -> None:
        self.token = secrets.token_urlsafe(16)
        self.history = history
        super().__init__(address, _Handler)


@contextmanager
def serving(address: str, folder: Path) -> Iterator[str]:
    """Context manager that serves the page of a job at "[HOST:]PORT", and yields the URL with the token.

    Raises UsageError if the address cannot be used.
    """
    host, port = parse_address(address)
    history, ended = History(folder), threading.Event()
    try:
        server = _Server((host, port), history)
    except OSError as error:
        raise click.UsageError(f"no page can be served at {host}:{port}: {error.strerror}") from None

    def watch() -> None:
        while not ended.wait(LOOK_SECONDS):
            history.look()
        history.close()

    with without_signals():
        for work in (server.serve_forever, watch):
            threading.Thread(target=work, daemon=True).start()
    host_part = f"[{host}]" if ":" in host else host
    try:
        yield f"http://{host_part}:{server.server_port}/?token={server.token}"
    finally:
        ended.set()
        server.shutdown()
        server.server_close()
