"""A router's ids are those of SGLang's own request handling, or a worker is asked, and its answer has them.

The worker's side runs here: its request models, its routes and transformers' tokenizers, up to its scheduler.
"""

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

if importlib.util.find_spec("sglang") is None:
    pytest.skip("SGLang is not installed: pip install '.[server]'", allow_module_level=True)
pytest.importorskip("transformers", reason="the router extra is not installed: pip install '.[router]'")

from marconi.router.prompts import CHAT, COMPLETIONS, GENERATE, MESSAGES, PromptKind
from marconi.router.prompts.check import Unlike, probes, verify, without
from marconi.router.prompts.reader import TokenizingReader
from marconi_cpu import tiny_model

from . import bodies, folders

if TYPE_CHECKING:
    from .worker import Worker

ALL = frozenset(PromptKind)
ASKED = {"role": "user", "content": "It?"}
KINDS = {
    "qwen": ALL,
    "llama": ALL - {PromptKind.PARTS},
    "pieces": frozenset(),
    "tiny gdn": ALL - {PromptKind.PARTS},
    "tiny mamba2": ALL - {PromptKind.PARTS},
}
"""What is tokenized here of each folder; workers are asked for the rest."""
REQUESTS = {
    "chats": (CHAT, bodies.CHATS),
    "agents' chats": (CHAT, bodies.AGENTS),
    "Anthropic's chats": (MESSAGES, bodies.MESSAGES),
    "completions": (COMPLETIONS, bodies.COMPLETIONS),
    "generations": (GENERATE, bodies.GENERATIONS),
}
Pairs = dict[str, "tuple[TokenizingReader, Worker]"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, sglang_configuration: None) -> dict[str, Path]:
    """A folder of each name, and the configuration of a server."""
    from .worker import publish

    root = tmp_path_factory.mktemp("prompts")
    found = {name: folders.write(name, root / name) for name in folders.NAMES}
    # With Inkling SGLang takes no tokenizer but the published one.
    for family in (each for each in tiny_model.Family if each is not tiny_model.Family.WINDOWS):
        tiny_model.write(family, root / family)
        found[f"tiny {family}"] = root / family
    publish(found["tiny gdn"])
    return found


@pytest.fixture(scope="module")
def pairs(made: dict[str, Path]) -> Pairs:
    """A reader and a worker of each folder; the reader does itself what the probes allow."""
    return {name: joined(folder, folder) for name, folder in made.items()}


def joined(
    folder: Path, workers: Path, template: Path | None = None, **flags: Any
) -> "tuple[TokenizingReader, Worker]":
    """A router of one folder before a worker of another."""
    from .worker import Worker

    reader = TokenizingReader.of(folder, lora_paths={"ada": "/adapters/ada"}, **flags)
    worker = Worker(workers, json.loads((workers / "config.json").read_text()), template)
    kinds = ALL
    for probe in probes(reader):
        try:
            verify(probe, worker.tokenize(probe.body), "http://w")
        except ValueError:
            kinds = without(kinds, probe.kind)
    return reader.for_workers(kinds, "served"), worker


def agree(pair: "tuple[TokenizingReader, Worker]", route: str, body: dict[str, Any]) -> tuple[bool, bool]:
    """Compare both; whether the ids were known here, and whether a worker's answer had them."""
    reader, worker = pair
    before = json.dumps(body)
    reading = reader.read(route, body)
    assert json.dumps(body) == before, "a body is read, not changed"
    try:
        told = worker.read(route, body)
        ids = reading.ids if reading.question is None else worker.tokenize(reading.question)["tokens"]
    except ValueError:
        return False, False
    if not ids:
        return False, False
    assert (list(ids), reading.extra_key, reading.cache_salt) in told
    return reading.question is None, reading.question is not None


MOST_ROUNDS = 10
ENOUGH = 5
"""Bodies of a kind that have to be among those that are drawn, or none is."""


def hold(
    pair: "tuple[TokenizingReader, Worker]",
    route: str,
    requests: st.SearchStrategy[dict[str, Any]],
    is_enough: Callable[[int, int], bool],
) -> None:
    """Compare both for many bodies, until so many were known here, and asked of a worker, that `is_enough`."""
    nums = [0, 0]

    def check(body: dict[str, Any]) -> None:
        for index, is_so in enumerate(agree(pair, route, body)):
            nums[index] += is_so

    # What is drawn depends on the modules that are loaded, whose constants Hypothesis tries as well.
    for number in range(MOST_ROUNDS):
        seed(number)(settings(max_examples=60, suppress_health_check=list(HealthCheck))(given(requests)(check)))()
        if is_enough(*nums):
            return
    raise AssertionError(f"{nums} were known here and asked of a worker: too few, or too many")


@pytest.mark.one_in(6)
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("requests", REQUESTS)
def test_ids_are_the_workers_for_what_clients_send(pairs: Pairs, name: str, requests: str) -> None:
    """Lists of ids are known in any case."""
    route, strategy = REQUESTS[requests]
    is_chat = route in (CHAT, MESSAGES)
    are_known, are_asked = not is_chat or bool(KINDS[name]), is_chat or not KINDS[name]
    hold(
        *(pairs[name], route, strategy),
        lambda num_known, num_asked: (num_known >= ENOUGH, num_asked >= ENOUGH) == (are_known, are_asked),
    )


@pytest.mark.one_in(6)
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("requests", REQUESTS)
def test_ids_are_the_workers_for_what_no_client_should_send(pairs: Pairs, name: str, requests: str) -> None:
    route, strategy = REQUESTS[requests]
    hold(pairs[name], route, bodies.twisted(strategy), lambda *nums: sum(nums) >= ENOUGH)


