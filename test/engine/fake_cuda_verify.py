"""Verify steps of requests that decode by drafts, on a card that is not there (`fake_cuda.py`).

verified    a step has found which nodes it accepts; SGLang has prepared, on the card, after which of them the working
states and the tracked ones stand
hook        the states at ends are found, and their tracking slots
commit      SGLang's own: it copies the working states, and those at ends in place of those that it would track
"""

from functools import partial
from types import SimpleNamespace
from typing import Any

from .fake_cuda import Card, HostWaits, Operations
from .fake_cuda_models import HEAD_DIM, NUM_SLOTS, DeltaHeads, empty, instead


def run_verify_steps(card: Card, num_requests: int, num_nodes: int, heads: DeltaHeads | None = None) -> list[int]:
    """Two steps without SGLang's own commit, which is not ours to count, and one with it: operations of the first two.

    Returned are those on the card, and launches, that are ours.
    """
    from marconi.engine.cache import speculation

    batch, num_operations = verifying_batch(num_requests, num_nodes, heads or DeltaHeads()), []
    for _ in range(2):
        num_launches = len(card.launches)
        step = verified(batch, num_requests, num_nodes)
        with Operations(card) as operations, HostWaits(card):
            speculation.around_commit(lambda *_, **__: None, None, batch, *step)
        ours = [each for each in card.launches[num_launches:] if each.module.startswith("sgl_kernel_ext.")]
        num_operations.append(len(operations.names) + len(ours))
    commit(card, batch, verified(batch, num_requests, num_nodes))
    return num_operations


def verifying_batch(num_requests: int, num_nodes: int, heads: DeltaHeads) -> Any:
    from marconi.engine.cache import speculation

    return SimpleNamespace(
        tree_cache=SimpleNamespace(
            cuts_prefills=True, end_source=speculation.EndStateSource.LEFT, stops=speculation.LastStops()
        ),
        reqs=[speculating_request() for _ in range(num_requests)],
        req_pool_indices=empty(num_requests, dtype="int64"),
        seq_lens=empty(num_requests, dtype="int64"),
        req_to_token_pool=speculating_pool(heads, num_nodes),
        forward_mode=SimpleNamespace(is_idle=lambda: False),
        grammar_needs_sync=lambda: False,
    )


def verified(batch: Any, num_requests: int, num_nodes: int) -> tuple[Any, ...]:
    """What SGLang's commit of a step is given: what was accepted, and the nodes that it has found on the card.

    They are those whose states requests go on from, and those whose states it tracks.
    """
    from marconi.engine.cache import speculation

    batch.mamba_track_indices = empty(num_requests, dtype="int64")
    speculation.after_sample((empty(num_requests * num_nodes, dtype="int32"),), None, batch)
    nodes = (empty(num_requests, dtype="int64"), empty(num_requests, dtype="int64"))
    return empty(num_requests, dtype="int32"), empty(num_requests, num_nodes, dtype="int32"), num_nodes, nodes


def commit(card: Card, batch: Any, step: tuple[Any, ...]) -> None:
    """Commit a step by SGLang's own code, with what is hooked into it."""
    from sglang.kernels.ops.mamba import mamba_state_scatter_triton
    from sglang.srt.speculative import spec_utils

    worker = SimpleNamespace(model_runner=committing_runner(batch.req_to_token_pool, len(batch.reqs)))
    addresses = (empty(1, 12, dtype="int64"), 1)
    with (
        HostWaits(card),
        instead(spec_utils, "mambaish_config", lambda _: worker),
        instead(mamba_state_scatter_triton, "_conv_multi_build_meta", lambda *_: addresses),
    ):
        spec_utils.commit_mamba_states_after_verify(worker, batch, *step)


def committing_runner(pool: Any, num_requests: int) -> Any:
    """What of SGLang's model runner commits a verify step: the attention backend of a hybrid model, by its own code."""
    from sglang.srt.layers.attention.hybrid_linear_attn_backend import HybridLinearAttnBackend

    backend = SimpleNamespace(
        linear_attn_backend=SimpleNamespace(
            _translate_mamba_indices=lambda indices: indices,
            forward_metadata=SimpleNamespace(mamba_cache_indices=empty(num_requests, dtype="int32")),
            req_to_token_pool=pool,
            accept_lens_pool=None,
        ),
        _update_ple_state_after_mtp_verify=lambda *_: None,
    )
    backend.update_mamba_state_after_mtp_verify = partial(
        HybridLinearAttnBackend.update_mamba_state_after_mtp_verify, backend
    )
    return SimpleNamespace(model_config=None, model=None, req_to_token_pool=pool, attn_backend=backend)


