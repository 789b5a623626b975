"""A live page of one job in a browser: its ranks, what they do, the job's loss, and what has happened.

A thread of `mpips run` (or `mpips page`) looks at the ranks' pages once a second and keeps what it has seen. The
browser gets that as JSON. The server answers only requests that have the token, which is part of the address.
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
from mpips.launch.observe.hosts import Watch

LOOK_SECONDS = 1.0
# If the job is stuck, ask the ranks for their stacks, but not more often than this.
STACK_SECONDS = 5.0
SAID = {
    "stands": "the job stands",
    "slow": "one rank holds the others up",
    "ended": "the job has ended",
    "runs": "the job goes on",
}
MOST_SAMPLES = 900
MOST_EVENTS = 200


class History:
    """What has been seen of a job: samples of its speed and its notes, and events.

    `look` is called by one thread, `shown` by the threads of the server.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._watch = Watch(folder)
        # protects what `shown` reads
        self._lock = threading.Lock()
        # the ranks at the last look
        self._before: dict[int, Rank] = {}
        # `Explanation.kind` at the last look
        self._kind = ""
        # when ranks were last asked for their stacks
        self._asked = 0.0
        # the time of the last look
        self._at = 0.0
        self._shown: dict[str, Any] = {"job": folder.name, "kind": "begins", "sentence": ""}
        self._shown |= {"culprits": [], "ranks": []}
        self._samples: deque[dict[str, Any]] = deque(maxlen=MOST_SAMPLES)
        self._events: deque[dict[str, Any]] = deque(maxlen=MOST_EVENTS)

    def look(self) -> None:
        """Look at the job once. Blocks for 0.2 s, and longer if another host is slow to answer."""
        ranks, unreached = self._watch.look(0.2, stacks=False)
        if not ranks:
            return
        found = explain(self._folder.name, ranks, read_end(self._folder), unreached)
        now = time.time()
        if found.kind == "stands" and now - self._asked > STACK_SECONDS:
            self._asked = now
            ranks, unreached = self._watch.look(0.2)
            found = explain(self._folder.name, ranks, read_end(self._folder), unreached)
        with self._lock:
            for text in self._changes(ranks, found.kind):
                self._events.append({"time": now, "text": text})
            self._samples.append(self._sample(ranks, now))
            if found.kind != self._kind or found.kind != "stands" or any(one.stack for one in ranks):
                self._shown = as_json(self._folder.name, found, ranks, unreached)
            self._kind, self._before, self._at = found.kind, {one.rank: one for one in ranks}, now

    def close(self) -> None:
        """End the connections to other hosts."""
        self._watch.close()

    def shown(self) -> bytes:
        """Return the state of the job, the samples and the events as JSON."""
        with self._lock:
            content = {**self._shown, "samples": list(self._samples), "events": list(self._events), "now": time.time()}
        return json.dumps(content).encode()

    def _sample(self, ranks: Sequence[Rank], now: float) -> dict[str, Any]:
        steps = [one.step for one in ranks if one.step >= 0]
        before = [one.step for one in self._before.values() if one.step >= 0]
        rate = (max(steps) - max(before)) / (now - self._at) if steps and before and now > self._at else None
        noted = next((one.notes for one in ranks if one.notes), {})
        # JSON has no NaN.
        notes = {name: number if math.isfinite(number) else None for name, number in noted.items()}
        return {
            "time": now,
            "step": max(steps, default=None),
            "steps_per_second": rate,
            "notes": notes,
            "waiting": {one.rank: round(one.waiting, 3) for one in ranks if one.lives},
        }

    def _changes(self, ranks: Sequence[Rank], kind: str) -> Iterator[str]:
        """Yield a sentence for each thing that has happened since the last look."""
        if kind != self._kind:
            yield SAID[kind]
        for one in ranks:
            old, name = self._before.get(one.rank), f"rank {one.rank}"
            if old is None:
                yield f"{name} is there{f' as {one.role}' if one.role else ''}"
                continue
            if one.pid != old.pid:
                yield f"{name} has been replaced: its place is taken by process {one.pid}"
            elif old.role == "spare" and one.role not in ("", "spare"):
                yield f"{name}, a spare, has become {one.role} {one.member}"
            elif not old.role and one.role:
                yield f"{name} is a {one.role}"
            elif old.lives and not one.lives:
                yield f"{name} is gone"
            if one.lives and one.stopped != old.stopped:
                yield f"{name} {'is stopped' if one.stopped else 'goes on'}"
            if one.generation > max(old.generation, 0):
                yield f"{name} is in generation {one.generation}"
            if one.checkpoints > old.checkpoints:
                yield f"{name} has written checkpoint {one.checkpoints}"


class _Handler(BaseHTTPRequestHandler):
    """Serves the page and its data to a browser."""

    server: _Server

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        given = parse_qs(parts.query).get("token", [""])[0]
        if not hmac.compare_digest(given.encode(), self.server.token.encode()):
            self._answer(HTTPStatus.FORBIDDEN, "text/plain", b"This page needs the token of its address.\n")
        elif parts.path == "/":
            nonce = secrets.token_urlsafe(12)
            content = files("mpips.launch.observe").joinpath("live.html").read_text(encoding="utf-8")
            self._answer(HTTPStatus.OK, "text/html", content.replace("NONCE", nonce).encode(), nonce)
        elif parts.path == "/data":
            self._answer(HTTPStatus.OK, "application/json", self.server.history.shown())
        else:
            self._answer(HTTPStatus.NOT_FOUND, "text/plain", b"There is / and /data.\n")

    def _answer(self, status: HTTPStatus, kind: str, content: bytes, nonce: str = "") -> None:
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("X-Content-Type-Options", "nosniff")
        own = f"'nonce-{nonce}'" if nonce else "'none'"
        policy = f"default-src 'none'; script-src {own}; style-src {own}; connect-src 'self'"
        self.send_header("Content-Security-Policy", policy)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Do not log requests, because the job writes to this terminal."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, address: tuple[str, int], history: History) -> None:
        self.token = secrets.token_urlsafe(16)
        self.history = history
        super().__init__(address, _Handler)


@contextmanager
def serving(address: str, folder: Path) -> Iterator[str]:
    """Context manager that serves the page of a job at "[HOST:]PORT", and yields the URL with the token.

    Raises UsageError if that address cannot be used.
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
    shown = f"[{host}]" if ":" in host else host
    try:
        yield f"http://{shown}:{server.server_port}/?token={server.token}"
    finally:
        ended.set()
        server.shutdown()
        server.server_close()
