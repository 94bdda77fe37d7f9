"""Checkpoints are the states that the kernels of others end in, when they prefill a sequence only so far.

SGLang's chunk kernels are run as its server runs them, and what they leave on the way is what our kernels take: the
function that makes chunk states and corrected values is wrapped, as a server would. flash-linear-attention sees the
tokens alone; there our own reference makes the operands.
"""

from collections.abc import Callable, Sequence
from types import ModuleType

import pytest
import torch
from torch import Tensor

from sgl_kernel_ext import gated_delta_rule, kda
from sgl_kernel_ext.checkpoints import Checkpoints, Spans, last_chunks, spans_per_sequence

from .batch import cu_seqlens, generator, sequences
from .kernel_checks import EVERYWHERE, LENGTHS

pytestmark = pytest.mark.gpu

DTYPE = torch.bfloat16
MAX_ERROR = 1.6e-2
"""Of the largest value in the states: both sides hold chunk states and corrected values in bfloat16."""
EVERY_STATE = Checkpoints([i for i, _ in EVERYWHERE], [p for _, p in EVERYWHERE], range(len(EVERYWHERE)))
NUM_KEY_HEADS, NUM_HEADS, WIDTH = 2, 4, 128


@pytest.fixture(scope="module")
def device() -> torch.device:
    return torch.device("cuda")


def normal(*size: int, seed: int, device: torch.device) -> Tensor:
    return torch.randn(*size, generator=generator(seed)).to(device)


