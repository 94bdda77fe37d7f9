"""Several requests at a time through a server's cache, in the steps of SGLang's scheduler.

    step      a prefill of what waits, as far as `PrefillAdder` admits it, else one token of all that run:
              `check_decode_mem`, if that is not enough `retract_decode`, then `alloc_for_decode`
    result    each step's, before the next step, or with overlap during it: the sampled token, then
              `checkpoint_kv_cache` or, at the end, `release_kv_cache`
    abort     of what waits, at once; of a prefill between two chunks, at the next step; of what runs, with its next
              result (`to_finish`)

With overlap a request whose answer stops has already been given one token more. What is left out is the forward pass:
`forward.py` stands for it, and says when a request would read what is not its own.

Sources: `srt/managers/scheduler.py` (`event_loop_overlap`, `event_loop_normal`, `get_next_batch_to_run`,
`_get_new_batch_prefill_raw`, `update_running_batch`, `abort_request`, `process_pending_chunked_abort`, `flush_cache`),
`srt/managers/scheduler_components/batch_result_processor.py`.
"""

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from marconi.engine.cache.scheduler import around_add_one_req, before_prepare_for_decode, on_calc_priority
from marconi.engine.prefill.checkpoint import mark_written
from rig.contents import Contents, marks
from rig.forward import ForwardPass
from rig.int8_contents import Int8Contents
from rig.joint_contents import JointContents
from rig.late_copies import LateCopies
from rig.late_passes import LatePasses
from rig.pools import Division, HostPools, Strategy
from rig.workload import STOP, Script

NEW_TOKEN_RATIO = 0.1
"""The part of the longest answer that admission expects, SGLang's least: the lower, the more is retracted."""
_MAX_PREFILL_TOKENS = 16384


class Outcome(StrEnum):
    """What became of requests."""

    FINISHED = "finished"
    RETRACTED = "retracted"
    """Gave its memory back and waits again."""
    ABORTED_WAITING = "aborted while waiting"
    ABORTED_BETWEEN_CHUNKS = "aborted between chunks"
    ABORTED_RUNNING = "aborted while running"
    OUT_OF_MEMORY = "aborted alone and out of memory"


@dataclass(slots=True)
class _Launched:
    """A step whose result is not there yet."""

    reqs: list[Any]
    is_prefill: bool
    chunked: Any = None
    """The request among `reqs` whose prefill goes on."""
    lengths: list[int] = field(default_factory=list)
    """Of a step of decoding: tokens of each sequence after it,"""
    batch_indices: list[int] = field(default_factory=list)
    """how many steps of decoding it had,"""
    tracking_indices: list[int | None] = field(default_factory=list)
    """and which tracking slot is next."""


