"""States beside those of recurrent layers, kept inside a prefill, are those of a prefill that ends there (Qwen3.8).

SGLang's own code runs on its own pools, for two layers: what prepares a batch, convolves its inputs and commits its
tokens.
"""

from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

pytest.importorskip("sglang", reason="the server extra is not installed: pip install '.[server]'")

from sglang.srt.mem_cache.ple_state_pool import NGramPool, ShortConvPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.models import qwen4_exp

from marconi.engine.cache import speculation
from marconi.engine.cache.scheduler import settle
from marconi.engine.prefill import hooks
from marconi.engine.prefill.checkpoint import Checkpoint
from marconi.engine.prefill.side_states import bytes_beside, num_parts

CHANNELS, WIDTH, DILATION, NGRAM = 6, 4, 3, 3
STATE_TOKENS = (WIDTH - 1) * DILATION
LAYERS, RECURRENT = (2, 5), (0, 2, 4)
LENGTHS, PREFIXES = (15, 1, 4), (0, 40, 7)
EVERYWHERE = [(row, position) for row, length in enumerate(LENGTHS) for position in range(1, length + 1)]
NUM_SLOTS = 1 + len(LENGTHS) + len(EVERYWHERE)
END = 0
"""The token that stands for none before a sequence."""


class Model:
    """What SGLang has of a model with side states: pools in which sequences continue, and a backend."""

    def __init__(self) -> None:
        random = torch.Generator().manual_seed(5)
        windows = ShortConvPool(
            size=NUM_SLOTS,
            state_shape=(CHANNELS, STATE_TOKENS),
            layer_ids=[*LAYERS],
            dtype=torch.float32,
            device="cpu",
            spec_state_size=4,
            speculative_num_draft_tokens=3,
        )
        history = NGramPool(
            size=NUM_SLOTS,
            context_len=NGRAM - 1,
            eos_token_id=END,
            device="cpu",
            spec_state_size=4,
            speculative_num_draft_tokens=3,
        )
        for row, prefix in enumerate(PREFIXES, start=1):
            if prefix:
                windows.conv_state[:, row] = torch.randn(len(LAYERS), CHANNELS, STATE_TOKENS, generator=random)
                history.context[row] = torch.randint(1, 99, (NGRAM - 1,), generator=random)
        self.windows, self.history = windows, history
        self.pool = SimpleNamespace(
            short_conv_pool=windows,
            ngram_pool=history,
            mamba_map=dict.fromkeys(RECURRENT, 0),
            ple_window_cache=None,
            get_mamba_indices=lambda requests: requests + 1,
            get_ngram_context=history.get_context,
            set_ngram_context=history.set_context,
            short_conv_layer_cache=windows.layer_cache,
            translate_mamba_indices=lambda slots: slots,
            mamba_pool=SimpleNamespace(),
        )
        self.backend = SimpleNamespace(linear_attn_backend=SimpleNamespace(req_to_token_pool=self.pool))

    def prefill(self, lengths: Sequence[int], tokens: Tensor, inputs: Tensor, made: Sequence[Checkpoint] = ()) -> None:
        """Of sequences of these lengths, `tokens` in all, whose layers convolve the same `inputs`."""
        batch = SimpleNamespace(
            tbo_parent_token_range=None,
            spec_algorithm=None,
            spec_info=None,
            _original_forward_mode=None,
            forward_mode=ForwardMode.EXTEND,
            global_num_token_non_padded_cpu=None,
            extend_seq_lens=torch.tensor(lengths),
            extend_seq_lens_cpu=[*lengths],
            extend_prefix_lens_cpu=[*PREFIXES],
            req_pool_indices=torch.arange(len(lengths)),
            out_cache_loc=None,
            mamba_track_indices=None,
            mamba_track_mask=None,
            sampling_info=None,
        )
        linear = self.backend.linear_attn_backend
        beside = hooks.SideStates.of(linear, batch, made) if made else None
        plan = hooks._Plan(None, [*lengths], made)
        linear.marconi_way = hooks._Prepared(plan, None, beside)  # type: ignore[arg-type]
        prepared = qwen4_exp._prepare_ple_batch(tokens, batch, ngram_size=NGRAM, ngram_eos_token_id=END)
        for layer_id in LAYERS:
            layer = SimpleNamespace(
                layer_id=layer_id,
                conv1d=SimpleNamespace(weight=torch.ones(CHANNELS, 1, WIDTH)),
                short_conv_dilation=DILATION,
                conv_channels=CHANNELS,
                short_conv_state_len=STATE_TOKENS,
            )
            hooks.before_side_windows(layer, inputs, batch, prepared)
            qwen4_exp.Qwen4ExpPLELayer._short_conv(layer, inputs, batch, prepared)
        qwen4_exp._commit_ple_batch(prepared, batch)
        hooks.on_commit_history(None, prepared, batch)

    def held(self, slot: int) -> tuple[Tensor, Tensor]:
        return self.windows.conv_state[:, slot], self.history.context[slot]


