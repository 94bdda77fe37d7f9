"""The hooks around SGLang's kernels take the right operands: those that SGLang passes and returns, in its layouts."""

import ast
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="the server extra is not installed: pip install '.[server]'")
pytest.importorskip("sglang", reason="the server extra is not installed: pip install '.[server]'")

import sglang
import torch
from torch import Tensor

from marconi.engine.prefill import operands, spans
from marconi.engine.prefill.checkpoint import Checkpoint
from marconi.engine.prefill.spans import ChunkEnds, Family, Inside, LayerPools, RunningLayer
from sgl_kernel_ext import gated_delta_rule, mamba2, short_conv
from sgl_kernel_ext.checkpoints import (
    Checkpoints,
    Spans,
    spans_after_chunks,
    spans_from_start,
    spans_over_batch,
    spans_per_sequence,
)
from sgl_kernel_ext.state_pool import StateSlots

UPSTREAM = Path(sglang.__file__).parent
LENGTHS = [70, 30]
CU_SEQLENS = torch.tensor([0, 70, 100])
WHERE = Checkpoints([0, 0, 1], [1, 65, 17], [2, 0, 1])
SLOTS = [2, 0, 1]
HEADS, KEYS, VALUES, CHANNELS, WIDTH = 2, 8, 6, 10, 4


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@contextmanager
def a_layer(
    family: Family, states: Spans, conv: Tensor | None = None, snapshots: Tensor | None = None
) -> Iterator[RunningLayer]:
    """A layer that runs, as `FromChunks.run` makes it."""
    windows = spans_from_start(WHERE, LENGTHS, "cpu")
    inside = Inside(family, (), windows, True, states, ChunkEnds.of(LENGTHS, 64, "cpu"), snapshots, {})
    pools = LayerPools(torch.empty(0) if conv is None else conv, torch.full((3, HEADS, VALUES, KEYS), torch.nan))
    layer = RunningLayer(inside, pools)
    token = spans._RUNNING.set(layer)
    try:
        yield layer
    finally:
        spans._RUNNING.reset(token)


def truth(prefill: Any) -> Tensor:
    """The final states of `prefill` (tokens, their cumulative lengths), of each sequence up to its position."""
    made = []
    for sequence, position in zip(WHERE.sequences, WHERE.positions, strict=True):
        start = int(CU_SEQLENS[sequence])
        made.append(prefill(slice(start, start + position), torch.tensor([0, position])).final_states[0])
    return torch.stack(made)


def assert_kept(layer: RunningLayer, expected: Tensor) -> None:
    assert layer.has_states
    bound = 1e-6 * float(expected.abs().max())
    torch.testing.assert_close(layer.pools.states[SLOTS], expected, rtol=0, atol=bound)


def unit(x: Tensor) -> Tensor:
    return torch.nn.functional.normalize(x, dim=-1)


def test_the_gated_delta_rule_from_what_its_chunk_kernel_returns() -> None:
    q, k, v = unit(normal(100, HEADS, KEYS)), unit(normal(100, HEADS, KEYS, seed=1)), normal(100, HEADS, VALUES, seed=2)
    g, beta = -0.1 * normal(100, HEADS, seed=3).abs(), normal(100, HEADS, seed=4).sigmoid()
    made = gated_delta_rule.prefill(q, k, v, g, beta, cu_seqlens=CU_SEQLENS)
    with a_layer(Family.GATED_DELTA_RULE, spans_per_sequence(WHERE, LENGTHS, 64, "cpu")) as layer:
        operands.around_chunk_states(
            lambda *_, **__: (made.chunk_states[None], made.corrected_values[None]),
            k=k[None],
            w=None,
            u=None,
            g=made.decay_sums[None],
            initial_state=None,
            cu_seqlens=CU_SEQLENS,
        )
    assert_kept(
        layer, truth(lambda at, cu: gated_delta_rule.prefill(q[at], k[at], v[at], g[at], beta[at], cu_seqlens=cu))
    )