@pytest.mark.parametrize("name", KINDS)
def test_probes_say_which_kinds_a_router_tokenizes(pairs: Pairs, name: str) -> None:
    assert pairs[name][0].kinds == KINDS[name]


def edit(folder: Path, name: str, change: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads((folder / name).read_text(encoding="utf-8"))
    change(content)
    (folder / name).write_text(json.dumps(content), encoding="utf-8")


def template(old: str, new: str) -> Callable[[Path], None]:
    def change(said: dict[str, Any]) -> None:
        assert old in said["chat_template"]
        said["chat_template"] = said["chat_template"].replace(old, new)

    return lambda folder: edit(folder, "tokenizer_config.json", change)


def swap_letters(said: dict[str, Any]) -> None:
    vocabulary = said["model"]["vocab"]
    vocabulary["a"], vocabulary["z"] = vocabulary["z"], vocabulary["a"]


FAULTS: dict[str, tuple[Callable[[Path], None], frozenset[PromptKind]]] = {
    "another template": (template("<|im_start|>", "<|im_start|> "), frozenset({PromptKind.TEXTS})),
    "another way of parts": (template("{{ part.text }}", "{{ part.text | trim }}"), ALL - {PromptKind.PARTS}),
    "another way of thinking": (template("<think>", "<thunk>"), ALL - {PromptKind.THINKING}),
    "another way of tools": (template("{{ tool | tojson }}", "{{ tool.function | tojson }}"), ALL - {PromptKind.TOOLS}),
    "another way of calls": (template("{{ call | tojson }}", "{{ call.function | tojson }}"), ALL - {PromptKind.CALLS}),
    "another way of results": (
        template("<|im_start|>{{ message.role }}", "<|im_start|>{{ message.role | replace('tool', 'user') }}"),
        ALL - {PromptKind.CALLS},
    ),
    "tokens in another order": (lambda folder: edit(folder, "tokenizer.json", swap_letters), frozenset()),
}
CALLED = [
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x":[1,"a"]}'}}],
    },
    {"role": "tool", "tool_call_id": "1", "content": "12"},
]
TOOL = {"type": "function", "function": {"name": "f", "description": "It.", "parameters": {"type": "object"}}}
BODIES: dict[PromptKind, tuple[str, dict[str, Any]]] = {
    PromptKind.TEXTS: (GENERATE, {"text": "a z e\u0301"}),
    PromptKind.CHATS: (CHAT, {"messages": [ASKED]}),
    PromptKind.PARTS: (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": " a "}] * 2}]}),
    PromptKind.THINKING: (CHAT, {"messages": [ASKED], "chat_template_kwargs": {"enable_thinking": False}}),
    PromptKind.TOOLS: (CHAT, {"messages": [ASKED], "tools": [TOOL]}),
    PromptKind.CALLS: (CHAT, {"messages": [ASKED, *CALLED]}),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_worker_that_tokenizes_otherwise_is_asked(made: dict[str, Path], tmp_path: Path, fault: str) -> None:
    change, kinds = FAULTS[fault]
    other = folders.write("qwen", tmp_path / "other")
    change(other)
    pair = joined(other, made["qwen"])
    assert pair[0].kinds == kinds
    for kind, (route, body) in BODIES.items():
        assert agree(pair, route, body) == (kind in pair[0].kinds, kind not in pair[0].kinds)


@pytest.mark.parametrize("fault", [name for name in FAULTS if name.startswith("another ")])
def test_the_comparison_finds_a_router_that_does_not_ask(made: dict[str, Path], tmp_path: Path, fault: str) -> None:
    change, kinds = FAULTS[fault]
    other = folders.write("qwen", tmp_path / "other")
    change(other)
    reader, worker = joined(other, made["qwen"])
    for kind in ALL - kinds:
        with pytest.raises(AssertionError):
            agree((reader.for_workers(ALL), worker), *BODIES[kind])
    probe = next(each for each in probes(reader) if each.kind not in kinds and each.kind is not PromptKind.TEXTS)
    with pytest.raises(
        Unlike, match=rf"^http://w: its .* the probe '{probe.name}' hashes to \w{{12}} there, to \w{{12}}"
    ):
        verify(probe, worker.tokenize(probe.body), "http://w")


def test_a_model_that_also_sees_has_the_same_ids(made: dict[str, Path], pairs: Pairs) -> None:
    from .worker import Worker

    folder = made["qwen"]
    worker = Worker(folder, json.loads((folder / "config.json").read_text()), is_multimodal=True)
    hold((pairs["qwen"][0], worker), CHAT, bodies.CHATS, lambda *nums: min(nums) >= ENOUGH)


def test_a_template_of_a_flag_is_the_workers(made: dict[str, Path], tmp_path: Path) -> None:
    file = tmp_path / "template.jinja"
    file.write_text("{{ messages | tojson }}{{ tools }}", encoding="utf-8")
    with_flag, without_flag = (
        joined(made["qwen"], made["qwen"], file, chat_template=flag) for flag in (str(file), None)
    )
    assert agree(with_flag, *BODIES[PromptKind.CHATS]) == (True, False)
    assert agree(without_flag, *BODIES[PromptKind.CHATS]) == (False, True)


@pytest.mark.slow
def test_default_variables_of_a_flag_are_the_workers(made: dict[str, Path], sglang_configuration: None) -> None:
    from .worker import publish

    defaults = {"enable_thinking": False, "date_string": "a day"}
    publish(made["tiny gdn"], default_chat_template_kwargs=defaults)
    for name in ("qwen", "llama"):
        as_flagged = joined(made[name], made[name], template_defaults=defaults)
        hold(as_flagged, CHAT, bodies.CHATS, lambda known, _: known >= ENOUGH)
        hold(joined(made[name], made[name]), CHAT, bodies.CHATS, lambda known, asked: known == 0 and asked >= ENOUGH)
