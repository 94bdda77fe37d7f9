"""A router has of every body the ids and the name space that SGLang's own request handling makes of it, or none.

The worker's side runs here: its request models, its routes and transformers' tokenizers, up to its scheduler.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("sglang", reason="SGLang is not installed: pip install '.[server]'")
pytest.importorskip("transformers", reason="the router extra is not installed: pip install '.[router]'")

from marconi.demo import tiny_model
from marconi.router.prompts import CHAT, COMPLETIONS, GENERATE, Kind
from marconi.router.prompts.check import probes, verify
from marconi.router.prompts.reader import TokenizingReader

from . import bodies
from .families import FAMILIES
from .pieces import PIECES
from .worker import Refused, Worker, publish

NAMED = {family.name: family for family in (*FAMILIES, *PIECES)}
NAMES = (*NAMED, "tiny gdn", "tiny mamba2")
LORA_PATHS = {"ada": "/adapters/ada"}
Pairs = dict[str, tuple[TokenizingReader, Worker]]
slow = settings(max_examples=100, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model's folder of each kind."""
    root = tmp_path_factory.mktemp("prompts")
    found = {name: family.write(root / name) for name, family in NAMED.items()}
    for kind in tiny_model.Family:
        tiny_model.write(kind, root / kind)
        found[f"tiny {kind}"] = root / kind
    return found


@pytest.fixture(scope="module")
def pairs(folders: dict[str, Path], sglang_configuration: None) -> Pairs:
    """A reader and a worker of each."""
    publish(folders["tiny gdn"])
    found = {}
    for name, folder in folders.items():
        reader = TokenizingReader.of(folder, lora_paths=LORA_PATHS).for_workers(set(Kind), "served")
        found[name] = reader, Worker(folder, json.loads((folder / "config.json").read_text()))
    return found


def agree(pair: tuple[TokenizingReader, Worker], route: str, body: dict[str, Any]) -> bool:
    """Compare both; whether the ids are known on both sides."""
    reader, worker = pair
    try:
        told = worker.read(route, body)
    except Refused:
        told = None
    before = json.dumps(body)
    reading = reader.read(route, body)
    assert json.dumps(body) == before, "a body is read, not changed"
    if told is None or reading.ids is None:
        return False
    ids, extra_key, cache_salt = zip(*told, strict=True)
    assert (list(reading.ids), reading.extra_key, reading.cache_salt) in told
    assert len(reading.ids) > 0
    assert extra_key.count(extra_key[0]) == cache_salt.count(cache_salt[0]) == len(ids)
    return True


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("route", "requests"),
    [(CHAT, bodies.CHATS), (COMPLETIONS, bodies.COMPLETIONS), (GENERATE, bodies.GENERATIONS)],
    ids=("chat", "completions", "generate"),
)
def test_ids_are_the_workers(pairs: Pairs, name: str, route: str, requests: st.SearchStrategy[dict[str, Any]]) -> None:
    num_known = 0

    @slow
    @given(requests)
    def check(body: dict[str, Any]) -> None:
        nonlocal num_known
        num_known += agree(pairs[name], route, body)

    check()
    assert num_known >= 5, "what clients send is known, not only not wrong"


@pytest.mark.parametrize(
    ("route", "requests"),
    [(CHAT, bodies.CHATS), (COMPLETIONS, bodies.COMPLETIONS), (GENERATE, bodies.GENERATIONS)],
    ids=("chat", "completions", "generate"),
)
def test_what_no_client_should_send_is_never_misread(
    pairs: Pairs, route: str, requests: st.SearchStrategy[dict[str, Any]]
) -> None:
    num_known = 0

    @settings(slow, max_examples=250)
    @given(bodies.twisted(requests), st.sampled_from(NAMES))
    def check(body: dict[str, Any], name: str) -> None:
        nonlocal num_known
        num_known += agree(pairs[name], route, body)

    check()
    assert num_known >= 5


@pytest.mark.parametrize(
    ("name", "route", "requests"),
    [
        *((name, CHAT, bodies.CHATS) for name in ("composed", "headers", "brackets", "gemma", "tekken")),
        *((name, CHAT, bodies.twisted(bodies.CHATS)) for name in ("composed", "headers")),
        *((name, COMPLETIONS, bodies.COMPLETIONS) for name in ("headers", "tekken")),
    ],
)
def test_where_only_workers_tokenize_the_question_has_the_ids_for_its_answer(
    pairs: Pairs, name: str, route: str, requests: st.SearchStrategy[dict[str, Any]]
) -> None:
    own, worker = pairs[name]
    reader, num_known = own.for_workers(set()), 0

    @slow
    @given(requests)
    def check(body: dict[str, Any]) -> None:
        nonlocal num_known
        reading = reader.read(route, body)
        if reading.question is None:
            return
        try:
            told = worker.read(route, body)
            ids = worker.tokenize(reading.question)["tokens"]
        except (Refused, ValueError):
            return
        num_known += 1
        assert (ids, reading.extra_key, reading.cache_salt) in told

    check()
    assert num_known >= 5


@pytest.mark.parametrize("name", NAMES)
def test_a_worker_of_the_same_folder_passes_every_probe(pairs: Pairs, name: str) -> None:
    reader, worker = pairs[name]
    asked = probes(reader)
    assert len(asked) >= 12
    ask(reader, worker)


