"""`--record FILE`: what workers served, as a trace of lengths and shared blocks; what they refused is not in it."""

import asyncio
import json
from array import array
from pathlib import Path

import pytest

from marconi.policy.request import unpack
from marconi.record import BLOCK_TOKENS
from marconi.replay.trace import read
from marconi.router.gateway.settings import Settings
from marconi.router.gateway.upstream import OutputLength

from .house import house
from .stand_in import NUM_WORDS, StandIn


def test_what_was_served_is_recorded_and_nothing_else(tmp_path: Path) -> None:
    path, shared = tmp_path / "served.jsonl", "one system prompt, " * 10

    async def story() -> None:
        worker = StandIn("a")
        async with house(worker, record=path) as home:
            await home.ask(shared)
            await home.until_told(worker)
            await home.ask(shared + "second", stream=True)
            await home.ask(shared + "of another tenant", cache_salt="b")
            assert (await home.ask("refused", wrong=True)).status == 400
            await home.ask("an image", image_data="x")

    asyncio.run(asyncio.wait_for(story(), 60))
    assert not any(word in path.read_text() for word in ("system", "second", "refused", "image"))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    first, second, other = read(path).requests
    assert [each.num_prompt_tokens for each in (first, second, other)] == [
        len(shared + end) for end in ("", "second", "of another tenant")
    ]
    # Of a stream that does not say how long it is, an event a token.
    assert [each.num_output_tokens for each in (first, second, other)] == [NUM_WORDS] * 3
    assert [line["cached_tokens"] for line in lines] == [0, len(shared) // 8 * 8, 0]
    num_shared = len(shared) // BLOCK_TOKENS
    assert unpack(first.path)[:num_shared] == unpack(second.path)[:num_shared]
    assert not set(unpack(first.path)) & set(unpack(other.path))
    assert 0 <= first.arrival_s <= second.arrival_s <= other.arrival_s < 60


@pytest.mark.parametrize("is_recorded", [False, True])
def test_a_prompts_tokens_are_kept_for_a_record_alone(tmp_path: Path, is_recorded: bool) -> None:
    async def story() -> None:
        async with house(StandIn("a"), record=tmp_path / "served.jsonl" if is_recorded else None) as home:
            routed = await home.gateway.admit("/generate", {"text": "hello"}, 5)
            assert routed.is_known
            assert routed.ids == (array("q", [*b"hello"]).tobytes() if is_recorded else None)

    asyncio.run(asyncio.wait_for(story(), 60))


@pytest.mark.parametrize(
    ("chunks", "num_tokens"),
    [
        ([b'{"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 12}}'], 12),
        ([b'data: {"meta_info": {"completion_tokens": %d}}\n\n' % number for number in (1, 2, 5)], 5),
        ([b'data: {"a": 1}\n\ndata: {"a": 2}\n\n', b'data: {"a": "data: [DONE]"}\n\n', b"data: [DONE]\n\n"], 3),
        ([b'data: {"a": "\\"completion_tokens\\": 7}"}\n\n'], 1),
        ([b"{}"], 0),
    ],
)
def test_an_answer_is_as_long_as_it_says_or_as_it_has_events(chunks: list[bytes], num_tokens: int) -> None:
    length = OutputLength()
    for chunk in chunks:
        length.see(chunk)
    assert length.num_tokens == num_tokens


def test_a_record_in_a_folder_that_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match="--record must be a file in a folder that is there, got /absent/served"):
        Settings(record=Path("/absent/served"))
