"""A prefill that is cut computes what one in a piece does, and leaves every state that was asked for, exactly."""

import random
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="the server extra is not installed: pip install '.[server]'")

import torch

from marconi.engine.prefill import hooks, passes
from marconi.engine.prefill.checkpoint import Checkpoint
from marconi.engine.prefill.verified import HYBRID_BACKEND, VERIFIED_BACKENDS

NUM_SLOTS = 40
WIDTH = 3


class RunningSums:
    """A linear backend of one layer: the state of a request is the sum of its tokens, and so is each output."""

    def __init__(self) -> None:
        self.layer_states = SimpleNamespace(
            conv=[torch.full((NUM_SLOTS, 1), torch.nan, dtype=torch.float64)],
            temporal=torch.full((NUM_SLOTS, WIDTH), torch.nan, dtype=torch.float64),
        )
        self.req_to_token_pool = SimpleNamespace(
            translate_mamba_indices=lambda slots: slots, mamba2_layer_cache=lambda layer_id: self.layer_states
        )
        self.forward_metadata: Any = None
        self.linear_attn_backend = self
        self.num_calls = 0

    def _is_full_attn(self, layer: Any, layer_id: int | None = None) -> bool:
        return bool(layer.is_full)

    def init_forward_metadata(self, forward_batch: Any) -> None:
        self.forward_metadata = SimpleNamespace(mamba_cache_indices=forward_batch.req_pool_indices)

    def forward(self, **names: Any) -> torch.Tensor:
        """One output a token: the sum so far, of the width of the tokens, behind an axis of size 1."""
        self.num_calls += 1
        forward_batch, tokens = names["forward_batch"], names["mixed_qkv"]
        out = torch.zeros_like(tokens)
        first = 0
        for row, slot in enumerate(self.forward_metadata.mamba_cache_indices.tolist()):
            start, length = forward_batch.extend_prefix_lens_cpu[row], forward_batch.extend_seq_lens_cpu[row]
            assert forward_batch.seq_lens_cpu[row] == start + length
            assert forward_batch.extend_start_loc[row] == first
            state = self.layer_states.temporal[slot] if start else torch.zeros(WIDTH, dtype=torch.float64)
            out[first : first + length] = state + tokens[first : first + length].cumsum(0)
            self.layer_states.temporal[slot] = out[first + length - 1]
            self.layer_states.conv[0][slot] = start + length
            first += length
        assert first == len(tokens)
        return out[None]


def batch_of(starts: list[int], lengths: list[int]) -> SimpleNamespace:
    offsets = [sum(lengths[:row]) for row in range(len(lengths))]
    ends = [start + length for start, length in zip(starts, lengths, strict=True)]
    return SimpleNamespace(
        batch_size=len(starts),
        req_pool_indices=torch.arange(1, len(starts) + 1),
        seq_lens=torch.tensor(ends),
        seq_lens_cpu=torch.tensor(ends),
        extend_prefix_lens=torch.tensor(starts),
        extend_prefix_lens_cpu=starts,
        extend_seq_lens=torch.tensor(lengths),
        extend_seq_lens_cpu=lengths,
        extend_start_loc=torch.tensor(offsets),
        forward_mode=SimpleNamespace(is_extend_without_speculative=lambda: True),
        mamba_track_mask="of the whole batch",
        sampling_info=object(),
    )


def run(backend: RunningSums, forward_batch: Any, tokens: torch.Tensor, checkpoints: list[Checkpoint]) -> torch.Tensor:
    """One layer, the way the hooks see it."""
    batch = SimpleNamespace(forward_mode=forward_batch.forward_mode, marconi_plan=checkpoints)
    hooks.on_init_new(
        forward_batch, SimpleNamespace, batch, SimpleNamespace(attn_backend=backend, is_draft_worker=False)
    )
    backend.init_forward_metadata(forward_batch)
    hooks.on_init_forward_metadata(None, backend, forward_batch)
    layer = SimpleNamespace(is_full=False, layer_id=0)
    names = {"layer": layer, "forward_batch": forward_batch, "mixed_qkv": tokens, "linear_attn_output": "a buffer"}
    whole = backend.forward_metadata
    out: torch.Tensor = hooks.around_hybrid_forward(lambda self, **given: self.forward(**given), backend, **names)
    assert backend.forward_metadata is whole, "the layers after this one see the whole batch"
    return out