def test_a_model_that_also_sees_has_the_same_ids(folders: dict[str, Path], pairs: Pairs) -> None:
    folder = folders["marks"]
    worker = Worker(folder, json.loads((folder / "config.json").read_text()), is_multimodal=True)
    num_known = 0

    @slow
    @given(bodies.CHATS)
    def check(body: dict[str, Any]) -> None:
        nonlocal num_known
        num_known += agree((pairs["marks"][0], worker), CHAT, body)

    check()
    assert num_known >= 5


def test_a_template_of_a_flag_is_the_workers(folders: dict[str, Path], pairs: Pairs, tmp_path: Path) -> None:
    file = tmp_path / "template.jinja"
    file.write_text("\n\n{{ messages | tojson }}\\n{{ tools }}\n", encoding="utf-8")
    folder = folders["composed"]
    pair = (
        TokenizingReader.of(folder, chat_template=str(file)),
        Worker(folder, NAMED["composed"].model_config, file),
    )
    body = {"messages": [{"role": "user", "content": [{"type": "text", "text": "größe"}]}]}
    assert agree(pair, CHAT, body)
    assert not set(pair[0].read(CHAT, body).ids or ()) <= set(pairs["composed"][0].read(CHAT, body).ids or ())


DEFAULTS = {"enable_thinking": False, "date_string": "a day", "reasoning_effort": "low"}


@pytest.mark.parametrize("name", ["composed", "headers"])
def test_default_variables_of_a_flag_are_the_workers(
    folders: dict[str, Path], pairs: Pairs, sglang_configuration: None, name: str
) -> None:
    folder = folders[name]
    publish(folders["tiny gdn"], default_chat_template_kwargs=DEFAULTS)
    worker = Worker(folder, json.loads((folder / "config.json").read_text()))
    reader = TokenizingReader.of(folder, template_defaults=DEFAULTS, lora_paths=LORA_PATHS).for_workers(
        set(Kind), "served"
    )
    num_known = 0

    @slow
    @given(bodies.CHATS)
    def check(body: dict[str, Any]) -> None:
        nonlocal num_known
        num_known += agree((reader, worker), CHAT, body)

    check()
    assert num_known >= 5
    ask(reader, worker)
    with pytest.raises(ValueError, match=r"'chat.*' hashes to"):
        ask(pairs[name][0], worker)


FAULTS = {
    "a changed template": lambda folder: edit(
        folder,
        "tokenizer_config.json",
        lambda said: said.update(chat_template=said["chat_template"].replace("user", "usr")),
    ),
    "a trimmed result": lambda folder: edit(
        folder,
        "tokenizer_config.json",
        lambda said: said.update(chat_template=said["chat_template"].replace("<tool_response>\n", "<tool_response>")),
    ),
    "a token that strips": lambda folder: edit(
        folder, "tokenizer_config.json", lambda said: said["added_tokens_decoder"].popitem()[1].update(lstrip=True)
    ),
    "another token": lambda folder: edit(
        folder, "tokenizer_config.json", lambda said: rename(said, "<think>", "<thunk>")
    ),
    "tokens in another order": lambda folder: edit(folder, "tokenizer.json", swap_letters),
    "another class": lambda folder: edit(
        folder, "tokenizer_config.json", lambda said: said.update(tokenizer_class="PreTrainedTokenizerFast")
    ),
}


def edit(folder: Path, name: str, change: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads((folder / name).read_text(encoding="utf-8"))
    change(content)
    (folder / name).write_text(json.dumps(content), encoding="utf-8")


def rename(said: dict[str, Any], old: str, new: str) -> None:
    for token in said["added_tokens_decoder"].values():
        token["content"] = new if token["content"] == old else token["content"]


def swap_letters(said: dict[str, Any]) -> None:
    vocabulary = said["model"]["vocab"]
    vocabulary["a"], vocabulary["z"] = vocabulary["z"], vocabulary["a"]


def ask(reader: TokenizingReader, worker: Worker) -> None:
    for probe in probes(reader):
        verify(probe, worker.tokenize(probe.body), "http://w")


@pytest.mark.parametrize("fault", FAULTS)
def test_a_worker_of_another_folder_is_found(
    folders: dict[str, Path], pairs: Pairs, tmp_path: Path, fault: str
) -> None:
    other = tmp_path / "other"
    shutil.copytree(folders["composed"], other)
    FAULTS[fault](other)
    reader, worker = TokenizingReader.of(other), pairs["composed"][1]
    with pytest.raises(ValueError, match=r"^http://w: its tokenizer is not this router's: the probe '.*' hashes to"):
        ask(reader, worker)


def test_the_comparison_of_ids_finds_a_reader_of_another_template(
    folders: dict[str, Path], pairs: Pairs, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    shutil.copytree(folders["composed"], other)
    FAULTS["a trimmed result"](other)
    pair = TokenizingReader.of(other, lora_paths=LORA_PATHS).for_workers(set(Kind), "served"), pairs["composed"][1]
    asked = {"role": "user", "content": "It?"}
    assert agree(pair, CHAT, {"messages": [asked]})
    with pytest.raises(AssertionError):
        agree(pair, CHAT, {"messages": [asked, {"role": "tool", "content": "12"}]})
