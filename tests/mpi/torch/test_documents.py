"""The programs of the documents that take PyTorch run as they are printed."""

from __future__ import annotations

from pathlib import Path

import pytest
from mpi4py import MPI

from tests import pages
from tests.mpi.launch.shown import see_programs_print_what_is_shown

PAGES = [page for page in pages.PAGES if any("import torch" in text for text in pages.programs(page).values())]

pytestmark = pytest.mark.skipif(MPI.COMM_WORLD.size != 1, reason="starts jobs of its own; once is enough")


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_programs_print_what_is_shown(page: Path, tmp_path: Path) -> None:
    see_programs_print_what_is_shown(page, tmp_path)
