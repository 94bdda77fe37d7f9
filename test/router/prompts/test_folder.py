"""Which folders a reader takes, what it finds in them, and in one line why not."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="the router extra is not installed: pip install '.[router]'")

from marconi.router.prompts import CHAT, GENERATE, Kind
from marconi.router.prompts.check import Unlike, probes, verify
from marconi.router.prompts.reader import TokenizingReader
from marconi.router.prompts.tokenizer import takes_parts

from .families import FAMILIES

ASKED = {"messages": [{"role": "user", "content": "It?"}]}
NAMED = {family.name: family for family in FAMILIES}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return NAMED["composed"].write(tmp_path / "model")


def change(folder: Path, name: str, edit: Callable[[dict[str, Any]], object]) -> None:
    path = folder / name
    content = json.loads(path.read_text()) if path.exists() else {}
    edit(content)
    path.write_text(json.dumps(content))


def ids(reader: TokenizingReader, body: dict[str, Any] = ASKED) -> list[int]:
    return list(reader.read(CHAT, body).ids or ())


def test_no_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"none: must be a model's folder$"):
        TokenizingReader.of(tmp_path / "none")


@pytest.mark.parametrize(
    ("name", "edit"),
    [
        ("tokenizer.json", lambda said: said.clear()),
        ("tokenizer.json", lambda said: said.update(model={"type": "another"})),
    ],
)
def test_a_tokenizer_that_cannot_be_loaded_here_is_left_to_the_workers(
    folder: Path, name: str, edit: Callable[[dict[str, Any]], object]
) -> None:
    change(folder, name, edit)
    reader = TokenizingReader.of(folder)
    assert reader.why_not.startswith(f"{folder}: its tokenizer cannot be loaded here (")
    assert "\n" not in reader.why_not
    assert reader.read(CHAT, ASKED).question == ASKED
    assert reader.read(GENERATE, {"text": "It?"}).question == {"prompt": "It?"}
    asked = probes(reader)
    assert len(asked) >= 6
    assert {(probe.kind, probe.expected_hash) for probe in asked} == {(Kind.TEXTS, None)}


def test_no_code_of_a_folder_is_run(folder: Path, tmp_path: Path) -> None:
    (folder / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    change(folder, "tokenizer_config.json", lambda said: said.update(auto_map={"AutoTokenizer": [None, "own.Own"]}))
    TokenizingReader.of(folder)
    assert not (tmp_path / "ran").exists()


def test_nothing_of_torch_is_needed(folder: Path) -> None:
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "from pathlib import Path\n"
        "from marconi.router.prompts.reader import TokenizingReader\n"
        f"reader = TokenizingReader.of(Path({str(folder)!r}))\n"
        f"print(list(reader.read('/v1/chat/completions', {ASKED!r}).ids))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    assert json.loads(done.stdout) == ids(TokenizingReader.of(folder))


def test_a_template_file_goes_before_the_configurations(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    reader = TokenizingReader.of(folder)
    assert ids(reader) == list(reader.read(GENERATE, {"text": "It?"}).ids or ())


def test_of_named_templates_it_is_the_first_or_the_one_asked_for(folder: Path) -> None:
    templates = [{"name": "one", "template": "1"}, {"name": "two", "template": "22"}]
    change(folder, "tokenizer_config.json", lambda said: said.update(chat_template=templates))
    assert len(ids(TokenizingReader.of(folder))) == 1
    assert len(ids(TokenizingReader.of(folder, template_name="two"))) == 2
    with pytest.raises(ValueError, match="--hf-chat-template-name must be one of one, two, got 'three'"):
        TokenizingReader.of(folder, template_name="three")


@pytest.mark.parametrize("given", ["chatml", "conversation.json"])
def test_chats_of_a_template_of_sglangs_own_are_left_to_the_workers(folder: Path, given: str) -> None:
    reader = TokenizingReader.of(folder, chat_template=given)
    assert reader.read(CHAT, ASKED).question == ASKED
    assert reader.read(GENERATE, {"text": "It?"}).ids


def test_a_template_file_that_is_not_there_is_named(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"^--chat-template no/where.jinja: cannot be read \(No such file"):
        TokenizingReader.of(folder, chat_template="no/where.jinja")


def test_a_broken_template_leaves_chats_to_the_workers(folder: Path) -> None:
    change(folder, "tokenizer_config.json", lambda said: said.update(chat_template="{% if %}"))
    assert TokenizingReader.of(folder).read(CHAT, ASKED).question == ASKED


def test_a_template_of_a_processor_goes_before_the_tokenizers(folder: Path) -> None:
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "{{ messages[0].content }}"}))
    text = list(TokenizingReader.of(folder).read(GENERATE, {"text": "It?"}).ids or ())
    assert ids(TokenizingReader.of(folder)) != text
    (folder / "preprocessor_config.json").write_text("{}")
    assert ids(TokenizingReader.of(folder)) == text


def test_a_model_without_a_template_has_no_chats_and_all_texts(folder: Path) -> None:
    change(folder, "tokenizer_config.json", lambda said: said.pop("chat_template"))
    reader = TokenizingReader.of(folder)
    assert reader.read(CHAT, ASKED).question == ASKED
    assert reader.read(GENERATE, {"text": "a"}).ids
    assert not any(probe.kind is Kind.CHATS for probe in probes(reader))


def test_a_model_that_sees_and_tokenizes_twice_has_no_ids_of_chats(tmp_path: Path) -> None:
    folder = NAMED["headers"].write(tmp_path / "model")
    change(folder, "config.json", lambda said: said.update(vision_config={"depth": 1}))
    reading = TokenizingReader.of(folder).read(CHAT, ASKED)
    assert (reading.ids, reading.question) == (None, None)


@pytest.mark.parametrize(
    ("source", "is_given_parts"),
    [
        ("{% for part in message['content'] %}{% endfor %}", True),
        ("{% for part in message.content | list %}{% endfor %}", True),
        ("{% for part in msg.content[1:] %}{% endfor %}", True),
        ("{% for part in other.content %}{% endfor %}", False),
        ("{% for message in messages %}{{ message.content }}{% endfor %}", False),
        ("{{ 'an image' }}", True),
        ("{%- generation -%}{% for part in message.content %}{% break %}{% endfor %}{% endgeneration %}", True),
        ("{% for part in message.content %}{% if %}", False),
    ],
)
def test_a_template_that_loops_over_content_takes_parts(source: str, is_given_parts: bool) -> None:
    assert takes_parts(source) is is_given_parts


def test_an_answer_of_other_ids_names_worker_probe_and_both_hashes(folder: Path) -> None:
    first = probes(TokenizingReader.of(folder))[0]
    with pytest.raises(Unlike, match=r"^http://w: its .* the probe 'plain' hashes to \w{12} there, to \w{12} here$"):
        verify(first, {"tokens": [1, 2, 3], "count": 3}, "http://w")


@pytest.mark.parametrize(
    "answer", [None, {}, {"tokens": "a"}, {"tokens": [1.5]}, {"tokens": [-1]}, {"tokens": [1 << 32]}]
)
def test_an_answer_that_is_none_is_named(folder: Path, answer: object) -> None:
    first = probes(TokenizingReader.of(folder))[0]
    with pytest.raises(ValueError, match=r"^http://w: /v1/tokenize must answer the probe 'plain' with tokens, got "):
        verify(first, answer, "http://w")


def test_probes_are_the_same_for_the_same_folder(folder: Path) -> None:
    assert probes(TokenizingReader.of(folder)) == probes(TokenizingReader.of(folder))
