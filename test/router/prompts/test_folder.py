"""Which folders a reader takes, what it finds in them, and in one line why not."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="the router extra is not installed: pip install '.[router]'")

from marconi.router.prompts import CHAT, GENERATE, PromptKind
from marconi.router.prompts.check import probes, verify
from marconi.router.prompts.reader import TokenizingReader

from . import folders

ASKED = {"messages": [{"role": "user", "content": "It?"}]}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return folders.write("qwen", tmp_path / "model")


def change(folder: Path, name: str, edit: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads((folder / name).read_text())
    edit(content)
    (folder / name).write_text(json.dumps(content))


def ids(reader: TokenizingReader, body: dict[str, Any] = ASKED) -> list[int]:
    return list(reader.read(CHAT, body).ids or ())


def test_no_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"the tokenizer must be a model's folder, got .*none$"):
        TokenizingReader.of(tmp_path / "none")


def test_a_tokenizer_that_cannot_be_loaded_here_is_left_to_the_workers(folder: Path) -> None:
    change(folder, "tokenizer.json", lambda said: said.update(model={"type": "another"}))
    reader = TokenizingReader.of(folder)
    assert reader.why_not.startswith(f"{folder}: its tokenizer cannot be loaded here (")
    assert "\n" not in reader.why_not
    assert reader.read(CHAT, ASKED).question == ASKED
    assert reader.read(GENERATE, {"text": "It?"}).question == {"prompt": "It?"}
    asked = probes(reader)
    assert len(asked) >= 6
    assert {probe.kind for probe in asked} == set(PromptKind)
    assert {probe.expected_hash for probe in asked} == {None}


def test_no_code_of_a_folder_is_run(folder: Path, tmp_path: Path) -> None:
    (folder / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    change(folder, "tokenizer_config.json", lambda said: said.update(auto_map={"AutoTokenizer": [None, "own.Own"]}))
    TokenizingReader.of(folder)
    assert not (tmp_path / "ran").exists()


def test_the_routers_process_keeps_torch_out(folder: Path) -> None:
    arguments = ["router", "--workers", "http://127.0.0.1:9", "--model", str(folder), "--device", "none-such"]
    program = (
        "import sys\n"
        "from marconi.cli import main\n"
        f"assert main({arguments!r}) == 2\n"
        "assert 'transformers' in sys.modules, 'it stops at the device, after it loaded the tokenizer'\n"
        "assert sys.modules.get('torch') is None\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "none-such" in done.stderr


@pytest.mark.slow
def test_nothing_of_torch_is_needed_and_none_is_kept_out(folder: Path) -> None:
    program = (
        "import sys\n"
        "from pathlib import Path\n"
        "if sys.argv[1] == 'without': sys.modules['torch'] = None\n"
        "before = sys.modules.get('torch', '')\n"
        "from marconi.router.prompts.reader import TokenizingReader\n"
        "assert sys.modules.get('torch', '') is before, 'only a tokenizer that is loaded takes it along'\n"
        f"reader = TokenizingReader.of(Path({str(folder)!r}))\n"
        "if sys.argv[1] == 'with': assert sys.modules.get('torch', '') is not None\n"
        f"print(list(reader.read('/v1/chat/completions', {ASKED!r}).ids))"
    )
    for how in ("with", "without"):
        done = subprocess.run(
            [sys.executable, "-c", program, how], capture_output=True, text=True, check=True, timeout=120
        )
        assert json.loads(done.stdout) == ids(TokenizingReader.of(folder))
        assert done.stderr == ""


def test_a_template_file_goes_before_the_configurations(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    reader = TokenizingReader.of(folder)
    assert ids(reader) == list(reader.read(GENERATE, {"text": "It?"}).ids or ())


def test_of_named_templates_it_is_the_default_or_the_one_asked_for(folder: Path) -> None:
    templates = [{"name": "default", "template": "1"}, {"name": "two", "template": "22"}]
    change(folder, "tokenizer_config.json", lambda said: said.update(chat_template=templates))
    assert len(ids(TokenizingReader.of(folder))) == 1
    assert len(ids(TokenizingReader.of(folder, template_name="two"))) == 2
    with pytest.raises(ValueError, match="--hf-chat-template-name must be one of default, two, got 'three'"):
        TokenizingReader.of(folder, template_name="three")


def test_a_template_file_that_is_not_there_is_named(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"^--chat-template no/where.jinja: cannot be read \(No such file"):
        TokenizingReader.of(folder, chat_template="no/where.jinja")


@pytest.mark.parametrize(
    ("template", "flag"), [(None, None), ("{% if %}", None), ("{{ 1 }}", "chatml"), ("{{ 1 }}", "conversation.json")]
)
def test_chats_without_a_template_that_is_rendered_here_are_left_to_the_workers(
    folder: Path, template: str | None, flag: str | None
) -> None:
    change(folder, "tokenizer_config.json", lambda said: said.update(chat_template=template))
    reader = TokenizingReader.of(folder, chat_template=flag)
    assert reader.read(CHAT, ASKED).question == ASKED
    assert reader.read(GENERATE, {"text": "a"}).ids
    chats = [probe for probe in probes(reader) if probe.kind is not PromptKind.TEXTS]
    assert {probe.kind for probe in chats} == set(PromptKind) - {PromptKind.TEXTS}
    for probe in chats:
        with pytest.raises(ValueError, match="to nothing here"):
            verify(probe, {"tokens": [1]}, "http://w")


def test_a_model_that_sees_and_tokenizes_twice_has_no_ids_of_chats(tmp_path: Path) -> None:
    folder = folders.write("llama", tmp_path / "model")
    change(folder, "config.json", lambda said: said.update(vision_config={"depth": 1}))
    reading = TokenizingReader.of(folder).read(CHAT, ASKED)
    assert (reading.ids, reading.question) == (None, None)


@pytest.mark.parametrize(
    "answer", [None, {}, {"tokens": "a"}, {"tokens": [1.5]}, {"tokens": [-1]}, {"tokens": [1 << 32]}]
)
def test_an_answer_that_is_none_is_named(folder: Path, answer: object) -> None:
    first = probes(TokenizingReader.of(folder))[0]
    with pytest.raises(ValueError, match=r"^http://w: /v1/tokenize must answer the probe 'plain' with tokens, got "):
        verify(first, answer, "http://w")
