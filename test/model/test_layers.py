"""Each kind of layer costs what counting its operations one by one gives."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marconi.model import paper, recurrent
from marconi.model.attention import Attention, SlidingWindowAttention
from marconi.model.base import FlopCurve, Layer, Precision, Storage, window_pairs
from marconi.model.feed_forward import UNGATED, MixtureOfExperts, Mlp
from marconi.model.mla import LatentAttention

STORAGE = Storage()
D = 24
GQA = Attention(D, num_heads=6, num_kv_heads=2, head_dim=8, v_head_dim=10, gate_channels=48)


def product(rows: int, columns: int) -> int:
    """FLOPs of a vector times a matrix."""
    return 2 * rows * columns


def gqa_token(num_keys: int) -> int:
    projections = product(D, 6 * 8) + product(D, 48) + product(D, 2 * 8) + product(D, 2 * 10) + product(6 * 10, D)
    return projections + 6 * num_keys * (2 * 8 + 2 * 10)


def mla_token(num_keys: int) -> int:
    queries = product(D, 12) + product(12, 6 * (8 + 4))
    latents = product(D, 16 + 4) + product(16, 6 * (8 + 10))
    return queries + latents + product(6 * 10, D) + 6 * num_keys * (2 * (8 + 4) + 2 * 10)


def moe_token(_: int) -> int:
    return product(D, 8) + 2 * 3 * product(D, 5) + 3 * product(D, 7)


def latent_moe_token(_: int) -> int:
    return product(D, 8) + product(D, 6) + product(6, D) + 2 * 2 * product(6, 5)


def mamba1_token(_: int) -> int:
    selection = product(40, 3 + 2 * 4) + product(3, 40)
    return product(D, 80) + product(40, D) + selection + 2 * 4 * 40 + 8 * 40 * 4


def mamba2_token(_: int) -> int:
    channels = 6 * 8 + 2 * 2 * 16
    return product(D, 6 * 8 + channels + 6) + product(6 * 8, D) + 2 * 4 * channels + 5 * 6 * 8 * 16


def gdn_token(_: int) -> int:
    channels = 2 * 3 * 8 + 6 * 10
    into = product(D, channels) + product(D, 6 * 10) + 2 * product(D, 6)
    return into + product(6 * 10, D) + 2 * 4 * channels + 7 * 6 * 8 * 10


def kda_token(_: int) -> int:
    into = 3 * product(D, 48) + product(D, 6) + 2 * (product(D, 8) + product(8, 48))
    return into + product(48, D) + 2 * 4 * 3 * 48 + 7 * 6 * 8 * 8


def lightning_token(_: int) -> int:
    return 3 * product(D, 48) + product(D, 48) + product(48, D) + 5 * 6 * 8 * 8


def rwkv7_token(_: int) -> int:
    return 4 * product(D, D) + product(D, 20) + product(20, D) + 9 * 3 * 8 * 8


COUNTED: list[tuple[Layer, Callable[[int], int]]] = [
    (GQA, gqa_token),
    (SlidingWindowAttention(GQA, 5), lambda num_keys: gqa_token(min(num_keys, 5))),
    (LatentAttention(D, 6, 12, 16, 8, 4, 10), mla_token),
    (
        LatentAttention(D, 6, 0, 16, 8, 4, 10),
        lambda n: mla_token(n) - product(D, 12) - product(12, 72) + product(D, 72),
    ),
    (Mlp(D, 50), lambda _: 3 * product(D, 50)),
    (Mlp(D, 50, UNGATED), lambda _: 2 * product(D, 50)),
    (MixtureOfExperts(D, 8, 2, 5, shared_intermediate_size=7), moe_token),
    (MixtureOfExperts(D, 8, 2, 5, num_matrices=UNGATED, latent_size=6), latent_moe_token),
    (recurrent.mamba1(D, inner_size=40, state_size=4, step_rank=3, conv_kernel=4), mamba1_token),
    (recurrent.mamba2(D, num_heads=6, head_dim=8, num_groups=2, state_size=16, conv_kernel=4), mamba2_token),
    (recurrent.gated_delta_rule(D, 3, 8, 6, 10, conv_kernel=4), gdn_token),
    (recurrent.kimi_delta_attention(D, 6, 8, conv_kernel=4), kda_token),
    (recurrent.lightning_attention(D, 6, 8, gate_channels=48), lightning_token),
    (recurrent.rwkv7(D, head_dim=8, total_low_rank=20), rwkv7_token),
    (recurrent.short_convolution(D, conv_kernel=3), lambda _: product(D, 3 * D) + product(D, D) + 2 * 3 * D),
    (recurrent.convolution_window(((2, 8), (4, 8)), 24, conv_kernel=4), lambda _: 2 * 4 * (16 + 32 + 24)),
]


@pytest.mark.parametrize(("layer", "token_flops"), COUNTED, ids=lambda value: getattr(value, "kind", ""))
@pytest.mark.parametrize("num_tokens", [0, 1, 4, 5, 6, 63])
def test_prefix_flops_are_the_sum_over_its_tokens(
    layer: Layer, token_flops: Callable[[int], int], num_tokens: int
) -> None:
    assert layer.flops.at(num_tokens) == sum(token_flops(position + 1) for position in range(num_tokens))


@given(window=st.integers(1, 40), num_tokens=st.integers(0, 100))
def test_window_pairs_are_the_pairs_that_a_band_holds(window: int, num_tokens: int) -> None:
    assert window_pairs(window, num_tokens) == sum(min(position + 1, window) for position in range(num_tokens))


@given(num_tokens=st.integers(0, 10**7))
def test_curves_add_up(num_tokens: int) -> None:
    one, other = FlopCurve(3, 5, ((7, 2), (50, 4))), FlopCurve(11, 0, ((7, 9), (13, 1)))
    assert (one + other).at(num_tokens) == one.at(num_tokens) + other.at(num_tokens)


def test_kv_heads_are_split_over_workers_and_replicated_when_they_are_fewer() -> None:
    layer = Attention(64, num_heads=16, num_kv_heads=4, head_dim=8, v_head_dim=8)
    per_worker = {degree: layer.kv_bytes_per_token(STORAGE.over(None, degree)) for degree in (1, 2, 4, 8, 16)}
    assert per_worker == {1: 128, 2: 64, 4: 32, 8: 32, 16: 32}


@pytest.mark.parametrize(("degree", "problem"), [(3, "attention heads"), (32, "attention heads")])
def test_heads_that_cannot_be_shared_are_named(degree: int, problem: str) -> None:
    layer = Attention(64, num_heads=16, num_kv_heads=4, head_dim=8, v_head_dim=8)
    with pytest.raises(ValueError, match=rf"tensor_parallel must divide the number of {problem} \(16\), got {degree}"):
        layer.kv_bytes_per_token(STORAGE.over(None, degree))


def test_latents_are_on_every_worker() -> None:
    layer = LatentAttention(64, 16, 0, 512, 128, 64, 128)
    assert {layer.kv_bytes_per_token(STORAGE.over(None, degree)) for degree in (1, 4, 16)} == {(512 + 64) * 2}


@pytest.mark.parametrize(
    "layer",
    [
        recurrent.mamba1(64, inner_size=128, state_size=16, step_rank=4, conv_kernel=4),
        recurrent.mamba2(64, num_heads=8, head_dim=16, num_groups=8, state_size=32, conv_kernel=4),
        recurrent.gated_delta_rule(64, 4, 16, 8, 16, conv_kernel=4),
        recurrent.kimi_delta_attention(64, 8, 16, conv_kernel=4),
        recurrent.lightning_attention(64, 8, 16),
        recurrent.rwkv7(64, head_dim=16, total_low_rank=8),
    ],
    ids=lambda layer: layer.kind,
)
def test_a_worker_of_two_holds_half_of_a_state(layer: Layer) -> None:
    assert layer.recurrent_bytes(STORAGE.over(None, 2)) * 2 == layer.recurrent_bytes(STORAGE) > 0


def test_groups_fewer_than_workers_are_replicated() -> None:
    layer = recurrent.mamba2(64, num_heads=8, head_dim=16, num_groups=1, state_size=32, conv_kernel=4)
    assert layer.convolution_bytes(STORAGE.over(None, 4)) == (8 * 16 // 4 + 2 * 32) * 3 * 2


def test_inputs_that_every_worker_needs_are_whole_on_each() -> None:
    layer = recurrent.rwkv7(64, head_dim=16, total_low_rank=8)
    assert {layer.convolution_bytes(STORAGE.over(None, degree)) for degree in (1, 2, 4)} == {2 * 64 * 2}
    streams = recurrent.convolution_window(((2, 8), (8, 8)), 24, conv_kernel=4)
    assert streams.convolution_bytes(STORAGE.over(None, 4)) == (1 * 8 + 2 * 8 + 24) * 3 * 2


def test_dtypes_scale_the_bytes_that_they_are_of() -> None:
    layer = recurrent.gated_delta_rule(64, 4, 16, 8, 16, conv_kernel=4)
    half = STORAGE.over(Precision(kv_dtype="float8_e4m3fn", state_dtype="bfloat16", conv_dtype="float32"), 1)
    assert layer.recurrent_bytes(half) * 2 == layer.recurrent_bytes(STORAGE)
    assert layer.convolution_bytes(half) == layer.convolution_bytes(STORAGE) * 2
    assert GQA.kv_bytes_per_token(half) * 2 == GQA.kv_bytes_per_token(STORAGE)


def test_a_checkpoint_in_int8_has_a_byte_for_each_number_and_a_scale_for_each_column() -> None:
    """Of a head's numbers, (value channels, key channels), those of one key channel share a scale."""
    layer = recurrent.gated_delta_rule(64, 4, 16, 8, 32, conv_kernel=4)
    assert layer.int8_bytes(STORAGE) == 8 * (16 * 32 + 16 * 4)
    assert layer.int8_bytes(STORAGE.over(Precision(state_dtype="bfloat16"), 2)) == 4 * (16 * 32 + 16 * 2)
    assert GQA.int8_bytes(STORAGE) == 0
    # A channel of Mamba-1 is a head of its own, so every number has a scale: int8 takes more than float32.
    narrow = recurrent.mamba1(64, inner_size=128, state_size=16, step_rank=4, conv_kernel=4)
    assert narrow.int8_bytes(STORAGE) > narrow.recurrent_bytes(STORAGE)


def test_an_unknown_dtype_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"a dtype must be one of float32, bfloat16.*, got 'fp3'"):
        Storage(state_dtype="fp3")


def test_experts_count_those_that_a_token_uses() -> None:
    layer = MixtureOfExperts(D, 8, 2, 5, shared_intermediate_size=7)
    assert layer.num_parameters == D * 8 + 8 * 3 * D * 5 + 3 * D * 7
    assert layer.num_active_parameters == D * 8 + 2 * 3 * D * 5 + 3 * D * 7


def test_the_papers_counts_are_the_leading_terms_of_the_general_ones() -> None:
    hidden_size, state_size = 4096, 128
    general = recurrent.mamba1(hidden_size, 2 * hidden_size, state_size, step_rank=0, conv_kernel=0).flops.linear
    selection = 2 * 2 * hidden_size * 2 * state_size
    assert general - selection + 10 == paper.ssm(hidden_size, state_size).flops.linear
    assert Mlp(hidden_size, 4 * hidden_size, UNGATED).flops == FlopCurve(linear=16 * hidden_size**2)
