"""What several benchmarks are run on."""

import json
from pathlib import Path

import pytest


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """A conversation that grows by a block of 512 tokens a turn."""
    path = tmp_path / "trace.jsonl"
    lines = (
        {
            "timestamp": 1000 * turn,
            "input_length": 512 * turn + 5,
            "output_length": 9,
            "hash_ids": list(range(turn + 1)),
        }
        for turn in range(1, 20)
    )
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path
