"""Inkling's convolutions and attention on the CPU platform are the same in one piece, in chunks and token by token.

The references are one sequence each: the definition of a convolution with its input added, and of attention with a bias
by distance, written out by loops over tokens.
"""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

pytest.importorskip("sglang", reason="the server extra is not installed: pip install '.[server]'")

from marconi_cpu import output_convolution as convolution
from marconi_cpu.relative_attention import attention
from marconi_cpu.window_dtype import in_dtype_of_model

CHANNELS, WIDTH, NUM_SLOTS = 6, 4, 5
LENGTHS = (7, 1, 12, 2)
SLOTS = torch.tensor([3, 1, 4, 2], dtype=torch.int32)
HEADS, KV_HEADS, HEAD_DIM, EXTENT = 4, 2, 8, 5


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def prefill(x: Tensor, weight: Tensor, pool: Tensor, lengths: list[int], continues: Tensor) -> Tensor:
    """One prefill as SGLang's layer makes it: the convolution, then the windows."""
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    outputs = convolution.causal_conv1d(
        x, weight, pool, continues[:, None, None], SLOTS.clamp(min=0).long(), bounds, torch.empty(0)
    )
    convolution.update_sconv_cache(x, pool, SLOTS, continues, bounds.int())
    return outputs


def expected(x: Tensor, weight: Tensor) -> Tensor:
    before = torch.cat([torch.zeros(WIDTH - 1, CHANNELS), x])
    return torch.stack([(before[t : t + WIDTH] * weight.T).sum(0) + x[t] for t in range(len(x))])


@pytest.mark.parametrize("num_chunks", [1, 3])
def test_a_prefill_in_chunks_is_that_of_the_definition_and_leaves_the_last_inputs(num_chunks: int) -> None:
    sequences = [normal(length, length, CHANNELS) for length in LENGTHS]
    weight, pool = normal(0, CHANNELS, WIDTH), normal(1, NUM_SLOTS, WIDTH - 1, CHANNELS)
    untouched = pool[0].clone()
    chunks = [each.tensor_split(num_chunks) for each in sequences]
    outputs: list[list[Tensor]] = [[] for _ in sequences]
    for number in range(num_chunks):
        now = [each[number] for each in chunks]
        lengths = [len(each) for each in now]
        done = prefill(torch.cat(now), weight, pool, lengths, torch.full((len(now),), number > 0))
        for kept, part in zip(outputs, done.split(lengths), strict=True):
            kept.append(part)
    for slot, sequence, kept in zip(SLOTS.tolist(), sequences, outputs, strict=True):
        torch.testing.assert_close(torch.cat(kept), expected(sequence, weight))
        assert torch.equal(pool[slot], torch.cat([torch.zeros(WIDTH - 1, CHANNELS), sequence])[1 - WIDTH :])
    assert torch.equal(pool[0], untouched)


def test_decoding_goes_on_where_a_prefill_ended_and_copies_windows_that_are_tracked() -> None:
    weight, pool = normal(0, CHANNELS, WIDTH), torch.full((8, WIDTH - 1, CHANNELS), torch.nan)
    x = normal(1, 9, CHANNELS)
    slots, target = torch.tensor([3, -1], dtype=torch.int32), torch.tensor([6, 7])
    pool[3] = x[2:5]
    for token in range(5, 9):
        rows = torch.stack([x[token], torch.full((CHANNELS,), 100.0)])
        tracked = torch.tensor([token == 7, True])
        got = convolution.fused_causal_conv1d_update_decode(
            rows, weight, pool, slots, slots != -1, track_mask=tracked, track_indices=target
        )
        torch.testing.assert_close(got[0], expected(x, weight)[token])
        assert torch.equal(pool[3], x[token - 2 : token + 1])
    assert torch.equal(pool[6], x[5:8])
    assert pool[7].isnan().all(), "padding owns no window"


