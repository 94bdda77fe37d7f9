"""States inside a prefill that ran in one piece are those of a prefill that ends there."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

pytest.importorskip("torch", reason="the server extra is not installed: pip install '.[server]'")
pytest.importorskip("sgl_kernel_ext", reason="the server extra is not installed: pip install '.[server]'")

import torch
from torch import Tensor

from marconi.engine.prefill import hooks, spans
from marconi.engine.prefill.checkpoint import Checkpoint, LayerCall
from marconi.engine.prefill.spans import Family
from marconi_cpu.convolution import causal_conv1d_fn
from marconi_cpu.gated_delta_rule import chunk_gated_delta_rule
from marconi_cpu.mamba2 import mamba_chunk_scan_combined
from sgl_kernel_ext import state_copy

NUM_HEADS, WIDTH, KEYS, VALUES = 2, 4, 8, 6
CHUNK_SIZE = 16
"""Of Mamba2; the gated delta rule has SGLang's."""
NUM_CHANNELS = {Family.GATED_DELTA_RULE: NUM_HEADS * (2 * KEYS + VALUES), Family.MAMBA2: NUM_HEADS * VALUES + 2 * KEYS}
LENGTHS = (130, 21, 5)
PREFIXES = (0, 40, 7)
EVERYWHERE = [(row, position) for row, length in enumerate(LENGTHS) for position in range(1, length + 1)]
NUM_SLOTS = 6 + len(EVERYWHERE)


class TritonGDNKernel:
    """By its name: SGLang's kernel."""


class GDNAttnBackend:
    """By its name: SGLang's backend of a layer of the gated delta rule."""

    kernel_dispatcher = SimpleNamespace(extend_kernel=TritonGDNKernel())


class Mamba2AttnBackend:
    """By its name: SGLang's backend of a Mamba2 layer."""


@dataclass(eq=False)
class Layer:
    """One layer as SGLang runs it on the CPU platform: its pools, and its forward over the launchers."""

    family: Family
    backend: Any
    pools: Any
    gates: Tensor
    weight: Tensor

    @classmethod
    def of(cls, family: Family) -> "Layer":
        random = torch.Generator().manual_seed(5)
        backend = GDNAttnBackend() if family is Family.GATED_DELTA_RULE else Mamba2AttnBackend()
        channels = NUM_CHANNELS[family]
        pools = SimpleNamespace(
            conv=[torch.randn(NUM_SLOTS, channels, WIDTH - 1, generator=random)],
            temporal=torch.randn(NUM_SLOTS, NUM_HEADS, VALUES, KEYS, generator=random),
        )
        of_all = SimpleNamespace(conv=[each[None] for each in pools.conv], temporal=pools.temporal[None])
        backend.req_to_token_pool = SimpleNamespace(
            mamba_pool=SimpleNamespace(mamba_cache=of_all),
            mamba_map={0: 0},
            translate_mamba_indices=lambda slots: slots,
            mamba2_layer_cache=lambda layer_id: pools,
        )
        gates = torch.rand(sum(LENGTHS), 2, NUM_HEADS, generator=random)
        return cls(family, backend, pools, gates, torch.randn(channels, WIDTH, generator=random))

    def prefill(self, forward_batch: Any, tokens: Tensor) -> Tensor:
        lengths, slots = forward_batch.extend_seq_lens_cpu, forward_batch.req_pool_indices
        cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
        mixed = causal_conv1d_fn(
            tokens.T,
            self.weight,
            None,
            self.pools.conv[0],
            cu_seqlens,
            cache_indices=slots,
            has_initial_state=forward_batch.extend_prefix_lens > 0,
        ).T
        gates = self.gates[forward_batch.gates]
        if self.family is Family.GATED_DELTA_RULE:
            q, k, v = mixed.split([NUM_HEADS * KEYS, NUM_HEADS * KEYS, NUM_HEADS * VALUES], -1)
            q, k, v = (x.unflatten(-1, (NUM_HEADS, -1))[None] for x in (q, k, v))
            # What a fresh sequence goes on from is zero: SGLang clears its slot.
            return chunk_gated_delta_rule(
                q,
                k,
                v,
                -0.05 * gates[None, :, 0],
                gates[None, :, 1],
                initial_state=self.pools.temporal,
                initial_state_indices=slots,
                cu_seqlens=cu_seqlens,
                use_qk_l2norm_in_kernel=True,
            )[0]
        x, B, C = mixed.split([NUM_HEADS * VALUES, KEYS, KEYS], -1)
        x, B, C = x.unflatten(-1, (NUM_HEADS, VALUES))[None], B[None, :, None], C[None, :, None]
        out = torch.empty_like(x)
        _, final_states, _ = mamba_chunk_scan_combined(
            x,
            gates[None, :, 0],
            torch.full((NUM_HEADS,), -0.05),
            B,
            C,
            CHUNK_SIZE,
            initial_states=self.pools.temporal[slots],
            cu_seqlens=cu_seqlens,
            out=out,
            return_varlen_states=True,
            return_track_states=True,
            state_dtype=torch.float32,
        )
        self.pools.temporal[slots] = final_states
        return out

    def inside(self) -> spans.Inside:
        """What the last batch kept inside it."""
        inside: spans.Inside = getattr(self.backend, hooks._WAY).way.inside
        return inside

    def run(self, forward_batch: Any, tokens: Tensor, checkpoints: list[Checkpoint]) -> Tensor:
        """As the hooks see it."""
        hybrid = SimpleNamespace(linear_attn_backend=self.backend, _is_full_attn=lambda layer, layer_id: False)
        batch = SimpleNamespace(forward_mode=forward_batch.forward_mode, marconi_plan=checkpoints)
        hooks.on_init_new(
            forward_batch, SimpleNamespace, batch, SimpleNamespace(attn_backend=hybrid, is_draft_worker=False)
        )
        self.backend.forward_metadata = SimpleNamespace(
            mamba_cache_indices=forward_batch.req_pool_indices, mixed_metadata=SimpleNamespace(chunk_size=CHUNK_SIZE)
        )
        hooks.on_init_forward_metadata(None, hybrid, forward_batch)
        names = {"layer": SimpleNamespace(layer_id=0), "forward_batch": forward_batch, "mixed_qkv": tokens}
        forward: Callable[..., Tensor] = lambda _, **given: self.prefill(given["forward_batch"], given["mixed_qkv"])  # noqa: E731
        made: Tensor = hooks.around_hybrid_forward(forward, hybrid, **names)
        return made


