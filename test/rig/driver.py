"""One request after the other through a server's cache, as SGLang's scheduler takes each through it alone.

    match        `Req.init_next_round_input`: a hit's state is copied to a slot of the request's own
    admit        the state that it starts from is locked
    each chunk   ours plans the states within it; `alloc_for_extend` takes the request's slots and the chunk's KV,
                 evicting what it must; stock's `extra_buffer` picks the position that it tracks
                 (`ScheduleBatch._mamba_radix_cache_v2_req_prepare_for_extend`); `checkpoint_kv_cache` after it
    decode       KV a token at a time, and a state tracked whenever the interval is full
    release      `release_kv_cache`: the last state joins the tree, all else is given back

The answer is the trace's, and each step's result is there before the next step, as without overlap.

Decoding token by token does nothing that can be seen but take the next free index, until none is free: then it evicts
one victim. So a run of tokens takes all free indices at once, and a single token evicts. With pages, a step makes sure
of one free page even when it needs none: the first two steps of each page are taken alone, the rest of it is the
indices that follow. `test_host_replay.py` holds both against a token at a time.

Sources: `srt/managers/{scheduler,schedule_policy,schedule_batch}.py`,
`srt/managers/scheduler_components/batch_result_processor.py`, `srt/mem_cache/{allocation,common}.py`.
"""

from types import SimpleNamespace
from typing import Any

import torch

from marconi.engine.prefill.checkpoint import mark_written
from marconi.policy.request import Request
from rig.balance import check_balance
from rig.clock import TraceClock
from rig.pools import Division, HostPools, Strategy
from rig.tokens import Tokens