def test_the_gated_delta_rule_from_the_states_that_flashinfer_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's own `extend`, over a stand-in for FlashInfer's kernel and for its Triton preparation of the inputs."""
    from sglang.kernels.ops.attention.fla import l2norm
    from sglang.srt.layers.attention.linear.kernels.gdn_flashinfer import FlashInferGDNKernel

    width = KEYS
    q, k, v = normal(100, HEADS, width), normal(100, HEADS, width, seed=1), normal(100, HEADS, width, seed=2)
    g, beta = -0.1 * normal(100, HEADS, seed=3).abs(), normal(100, HEADS, seed=4).sigmoid()
    initial = normal(2, HEADS, width, width, seed=5)
    pool, slots = torch.cat([torch.zeros(3, HEADS, width, width), initial]), torch.tensor([3, 4])

    def prefill(at: slice, cu_seqlens: Tensor, states: Tensor) -> gated_delta_rule.Prefill:
        own = StateSlots(states.clone(), torch.arange(len(states)))
        return gated_delta_rule.prefill(
            unit(q[at]), unit(k[at]), v[at], g[at], beta[at], cu_seqlens=cu_seqlens, states=own
        )

    def flashinfer(**given: Any) -> tuple[Tensor, Tensor]:
        every, at = given["checkpoint_every_n_tokens"], given["checkpoint_cu_starts"].tolist()
        assert torch.allclose(given["k"].norm(dim=-1), torch.ones(()))
        for sequence, length in enumerate(LENGTHS):
            for chunk in range(length // every):
                start = int(CU_SEQLENS[sequence])
                upto, bounds = slice(start, start + (chunk + 1) * every), torch.tensor([0, (chunk + 1) * every])
                state = prefill(upto, bounds, given["initial_state"][[sequence]]).final_states[0]
                given["state_checkpoints"][at[sequence] + chunk] = state
        made = prefill(slice(None), CU_SEQLENS, given["initial_state"])
        return made.outputs, made.final_states

    prepared = lambda q, k, v: (unit(q), unit(k), v)  # noqa: E731
    kernel = SimpleNamespace(use_state_pool=False, _prefill_fn=flashinfer)
    with a_layer(Family.FLASHINFER, spans_after_chunks(WHERE, LENGTHS, 64, "cpu")) as layer:
        layer.pools = layer.pools._replace(states=torch.full((3, HEADS, width, width), torch.nan))

        def hooked(*given: Tensor) -> tuple[Tensor, ...]:
            made = prepared(*given)
            operands.on_flashinfer_inputs(made, *given)
            return made

        monkeypatch.setattr(l2norm, "gdn_prefill_qkv_prepare_fwd", hooked)
        _, _, chunk_states = operands.around_flashinfer(
            FlashInferGDNKernel.extend,
            kernel,
            *(each[None] for each in (q, k, v, g, beta)),
            ssm_states=pool,
            cache_indices=slots,
            query_start_loc=CU_SEQLENS,
        )
    assert chunk_states.shape[:2] == (1, 1), "one chunk of 64 tokens ends inside the first sequence, none in the second"
    assert not torch.equal(pool[3:], initial), "the kernel wrote the final states over the initial ones"
    expected = []
    for sequence, position in zip(WHERE.sequences, WHERE.positions, strict=True):
        start = int(CU_SEQLENS[sequence])
        at, bounds = slice(start, start + position), torch.tensor([0, position])
        expected.append(prefill(at, bounds, initial[[sequence]]).final_states[0])
    assert_kept(layer, torch.stack(expected))


def flashinfer_rows(states: Tensor, lengths: list[int], before: list[int], every: int, num_rows: int) -> Tensor:
    """As its kernels number them: the states after multiples of `every`, of `states` after each token of the batch."""
    rows = torch.full((num_rows, *states.shape[1:]), torch.nan)
    first = 0
    for sequence, length in enumerate(lengths):
        for block_end in range(64, length + 1, 64):
            if block_end % every == 0:
                rows[before[sequence] + block_end // every - 1] = states[first + block_end - 1]
        first += length
    return rows


def kept_by_flashinfer(rng: random.Random, max_rows: int, wrong: int = 0) -> tuple[Tensor, Tensor, Inside]:
    """What is kept of a random batch, and the states that the recurrence, token by token, has there.

    `wrong` tokens are between what is asked for and what the rows are of.
    """
    lengths = [rng.randint(1, 400) for _ in range(rng.randint(1, 3))]
    wanted = [
        (row, at) for row, length in enumerate(lengths) for at in {rng.randint(1, length), rng.randint(1, length)}
    ]
    num_tokens, num_slots = sum(lengths), len(wanted)
    k, v = unit(normal(num_tokens, 1, 4)), normal(num_tokens, 1, 3, seed=1)
    g, beta = -0.02 * normal(num_tokens, 1, seed=2).abs(), normal(num_tokens, 1, seed=3).sigmoid()
    initial, after = normal(len(lengths), 1, 3, 4, seed=4), torch.empty(num_tokens, 1, 3, 4)
    for sequence, length in enumerate(lengths):
        state, first = initial[sequence], sum(lengths[:sequence])
        for token in range(first, first + length):
            state = state * g[token].exp()
            corrected = beta[token, :, None] * (v[token] - (state @ k[token, :, :, None])[..., 0])
            state = after[token] = state + corrected[..., None] * k[token, :, None]
    pool = torch.cat([torch.full((num_slots, 1, 3, 4), torch.nan), initial])
    linear = SimpleNamespace(
        req_to_token_pool=SimpleNamespace(
            mamba_pool=SimpleNamespace(
                mamba_cache=SimpleNamespace(conv=[torch.empty(1, len(pool), 5, 3)], temporal=pool[None])
            ),
            mamba_map={0: 0},
            translate_mamba_indices=lambda slots: slots,
        ),
        forward_metadata=SimpleNamespace(mamba_cache_indices=torch.arange(num_slots, len(pool))),
    )
    checkpoints = tuple(Checkpoint(row, at, torch.tensor([slot])) for slot, (row, at) in enumerate(wanted))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spans, "MAX_ROWS_BYTES", max_rows * 4 * 3 * 4)
        listed = spans._listed(Family.FLASHINFER, linear, checkpoints, [at for _, at in wanted], lengths)
    inside = listed.on(listed.vectors, torch.arange(num_slots))

    def extend(_kernel: None, *_: Tensor, **given: Any) -> tuple[Any, ...]:
        num_rows, rows = given.get("num_state_checkpoints", 0), None
        if num_rows:
            before, every = given["state_checkpoint_cu_starts"].tolist(), given["state_checkpoint_every_n_tokens"]
            rows = flashinfer_rows(after.roll(wrong, 0), lengths, before, every, num_rows)
            assert not rows.isnan().any()
            assert num_rows <= max_rows
        given["ssm_states"][given["cache_indices"]] = torch.nan
        return None, None, None if rows is None else rows[None]

    layer = RunningLayer(inside, LayerPools(torch.empty(0), pool))
    layer.keys = k
    token_of = spans._RUNNING.set(layer)
    try:
        operands.around_flashinfer(
            extend,
            None,
            *(each[None] for each in (k, k, v, g, beta)),
            ssm_states=pool,
            cache_indices=linear.forward_metadata.mamba_cache_indices,
        )
    finally:
        spans._RUNNING.reset(token_of)
    return pool[:num_slots], torch.stack([after[sum(lengths[:row]) + at - 1] for row, at in wanted]), inside


@pytest.mark.parametrize("seed", range(40))
def test_what_goes_on_from_flashinfers_rows_is_the_recurrence_whatever_the_batch(seed: int) -> None:
    """Few rows are all that fits in every second batch: walks are longer then, and the states the same."""
    kept, expected, inside = kept_by_flashinfer(random.Random(seed), max_rows=2 if seed % 2 else 1000)  # noqa: S311
    torch.testing.assert_close(kept, expected, rtol=0, atol=2e-6 * float(expected.abs().max()))
    assert seed % 2 or inside.states.max_tokens < 64


def test_flashinfers_rows_of_another_token_are_seen() -> None:
    """Negative control: a batch that starts from rows, each of the token before."""
    kept, expected, inside = kept_by_flashinfer(random.Random(0), max_rows=1000, wrong=1)  # noqa: S311
    assert inside.states.num_chunks
    assert (kept - expected).abs().max() > 1e-3


@pytest.mark.parametrize(("position", "num_rows"), [(7000, 1), (8191, 1), (4100, 2), (63, 0)])
def test_one_state_in_8192_tokens_is_two_rows_or_fewer(position: int, num_rows: int) -> None:
    every = spans.interval([position], [8192], row_bytes=2 << 20)
    where = Checkpoints([0], [position], [0])
    if spans_after_chunks(where, [8192], every, "cpu").num_chunks:
        assert ChunkEnds.of([8192], every, "cpu").num == num_rows
    else:
        assert num_rows == 0


@pytest.mark.parametrize("positions", [[1000, 7000], [100], [64, 20_000, 32_700]])
def test_rows_take_no_more_than_their_share_of_memory(positions: list[int]) -> None:
    every = spans.interval(positions, [32_768, 50], row_bytes=2 << 20)
    assert 0 < ChunkEnds.of([32_768, 50], every, "cpu").num * (2 << 20) <= spans.MAX_ROWS_BYTES
    assert every % 64 == 0


def test_flashinfer_is_asked_for_no_states_where_every_sequence_is_shorter_than_a_chunk(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It raises for an interval without a buffer, which SGLang makes where there is a state to put into it."""
    from sglang.kernels.ops.attention.fla import l2norm
    from sglang.srt.layers.attention.linear.kernels.gdn_flashinfer import FlashInferGDNKernel

    k, v, g, beta = unit(normal(63, HEADS, KEYS)), normal(63, HEADS, KEYS), -normal(63, HEADS).abs(), normal(63, HEADS)
    bounds, pool = torch.tensor([0, 63]), torch.zeros(2, HEADS, KEYS, KEYS)

    def flashinfer(**given: Any) -> tuple[Tensor, Tensor]:
        absent = given["state_checkpoints"] is None, given["checkpoint_cu_starts"] is None
        assert absent == (True, True)
        assert given["checkpoint_every_n_tokens"] == 0
        return given["v"], given["initial_state"]

    def prepared(*given: Tensor) -> tuple[Tensor, ...]:
        operands.on_flashinfer_inputs(given, *given)
        return given

    monkeypatch.setattr(l2norm, "gdn_prefill_qkv_prepare_fwd", prepared)
    where = Checkpoints([0], [62], [1])
    states, windows = spans_after_chunks(where, [63], 64, "cpu"), spans_from_start(where, [63], "cpu")
    inside = Inside(Family.FLASHINFER, (), windows, False, states, None, None, {})
    token = spans._RUNNING.set(layer := RunningLayer(inside, LayerPools(torch.empty(0), pool)))
    try:
        operands.around_flashinfer(
            FlashInferGDNKernel.extend,
            SimpleNamespace(use_state_pool=False, _prefill_fn=flashinfer),
            *(each[None] for each in (k, k, v, g, beta)),
            ssm_states=pool,
            cache_indices=torch.tensor([0]),
            query_start_loc=bounds,
        )
    finally:
        spans._RUNNING.reset(token)
    assert layer.has_states
    made = gated_delta_rule.prefill(k[:62], k[:62], v[:62], g[:62], beta[:62], cu_seqlens=torch.tensor([0, 62]))
    torch.testing.assert_close(pool[1], made.final_states[0])


