"""States that a model keeps beside those of its recurrent layers, kept of a prefill as they are (Qwen3.8).

    windows    in some layers, of a convolution over inputs of its own: the last of these before a token
    history    once for all layers: the last tokens before it

SGLang holds them by the slots of recurrent states, and clears, copies and moves both together. A prefill leaves those
at its end in the working slot. Those inside it, and a copy of those at its end, are taken where SGLang has the inputs:
windows from these and the window from which the sequence continues, before the convolution writes over that; the
history from the one that it continues and the tokens of the batch, where they are committed. Each layer, and the
history, is counted on a checkpoint as a recurrent layer is, so that one without all of them is not kept.

Sources: `srt/models/qwen4_exp.py`, `_short_conv` and `_commit_ple_batch`; `srt/mem_cache/ple_state_pool.py`.

Owner: the process that runs the model.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from marconi.engine.prefill.checkpoint import Checkpoint, mark_written, slots_of
from sgl_kernel_ext import short_conv
from sgl_kernel_ext.checkpoints import Checkpoints, Spans, moved, spans_from_start
from sgl_kernel_ext.state_pool import StateSlots


def num_parts(pool: Any) -> int:
    """Number of parts of a state that are written one by one: of recurrent layers, and of states beside them.

    `pool` is SGLang's, of requests.
    """
    windows, history = _pools(pool)
    num_layers = 0 if windows is None else len(windows.layer_map)
    return len(pool.mamba_map) + num_layers + (history is not None)


def has_side_states(pool: Any) -> bool:
    """True if SGLang's pool of requests holds any."""
    return _pools(pool) != (None, None)


def bytes_beside(pool: Any) -> int:
    """Bytes of those of one slot."""
    return sum(states[:, 0].nbytes for states, _ in pools_beside(pool))


def pools_beside(pool: Any) -> list[tuple[Tensor, Tensor | None]]:
    """Those of all slots, (num_layers, num_slots, ...), each with those that a verify step keeps of its nodes."""
    windows, history = _pools(pool)
    found = [] if windows is None else [(windows.conv_state, windows.intermediate_conv_state)]
    if history is not None:
        kept = history.intermediate_context
        found.append((history.context[None], None if kept is None else kept[None]))
    return found


def _pools(pool: Any) -> tuple[Any, Any]:
    """SGLang's pools of windows and of histories; None for one that the model has no use for."""
    windows, history = (getattr(pool, name, None) for name in ("short_conv_pool", "ngram_pool"))
    return windows if windows and windows.enabled else None, history if history and history.enabled else None


@dataclass(frozen=True, slots=True, eq=False)
class SideStates:
    """The checkpoints of one batch, at whose tokens side states are written."""

    checkpoints: tuple[Checkpoint, ...]
    inputs: Spans
    """From the start of a sequence to each, to its slot."""

    @classmethod
    def of(cls, linear: Any, forward_batch: Any, checkpoints: Sequence[Checkpoint]) -> "SideStates | None":
        """Those of `forward_batch`; None of a model that has none."""
        if not has_side_states(linear.req_to_token_pool):
            return None
        starts, lengths = forward_batch.extend_prefix_lens_cpu, forward_batch.extend_seq_lens_cpu
        rows = [each.row for each in checkpoints]
        offsets = [each.depth - starts[each.row] for each in checkpoints]
        spans = spans_from_start(Checkpoints(rows, offsets, range(len(rows))), lengths, "cpu")
        slots = slots_of(linear, checkpoints)
        return cls(tuple(checkpoints), spans.on(moved(spans.columns[:4], slots.device), slots))

    def keep_windows(self, x: Tensor, pool: Tensor, working_slots: Tensor) -> None:
        """Keep those of a layer, whose convolution is about to run on x (num_tokens, num_channels).

        pool (num_slots, num_channels, width) has the windows that the sequences continue from in `working_slots`.
        """
        short_conv.checkpoint(x, states=StateSlots(pool, working_slots), spans=self.inputs, pool=pool)
        mark_written(self.checkpoints, 1)

    def keep_history(self, tokens: Tensor, num_kept: int, history: Any) -> None:
        """Keep the last `num_kept` tokens before each in `history`, SGLang's pool.

        tokens (num_sequences, num_kept + num_tokens) integer are those before the batch, and those of the batch.
        """
        spans = self.inputs
        columns = (spans.ends - spans.starts)[:, None] + torch.arange(num_kept, device=tokens.device)
        history.set_context(spans.slots, tokens[spans.sequences[:, None], columns])
        mark_written(self.checkpoints, 1)
