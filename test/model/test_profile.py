"""A profile is the sum of its layers, and the paper's Table 1 comes out of it."""

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from marconi.model import ModelProfile, catalog, load, paper, profile_of, recurrent
from marconi.model.attention import Attention, SlidingWindowAttention
from marconi.model.base import Storage
from marconi.model.feed_forward import Mlp

GQA = Attention(64, num_heads=8, num_kv_heads=2, head_dim=8, v_head_dim=8)
LAYERS = (
    GQA,
    SlidingWindowAttention(GQA, 16),
    SlidingWindowAttention(GQA, 16),
    SlidingWindowAttention(GQA, 100),
    recurrent.gated_delta_rule(64, 2, 8, 4, 8, conv_kernel=4),
    Mlp(64, 128),
)
PROFILE = profile_of("windows", LAYERS, Storage())


@given(start=st.integers(0, 300), length=st.integers(0, 300))
def test_flops_between_two_positions_are_the_difference_of_their_prefixes(start: int, length: int) -> None:
    exact = sum(layer.flops.at(start + length) - layer.flops.at(start) for layer in LAYERS)
    assert PROFILE.flops_between(start, start + length) == exact
    assert PROFILE.prefix_flops(start) == sum(layer.flops.at(start) for layer in LAYERS)


@pytest.mark.parametrize("name", ["marconi-7b", "qwen3-next-80b-a3b", "kimi-linear-48b"])
def test_flops_of_a_million_tokens_are_exact_to_rounding(name: str) -> None:
    profile = load(name)
    exact = sum(kind.flops.at(1_000_000) for kind in profile.kinds)
    assert profile.prefix_flops(1_000_000) == pytest.approx(exact, rel=1e-15)
    assert profile.flops_between(999_999, 1_000_000) == sum(
        kind.flops.at(1_000_000) - kind.flops.at(999_999) for kind in profile.kinds
    )


@pytest.mark.parametrize("profile", [PROFILE, load("marconi-7b"), load("qwen3-next-80b-a3b")], ids=lambda p: p.name)
def test_many_lengths_at_once_cost_what_each_costs(profile: ModelProfile) -> None:
    lengths = np.array([0, 1, 15, 16, 17, 99, 100, 101, 4096, 1_000_000])
    each = [profile.prefix_flops(int(length)) for length in lengths]
    np.testing.assert_allclose(profile.prefix_flops_of(lengths), each, rtol=1e-14)


def test_windows_hold_kv_up_to_their_length() -> None:
    per_token = GQA.kv_bytes_per_token(Storage())
    assert [PROFILE.window_bytes(length) for length in (0, 10, 16, 50, 200)] == [
        per_token * tokens for tokens in (0, 30, 48, 82, 132)
    ]
    assert PROFILE.kv_bytes_per_token == per_token
    assert PROFILE.checkpoint_bytes == PROFILE.state_bytes + PROFILE.window_bytes(100)


def test_kinds_add_up_to_the_model() -> None:
    for name in catalog.NAMES:
        profile = load(name)
        assert sum(kind.flops.at(5000) for kind in profile.kinds) == profile.prefix_flops(5000)
        held = sum(kind.bytes_of(5000) for kind in profile.kinds)
        assert held == 5000 * profile.kv_bytes_per_token + profile.state_bytes + profile.window_bytes(5000)


def test_a_plain_transformer_needs_no_checkpoint() -> None:
    assert not load("vicuna-7b").is_hybrid
    assert load("marconi-7b").is_hybrid


def evaluate(formula: str, length: int, hidden_size: int, state_size: int) -> float:
    """A formula of the paper's table, in which a space multiplies."""
    symbols = {"L": length, "D": hidden_size, "N": state_size}
    spaced = re.sub(r"(?<=[\w)])\s+(?=[\w(])", "*", formula.replace("^", "**"))
    return float(eval(spaced, {"__builtins__": {}}, symbols))  # noqa: S307


@pytest.mark.parametrize(("hidden_size", "state_size"), [(4096, 128), (4096, 16), (768, 64)])
@pytest.mark.parametrize("length", [1, 50, 1000, 30_000])
def test_table_1_of_the_paper(length: int, hidden_size: int, state_size: int) -> None:
    layers = paper.hybrid(1, 1, 1, hidden_size=hidden_size, state_size=state_size)
    profile = profile_of("paper", layers, paper.STORAGE)
    kinds = {kind.kind: kind for kind in profile.kinds}
    for name, flops, state_bytes, flops_per_byte in paper.TABLE_1:
        kind = kinds[name]
        held = kind.kv_bytes_per_token * length + kind.recurrent_bytes
        assert kind.flops.at(length) == evaluate(flops, length, hidden_size, state_size)
        assert held == evaluate(state_bytes, length, hidden_size, state_size)
        if held:
            expected = evaluate(flops_per_byte, length, hidden_size, state_size)
            assert kind.flops.at(length) / held == pytest.approx(expected, rel=1e-15)


def test_the_papers_sizes_come_out() -> None:
    """Section 3 and appendix A: 10,000 tokens in blocks of 16 hold 17.4 GB, 3.3 times a transformer's KV."""
    profile = load("marconi-7b")
    convolution = sum(kind.convolution_bytes for kind in profile.kinds)
    assert convolution / profile.state_bytes == pytest.approx(0.061, abs=0.0005)
    held = 10_000 / 16 * profile.state_bytes + 10_000 * profile.kv_bytes_per_token
    assert held / 1e9 == pytest.approx(17.4, abs=0.05)
    transformer = 10_000 * 32 * 16_384
    assert held / transformer == pytest.approx(3.3, abs=0.05)
