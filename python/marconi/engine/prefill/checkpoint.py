"""A state to keep of a prefill, and the two ways to write it.

    scheduler    plans `Checkpoint`s and hangs them on its batch (`cache/scheduler.py`)
    runner       leaves them with the linear backend, for the batch that it makes of it (`hooks.py`)
    backend      chooses a `CheckpointWriter` for the batch, with its metadata, once for all layers
    layer        runs `CheckpointWriter.run`; each layer that has written its part of a checkpoint is counted on it

`spans.py` lets a layer's kernel run over the whole batch and takes the states inside from what it leaves; `passes.py`
cuts the batch where states are kept, for kernels that leave nothing. Either copies the state at a prefill's end from
the request's working slot.

Only what every recurrent layer has written is kept: a forward that took another way, a captured graph say, leaves no
state behind instead of a wrong one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch


@dataclass(slots=True, eq=False)
class Checkpoint:
    """A state to keep: of the batch's `row`-th sequence, after `depth` tokens from its start, in `slot`."""

    row: int
    depth: int
    slot: torch.Tensor
    """One index of SGLang's state allocator."""
    num_parts: int = 0
    """Parts that are written: one a recurrent layer, and those beside them (`side_states.py`)."""
    batch: "Sequence[Checkpoint]" = ()
    """All of its prefill."""
    is_written: bool | None = None
    """Whether every layer of every rank has written it; None until that is settled."""


class LayerCall(NamedTuple):
    """One recurrent layer's forward, as it was called."""

    forward: Callable[..., Any]
    """SGLang's method, unbound."""
    backend: Any
    """The attention backend that `forward` is bound to."""
    linear: Any
    """The linear-attention backend with the metadata; may be `backend` itself."""
    layer_id: int
    names: dict[str, Any]
    """Its arguments, by name."""

    @property
    def states(self) -> Any:
        """The layer's pools: `conv`, a list, and `temporal`, each (num_slots, *state_shape)."""
        return self.linear.req_to_token_pool.mamba2_layer_cache(self.layer_id)


class CheckpointWriter(Protocol):
    """Runs the layers of one batch and writes its checkpoints."""

    def run(self, call: LayerCall) -> torch.Tensor:
        """The layer's output for the whole batch; its states stand in their slots afterwards."""
        ...


def mark_written(checkpoints: Sequence[Checkpoint], num_parts: int) -> None:
    """Count parts of `checkpoints` that are written; a host without a model says so itself."""
    for each in checkpoints:
        each.num_parts += num_parts


def working_slots(metadata: Any, rows: torch.Tensor) -> torch.Tensor:
    """(num_rows,) int64: the slots that the kernels leave the states of these sequences in; waits for no device."""
    slots: torch.Tensor = metadata.mamba_cache_indices.index_select(0, rows).long()
    return slots


def slots_of(linear: Any, checkpoints: Sequence[Checkpoint]) -> torch.Tensor:
    """(num_checkpoints,) int64: the places in the pools of the states of `checkpoints`."""
    slots = torch.cat([each.slot.view(1) for each in checkpoints])
    return linear.req_to_token_pool.translate_mamba_indices(slots).long()