class HostReplay:
    """Serves a trace's requests from `cache`, in order of arrival."""

    def __init__(self, cache: Any, host: HostPools, unit_tokens: int, clock: TraceClock) -> None:
        """`cache` was built on `host`; `unit_tokens` is the trace's."""
        self.cache = cache
        self.host = host
        self.num_too_large = 0
        self._tokens = Tokens(unit_tokens)
        self.clock = clock
        self._num_served = 0

    def fits(self, request: Request) -> bool:
        """Whether the pools hold it if nothing else is in them."""
        from marconi.engine.joint.pools import JointMemory

        page, num_tokens = self.host.page_tokens, request.num_processed_tokens
        num_paged = -(-num_tokens // page) * page
        if num_tokens >= self.host.max_context_tokens:
            return False
        joint = JointMemory.of(self.cache.token_to_kv_pool_allocator)
        if joint is None:
            return num_paged <= self.host.num_kv_tokens
        return joint.bytes_of(num_paged, self.host.num_working_slots + 1) <= joint.num_bytes

    def serve(self, request: Request) -> int | None:
        """Serve `request` at its arrival; returns its hit tokens, None for one that does not fit alone."""
        if not self.fits(request):
            self.num_too_large += 1
            return None
        self.clock.now_s = request.arrival_s
        run = self.run(request)
        run.prefill()
        run.decode()
        run.release()
        return run.num_hit_tokens

    def run(self, request: Request) -> "Run":
        """Match and lock what `request` starts from, for one that fits beside those that run."""
        return Run(self.cache, self.host, self._req(request))

    def _req(self, request: Request) -> Any:
        from sglang.srt.managers.schedule_batch import Req
        from sglang.srt.sampling.sampling_params import SamplingParams

        prompt, answer = self._tokens.of(request)
        self._num_served += 1
        req = Req(
            rid=str(self._num_served),
            origin_input_text="",
            origin_input_ids=prompt,
            sampling_params=SamplingParams(max_new_tokens=len(answer)),
            extra_key=str(request.namespace) if request.namespace else None,
        )
        setattr(req, _ANSWER, answer)
        return req

    @property
    def lendable(self) -> tuple[int, int]:
        """KV tokens and state slots that can be taken now; in one pool, each of them if the other is not."""
        kv, slots = self.cache.token_to_kv_pool_allocator, self.cache.req_to_token_pool.mamba_allocator
        is_joint = self.host.memory is Division.ONE_POOL
        return kv.available_size(), slots.schedulable_available_size() if is_joint else slots.available_size()

    def check_invariants(self) -> None:
        """Raise `AssertionError` unless, between requests, everything is free or held by the tree, once."""
        check_balance(self.cache, [])


_ANSWER = "marconi_answer"
"""On a request: the tokens that it will sample."""


class Run:
    """A request on its way."""

    def __init__(self, cache: Any, host: HostPools, req: Any) -> None:
        self._cache = cache
        self._host = host
        self._req = req
        self._answer = getattr(req, _ANSWER)
        self._kv = cache.token_to_kv_pool_allocator
        req.init_next_round_input(cache)
        self.num_hit_tokens: int = req.prefix_len
        req.cached_tokens = req.prefix_len
        req.lock = cache.lock(req.last_node)

    def prefill(self) -> None:
        """The prompt, a chunk at a time, and the first token of the answer."""
        from sglang.srt.mem_cache.common import checkpoint_kv_cache

        req, num_prompt_tokens = self._req, len(self._req.origin_input_ids)
        while True:
            req.extend_end = min(req.prefix_len + self._host.chunk_tokens, num_prompt_tokens)
            self._extend()
            if req.extend_end == num_prompt_tokens:
                break
            checkpoint_kv_cache(req, self._cache)
            req.init_next_round_input()
        self._sample(1)
        if not req.finished():
            checkpoint_kv_cache(req, self._cache)

    def _extend(self) -> None:
        from sglang.srt.managers.schedule_batch import ScheduleBatch
        from sglang.srt.mem_cache.allocation import alloc_for_extend

        req, plan = self._req, getattr(self._cache, "plan_prefill", None)
        if plan is not None:
            # No model runs that would write them.
            mark_written(plan([req]), len(self._cache.req_to_token_pool.mamba_map))
        batch = self._batch([req.extend_end])
        batch.prefix_lens, batch.extend_lens = [req.prefix_len], [req.extend_len]
        batch.extend_num_tokens = req.extend_len
        alloc_for_extend(batch)
        if plan is None and self._host.strategy is Strategy.EXTRA_BUFFER:
            ScheduleBatch._mamba_radix_cache_v2_req_prepare_for_extend(batch, req)
        ScheduleBatch._collect_deferred_mamba_cow_and_clear(batch, [req])

    def _batch(self, seq_lens: list[int]) -> Any:
        """What the functions that take a `ScheduleBatch` read of it."""
        from sglang.srt.runtime_context import process_model_config

        lengths = torch.tensor(seq_lens, dtype=torch.int64)
        return SimpleNamespace(
            reqs=[self._req],
            tree_cache=self._cache,
            req_to_token_pool=self._cache.req_to_token_pool,
            model_config=process_model_config(),
            device="cpu",
            seq_lens=lengths,
            seq_lens_cpu=lengths,
            hisparse_coordinator=None,
            is_dllm=lambda: False,
            maybe_evict_swa=lambda: None,
        )

    def _sample(self, num_tokens: int) -> None:
        """The next tokens of the answer are there; the last one finishes the request."""
        from sglang.srt.managers.schedule_batch import FINISH_LENGTH

        req = self._req
        position = len(req.output_ids)
        req.output_ids.extend(self._answer[position : position + num_tokens])
        if len(req.output_ids) == len(self._answer):
            req.finished_reason = FINISH_LENGTH(length=len(self._answer))
            req.finished_len = len(self._answer)

    def decode(self) -> None:
        """The rest of the answer."""
        kv, interval = self._req.kv, self._tracking_interval()
        while not self._req.finished():
            wanted = len(self._answer) - len(self._req.output_ids)
            if interval:
                wanted = min(wanted, interval - kv.kv_committed_len % interval)
            taken = self._take_tokens(wanted) if self._host.page_tokens == 1 else self._take_page(wanted)
            self._cache.req_to_token_pool.write(
                (kv.req_pool_idx, slice(kv.kv_committed_len, kv.kv_committed_len + len(taken))), taken.to(torch.int32)
            )
            kv.kv_allocated_len += len(taken)
            kv.kv_committed_len += len(taken)
            self._req.decode_batch_idx += len(taken)
            self._sample(len(taken))
            if interval and kv.kv_committed_len % interval == 0:
                self._track()

    def _tracking_interval(self) -> int:
        """Tokens from one tracked state to the next while decoding; 0 without tracking."""
        from sglang.srt.runtime_context import mamba_track_grid

        return mamba_track_grid(self._host.page_tokens) if self._host.strategy is Strategy.EXTRA_BUFFER else 0

    def _take_tokens(self, num_wanted: int) -> torch.Tensor:
        """As many of the next tokens' indices as are free, at least one."""
        from sglang.srt.mem_cache.allocation import alloc_token_slots

        taken: torch.Tensor = alloc_token_slots(self._cache, min(num_wanted, max(self._kv.available_size(), 1)))
        return taken

    def _take_page(self, num_wanted: int) -> torch.Tensor:
        """Indices of the next tokens, no further than the page."""
        from sglang.srt.mem_cache.allocation import alloc_paged_token_slots_decode

        position, row = self._req.kv.kv_committed_len, self._req.kv.req_pool_idx
        last = self._cache.req_to_token_pool.req_to_token[row, position - 1 : position].to(torch.int64)
        num_tokens = min(num_wanted, self._host.page_tokens - position % self._host.page_tokens)
        for step in range(1, min(num_tokens, 2) + 1):
            length = torch.tensor([position + step])
            last = alloc_paged_token_slots_decode(self._cache, length, length, last)
        first = int(last) - (min(num_tokens, 2) - 1)
        return torch.arange(first, first + num_tokens)

    def _track(self) -> None:
        """The slot that is next has a state of all tokens so far, and the other is next.

        Source: `batch_result_processor.py:_handle_finish_state_updated_req` and `_mamba_prefix_cache_update`, for a
        result that is processed before the next step.
        """
        kv = self._req.kv
        kv.mamba_last_track_idx = kv.mamba_next_track_idx
        kv.mamba_prev_track_seqlen, kv.mamba_last_track_seqlen = kv.mamba_last_track_seqlen, kv.kv_committed_len
        other = self._cache.req_to_token_pool.get_mamba_ping_pong_other_idx
        kv.mamba_next_track_idx = other(kv.mamba_next_track_idx)

    def release(self) -> None:
        """The end."""
        from sglang.srt.mem_cache.common import release_kv_cache

        release_kv_cache(self._req, self._cache, checkpoint=True)
