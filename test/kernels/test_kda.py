"""Kimi Delta Attention equals its recurrence, whatever the batch, and touches only its own states."""

import math
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from sgl_kernel_ext import kda
from sgl_kernel_ext.checkpoints import Checkpoints, spans_over_batch, spans_per_sequence
from sgl_kernel_ext.state_pool import StateSlots

from . import recurrence
from .batch import (
    LENGTHS,
    MAX_ERROR,
    RAGGED,
    assert_close,
    assert_only_changed,
    cu_seqlens,
    generator,
    pool_of,
    sequences,
)

# (num_key_heads, num_value_heads, key_dim, value_dim)
SHAPES = ((2, 2, 16, 16), (1, 4, 12, 20), (2, 6, 33, 7))
SCALE = 0.3


@dataclass(frozen=True)
class Tokens:
    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor

    def __getitem__(self, index: slice) -> "Tokens":
        return Tokens(*(getattr(self, name)[index] for name in self.__dataclass_fields__))

    def prefill(self, lengths: tuple[int, ...], **options: object) -> kda.Prefill:
        return kda.prefill(**vars(self), cu_seqlens=cu_seqlens(lengths), **options)  # type: ignore[arg-type]

    def expected(self, state: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        return recurrence.kda(**vars(self), scale=scale, state=state)


def tokens(num_tokens: int, shape: tuple[int, ...] = SHAPES[1], dtype: torch.dtype = torch.float64) -> Tokens:
    num_key_heads, num_value_heads, key_dim, value_dim = shape
    random = generator(1)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=random, dtype=torch.float64)

    # Channels that remember two tokens beside channels that remember hundreds: a wrong state shows in later outputs.
    memory = torch.logspace(math.log10(2), math.log10(500), key_dim, dtype=torch.float64)
    g = -torch.rand(num_tokens, num_value_heads, key_dim, generator=random, dtype=torch.float64) / memory
    return Tokens(
        q=normal(num_tokens, num_key_heads, key_dim).to(dtype),
        k=torch.nn.functional.normalize(normal(num_tokens, num_key_heads, key_dim), dim=-1).to(dtype),
        v=normal(num_tokens, num_value_heads, value_dim).to(dtype),
        g=g,
        beta=torch.rand(num_tokens, num_value_heads, generator=random, dtype=torch.float64),
    )


def initial_states(num_sequences: int, shape: tuple[int, ...] = SHAPES[1]) -> Tensor:
    _, num_value_heads, key_dim, value_dim = shape
    return torch.randn(num_sequences, num_value_heads, value_dim, key_dim, generator=generator(2), dtype=torch.float64)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", MAX_ERROR)
