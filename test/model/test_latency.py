"""Time to first token follows its formula or its table, and the inverse is the smallest prefix that meets a budget."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from marconi.model import (
    DEVICES,
    DeviceProfile,
    LatencyModel,
    MeasuredLatency,
    PrefillLatency,
    Storage,
    load,
    profile_of,
    recurrent,
)
from marconi.model.attention import Attention, SlidingWindowAttention
from marconi.model.device import device
from marconi.model.feed_forward import MixtureOfExperts

GQA = Attention(64, num_heads=8, num_kv_heads=8, head_dim=8, v_head_dim=8)
LAYERS = (
    GQA,
    SlidingWindowAttention(GQA, 40),
    recurrent.mamba2(64, num_heads=8, head_dim=16, num_groups=1, state_size=16, conv_kernel=4),
    MixtureOfExperts(64, num_experts=16, num_active_experts=2, expert_intermediate_size=32),
)
PROFILE = profile_of("small", LAYERS, Storage(), num_embedding_parameters=999, num_head_parameters=640)
# Rates at which each part of the formula decides somewhere among prompts of up to 200 tokens.
DEVICE = DeviceProfile("test", flops_per_s=3e9, bytes_per_s=3e8, state_bytes_per_s=1e7, overhead_s=1e-4)
SLOW_MEMORY = replace(DEVICE, bytes_per_s=2e7)
SLOW_KV = replace(DEVICE, flops_per_s=3e11, bytes_per_s=2e7)
CURVES = [
    *[(0, num_tokens, seconds) for num_tokens, seconds in ((10, 1.0), (20, 1.5), (100, 8.0))],
    *[(50, 50 + num_tokens, seconds) for num_tokens, seconds in ((5, 1.1), (50, 2.0))],
    *[(100, 100 + num_tokens, seconds) for num_tokens, seconds in ((1, 0.2), (50, 3.0))],
]


def brute_force(model: LatencyModel, num_prompt_tokens: int, budget_s: float) -> int | None:
    fits = (cached for cached in range(num_prompt_tokens) if model.seconds(cached, num_prompt_tokens) <= budget_s)
    return next(fits, None)


def test_the_formula() -> None:
    latency = PrefillLatency(PROFILE, SLOW_MEMORY)
    compute_s = PROFILE.flops_between(30, 100) / 3e9
    num_experts = PROFILE.num_expert_parameters
    dense = PROFILE.num_parameters - 999 - num_experts
    weights = 2 * (dense + num_experts * (1 - (14 / 16) ** 70))
    memory_s = (weights + 30 * PROFILE.kv_bytes_per_token) / 2e7
    restore_s = PROFILE.state_bytes / 1e7
    assert latency.seconds(30, 100) == pytest.approx(1e-4 + restore_s + max(compute_s, memory_s), rel=1e-12)
    assert memory_s > compute_s
    fast = PrefillLatency(PROFILE, replace(DEVICE, bytes_per_s=1e15))
    assert fast.seconds(30, 100) == pytest.approx(1e-4 + restore_s + compute_s, rel=1e-12)


def test_nothing_cached_restores_no_state() -> None:
    latency = PrefillLatency(PROFILE, replace(DEVICE, state_bytes_per_s=1.0))
    assert latency.seconds(0, 100) < PROFILE.state_bytes <= latency.seconds(1, 100)


def test_a_prompt_that_is_cached_whole_recomputes_its_last_token() -> None:
    for latency in (PrefillLatency(PROFILE, DEVICE), MeasuredLatency(CURVES)):
        assert latency.seconds(100, 100) == latency.seconds(99, 100)


def test_workers_share_the_work() -> None:
    alone, shared = (PrefillLatency(load("vicuna-7b", tensor_parallel=n), DEVICES["a100"]) for n in (1, 4))
    overhead_s = DEVICES["a100"].overhead_s
    assert shared.seconds(0, 20_000) - overhead_s == pytest.approx((alone.seconds(0, 20_000) - overhead_s) / 4)


def test_a_long_prompt_takes_what_its_flops_take() -> None:
    """Vicuna-7B, 2,000 tokens: 2 x 6.6e9 a token and the scores, at half of an A100's 312 TFLOP/s."""
    latency = PrefillLatency(load("vicuna-7b"), DEVICES["a100"])
    assert latency.seconds(0, 2000) == pytest.approx(0.005 + 2000 * 13.5e9 / 156e12, rel=0.02)


@pytest.mark.parametrize("device_profile", [DEVICE, SLOW_MEMORY, SLOW_KV], ids=["compute", "weights", "kv"])
@given(num_prompt_tokens=st.integers(1, 200), share=st.floats(0.0, 1.2))
def test_the_inverse_is_the_smallest_prefix_that_meets_the_budget(
    device_profile: DeviceProfile, num_prompt_tokens: int, share: float
) -> None:
    latency = PrefillLatency(PROFILE, device_profile)
    each = [latency.seconds(cached, num_prompt_tokens) for cached in range(num_prompt_tokens)]
    budget_s = min(each) + share * (max(each) - min(each))
    assert latency.smallest_cached_tokens(num_prompt_tokens, budget_s) == brute_force(
        latency, num_prompt_tokens, budget_s
    )


def test_no_prefix_meets_a_budget_below_the_overhead() -> None:
    for latency in (PrefillLatency(PROFILE, DEVICE), MeasuredLatency(CURVES)):
        assert latency.smallest_cached_tokens(100, 1e-6) is None
        assert latency.smallest_cached_tokens(1, 1e-6) is None


