"""A hook of mkdocs: no script from elsewhere, tables that a phone can show, and buttons that copy commands alone.

Each cell of a table bears its column's title. Where a block shows commands and what they print, or a session of Python,
the theme's button copies what a reader would type.
"""

from __future__ import annotations

import html
import re
from typing import Any
from xml.etree.ElementTree import Element

from markdown import Markdown
from markdown.extensions import Extension
from markdown.treeprocessors import Treeprocessor
from mkdocs.utils import get_relative_url

# The theme searches by it where the site is opened as a file; ours does so without a network.
FOREIGN = re.compile(r'<script src="https://[^"]*iframe-worker[^"]*"></script>')
OWN = "js/search-from-file.js"
CODE = re.compile(r'<div class="([^"]*\bhighlight)">(<pre>(?:<span></span>)?<code>)(.*?)</code>', re.DOTALL)
TAG = re.compile(r"<[^>]+>")
PROMPTS = {"$ ": ("$ ", "> "), ">>> ": (">>> ", "... ")}  # the first of a block -> those of lines that are typed


class Labels(Treeprocessor):
    """Write `data-label` at every cell of every table."""

    def run(self, root: Element) -> None:
        """Label the tables of one page, in place."""
        for table in root.iter("table"):
            titles = ["".join(title.itertext()).strip() for title in table.iterfind("thead/tr/th")]
            for row in table.iterfind("tbody/tr"):
                for title, cell in zip(titles, row.iterfind("td")):
                    if title:
                        cell.set("data-label", title)


class LabelsExtension(Extension):
    """Register `Labels` with Markdown."""

    def extendMarkdown(self, md: Markdown) -> None:
        """Run after the inline patterns, where titles are text."""
        md.treeprocessors.register(Labels(md), "labels", 5)


def on_config(config: Any) -> Any:
    """Add the extension to those of mkdocs.yml."""
    config.markdown_extensions.append(LabelsExtension())
    return config


def on_page_content(content: str, **_: Any) -> str:
    """Tell the theme's button what to copy of a block with prompts."""
    return CODE.sub(_with_copy, content)


def _with_copy(found: re.Match[str]) -> str:
    typed = commands_of(html.unescape(TAG.sub("", found[3])))
    if not typed:
        return found[0]
    return f'<div class="{found[1]}" data-copy="{html.escape(typed)}">{found[2]}{found[3]}</code>'


def commands_of(block: str) -> str:
    """What a reader types of a block that begins with a prompt, without prompts and output; "" of other blocks."""
    prompts = next((more for first, more in PROMPTS.items() if block.startswith(first)), ())
    lines = block.splitlines()
    return "\n".join(line[len(prompt) :] for line in lines for prompt in prompts if line.startswith(prompt))


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """Put our own script where a page has the foreign one."""
    return FOREIGN.sub(f'<script src="{get_relative_url(OWN, page.url)}"></script>', output)


def on_post_template(output_content: str, **_: Any) -> str:
    """Take the foreign script out of pages that stand in no list, such as 404.html."""
    return FOREIGN.sub("", output_content)