def test_windows_inside_a_prefill_are_copied_where_they_are_tracked() -> None:
    x, pool = normal(1, 9, CHANNELS), torch.zeros(4, WIDTH - 1, CHANNELS)
    places = torch.tensor([[1, 2, 3], [0, 0, 0], [6, 7, 8]])
    convolution.fused_gather_scatter_to_sconv_cache(
        x, pool, places, torch.tensor([True, False, True]), torch.tensor([2, 1, 3])
    )
    assert torch.equal(pool, torch.stack([torch.zeros(3, CHANNELS)] * 2 + [x[1:4], x[6:9]]))


def test_the_gate_takes_pairs_of_channels() -> None:
    x = normal(1, 3, 8)
    assert torch.equal(convolution.swiglu(x), functional.silu(x[:, 0::2]) * x[:, 1::2])


def test_a_batch_finds_its_slots_and_their_places() -> None:
    slots = torch.tensor([0, 4, 2], dtype=torch.int32)
    asked, out = torch.tensor([2, 1]), torch.full((3,), 9, dtype=torch.int32)
    given = {"mamba_index_mapping": slots, "out_state_indices": out, "valid_bs": 2, "total_bs": 2}
    convolution.fused_replay_state_indices(req_pool_indices=asked, **given)  # type: ignore[arg-type]
    assert out.tolist() == [2, 4, 9]
    places = torch.tensor([0, 10, 20, 30, 40])
    convolution.fused_replay_state_indices(req_pool_indices=asked, v2p=places, **given)  # type: ignore[arg-type]
    assert out.tolist() == [20, 40, 9]
    with pytest.raises(NotImplementedError, match="does not support 3 rows of which 2 are requests"):
        convolution.fused_replay_state_indices(req_pool_indices=asked, **given | {"total_bs": 3})  # type: ignore[arg-type]


@pytest.mark.parametrize("window", [None, 3])
def test_attention_in_one_piece_is_that_of_the_definition_and_of_the_last_tokens(window: int | None) -> None:
    num_tokens, scale = 11, 0.3
    queries, bias = normal(1, num_tokens, HEADS, HEAD_DIM), normal(2, num_tokens, HEADS, EXTENT)
    keys, values = normal(3, num_tokens, KV_HEADS, HEAD_DIM), normal(4, num_tokens, KV_HEADS, HEAD_DIM)
    whole = attention(queries, keys, values, bias, scale, window)
    for query in range(num_tokens):
        first = 0 if window is None else max(0, query - window)
        for head in range(HEADS):
            of_head = head // (HEADS // KV_HEADS)
            scores = torch.stack(
                [
                    scale * queries[query, head] @ keys[key, of_head]
                    + (bias[query, head, query - key] if query - key < EXTENT else 0.0)
                    for key in range(first, query + 1)
                ]
            )
            torch.testing.assert_close(whole[query, head], scores.softmax(0) @ values[first : query + 1, of_head])
    for num_new in (1, 4):
        last = attention(queries[-num_new:], keys, values, bias[-num_new:], scale, window)
        torch.testing.assert_close(last, whole[-num_new:])
        if window is not None:
            seen = num_new + window
            there = attention(queries[-num_new:], keys[-seen:], values[-seen:], bias[-num_new:], scale, window)
            torch.testing.assert_close(there, last)


def test_windows_have_the_dtype_that_the_platform_chose(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.configs.inkling import InklingConvCacheParams, InklingConvStateShape

    shape = InklingConvStateShape(conv=[(WIDTH - 1, CHANNELS)], temporal=(0, 0, 0))
    params = InklingConvCacheParams(shape=shape, layers=[0])
    monkeypatch.delenv("SGLANG_MAMBA_CONV_DTYPE", raising=False)
    assert in_dtype_of_model(params) is params
    monkeypatch.setenv("SGLANG_MAMBA_CONV_DTYPE", "float32")
    changed = in_dtype_of_model(params)
    assert (changed.dtype.conv, changed.dtype.temporal) == (torch.float32, params.dtype.temporal)
    assert (changed.shape, changed.layers) == (shape, [0])
