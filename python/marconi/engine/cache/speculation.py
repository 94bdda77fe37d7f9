"""The last state of a request that decodes by accepting drafts.

A verify step runs the model over drafted tokens and keeps the state after each, by the batch's row and the draft's
node, until the next step; then it moves a request's working slot to its last accepted node:

    accepted nodes    n_0 .. n_k; n_0 is the token that was sampled last
    tokens out        o_0 .. o_k, each what the model says after its node; o_k was not drafted
    states            after num_before + 1 + i tokens, that of n_i; the working slot has that of n_k

A request that ends with o_i leaves the state after it, that of n_{i+1}, or of n_k where o_i is the last and not
computed. It may be before the working slot, since a run continues past a stop.

Without overlapped scheduling nothing has moved when the result is looked at: the state is copied from what the step
kept to the working slot, which nobody needs any more. With it the next step has begun, and has overwritten both. So the
step itself finds out, on the device, who ends in it by a token or by length, and copies that state to one of the
request's two tracking slots, in turns, since the step after it may do the same. Where only the host can tell (stop
strings, grammars), it copies that of n_0: a few tokens before the end. (From which state it began is lost by then: on a
GPU SGLang's convolution has taken all drafts in.) SGLang does not use the tracking slots meanwhile (pages of one token;
with larger ones, and with a single tracking slot, they are SGLang's).

Owner: the scheduler's thread.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

import torch

from sgl_kernel_ext import draft_ends
from sgl_kernel_ext.checkpoints import moved, tensor_on

STEP_ALGORITHMS: Final = ("NGRAM", "NEXTN", "EAGLE", "EAGLE3", "STANDALONE")
"""Algorithms whose verify steps are followed."""
TRACKING_ALGORITHMS: Final = ("DFLASH", "DSPARK")
"""Algorithms that commit their steps elsewhere in SGLang: the end is what it tracked last."""

_STEP: Final = "marconi_verify_step"
"""On what a step accepted, SGLang's tensor, and then on its result: `VerifyStep`."""
_TOKENS_OUT: Final = "marconi_tokens_out"
"""On a `ScheduleBatch`: (batch * num_nodes,) integer, what the model says after each accepted node."""
_TURN: Final = "marconi_turn"
"""On a request: which of its tracking slots the next verify step may write to."""
ENDED_IN: Final = "marconi_end"
"""On a request that has ended in a verify step: the step, None where a hook has lost it, and its row there."""
_NONE: Final = -1


class EndStateSource(StrEnum):
    """Where the state at a request's end is taken from."""

    WORKING = "its working slot"
    STEP = "what the last verify step kept"
    LEFT = "the tracking slot that a verify step left it in"
    TRACKED = "what SGLang tracked last"
    PLANNED = "what its prefill left at the end of its prompt"

    @classmethod
    def of(cls, arguments: Any, page_tokens: int, num_tracking_slots: int) -> "EndStateSource":
        """That of a server, by SGLang's resolved arguments; `num_tracking_slots` is how many a request begins with."""
        if arguments.disaggregation_mode == "prefill":
            # It ends with its prompt: nothing is decoded, and nothing tracked.
            return cls.WORKING if page_tokens == 1 else cls.PLANNED
        if page_tokens > 1:
            return cls.TRACKED
        if arguments.speculative_algorithm is None:
            return cls.WORKING
        if arguments.speculative_algorithm.upper() in TRACKING_ALGORITHMS:
            return cls.TRACKED if num_tracking_slots else cls.WORKING
        if arguments.disable_overlap_schedule:
            return cls.STEP
        return cls.LEFT if num_tracking_slots == 2 else cls.TRACKED


def max_accepted(arguments: Any) -> int:
    """Nodes that a verify step may accept of a request, by SGLang's arguments; 1 where they leave that open."""
    num_nodes: int = arguments.speculative_num_draft_tokens or 1
    num_steps: int | None = arguments.speculative_num_steps
    if num_steps is None or arguments.speculative_algorithm.upper() == "NGRAM":
        return num_nodes
    return num_steps + 1


OF_A_STEP: Final = (EndStateSource.STEP, EndStateSource.LEFT)
"""Those that a verify step has."""