def batch_of(rows: list[int], ends: list[int]) -> tuple[Any, Tensor]:
    """The sequences `rows`, each up to one of `ends` of its tokens; and which of all tokens those are."""
    starts = [sum(LENGTHS[:row]) for row in rows]
    taken = torch.cat([torch.arange(start, start + end) for start, end in zip(starts, ends, strict=True)])
    return SimpleNamespace(
        req_pool_indices=torch.tensor([row + 1 for row in rows]),
        extend_prefix_lens=torch.tensor([PREFIXES[row] for row in rows]),
        extend_prefix_lens_cpu=[PREFIXES[row] for row in rows],
        extend_seq_lens_cpu=ends,
        forward_mode=SimpleNamespace(is_extend_without_speculative=lambda: True),
        gates=taken,
        sampling_info=object(),
    ), taken


def tokens_of(family: Family) -> Tensor:
    return torch.randn(sum(LENGTHS), NUM_CHANNELS[family], generator=torch.Generator().manual_seed(9))


def fresh_layer(family: Family) -> Layer:
    layer = Layer.of(family)
    layer.pools.temporal[1] = 0  # the sequence without a prefix
    return layer


def states_at(family: Family, row: int, position: int) -> tuple[Tensor, Tensor]:
    """Window and state where a prefill of this sequence alone ends at `position`."""
    layer = fresh_layer(family)
    forward_batch, taken = batch_of([row], [position])
    layer.prefill(forward_batch, tokens_of(family)[taken])
    return layer.pools.conv[0][row + 1], layer.pools.temporal[row + 1]


def kept_at(family: Family, wanted: list[tuple[int, int]]) -> tuple[list[Checkpoint], Layer, Tensor]:
    layer = fresh_layer(family)
    forward_batch, taken = batch_of([0, 1, 2], list(LENGTHS))
    checkpoints = [
        Checkpoint(row, PREFIXES[row] + position, torch.tensor([5 + n])) for n, (row, position) in enumerate(wanted)
    ]
    outputs = layer.run(forward_batch, tokens_of(family)[taken], checkpoints)
    return checkpoints, layer, outputs


