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
step itself finds out, on the device, who ends in it by a token or by length, and SGLang's commit copies that state to
one of the request's two tracking slots, where it would have copied the state on its grid; in turns, since the step
after it may do the same. Where only the host can tell (stop strings, grammars), it is that of n_0: a few tokens before
the end. (From which state it began is lost by then: on a GPU SGLang's convolution has taken all drafts in.) SGLang does
not use the tracking slots meanwhile (pages of one token; with larger ones, and with a single tracking slot, they are
SGLang's). With `--enable-linear-replayssm-spec` a step keeps the inputs of its nodes, not their states, and SGLang
computes both states from them as it commits.

Owner: the scheduler's thread.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

import torch

from marconi.engine.prefill.side_states import pools_beside
from sgl_kernel_ext import draft_ends
from sgl_kernel_ext.checkpoints import moved, tensor_on

TREE_ALGORITHMS: Final = ("NGRAM", "NEXTN", "EAGLE", "EAGLE3", "STANDALONE")
"""Algorithms whose drafts may branch, and whose steps SGLang commits in one place."""
CHAIN_ALGORITHMS: Final = ("DFLASH", "DSPARK")
"""Algorithms whose drafts never branch, and which commit their steps themselves; they run on a GPU alone."""

_STEP: Final = "marconi_verify_step"
"""On what a step accepted, SGLang's tensor, and then on its result: `VerifyStep`."""
_TOKENS_OUT: Final = "marconi_tokens_out"
"""On a `ScheduleBatch`, or on the numbers of nodes that a chain accepted: (batch * num_nodes,) integer, what the model
says after each accepted node."""
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
        if arguments.disable_overlap_schedule and not arguments.enable_linear_replayssm_spec:
            return cls.STEP
        if num_tracking_slots == 2:
            return cls.LEFT
        return cls.TRACKED if num_tracking_slots else cls.WORKING


def drafts_a_chain(algorithm: str | None) -> bool:
    """True if drafts by `algorithm`, that of SGLang's arguments, never branch and are committed by its worker."""
    return algorithm is not None and algorithm.upper() in CHAIN_ALGORITHMS


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


def after_accept(result: Any, *_: Any, **__: Any) -> None:
    """After a chain has been accepted, DSPARK's or DFLASH's: what the model says is kept with how many nodes were."""
    num_accepted, tokens_out = (
        (result[1], result[3])
        if isinstance(result, tuple)
        else (
            result.commit_lens,
            result.out_tokens,
        )
    )
    # SGLang may write every step to the same buffers.
    if hasattr(num_accepted, _STEP):
        delattr(num_accepted, _STEP)
    setattr(num_accepted, _TOKENS_OUT, tokens_out.reshape(-1))


def around_commit(
    commit: Callable[..., None],
    target_worker: Any,
    batch: Any,
    accept_lens: torch.Tensor,
    accept_index: torch.Tensor,
    draft_token_num: int,
    prepared_step_indices: tuple[torch.Tensor, torch.Tensor | None] | None = None,
) -> None:
    """Around `commit_mamba_states_after_verify`: the step is known, and leaves the states at ends where it must."""
    cache, leaves = batch.tree_cache, False
    if _takes_ends(cache) and not batch.forward_mode.is_idle():
        step = VerifyStep(batch.seq_lens, accept_index, accept_lens, draft_token_num)
        # Grammars may have SGLang look at a result before it continues.
        leaves = cache.end_source is EndStateSource.LEFT and not batch.grammar_needs_sync()
        if leaves:
            # On CUDA SGLang has found the last nodes by then.
            last = _last_nodes(step) if prepared_step_indices is None else prepared_step_indices[0]
            prepared_step_indices = (last, _leave(step, cache, batch, getattr(batch, _TOKENS_OUT)))
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
    if leaves:
        batch.mamba_track_indices = None


def around_chain_commit(
    commit: Callable[..., None], worker: Any, *, batch: Any, commit_lens: torch.Tensor, **lengths: torch.Tensor
) -> None:
    """Around the commits of DSPARK's and DFLASH's workers, as above: the nodes of a chain follow each other.

    They find what to track themselves, from `lengths` before and after the step; where states are left, the attention
    backend is asked in their place.
    """
    cache = batch.tree_cache
    if not _takes_ends(cache) or batch.forward_mode.is_idle():
        commit(worker, batch=batch, commit_lens=commit_lens, **lengths)
        return
    tokens_out = getattr(commit_lens, _TOKENS_OUT)
    nodes = torch.arange(len(tokens_out), device=commit_lens.device).view(len(commit_lens), -1)
    step = VerifyStep(lengths["seq_lens_pre_verify"], nodes, commit_lens, nodes.shape[1])
    if cache.end_source is EndStateSource.LEFT:
        runner, ends = worker.target_worker.model_runner, _leave(step, cache, batch, tokens_out)
        runner.attn_backend.update_mamba_state_after_mtp_verify(
            last_correct_step_indices=commit_lens.long() - 1,
            mamba_track_indices=batch.mamba_track_indices,
            mamba_steps_to_track=ends,
            model=runner.model,
            req_pool_indices=batch.req_pool_indices[: len(commit_lens)],
        )
        batch.mamba_track_indices = None
    else:
        step.keep()
        commit(worker, batch=batch, commit_lens=commit_lens, **lengths)
    setattr(commit_lens, _STEP, step)


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
    from sglang.kernels.ops.mamba.mamba_state_scatter_triton import scatter_mamba_states_after_mtp_verify
    from sglang.srt.layers.attention.hybrid_linear_attn_backend import HybridLinearAttnBackend

    # One copy to the card; each index is aligned as a tensor of its own is, since Triton compiles for that.
    indices = tensor_on([node, 0, 0, 0, row], slot.device, torch.int32)
    scatter_mamba_states_after_mtp_verify(
        pool.get_speculative_mamba2_params_all_layers(),
        pool.translate_mamba_indices(slot),
        indices[:1],
        None,
        None,
        src_indices_raw=indices[4:],
    )
    for states, kept in pools_beside(pool):
        HybridLinearAttnBackend._scatter_speculative_state_with_mask(states, kept, slot, indices[:1], indices[4:])


def _take_turn(req: Any) -> int:
    turn: int = getattr(req, _TURN, 0)
    setattr(req, _TURN, 1 - turn)
    return turn


def _takes_ends(cache: Any) -> bool:
    """True if a cache, ours or SGLang's, keeps the ends of requests by their verify steps."""
    return getattr(cache, "cuts_prefills", False) and cache.end_source in OF_A_STEP


def _last_nodes(step: VerifyStep) -> torch.Tensor:
    """The last accepted node of each request: (batch,) integer."""
    last = step.accepted.gather(1, step.num_accepted.long()[:, None] - 1)[:, 0]
    return last - step.num_nodes * torch.arange(len(last), device=last.device)


def _leave(step: VerifyStep, cache: Any, batch: Any, tokens_out: torch.Tensor) -> torch.Tensor:
    """Have SGLang copy the states at requests' ends, or of their first nodes, to tracking slots, in place of its own.

    Returns their nodes, (batch,) int32, -1 for none; the slots are in the batch.
    """
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
        tokens_out=tokens_out,
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
    nodes, slots, step.left = found
    # Last: where anything above fails, SGLang tracks as it has prepared.
    batch.mamba_track_indices, batch.mamba_track_buffer_indices = slots, [*step.tracking]
    return nodes


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