@dataclass(slots=True, eq=False)
class VerifyStep:
    """The nodes that a verify step accepted, and the states that it left for requests that end in it.

    The tensors of accepted nodes are SGLang's, which may write to them again: where they are read later, `keep` them.
    """

    num_before: torch.Tensor
    """(batch,) integer: tokens that each request had a state of when the step began,"""
    accepted: torch.Tensor
    """(batch, max_depth) integer: its accepted nodes, counted over the batch,"""
    num_accepted: torch.Tensor
    """(batch,) integer: and how many they are."""
    num_nodes: int
    """Nodes of one request."""
    left: torch.Tensor | None = None
    """(batch,) int32: after how many tokens the state stands that was copied to a tracking slot, or -1;"""
    tracking: Sequence[int] = ()
    """and to which of each request's two. None and none without overlapped scheduling."""

    def keep(self) -> None:
        """Copy what the step accepted."""
        self.num_before, self.accepted, self.num_accepted = (
            each.clone() for each in (self.num_before, self.accepted, self.num_accepted)
        )

    def node_at(self, row: int, depth: int) -> int | None:
        """The node of the state after `depth` tokens of the row's request; None if this step did not accept it."""
        index = depth - int(self.num_before[row]) - 1
        if not 0 <= index < int(self.num_accepted[row]):
            return None
        return int(self.accepted[row, index]) - row * self.num_nodes


@dataclass(frozen=True, slots=True)
class Stops:
    """The stop conditions of a batch's requests."""

    tokens: torch.Tensor
    """(batch, max_tokens) int64: tokens after which each ends, -1 for none."""
    max_lengths: torch.Tensor
    """(batch,) int64: tokens of prompt and answer after which it ends."""
    by_host: torch.Tensor
    """(batch,) bool: whether it may end by what only the host knows."""

    @classmethod
    def of(cls, reqs: Sequence[Any], device: torch.device | str) -> "Stops":
        """Those of SGLang's requests; the rules are `Req.update_finish_state`."""
        tokens = [_stop_tokens(req) for req in reqs]
        width = max(map(len, tokens), default=0)
        padded = [[*own, *[_NONE] * (width - len(own))] for own in tokens]
        lengths = [len(req.origin_input_ids) + req.sampling_params.max_new_tokens for req in reqs]
        by_host = [int(_asks_host(req)) for req in reqs]
        flat = [token for own in padded for token in own]
        vectors = [torch.tensor(each, dtype=torch.int64) for each in (flat, lengths, by_host)]
        stops, max_lengths, ends_by_host = moved(vectors, device)
        return cls(stops.view(len(reqs), width), max_lengths, ends_by_host.bool())


class LastStops:
    """The stop conditions of a batch's requests, cached since most batches have the requests of the last one."""

    def __init__(self) -> None:
        self._reqs: list[Any] = []
        self._stops: Stops | None = None

    def of(self, reqs: list[Any], device: torch.device) -> Stops:
        """Those of SGLang's requests."""
        if self._stops is None or self._reqs != reqs:
            self._reqs, self._stops = [*reqs], Stops.of(reqs, device)
        return self._stops


def after_sample(result: tuple[torch.Tensor, ...], _verify_input: Any, batch: Any, *_: Any, **__: Any) -> None:
    """After `eagle_sample`: what the model says after each accepted node is kept for the batch's commit."""
    setattr(batch, _TOKENS_OUT, result[0])


def around_commit(
    commit: Callable[..., None],
    target_worker: Any,
    batch: Any,
    accept_lens: torch.Tensor,
    accept_index: torch.Tensor,
    draft_token_num: int,
    prepared_step_indices: tuple[torch.Tensor, torch.Tensor | None] | None = None,
) -> None:
    """Around `commit_mamba_states_after_verify`: the step is known, and leaves the states at ends where it must.

    On CUDA SGLang has found by then after which node it tracks each request. Its scatter of windows takes these nodes
    together with tracking slots or not at all, so both are cleared.
    """
    cache = batch.tree_cache
    if _takes_ends(cache) and not batch.forward_mode.is_idle():
        step = VerifyStep(batch.seq_lens, accept_index, accept_lens, draft_token_num)
        # Grammars may have SGLang look at a result before it continues.
        if cache.end_source is EndStateSource.LEFT and not batch.grammar_needs_sync():
            _leave(step, cache, batch)
            if prepared_step_indices is not None:
                prepared_step_indices = (prepared_step_indices[0], None)
        else:
            step.keep()
        setattr(accept_lens, _STEP, step)
    commit(
        target_worker,
        batch,
        accept_lens,
        accept_index,
        draft_token_num,
        prepared_step_indices=prepared_step_indices,
    )


def before_copy_to_cpu(result: Any, *_: Any, **__: Any) -> None:
    """Before `GenerationBatchResult.copy_to_cpu`: the result knows its step, and where states were left."""
    step: VerifyStep | None = getattr(result.accept_lens, _STEP, None)
    if step is None:
        return
    setattr(result, _STEP, step)
    if step.left is not None:
        from sglang.srt.managers.utils import _async_d2h

        step.left = _async_d2h(step.left)