def set_way(backend: RunningSums, forward_batch: Any, checkpoints: list[Checkpoint]) -> None:
    plan = hooks._Plan(forward_batch.sampling_info, forward_batch.extend_seq_lens_cpu, checkpoints)
    setattr(backend, hooks._WAY, hooks._Prepared(plan, passes.prepare(backend, forward_batch, checkpoints), None))


def random_case(rng: random.Random) -> tuple[list[int], list[int], list[tuple[int, int]]]:
    num_rows = rng.randint(1, 4)
    starts = [rng.choice([0, rng.randint(1, 50)]) for _ in range(num_rows)]
    lengths = [rng.randint(1, 9) for _ in range(num_rows)]
    wanted = [
        (row, starts[row] + at)
        for row in range(num_rows)
        for at in sorted(rng.sample(range(1, lengths[row] + 1), rng.randint(0, min(3, lengths[row]))))
    ]
    return starts, lengths, wanted


def expected_states(
    tokens: torch.Tensor, starts: list[int], lengths: list[int], row: int, depth: int, initial: torch.Tensor
) -> torch.Tensor:
    first = sum(lengths[:row])
    return initial + tokens[first : first + depth - starts[row]].sum(0)


@pytest.mark.parametrize("seed", range(60))
def test_outputs_and_states_are_those_of_a_prefill_in_one_piece(seed: int) -> None:
    rng = random.Random(seed)  # noqa: S311 - a workload, not a secret
    generator = torch.Generator().manual_seed(seed)
    starts, lengths, wanted = random_case(rng)
    tokens = torch.randint(-50, 50, (sum(lengths), WIDTH), generator=generator).double()
    initial = torch.randint(-50, 50, (NUM_SLOTS, WIDTH), generator=generator).double()
    whole, parts = RunningSums(), RunningSums()
    for backend in (whole, parts):
        backend.layer_states.temporal[1:5] = initial[1:5]
    checkpoints = [Checkpoint(row, depth, torch.tensor([10 + n])) for n, (row, depth) in enumerate(wanted)]
    in_one = run(whole, batch_of(starts, lengths), tokens, [])
    in_parts = run(parts, batch_of(starts, lengths), tokens, checkpoints)
    assert torch.equal(in_one, in_parts)
    assert torch.equal(whole.layer_states.temporal[1:5].nan_to_num(), parts.layer_states.temporal[1:5].nan_to_num())
    for each in checkpoints:
        before = initial[each.row + 1] if starts[each.row] else torch.zeros(WIDTH, dtype=torch.float64)
        state = parts.layer_states.temporal[int(each.slot)]
        assert torch.equal(state, expected_states(tokens, starts, lengths, each.row, each.depth, before))
        assert parts.layer_states.conv[0][int(each.slot)] == each.depth
        assert each.num_parts == 1
    untouched = [slot for slot in range(10, NUM_SLOTS) if slot - 10 >= len(wanted)]
    assert parts.layer_states.temporal[untouched].isnan().all()


def test_a_state_at_the_end_of_a_prefill_costs_no_pass() -> None:
    backend = RunningSums()
    run(backend, batch_of([0, 0], [4, 6]), torch.ones(10, WIDTH).double(), [Checkpoint(1, 6, torch.tensor([9]))])
    assert backend.num_calls == 1
    assert backend.layer_states.temporal[9].tolist() == [6.0] * WIDTH


def test_a_batch_that_was_not_planned_runs_in_one_piece_whatever_was_planned_before() -> None:
    """The plan belongs to one batch: the next, equal in everything but how it is sampled, is not cut."""
    backend = RunningSums()
    tokens = torch.ones(4, WIDTH).double()
    run(backend, batch_of([0], [4]), tokens, [Checkpoint(0, 2, torch.tensor([9]))])
    assert backend.num_calls == 2
    run(backend, batch_of([0], [4]), tokens, [])
    assert backend.num_calls == 3


