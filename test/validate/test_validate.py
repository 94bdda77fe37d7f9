"""`marconi validate` finds a server that caches what its replay says, one that does not, and says so; bad input."""

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from marconi import cli
from marconi.engine.reports.status import Use
from marconi.policy.request import Request, Trace, pack
from marconi.replay.trace import Demand, generate, in_blocks, preset, write
from marconi.validate.prompts import Prompts

from .fake_server import CACHE, Fake, honest, serving, with_settings

CHATS = "generate:chat-short"
NUM_REQUESTS = 60
SENT = (CHATS, "--max-sessions", "8", "--max-requests", str(NUM_REQUESTS))
ONE_POOL = replace(CACHE, joint_bytes=Use(6000 * CACHE.kv_bytes_per_token + 14 * CACHE.state_bytes, 0, 0))
PAGES = with_settings(page_tokens=16, ends="what SGLang tracked last", num_working_slots=3, num_lent_slots=0)
CACHES = {
    "best": CACHE,
    "one-pool": ONE_POOL,
    "pages": replace(PAGES, kv_tokens=Use(6400, 0, 0), state_slots=Use(20, 0, 0)),
}


def run(fake: Fake, *argv: str) -> int:
    with serving(fake) as url:
        return cli.main(["validate", url, *argv])


