"""The documents as a site: it builds, needs no network, cuts nothing, and is searched where it is opened as a file.

What a browser shows is tested where Chromium is installed.
"""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.tracked import tracked

ROOT = Path(__file__).resolve().parents[2]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
QUIET = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-sync",
    "--disable-background-networking",
    "--disable-component-update",
    "--window-size=1500,1000",
)
WIDTHS = (1400, 400)  # pixels: a screen and a phone
# Pages with the widest tables and code; the others with `full`.
PAGES = ("index.html", "measurements.html", "reference/errors.html", "reference/store.html", "reference/commands.html")
browser = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")

MEASURE = """
const out = [];
for (const page of PAGES) for (const width of WIDTHS) {
  const frame = document.createElement("iframe");
  Object.assign(frame.style, {width: width + "px", height: "900px", border: 0});
  const loaded = new Promise(resolve => frame.onload = resolve);
  frame.src = page;
  document.body.append(frame);
  await loaded;
  const shown = frame.contentDocument, content = shown.querySelector(".md-content").getBoundingClientRect();
  const right = each => each.getBoundingClientRect().right;
  const wide = each => each.scrollWidth > each.clientWidth + 1 || right(each) > content.right + 1;
  for (const each of shown.querySelectorAll(".md-content :is(td, pre > code)"))
    if (wide(each)) out.push([page, width, each.textContent.slice(0, 60)]);
  if (shown.documentElement.scrollWidth > width) out.push([page, width, "the page"]);
  out.count = (out.count || 0) + shown.querySelectorAll(".md-content :is(td, pre > code)").length;
  frame.remove();
}
return [out.count, out];
"""
SEARCH = """
const field = document.querySelector(".md-search__input");
field.focus();
field.value = "pushpull";
for (const kind of ["keyup", "input"]) field.dispatchEvent(new Event(kind, {bubbles: true}));
for (let i = 0; i < 50 && !document.querySelector(".md-search-result__link"); i++)
  await new Promise(resolve => setTimeout(resolve, 100));
return [...document.querySelectorAll(".md-search-result__link")].map(link => link.getAttribute("href"));
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def run_script(folder: Path, page: str, body: str, *words: str) -> Any:
    """Return what a JavaScript body returns in a page that Chromium opens as a file."""
    assert CHROMIUM
    file = folder / page
    before = file.read_text(encoding="utf-8") if file.exists() else "<html><body></body></html>"
    script = f"<script>addEventListener('load', async () => {{ const result = await (async () => {{ {body} }})();"
    script += "document.body.innerHTML = '<pre id=found></pre>'; found.textContent = JSON.stringify(result)"
    script += "})</script>"
    file.write_text(before.replace("</body>", script + "</body>"), encoding="utf-8")
    try:
        done = subprocess.run(
            [
                CHROMIUM,
                *QUIET,
                *words,
                f"--user-data-dir={folder}/.chromium",
                "--virtual-time-budget=120000",
                "--dump-dom",
                file.as_uri(),
            ],
            capture_output=True,
            text=True,
            timeout=100,
        )
    finally:
        file.write_text(before, encoding="utf-8")
        shutil.rmtree(folder / ".chromium", ignore_errors=True)
    found = re.search(r'<pre id="found">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found, done.stdout[-500:] + done.stderr[-1000:]
    return json.loads(html.unescape(found[1]))


@pytest.mark.slow
def test_the_site_builds_and_has_every_page(site: Path) -> None:
    pages = {page.relative_to(ROOT / "docs").with_suffix(".html") for page in tracked(ROOT / "docs", "*.md")}
    assert all((site / page).is_file() for page in pages)


@pytest.mark.slow
def test_the_site_fetches_nothing_from_elsewhere(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 50
    foreign = re.compile(r'<(?:script|img|iframe|link)\b[^>]*(?:src|href)="(?:https?:)?//[^"]*"')
    assert [foreign.findall(page.read_text(encoding="utf-8")) for page in pages] == [[]] * len(pages)


@pytest.mark.slow
def test_buttons_copy_commands_without_prompts_and_output(site: Path) -> None:
    """The theme takes `data-copy` of what is around the code, where there is one."""
    text = (site / "tutorial" / "first-training.html").read_text(encoding="utf-8")
    copied = [html.unescape(words) for words in re.findall(r'<div class="highlight" data-copy="([^"]*)">', text)]
    assert copied[0] == "mpips run -w 1 quadrants.py"
    assert "mpips run -w 4 regression.py 2\nmpips run -w 4 -s 1 regression.py 5" in copied
    session = re.findall(r'data-copy="([^"]*)"', (site / "reference" / "collectives.html").read_text(encoding="utf-8"))
    assert session and not [words for words in session if html.unescape(words).startswith(("$", ">>>"))]
    scripts = [file.read_text(encoding="utf-8") for file in (site / "assets" / "javascripts").glob("bundle*.js")]
    assert any('getAttribute("data-copy")' in script for script in scripts)


@pytest.mark.slow
@browser
@pytest.mark.parametrize("pages", [PAGES, pytest.param((), marks=pytest.mark.full)], ids=["widest", "all"])
def test_no_table_and_no_code_is_cut(site: Path, pages: tuple[str, ...]) -> None:
    pages = pages or tuple(str(page.relative_to(site)) for page in site.rglob("*.html") if page.name != "404.html")
    named = json.dumps([(site / page).as_uri() for page in pages])
    body = f"const PAGES = {named}, WIDTHS = {list(WIDTHS)};" + MEASURE
    count, cut = run_script(site, "measure.html", body, "--allow-file-access-from-files")
    (site / "measure.html").unlink()
    assert count > 100 * len(WIDTHS)
    assert cut == []


@pytest.mark.slow
@browser
def test_a_site_opened_as_a_file_is_searched(site: Path) -> None:
    found = run_script(site, "how-to/trainer.html", SEARCH)
    assert any(str(link).endswith("reference/store.html#mpips.KVStore.pushpull") for link in found), found
