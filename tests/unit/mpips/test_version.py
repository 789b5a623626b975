"""The version, which the package, its metadata and the citation say alike."""

import subprocess
import sys
from pathlib import Path

import mpips

ROOT = Path(__file__).parents[3]


def test_the_version_is_one() -> None:
    words = [sys.executable, "setup.py", "--version"]
    told = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60).stdout.split()[-1]
    assert mpips.__version__ == told and f"\nversion: {told}\n" in (ROOT / "CITATION.cff").read_text()
