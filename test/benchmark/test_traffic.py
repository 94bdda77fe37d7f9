"""Ordinary traffic: what could be, the programs of its clients, and what is said of them; then some on real servers."""

import dataclasses
import importlib
import json
import random
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

pytest.importorskip("sglang", reason="the server extra is not installed: pip install '.[server]'")

from marconi_cpu.demo.stream import REASONING_TEMPLATE, WrongAnswer

from .scripts import load

PACKAGE = load("traffic").__name__
oracle, text, program, shapes, client, fork, figures, servers, plot, command = (
    importlib.import_module(f"{PACKAGE}.{name}")
    for name in ("oracle", "text", "program", "shapes", "client", "fork", "figures", "servers", "plot", "command")
)
Served, could_be = oracle.Served, oracle.could_be
SMALL, SHAPES = command.SMALL, shapes.SHAPES


def served(prompt: Sequence[int], output: Sequence[int] = (), namespace: str = "") -> Any:
    return Served(tuple(prompt), tuple(output), namespace)


# What could be


def test_the_first_request_has_nothing_and_a_repeat_all_but_its_last_token() -> None:
    prompt = range(100)
    assert could_be([served(prompt), served(prompt), served(prompt)]) == [0, 99, 99]


def test_a_conversation_goes_on_from_the_last_processed_token_of_the_answer() -> None:
    first = served([1, 2, 3], [4, 5, 6])
    assert first.processed == [1, 2, 3, 4, 5]
    assert could_be([first, served([1, 2, 3, 4, 5, 6, 7, 8])]) == [0, 5]


def test_two_prompts_share_what_they_both_begin_with() -> None:
    assert could_be([served([1, 2, 3, 4]), served([1, 2, 9, 9]), served([1, 2, 9, 4])]) == [0, 2, 3]


def test_a_prefix_of_an_earlier_prompt_has_all_but_its_last_token() -> None:
    assert could_be([served([1, 2, 3, 4]), served([1, 2])]) == [0, 1]


def test_name_spaces_share_nothing() -> None:
    prompt = [1, 2, 3]
    assert could_be([served(prompt), served(prompt, namespace="a"), served(prompt, namespace="a")]) == [0, 0, 2]


def test_what_comes_later_is_of_no_use() -> None:
    assert could_be([served([1, 2]), served([1, 2, 3, 4])]) == [0, 2]


def test_an_answer_of_no_token_leaves_its_prompt() -> None:
    assert could_be([served([1, 2, 3]), served([1, 2, 3, 4])]) == [0, 3]


@pytest.mark.parametrize("seed", range(5))
def test_it_is_the_best_of_all_earlier_requests(seed: int) -> None:
    rng = random.Random(seed)  # noqa: S311 - a workload, not a secret
    requests = [
        served(rng.choices([1, 256, 70_000], k=rng.randint(1, 9)), rng.choices([1, 256], k=rng.randint(0, 4)), name)
        for name in rng.choices("ab", k=60)
    ]
    assert could_be(requests) == [by_hand(requests, index) for index in range(len(requests))]


def by_hand(requests: Sequence[Any], index: int) -> int:
    request = requests[index]
    shared = [0]
    for earlier in requests[:index]:
        if earlier.namespace == request.namespace:
            pairs = list(zip(earlier.processed, request.prompt, strict=False))
            shared.append(next((at for at, (left, right) in enumerate(pairs) if left != right), len(pairs)))
    return min(max(shared), len(request.prompt) - 1)


def test_a_place_can_be_known_once_something_has_ended_or_parted_there() -> None:
    prefix = [1, 2, 3, 4]
    parting = [served([*prefix, last, last]) for last in (10, 20, 30)]
    assert could_be(parting) == [0, 4, 4]
    assert oracle.knowable(parting) == [0, 0, 4]
    conversation = [served([1, 2, 3], [4, 5]), served([1, 2, 3, 4, 5, 6]), served([1, 2, 3, 9]), served([1, 2, 3])]
    assert could_be(conversation) == oracle.knowable(conversation) == [0, 4, 3, 2]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_what_can_be_known_is_part_of_what_could_be(shape: Any) -> None:
    requests = answered(shape, SMALL)
    pairs = zip(oracle.knowable(requests), could_be(requests), strict=True)
    assert all(known <= could for known, could in pairs)


