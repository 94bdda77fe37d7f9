"""Time of decoding: a step gives every running request one token and is bound by what it reads.

    seconds(B, C) = overhead + (weights(B) + 2 B state_bytes + C kv_bytes_per_token) / bytes_per_s

B requests run and hold C tokens of context in all. The weights are read once a step, of routed experts the share that
B tokens reach; a state is read and written. Arithmetic is left out: it binds only at batches of several hundreds.
"""

from dataclasses import dataclass

from marconi.model.device import DeviceProfile
from marconi.model.profile import ModelProfile

STEP_OVERHEAD_S = 0.001
"""Launching a step from a captured graph: an estimate."""


@dataclass(frozen=True, slots=True)
class DecodeLatency:
    """The formula of this module; bytes are those of one worker."""

    dense_bytes: float
    expert_bytes: float
    idle_share: float
    """Share of the routed experts that one token leaves unread."""
    state_bytes: int
    kv_bytes_per_token: int
    bytes_per_s: float
    overhead_s: float = STEP_OVERHEAD_S

    @classmethod
    def of(cls, model: ModelProfile, device: DeviceProfile) -> "DecodeLatency":
        """For a model on a device."""
        itemsize, workers, num_experts = (
            model.storage.weight_itemsize,
            model.tensor_parallel,
            model.num_expert_parameters,
        )
        num_dense = model.num_parameters - model.num_embedding_parameters - num_experts
        num_idle = model.num_parameters - model.num_active_parameters
        return cls(
            dense_bytes=num_dense * itemsize / workers,
            expert_bytes=num_experts * itemsize / workers,
            idle_share=num_idle / num_experts if num_experts else 0.0,
            state_bytes=model.state_bytes,
            kv_bytes_per_token=model.kv_bytes_per_token,
            bytes_per_s=device.bytes_per_s,
        )

    def seconds(self, num_requests: int, num_context_tokens: int, num_steps: int = 1) -> float:
        """Time of `num_steps` steps in a row, the context growing by a token a request with each."""
        weights = self.dense_bytes + self.expert_bytes * (1.0 - self.idle_share**num_requests)
        fixed_s = self.overhead_s + (weights + 2 * num_requests * self.state_bytes) / self.bytes_per_s
        num_read = num_steps * num_context_tokens + num_requests * (num_steps * (num_steps - 1) // 2)
        return num_steps * fixed_s + num_read * self.kv_bytes_per_token / self.bytes_per_s
