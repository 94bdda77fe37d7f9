"""What a reader says of a body: its ids and where they live, or what a worker is asked for them."""

from array import array
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="the router extra is not installed: pip install '.[router]'")

from marconi.events.base import KvStored
from marconi.events.hashes import HashSpace
from marconi.events.mirror import Mirror
from marconi.events.tree_log import ROOT, KeptKv, Tenant, TreeLog
from marconi.router.dispatch import prompt_of
from marconi.router.prompts import CHAT, COMPLETIONS, GENERATE, PromptKind, Reading
from marconi.router.prompts.reader import TokenizingReader

from . import folders

ASKED = {"role": "user", "content": "It?"}


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> TokenizingReader:
    folder = folders.write("qwen", tmp_path_factory.mktemp("prompts") / "qwen")
    return TokenizingReader.of(folder, lora_paths={"ada": "/adapters/ada"}).for_workers(set(PromptKind), "org/model:v1")


@pytest.fixture(scope="module")
def beginning(tmp_path_factory: pytest.TempPathFactory) -> TokenizingReader:
    """Of a model whose tokenizer puts a token before a text."""
    return TokenizingReader.of(folders.write("llama", tmp_path_factory.mktemp("prompts") / "llama"))


def shown(reader: TokenizingReader, reading: Reading) -> str:
    """The text of a prompt's ids."""
    assert reading.ids is not None
    assert reader.tokenizer is not None
    text: str = reader.tokenizer.hf.decode(list(reading.ids))
    return text


def test_a_chat_is_rendered_up_to_the_answer(reader: TokenizingReader) -> None:
    reading = reader.read(CHAT, {"messages": [{"role": "system", "content": "Be brief."}, ASKED], "stream": True})
    assert (reading.extra_key, reading.cache_salt, reading.is_stream) == (None, None, True)
    assert shown(reader, reading) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nIt?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_turns_of_a_conversation_share_their_beginning(reader: TokenizingReader) -> None:
    turns = [ASKED, {"role": "assistant", "content": "It is."}, ASKED]
    first, second = (reader.read(CHAT, {"messages": turns[:num]}).ids for num in (1, 3))
    assert first is not None
    assert second is not None
    assert list(second[: len(first)]) == list(first)


def test_a_template_gets_tools_with_all_their_fields_and_calls_with_arguments_as_objects(
    reader: TokenizingReader,
) -> None:
    body = {**called(), "tools": [dict(reversed(TOOL.items()))], "tool_choice": "auto"}
    assert shown(reader, reader.read(CHAT, body)) == (
        '<|im_start|>system\n{"type": "function", "function": {"name": "f", "description": "It.", "parameters": '
        '{"type": "object"}}, "defer_loading": null}\n<|im_end|>\n<|im_start|>user\nIt?<|im_end|>\n'
        '<|im_start|>assistant\n<tool_call>{"id": "1", "index": null, "type": "function", "function": {"name": "f", '
        '"arguments": {"x": 1}}}<|im_end|>\n<|im_start|>tool\n12<|im_end|>\n<|im_start|>assistant\n'
    )


@pytest.mark.parametrize(
    ("route", "body", "ids"),
    [
        (GENERATE, {"input_ids": [1, 2]}, [1, 2]),
        (GENERATE, {"input_ids": [[1], [1, 2]]}, [1, 2]),
        (COMPLETIONS, {"prompt": [3, 4]}, [3, 4]),
        (COMPLETIONS, {"prompt": [[3], [4, 5], [6]]}, [4, 5]),
        (CHAT, {"messages": [ASKED], "input_ids": [7]}, [7]),
    ],
)
def test_ids_are_taken_as_given_and_of_a_batch_the_longest(
    reader: TokenizingReader, route: str, body: dict[str, Any], ids: list[int]
) -> None:
    for each in (reader, reader.for_workers(frozenset())):
        assert list(each.read(route, body).ids or ()) == ids


def test_of_a_batch_of_texts_the_longest_is_read_with_its_own_space(reader: TokenizingReader) -> None:
    body = {"text": ["a", "a longer one"], "cache_salt": ["s0", "s1"], "extra_key": ["", "k"]}
    reading = reader.read(GENERATE, body)
    assert reading.ids == reader.read(GENERATE, {"text": "a longer one"}).ids
    assert (reading.extra_key, reading.cache_salt) == ("k", "s1")