class HostScheduler:
    """Runs requests on `cache`, which was built on `host`."""

    def __init__(self, cache: Any, host: HostPools) -> None:
        from sglang.srt.runtime_context import mamba_track_grid

        self.cache = cache
        self.waiting: list[Any] = []
        self.outcomes: Counter[Outcome] = Counter()
        self.num_prefilled_tokens = 0
        self.num_prefills = self.num_chunks = self.num_hit_tokens = 0
        self.passes: LatePasses | None = None
        """None where each pass has ended before anything asks."""
        self._host = host
        self._kv = cache.token_to_kv_pool_allocator
        self._rows = cache.req_to_token_pool
        self._overlaps = host.strategy is Strategy.EXTRA_BUFFER
        self._track_tokens = mamba_track_grid(host.page_tokens) if host.strategy is Strategy.EXTRA_BUFFER else 0
        self._running: list[Any] = []
        self._is_full = False
        self._chunked: Any = None
        self._chunked_to_abort: Any = None
        self._last: _Launched | None = None
        self._results: list[_Launched] = []
        self._scripts: dict[str, tuple[Script, np.ndarray[Any, Any]]] = {}
        self._num_submitted = 0
        contents = self._contents()
        self._forward = ForwardPass(self._rows, contents)
        self._copies = LateCopies(cache, contents, seed=host.num_rows) if host.host_ratio else None

    def _contents(self) -> Contents:
        host = self._host
        if host.memory is Division.ONE_POOL:
            return JointContents(self._kv)
        if host.num_checkpoints:
            num_indices = host.num_kv_tokens + host.page_tokens + 1
            return Int8Contents(num_indices, host.num_state_slots + 1, host.num_checkpoints + 1)
        return Contents(host.num_kv_tokens + host.page_tokens + 1, host.num_state_slots + 1)

    # Requests

    def submit(self, script: Script, rid: str | None = None, custom_params: dict[str, Any] | None = None) -> Any:
        """A request joins those that wait; `rid` is SGLang's name for it, where that matters."""
        from sglang.srt.managers.schedule_batch import Req
        from sglang.srt.sampling.sampling_params import SamplingParams

        self._num_submitted += 1
        extra_key, cache_salt = script.namespace
        sampling = SamplingParams(max_new_tokens=script.max_new_tokens, custom_params=custom_params)
        sampling.normalize(None)
        req = Req(
            rid=rid or f"request {self._num_submitted}",
            origin_input_text="",
            origin_input_ids=script.prompt[:],
            sampling_params=sampling,
            eos_token_ids={STOP},
            extra_key=extra_key,
            cache_salt=cache_salt,
        )
        self._scripts[req.rid] = script, marks(script.sequence, script.namespace)
        self.waiting.append(req)
        return req

    def abort(self, req: Any) -> None:
        """The client of `req`, which waits or is in flight, has gone."""
        from sglang.srt.managers.schedule_batch import FINISH_ABORT
        from sglang.srt.mem_cache.base_prefix_cache import CacheRequestOutcome
        from sglang.srt.mem_cache.common import release_kv_cache

        if req is self._chunked:
            self._chunked_to_abort = req
        elif req in self.waiting:
            self.waiting.remove(req)
            self.cache.finish(req.cache_request_handle, CacheRequestOutcome.ABORT)
            if req.kv.holds_mamba:
                release_kv_cache(req, self.cache, checkpoint=False)
            self._end(req, Outcome.ABORTED_WAITING)
        elif not req.finished():
            req.to_finish = FINISH_ABORT()

    def in_flight(self) -> list[Any]:
        """The requests that hold memory."""
        batches = [self._running, [self._chunked] if self._chunked is not None else []]
        batches += [step.reqs for step in (self._last, *self._results) if step is not None]
        return list({id(req): req for reqs in batches for req in reqs if req.kv.holds_kv}.values())

    @property
    def chunked(self) -> Any:
        """The request between two chunks of its prefill; None if there is none."""
        return self._chunked

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits and nothing runs."""
        return not self._scripts and not self._results

    @property
    def num_there(self) -> int:
        """Requests that wait or run."""
        return len(self._scripts)

    @property
    def is_copying(self) -> bool:
        """Whether copies between the device and the host are under way."""
        return bool(self.cache.ongoing_write_through or self.cache.ongoing_load_back)

    def settle(self) -> None:
        """Let the copies between the device and the host that are under way arrive, while idle."""
        while self._copies is not None and self.is_copying:
            self._copies.advance()
            self.cache.check_hicache_events()

    def flush(self) -> None:
        """Forget everything, while idle."""
        assert self.is_idle, "a flush while requests are there"
        self._last = None
        self.cache.reset()
        self._rows.clear()
        self._kv.clear()
        self._rows.reset_aux_cache_allocator()

    def _end(self, req: Any, outcome: Outcome) -> None:
        del self._scripts[req.rid]
        self.outcomes[outcome] += 1

    # Steps

    def step(self) -> bool:
        """Launch a step, if there is anything to do, and take the result of this or, with overlap, the last one.

        Returns whether there was any.
        """
        with pytest.MonkeyPatch.context() as patch:
            if self.passes is not None:
                self.passes.patch(patch)
                self.passes.before_step()
            return self._step()

    def _step(self) -> bool:
        num_results = len(self._results)
        launched = self._launch()
        if launched is not None:
            self._results.append(launched)
        num_left = int(self._overlaps and launched is not None)
        while len(self._results) > num_left:
            if self.passes is not None:
                self.passes.took_result()
            self._take_result(self._results.pop(0))
        self._last = launched
        return launched is not None or num_results > 0

    def _launch(self) -> _Launched | None:
        from sglang.srt.mem_cache.common import checkpoint_kv_cache

        if self._copies is not None:
            self._copies.advance()
            self.cache.check_hicache_events()
        self._abort_between_chunks()
        chunked = self._chunked
        if chunked is not None and chunked.extend_end > chunked.prefix_len:
            checkpoint_kv_cache(chunked, self.cache)
        num_running = len(self._running)
        self._running = [req for req in self._running if not req.finished()]
        if len(self._running) < num_running:
            self._is_full = False
        if self._last is not None and self._last.is_prefill:
            apart = (chunked, self._last.chunked)
            joining = [req for req in self._last.reqs if req not in apart and not req.finished()]
            self._is_full &= len(joining) == len(self._last.reqs)
            self._running += joining
        reqs = self._admit()
        return self._prefill(reqs) if reqs else self._decode()

    def _abort_between_chunks(self) -> None:
        from sglang.srt.managers.schedule_batch import FINISH_ABORT
        from sglang.srt.mem_cache.common import release_kv_cache

        req, self._chunked_to_abort = self._chunked_to_abort, None
        if req is None or req.finished() or not req.kv.holds_kv:
            return
        if req is not self._chunked:
            self.abort(req)
            return
        req.finished_reason = FINISH_ABORT()
        release_kv_cache(req, self.cache, checkpoint=False)
        self._chunked = None
        self._end(req, Outcome.ABORTED_BETWEEN_CHUNKS)

    def _admit(self) -> list[Any]:
        """What the next prefill takes of each request is set on it."""
        from sglang.srt.managers.schedule_policy import AddReqResult, PrefillAdder

        self._is_full &= bool(self._running)
        if (self._is_full or not self.waiting) and self._chunked is None:
            return []
        on_calc_priority(None, SimpleNamespace(tree_cache=self.cache), self.waiting)
        adder = PrefillAdder(
            self._host.page_tokens,
            self.cache,
            self._kv,
            self._running_batch(),
            NEW_TOKEN_RATIO,
            _MAX_PREFILL_TOKENS,
            self._host.chunk_tokens,
        )
        if self._chunked is not None:
            self._chunked.init_next_round_input()
            self._chunked = adder.add_chunked_req(self._chunked)
        self._rows.mamba_allocator.alloc_group_begin(len(self.waiting))
        for req in self.waiting:
            if adder.budget_state() == AddReqResult.OTHER:
                break
            num_held = sum(each.kv.holds_kv for each in adder.can_run_list)
            self._is_full |= len(adder.can_run_list) >= self._rows.available_size() + num_held
            if self._is_full:
                break
            req.init_next_round_input(self.cache)
            result = around_add_one_req(PrefillAdder.add_one_req, adder, req, self._chunked is not None, None)
            if result != AddReqResult.CONTINUE:
                if result == AddReqResult.NO_TOKEN:
                    self._is_full = bool(adder.can_run_list or self._running)
                if req not in adder.can_run_list[-1:]:
                    self._take_back_slot(req)
                break
        self._rows.mamba_allocator.alloc_group_end()
        admitted: list[Any] = adder.can_run_list
        self.waiting = [req for req in self.waiting if req not in admitted]
        self._chunked = adder.new_chunked_req or self._chunked
        if admitted and self._chunked is not None:
            self._chunked.inflight_middle_chunks += 1
        return admitted

    def _running_batch(self) -> Any:
        """What decodes, as the admission of a prefill sees it."""
        return SimpleNamespace(reqs=self._running)

    def _take_back_slot(self, req: Any) -> None:
        """A request that was matched is not admitted."""
        kv = req.kv
        kv.mamba_cow_src_index, kv.mamba_needs_clear = None, False
        if kv.holds_mamba:
            self._rows.mamba_allocator.free(kv.mamba_pool_idx.unsqueeze(-1))
            kv.mamba_pool_idx = None

    def _batch(self, reqs: list[Any], lengths: list[int]) -> Any:
        """A `ScheduleBatch` with no more in it than the functions below read."""
        from sglang.srt.managers.schedule_batch import ScheduleBatch
        from sglang.srt.runtime_context import process_model_config
        from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

        model, algorithm = process_model_config(), SpeculativeAlgorithm.NONE
        batch = ScheduleBatch.init_new(reqs, self._rows, self._kv, self.cache, model, self._overlaps, algorithm)
        batch.seq_lens = batch.seq_lens_cpu = batch.orig_seq_lens = torch.tensor(lengths, dtype=torch.int64)
        batch.sampling_info = SimpleNamespace(filter_batch=lambda *_: None)
        return batch

    # Prefill

    def _prefill(self, reqs: list[Any]) -> _Launched:
        from sglang.srt.mem_cache.allocation import alloc_for_extend

        plan = getattr(self.cache, "plan_prefill", None)
        checkpoints = [] if plan is None else plan(reqs)
        # No model runs that would write them.
        mark_written(checkpoints, len(self._rows.mamba_map))
        if self._copies is not None and self.cache.ready_to_load_host_cache() >= 0:
            self._copies.wait_for_loads()
        batch = self._batch(reqs, [req.extend_end for req in reqs])
        batch.prefix_lens, batch.extend_lens = [req.prefix_len for req in reqs], [req.extend_len for req in reqs]
        batch.extend_num_tokens = sum(batch.extend_lens)
        self.num_prefilled_tokens += batch.extend_num_tokens
        indices, *_ = alloc_for_extend(batch)
        for row, req in enumerate(reqs):
            req.is_retracted = False
            if not req.retracted_stain and not req.already_computed:
                req.cached_tokens = req.prefix_len
                self.num_hit_tokens += req.prefix_len
            req.already_computed = req.extend_end
            slots = [(each.depth, int(each.slot)) for each in checkpoints if each.row == row]
            if self._track_tokens and not getattr(self.cache, "cuts_prefills", False):
                slots += self._tracked_in_prefill(batch, req)
            self._forward.prefill(req, self._scripts[req.rid][1], slots)
        batch._collect_deferred_mamba_cow_and_clear(reqs)
        self.num_prefills += len(reqs)
        self.num_chunks += self._chunked in reqs
        if self.passes is not None:
            self.passes.launched(indices)
        return _Launched(reqs, is_prefill=True, chunked=self._chunked)

    def _tracked_in_prefill(self, batch: Any, req: Any) -> list[tuple[int, int]]:
        """The depth, and the slot, of the state that SGLang itself tracks in this prefill."""
        entry = batch._mamba_radix_cache_v2_req_prepare_for_extend(req)
        return [(req.kv.mamba_last_track_seqlen, self._forward.tracking_slot(req, entry.track_position))][
            : entry.track_mask
        ]

    # Decoding

    def _decode(self) -> _Launched | None:
        from sglang.srt.mem_cache.allocation import alloc_for_decode

        queued = [req for step in self._results for req in step.reqs]
        finishing = [req for req in self._running if req in queued and req.next_output_finishes_by_length()]
        reqs = self._running = [req for req in self._running if req not in finishing]
        self._is_full &= not finishing
        if not reqs:
            return None
        batch = self._decode_batch(reqs)
        if not batch.check_decode_mem():
            if finishing:
                return None
            self._retract(batch)
            reqs = self._running = list(batch.reqs)
            if not reqs:
                return None
            batch = self._decode_batch(reqs)
        before_prepare_for_decode(batch)
        indices = alloc_for_decode(batch, token_per_req=1)
        launched = _Launched(reqs, is_prefill=False)
        for req in reqs:
            req.decode_batch_idx += 1
            launched.lengths.append(req.kv.kv_committed_len)
            launched.batch_indices.append(req.decode_batch_idx)
            launched.tracking_indices.append(req.kv.mamba_next_track_idx)
            self._forward.decode(req, self._scripts[req.rid][1], self._track_tokens)
        if self.passes is not None:
            self.passes.launched(indices)
        return launched

    def _decode_batch(self, reqs: list[Any]) -> Any:
        batch = self._batch(reqs, [req.kv.kv_committed_len for req in reqs])
        batch.req_pool_indices = batch.req_pool_indices_cpu = torch.tensor([req.kv.req_pool_idx for req in reqs])
        return batch

    def _retract(self, batch: Any) -> None:
        retracted, _, aborted = batch.retract_decode()
        self.outcomes[Outcome.RETRACTED] += len(retracted)
        self.waiting += retracted
        for req in aborted:
            self._end(req, Outcome.OUT_OF_MEMORY)
        self._is_full = False

    # Results

    def _take_result(self, step: _Launched) -> None:
        self._kv.free_group_begin()
        for index, req in enumerate(step.reqs):
            if req.is_retracted or (req.finished() and req.inflight_middle_chunks <= 0):
                continue
            if req.inflight_middle_chunks > 0:
                req.inflight_middle_chunks -= 1
                continue
            req.output_ids.append(self._scripts[req.rid][0].answer[len(req.output_ids)])
            req.update_finish_state()
            if self._track_tokens and not step.is_prefill:
                self._track(req, step, index)
            self._keep(req, step)
        self._kv.free_group_end()

    def _keep(self, req: Any, step: _Launched) -> None:
        from sglang.srt.managers.schedule_batch import FINISH_ABORT
        from sglang.srt.mem_cache.common import checkpoint_kv_cache, release_kv_cache

        if req.finished():
            release_kv_cache(req, self.cache, checkpoint=True)
            aborted = isinstance(req.finished_reason, FINISH_ABORT)
            self._end(req, Outcome.ABORTED_RUNNING if aborted else Outcome.FINISHED)
        elif step.is_prefill:
            checkpoint_kv_cache(req, self.cache)

    def _track(self, req: Any, step: _Launched, index: int) -> None:
        """Which of a request's tracking slots has its latest state, and which is next.

        Source: `_handle_finish_state_updated_req` and `_mamba_prefix_cache_update`, where slots are not lazy.
        """
        kv, length = req.kv, step.lengths[index]
        num_ahead = req.decode_batch_idx - step.batch_indices[index]
        if length % self._track_tokens == 0:
            kv.mamba_last_track_idx = step.tracking_indices[index]
            kv.mamba_prev_track_seqlen, kv.mamba_last_track_seqlen = kv.mamba_last_track_seqlen, length
        if (length + num_ahead) % self._track_tokens == 0:
            kv.mamba_next_track_idx = self._rows.get_mamba_ping_pong_other_idx(kv.mamba_next_track_idx)