def test_flashinfer_runs_as_it_was_called_where_it_cannot_be_asked_for_states() -> None:
    """No state is written then, and the answer is SGLang's."""
    was_asked = []

    def extend(_kernel: Any, *_: Any, **given: Any) -> str:
        was_asked.append("num_state_checkpoints" in given)
        if was_asked[-1]:
            raise RuntimeError("no such kernel")
        return "the answer"

    states, slots = spans_after_chunks(WHERE, LENGTHS, 64, "cpu"), torch.zeros(len(LENGTHS), dtype=torch.int32)
    with a_layer(Family.FLASHINFER, states) as layer:
        given = [torch.zeros(1)] * 5
        made = operands.around_flashinfer(extend, None, *given, ssm_states=torch.zeros(1, 1), cache_indices=slots)
    assert made == "the answer"
    assert was_asked == [True, False]
    assert not layer.has_states


def test_mamba2_from_the_operands_of_its_varlen_states() -> None:
    x, delta, A = normal(100, HEADS, VALUES), normal(100, HEADS, seed=1).abs(), -normal(HEADS, seed=2).abs()
    B, C = normal(100, 1, KEYS, seed=3), normal(100, 1, KEYS, seed=4)

    def prefill(at: slice, cu_seqlens: Tensor) -> mamba2.Prefill:
        return mamba2.prefill(x[at], delta[at], A, B[at], C[at], cu_seqlens=cu_seqlens, chunk_size=16)

    made = prefill(slice(None), CU_SEQLENS)
    with a_layer(Family.MAMBA2, spans_over_batch(WHERE, LENGTHS, 16, "cpu")) as layer:
        operands.on_varlen_states(
            None, B, x, made.delta, made.decay_sums, CU_SEQLENS, made.grid_states, initial_states=None
        )
    assert_kept(layer, truth(prefill))