# Prompts


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from transformers import AutoTokenizer

    from marconi_cpu import tiny_model

    folder = tmp_path_factory.mktemp("model") / "tiny"
    tiny_model.write(tiny_model.Family.GDN, folder)
    return AutoTokenizer.from_pretrained(folder)


CONVERSATION = [
    text.Message("system", "S" * 20),
    text.Message("user", "first?"),
    text.Message("assistant", "one", reasoning="because"),
    text.Message("user", "second?"),
    text.Message("assistant", "call", reasoning="so"),
    text.Message("tool", "result"),
]


def test_the_template_for_servers_renders_what_the_client_counts(tokenizer: Any) -> None:
    for length in (1, 2, 4, 6):
        messages = CONVERSATION[:length]
        ids = tokenizer.apply_chat_template(
            [message.to_json() for message in messages],
            chat_template=REASONING_TEMPLATE.read_text().strip("\n"),
            add_generation_prompt=True,
            return_dict=False,
        )
        assert ids == text.rendered(messages, text.Thinking.IN_THE_LAST_TURN)


def test_thinking_is_dropped_with_the_users_next_message(tokenizer: Any) -> None:
    dropped, kept, none = (
        tokenizer.decode(text.rendered(CONVERSATION, thinking))
        for thinking in (text.Thinking.IN_THE_LAST_TURN, text.Thinking.ALL, text.Thinking.NONE)
    )
    assert "because" not in dropped
    assert "<think>\nsocall" in dropped
    assert "<think>\nbecauseone" in kept
    assert dropped.endswith("<|im_start|>assistant\n<think>\n")
    assert "<think>" not in none


# Shapes


def answered(shape: Any, scale: Any) -> list[Any]:
    """A shape's requests in order, with answers that are a function of the prompt."""
    running, found = shape.program(scale), []
    try:
        wave = next(running)
        while True:
            outputs = [answer(ask) for ask in wave.asks]
            if wave.way is program.Way.SYNCED_FORK:
                found.append(served(wave.context.prompt))
            for ask, output in zip(wave.asks, outputs, strict=True):
                found += [served(ask.prompt, output)] * ask.num_samples
            wave = running.send(outputs)
    except StopIteration:
        return found


def answer(ask: Any) -> tuple[int, ...]:
    rng = random.Random(bytes(ask.prompt))  # noqa: S311 - a workload, not a secret
    return tuple(rng.choices(text.GENERATED_IDS, k=ask.num_output_tokens))


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_a_shape_is_the_same_every_time(shape: Any) -> None:
    assert answered(shape, SMALL) == answered(shape, SMALL)


def test_shapes_have_names_of_their_own_and_share_nothing_with_each_other() -> None:
    assert len(shapes.BY_NAME) == len(SHAPES)
    first = [answered(shape, SMALL)[0] for shape in SHAPES]
    assert max(could_be([served(each.prompt[20:]) for each in first])) <= 2


def test_thinking_that_is_kept_is_shared_to_the_end_of_the_answer_and_dropped_to_the_invitation() -> None:
    kept, dropped = (
        answered(shapes.BY_NAME[name], program.Scale()) for name in ("reasoning-kept", "reasoning-dropped")
    )
    for requests, expected in (
        (kept, lambda before: len(before.processed)),
        (dropped, lambda before: len(before.prompt) - len(text.THINK)),
    ):
        chats = [[each for each in requests if each.prompt[:40] == first.prompt[:40]] for first in requests[:4]]
        found = {id(each): tokens for each, tokens in zip(requests, could_be(requests), strict=True)}
        for chat in chats:
            assert len(chat) == 6
            for before, after in pairwise(chat):
                # A token more where what comes next is the same by chance.
                assert found[id(after)] - expected(before) in (0, 1)


