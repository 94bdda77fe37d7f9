"""The benchmark of speculative decoding, without servers: what it counts of the answers that it gets."""

from itertools import pairwise
from types import ModuleType
from typing import Any

import httpx
import pytest
from rich.console import Console

from .scripts import load

pytest.importorskip("sglang", reason="the server extra is not installed: pip install '.[server]'")


@pytest.fixture
def speculation(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script; each server says the prompt's last token again and again, and the one at `wrong` another at last."""
    script = load("speculation")

    def ask(url: str, prompt: Any, num_tokens: int) -> tuple[tuple[int, ...], dict[str, Any]]:
        answer = [prompt[-1]] * num_tokens
        if url == "wrong" and len(prompt) > 500:
            answer[-1] = 0
        told = {"prompt_tokens": len(prompt), "cached_tokens": len(prompt) // 2}
        return tuple(answer), told | ({"spec_accept_length": 3.0} if url == "drafts" else {})

    monkeypatch.setattr(script, "ask", ask)
    return script


def test_a_chat_goes_on_from_what_was_said(speculation: ModuleType) -> None:
    chat = speculation.held("any", 3)
    assert chat == speculation.held("any", 3)
    assert len(chat) == speculation.TURNS
    for before, after in pairwise(chat):
        said = before.prompt + before.answer
        assert after.prompt[: len(said)] == said
        assert len(after.prompt) > len(said)


def test_tokens_are_summed_and_an_answer_that_differs_is_counted(speculation: ModuleType) -> None:
    chats = [speculation.held("any", seed) for seed in range(4)]
    right, wrong = (speculation.figures_of(url, "MTP", "marconi", chats) for url in ("drafts", "wrong"))
    assert right.num_prompt_tokens == sum(len(turn.prompt) for chat in chats for turn in chat)
    assert right.num_cached_tokens == sum(len(turn.prompt) // 2 for chat in chats for turn in chat)
    assert (right.num_different, right.accept_length) == (0, 3.0)
    assert wrong.num_different == sum(len(turn.prompt) > 500 for chat in chats for turn in chat) > 0
    assert wrong.accept_length is None


def served(monkeypatch: pytest.MonkeyPatch, speculation: ModuleType, lost: int) -> list[str]:
    """A server, in place of HTTP, that answers at once and has lost so many bytes; the paths that it was asked for."""
    asked: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.path)
        if request.url.path == "/generate" and request.extensions["timeout"]["read"] < 1.0:
            raise httpx.ReadTimeout("given up")
        told = {"prompt_tokens": 8, "cached_tokens": 4, "completion_tokens": 2, "spec_verify_ct": 1}
        pool = {"size": 100, "free": 40, "cached": 60 - lost}
        return httpx.Response(200, json={"meta_info": told, "ranks": [{"joint_bytes": pool}]})

    monkeypatch.setattr(speculation, "_HTTP", httpx.Client(transport=httpx.MockTransport(answer), timeout=60.0))
    return asked


def test_a_soak_accounts_for_all_bytes_between_crowds(speculation: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = served(monkeypatch, speculation, lost=0)
    counts = speculation.soaked("http://any", speculation.CROWD * 4 + 1)
    assert counts["answered"] + counts["given_up"] == speculation.CROWD * 4 + 1
    assert counts["given_up"] > 0
    assert (counts["cached"], counts["verify_steps"]) == (4 * counts["answered"], counts["answered"])
    assert (asked.count("/marconi"), asked.count("/flush_cache")) == (counts["checks"], counts["flushes"]) == (5, 1)


def test_negative_control_a_byte_that_is_lost_ends_a_soak(
    speculation: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    served(monkeypatch, speculation, lost=1)
    with pytest.raises(speculation.BytesLost, match="must be free or cached throughout, got"):
        speculation.require_nothing_lost("http://any", within_s=0.0)


def test_the_table_compares_each_cache_with_itself_without_drafts(speculation: ModuleType) -> None:
    found = [
        speculation.Figures(drafts, cache, 100, cached, 0, None)
        for drafts, cache, cached in (
            ("none", "stock", 40),
            ("none", "marconi", 80),
            ("MTP", "stock", 30),
            ("MTP", "marconi", 82),
        )
    ]
    console = Console(width=120)
    with console.capture() as said:
        console.print(speculation.table_of(found))
    rows = [line.split() for line in said.get().splitlines() if "MTP" in line]
    assert [(row[1], row[5]) for row in rows] == [("stock", "0.750"), ("marconi", "1.025")]
