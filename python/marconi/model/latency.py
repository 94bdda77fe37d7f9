"""Time to first token of a prefill, and the prefix that must be cached to meet a budget.

For a prompt of n tokens of which c are cached, m = n - c (at least 1: the last token is always recomputed, for its
logits), on w workers:

    seconds = overhead + [c > 0] state_bytes / state_rate + max(compute, memory)
    compute = FLOPs(c to n) / (w flops_per_s)
    memory  = (weights(m) + c kv_bytes_per_token) / bytes_per_s
    weights(m) = bytes of one worker's weights, of its routed experts the share 1 - (1 - k / E)^m that m tokens reach

The weights are read once, so a short prefill is bound by memory and costs the same for any m; a long one is bound by
arithmetic. Time in a queue is not in it.
"""

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable

from marconi.model.device import DeviceProfile
from marconi.model.profile import ModelProfile


class LatencyModel(ABC):
    """Seconds of a prefill."""

    __slots__ = ()

    @abstractmethod
    def seconds(self, num_cached_tokens: int, num_prompt_tokens: int) -> float:
        """Time to first token; `ValueError` unless 0 <= cached <= prompt and prompt >= 1.

        A prompt that is cached whole costs what one cached but for its last token costs.
        """

    @abstractmethod
    def smallest_cached_tokens(self, num_prompt_tokens: int, budget_s: float) -> int | None:
        """The fewest cached tokens with which the prompt takes at most `budget_s`; `None` if no number does.

        The inverse that T-LRU needs (arXiv 2510.15152, section 4), in seconds instead of uncached tokens.
        """


class PrefillLatency(LatencyModel):
    """The formula of this module, for a model on a device."""

    __slots__ = ("_dense_bytes", "_expert_bytes", "_flops_per_s", "_idle_share", "_restore_s", "device", "profile")

    def __init__(self, profile: ModelProfile, device: DeviceProfile) -> None:
        self.profile = profile
        self.device = device
        workers = profile.tensor_parallel
        itemsize = profile.storage.weight_itemsize
        num_experts = profile.num_expert_parameters
        num_dense = profile.num_parameters - profile.num_embedding_parameters - num_experts
        num_idle = profile.num_parameters - profile.num_active_parameters
        self._dense_bytes = num_dense * itemsize / workers
        self._expert_bytes = num_experts * itemsize / workers
        self._idle_share = num_idle / num_experts if num_experts else 0.0
        self._flops_per_s = device.flops_per_s * workers
        self._restore_s = profile.state_bytes / device.state_bytes_per_s

    def seconds(self, num_cached_tokens: int, num_prompt_tokens: int) -> float:
        """Time to first token by the formula of this module."""
        cached = require_lengths(num_cached_tokens, num_prompt_tokens)
        compute_s = self._compute_s(cached, num_prompt_tokens)
        return self._fixed_s(cached) + max(compute_s, self._memory_s(cached, num_prompt_tokens))

    def smallest_cached_tokens(self, num_prompt_tokens: int, budget_s: float) -> int | None:
        """By bisection.

        Arithmetic shrinks as more is cached. Memory is concave in the number of cached tokens (KV is linear, the
        experts reached are concave), so once it is too slow at some number, it is fast enough on an upper range only.
        """
        if self.seconds(0, num_prompt_tokens) <= budget_s:
            return 0
        longest = num_prompt_tokens - 1
        fixed_s = self._fixed_s(1)
        first = _first(lambda c: fixed_s + self._compute_s(c, num_prompt_tokens) <= budget_s, 1, longest)
        if first is None or fixed_s + self._memory_s(first, num_prompt_tokens) <= budget_s:
            return first
        return _first(lambda c: fixed_s + self._memory_s(c, num_prompt_tokens) <= budget_s, first, longest)

    def _fixed_s(self, cached: int) -> float:
        return self.device.overhead_s + (self._restore_s if cached else 0.0)

    def _compute_s(self, cached: int, prompt: int) -> float:
        return self.profile.flops_between(cached, prompt) / self._flops_per_s

    def _memory_s(self, cached: int, prompt: int) -> float:
        reached = 1.0 - self._idle_share ** (prompt - cached)
        weights = self._dense_bytes + self._expert_bytes * reached
        return (weights + cached * self.profile.kv_bytes_per_token) / self.device.bytes_per_s


def require_lengths(num_cached_tokens: int, num_prompt_tokens: int) -> int:
    """The cached tokens that a prefill can use: all but the last of the prompt. `ValueError` for impossible lengths."""
    if num_prompt_tokens < 1 or not 0 <= num_cached_tokens <= num_prompt_tokens:
        raise ValueError(
            "a prompt must have 1 token or more, and cached tokens from 0 to as many, got "
            f"{num_cached_tokens} cached of {num_prompt_tokens}"
        )
    return min(num_cached_tokens, num_prompt_tokens - 1)


def _first(holds: Callable[[int], bool], low: int, high: int) -> int | None:
    """The least number in `low` .. `high` for which `holds`, which then holds for all above it."""
    found = low + bisect_left(range(low, high + 1), True, key=holds)
    return found if found <= high else None
