"""What a newcomer reads stays true: no file too long, no machine path, no registry host."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAX_LINES = 500
LISTS = {"python/marconi/engine/cache/radix_cache.py"}
"""Files that are read row by row."""
# Spelt in pieces, so that this file is not what it looks for.
FORBIDDEN = re.compile("|".join(["/" + "work/", "/" + "root/", "pypi" + r"\.org", "--(extra-)?index" + "-url"]))


def tracked() -> list[Path]:
    try:
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    return [path for name in listed.stdout.decode().split("\0") if name and (path := ROOT / name).is_file()]


def test_no_source_file_is_longer_than_a_sitting() -> None:
    long = {
        str(path.relative_to(ROOT)): num_lines
        for path in tracked()
        if path.suffix == ".py"
        and str(path.relative_to(ROOT)) not in LISTS
        and (num_lines := len(path.read_text(encoding="utf-8").splitlines())) > MAX_LINES
    }
    assert not long


def test_no_file_names_a_machine_or_a_registry() -> None:
    found = {}
    for path in tracked():
        text = path.read_text(encoding="utf-8", errors="ignore")
        if match := FORBIDDEN.search(text):
            found[str(path.relative_to(ROOT))] = match.group()
    assert not found
