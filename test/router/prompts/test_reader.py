"""What a reader says of a body: its ids, where they live, and in one line what is wrong with it."""

from array import array
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("msgspec", reason="the router extra is not installed: pip install '.[router]'")

from marconi.events.base import KvStored
from marconi.events.hashes import HashSpace
from marconi.events.mirror import Mirror
from marconi.events.tree_log import ROOT, Held, Tenant, TreeLog
from marconi.router.dispatch.hashing import prompt_of
from marconi.router.prompts import Reading, TokenizingReader, Unreadable
from marconi.router.prompts.reader import CHAT, COMPLETIONS, GENERATE

from .families import FAMILIES

ASKED = {"role": "user", "content": "It?"}
NAMED = {family.name: family for family in FAMILIES}


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> TokenizingReader:
    folder = NAMED["composed"].write(tmp_path_factory.mktemp("prompts") / "composed")
    return TokenizingReader.of(folder, "org/model:v1", lora_paths={"ada": "/adapters/ada"})


@pytest.fixture(scope="module")
def beginning(tmp_path_factory: pytest.TempPathFactory) -> TokenizingReader:
    """Of a model whose tokenizer puts a token before a text."""
    return TokenizingReader.of(NAMED["headers"].write(tmp_path_factory.mktemp("prompts") / "headers"))


def shown(reader: TokenizingReader, reading: Reading) -> str:
    """The text of a prompt's ids."""
    assert reading.ids is not None
    text: str = reader.chat.tokenizer._pipeline.decode(list(reading.ids), skip_special_tokens=False)
    return text


def test_a_chat_is_rendered_up_to_the_answer(reader: TokenizingReader) -> None:
    reading = reader.read(CHAT, {"messages": [{"role": "system", "content": "Be brief."}, ASKED], "stream": True})
    assert (reading.extra_key, reading.cache_salt, reading.is_stream, reading.num_prompts) == (None, None, True, 1)
    assert shown(reader, reading) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nIt?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_special_token_in_a_users_text_is_that_token_as_in_the_worker(reader: TokenizingReader) -> None:
    plain = reader.read(GENERATE, {"text": "<|im_start|>"}).ids
    assert plain is not None
    assert len(plain) == 1


@pytest.mark.parametrize(
    "text",
    [
        "\U0001f469\u200d\U0001f469\u200d\U0001f467",
        "e\u0301",
        "中文",
        "עברית \u200f",
        "\u0000\u0007",
        "\ufeff",
        "\U0010ffff",
    ],
)
def test_unicode_has_ids(reader: TokenizingReader, text: str) -> None:
    assert reader.read(GENERATE, {"text": text}).ids
    assert reader.read(CHAT, {"messages": [{"role": "user", "content": text}]}).ids


def test_marks_apart_and_composed_are_one_prompt_where_the_class_composes(reader: TokenizingReader) -> None:
    apart, composed = (reader.read(COMPLETIONS, {"prompt": text}).ids for text in ("e\u0301", "\u00e9"))
    assert apart == composed


def test_a_text_begins_with_the_models_token_and_a_chat_with_that_of_its_template(beginning: TokenizingReader) -> None:
    first = beginning.read(GENERATE, {"text": "<|begin|>"}).ids
    assert first is not None
    assert len(first) == 2
    chat = beginning.read(CHAT, {"messages": [ASKED]}).ids
    assert chat is not None
    assert list(chat[:2]).count(first[0]) == 1


def test_turns_of_a_conversation_share_their_beginning(reader: TokenizingReader) -> None:
    turns = [ASKED, {"role": "assistant", "content": "It is."}, ASKED]
    first, second = (reader.read(CHAT, {"messages": turns[:num]}).ids for num in (1, 3))
    assert first is not None
    assert second is not None
    assert list(second[: len(first)]) == list(first)


def test_an_answer_that_is_continued_follows_the_prompt(reader: TokenizingReader) -> None:
    cut = {"messages": [ASKED, {"role": "assistant", "content": "It is"}]}
    assert shown(reader, reader.read(CHAT, cut | {"continue_final_message": True})).endswith("assistant\nIt is")
    assert shown(reader, reader.read(CHAT, cut)).endswith("<|im_start|>user\nIt is<|im_end|>\n<|im_start|>assistant\n")