@pytest.mark.parametrize(
    ("route", "body"),
    [
        (GENERATE, {"text": "a", "image_data": "http://i"}),
        (GENERATE, {"input_embeds": [[0.5]]}),
        (GENERATE, {"text": "a", "session_params": {"id": "s"}}),
        (GENERATE, {"input_ids": [1, -1]}),
        (GENERATE, {"input_ids": [1 << 64]}),
        (GENERATE, {"input_ids": [1.0]}),
        (COMPLETIONS, {"prompt": "a", "suffix": "b"}),
        (COMPLETIONS, {"prompt": ["1", 2]}),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://i"}}]}]}),
        (CHAT, {"messages": [ASKED], "session_id": "s"}),
        (CHAT, {"messages": [ASKED], "reasoning_effort": "?", "tools": [{"function": {"name": "f", "strict": None}}]}),
        (CHAT, {"messages": [ASKED], "model": "org/model:v1:unknown"}),
        ("/v1/embeddings", {"input": "a"}),
    ],
)
def test_what_nobody_can_know_has_no_ids_and_no_question(
    reader: TokenizingReader, route: str, body: dict[str, Any]
) -> None:
    for each in (reader, reader.for_workers(set())):
        reading = each.read(route, body)
        assert (reading.ids, reading.question) == (None, None)


FUNCTION: dict[str, Any] = {"name": "f", "description": "It.", "parameters": {"type": "object"}}
TOOL: dict[str, Any] = {"type": "function", "function": FUNCTION}
CALL: dict[str, Any] = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x":1}'}}
RESULT: dict[str, Any] = {"role": "tool", "content": "12", "tool_call_id": "1"}


def function(**more: Any) -> dict[str, Any]:
    return {"tools": [{**TOOL, "function": {**FUNCTION, **more}}]}


def called(call: dict[str, Any] = CALL, **more: Any) -> dict[str, Any]:
    return {"messages": [ASKED, {"role": "assistant", "content": None, "tool_calls": [call], **more}, RESULT]}


def arguments(value: Any) -> dict[str, Any]:
    return called({**CALL, "function": {"name": "f", "arguments": value}})


@pytest.mark.parametrize(
    "more",
    [
        {"tools": []},
        {"tools": [{"type": "function", "function": {"name": "f", "description": "It."}}]},
        {"tools": [{**TOOL, "name": "f"}]},
        function(strict=True),
        function(parameters={"type": "object", "properties": {"x": {"type": "varchar"}}}),
        function(parameters={"anyOf": [{"type": ["string", "string"]}]}),
        {"tools": [TOOL], "tool_choice": "required"},
        {"tools": [TOOL], "tool_choice": "none"},
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}},
        {"tool_choice": "auto"},
        called(tool_calls=[]),
        called(reasoning_content="Hm."),
        called(content=[{"type": "text", "text": "It."}]),
        called({**CALL, "more": 1}),
        called({"type": "function", "function": CALL["function"]}),
        arguments({"x": 1}),
        arguments('{"x":'),
        arguments(f'{{"x": {1 << 64}}}'),
        {"messages": [ASKED, {**RESULT, "content": [{"type": "text", "text": "12"}]}]},
        {"messages": [ASKED, {"role": "tool", "content": "12"}]},
        {"messages": [*called()["messages"][:2]]},
        {"reasoning_effort": "none"},
        {"reasoning": {"enabled": True}},
        {"continue_final_message": False},
        {"chat_template_kwargs": {"chat_template": "{{ 1 }}"}},
        {"chat_template_kwargs": {"enable_thinking": "no"}},
        {"messages": [ASKED, {"role": "assistant", "content": "It is"}]},
        {"messages": [{"role": "developer", "content": "Be brief."}, ASKED]},
        {"messages": [{**ASKED, "name": "Ada"}]},
        {"messages": [ASKED, {"role": "assistant", "content": "It.", "reasoning_content": "Hm."}, ASKED]},
        {"messages": [{"role": "user", "content": ""}]},
        {"messages": [{"role": "user", "content": []}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {}}]}]},
    ],
)
def test_a_chat_that_a_worker_may_rewrite_is_its_question(reader: TokenizingReader, more: dict[str, Any]) -> None:
    body = {"messages": [ASKED], **more}
    reading = reader.read(CHAT, {**body, "model": "org/model:v1", "add_generation_prompt": False, "stream": True})
    assert (reading.ids, reading.question, reading.is_stream) == (None, body, True)