def test_nothing_can_be_shared_by_random_prompts() -> None:
    assert sum(could_be(answered(shapes.BY_NAME["random"], program.Scale()))) == 0


# SGLang's frontend


@pytest.mark.parametrize("way", [program.Way.FORK, program.Way.SYNCED_FORK])
def test_a_forks_branches_arrive_together_and_its_context_before_them_only_if_it_was_synced(way: Any) -> None:
    wave = dataclasses.replace(next(shapes.BY_NAME["forks-synced"].program(SMALL)), way=way)
    sent: list[Any] = []

    def send(asks: Sequence[Any]) -> list[list[Any]]:
        sent.append(tuple(asks))
        return [[client.Asked(served(ask.prompt, answer(ask)), 0, 1.0)] for ask in asks]

    answers = fork.run(wave, send)
    assert sent == ([(wave.context,)] if way is program.Way.SYNCED_FORK else []) + [wave.asks]
    assert [each[-1].served for each in answers] == [served(ask.prompt, answer(ask)) for ask in wave.asks]
    assert sum(len(each) for each in answers) == sum(len(asks) for asks in sent)


def test_an_error_in_a_fork_is_raised() -> None:
    def send(asks: Sequence[Any]) -> list[list[Any]]:
        raise WrongAnswer("500")

    with pytest.raises(WrongAnswer, match="500"):
        fork.run(next(shapes.BY_NAME["forks"].program(SMALL)), send)


# What is said


def asked(prompt: Sequence[int], num_cached_tokens: int, ttft_s: float = 1.0, is_counted: bool = True) -> Any:
    return client.Asked(served(prompt), num_cached_tokens, ttft_s, is_counted)


def test_a_count_is_of_what_clients_asked() -> None:
    count = figures.Count.of([asked(range(100), 0, is_counted=False), asked(range(100), 90, 2.0)])
    assert (count.num_requests, count.num_prompt_tokens, count.num_could_be_tokens) == (1, 100, 99)
    assert count.share == 90 / 99
    assert count.ttft_s == 2.0
    assert figures.Count.of([asked([1], 0)]).share is None


def row(stock: int, ours: int, no_buffer: int = 0, one_pool: int | None = None) -> Any:
    by_server = {
        servers.Server.STOCK_NO_BUFFER: no_buffer,
        servers.Server.STOCK: stock,
        servers.Server.MARCONI: ours,
    }
    if one_pool is not None:
        by_server[servers.Server.MARCONI_ONE_POOL] = one_pool
    prompt = range(1001)
    counts = {server: figures.Count.of([asked(prompt, 0), asked(prompt, each)]) for server, each in by_server.items()}
    return figures.Row("a-shape", "plentiful", counts)


def test_ours_is_behind_where_either_of_stocks_has_half_a_point_of_the_prompts_more() -> None:
    rows = [row(500, 500), row(510, 500), row(500, 500, one_pool=500)]
    late = [row(511, 500), row(0, 500, no_buffer=511), row(511, 520, one_pool=500), row(511, 500, one_pool=520)]
    assert figures.behind([*rows, *late]) == late