@pytest.mark.parametrize("family", [Family.GATED_DELTA_RULE, Family.MAMBA2])
def test_a_state_at_any_position_is_that_of_a_prefill_that_ends_there(family: Family) -> None:
    checkpoints, layer, _ = kept_at(family, EVERYWHERE)
    for checkpoint, (row, position) in zip(checkpoints, EVERYWHERE, strict=True):
        window, state = states_at(family, row, position)
        slot = int(checkpoint.slot)
        torch.testing.assert_close(layer.pools.conv[0][slot], window, rtol=0, atol=0)
        # float32 sums of up to a chunk's terms, in another order.
        torch.testing.assert_close(layer.pools.temporal[slot], state, rtol=0, atol=1e-6 * float(state.abs().max()))
        assert checkpoint.num_parts == 1


@pytest.mark.parametrize("first", [WIDTH - 2, WIDTH - 1], ids=["from the prefix", "from inputs alone"])
def test_a_window_goes_on_from_that_of_the_prefix_where_its_inputs_do_not_fill_it(first: int) -> None:
    wanted = [(1, first), (0, 64), (1, 20)]
    checkpoints, layer, _ = kept_at(Family.MAMBA2, wanted)
    assert layer.inside().continues_windows == (first < WIDTH - 1)
    for checkpoint, (row, position) in zip(checkpoints, wanted, strict=True):
        window, _ = states_at(Family.MAMBA2, row, position)
        assert torch.equal(layer.pools.conv[0][int(checkpoint.slot)], window)


@pytest.mark.parametrize("family", [Family.GATED_DELTA_RULE, Family.MAMBA2])
def test_keeping_states_changes_no_output_and_no_other_slot(family: Family) -> None:
    checkpoints, layer, outputs = kept_at(family, [(0, 64), (0, 70), (1, 20), (2, 5)])
    plain = fresh_layer(family)
    forward_batch, taken = batch_of([0, 1, 2], list(LENGTHS))
    assert torch.equal(outputs, plain.prefill(forward_batch, tokens_of(family)[taken]))
    kept = [int(each.slot) for each in checkpoints]
    others = [slot for slot in range(NUM_SLOTS) if slot not in kept]
    for mine, theirs in zip(
        (*layer.pools.conv, layer.pools.temporal), (*plain.pools.conv, plain.pools.temporal), strict=True
    ):
        assert torch.equal(mine[others], theirs[others])


def test_a_layer_whose_kernels_were_not_met_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: a forward that took another way is not counted as having written its states."""
    monkeypatch.setattr(Layer, "prefill", lambda self, forward_batch, tokens: tokens)
    checkpoints, _, _ = kept_at(Family.GATED_DELTA_RULE, [(0, 64), (0, 130)])
    assert [each.num_parts for each in checkpoints] == [0, 1], "only the copy at the end was made"


LAYER_IDS = (5, 2, 9)
"""In the order of their states in the pool; those of the model's attention layers, and of other ranks, are left out."""


class Stack(NamedTuple):
    """Several recurrent layers, each of which leaves its number in the working slots 1 and 2."""

    way: spans.FromChunks
    pools: Any
    checkpoints: list[Checkpoint]

    @classmethod
    def of(cls, rows: Sequence[int]) -> "Stack":
        pools = SimpleNamespace(conv=[torch.zeros(3, 6, 4, 3)], temporal=torch.zeros(3, 6, NUM_HEADS, VALUES, KEYS))
        linear = SimpleNamespace(
            req_to_token_pool=SimpleNamespace(
                mamba_pool=SimpleNamespace(mamba_cache=pools),
                mamba_map={layer_id: index for index, layer_id in enumerate(LAYER_IDS)},
                translate_mamba_indices=lambda slots: slots,
            ),
            forward_metadata=SimpleNamespace(mamba_cache_indices=torch.tensor([1, 2], dtype=torch.int32)),
        )
        forward_batch = SimpleNamespace(extend_prefix_lens_cpu=[0, 40], extend_seq_lens_cpu=[7, 9])
        checkpoints = [Checkpoint(row, (7, 49)[row], torch.tensor([3 + row])) for row in rows]
        return cls(spans.prepare(Family.GATED_DELTA_RULE, linear, forward_batch, checkpoints), pools, checkpoints)

    def run(self, layer_id: int) -> None:
        def forward(_backend: None) -> Tensor:
            for slot in (1, 2):
                for pool in (*self.pools.conv, self.pools.temporal):
                    pool[LAYER_IDS.index(layer_id), slot] = 10 * slot + layer_id
            return torch.empty(0)

        self.way.run(LayerCall(forward, None, None, layer_id, {}))

    def kept(self) -> list[list[set[float]]]:
        """What the slots of the checkpoints hold, in each layer."""
        return [
            [
                {
                    *self.pools.conv[0][index, slot].unique().tolist(),
                    *self.pools.temporal[index, slot].unique().tolist(),
                }
                for index in range(3)
            ]
            for slot in (3, 4)
        ]