@pytest.mark.parametrize("is_transposed", [False, True], ids=["channels first", "window first"])
def test_windows_from_the_inputs_of_a_convolution_before_it_runs(is_transposed: bool) -> None:
    x, initial = normal(100, CHANNELS), normal(2, CHANNELS, WIDTH - 1, seed=1)
    pool = torch.full((5, CHANNELS, WIDTH - 1), torch.nan)
    pool[3:] = initial
    stored = pool.transpose(-1, -2).contiguous() if is_transposed else pool
    view = stored.transpose(-1, -2) if is_transposed else stored
    slots, has_initial_state = torch.tensor([3, 4]), torch.tensor([False, True])

    with a_layer(Family.MAMBA2, spans_over_batch(WHERE, LENGTHS, 16, "cpu"), stored) as layer:
        operands.before_convolution(
            x.T,
            torch.zeros(CHANNELS, WIDTH),
            None,
            activation="silu",
            conv_states=view,
            has_initial_state=has_initial_state,
            cache_indices=slots,
            query_start_loc=CU_SEQLENS,
            seq_lens_cpu=LENGTHS,
        )
        view[3:] = torch.nan  # a kernel puts the last inputs there
        operands.before_convolution(x.T, torch.zeros(CHANNELS, WIDTH), None)  # SGLang's CUDA one may call Triton's
    assert layer.has_windows
    for sequence, position, slot in zip(WHERE.sequences, WHERE.positions, SLOTS, strict=True):
        states = StateSlots(initial.clone(), torch.tensor([sequence]), has_initial_state[[sequence]])
        start = int(CU_SEQLENS[sequence])
        short_conv.prefill(
            x[start : start + position],
            torch.zeros(CHANNELS, WIDTH),
            None,
            cu_seqlens=torch.tensor([0, position]),
            states=states,
        )
        assert torch.equal(view[slot], states.pool[sequence])


