"""Coding-agent sessions: identities over sessions, sub-agents, decoded tokens, drawn starts, halves."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from marconi.policy.request import Request, unpack
from marconi.replay.trace import Half, ReadOptions, read

UNIT = 4


def turn(time_s: float, num_prompt: int, num_output: int, hashes: list[int], model: str = "big") -> dict[str, Any]:
    return {
        "t": time_s, "type": "n", "model": model, "in": num_prompt, "out": num_output, "hash_ids": hashes,
        "api_time": 1.0 + num_prompt, "think_time": 0.0, "stop": "",
    }  # fmt: skip


def session(*requests: dict[str, Any], tool: int = 6, system: int = 3, **changed: Any) -> dict[str, Any]:
    return {
        "id": "x", "models": [], "block_size": UNIT, "hash_id_scope": "local", "tool_tokens": tool,
        "system_tokens": system, "requests": list(requests),
    } | changed  # fmt: skip


def subagent(end_s: float, duration_ms: float | None, *requests: dict[str, Any], tool: int = 4) -> dict[str, Any]:
    return {
        "t": end_s, "type": "subagent", "duration_ms": duration_ms, "tool_tokens": tool, "system_tokens": 0,
        "requests": list(requests),
    }  # fmt: skip


def folder(path: Path, *sessions: dict[str, Any]) -> Path:
    path.mkdir(exist_ok=True)
    for index, content in enumerate(sessions):
        (path / f"trace_{index:04}.json").write_text(json.dumps(content))
    return path


def of_session(requests: tuple[Request, ...], number: int) -> list[Request]:
    return [request for request in requests if request.session == number]


def test_the_front_is_shared_by_sessions_with_the_same_pair_of_lengths(tmp_path: Path) -> None:
    path = folder(
        tmp_path / "t",
        session(turn(0, 17, 1, [1, 2, 3, 4])),
        session(turn(0, 18, 1, [9, 7, 8, 5])),
        session(turn(0, 19, 1, [1, 2, 3, 4]), tool=7, system=2),
    )
    first, second, other = (unpack(of_session(read(path).requests, n)[0].path) for n in range(3))
    # 6 + 3 tokens are two whole blocks of four.
    assert first[:2] == second[:2]
    assert len({*first, *second, *other}) == 4 + 2 + 4
    assert {*first, *second, *other} == set(range(10))
    own = read(path, ReadOptions(system_prompts="own")).requests
    assert len({block for request in own for block in unpack(request.path)}) == 12


def test_a_subagent_is_a_session_that_starts_when_it_was_launched(tmp_path: Path) -> None:
    path = folder(
        tmp_path / "t",
        session(
            turn(0, 17, 1, [1, 2, 3, 4]),
            subagent(30.0, 20_000, turn(0, 9, 1, [11, 12]), turn(5, 13, 1, [11, 12, 13])),
            subagent(40.0, None, turn(0, 9, 1, [11, 14]), tool=5),
            turn(50, 21, 1, [1, 2, 3, 4, 5]),
        ),
        session(subagent(7.0, 2000, turn(0, 9, 1, [1, 2])), turn(8, 9, 1, [3, 4]), turn(8, 9, 1, [3, 4]), tool=5),
    )
    requests = read(path, ReadOptions(session_rate=1e9)).requests
    times = [[round(r.arrival_s, 3) for r in of_session(requests, number)] for number in range(5)]
    assert times == [[0, 50], [10, 15], [40], [8, 8], [5]]
    assert [r.turn for r in of_session(requests, 1)] == [0, 1]
    # Blocks have one name within a session, and a sub-agent's front is shared over sessions.
    assert unpack(of_session(requests, 1)[0].path)[0] == unpack(of_session(requests, 2)[0].path)[0]
    assert unpack(of_session(requests, 1)[0].path)[0] == unpack(of_session(requests, 4)[0].path)[0]
    assert unpack(of_session(requests, 3)[0].path)[0] != unpack(of_session(requests, 0)[0].path)[0]


@pytest.mark.parametrize(
    ("following", "path", "known"),
    [
        ([1, 2, 3, 4, 5], [1, 2, 3, 4], 16),  # 9 + 8 = 17 tokens are four blocks
        ([1, 2, 3, 4], [1, 2, 3, 4], 16),
        ([1, 9, 3, 4, 5], [1, 2], 8),  # the prompt itself has changed
        (None, [1, 2], 8),
    ],
)
def test_decoded_tokens_are_known_when_the_next_prompt_goes_on(
    tmp_path: Path, following: list[int] | None, path: list[int], known: int
) -> None:
    turns = [turn(0, 9, 8, [1, 2])]
    if following is not None:
        turns.append(turn(1, 4 * len(following) + 1, 1, following))
    trace = read(folder(tmp_path / "t", session(*turns, tool=0, system=0)))
    assert [block + 1 for block in unpack(trace.requests[0].path)] == path
    assert trace.requests[0].num_known_tokens == known


def test_a_next_prompt_too_short_for_the_output_leaves_it_unknown(tmp_path: Path) -> None:
    path = folder(tmp_path / "t", session(turn(0, 9, 8, [1, 2]), turn(1, 16, 1, [1, 2, 3, 4])))
    assert read(path).requests[0].num_known_tokens == 8


def test_a_named_partial_block_is_in_the_path_but_not_known(tmp_path: Path) -> None:
    (request,) = read(folder(tmp_path / "t", session(turn(0, 9, 1, [1, 2, 3])))).requests
    assert (len(unpack(request.path)), request.num_known_tokens) == (3, 8)


def test_models_are_one_space_or_a_namespace_each(tmp_path: Path) -> None:
    path = folder(tmp_path / "t", session(turn(0, 9, 8, [1, 2]), turn(1, 20, 1, [1, 2, 3, 4, 5], model="small")))
    assert [(r.namespace, r.num_known_tokens) for r in read(path).requests] == [(0, 16), (0, 20)]
    separate = read(path, ReadOptions(models="separate")).requests
    assert [(r.namespace, r.num_known_tokens) for r in separate] == [(0, 8), (1, 20)]


def test_sessions_start_as_a_poisson_process_with_the_seed(tmp_path: Path) -> None:
    path = folder(tmp_path / "t", *(session(turn(3, 9, n, [1, 2]), turn(5, 9, n, [1, 2])) for n in range(400)))
    requests = read(path, ReadOptions(session_rate=0.5, seed=3)).requests
    starts = np.array([of_session(requests, number)[0].arrival_s for number in range(400)])
    assert (np.diff(starts) > 0).all()
    assert np.diff(starts).mean() == pytest.approx(2.0, rel=0.2)
    assert np.diff(starts).std() == pytest.approx(2.0, rel=0.3)
    assert of_session(requests, 7)[1].arrival_s - starts[7] == pytest.approx(2.0)
    assert [r.arrival_s for r in requests] == sorted(r.arrival_s for r in requests)
    assert read(path, ReadOptions(session_rate=0.5, seed=3)).requests == requests
    assert read(path, ReadOptions(session_rate=0.5, seed=4)).requests != requests


def test_halves_are_disjoint_and_keep_a_session_and_its_copy_together(tmp_path: Path) -> None:
    sizes = [9, 10, 9, 11, 8, 10]
    path = folder(tmp_path / "t", *(session(turn(0, size, 1, [1, 2]), tool=5) for size in sizes))
    sizes_of = {half: [r.num_prompt_tokens for r in read(path, ReadOptions(half=half)).requests] for half in Half}
    assert sizes_of[Half.ALL] == sizes
    assert sizes_of[Half.TUNING] == [9, 9, 11]
    assert sizes_of[Half.REPORTING] == [10, 8, 10]
    assert [r.session for r in read(path, ReadOptions(half=Half.REPORTING, max_sessions=2)).requests] == [0, 1]


def test_large_local_ids_cost_no_large_table(tmp_path: Path) -> None:
    path = folder(tmp_path / "t", session(turn(0, 9, 1, [4_000_000_000, 3]), turn(1, 9, 1, [4_000_000_000, 4])))
    assert [unpack(request.path) for request in read(path).requests] == [[0, 1], [0, 2]]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (
            session(turn(5, 9, 1, [1, 2]), turn(4, 9, 1, [1, 2])),
            r"requests\[1\]: t must be at least 5 as in the record before it, got 4",
        ),
        (session(turn(0, -9, 1, [1, 2])), r"requests\[0\]\.in must be int >= 1, got -9"),
        (session(turn(0, 9, 1, [1])), r"requests\[0\]: hash_ids must hold 3 for 9 tokens in blocks of 4, got 1"),
        (session(turn(0, 9, 1, [1, -2])), r"requests\[0\]\.hash_ids\[1\] must be int >= 0, got -2"),
        (session(turn(0, 9, 1, [1, 2**33])), r"requests\[0\]\.hash_ids\[1\] must be int <= 4294967295, got 8589934592"),
        (
            session(subagent(3.0, None, turn(0, 9, 1, ["a", 2]))),
            r"requests\[0\]\.requests\[0\]\.hash_ids\[0\] must be int, got 'a'",
        ),
        (
            session(turn(0, 9, 1, [1, 2]) | {"type": "zz"}),
            r"requests\[0\]\.type must be n, s or, not within itself, subagent, got 'zz'",
        ),
        (session(turn(0, 9, 1, [1, 2]) | {"type": None}), r"requests\[0\]\.type must be str, got None"),
        (
            session(subagent(3.0, None, subagent(3.0, None, turn(0, 9, 1, [1, 2])))),
            r"requests\[0\]\.requests\[0\]\.type must be n, s or, .*, got 'subagent'",
        ),
        (
            session(turn(0, 9, 1, [1, 2]), tool=7),
            r"tool_tokens \+ system_tokens must be at most 9, its longest prompt, got 10",
        ),
        (
            session(subagent(3.0, None, turn(0, 9, 1, [1, 2]), tool=10)),
            r"requests\[0\]\.tool_tokens \+ system_tokens must be at most 9",
        ),
        (session(turn(10**400, 9, 1, [1, 2])), r"requests\[0\]\.t must be in range, got 1000\d+\.\.\."),
        (session(turn(0, 9, 10**400, [1, 2])), r"requests\[0\]\.out must be int <= 16777216, got 1000\d+\.\.\."),
        (
            session(subagent(3.0, 1e300, turn(0, 9, 1, [1, 2]))),
            r"requests\[0\]\.duration_ms must be float <= 1000000000000000\.0, got 1e\+300",
        ),
        (session(), "requests must hold a request, got none"),
        (session(turn(0, 9, 1, [1, 2]), tool=-1), "tool_tokens must be int >= 0, got -1"),
        (
            session(turn(0, 9, 1, [1, 2]), block_size=8),
            "block_size must be 4 as asked for or as in the sessions before, got 8",
        ),
        (session(turn(0, 9, 1, [1, 2]), hash_id_scope="global"), "hash_id_scope must be 'local', got 'global'"),
    ],
)
def test_a_session_with_a_fault_is_named_and_skipped_whole(tmp_path: Path, content: dict[str, Any], says: str) -> None:
    good = session(turn(0, 17, 1, [1, 2, 3, 4]))
    path = folder(tmp_path / "t", good, content, good)
    with pytest.raises(ValueError, match=rf"^[^\n]*trace_0001\.json: {says}[^\n]*$"):
        read(path)
    reports: list[str] = []
    trace = read(path, on_bad=reports.append)
    assert len(reports) == 1
    assert {block for request in trace.requests for block in unpack(request.path)} == set(range(6))


def test_a_session_cut_off_is_named(tmp_path: Path) -> None:
    path = folder(tmp_path / "t", session(turn(0, 9, 1, [1, 2])))
    (path / "trace_0001.json").write_text(json.dumps(session(turn(0, 9, 1, [1, 2])))[:-5])
    with pytest.raises(ValueError, match=r"trace_0001\.json: not JSON .*cut off"):
        read(path)