def around_can_cache(can_cache: Callable[..., bool], processor: Any, req: Any, result: Any, row: int) -> bool:
    """Around `SchedulerBatchResultProcessor._mamba_can_cache_finished_req`: a run past the end is no loss here."""
    cache = processor.tree_cache
    if not _takes_ends(cache):
        return can_cache(processor, req, result, row)
    step = getattr(result, _STEP, None)
    # Without a step it ends with its prefill; or a hook has failed, and its working state may stand past its end. Other
    # ranks may know the step, and agree with this one on what they keep: it is not to end without them.
    if step is not None or not can_cache(processor, req, result, row):
        setattr(req, ENDED_IN, (step, row))
    return True


def copy_state(pool: Any, row: int, node: int, slot: torch.Tensor) -> None:
    """Copy the state that a verify step kept for `node` of `row` to `slot`, one index of SGLang's state allocator."""
    # One copy to the card; each index is aligned as a tensor of its own is, since Triton compiles for that.
    indices = tensor_on([node, 0, 0, 0, row], slot.device, torch.int32)
    _scatter(pool, slot, indices[:1], indices[4:])


def _take_turn(req: Any) -> int:
    turn: int = getattr(req, _TURN, 0)
    setattr(req, _TURN, 1 - turn)
    return turn


def _takes_ends(cache: Any) -> bool:
    """True if a cache, ours or SGLang's, keeps the ends of requests by their verify steps."""
    return getattr(cache, "cuts_prefills", False) and cache.end_source in OF_A_STEP


def _leave(step: VerifyStep, cache: Any, batch: Any) -> None:
    """Copy the states at requests' ends, or of their first nodes, to tracking slots; SGLang tracks nothing."""
    tracking_slots = batch.req_to_token_pool.req_index_to_mamba_ping_pong_track_buffer_mapping
    step.tracking = [_take_turn(req) for req in batch.reqs]
    # A request that has ended meanwhile has given its slots back, and others may have them.
    turns = [
        _NONE if req.kv.mamba_next_track_idx is None else turn
        for req, turn in zip(batch.reqs, step.tracking, strict=True)
    ]
    stops = cache.stops.of(batch.reqs, tracking_slots.device)
    found = draft_ends.new(len(batch.reqs), tracking_slots.device)
    draft_ends.find(
        found,
        tokens_out=getattr(batch, _TOKENS_OUT),
        accepted=step.accepted,
        num_accepted=step.num_accepted,
        num_before=step.num_before,
        num_nodes=step.num_nodes,
        stop_tokens=stops.tokens,
        max_lengths=stops.max_lengths,
        by_host=stops.by_host,
        tracking_slots=tracking_slots,
        requests=batch.req_pool_indices,
        turns=tensor_on(turns, tracking_slots.device),
    )
    nodes, rows, slots, step.left = found
    _scatter(batch.req_to_token_pool, slots, nodes, rows)
    # Last: where anything above fails, SGLang tracks as it has prepared.
    batch.mamba_track_indices, batch.mamba_track_buffer_indices = None, [*step.tracking]


def _scatter(pool: Any, slots: torch.Tensor, nodes: torch.Tensor, rows: torch.Tensor) -> None:
    """Copy states of the batch's `rows` to `slots`, none of them negative; none where the node is."""
    from sglang.kernels.ops.mamba.mamba_state_scatter_triton import scatter_mamba_states_after_mtp_verify

    scatter_mamba_states_after_mtp_verify(
        pool.get_speculative_mamba2_params_all_layers(),
        pool.translate_mamba_indices(slots),
        nodes,
        None,
        None,
        src_indices_raw=rows,
    )


def _stop_tokens(req: Any) -> set[int]:
    """Tokens after which a request ends; a client may name any integer, and what is no token never comes."""
    if req.sampling_params.ignore_eos:
        return set()
    found = {*(req.sampling_params.stop_token_ids or ()), *(req.eos_token_ids or ())}
    if req.tokenizer is not None:
        found |= {req.tokenizer.eos_token_id, *(req.tokenizer.additional_stop_token_ids or ())}
    return {token for token in found if token is not None and 0 <= token < req.vocab_size}


def _asks_host(req: Any) -> bool:
    """True if a request may end by what its text is, or by its grammar."""
    sampling = req.sampling_params
    return bool(sampling.stop_strs or sampling.stop_regex_strs or req.grammar is not None)