@given(num_prompt_tokens=st.integers(1, 250), budget_s=st.floats(0.1, 25.0))
@settings(max_examples=200)
def test_the_inverse_of_a_table_is_the_smallest_prefix_too(num_prompt_tokens: int, budget_s: float) -> None:
    latency = MeasuredLatency(CURVES)
    assert latency.smallest_cached_tokens(num_prompt_tokens, budget_s) == brute_force(
        latency, num_prompt_tokens, budget_s
    )


def test_a_table_gives_its_points_and_interpolates_between_them() -> None:
    latency = MeasuredLatency(CURVES)
    assert [latency.seconds(cached, prompt) for cached, prompt, _ in CURVES] == [seconds for *_, seconds in CURVES]
    assert latency.seconds(0, 15) == pytest.approx(1.25)
    assert latency.seconds(25, 25 + 20) == pytest.approx((1.5 + 1.1 + 15 / 45 * 0.9) / 2)


def test_a_table_is_flat_below_its_first_point_and_goes_on_beyond_its_last() -> None:
    latency = MeasuredLatency(CURVES)
    assert latency.seconds(0, 1) == 1.0
    assert latency.seconds(0, 180) == pytest.approx(8.0 + 6.5)
    assert latency.seconds(500, 550) == 3.0


def test_csv_and_json_tables_are_the_same(tmp_path: Path) -> None:
    names = ("cached_tokens", "prompt_tokens", "seconds")
    as_csv, as_json = tmp_path / "table.csv", tmp_path / "table.json"
    as_csv.write_text("\n".join([",".join(names), *(",".join(map(str, point)) for point in CURVES)]), encoding="utf-8")
    as_json.write_text(json.dumps([dict(zip(names, point, strict=True)) for point in CURVES]), encoding="utf-8")
    one, other, direct = MeasuredLatency.read(as_csv), MeasuredLatency.read(as_json), MeasuredLatency(CURVES)
    for cached in range(0, 120, 7):
        assert one.seconds(cached, 130) == other.seconds(cached, 130) == direct.seconds(cached, 130)


def test_a_table_of_uncached_tokens_holds_for_every_prefix(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    path.write_text("uncached_tokens,seconds\n100,0.1\n1000,0.4\n", encoding="utf-8")
    latency = MeasuredLatency.read(path)
    assert latency.seconds(0, 550) == latency.seconds(7000, 7550) == pytest.approx(0.25)
    assert latency.smallest_cached_tokens(1000, 0.25) == 450


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("", "no points"),
        ("uncached_tokens,seconds\n100,0.1\n", "one point at 0 cached tokens: a curve needs two"),
        (
            "tokens,seconds\n100,0.1\n",
            "row 1: columns must be uncached_tokens,seconds or .*, got none of 'cached_tokens'",
        ),
        ("uncached_tokens,seconds\n100,fast\n", "row 1: not a number"),
        ("uncached_tokens,seconds\n100\n", "row 1: not a number"),
        (
            "uncached_tokens,seconds\n100,0.2\n200,0.1\n",
            "with 0 cached, 200 tokens must take no less than 100 do, got 0.1 s and 0.2 s",
        ),
        ("uncached_tokens,seconds\n100,0.2\n100,0.1\n", "two points at 0 cached of 100 tokens"),
        ("uncached_tokens,seconds\n100,nan\n200,0.1\n", "seconds at 0 of 100 tokens must be more than 0, got nan"),
        ("uncached_tokens,seconds\n0,0.1\n200,0.1\n", "cached tokens must be fewer than the prompt's 0, got 0"),
        ("cached_tokens,prompt_tokens,seconds\n9,9,1\n", "cached tokens must be fewer than the prompt's 9, got 9"),
    ],
)
def test_a_bad_table_is_refused_with_its_name(tmp_path: Path, content: str, problem: str) -> None:
    path = tmp_path / "table.csv"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match=f"table.csv: {problem}"):
        MeasuredLatency.read(path)


@pytest.mark.parametrize(("content", "problem"), [("{", "is not JSON"), ('{"seconds": 1}', "holds no list of objects")])
def test_a_bad_json_table_is_refused_with_its_name(tmp_path: Path, content: str, problem: str) -> None:
    path = tmp_path / "table.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match=f"table.json {problem}"):
        MeasuredLatency.read(path)


def test_a_table_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"none.csv cannot be read"):
        MeasuredLatency.read(tmp_path / "none.csv")


@pytest.mark.parametrize(("cached", "prompt"), [(-1, 5), (6, 5), (0, 0)])
def test_impossible_lengths_are_refused(cached: int, prompt: int) -> None:
    for latency in (PrefillLatency(PROFILE, DEVICE), MeasuredLatency(CURVES)):
        with pytest.raises(ValueError, match=f"got {cached} cached of {prompt}"):
            latency.seconds(cached, prompt)


def test_devices_are_found_by_name_and_unknown_ones_refused_with_the_known() -> None:
    assert device("H100") is DEVICES["h100"]
    with pytest.raises(ValueError, match=r"a device must be one of a100-40gb, a100, .*h200.*, got 'tpu'"):
        device("tpu")
    with pytest.raises(ValueError, match=r"device broken: bytes_per_s must be more than 0, got 0"):
        DeviceProfile("broken", 1.0, 0, 1.0, 0.0)
