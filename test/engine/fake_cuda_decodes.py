"""Steps after a prefill, with overlapped scheduling, on a card that is not there (`fake_cuda.py`).

    begin     each request takes its tracking slots from SGLang's pool; where they are lent, the padding's
    replays   two steps as the decode graph runs them, padded to its bucket. A request ends in the first; its row is in
              the second, which was launched before the first one's result was there
    end       the state at its end is taken while that step runs
    step      one without the graph, of the rows that are left

A step decodes a token of each row or, with drafts, verifies them. The plan of the prefill still hangs on the
scheduler's batch: a layer that keeps a state of it in such a step counts once more. The pool's methods, the indices,
the metadata and the branches of the layers are SGLang's.
"""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Final

from .fake_cuda import CARD, Card, HostWaits, Operations
from .fake_cuda_cases import Finding, Prefilled
from .fake_cuda_models import NUM_LAYERS, Model, empty

NUM_REQUESTS: Final = 3
BUCKET: Final = 4
"""Rows of the decode graph."""
MAPPED_ROWS: Final = 16
END: Final = 500
"""Tokens of the request that ends."""
TRACKS: Final = "track_mamba_state_if_needed_kernel"
"""SGLang's kernel that copies states to tracking slots."""


@dataclass(frozen=True, slots=True)
class Decoding:
    """How a server decodes."""

    ends: Any
    """Where the state at a request's end is taken from."""
    num_tracking_slots: int
    """Those that SGLang gives a request."""
    num_nodes: int = 0
    """Of a verify step; 0 without drafts."""


@dataclass(frozen=True, slots=True)
class Layers:
    """Recurrent layers that have run a prefill, and decode."""

    model: Model
    prefilled: Prefilled
    num_nodes: int

    def step(self, reqs: list[Any]) -> None:
        """A step without the graph: SGLang reads from the card which rows are tracked."""
        forward_batch = self._scheduled(reqs)
        self.prefilled.hybrid.init_forward_metadata(forward_batch)
        self._run(forward_batch)

    def replay(self, reqs: list[Any]) -> None:
        """A step by the decode graph: the metadata of its buffers, and what it recorded, of as many rows as it has."""
        forward_batch = self._scheduled(reqs)
        pool_indices, track_indices = (empty(BUCKET, dtype="int64") for _ in range(2))
        pool_indices[: len(reqs)].copy_(forward_batch.req_pool_indices)
        track_indices[: len(reqs)].copy_(forward_batch.mamba_track_indices)
        static = self._forward_batch(BUCKET, pool_indices, track_indices)
        static.num_padding = BUCKET - len(reqs)
        self.prefilled.hybrid.init_forward_metadata_out_graph(static)
        self._run(static)

    def with_graph(self) -> None:
        """SGLang's backend makes what its decode graph reads."""
        linear = self.prefilled.linear
        for name in ("state_indices", "query_start_loc", "retrieve_next_token", "retrieve_next_sibling"):
            setattr(linear, f"{name}_list", [])
        linear.retrieve_parent_token_list = []
        linear._graph_seq_len_fill_value = linear.get_cuda_graph_seq_len_fill_value()
        linear.verify_intermediate_state_indices = empty(MAPPED_ROWS, dtype="int32")
        linear.init_cuda_graph_state(BUCKET, BUCKET * max(self.num_nodes, 1))

    def _scheduled(self, reqs: list[Any]) -> Any:
        """The `ForwardBatch` of the scheduler's next batch, which has the plan of its prefill on it."""
        from sglang.srt.managers.schedule_batch import set_mamba_track_indices_from_reqs

        from marconi.engine.prefill import hooks

        batch = SimpleNamespace(
            **vars(self.prefilled.scheduled),
            reqs=reqs,
            req_to_token_pool=self.prefilled.linear.req_to_token_pool,
            req_pool_indices=empty(len(reqs), dtype="int64"),
        )
        set_mamba_track_indices_from_reqs(batch)
        forward_batch = self._forward_batch(len(reqs), batch.req_pool_indices, batch.mamba_track_indices)
        batch.forward_mode = forward_batch.forward_mode
        runner = SimpleNamespace(attn_backend=self.prefilled.hybrid, is_draft_worker=False)
        hooks.on_init_new(forward_batch, SimpleNamespace, batch, runner)
        return forward_batch

    def _forward_batch(self, num_rows: int, req_pool_indices: Any, track_indices: Any) -> Any:
        from sglang.srt.model_executor.forward_batch_info import ForwardMode

        mode = ForwardMode.TARGET_VERIFY if self.num_nodes else ForwardMode.DECODE
        drafts = SimpleNamespace(draft_token_num=self.num_nodes, ragged_verify_layout=None)
        return SimpleNamespace(
            batch_size=num_rows,
            forward_mode=mode,
            logical_forward_mode=mode,
            input_ids=empty(num_rows * max(self.num_nodes, 1), dtype="int64"),
            req_pool_indices=req_pool_indices,
            seq_lens=empty(num_rows, dtype="int64"),
            seq_lens_cpu=None,
            mamba_track_indices=track_indices,
            mamba_track_mask=None if self.num_nodes else empty(num_rows, dtype="bool"),
            mamba_prefill_track_mask_cpu=None,
            mamba_track_seqlens_cpu=None,
            extend_start_loc=None,
            extend_num_tokens=None,
            extend_seq_lens_cpu=None,
            extend_prefix_lens_cpu=None,
            multi_item_delimiter_indices=None,
            tbo_parent_token_range=None,
            spec_info=drafts if self.num_nodes else None,
            sampling_info=object(),
        )

    def _run(self, forward_batch: Any) -> None:
        hybrid, linear = self.prefilled.hybrid, self.prefilled.linear
        for number in range(NUM_LAYERS):
            result = self.model.layer(hybrid, linear, forward_batch, number, forward_batch.input_ids.shape[0])
            if result is not None and result.device.type != CARD.type:
                raise RuntimeError(f"what a layer returns must be on {CARD}, got {result.device}")