def run_chain_steps(card: Card, num_requests: int, num_nodes: int, *, keeps_states: bool) -> None:
    """A step of DSPARK's, committed by its own code; without states that are kept, KDA's inputs are replayed."""
    from sglang.kernels.ops.mamba import mamba_state_scatter_triton
    from sglang.srt.speculative.dspark_components.dspark_worker_v2 import DSparkWorkerV2

    from marconi.engine.cache import speculation

    heads = DeltaHeads()
    batch = verifying_batch(num_requests, num_nodes, heads)
    if not keeps_states:
        replay_inputs(batch.req_to_token_pool, heads, num_nodes)
    batch.mamba_track_indices = empty(num_requests, dtype="int64")
    runner = committing_runner(batch.req_to_token_pool, num_requests)
    worker = SimpleNamespace(_need_mamba_verify_commit=True, target_worker=SimpleNamespace(model_runner=runner))
    accepted = SimpleNamespace(
        commit_lens=empty(num_requests, dtype="int32"), out_tokens=empty(num_requests, num_nodes, dtype="int64")
    )
    lengths = {name: empty(num_requests, dtype="int64") for name in ("seq_lens_pre_verify", "seq_lens_post_verify")}
    addresses = (empty(1, 12, dtype="int64"), 1)
    with HostWaits(card), instead(mamba_state_scatter_triton, "_conv_multi_build_meta", lambda *_: addresses):
        speculation.after_accept(accepted)
        speculation.around_chain_commit(
            DSparkWorkerV2._commit_target_mamba_states_after_verify,
            worker,
            batch=batch,
            commit_lens=accepted.commit_lens,
            **lengths,
        )


def replay_inputs(pool: Any, heads: DeltaHeads, num_nodes: int) -> None:
    """`--enable-linear-replayssm-spec` on KDA: a step keeps the inputs of its nodes."""
    every_layer = pool.get_speculative_mamba2_params_all_layers()
    num_layers, num_slots = every_layer.temporal.shape[:2]
    shape = (num_layers, num_slots, heads.num_heads, num_nodes, HEAD_DIM)
    every_layer.intermediate_ssm = None
    every_layer.replayssm_rawv, every_layer.replayssm_rawk = empty(*shape), empty(*shape)
    every_layer.replayssm_g = empty(*shape, dtype="float32")
    every_layer.replayssm_beta = empty(*shape[:4], dtype="float32")
    pool.mamba_pool.replayssm_is_kda = True


def speculating_pool(heads: DeltaHeads, num_nodes: int) -> Any:
    """SGLang's pool of requests, as verify steps of so many nodes use it."""
    num_layers = 4
    every_layer = SimpleNamespace(
        temporal=empty(num_layers, NUM_SLOTS, heads.num_heads, HEAD_DIM, HEAD_DIM, dtype=heads.state_dtype),
        intermediate_ssm=empty(num_layers, 9, num_nodes, heads.num_heads, HEAD_DIM, HEAD_DIM, dtype=heads.state_dtype),
        conv=[empty(num_layers, NUM_SLOTS, heads.num_channels, 3)],
        intermediate_conv_window=[empty(num_layers, 9, num_nodes, heads.num_channels, 3)],
    )
    return SimpleNamespace(
        get_speculative_mamba2_params_all_layers=lambda: every_layer,
        translate_mamba_indices=lambda slots: slots,
        req_index_to_mamba_ping_pong_track_buffer_mapping=empty(16, 2, dtype="int64"),
        mamba_pool=SimpleNamespace(),
    )


def speculating_request() -> Any:
    """A request that ends by a token or by its length."""
    return SimpleNamespace(
        kv=SimpleNamespace(mamba_next_track_idx=0),
        sampling_params=SimpleNamespace(
            ignore_eos=False, stop_token_ids=None, max_new_tokens=10, stop_strs=[], stop_regex_strs=[]
        ),
        eos_token_ids={5},
        tokenizer=None,
        vocab_size=1000,
        origin_input_ids=[1] * 5,
        grammar=None,
    )
