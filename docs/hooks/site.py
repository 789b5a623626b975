"""A hook of mkdocs: no script from elsewhere, and tables that a phone can show, each cell with its column's title."""

from __future__ import annotations

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


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """Put our own script where a page has the foreign one."""
    return FOREIGN.sub(f'<script src="{get_relative_url(OWN, page.url)}"></script>', output)


def on_post_template(output_content: str, **_: Any) -> str:
    """Take the foreign script out of pages that stand in no list, such as 404.html."""
    return FOREIGN.sub("", output_content)