@pytest.mark.parametrize("cache", CACHES.values(), ids=CACHES)
def test_a_server_whose_cache_is_the_replay_is_found_equal(
    cache: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "both.json"
    fake = Fake(cache, honest)
    assert run(fake, *SENT, "--json", str(file)) == 0
    assert "The prediction holds: of " in capsys.readouterr().out
    both = json.loads(file.read_text())
    assert both["agrees"]
    assert both["num_differing"] == 0
    assert both["num_requests"] == fake.num_served > 0.9 * NUM_REQUESTS
    assert 0 < both["num_cached_tokens"] == both["num_predicted_tokens"] < both["num_prompt_tokens"]
    assert sum(fake.replay.counters.num_evictions.values()) > 20


def test_a_server_that_lies_of_one_request_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    """The control: one token of one request is enough, and the request is named, with why it missed."""
    fake = Fake(CACHE, lambda number, num_cached: num_cached + (number == 30))
    assert run(fake, *SENT) == 1
    out = capsys.readouterr().out
    assert "The prediction does not hold: 1 of 60 requests differ." in out
    (line,) = (line for line in out.splitlines() if ": the server " in line)
    assert "-30: the server " in line
    assert "the replay " in line
    assert line.count("(hit ") == 2


def test_another_alpha_is_found() -> None:
    """The control: what the server says of its policy matters."""
    fake = Fake(replace(CACHE, eviction="marconi", alpha=0.0), honest, alpha=20.0)
    assert run(fake, *SENT) == 1


def test_a_tolerance_is_of_the_prompt_tokens_in_all(capsys: pytest.CaptureFixture[str]) -> None:
    def lie(number: int, num_cached: int) -> int:
        return num_cached + (number == 30)

    assert run(Fake(CACHE, lie), *SENT, "--tolerance", "0.1") == 0
    assert "0.00 points of the prompt tokens apart, and 0.1 are allowed" in capsys.readouterr().out
    assert run(Fake(CACHE, lambda _, num_cached: num_cached + 20), *SENT, "--tolerance", "0.1") == 1


def test_requests_beside_each_other_are_replayed_in_the_server_s_order(capsys: pytest.CaptureFixture[str]) -> None:
    """The server takes them one after the other, in whatever order they reach it: nothing differs."""
    assert run(Fake(CACHE, honest), *SENT, "--concurrency", "4", "--tolerance", "0") == 0
    assert " 0.00 points of the prompt tokens apart" in capsys.readouterr().out


def test_what_the_server_refuses_is_left_out_of_both(capsys: pytest.CaptureFixture[str]) -> None:
    fake = Fake(CACHE, honest)
    fake.max_prompt_tokens = 1000
    assert run(fake, *SENT) == 0
    told = capsys.readouterr()
    assert "marconi: the server refused " in told.err
    assert fake.num_served < NUM_REQUESTS
    fake.max_prompt_tokens = 0
    assert run(fake, *SENT) == 2
    assert "answers none of the trace's 60 requests" in capsys.readouterr().err


def test_what_others_sent_is_remarked(capsys: pytest.CaptureFixture[str]) -> None:
    fake = Fake(CACHE, honest)

    def lie(_: int, num_cached: int) -> int:
        # As if somebody else had been served as well.
        fake.num_served += 1
        return num_cached

    fake.lie = lie
    assert run(fake, *SENT) == 0
    assert f"has served {NUM_REQUESTS} requests of others meanwhile" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("fake", "argv", "message"),
    [
        (Fake(CACHE, honest, settings=None), SENT, "does not say the settings of its cache"),
        (Fake(CACHE, honest, why_not_planned="a hook failed"), SENT, "it plans no states (a hook failed)"),
        (Fake(CACHE, honest, eviction="tail"), SENT, "--marconi-eviction tail depends on prefill times"),
        (Fake(CACHE, honest, host={}), SENT, "loads from a host tier depend on"),
        (Fake(with_settings(admission="chunk-end"), honest), SENT, "--marconi-admission chunk-end"),
        (Fake(with_settings(ends="what the last verify step kept"), honest), SENT, "by accepting drafts"),
        (Fake(CACHE, honest), (*SENT, "--model", "no-such-model"), "--model must name the server's model"),
        (Fake(CACHE, honest), ("no-such-file",), "no-such-file"),
        (Fake(CACHE, honest), (*SENT, "--json", "/no/such/folder/file"), "must be in an existing folder"),
    ],
)
def test_bad_input_is_one_line(
    fake: Fake, argv: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(fake, *argv) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("marconi: error: ")
    assert message in line


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("127.0.0.1:1", CHATS), "does not answer"),
        (("ftp://there", CHATS), "must be http://HOST:PORT"),
    ],
)
def test_an_address_without_a_server_is_one_line(
    argv: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["validate", *argv]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


@pytest.mark.parametrize("points", ["-1", "101", "few"])
def test_a_tolerance_is_a_number_of_points(points: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["validate", "there", CHATS, "--tolerance", points])
    assert ended.value.code == 2
    assert f"must be a number of points from 0 to 100, got '{points}'" in capsys.readouterr().err


def test_a_server_that_does_not_flush_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    fake = Fake(CACHE, honest)
    fake.flush_code = 403
    assert run(fake, *SENT) == 2
    assert "does not flush its cache: 403" in capsys.readouterr().err


# Others

USED = ({"num_running": 1}, {"latest": [("chat", 59.0)]})


def used(**fields: Any) -> Fake:
    fake = Fake(CACHE, honest)
    vars(fake).update(fields)
    return fake


@pytest.mark.parametrize("fields", USED)
def test_a_server_that_others_use_is_not_flushed_unless_a_flag_agrees(
    fields: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    fake = used(**fields)
    assert run(fake, *SENT) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        "marconi: error: URL must be a server that nobody else uses, or --flush be given, got requests "
    )
    assert (fake.num_flushes, fake.num_served) == (0, 0)
    assert run(fake, *SENT, "--flush") == 0
    assert fake.num_flushes == 1


@pytest.mark.parametrize(("answer", "status"), [("\n", 2), ("", 2), ("no\n", 2), ("y\n", 0), ("Yes\n", 0)])
def test_on_a_terminal_it_asks_and_takes_anything_but_yes_for_no(
    answer: str, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    terminal = io.StringIO(answer)
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr("sys.stdin", terminal)
    fake = used(num_running=2)
    assert run(fake, *SENT) == status
    assert fake.num_flushes == (status == 0)
    asked = "requests running or waiting: 2, begun by others within the last minute: 0. Flush its cache? [y/N] "
    assert asked in capsys.readouterr().err


def test_old_requests_and_those_of_an_earlier_run_are_no_others() -> None:
    fake = used(latest=[("chat", 61.0)])
    assert run(fake, *SENT) == 0
    assert run(fake, *SENT) == 0
    assert fake.num_flushes == 2


# Prompts


def trace_of(*requests: Request, unit_tokens: int = 1) -> Trace:
    return Trace("made", unit_tokens, requests)


def test_ids_that_the_model_knows_are_sent_as_they_are(tmp_path: Path) -> None:
    trace = trace_of(Request(pack([5, 6, 7, 8]), 3, 1, 4, 0.0))
    assert Prompts(trace, 100).of(0) == [5, 6, 7]
    write(trace, tmp_path / "trace.jsonl", "artifact")
    fake = Fake(CACHE, honest)
    assert run(fake, str(tmp_path / "trace.jsonl")) == 0
    assert fake.prompts == [[5, 6, 7]]


def test_other_ids_are_drawn_so_that_prompts_agree_as_far_as_those_of_the_trace() -> None:
    trace = generate(preset("agent-append"), Demand(num_sessions=3, session_rate=1.0, seed=1))
    prompts = Prompts(trace, 4_000)
    drawn = [prompts.of(index) for index in range(len(trace.requests))]
    for one, other in zip(trace.requests, trace.requests[1:], strict=False):
        first, second = (each.path[: 4 * each.num_prompt_tokens] for each in (one, other))
        num_shared = (
            next(
                (i for i in range(0, min(len(first), len(second)), 4) if first[i : i + 4] != second[i : i + 4]),
                min(len(first), len(second)),
            )
            // 4
        )
        left, right = (drawn[trace.requests.index(each)] for each in (one, other))
        assert left[:num_shared] == right[:num_shared]
        assert left[num_shared : num_shared + 3] != right[num_shared : num_shared + 3] or num_shared == min(
            len(left), len(right)
        )
    assert all(250 <= token < 3_000 for prompt in drawn for token in prompt)


def test_equal_blocks_are_equal_tokens_and_what_is_not_named_is_the_request_s_own() -> None:
    requests = (
        Request(pack([1, 2]), 7, 2, 4, 0.0),
        Request(pack([1, 3]), 7, 2, 4, 1.0),
        Request(pack([1]), 7, 2, 4, 2.0),
    )
    prompts = Prompts(trace_of(*requests, unit_tokens=4), 3000)
    first, second, third = map(prompts.of, range(3))
    assert first[:4] == second[:4] == third[:4]
    assert len({tuple(each[4:]) for each in (first, second, third)}) == 3
    assert {len(each) for each in (first, second, third)} == {7}


def test_a_block_trace_is_sent_too() -> None:
    trace = generate(preset("chat-short"), Demand(num_sessions=3, session_rate=1.0, seed=1))
    prompts = Prompts(in_blocks(trace, 16), 3000)
    assert [len(prompts.of(index)) for index in range(9)] == [each.num_prompt_tokens for each in trace.requests[:9]]
    assert run(Fake(CACHE, honest), *SENT, "--block-tokens", "16") == 0


def test_a_conversation_goes_on_from_what_the_server_said() -> None:
    turns = (
        Request(pack([1, 2, 3, 4, 5]), 2, 3, 5, 0.0, session=0),
        Request(pack([1, 2, 3, 4, 5, 6, 7]), 6, 1, 7, 1.0, session=0, turn=1),
        Request(pack([1, 2, 3, 9, 5, 6, 7]), 6, 1, 7, 2.0, session=0, turn=2),
        Request(pack([1, 2, 3, 4, 5, 6, 7]), 6, 1, 7, 3.0, session=1),
    )
    prompts = Prompts(trace_of(*turns), 100)
    prompts.answered(0, [50, 51])
    assert prompts.of(1) == [1, 2, 50, 51, 5, 6]
    assert prompts.of(2) == [1, 2, 3, 9, 5, 6], "not what was answered"
    assert prompts.of(3) == [1, 2, 3, 4, 5, 6], "another session"


def test_a_vocabulary_too_small_to_draw_from_is_refused() -> None:
    with pytest.raises(ValueError, match="the vocabulary must have at least 3 tokens, got 2"):
        Prompts(trace_of(Request(pack([5]), 1, 1, 1, 0.0)), 2)