def test_a_batch_that_is_padded_and_whose_metadata_is_made_again_keeps_its_plan() -> None:
    """As with data-parallel attention: new lists of the same lengths, tokens behind the last, and a second plan."""
    backend, forward_batch = RunningSums(), batch_of([0], [4])
    batch = SimpleNamespace(forward_mode=forward_batch.forward_mode, marconi_plan=[Checkpoint(0, 2, torch.tensor([9]))])
    hooks.on_init_new(
        forward_batch, SimpleNamespace, batch, SimpleNamespace(attn_backend=backend, is_draft_worker=False)
    )
    for _ in range(2):
        forward_batch.extend_seq_lens_cpu = [*forward_batch.extend_seq_lens_cpu]
        backend.init_forward_metadata(forward_batch)
        hooks.on_init_forward_metadata(None, backend, forward_batch)
    layer = SimpleNamespace(is_full=False, layer_id=0)
    names = {"layer": layer, "forward_batch": forward_batch, "mixed_qkv": torch.ones(7, WIDTH).double()}
    out = hooks.around_hybrid_forward(lambda self, **given: self.forward(**given), backend, **names)
    assert out.shape[1] == 7
    assert backend.layer_states.temporal[9].tolist() == [2.0] * WIDTH


def test_an_attention_layer_is_left_alone() -> None:
    backend = RunningSums()
    forward_batch = batch_of([0], [4])
    backend.init_forward_metadata(forward_batch)
    set_way(backend, forward_batch, [])
    layer = SimpleNamespace(is_full=True, layer_id=0)
    seen = []
    hooks.around_hybrid_forward(
        lambda self, *args, **kwargs: seen.append((args, kwargs)), backend, "q", "k", "v", layer, forward_batch
    )
    assert seen == [(("q", "k", "v", layer, forward_batch), {})]


def test_only_what_is_of_tokens_is_cut_whatever_its_width() -> None:
    """Falcon-H1 calls its Mamba2 backend by position, with a vector that may be as wide as the batch is long."""
    backend = RunningSums()
    forward_batch = batch_of([0], [4])
    backend.init_forward_metadata(forward_batch)
    set_way(backend, forward_batch, [Checkpoint(0, 3, torch.tensor([9]))])
    mup_vector = torch.arange(4.0)[None]
    seen = []

    def forward(_self: Any, **names: Any) -> torch.Tensor:
        seen.append((names["mixer"], len(names["hidden_states"]), names["mup_vector"].shape))
        return names["hidden_states"] * 2

    tokens = torch.arange(8.0).view(4, 2)
    out = hooks.around_mamba2_forward(forward, backend, "mixer", tokens, None, 0, forward_batch, mup_vector=mup_vector)
    assert seen == [("mixer", 3, (1, 4)), ("mixer", 1, (1, 4))]
    assert torch.equal(out, tokens * 2)


class HybridLinearAttnBackend:
    def __init__(self, linear: Any) -> None:
        self.linear_attn_backend = linear


def runner(hybrid: Any) -> Any:
    return SimpleNamespace(attn_backend=hybrid)


def test_models_whose_prefills_cannot_be_cut_are_told_apart() -> None:
    verified = [type(name, (), {})() for name, hybrid in VERIFIED_BACKENDS.items() if hybrid == HYBRID_BACKEND]
    assert [hooks.why_not(runner(HybridLinearAttnBackend(linear))) for linear in verified] == [None] * len(verified)
    other = HybridLinearAttnBackend(type("ShortConvAttnBackend", (), {})())
    assert hooks.why_not(runner(other)) == "recurrent layers on ShortConvAttnBackend"
    graphs = HybridLinearAttnBackend(verified[0])
    graphs.use_captured_forward_metadata_for_breakable_cuda_graph = True  # type: ignore[attr-defined]
    assert "prefill graph" in str(hooks.why_not(runner(graphs)))


def test_the_verified_backends_are_sglangs() -> None:
    pytest.importorskip("sglang", reason="the server extra is not installed: pip install '.[server]'")
    from sglang.srt.layers.attention import hybrid_linear_attn_backend as module

    assert module.HybridLinearAttnBackend.__name__ == "HybridLinearAttnBackend"
    assert module.Mamba2AttnBackend.__name__ in VERIFIED_BACKENDS
