"""What is written can be read again; a token trace can be cut into blocks."""

import dataclasses
from pathlib import Path

import pytest

from marconi.policy.request import Request, Trace, pack, unpack
from marconi.replay.trace import Demand, ReadOptions, generate, in_blocks, preset, read, write

TRACE = generate(preset("agent-drop"), Demand(num_sessions=4, session_rate=1.0, seed=5))


def request(tokens: list[int], num_prompt: int) -> Request:
    return Request(pack(tokens), num_prompt, len(tokens) - num_prompt, len(tokens), 0.0)


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.gz"])
def test_the_artifacts_format_keeps_a_token_trace(tmp_path: Path, name: str) -> None:
    write(TRACE, tmp_path / name, "artifact")
    # Sessions are numbered by arrival in a file and by start in the generator: here these are the same.
    assert read(tmp_path / name).requests == TRACE.requests


def test_the_artifacts_format_keeps_namespaces(tmp_path: Path) -> None:
    spaces = dataclasses.replace(
        TRACE, requests=tuple(dataclasses.replace(each, namespace=each.session % 3) for each in TRACE.requests)
    )
    write(spaces, tmp_path / "trace", "artifact")
    assert read(tmp_path / "trace").requests == spaces.requests


def test_mooncake_keeps_lengths_times_and_shared_blocks(tmp_path: Path) -> None:
    write(TRACE, tmp_path / "trace.jsonl", "mooncake")
    found = read(tmp_path / "trace.jsonl").requests
    cut = in_blocks(TRACE, 512).requests
    assert [(r.num_prompt_tokens, r.num_output_tokens) for r in found] == [
        (r.num_prompt_tokens, r.num_output_tokens) for r in TRACE.requests
    ]
    assert [r.arrival_s for r in found] == pytest.approx([r.arrival_s for r in TRACE.requests], abs=0.0006)
    whole = [r.num_prompt_tokens // 512 for r in found]

    def shared(requests: tuple[Request, ...]) -> list[list[int]]:
        paths = [unpack(r.path)[:count] for r, count in zip(requests, whole, strict=True)]
        return [[sum(a == b for a, b in zip(left, right, strict=False)) for right in paths] for left in paths]

    assert shared(found) == shared(cut)


def test_a_block_trace_written_as_mooncake_reads_as_itself(tmp_path: Path) -> None:
    write(TRACE, tmp_path / "first", "mooncake")
    trace = read(tmp_path / "first")
    write(trace, tmp_path / "second", "mooncake")
    assert read(tmp_path / "second").requests == trace.requests
    assert (tmp_path / "first").read_bytes() == (tmp_path / "second").read_bytes()


def test_equal_traces_are_written_as_equal_bytes(tmp_path: Path) -> None:
    for name in ("a.gz", "b.gz"):
        write(TRACE, tmp_path / name, "artifact")
    assert (tmp_path / "a.gz").read_bytes() == (tmp_path / "b.gz").read_bytes()


def test_requests_without_a_session_stay_apart(tmp_path: Path) -> None:
    write(Trace("t", 1, (request([1, 2], 1), request([1, 3], 1))), tmp_path / "t", "artifact")
    assert [r.session for r in read(tmp_path / "t").requests] == [0, 1]


def test_what_a_format_cannot_hold_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    spaces = dataclasses.replace(TRACE, requests=(dataclasses.replace(TRACE.requests[0], namespace=1),))
    blocks = in_blocks(TRACE, 64)
    for trace, form, says in (
        (spaces, "mooncake", "no namespaces for the format mooncake"),
        (blocks, "artifact", "units of 64 tokens"),
        (TRACE, "vhs", "must be one of mooncake, artifact"),
    ):
        with pytest.raises(ValueError, match=says):
            write(trace, tmp_path / "t", form)
        assert not list(tmp_path.iterdir())


def test_blocks_stand_for_their_tokens_and_all_before_them() -> None:
    trace = Trace(
        "t",
        1,
        (
            request([1, 2, 3, 4, 5], 3),
            request([1, 2, 3, 9, 5], 3),
            request([7, 7, 3, 4, 7, 7], 5),
            request([1, 2, 3], 3),
            request([1, 2, 3, 4], 4),
        ),
    )
    cut = in_blocks(trace, 2)
    assert cut.unit_tokens == 2
    # A prompt's partial block is in the path only where the output does not complete it.
    assert [unpack(r.path) for r in cut.requests] == [[0, 1], [0, 2], [3, 4, 5], [0, 6], [0, 1]]
    assert [r.num_known_tokens for r in cut.requests] == [4, 4, 6, 2, 4]
    with pytest.raises(ValueError, match="must be a trace of single tokens, got units of 2 tokens"):
        in_blocks(cut, 2)


def test_a_block_size_survives_the_file(tmp_path: Path) -> None:
    prompts = Trace("t", 64, (Request(pack([0, 1]), 100, 5, 64, 0.0),))
    write(prompts, tmp_path / "t", "mooncake")
    assert read(tmp_path / "t", ReadOptions(block_tokens=64)).requests == prompts.requests