def test_calls_and_results_are_shown(reader: TokenizingReader) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": "größe"}'}}
    turns = [ASKED, {"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "content": "12"}]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    text = shown(reader, reader.read(CHAT, {"messages": turns, "tools": tools}))
    assert '{"name": "f", "arguments": {"x": "größe"}}' in text
    assert "<tool_response>\n12\n</tool_response>" in text
    assert '{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}' in text
    hidden = shown(reader, reader.read(CHAT, {"messages": turns, "tools": tools, "tool_choice": "none"}))
    assert "# Tools" not in hidden


def test_reasoning_is_switched_off_by_effort(reader: TokenizingReader) -> None:
    off = shown(reader, reader.read(CHAT, {"messages": [ASKED], "reasoning_effort": "none"}))
    assert off.endswith("<think>\n\n</think>\n\n")
    own = {"messages": [ASKED], "reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}}
    assert shown(reader, reader.read(CHAT, own)).endswith("assistant\n")


@pytest.mark.parametrize(
    ("route", "body", "ids", "num_prompts"),
    [
        (GENERATE, {"input_ids": [1, 2]}, [1, 2], 1),
        (GENERATE, {"input_ids": [[1], [1, 2]]}, [1, 2], 2),
        (COMPLETIONS, {"prompt": [3, 4]}, [3, 4], 1),
        (COMPLETIONS, {"prompt": [[3], [4, 5], [6]]}, [4, 5], 3),
        (CHAT, {"messages": [ASKED], "input_ids": [7]}, [7], 1),
    ],
)
def test_ids_are_taken_as_given_and_of_a_batch_the_longest(
    reader: TokenizingReader, route: str, body: dict[str, Any], ids: list[int], num_prompts: int
) -> None:
    reading = reader.read(route, body)
    assert (list(reading.ids or ()), reading.num_prompts) == (ids, num_prompts)


def test_of_a_batch_of_texts_the_longest_is_read_with_its_own_space(reader: TokenizingReader) -> None:
    body = {"text": ["a", "a longer one"], "cache_salt": ["s0", "s1"], "extra_key": ["", "k"]}
    reading = reader.read(GENERATE, body)
    assert reading.ids == reader.read(GENERATE, {"text": "a longer one"}).ids
    assert (reading.extra_key, reading.cache_salt, reading.num_prompts) == ("k", "s1", 2)


@pytest.mark.parametrize(
    ("route", "body"),
    [
        (GENERATE, {"text": "a", "image_data": "http://i"}),
        (GENERATE, {"input_embeds": [[0.5]]}),
        (GENERATE, {"text": "a", "session_params": {"id": "s"}}),
        (GENERATE, {"text": "", "input_ids": None}),
        (GENERATE, {"input_ids": [1, -1]}),
        (GENERATE, {"input_ids": [1 << 64]}),
        (GENERATE, {"input_ids": [1.0]}),
        (COMPLETIONS, {"prompt": "a", "suffix": "b"}),
        (COMPLETIONS, {"prompt": ["1", 2]}),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://i"}}]}]}),
        (CHAT, {"messages": [ASKED], "chat_template_kwargs": {"chat_template": "{{ 1 }}"}}),
        (CHAT, {"messages": [ASKED], "chat_template_kwargs": {"tokenize": True}}),
        (
            CHAT,
            {
                "messages": [ASKED],
                "tools": [
                    {"function": {"name": "f", "parameters": {"type": "object", "properties": {"x": {"type": "int"}}}}}
                ],
            },
        ),
        (CHAT, {"messages": [ASKED], "model": "org/model:v1:unknown"}),
        ("/v1/embeddings", {"input": "a"}),
    ],
)
def test_what_a_router_cannot_know_has_no_ids(reader: TokenizingReader, route: str, body: dict[str, Any]) -> None:
    assert reader.read(route, body).ids is None


@pytest.mark.parametrize(
    ("route", "body", "line"),
    [
        (GENERATE, {}, "neither text nor input_ids; one of them is right"),
        (GENERATE, {"text": 1}, "text: 1; a text or a list of texts is right"),
        (GENERATE, {"text": "a\ud800"}, "a text with half of a surrogate pair; Unicode text is right"),
        (GENERATE, {"input_ids": "a"}, "input_ids: 'a' is no list of token ids"),
        (GENERATE, {"input_ids": [None]}, "token ids: None among token ids"),
        (GENERATE, {"text": "a", "stream": "maybe"}, "stream: 'maybe' is no truth value; true or false is right"),
        (GENERATE, {"text": "a", "cache_salt": 1}, "cache_salt: 1 is no text"),
        (GENERATE, {"text": ["a", "b"], "cache_salt": ["s"]}, "cache_salt: 1 of them for 2 prompts"),
        (COMPLETIONS, {"prompt": ""}, "prompt: ''; a text or a list of token ids is right"),
        (COMPLETIONS, {"prompt": [[1], "a"]}, "prompt: 'a' in a batch of another kind"),
        (CHAT, {"messages": []}, "messages: []; a list of at least one message is right"),
        (CHAT, {"messages": ["a" * 99]}, "messages: role None; system, user, assistant or tool is right"),
        (
            CHAT,
            {"messages": [{"role": "user"}]},
            "messages: content None of a user; a text or a list of parts is right",
        ),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "txt"}]}]},
            "messages: part {'type': 'txt'}; a text is right",
        ),
        (CHAT, {"messages": [ASKED], "tool_choice": "required"}, "tool_choice: required, without tools"),
        (CHAT, {"messages": [ASKED], "tools": [{"name": "f"}]}, "tools: {'name': 'f'} has no function with a name"),
        (
            CHAT,
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
            "messages: arguments '{' of a tool call; an object as JSON text is right",
        ),
        (
            CHAT,
            {"messages": [ASKED], "reasoning_effort": True},
            "reasoning_effort: True; none, low, medium or high is right",
        ),
    ],
)
def test_a_body_that_is_none_gets_one_line(
    reader: TokenizingReader, route: str, body: dict[str, Any], line: str
) -> None:
    with pytest.raises(Unreadable) as caught:
        reader.read(route, body)
    assert str(caught.value) == line


