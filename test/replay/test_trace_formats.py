"""What each format's fields become."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from marconi.policy.request import unpack
from marconi.replay.trace import Half, ReadOptions, read
from marconi.replay.trace.tokens import tokenizer


def jsonl(path: Path, *records: object) -> Path:
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return path


def mooncake(timestamp: int, num_tokens: int, hashes: list[int]) -> dict[str, object]:
    return {"timestamp": timestamp, "input_length": num_tokens, "output_length": 3, "hash_ids": hashes}


def test_mooncake_knows_whole_blocks_and_no_sessions(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "m", mooncake(1500, 1024, [10**12, 5]), mooncake(2500, 1100, [10**12, 5, 4]))
    trace = read(path)
    first, second = trace.requests
    assert (trace.unit_tokens, first.session, first.arrival_s, second.arrival_s) == (512, -1, 1.5, 2.5)
    assert (unpack(first.path), first.num_known_tokens) == ([0, 1], 1024)
    assert (unpack(second.path), second.num_known_tokens, second.num_prompt_tokens) == ([0, 1, 2], 1024, 1100)


def test_mooncake_takes_another_block_size_and_splits_by_time(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "m", *(mooncake(time, 100, [1, time]) for time in range(5)))
    halves = [read(path, ReadOptions(block_tokens=64, half=half)) for half in (Half.TUNING, Half.REPORTING)]
    assert [[request.arrival_s for request in half.requests] for half in halves] == [[0, 0.001, 0.002], [0.003, 0.004]]
    assert halves[0].unit_tokens == 64
    with pytest.raises(ValueError, match="max_sessions: a mooncake trace names no sessions"):
        read(path, ReadOptions(block_tokens=64, max_sessions=1))


def test_a_servers_record_knows_answers_and_comes_in_any_order(tmp_path: Path) -> None:
    blocks = {"block_tokens": 100}
    path = jsonl(
        tmp_path / "m",
        mooncake(2500, 200, [1, 2]) | blocks,
        mooncake(1500, 298, [1, 2, 3]) | blocks | {"output_hash_ids": [4]},
    )
    trace = read(path)
    assert trace.unit_tokens == 100
    assert [
        (each.arrival_s, unpack(each.path), each.num_known_tokens, each.num_prompt_tokens) for each in trace.requests
    ] == [(1.5, [0, 1, 2], 300, 298), (2.5, [0, 1], 200, 200)]


def bailian(chat: int, parent: int, turn: int, num_tokens: int, hashes: list[int]) -> dict[str, object]:
    return {
        "chat_id": chat, "parent_chat_id": parent, "timestamp": float(chat), "input_length": num_tokens,
        "output_length": 12, "type": "text", "turn": turn, "hash_ids": hashes,
    }  # fmt: skip


def test_bailian_sessions_follow_the_parents_and_the_next_prompt_names_the_output(tmp_path: Path) -> None:
    path = jsonl(
        tmp_path / "b",
        bailian(1, -1, 1, 20, [100, 101]),
        bailian(2, -1, 1, 16, [200]),
        bailian(3, 1, 2, 40, [100, 102, 103]),
        bailian(4, 3, 3, 30, [100, 104]),
        bailian(5, 77, 4, 16, [200]),
        bailian(6, 5, 5, 16, [200]),
    )
    requests = read(path).requests
    assert [request.session for request in requests] == [0, 1, 0, 0, 2, 2]
    assert [request.turn for request in requests] == [0, 0, 1, 2, 3, 4]
    # 20 + 12 tokens: the second block is the one that the next prompt names, not the partial one.
    assert (unpack(requests[0].path), requests[0].num_known_tokens) == ([0, 3], 32)
    # The next prompt is shorter than prompt and output: only the prompt's whole blocks are known.
    assert (unpack(requests[2].path), requests[2].num_known_tokens) == ([0, 3, 4], 32)


def test_bailian_refuses_a_parent_after_its_child(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "b", bailian(1, 2, 2, 16, [1]), bailian(2, -1, 1, 16, [1]))
    with pytest.raises(
        ValueError, match="line 2: chat_id must come before the requests that continue it, got 2 after one"
    ):
        read(path)


def artifact(session: int | str, turn: int, time_s: float, prompt: list[int], output: list[int]) -> dict[str, object]:
    return {
        "session_id": session, "turn_id": turn, "ts": time_s, "num_input_tokens": len(prompt),
        "num_output_tokens": len(output), "input_tokens": prompt, "output_tokens": output,
    }  # fmt: skip


def test_artifact_knows_every_token_and_is_sorted_by_time(tmp_path: Path) -> None:
    path = jsonl(
        tmp_path / "a",
        artifact("x", 0, 2.0, [5, 6], [7]),
        artifact("x", 1, 4.0, [5, 6, 7, 8], []),
        artifact("y", 0, 3.0, [5], [4294967295]),
    )
    requests = read(path).requests
    assert [(request.session, request.turn, request.arrival_s) for request in requests] == [
        (0, 0, 2.0),
        (1, 0, 3.0),
        (0, 1, 4.0),
    ]
    assert (unpack(requests[1].path), requests[1].num_known_tokens) == ([5, 4294967295], 2)
    half = read(path, ReadOptions(half=Half.REPORTING)).requests
    assert [(request.session, unpack(request.path)[0]) for request in half] == [(0, 5)]


def azure(path: Path, num_rows: int) -> Path:
    rng = np.random.default_rng(1)
    rows = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
    for second, (prompt, output) in enumerate(rng.integers(1, 2000, size=(num_rows, 2)).tolist()):
        rows.append(f"2023-11-16 18:{second // 60:02}:{second % 60:02}.1234567,{prompt},{output % 300}")
    path.write_text("\n".join(rows))
    return path


def test_azure_chats_grow_only_and_keep_their_history(tmp_path: Path) -> None:
    trace = read(azure(tmp_path / "a", 600))
    assert (trace.unit_tokens, trace.requests[0].arrival_s, len(trace.requests)) == (16, 0.0, 600)
    before: dict[int, tuple[int, int, float]] = {}
    paths: dict[int, bytes] = {}
    num_later = 0
    for request in trace.requests:
        num_tokens = request.num_prompt_tokens + request.num_output_tokens
        assert request.num_known_tokens == num_tokens // 16 * 16
        assert len(request.path) // 4 == max(num_tokens // 16, -(-request.num_prompt_tokens // 16))
        if request.turn:
            num_later += 1
            turn, history, ready_s = before[request.session]
            assert request.turn == turn + 1
            assert history < request.num_prompt_tokens <= history + 1024
            assert ready_s <= request.arrival_s
            assert request.path.startswith(paths[request.session])
        before[request.session] = (request.turn, num_tokens, request.arrival_s + request.num_output_tokens / 50)
        paths[request.session] = request.path[: request.num_known_tokens // 16 * 4]
    assert 100 < num_later < 400


def test_azure_is_the_same_for_the_same_seed_only(tmp_path: Path) -> None:
    path = azure(tmp_path / "a", 300)
    assert read(path) == read(path)
    assert read(path) != read(path, ReadOptions(seed=1))


def line(time_us: int, session: str, prompt: str, output: str) -> dict[str, object]:
    return {"timestamp": time_us, "input": prompt, "output": output, "session_id": session}


def test_agent_text_is_sorted_within_a_session_and_shares_equal_text(tmp_path: Path) -> None:
    path = jsonl(
        tmp_path / "t",
        line(3_000_000, "s", "You are an agent. Go", "two"),
        line(1_000_000, "s", "You are an agent. ", "one"),
        line(9_000_000, "r", "You are a duck.", "quack"),
    )
    first, second, third = read(path).requests
    assert [(r.session, r.turn, r.arrival_s) for r in (first, second, third)] == [(0, 0, 0), (0, 1, 2), (1, 0, 8)]
    assert unpack(first.path)[:5] == unpack(second.path)[:5] != unpack(third.path)[:5]
    assert unpack(first.path)[:2] == unpack(third.path)[:2]
    assert first.num_known_tokens == first.num_prompt_tokens + first.num_output_tokens == len(first.path) // 4


def test_agent_text_without_a_prompt_is_a_bad_record(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "t", line(1, "s", "a", "b"), line(2, "s", "", "b"))
    with pytest.raises(ValueError, match="line 2: input must hold at least one token, got ''"):
        read(path)
    bad: list[str] = []
    assert len(read(path, on_bad=bad.append).requests) == len(bad) == 1


def test_agent_text_starts_sessions_at_a_rate_when_asked(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "t", line(1, "s", "a", "b"), line(2_000_001, "s", "a", "b"), line(10**15, "r", "a", "b"))
    requests = read(path, ReadOptions(session_rate=100.0)).requests
    own = [request.arrival_s for request in requests if request.session == 0]
    assert own == pytest.approx([0.0, 2.0])
    assert 0 < next(request.arrival_s for request in requests if request.session == 1) < 1


def conversation(*messages: tuple[str, str]) -> dict[str, object]:
    return {"id": "c", "conversations": [{"from": speaker, "value": said} for speaker, said in messages]}


CONVERSATIONS = [
    conversation(("human", "a b"), ("gpt", "c"), ("human", "d"), ("human", "e"), ("gpt", "f g")),
    conversation(),
    conversation(("gpt", "begun before"), ("system", "s"), ("gpt", "h"), ("human", "i"), ("gpt", "j")),
    conversation(("human", "never answered")),
    conversation(("human", "x"), ("gpt", "y")),
]


@pytest.mark.parametrize("as_lines", [False, True])
def test_sharegpt_answers_are_requests_with_all_that_was_said_before(tmp_path: Path, as_lines: bool) -> None:
    path = tmp_path / "s"
    lines = "\n".join(map(json.dumps, CONVERSATIONS))
    path.write_text(lines if as_lines else json.dumps(CONVERSATIONS, indent=1))
    trace = read(path)
    of = {(request.session, request.turn): request for request in trace.requests}
    assert sorted(of) == [(0, 0), (0, 1), (1, 0), (2, 0)]
    lengths = {key: (request.num_prompt_tokens, request.num_output_tokens) for key, request in of.items()}
    assert lengths == {(0, 0): (2, 1), (0, 1): (5, 2), (1, 0): (5, 1), (2, 0): (1, 1)}
    assert of[0, 1].path.startswith(of[0, 0].path)
    assert of[0, 1].arrival_s > of[0, 0].arrival_s == 0.0
    assert [request.session for request in read(path, ReadOptions(max_sessions=1)).requests] == [0, 0]


def test_sharegpt_is_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "s"
    path.write_text(json.dumps([conversation(("human", "schön " * 50), ("gpt", "ja"))] * 40, ensure_ascii=False))
    whole = read(path)
    monkeypatch.setattr("marconi_lab.trace.array.PIECE_BYTES", 97)
    assert read(path) == whole
    assert len(whole.requests) == 40


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (json.dumps(CONVERSATIONS)[:-30], "conversation 4: not JSON"),
        (json.dumps([CONVERSATIONS[0], 7]), "conversation 1: the record must be object, got 7"),
        (
            json.dumps([CONVERSATIONS[0], conversation(("cat", "meow"))]),
            r"conversation 1: conversations\[0\]: from must be one of system, .*, got 'cat'",
        ),
        (json.dumps([CONVERSATIONS[0], {"conversations": 5}]), "conversation 1: conversations must be array, got 5"),
    ],
)
def test_a_bad_conversation_is_named_and_can_be_skipped(tmp_path: Path, content: str, says: str) -> None:
    path = tmp_path / "s.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=rf"^[^\n]*s\.json, {says}[^\n]*$"):
        read(path)
    reports: list[str] = []
    assert read(path, on_bad=reports.append).requests
    assert len(reports) == 1


ASKED = [conversation(("human", f"question {n} \\"), ("gpt", f'{{"id": {n}}}, {{"id":')) for n in range(6)]
"""With text that looks like the beginning of a conversation."""


@pytest.mark.parametrize("piece_bytes", [61, 1 << 20])
@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ('"conversations"', '"conversations'),
        ('"conversations"', "conversations"),
        ('"conversations": [', '"conversations": '),
        ('"from": "human"', '"from": "human'),
        ('"question 2 ', '"question 2\t'),
        ('"gpt"', "gpt"),
        ('"gpt",', '"gpt"'),
        ('"id": "c"', f'"id": {"9" * 5000}'),
        ('"id": "c"', f'"id": {"[" * 100_000}'),
    ],
)
def test_behind_a_malformed_conversation_reading_goes_on_with_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, right: str, wrong: str, indent: int | None, piece_bytes: int
) -> None:
    monkeypatch.setattr("marconi_lab.trace.array.PIECE_BYTES", piece_bytes)
    elements = [json.dumps(element, indent=indent) for element in ASKED]
    assert right in elements[2]
    elements[2] = elements[2].replace(right, wrong, 1)
    path = tmp_path / "s.json"
    path.write_text(f"[{', '.join(elements)}]")
    reports: list[str] = []
    trace = read(path, on_bad=reports.append)
    assert len(trace.requests) == 5
    assert len(reports) == 1
    assert "s.json, conversation 2: " in reports[0]
    assert len(reports[0]) < 300
    with pytest.raises(ValueError, match=r"s\.json, conversation 2: "):
        read(path)


def test_conversations_that_open_with_another_key_are_found_again(tmp_path: Path) -> None:
    elements = [json.dumps({"model": n} | asked) for n, asked in enumerate(ASKED)]
    elements[1] = elements[1].replace(":", "", 2)
    path = tmp_path / "s.json"
    path.write_text(f"[{','.join(elements)}]")
    reports: list[str] = []
    assert len(read(path, on_bad=reports.append).requests) == 5
    assert len(reports) == 1


def test_what_follows_the_end_of_the_list_is_not_lost_without_a_word(tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    path.write_text(f"{json.dumps(ASKED[:2])}\n, {json.dumps(ASKED[2])}] \n")
    with pytest.raises(ValueError, match=r"conversation 2: not JSON \(the list has ended before it\)"):
        read(path)
    reports: list[str] = []
    assert len(read(path, on_bad=reports.append).requests) == 3
    assert len(reports) == 1


def test_the_default_tokenizer_keeps_every_character_and_extends_stably() -> None:
    tokens = tokenizer(None)
    begun = tokens("def resize(image, width_px):\n    return")
    assert tokens("def resize(image, width_px):\n    return image.scaled(3)")[: len(begun)] == begun
    assert len(tokens("incomprehensibilities")) == 6
    assert tokens("ä\u4e2d \t!_")
    assert tokens("a b") != tokens("ab")


def test_a_tokenizer_file_is_used(tmp_path: Path) -> None:
    library = pytest.importorskip("tokenizers")
    words = library.Tokenizer(library.models.WordLevel({"hello": 41, "world": 42}))
    words.pre_tokenizer = library.pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "tokenizer.json"))
    path = jsonl(tmp_path / "t", line(1, "s", "hello world", "world"))
    (request,) = read(path, ReadOptions(tokenizer=tmp_path / "tokenizer.json")).requests
    assert (unpack(request.path), request.num_prompt_tokens) == ([41, 42, 42], 2)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json: not a tokenizer file"):
        read(path, ReadOptions(tokenizer=tmp_path / "tokenizer.json"))


def test_a_tokenizer_file_without_its_package_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    path = jsonl(tmp_path / "t", line(1, "s", "hello", "world"))
    with pytest.raises(ValueError, match="needs the package tokenizers, which is not installed"):
        read(path, ReadOptions(tokenizer=tmp_path / "tokenizer.json"))
