"""`marconi validate` on real servers of small models, whose memory is short: no request differs from its replay."""

import json
from pathlib import Path

import pytest

from marconi import cli
from marconi_cpu.demo.server_process import ServerProcess

from .conftest import STRATEGY_ARGS, Launch
from .scenarios import NO_BUFFER

pytestmark = pytest.mark.slow

SHORT = ("--max-total-tokens", "4608", "--max-mamba-cache-size", "20", "--max-running-requests", "4")
LAUNCHES = tuple(
    Launch(
        f"validated-{family}-{strategy}",
        family,
        ("--radix-cache-backend", "marconi", *SHORT, *STRATEGY_ARGS[strategy], "--chunked-prefill-size", "256"),
        strategy,
    )
    for family, strategy in (("mamba2", NO_BUFFER),)
)


def test_no_request_differs_from_its_replay(
    server: ServerProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One by one: conversations that take turns, and agents under shared system prompts that drop what they saw."""
    for number, (workload, num_sessions) in enumerate((("chat-short", 8), ("agent-drop", 12))):
        file = tmp_path / f"{number}.json"
        trace = (f"generate:{workload}", "--max-sessions", str(num_sessions), "--max-requests", "60")
        assert cli.main(["validate", server.url, *trace, "--flush", "--json", str(file)]) == 0, capsys.readouterr().out
        both = json.loads(file.read_text())
        assert both["num_differing"] == 0
        assert both["num_requests"] > 10
        assert 0 < both["num_cached_tokens"] < both["num_prompt_tokens"]
        assert any("state evicted" in each["line"] for each in both["requests"])


def test_beside_each_other_both_are_close(server: ServerProcess) -> None:
    """Eight at a time, of which four run: within three points of the prompt tokens."""
    trace = ("generate:chat-short", "--max-sessions", "8", "--max-requests", "60")
    assert cli.main(["validate", server.url, *trace, "--flush", "--concurrency", "8", "--tolerance", "3"]) == 0