@pytest.fixture(autouse=True)
def model(monkeypatch: pytest.MonkeyPatch) -> list[Model]:
    """Models, the last of which runs."""
    models = [Model()]
    for module in (qwen4_exp, hooks):
        monkeypatch.setattr(module, "get_req_to_token_pool", lambda: models[-1].pool)
    monkeypatch.setattr(hooks, "get_attn_backend", lambda: models[-1].backend)
    return models


def batch_of(lengths: Sequence[int], ends: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Tokens and inputs of sequences of these lengths up to their `ends`."""
    random = torch.Generator().manual_seed(3)
    tokens = torch.randint(1, 99, (sum(lengths),), generator=random)
    inputs = torch.randn(sum(lengths), CHANNELS, generator=random)
    first = [sum(lengths[:row]) for row in range(len(lengths))]
    taken = [index for start, end in zip(first, ends, strict=True) for index in range(start, start + end)]
    return tokens[taken], inputs[taken]


def planned(positions: Sequence[tuple[int, int]], later: int = 0) -> list[Checkpoint]:
    """A checkpoint in a slot of its own `later` tokens than each of `positions`, a row and a token."""
    return [
        Checkpoint(row, PREFIXES[row] + position + later, torch.tensor([slot]))
        for slot, (row, position) in enumerate(positions, start=1 + len(LENGTHS))
    ]


def equal(model: list[Model], made: Sequence[Checkpoint], positions: Sequence[tuple[int, int]]) -> list[list[bool]]:
    """Whether windows and tokens of checkpoints are those of prefills that end at `positions`."""
    found = []
    for each, (row, position) in zip(made, positions, strict=True):
        model.append(Model())
        ends = [position if other == row else 1 for other in range(len(LENGTHS))]
        model[-1].prefill(ends, *batch_of(LENGTHS, ends))
        pairs = zip(model[0].held(int(each.slot)), model[-1].held(1 + row), strict=True)
        found.append([torch.equal(one, other) for one, other in pairs])
    return found


def test_side_states_at_any_token_are_those_of_a_prefill_that_ends_there(model: list[Model]) -> None:
    made = planned(EVERYWHERE)
    model[0].prefill(LENGTHS, *batch_of(LENGTHS, LENGTHS), made)
    assert {each.num_parts for each in made} == {len(LAYERS) + 1}
    assert equal(model, made, EVERYWHERE) == [[True, True]] * len(EVERYWHERE)


def test_side_states_of_a_token_later_are_seen(model: list[Model]) -> None:
    """Negative control: of each checkpoint, the windows and the tokens."""
    positions = [(row, position) for row, position in EVERYWHERE if position < LENGTHS[row]]
    made = planned(positions, later=1)
    model[0].prefill(LENGTHS, *batch_of(LENGTHS, LENGTHS), made)
    assert equal(model, made, positions) == [[False, False]] * len(positions)


def test_a_state_without_its_side_states_is_not_kept(model: list[Model]) -> None:
    """Recurrent layers have written theirs; a forward that no hook saw has left the rest."""
    parts = num_parts(model[0].pool)
    assert parts == len(RECURRENT) + len(LAYERS) + 1
    whole, half = planned([(0, 3), (0, 5)])
    whole.num_parts, half.num_parts = parts, len(RECURRENT)
    assert settle([whole, half], parts, True, lambda *flags: [*flags]) is None
    assert (whole.is_written, half.is_written) == (True, False)


def test_a_draft_model_keeps_none(model: list[Model]) -> None:
    """It has a backend of its own, and the same batch."""
    made = planned(EVERYWHERE)
    model[0].backend.linear_attn_backend, own = SimpleNamespace(), model[0].backend.linear_attn_backend
    model[0].backend.linear_attn_backend.req_to_token_pool = own.req_to_token_pool
    model[0].prefill(LENGTHS, *batch_of(LENGTHS, LENGTHS))
    assert {each.num_parts for each in made} == {0}


def test_what_a_verify_step_kept_of_a_node_is_copied_with_its_state(
    model: list[Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without overlapped scheduling; with it SGLang's own commit copies both."""
    kept = model[0]
    kept.windows.intermediate_conv_state.normal_(generator=torch.Generator().manual_seed(1))
    kept.history.intermediate_context.random_(1, 99, generator=torch.Generator().manual_seed(1))
    kept.pool.get_speculative_mamba2_params_all_layers = lambda: None
    scatter = "sglang.kernels.ops.mamba.mamba_state_scatter_triton.scatter_mamba_states_after_mtp_verify"
    monkeypatch.setattr(scatter, lambda *_, **__: None)
    speculation.copy_state(kept.pool, 1, 2, torch.tensor([7]))
    windows, history = kept.held(7)
    assert torch.equal(windows, kept.windows.intermediate_conv_state[:, 1, 2])
    assert torch.equal(history, kept.history.intermediate_context[1, 2])


def test_their_bytes_count_as_the_states(model: list[Model]) -> None:
    assert bytes_beside(model[0].pool) == 4 * len(LAYERS) * CHANNELS * STATE_TOKENS + 8 * (NGRAM - 1)