def test_a_chat_that_its_template_refuses_gets_its_line(tmp_path: Path) -> None:
    strict = TokenizingReader.of(NAMED["brackets"].write(tmp_path / "brackets"))
    with pytest.raises(Unreadable, match=r"^the chat template refuses this chat: turns must alternate$"):
        strict.read(CHAT, {"messages": [ASKED, ASKED]})


def test_a_template_cannot_reach_out_of_its_sandbox(tmp_path: Path) -> None:
    file = tmp_path / "t.jinja"
    file.write_text("{{ messages.__class__.__mro__[1].__subclasses__() }}{{ messages.append(1) }}")
    reaching = TokenizingReader.of(NAMED["brackets"].write(tmp_path / "brackets"), chat_template=file)
    with pytest.raises(Unreadable, match=r"access to attribute .* is unsafe"):
        reaching.read(CHAT, {"messages": [ASKED]})


def test_an_adapter_has_a_space_of_its_own(reader: TokenizingReader) -> None:
    def key(**body: Any) -> str | None:
        return reader.read(CHAT, {"messages": [ASKED], **body}).extra_key

    assert key(model="org/model:v1") is None
    assert key(model="org/model:v1:ada") == key(lora_path="ada") == key(model="other:ada") is not None
    assert key(lora_path="ada", extra_key="k") == f"k{key(lora_path='ada')}"
    assert key(extra_key="") is None


def test_a_body_is_not_changed(reader: TokenizingReader) -> None:
    function = {"name": "f", "parameters": {"type": "object"}}
    call = {"function": {"name": "f", "arguments": "{}"}}
    body = {
        "messages": [ASKED, {"role": "assistant", "content": "a", "tool_calls": [call]}],
        "tools": [{"function": function}],
        "chat_template_kwargs": {"reasoning_effort": "high"},
    }
    before = repr(body)
    reader.read(CHAT, body)
    assert repr(body) == before


def test_blocks_of_a_prompt_hash_as_its_worker_tells_them(reader: TokenizingReader) -> None:
    block_tokens = 4
    reading = reader.read(
        CHAT, {"messages": [ASKED] * 3, "extra_key": "k", "cache_salt": "s", "model": "org/model:v1:ada"}
    )
    assert reading.ids is not None
    space = HashSpace.of("m", reading.extra_key, reading.cache_salt)
    prompt = prompt_of(reading.ids, space, block_tokens)
    assert prompt.num_tokens == len(reading.ids)

    log = TreeLog()
    mirror = Mirror(log, block_tokens, "m")
    log.changes.append(Held(1, ROOT, array("q", reading.ids).tobytes(), Tenant(reading.extra_key, reading.cache_salt)))
    assert len(list(mirror.drain())) > 0
    told = [event for event in mirror.held() if isinstance(event, KvStored)]
    hashes = [each for event in told for each in event.block_hashes]
    assert {event.namespace for event in told} == {prompt.chain.namespace}
    assert len(prompt.chain.hashes) == (len(reading.ids) - 1) // block_tokens > 3
    assert hashes[: len(prompt.chain.hashes)] == list(prompt.chain.hashes)