def test_states_at_the_end_are_copied_once_in_all_layers_when_the_last_has_run(monkeypatch: pytest.MonkeyPatch) -> None:
    num_copies = []
    copy = state_copy.copy
    monkeypatch.setattr(state_copy, "copy", lambda *given, **named: num_copies.append(1) or copy(*given, **named))
    layers = Stack.of([0, 1])
    for layer_id in (2, 5):
        layers.run(layer_id)
        assert layers.kept() == [[{0.0}] * 3] * 2
        assert not any(each.num_parts for each in layers.checkpoints)
    layers.run(9)
    assert layers.kept() == [[{15.0}, {12.0}, {19.0}], [{25.0}, {22.0}, {29.0}]]
    assert [each.num_parts for each in layers.checkpoints] == [3, 3]
    assert len(num_copies) == 2, "one a pool"


def test_a_state_at_the_end_that_one_layer_did_not_come_to_is_not_copied_and_not_counted() -> None:
    layers = Stack.of([1])
    for layer_id in (2, 9, 9):
        layers.run(layer_id)
    assert layers.kept() == [[{0.0}] * 3] * 2
    assert [each.num_parts for each in layers.checkpoints] == [0]


def test_a_wrong_position_is_seen() -> None:
    """Negative control: the state one token later is another."""
    _, state = states_at(Family.MAMBA2, 0, 65)
    _, later = states_at(Family.MAMBA2, 0, 66)
    assert (state - later).abs().max() > 1e-2


def test_kernels_that_leave_too_little_are_cut() -> None:
    layer = Layer.of(Family.GATED_DELTA_RULE)
    assert spans.family_of(layer.backend) is Family.GATED_DELTA_RULE
    layer.backend.kernel_dispatcher = SimpleNamespace(extend_kernel=object())
    assert spans.family_of(layer.backend) is None
    assert spans.family_of(Layer.of(Family.MAMBA2).backend) is Family.MAMBA2
    layer = Layer.of(Family.MAMBA2)
    of_all = layer.backend.req_to_token_pool.mamba_pool.mamba_cache
    of_all.conv.append(of_all.conv[0])
    assert spans.family_of(layer.backend) is None, "several convolutions a layer"
    layer = Layer.of(Family.MAMBA2)
    of_all = layer.backend.req_to_token_pool.mamba_pool.mamba_cache
    of_all.temporal = torch.zeros(1, NUM_SLOTS, NUM_HEADS * VALUES, 1, KEYS)
    assert spans.family_of(layer.backend) is None, "Mamba1 on Mamba2's backend"


def test_the_pools_of_layers_are_found_once_and_anew_where_a_pool_is_another() -> None:
    states = SimpleNamespace(conv=[torch.zeros(2, 4, 3)], temporal=torch.zeros(2, 4, 5))
    pool = SimpleNamespace(mamba_pool=SimpleNamespace(mamba_cache=states), mamba_map={7: 1, 4: 0})
    linear = SimpleNamespace(req_to_token_pool=pool)
    found = spans._pools_of(linear)
    assert spans._pools_of(linear) is found
    for layer_id, index in pool.mamba_map.items():
        assert found[layer_id].windows.data_ptr() == states.conv[0][index].data_ptr()
        assert found[layer_id].states.data_ptr() == states.temporal[index].data_ptr()
    states.temporal = torch.ones(2, 4, 5)
    assert spans._pools_of(linear)[7].states.data_ptr() == states.temporal[1].data_ptr()