@pytest.mark.parametrize("length", LENGTHS)
def test_prefill_is_the_recurrence(length: int, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    given = tokens(length, shape, dtype)
    outputs, states = given.expected(torch.zeros_like(initial_states(1, shape)[0]), shape[2] ** -0.5)
    result = given.prefill((length,))
    assert result.outputs.dtype == dtype
    assert_close(result.outputs, outputs, dtype)
    assert_close(result.chunk_states, states[:length:64], dtype)
    assert_close(result.final_states[0], states[-1], dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("chunk_size", [1, 16, 17, 64, 100])
def test_a_batch_is_its_sequences_one_by_one(chunk_size: int, dtype: torch.dtype) -> None:
    given = tokens(sum(RAGGED), dtype=dtype)
    starts = initial_states(len(RAGGED))
    pool, slots = pool_of(starts)
    before = pool.clone()
    result = given.prefill(RAGGED, states=StateSlots(pool, slots), scale=SCALE, chunk_size=chunk_size)
    chunk_states = []
    for sequence, own in sequences(RAGGED):
        outputs, states = given[own].expected(starts[sequence], SCALE)
        assert_close(result.outputs[own], outputs, dtype)
        assert_close(pool[slots[sequence]], states[-1], dtype)
        chunk_states.append(states[: RAGGED[sequence] : chunk_size])
    assert_close(result.chunk_states, torch.cat(chunk_states), dtype)
    assert_only_changed(before, pool, slots)


@pytest.mark.parametrize("log_base", [math.e, 2.0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_checkpoint_at_any_token_is_the_recurrence(dtype: torch.dtype, log_base: float) -> None:
    given = tokens(sum(RAGGED), dtype=dtype)
    starts = initial_states(len(RAGGED))
    (pool, slots), chunk_size = pool_of(starts), 16
    result = given.prefill(RAGGED, states=StateSlots(pool, slots), chunk_size=chunk_size)
    sums = result.decay_sums / math.log(log_base)
    for sequence, own in sequences(RAGGED):
        length = RAGGED[sequence]
        _, states = given[own].expected(starts[sequence], 1.0)
        where = Checkpoints([sequence] * (length + 1), range(length + 1), range(length + 1))
        if length:
            spans = spans_per_sequence(where, RAGGED, chunk_size, "cpu")
            kept = torch.full_like(states, torch.nan)
            kda.checkpoint(
                given.k, result.corrected_values, sums, result.chunk_states, spans=spans, pool=kept, log_base=log_base
            )
            assert_close(kept, states, dtype)


@pytest.mark.parametrize("decay", [-5.0, -80.0])
def test_strong_decay_neither_overflows_nor_leaves_a_trace(decay: float) -> None:
    """Upstream's safe gate allows a log decay of -5 a token: 320 over a chunk, where exp(-G) is beyond float32."""
    length = 200
    given = tokens(length, dtype=torch.float32)
    given.g[..., ::2] = decay
    result = given.prefill((length,))
    outputs, states = given.expected(torch.zeros_like(initial_states(1)[0]), SHAPES[1][2] ** -0.5)
    assert_close(result.outputs, outputs, torch.float32)
    assert_close(result.final_states[0], states[-1], torch.float32)
    kept = torch.full_like(states, torch.nan, dtype=torch.float32)
    where = Checkpoints([0] * (length + 1), range(length + 1), range(length + 1))
    spans = spans_per_sequence(where, (length,), 64, "cpu")
    kda.checkpoint(given.k, result.corrected_values, result.decay_sums, result.chunk_states, spans=spans, pool=kept)
    assert_close(kept, states, torch.float32)


def test_one_decay_for_all_channels_is_the_gated_delta_rule() -> None:
    given = tokens(130)
    given = replace(given, g=given.g[..., :1].expand_as(given.g))
    outputs, states = recurrence.gated_delta_rule(
        given.q, given.k, given.v, given.g[..., 0], given.beta, SCALE, torch.zeros_like(initial_states(1)[0])
    )
    result = given.prefill((130,), scale=SCALE)
    assert_close(result.outputs, outputs, torch.float64)
    assert_close(result.final_states[0], states[-1], torch.float64)


def test_a_sequence_without_an_initial_state_ignores_what_its_slot_holds() -> None:
    given = tokens(sum(RAGGED))
    pool, slots = pool_of(torch.full_like(initial_states(len(RAGGED)), torch.nan))
    has_initial_state = torch.zeros(len(RAGGED), dtype=torch.bool)
    result = given.prefill(RAGGED, states=StateSlots(pool, slots, has_initial_state))
    fresh = given.prefill(RAGGED)
    assert torch.equal(result.outputs, fresh.outputs)
    assert torch.equal(pool[slots], fresh.final_states)


@pytest.mark.parametrize("dtype", MAX_ERROR)
def test_decode_is_a_prefill_of_one_token(dtype: torch.dtype) -> None:
    num_sequences = 5
    given = tokens(num_sequences, dtype=dtype)
    (pool, slots), (other, _) = pool_of(initial_states(num_sequences)), pool_of(initial_states(num_sequences))
    before = pool.clone()
    outputs = kda.decode(**vars(given), states=StateSlots(pool, slots), scale=SCALE)
    result = given.prefill((1,) * num_sequences, states=StateSlots(other, slots), scale=SCALE)
    assert outputs.dtype == dtype
    assert_close(outputs, result.outputs, dtype)
    assert_close(pool[slots], other[slots], torch.promote_types(dtype, torch.float32))
    assert_only_changed(before, pool, slots)


def test_a_padding_sequence_reads_and_writes_nothing() -> None:
    given = tokens(sum(RAGGED))
    given.v[RAGGED[0] + 1] = torch.nan
    pool, slots = pool_of(initial_states(len(RAGGED)))
    slots[2] = -1
    before = pool.clone()
    result = given.prefill(RAGGED, states=StateSlots(pool, slots))
    padding = slice(RAGGED[0], RAGGED[0] + RAGGED[2])
    assert (result.outputs[padding] == 0).all()
    assert not result.outputs.isnan().any()
    assert (kda.decode(**vars(given[-1:]), states=StateSlots(pool, torch.tensor([-1]))) == 0).all()
    assert_only_changed(before, pool, slots)


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("v", torch.zeros(8, 4)),
        ("v", torch.zeros(8, 4, 20, dtype=torch.int64)),
        ("k", torch.zeros(8, 3, 12)),
        ("k", torch.zeros(8, 1, 12, dtype=torch.bfloat16)),
        ("q", torch.zeros(8, 1, 13)),
        ("g", torch.zeros(8, 4)),
        ("g", torch.zeros(8, 4, 13)),
        ("beta", torch.zeros(8, 4, dtype=torch.int64)),
    ],
)
def test_a_bad_input_is_named(name: str, bad: Tensor) -> None:
    given = replace(tokens(8, dtype=torch.float32), **{name: bad})
    with pytest.raises(ValueError, match=rf"\b{name}\b.*got"):
        given.prefill((8,))
    with pytest.raises(ValueError, match=rf"\b{name}\b.*got"):
        kda.decode(**vars(given), states=StateSlots(initial_states(8), torch.arange(8)))


@pytest.mark.parametrize("states", [initial_states(8)[:, :3], initial_states(8).mT])
def test_a_pool_of_other_states_is_refused(states: Tensor) -> None:
    with pytest.raises(ValueError, match="a slot of pool must hold"):
        tokens(8).prefill((8,), states=StateSlots(states, torch.tensor([0])))


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("k", torch.zeros(70, 12)),
        ("corrected_values", torch.zeros(69, 4, 20)),
        ("decay_sums", torch.zeros(70, 4)),
        ("chunk_states", torch.zeros(2, 4, 12, 20)),
        ("chunk_states must have the 2 rows", torch.zeros(1, 4, 20, 12)),
        ("pool", torch.zeros(3, 4, 20, 12, dtype=torch.int32)),
        ("a slot must be 0 to 1", torch.zeros(2, 4, 20, 12)),
        ("snapshots", torch.zeros(1, 4, 12, 20)),
        ("snapshots must have 1 rows", torch.zeros(0, 4, 20, 12)),
        ("log_base", 1.0),
        ("log_base", math.nan),
    ],
)
def test_a_bad_checkpoint_is_named_and_writes_nothing(name: str, bad: object) -> None:
    given = {
        "k": torch.zeros(70, 1, 12),
        "corrected_values": torch.zeros(70, 4, 20),
        "decay_sums": torch.zeros(70, 4, 12),
        "chunk_states": torch.zeros(2, 4, 20, 12),
        "pool": torch.full((3, 4, 20, 12), torch.nan),
        "log_base": math.e,
        "spans": spans_per_sequence(Checkpoints([0], [70], [2]), (70,), 64, "cpu"),
    }
    pool = given["pool"]
    given["pool" if "slot" in name else name.split()[0]] = bad
    with pytest.raises(ValueError, match=rf"\b{name}\b.*got"):
        kda.checkpoint(**given)  # type: ignore[arg-type]
    assert isinstance(pool, Tensor)
    assert pool.isnan().all()


def test_spans_of_another_batch_are_refused() -> None:
    operands = (torch.zeros(70, 1, 12), torch.zeros(70, 4, 20), torch.zeros(70, 4, 12), torch.zeros(2, 4, 20, 12))
    pool = torch.zeros(3, 4, 20, 12)
    longer = spans_per_sequence(Checkpoints([0], [60], [2]), (71,), 64, "cpu")
    with pytest.raises(ValueError, match="must have the 71 tokens of the spans, got 70"):
        kda.checkpoint(*operands, spans=longer, pool=pool)
    of_batch = spans_over_batch(Checkpoints([1], [2], [2]), (60, 10), 64, "cpu")
    with pytest.raises(ValueError, match="every span must start from a chunk"):
        kda.checkpoint(*operands, spans=of_batch, pool=pool)
