"""A shadow beside a server: finds the better division, agrees with a direct replay, ends with its stdin."""

import json
import random
import subprocess
import sys
from array import array
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from marconi.baselines.hindsight.reuse import Reuse
from marconi.policy.base import Costs
from marconi.policy.catalog import PolicySpec
from marconi.policy.record import ServedRequest, ServerMemory, write_frame
from marconi.policy.request import Request, Trace, pack
from marconi.replay import serial
from marconi.replay.policies import CacheConfig, build
from marconi.replay.shadow import (
    BLOCK_TOKENS,
    NUM_NEW,
    RATIOS,
    HashedRequest,
    Option,
    Shadow,
    TokensAlone,
    Window,
    options,
    sentence,
    trace_of,
)
from marconi.replay.trace import in_blocks

KV_BYTES, STATE_BYTES = 1000, 200_000
STATES_SCARCE = ServerMemory("best", KV_BYTES, STATE_BYTES, 128 * BLOCK_TOKENS, 6, 0, 0, True, True, 1e9, 0.0)
"""Room for many more tokens than states: prompts are of 2 to 6 blocks."""
JOINT = replace(STATES_SCARCE, num_tokens=0, num_slots=0, joint_bytes=9_000_000)


def served(num_requests: int = NUM_NEW, seed: int = 0) -> list[ServedRequest]:
    """Twelve conversations in an order that is drawn, of prompts that begin with one of twelve contexts."""
    draw = random.Random(seed)  # noqa: S311 - nothing secret
    requests = []
    for index in range(num_requests):
        context = draw.randrange(12)
        prompt = [1000 * context + token for token in range(2 * BLOCK_TOKENS)]
        prompt += [draw.randrange(50_000, 10**12) for _ in range(draw.randrange(1, 3 * BLOCK_TOKENS))]
        output = [draw.randrange(50_000) for _ in range(draw.randrange(1, BLOCK_TOKENS))]
        ids = array("q", prompt + output).tobytes()
        requests.append(ServedRequest(2.0 * index, len(prompt), len(output), 64, 1 << 100 if index % 7 else 0, ids))
    return requests


def as_tokens(requests: list[ServedRequest]) -> Trace:
    """The same as a trace of single tokens."""
    numbers: dict[int, int] = {}
    made = []
    for each in requests:
        ids = [numbers.setdefault(token, len(numbers)) for token in array("q", each.ids)]
        made.append(
            Request(
                pack(ids),
                each.num_prompt_tokens,
                each.num_output_tokens,
                len(ids),
                each.arrival_s,
                namespace=int(each.namespace > 0),
            )
        )
    return Trace("served", 1, tuple(made))