def test_without_a_layer_that_keeps_states_nothing_happens() -> None:
    broken: Any = object()
    operands.around_chunk_states(lambda *_, **__: (broken, broken), broken, g=broken)
    operands.on_kda_intra(None, broken, broken)
    operands.on_varlen_states(None, broken, broken, broken, broken, broken, broken)
    operands.before_convolution(broken, conv_states=broken)


def calls(path: str, function: str) -> Iterator[ast.Call]:
    for node in ast.walk(ast.parse((UPSTREAM / path).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == function:
            yield node


@pytest.mark.parametrize(
    ("path", "function", "keywords"),
    [
        ("kernels/ops/attention/fla/chunk.py", "chunk_gated_delta_rule_fwd_h", {"k", "g"}),
        ("srt/layers/attention/linear/gdn_backend.py", "self.extend_kernel.extend", {"ssm_states", "cache_indices"}),
        (
            "kernels/ops/attention/fla/kda.py",
            "chunk_gated_delta_rule_fwd_h",
            {"k", "gk", "cu_seqlens", "track_state", "track_chunk_idx"},
        ),
        ("kernels/ops/attention/fla/kda.py", "chunk_kda_fwd_intra", {"q", "k"}),
        ("kernels/ops/mamba/triton_ops/ssd_combined.py", "chunk_state_varlen", {"initial_states"}),
        ("srt/layers/attention/mamba/mamba.py", "ccfn", {"conv_states", "cache_indices", "has_initial_state"}),
        (
            "srt/layers/attention/linear/gdn_backend.py",
            "causal_conv1d_fn",
            {"conv_states", "cache_indices", "has_initial_state"},
        ),
        (
            "srt/layers/attention/linear/kda_backend.py",
            "causal_conv1d_fn",
            {"conv_states", "cache_indices", "has_initial_state"},
        ),
    ],
)
def test_sglang_passes_by_keyword_what_the_hooks_take_by_keyword(path: str, function: str, keywords: set[str]) -> None:
    found = list(calls(path, function))
    assert found
    assert all(keywords <= {each.arg for each in call.keywords} for call in found)
