"""The programs of the documents that take PyTorch run as they are printed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mpi.launch import test_documents as documents

PAGES = [page for page in documents.PAGES if any("import torch" in text for text in documents.programs(page).values())]

pytestmark = documents.pytestmark


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_programs_print_what_is_shown(page: Path, tmp_path: Path) -> None:
    documents.test_programs_print_what_is_shown(page, tmp_path)
