"""A record of served requests is a trace of their lengths and shared prefixes, without tokens, and raises nothing."""

import json
import logging
import os
import random
import re
import stat
import threading
from array import array
from collections.abc import Iterator, Sequence
from itertools import combinations, takewhile
from pathlib import Path
from typing import Any, Final, TypeVar

import pytest

from marconi import record
from marconi.policy.request import unpack
from marconi.record import BLOCK_TOKENS, Ended, TraceRecorder
from marconi.replay.trace import read

FLAG: Final = "--marconi-record"
FIRST_TOKEN: Final = 50_000
KEYS: Final = {
    *("timestamp", "input_length", "output_length", "cached_tokens"),
    *("block_tokens", "hash_ids", "output_hash_ids"),
}
T = TypeVar("T")


def served(
    recorder: TraceRecorder,
    prompt: Sequence[int],
    output: Sequence[int] | None = (7,),
    arrival_s: float = 0.0,
    namespace: int = 0,
    num_cached_tokens: int = 0,
) -> None:
    """Such a request has ended; without an `output` it is not known which tokens the two of its answer are."""
    ids = array("q", [*prompt, *(output or ())]).tobytes()
    num_output = 2 if output is None else len(output)
    recorder.add(lambda: Ended(arrival_s, len(prompt), num_output, num_cached_tokens, namespace, ids))


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def num_shared(one: Sequence[T], other: Sequence[T]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def sequences(seed: int) -> Iterator[tuple[list[int], list[int]]]:
    """Prompts that begin like earlier ones, answers included, and their answers."""
    rng = random.Random(seed)  # noqa: S311 - a workload, not a secret
    earlier: list[list[int]] = [[]]
    for _ in range(30):
        old, lengths = rng.choice(earlier), [rng.randrange(1, 300), rng.choice((0, 1, rng.randrange(200)))]
        new, output = ([rng.randrange(FIRST_TOKEN, 2 * FIRST_TOKEN) for _ in range(length)] for length in lengths)
        prompt = old[: rng.choice((len(old), rng.randrange(len(old) + 1)))] + new
        earlier.append(prompt + output)
        yield prompt, output


@pytest.mark.parametrize("seed", range(5))
def test_a_record_has_the_lengths_and_the_shared_blocks_of_what_was_served(tmp_path: Path, seed: int) -> None:
    path, requests = tmp_path / "served", [*sequences(seed)]
    recorder = TraceRecorder(path, started_s=100.0, flag=FLAG)
    ends = random.Random(seed).sample(range(len(requests)), len(requests))  # noqa: S311 - a workload
    for number in ends:
        served(recorder, *requests[number], arrival_s=100.0 + number)
    recorder.close()
    trace = read(path)
    assert trace.unit_tokens == BLOCK_TOKENS
    assert [
        (each.arrival_s, each.num_prompt_tokens, each.num_output_tokens, each.num_known_tokens)
        for each in trace.requests
    ] == [
        (number, len(prompt), len(output), (len(prompt) + len(output)) // BLOCK_TOKENS * BLOCK_TOKENS)
        for number, (prompt, output) in enumerate(requests)
    ]
    whole = [unpack(each.path)[: each.num_known_tokens // BLOCK_TOKENS] for each in trace.requests]
    tokens = [prompt + output for prompt, output in requests]
    for one, other in combinations(range(len(requests)), 2):
        assert num_shared(whole[one], whole[other]) == num_shared(tokens[one], tokens[other]) // BLOCK_TOKENS


def test_a_file_holds_no_token_and_no_hash_that_another_start_would_give(tmp_path: Path) -> None:
    found: list[set[int]] = []
    for path in (tmp_path / "one", tmp_path / "two"):
        recorder = TraceRecorder(path, 0.0, FLAG)
        # A block of one token a prompt, which would be the easiest to guess.
        for token in range(FIRST_TOKEN, FIRST_TOKEN + 100):
            served(recorder, [token], num_cached_tokens=1)
        recorder.close()
        assert all(line.keys() == KEYS for line in lines(path))
        numbers = {int(each) for each in re.findall(r"\d+", path.read_text())}
        assert not numbers & {*range(FIRST_TOKEN, FIRST_TOKEN + 100)}
        found.append({each for line in lines(path) for each in line["hash_ids"]})
        assert len(found[-1]) == 100
    assert not found[0] & found[1]


def test_of_answers_that_are_not_known_a_record_has_lengths_alone(tmp_path: Path) -> None:
    recorder = TraceRecorder(tmp_path / "served", 0.0, FLAG)
    served(recorder, range(100), None)
    served(recorder, range(150), None)
    recorder.close()
    assert all(line.keys() == KEYS - {"output_hash_ids"} for line in lines(tmp_path / "served"))
    trace = read(tmp_path / "served")
    assert trace.unit_tokens == BLOCK_TOKENS
    assert [(each.num_prompt_tokens, each.num_output_tokens, each.num_known_tokens) for each in trace.requests] == [
        (100, 2, 64),
        (150, 2, 128),
    ]
    assert num_shared(*(unpack(each.path) for each in trace.requests)) == 1


def test_name_spaces_share_nothing(tmp_path: Path) -> None:
    recorder = TraceRecorder(tmp_path / "served", 0.0, FLAG)
    for namespace in (0, 1, 2**128 - 1, 0):
        served(recorder, range(200), namespace=namespace)
    recorder.close()
    first, *others, last = (unpack(each.path) for each in read(tmp_path / "served").requests)
    assert first == last
    assert not any(set(first) & set(each) for each in others)
    assert not set(others[0]) & set(others[1])


def test_two_files_of_bounded_size_are_kept_for_their_owner_alone(tmp_path: Path) -> None:
    path, before = tmp_path / "served", tmp_path / "served.1"
    path.write_text("of the last start\n")
    TraceRecorder(path, 0.0, FLAG).close()
    assert (path.read_text(), before.read_text()) == ("", "of the last start\n")
    recorder = TraceRecorder(path, 0.0, FLAG, max_file_bytes=2_000)
    for number in range(50):
        served(recorder, range(number + 1, number + 300), arrival_s=number)
    recorder.close()
    assert {*tmp_path.iterdir()} == {path, before}
    assert [line["timestamp"] for line in (*lines(before), *lines(path))][-1] == 49_000
    for each in (path, before):
        assert 0 < each.stat().st_size <= 2_000
        assert stat.S_IMODE(each.stat().st_mode) == 0o600
        assert read(each).requests


def test_a_folder_that_is_gone_ends_the_record_with_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    recorder = TraceRecorder(tmp_path / "gone" / "served", 0.0, FLAG)
    for _ in range(3):
        served(recorder, range(100))
    recorder.close()
    (line,) = caplog.messages
    assert line.startswith(f"marconi: --marconi-record {tmp_path}/gone/served: FileNotFoundError: ")


def test_a_disk_that_is_full_leaves_whole_lines_and_one_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, write = tmp_path / "served", os.write
    room = [600]

    def until_full(file: int, data: bytes) -> int:
        room[0] -= (num_written := write(file, data[: room[0]]))
        return num_written

    monkeypatch.setattr(record.os, "write", until_full)
    recorder = TraceRecorder(path, 0.0, FLAG)
    for _ in range(20):
        served(recorder, range(100))
    recorder.close()
    served(recorder, range(100))
    recorder.close()
    assert room == [0]
    assert 0 < len(lines(path)) < 20
    assert len(caplog.messages) == 1
    assert "the disk is full" in caplog.text


def test_what_does_not_fit_into_the_queue_is_counted_and_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_open, begun = threading.Event(), record._begun

    def late(path: Path) -> int:
        is_open.wait()
        return begun(path)

    monkeypatch.setattr(record, "_begun", late)
    recorder = TraceRecorder(tmp_path / "served", 0.0, FLAG, max_waiting_bytes=8 * 302)
    with caplog.at_level(logging.WARNING):
        for num_tokens in (100, 200, 1, 2):
            served(recorder, range(num_tokens))
    is_open.set()
    recorder.close()
    assert recorder.num_dropped == 2
    assert caplog.messages == ["marconi: --marconi-record cannot keep up: some requests are left out"]
    assert [line["input_length"] for line in lines(tmp_path / "served")] == [100, 200]