def test_a_chat_that_its_template_refuses_is_a_question(beginning: TokenizingReader, tmp_path: Path) -> None:
    body = {"messages": [ASKED, ASKED]}
    assert beginning.read(CHAT, body) == Reading(None, None, None, False, body)
    file = tmp_path / "t.jinja"
    file.write_text("{{ messages.__class__.__mro__[1].__subclasses__() }}")
    reaching = TokenizingReader.of(folders.write("qwen", tmp_path / "qwen"), chat_template=str(file))
    assert reaching.template is not None
    assert reaching.read(CHAT, body).question == body, "its sandbox lets no template out"


def test_an_empty_text_has_ids_only_where_the_tokenizer_puts_some_around_it(
    reader: TokenizingReader, beginning: TokenizingReader
) -> None:
    body = {"text": "", "input_ids": None}
    assert reader.read(GENERATE, body) == Reading(None, None, None, False)
    assert len(beginning.read(GENERATE, body).ids or ()) == 1
    assert beginning.for_workers(set()).read(GENERATE, body).question == {"prompt": ""}


def test_a_reader_asks_for_kinds_that_it_may_not_tokenize(reader: TokenizingReader) -> None:
    parts = {"role": "user", "content": [{"type": "text", "text": "It?"}]}
    bodies: dict[PromptKind, dict[str, Any]] = {
        PromptKind.CHATS: {"messages": [ASKED]},
        PromptKind.PARTS: {"messages": [parts]},
        PromptKind.THINKING: {"messages": [ASKED], "chat_template_kwargs": {"enable_thinking": False}},
        PromptKind.TOOLS: {"messages": [ASKED], "tools": [TOOL]},
        PromptKind.CALLS: called(),
    }
    for kind, body in bodies.items():
        assert reader.read(CHAT, body).ids
        assert reader.for_workers({PromptKind.CHATS, kind}).read(CHAT, body) == reader.read(CHAT, body)
        for kinds in (set(PromptKind) - {kind}, set(PromptKind) - {PromptKind.CHATS}, set[PromptKind]()):
            assert reader.for_workers(kinds).read(CHAT, body).question == body
    whole = {**bodies[PromptKind.THINKING], **bodies[PromptKind.TOOLS], "messages": [parts, *called()["messages"]]}
    assert reader.read(CHAT, whole).ids
    for kind in (PromptKind.PARTS, PromptKind.THINKING, PromptKind.TOOLS, PromptKind.CALLS):
        assert reader.for_workers(set(PromptKind) - {kind}).read(CHAT, whole).question == whole
    assert reader.for_workers(set()).read(GENERATE, {"text": "a"}).question == {"prompt": "a"}


@pytest.mark.parametrize(
    ("route", "body"),
    [
        (GENERATE, {}),
        (GENERATE, {"text": 1}),
        (GENERATE, {"text": "a\ud800"}),
        (GENERATE, {"input_ids": "a"}),
        (GENERATE, {"input_ids": [None]}),
        (GENERATE, {"text": "a", "cache_salt": 1}),
        (GENERATE, {"text": ["a", "b"], "cache_salt": ["s"]}),
        (COMPLETIONS, {"prompt": ""}),
        (COMPLETIONS, {"prompt": [[1], "a"]}),
        (CHAT, {"messages": []}),
        (CHAT, {"messages": ["a" * 99]}),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "txt"}]}]}),
        (CHAT, {"messages": [ASKED], "tools": [{"name": "f"}]}),
        (CHAT, {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]}),
        (CHAT, {"messages": [ASKED], "reasoning_effort": []}),
    ],
)
def test_a_body_that_is_none_is_left_to_its_worker(reader: TokenizingReader, route: str, body: dict[str, Any]) -> None:
    assert reader.read(route, body).ids is None


def test_an_adapter_has_a_space_of_its_own(reader: TokenizingReader) -> None:
    def key(**body: Any) -> str | None:
        return reader.read(CHAT, {"messages": [ASKED], **body}).extra_key

    assert key(model="org/model:v1") is None
    assert key(model="org/model:v1:ada") == key(lora_path="ada") == key(model="other:ada") is not None
    assert key(lora_path="ada", extra_key="k") == f"k{key(lora_path='ada')}"
    assert key(extra_key="") is None


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
    log.changes.append(
        KeptKv(1, ROOT, array("q", reading.ids).tobytes(), Tenant(reading.extra_key, reading.cache_salt))
    )
    assert len(list(mirror.drain())) > 0
    told = [event for event in mirror.held() if isinstance(event, KvStored)]
    hashes = [each for event in told for each in event.block_hashes]
    assert {event.namespace for event in told} == {prompt.chain.namespace}
    assert len(prompt.chain.hashes) == (len(reading.ids) - 1) // block_tokens > 3
    assert hashes[: len(prompt.chain.hashes)] == list(prompt.chain.hashes)
