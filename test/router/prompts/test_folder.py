"""Which folders a reader takes, what it finds in them, and in one line why not."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("msgspec", reason="the router extra is not installed: pip install '.[router]'")

from marconi.router.prompts import TokenizingReader, probes, verify
from marconi.router.prompts.chat_template import ChatTemplate
from marconi.router.prompts.reader import CHAT, GENERATE

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


def test_a_tokenizer_file_stands_for_its_folder(folder: Path) -> None:
    assert ids(TokenizingReader.of(folder / "tokenizer.json")) == ids(TokenizingReader.of(folder))


@pytest.mark.parametrize(
    ("name", "edit", "line"),
    [
        (
            "tokenizer_config.json",
            lambda said: said.update(tokenizer_class="LlamaTokenizer"),
            "tokenizer class LlamaTok",
        ),
        ("tokenizer_config.json", lambda said: said.pop("tokenizer_class"), "tokenizer class None is not known here"),
        ("tokenizer_config.json", lambda said: said.update(auto_map={"AutoTokenizer": ["a.B", None]}), "Python code"),
        ("tokenizer_config.json", lambda said: said.update(fix_mistral_regex=True), "fix_mistral_regex"),
        ("tokenizer_config.json", lambda said: said.update(chat_template="{% if %}"), "chat template: line 1"),
        ("tekken.json", lambda said: None, "mistral-common"),
        ("config.json", lambda said: said.update(architectures=["DeepseekV4ForCausalLM"]), "by Python code of SGLang"),
        ("config.json", lambda said: said.update(architectures=["GlmMoeDsaForCausalLM"]), "by Python code of SGLang"),
        ("config.json", lambda said: said.update(model_type="minimax_m3_vl"), "by Python code of SGLang"),
        ("tokenizer.json", lambda said: said.clear(), "no tokenizer"),
    ],
)
def test_a_folder_whose_ids_would_be_a_guess_is_refused_in_one_line(
    folder: Path, name: str, edit: Callable[[dict[str, Any]], object], line: str
) -> None:
    change(folder, name, edit)
    with pytest.raises(ValueError, match=line) as caught:
        TokenizingReader.of(folder)
    assert "\n" not in str(caught.value)


def test_no_folder_and_no_tokenizer_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no folder; a model's folder with tokenizer.json is right"):
        TokenizingReader.of(tmp_path / "none")
    with pytest.raises(ValueError, match="only a worker can tokenize"):
        TokenizingReader.of(tmp_path)


def test_no_json_is_named(folder: Path) -> None:
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json: no JSON"):
        TokenizingReader.of(folder)


def test_a_template_file_goes_before_the_configurations(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    reader = TokenizingReader.of(folder)
    assert ids(reader) == list(reader.read(GENERATE, {"text": "It?"}).ids or ())


def test_of_named_templates_it_is_the_first_or_the_one_asked_for(folder: Path) -> None:
    templates = [{"name": "one", "template": "1"}, {"name": "two", "template": "22"}]
    change(folder, "tokenizer_config.json", lambda said: said.update(chat_template=templates))
    assert len(ids(TokenizingReader.of(folder))) == 1
    assert len(ids(TokenizingReader.of(folder, template_name="two"))) == 2
    with pytest.raises(ValueError, match="no chat template 'three'; there are one, two"):
        TokenizingReader.of(folder, template_name="three")


def test_a_template_of_sglangs_own_is_refused(folder: Path) -> None:
    with pytest.raises(
        ValueError, match=r"chatml: SGLang's own templates are not rendered here; a \.jinja file is right"
    ):
        TokenizingReader.of(folder, chat_template=Path("chatml"))


def test_a_model_without_a_template_has_no_chats_and_all_texts(folder: Path) -> None:
    change(folder, "tokenizer_config.json", lambda said: said.pop("chat_template"))
    reader = TokenizingReader.of(folder)
    assert reader.read(CHAT, ASKED).ids is None
    assert reader.read(GENERATE, {"text": "a"}).ids
    assert not any(probe.name.startswith("chat") for probe in probes(reader))


def test_a_model_that_sees_and_tokenizes_twice_has_no_ids_of_chats(tmp_path: Path) -> None:
    folder = NAMED["headers"].write(tmp_path / "model")
    change(folder, "config.json", lambda said: said.update(vision_config={"depth": 1}))
    assert TokenizingReader.of(folder).read(CHAT, ASKED).ids is None


@pytest.mark.parametrize(
    ("source", "takes_parts"),
    [
        ("{% for part in message['content'] %}{% endfor %}", True),
        ("{% for part in message.content | list %}{% endfor %}", True),
        ("{% for part in msg.content[1:] %}{% endfor %}", True),
        ("{% for part in other.content %}{% endfor %}", False),
        ("{% for message in messages %}{{ message.content }}{% endfor %}", False),
        ("{{ 'an image' }}", True),
    ],
)
def test_a_template_that_loops_over_content_takes_parts(source: str, takes_parts: bool) -> None:
    assert ChatTemplate.of(source).takes_parts is takes_parts


def test_an_answer_of_other_ids_names_worker_probe_and_both_hashes(folder: Path) -> None:
    first = probes(TokenizingReader.of(folder))[0]
    with pytest.raises(
        ValueError, match=r"^http://w: its .* the probe 'plain' hashes to \w{12} there, to \w{12} here$"
    ):
        verify(first, {"tokens": [1, 2, 3], "count": 3}, "http://w")


@pytest.mark.parametrize(
    "answer", [None, {}, {"tokens": "a"}, {"tokens": [1.5]}, {"tokens": [-1]}, {"tokens": [1 << 32]}]
)
def test_an_answer_that_is_none_is_named(folder: Path, answer: object) -> None:
    first = probes(TokenizingReader.of(folder))[0]
    with pytest.raises(
        ValueError, match=r"^http://w: /v1/tokenize answered .* to the probe 'plain'; tokens of SGLang are"
    ):
        verify(first, answer, "http://w")


def test_probes_are_the_same_for_the_same_folder(folder: Path) -> None:
    assert probes(TokenizingReader.of(folder)) == probes(TokenizingReader.of(folder))
