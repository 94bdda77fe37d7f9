"""SGLang's fold of a step's inputs leaves in another slot the state after the node that it is told (KDA).

The states at answers' ends rest on it where a step keeps inputs in place of states (`--enable-linear-replayssm-spec`).
"""

from collections.abc import Iterator

import pytest
import torch
import triton.language as tl

pytest.importorskip("sglang", reason="the server extra is not installed: pip install '.[server]'")

from sglang.kernels.ops.attention.linear import kda_replayssm_spec_decode
from torch import Tensor

from .conftest import IS_INTERPRETED

NUM_LAYERS, NUM_SLOTS, NUM_HEADS, NUM_KEY_HEADS, NUM_NODES, DIM = 2, 9, 4, 2, 4, 16
NOTHING = -1


class Inputs:
    """The inputs of the nodes of a step, of every layer, in the slots of requests."""

    def __init__(self, device: torch.device) -> None:
        random = torch.Generator().manual_seed(3)

        def numbers(*shape: int) -> Tensor:
            return torch.randn(NUM_LAYERS, NUM_SLOTS, *shape, generator=random).to(device)

        self.states = numbers(NUM_HEADS, DIM, DIM)
        self.values = numbers(NUM_HEADS, NUM_NODES, DIM)
        self.keys = numbers(NUM_KEY_HEADS, NUM_NODES, DIM)
        self.decays = -numbers(NUM_HEADS, NUM_NODES, DIM).abs()
        self.betas = numbers(NUM_HEADS, NUM_NODES).sigmoid()

    def state_after(self, slot: int, num_nodes: int) -> Tensor:
        """The recurrence, in torch: (num_layers, num_heads, value_dim, key_dim)."""
        state = self.states[:, slot].double()
        keys = self.keys[:, slot].double().repeat_interleave(NUM_HEADS // NUM_KEY_HEADS, dim=1)
        for node in range(num_nodes):
            key = keys[:, :, node]
            key = key / (key.square().sum(-1, keepdim=True) + 1e-6).sqrt()
            state = state * self.decays[:, slot, :, node].double().exp()[..., None, :]
            change = self.values[:, slot, :, node].double() - (state * key[..., None, :]).sum(-1)
            state = state + (self.betas[:, slot, :, node].double()[..., None] * change)[..., None] * key[..., None, :]
        return state

    def fold(self, slots: list[int], accepted: list[int], tracking: list[int], nodes: list[int]) -> Tensor:
        """States of all slots once SGLang has committed a step; the last two are as `draft_ends.find` writes them."""
        states, device = self.states.clone(), self.states.device
        found = torch.tensor([nodes, tracking], dtype=torch.int32, device=device)
        kda_replayssm_spec_decode.commit_kda_replayssm_spec_all_layers(
            checkpoint_state=states,
            rawv_cache=self.values,
            rawk_cache=self.keys,
            gk_cache=self.decays,
            beta_cache=self.betas,
            ssm_state_indices=torch.tensor(slots, device=device),
            accept_lens=torch.tensor(accepted, dtype=torch.int32, device=device),
            max_cache_len=NUM_NODES,
            num_k_heads=NUM_KEY_HEADS,
            mamba_track_indices=found[1],
            mamba_steps_to_track=found[0],
            null_block_id=NOTHING,
        )
        return states


@pytest.fixture(autouse=True)
def _numbers_of_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel casts what it counts nodes by, which Triton's interpreter leaves a number of Python's."""

    def scalars(start: int, end: tl.tensor) -> Iterator[tl.tensor]:
        return (tl.full((), number, tl.int32) for number in range(start, end))

    if IS_INTERPRETED:
        monkeypatch.setattr(kda_replayssm_spec_decode, "range", scalars, raising=False)


def test_every_node_of_a_step_may_be_an_end(device: torch.device) -> None:
    """Of three requests: one ends inside its run, one with it, and one goes on and leaves slot 0 alone."""
    inputs = Inputs(device)
    for node in range(3):
        folded = inputs.fold([1, 2, 3], [3, 4, 2], [5, 6, 0], [node, 3, NOTHING])
        expected = {1: (1, 3), 2: (2, 4), 3: (3, 2), 5: (1, node + 1), 6: (2, 4), 0: (0, 0), 4: (4, 0), 7: (7, 0)}
        for slot, (of, num_nodes) in expected.items():
            torch.testing.assert_close(
                folded[:, slot].double(), inputs.state_after(of, num_nodes), rtol=1e-4, atol=1e-5
            )


def test_the_state_of_another_node_is_seen(device: torch.device) -> None:
    """Negative control: the states of two nodes differ by far more than what is tolerated."""
    inputs = Inputs(device)
    folded = inputs.fold([1], [3], [5], [1])
    assert (folded[:, 5].double() - inputs.state_after(1, 3)).abs().max() > 0.1