def run_decodes(card: Card, finding: Finding, model: Model, prefilled: Prefilled, decoding: Decoding) -> None:
    """Run the steps above in the layers that have run `prefilled`."""
    from marconi.engine.cache import scheduler

    pool, layers = prefilled.linear.req_to_token_pool, Layers(model, prefilled, decoding.num_nodes)
    vars(pool).update(vars(requests_pool(decoding.num_tracking_slots)))
    if scheduler.lends_slots(decoding.ends, is_lazy=False):
        scheduler.lend_slots(pool)
    with Operations(card) as begin, HostWaits(card):
        reqs = [request_in(pool, row) for row in range(1, NUM_REQUESTS + 1)]
    num_launches = len(card.launches)
    layers.with_graph()
    with Operations(card) as replays, HostWaits(card):
        layers.replay(reqs)
        layers.replay(reqs)
    ended = reqs[0]
    ended.kv.kv_committed_len = ended.kv.mamba_last_track_seqlen = END
    with Operations(card) as end, HostWaits(card):
        state = scheduler.end_state(ended, END, decoding.ends, component(pool), pool)
    with Operations(card) as step, HostWaits(card):
        layers.step(reqs[1:])
    launches = card.launches[num_launches:]
    finding.num_written = [each.num_parts for each in prefilled.planned]
    finding.facts["decodes"] = {
        "begin": begin.owners.count("ours"),
        "steps": (replays.owners + step.owners).count("ours"),
        "end": end.owners.count("ours"),
        "end_slot": state and f"{state.slot.dtype} {tuple(state.slot.shape)} {state.slot.device.type}",
        "kept": len([each for each in launches if each.module.startswith("sgl_kernel_ext.")]),
        "kernels": sorted({each.kernel for each in launches}),
        "tracked": len([each for each in launches if each.kernel == TRACKS]),
    }


def requests_pool(num_tracking_slots: int) -> Any:
    """What SGLang's pool of requests holds for their tracking slots, beside what layers ask it for."""
    from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool

    pool = SimpleNamespace(
        size=MAPPED_ROWS - 1,
        mamba_allocator=SimpleNamespace(alloc=lambda num: empty(num, dtype="int64")),
        mamba_initial_tracking_slots=num_tracking_slots,
        mamba_ping_pong_track_buffer_size=num_tracking_slots,
        enable_mamba_extra_buffer_lazy=False,
        req_index_to_mamba_ping_pong_track_buffer_mapping=empty(MAPPED_ROWS, num_tracking_slots, dtype="int64"),
        req_index_to_mamba_index_mapping=empty(MAPPED_ROWS, dtype="int32"),
        mamba_v2p_table=None,
    )
    for name in ("get_mamba_ping_pong_other_idx", "get_mamba_ping_pong_keep_idx"):
        setattr(pool, name, getattr(HybridReqToTokenPool, name).__get__(pool))
    return pool


def request_in(pool: Any, row: int) -> Any:
    """A request that has its slots in `pool`, and that `row` of it."""
    from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool

    req = SimpleNamespace(kv=SimpleNamespace(mamba_pool_idx=empty(dtype="int64")))
    HybridReqToTokenPool._alloc_ping_pong_buffer(pool, req)
    pool.req_index_to_mamba_ping_pong_track_buffer_mapping[row] = req.kv.mamba_ping_pong_track_buffer
    return req


def component(pool: Any) -> Any:
    """SGLang's component of recurrent states, as far as it finds the state that was tracked last."""
    from sglang.srt.mem_cache.unified_cache.components.mamba import MambaComponent

    found = SimpleNamespace(cache=SimpleNamespace(req_to_token_pool=pool))
    found._select_finished_checkpoint = MambaComponent._select_finished_checkpoint.__get__(found)
    return found