def queries_and_keys(num_heads: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Of unit length, as kernels round them."""
    drawn = (normal(sum(LENGTHS), num_heads, WIDTH, seed=seed, device=device) for seed in (1, 2))
    q, k = (torch.nn.functional.normalize(each, dim=-1).to(DTYPE) for each in drawn)
    return q, k


def gates(*size: int, strongest: float, seed: int, device: torch.device) -> Tensor:
    """Logs of decays from none to `strongest`, in float32."""
    return -strongest * torch.rand(*size, generator=generator(seed)).to(device)


def assert_ends(actual: Tensor, prefill: Callable[[slice, Tensor], Tensor], initial_states: Tensor) -> None:
    """Each of `EVERYWHERE` is the state that `prefill` (tokens, initial state) ends in."""
    own = dict(sequences(LENGTHS))
    for slot, (sequence, position) in enumerate(EVERYWHERE):
        tokens = slice(own[sequence].start, own[sequence].start + position)
        expected = prefill(tokens, initial_states[sequence].clone())
        error = (actual[slot] - expected).abs().max() / expected.abs().max()
        assert error <= MAX_ERROR, f"sequence {sequence} at {position}: {error:.2g} of the largest value"


def alone(prefill: Callable[[slice, tuple[int, ...], Tensor], Tensor]) -> Callable[[slice, Tensor], Tensor]:
    """`prefill` (tokens, lengths, states) of one sequence."""
    return lambda tokens, state: prefill(tokens, (tokens.stop - tokens.start,), state[None])[0]


def everywhere(device: torch.device, copied: Sequence[int] = ()) -> tuple[Spans, Tensor]:
    """Spans on chunks of 64, of which one of each sequence may be copied, and a pool for their states."""
    pool = torch.full((len(EVERYWHERE), NUM_HEADS, WIDTH, WIDTH), torch.nan, device=device)
    return spans_per_sequence(EVERY_STATE, LENGTHS, 64, device, copied), pool


def recorded(monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> dict[str, Tensor]:
    """What `chunk_gated_delta_rule_fwd_h` of `module` is given and returns at the next call."""
    seen: dict[str, Tensor] = {}
    original = module.chunk_gated_delta_rule_fwd_h

    def run(**arguments: Tensor) -> tuple[Tensor, Tensor]:
        states, values = original(**arguments)
        seen.update(arguments, chunk_states=states, corrected_values=values)
        return states, values

    monkeypatch.setattr(module, "chunk_gated_delta_rule_fwd_h", run)
    return seen


def test_the_gated_delta_rule_is_sglangs(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    chunk = pytest.importorskip("sglang.kernels.ops.attention.fla.chunk")
    q, k = queries_and_keys(NUM_KEY_HEADS, device)
    v = normal(len(k), NUM_HEADS, WIDTH, seed=3, device=device).to(DTYPE)
    g = gates(len(k), NUM_HEADS, strongest=0.1, seed=4, device=device)
    beta = torch.rand(len(k), NUM_HEADS, generator=generator(5)).to(device)
    initial_states = normal(len(LENGTHS), NUM_HEADS, WIDTH, WIDTH, seed=6, device=device)

    def prefill(tokens: slice, lengths: tuple[int, ...], states: Tensor) -> Tensor:
        chunk.chunk_gated_delta_rule(
            *(each[None, tokens].contiguous() for each in (q, k, v, g, beta)),
            initial_state=states,
            initial_state_indices=torch.arange(len(lengths), dtype=torch.int32, device=device),
            cu_seqlens=cu_seqlens(lengths).to(device, torch.int32),
            use_qk_l2norm_in_kernel=True,
        )
        return states

    seen = recorded(monkeypatch, chunk)
    prefill(slice(None), LENGTHS, initial_states.clone())
    monkeypatch.undo()
    spans, pool = everywhere(device)
    operands = (seen["corrected_values"][0], seen["g"][0], seen["chunk_states"][0])
    gated_delta_rule.checkpoint(seen["k"][0], *operands, spans=spans, pool=pool)
    assert_ends(pool, alone(prefill), initial_states)
    pool.fill_(torch.nan)
    gated_delta_rule.advance(seen["k"][0], v, g, beta, seen["chunk_states"][0], spans=spans, pool=pool)
    assert_ends(pool, alone(prefill), initial_states)


@pytest.mark.parametrize("strongest", [0.1, 5.0])
def test_kimi_delta_attention_is_sglangs(
    strongest: float, monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    module = pytest.importorskip("sglang.kernels.ops.attention.fla.kda")
    q, k = queries_and_keys(NUM_HEADS, device)
    v = normal(len(k), NUM_HEADS, WIDTH, seed=3, device=device).to(DTYPE)
    g = gates(len(k), NUM_HEADS, WIDTH, strongest=strongest, seed=4, device=device)
    beta = torch.rand(len(k), NUM_HEADS, generator=generator(5)).to(device)
    initial_states = normal(len(LENGTHS), NUM_HEADS, WIDTH, WIDTH, seed=6, device=device)

    def prefill(tokens: slice, lengths: tuple[int, ...], states: Tensor, **tracked: Tensor) -> Tensor:
        # The kernel writes its outputs over v: each call gets tensors of its own.
        module.chunk_kda(
            *(each[None, tokens].clone() for each in (q, k, v, g, beta)),
            initial_state=states,
            initial_state_indices=torch.arange(len(lengths), dtype=torch.int32, device=device),
            cu_seqlens=cu_seqlens(lengths).to(device, torch.int32),
            **tracked,
        )
        return states

    seen = recorded(monkeypatch, module)
    copied = last_chunks(EVERY_STATE, len(LENGTHS), 64)
    snapshots, chunks = torch.full_like(initial_states, torch.nan), torch.tensor(copied, dtype=torch.int32).to(device)
    prefill(slice(None), LENGTHS, initial_states.clone(), track_state=snapshots, track_chunk_idx=chunks)
    monkeypatch.undo()
    operands = (seen["corrected_values"][0], seen["gk"][0], seen["chunk_states"][0])
    for given in ({}, {"snapshots": snapshots}):
        spans, pool = everywhere(device, copied if given else ())
        kda.checkpoint(k, *operands, spans=spans, pool=pool, log_base=2.0, **given)
        assert_ends(pool, alone(prefill), initial_states)


def test_the_gated_delta_rule_is_flash_linear_attentions(device: torch.device) -> None:
    theirs = pytest.importorskip("fla.ops.gated_delta_rule").chunk_gated_delta_rule
    q, k = queries_and_keys(NUM_KEY_HEADS, device)
    v = normal(len(k), NUM_HEADS, WIDTH, seed=3, device=device).to(DTYPE)
    g = gates(len(k), NUM_HEADS, strongest=0.1, seed=4, device=device)
    beta = torch.rand(len(k), NUM_HEADS, generator=generator(5)).to(device)
    made = gated_delta_rule.prefill(q, k, v, g, beta, cu_seqlens=cu_seqlens(LENGTHS).to(device))
    spans, pool = everywhere(device)
    operands = (made.corrected_values.to(DTYPE), made.decay_sums, made.chunk_states.to(DTYPE))
    gated_delta_rule.checkpoint(k, *operands, spans=spans, pool=pool)

    def prefill(tokens: slice, _: Tensor) -> Tensor:
        arguments = (each[None, tokens] for each in (q, k, v, g, beta))
        return theirs(*arguments, output_final_state=True, state_v_first=True)[1][0]

    assert_ends(pool, prefill, torch.zeros(len(LENGTHS), device=device))


def test_kimi_delta_attention_is_flash_linear_attentions(device: torch.device) -> None:
    theirs = pytest.importorskip("fla.ops.kda").chunk_kda
    q, k = queries_and_keys(NUM_HEADS, device)
    v = normal(len(k), NUM_HEADS, WIDTH, seed=3, device=device).to(DTYPE)
    g = gates(len(k), NUM_HEADS, WIDTH, strongest=0.5, seed=4, device=device)
    beta = torch.rand(len(k), NUM_HEADS, generator=generator(5)).to(device)
    made = kda.prefill(q, k, v, g, beta, cu_seqlens=cu_seqlens(LENGTHS).to(device))
    spans, pool = everywhere(device)
    operands = (made.corrected_values.to(DTYPE), made.decay_sums, made.chunk_states.to(DTYPE))
    kda.checkpoint(k, *operands, spans=spans, pool=pool)

    def prefill(tokens: slice, _: Tensor) -> Tensor:
        arguments = (each[None, tokens] for each in (q, k, v, g, beta))
        return theirs(*arguments, output_final_state=True, state_v_first=True)[1][0]

    assert_ends(pool, prefill, torch.zeros(len(LENGTHS), device=device))