@pytest.fixture
def start() -> Iterator[Callable[[], "subprocess.Popen[bytes]"]]:
    children = []

    def begin() -> "subprocess.Popen[bytes]":
        child = subprocess.Popen(
            [sys.executable, "-m", "marconi.replay.shadow"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        children.append(child)
        return child

    yield begin
    for child in children:
        with child:
            child.kill()


@pytest.mark.slow
def test_over_a_pipe_it_names_the_better_division_and_ends_with_its_stdin(
    start: Callable[[], "subprocess.Popen[bytes]"],
) -> None:
    child = start()
    assert child.stdin is not None
    assert child.stdout is not None
    write_frame(child.stdin, STATES_SCARCE.to_bytes())
    for request in served():
        write_frame(child.stdin, request.to_bytes())
    told = json.loads(child.stdout.readline())
    assert told == Shadow(STATES_SCARCE).advise(map(HashedRequest.of, served()))
    assert told["num_requests"] == NUM_NEW
    best = max(told["options"], key=lambda option: option["hit_rate"])
    assert best["hit_rate"] > told["present_hit_rate"] + 0.05
    assert f"Over the last {NUM_NEW} requests, --" in told["advice"]
    child.stdin.close()
    assert child.wait(30) == 0
    assert child.stderr is not None
    assert child.stderr.read() == b""


@pytest.mark.parametrize(
    ("first", "second", "says"),
    [
        (b"{]", None, "the first message must be JSON, got b'{]'"),
        (b"{}", None, "the first message must have policy, "),
        (replace(STATES_SCARCE, policy="none").to_bytes(), None, "unknown policy 'none'"),
        (replace(STATES_SCARCE, given=(1,)).to_bytes(), None, "given must be a list of flags, got [1]"),  # type: ignore[arg-type]
        (replace(STATES_SCARCE, state_bytes=0).to_bytes(), None, "state_bytes must be at least 1, got 0"),
        (STATES_SCARCE.to_bytes(), b"short", "a record must have at least 52 bytes, got 5"),
        (STATES_SCARCE.to_bytes(), served(1)[0].to_bytes()[:-3], "bytes of tokens, got"),
    ],
)
def test_a_malformed_message_ends_it_with_one_line(
    start: Callable[[], "subprocess.Popen[bytes]"], first: bytes, second: bytes | None, says: str
) -> None:
    child = start()
    assert child.stdin is not None
    write_frame(child.stdin, first)
    if second is not None:
        write_frame(child.stdin, second)
    _, errors = child.communicate(timeout=30)
    (line,) = errors.decode().splitlines()
    assert line.startswith("marconi: shadow: ")
    assert says in line
    assert child.returncode == 2


def test_hashed_blocks_are_the_blocks_of_a_token_trace() -> None:
    ours, theirs = trace_of(map(HashedRequest.of, served())), in_blocks(as_tokens(served()), BLOCK_TOKENS)
    assert ours == theirs


def test_its_rates_are_those_of_a_direct_replay() -> None:
    shadow, trace = Shadow(STATES_SCARCE), in_blocks(as_tokens(served()), BLOCK_TOKENS)
    costs = Costs(KV_BYTES, STATE_BYTES, lambda tokens: 1e9 * tokens)
    for option in shadow.options[1:7]:
        config = CacheConfig(trace, costs, TokensAlone(), option.num_bytes, option.mamba_ratio)
        direct = serial.replay(trace, build(PolicySpec("best"), config), TokensAlone())
        assert shadow.num_hit_tokens(option, trace) == sum(direct.hit_tokens), option


@pytest.mark.one_in(4)
@pytest.mark.parametrize("layout", ["two pools", "one pool", "a host tier"])
def test_no_division_exceeds_the_bars_of_its_memory(layout: str) -> None:
    changed: dict[str, dict[str, int]] = {
        "two pools": {},
        "one pool": {"num_tokens": 0, "num_slots": 0, "joint_bytes": 9_000_000},
        "a host tier": {"host_bytes": 9_000_000},
    }
    told = Shadow(replace(STATES_SCARCE, **changed[layout])).advise(map(HashedRequest.of, served()))
    assert 0 < told["present_hit_rate"] <= told["best_hit_rate"] <= told["unlimited_hit_rate"] < 1
    requests = trace_of(map(HashedRequest.of, served())).requests
    assert told["unlimited_hit_rate"] == pytest.approx(
        1 - Reuse.of(Trace("", BLOCK_TOKENS, requests)).num_new_tokens / told["num_prompt_tokens"], abs=1e-6
    )


@pytest.mark.slow
def test_a_change_of_one_token_changes_the_rates() -> None:
    """The control: blocks are distinguished by their tokens."""
    requests = served()
    changed = [replace(each, ids=index.to_bytes(8, "little") + each.ids[8:]) for index, each in enumerate(requests)]
    shadow = Shadow(STATES_SCARCE)
    assert shadow.advise(map(HashedRequest.of, changed))["present_hit_rate"] == 0.0
    assert shadow.advise(map(HashedRequest.of, requests))["present_hit_rate"] > 0.0


def test_the_present_division_has_the_servers_own_sizes() -> None:
    present, *others = options(STATES_SCARCE)
    costs = Costs(KV_BYTES, STATE_BYTES, float)
    assert (present.pool(costs).num_tokens, present.pool(costs).num_slots) == (128 * BLOCK_TOKENS, 6)
    assert {option.num_bytes for option in others} == {present.num_bytes}
    divisions = ["", *(f"--mamba-full-memory-ratio {ratio:g} " for ratio in RATIOS)]
    assert [option.flag for option in others] == [
        *(division.rstrip() for division in divisions[1:]),
        "--enable-unified-memory",
        *(
            f"{division}--enable-hierarchical-cache --hicache-ratio {times}"
            for times in (1, 2, 4)
            for division in divisions
        ),
    ]
    assert not any(option.leave_out for option in others)
    assert {option.host_bytes // present.num_bytes for option in others} == {0, 1, 2, 4}


def test_one_pool_is_no_option_where_it_is_not_served_or_is_present() -> None:
    for memory in (JOINT, replace(STATES_SCARCE, may_join=False)):
        assert "--enable-unified-memory" not in [option.flag for option in options(memory)]
    told = Shadow(JOINT).advise(map(HashedRequest.of, served(60)))
    assert told["present_hit_rate"] > 0.0


def test_a_host_tier_is_no_option_where_it_is_not_served() -> None:
    assert any(option.host_bytes for option in options(STATES_SCARCE))
    for memory in (JOINT, STATES_SCARCE):
        assert not any(option.host_bytes for option in options(replace(memory, may_add_host=False)))


def test_flags_that_an_option_cannot_have_beside_it_are_left_out() -> None:
    def left_out(memory: ServerMemory, *given: str) -> dict[str, tuple[str, ...]]:
        return {option.flag: option.leave_out for option in options(replace(memory, given=given))[1:]}

    ratio, tier = "--mamba-full-memory-ratio 0.2", "--enable-hierarchical-cache --hicache-ratio 4"
    joined = left_out(JOINT, "--enable-unified-memory")
    assert set(joined.values()) == {("--enable-unified-memory",)}
    assert ratio in joined
    assert tier not in joined, "below one pool there is no tier"
    assert f"{ratio} {tier}" in joined
    sized = left_out(STATES_SCARCE, "--max-mamba-cache-size", "--hicache-size")
    assert sized[ratio] == ("--max-mamba-cache-size",)
    assert sized[tier] == ("--hicache-size",)
    assert sized[f"{ratio} {tier}"] == ("--max-mamba-cache-size", "--hicache-size")
    assert sized["--enable-unified-memory"] == ()
    tiered = left_out(replace(STATES_SCARCE, host_bytes=1), "--mamba-full-memory-ratio", "--enable-hierarchical-cache")
    assert tiered["--enable-unified-memory"] == ("--enable-hierarchical-cache",)
    assert tiered[ratio] == tiered[tier] == ()


@pytest.mark.parametrize("policy", ["best", "marconi:2.0", "lru", "lru@judicious", "best@chunk-end"])
def test_every_policy_of_a_server_is_replayed(policy: str) -> None:
    told = Shadow(replace(STATES_SCARCE, policy=policy)).advise(map(HashedRequest.of, served(50)))
    assert len(told["options"]) == 24


def test_a_window_keeps_the_latest_within_its_bounds() -> None:
    hashed = [HashedRequest.of(each) for each in served(20)]
    window = Window(max_requests=5, num_new=1)
    for each in hashed:
        window.add(each)
    assert window.take() == tuple(hashed[-5:])
    window = Window(max_bytes=100, num_new=1)
    for each in hashed:
        window.add(each)
    held = window.take()
    assert 0 < sum(len(each.digests) for each in held) <= 100
    assert held == tuple(hashed[-len(held) :])


SAME, WORSE = Option("--a", 100, 0.1, leave_out=("--x", "--y")), Option("--b", 100, 0.2)
SMALL, LARGE = (Option(f"--h{times}", 100, 0.1, times * 10**9) for times in (1, 4))


@pytest.mark.parametrize(
    ("present", "same", "more", "says"),
    [
        (0.5, 0.51, 0.51, "division of memory is within 3 % of the best that was tried."),
        (
            0.5,
            0.52,
            0.52,
            "--a without --x and --y would have computed 4.0 % fewer prompt tokens than the present division of "
            "memory (52",
        ),
        (0.5, 0.52, 0.6, "--a without --x and --y would have computed 4.0 % fewer prompt tokens"),
        (0.5, 0.52, 0.6, ", and --h4, with 4 GB of host memory per rank, 20.0 % fewer (60.0 % cached)."),
        (
            0.5,
            0.4,
            0.6,
            "in the same memory; --h4, with 4 GB of host memory per rank, 20.0 % fewer (60.0 % cached), 50.0 % at",
        ),
        (1.0, 1.0, 1.0, "is within 3 %"),
    ],
)
def test_only_gains_of_three_percent_are_named(present: float, same: float, more: float, says: str) -> None:
    told = sentence(3000, 0, present, {SAME: same, WORSE: 0.2, SMALL: 0.3, LARGE: more}, True)
    assert told.startswith("Over the last 3,000 requests, ")
    assert says in told
    assert ("--h4" in told) == (more == 0.6)
    assert "--h1" not in told


@pytest.mark.parametrize(("small", "named"), [(0.595, "--h1, with 1 GB"), (0.55, "--h4, with 4 GB")])
def test_the_smallest_host_tier_that_is_as_good_as_the_best_is_named(small: float, named: str) -> None:
    assert named in sentence(3000, 0, 0.5, {SAME: 0.5, SMALL: small, LARGE: 0.6}, True)


def test_a_host_tier_whose_loads_are_free_saves_at_most_so_much() -> None:
    rates = {SAME: 0.52, LARGE: 0.6}
    assert "per rank, at most 20.0 % fewer (at most 60.0 % cached)." in sentence(3000, 0, 0.5, rates, False)
    assert "at most" not in sentence(3000, 0, 0.5, rates, True)


@pytest.mark.slow
def test_a_slow_link_makes_a_host_tier_useless_and_a_fast_one_does_not() -> None:
    learned = [replace(each, overhead_s=0.01, s_per_flop=1e-14) for each in served()]
    rates = {}
    for link in (0.0, 1.0, 1e15):
        told = Shadow(replace(STATES_SCARCE, link_bytes_per_s=link)).advise(map(HashedRequest.of, learned))
        assert told["counts_load_times"] == (link > 0)
        rates[link] = max(each["hit_rate"] for each in told["options"] if each["host_bytes"])
    assert rates[0.0] == pytest.approx(rates[1e15], abs=0.01)
    best = max(each["hit_rate"] for each in told["options"] if not each["host_bytes"])
    assert rates[1.0] <= best < rates[1e15]


def test_loads_are_free_until_a_prefills_time_is_known() -> None:
    shadow = Shadow(replace(STATES_SCARCE, link_bytes_per_s=1.0))
    assert not shadow.advise(map(HashedRequest.of, served(60)))["counts_load_times"]


def test_it_ends_with_its_stdin_in_the_middle_of_a_replay(start: Callable[[], "subprocess.Popen[bytes]"]) -> None:
    child = start()
    assert child.stdin is not None
    write_frame(child.stdin, STATES_SCARCE.to_bytes())
    for request in served(2 * NUM_NEW):
        write_frame(child.stdin, request.to_bytes())
    _, errors = child.communicate(timeout=30)
    assert (child.returncode, errors) == (0, b"")


def test_a_host_tier_that_is_present_stays_under_every_ratio() -> None:
    memory = replace(STATES_SCARCE, host_bytes=50_000_000)
    present, *others = options(memory)
    assert present.host_bytes == 50_000_000
    for option in others:
        if option.flag.startswith("--mamba"):
            assert option.host_bytes == 50_000_000
        elif option.flag == "--enable-unified-memory":
            assert option.host_bytes == 0
    told = Shadow(memory).advise(map(HashedRequest.of, served(60)))
    assert {each["host_bytes"] for each in told["options"]} == {0, 50_000_000}, "smaller host tiers are no options"
    assert len(told["options"]) == 6