def test_above_a_host_tier_the_table_says_how_many_evictions_waited(capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    def tiered(num_evictions: int, num_waits: int) -> Any:
        count = figures.Count.of([asked([1], 0)], figures.Counters(num_evictions, num_waits))
        return figures.Row("a-shape", "short-with-host", {servers.Server.MARCONI: count})

    before, after = figures.Counters(3, 2, {"no_slot": 4}), figures.Counters(5, 2, {"no_slot": 9, "no_state": 1})
    assert after.since(before) == figures.Counters(2, 0, {"no_slot": 5, "no_state": 1})
    Console(width=140).print(figures.table_of([tiered(5, 2), tiered(0, 0)], [servers.Server.MARCONI], "title"))
    lines = capsys.readouterr().out.splitlines()
    shown = [line.split()[-3:] for line in lines if line.strip().startswith(("a-shape", "mean"))]
    assert shown == [["2", "of", "5"], ["-", "-", "-"], ["2", "of", "5"]]


def test_the_table_has_a_line_a_row_and_the_mean(capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    table = figures.table_of([row(500, 1000), row(700, 600)], list(row(0, 0).counts), "title")
    Console(width=120).print(table)
    lines = capsys.readouterr().out.splitlines()
    shown = [line.split() for line in lines if line.strip().startswith(("a-shape", "mean"))]
    assert shown == [
        ["a-shape", "plentiful", "2002", "1000", "0.0", "50.0", "100.0", "100.0", "1.00"],
        ["a-shape", "plentiful", "2002", "1000", "0.0", "70.0", "60.0", "100.0", "1.00", "5.0"],
        ["mean", "0.0", "60.0", "80.0", "100.0", "1"],
    ]


def test_figures_are_read_as_they_were_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [row(500, 1000), row(700, 600)]
    assert [figures.Row.from_json(json.loads(json.dumps(each.to_json()))) for each in rows] == rows
    written = tmp_path / "figures.json"
    written.write_text(json.dumps({"rows": [each.to_json() for each in rows]}))
    assert command.main(["--read", str(written)]) == 0
    assert command.main(["--read", str(written), "--check"]) == 1
    assert "a-shape" in capsys.readouterr().out


def test_the_picture_has_two_bars_a_row_and_is_the_same_every_time(tmp_path: Path) -> None:
    nothing = figures.Row("nothing", "plentiful", {servers.Server.STOCK: figures.Count.of([asked([1], 0)])})
    for name in ("a", "b"):
        plot.save(tmp_path / name, [row(500, 1000), nothing])
    picture = (tmp_path / "a").read_text()
    assert (tmp_path / "b").read_text() == picture
    bars = [each for each in ElementTree.fromstring(picture).iter() if each.get("height") == str(plot._BAR - 1)]  # noqa: S314 - our own
    assert [(bar.get("fill"), bar.get("width")) for bar in bars] == [
        (plot.STOCK_COLOUR, f"{plot._PANEL / 2:.1f}"),
        (plot.OUR_COLOUR, f"{plot._PANEL:.1f}"),
    ]


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--shape", "haiku"], "argument --shape: invalid choice: 'haiku' (choose from 'reasoning-dropped'"),
        (
            ["--family", "rnn"],
            "argument --family: a tiny model's family must be one of gdn, mamba2, short-conv, windows, got 'rnn'",
        ),
        (["--read", "no/where.json"], "--read no/where.json: "),
        (["--plot", "no/where.svg"], "--plot must be in an existing folder, got no/where.svg"),
        (["--json", "no/where.json"], "--json must be in an existing folder, got no/where.json"),
    ],
)
def test_bad_input_is_one_line_and_status_2(
    arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        command.main(arguments)
    assert ended.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"benchmark/traffic: error: {line}")


# Without a server


@pytest.mark.slow
@pytest.mark.usefixtures("sglang_configuration")
@pytest.mark.parametrize("memory", servers.Memory, ids=str)
def test_the_rig_takes_every_shape_through_both_caches(memory: Any, tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    asked = ["stock", "marconi", "marconi-one-pool"]
    arguments = ["--rig", "--small", "--memory", str(memory), "--server", *asked, "--json", str(path)]
    assert command.main([*arguments, "--check"]) == 0, "none is behind"
    counts = {each["shape"]: figures.Row.from_json(each).counts for each in json.loads(path.read_text())["rows"]}
    assert list(counts) == [shape.name for shape in SHAPES]
    for by_server in counts.values():
        assert len({(count.num_prompt_tokens, count.num_could_be_tokens) for count in by_server.values()}) == 1
        assert all(count.num_cached_tokens <= count.num_could_be_tokens for count in by_server.values())
    if memory is servers.Memory.PLENTIFUL:
        # What is settled. Texts begin with the same letter by chance, and chats with the head of a user's turn.
        for name in ("forks-synced", "samples", "retries", "reasoning-kept", "chats"):
            assert counts[name][servers.Server.MARCONI].share > 0.995
