"""The state at an answer's end under DSPARK and DFLASH, by SGLang's own accept and commit, on a CPU's tensors.

They draft only on a GPU. Their workers' methods run here on a batch of requests with slots 10 and 11, 20 and 21 and so
on to track in, whose states after each node are numbers of their own.
"""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang", reason="the server extra is not installed: pip install '.[server]'")

from sglang.kernels.ops.mamba import mamba_state_scatter_triton
from sglang.srt.layers.attention import hybrid_linear_attn_backend
from sglang.srt.speculative.dflash_worker_v2 import DFlashWorkerV2
from sglang.srt.speculative.dspark_components.dspark_verify import AcceptOuts
from sglang.srt.speculative.dspark_components.dspark_worker_v2 import DSparkWorkerV2

from marconi.engine.cache import speculation
from marconi.engine.cache.speculation import EndStateSource, LastStops, after_accept, around_chain_commit
from marconi_cpu.state_tracking import scatter_mamba_states_after_mtp_verify

from .test_speculation import request

NUM_NODES, NUM_BEFORE = 4, 6
COMMITS = {
    "DFLASH": DFlashWorkerV2._update_target_mamba_state_after_verify,
    "DSPARK": DSparkWorkerV2._commit_target_mamba_states_after_verify,
}


class Chain:
    """One verify step of `reqs`, which draft the same three tokens; the model says those of `said`, four of each."""

    def __init__(self, reqs: list[SimpleNamespace], said: list[list[int]], end_source: EndStateSource) -> None:
        self.num_requests = len(reqs)
        self.states = torch.arange(1.0, 1 + self.num_requests * NUM_NODES).view(1, self.num_requests, NUM_NODES, 1)
        self.layers = SimpleNamespace(
            temporal=torch.zeros(1, 50, 1),
            intermediate_ssm=self.states,
            conv=[torch.zeros(1, 50, 1)],
            intermediate_conv_window=[-self.states],
        )
        tracking_slots = 10 * torch.arange(1, 1 + self.num_requests)[:, None] + torch.arange(2)
        pool = SimpleNamespace(
            req_index_to_mamba_ping_pong_track_buffer_mapping=tracking_slots,
            translate_mamba_indices=lambda slots: slots,
            get_speculative_mamba2_params_all_layers=lambda: self.layers,
            mamba_pool=SimpleNamespace(),
        )
        self.batch = SimpleNamespace(
            tree_cache=SimpleNamespace(cuts_prefills=True, end_source=end_source, stops=LastStops(), page_size=1),
            reqs=reqs,
            req_pool_indices=torch.arange(self.num_requests),
            seq_lens=torch.full((self.num_requests,), NUM_BEFORE),
            seq_lens_cpu=None,
            req_to_token_pool=pool,
            forward_mode=SimpleNamespace(is_idle=lambda: False),
            mamba_track_indices=tracking_slots[:, 0],
        )
        candidates = torch.tensor([[8, 8, 8, 8]] * self.num_requests)
        worker = SimpleNamespace(
            _selector_sample=None,
            _tp_sync=SimpleNamespace(sync=lambda *_: None),
            _use_triton_accept_bonus=False,
            block_size=NUM_NODES,
        )
        self.accepted = DFlashWorkerV2._accept_block(
            worker,
            candidates=candidates,
            next_token_logits=torch.nn.functional.one_hot(torch.tensor(said), 100).float().view(-1, 100),
            sampling_info=None,
            draft_input=None,
            prefix_lens=self.batch.seq_lens,
            bs=self.num_requests,
        )

    def run(self, algorithm: str, around: Callable[..., None] | None = around_chain_commit) -> Any:
        """Commit as `algorithm` does, with `around` or by SGLang alone; returns the step that is known then."""
        _, commit_lens, bonus, out_tokens, _ = self.accepted
        after = self.batch.seq_lens + commit_lens
        outs = AcceptOuts(commit_lens - 1, bonus, torch.zeros_like(commit_lens), commit_lens, after, out_tokens)
        after_accept(self.accepted if algorithm == "DFLASH" else outs)
        commit = COMMITS[algorithm]
        given = {"batch": self.batch, "seq_lens_pre_verify": self.batch.seq_lens, "seq_lens_post_verify": after}
        (commit if around is None else partial(around, commit))(self._worker, **given, commit_lens=commit_lens)
        return vars(commit_lens).get("marconi_verify_step")

    @property
    def _worker(self) -> Any:
        pool, working_slots = self.batch.req_to_token_pool, torch.arange(self.num_requests)
        backend = SimpleNamespace(
            linear_attn_backend=SimpleNamespace(
                _translate_mamba_indices=lambda indices: indices,
                forward_metadata=SimpleNamespace(mamba_cache_indices=working_slots),
                req_to_token_pool=pool,
                accept_lens_pool=None,
            ),
            _update_ple_state_after_mtp_verify=lambda *_: None,
        )
        backend.update_mamba_state_after_mtp_verify = partial(
            hybrid_linear_attn_backend.HybridLinearAttnBackend.update_mamba_state_after_mtp_verify, backend
        )
        runner = SimpleNamespace(attn_backend=backend, model=None)
        return SimpleNamespace(_need_mamba_verify_commit=True, target_worker=SimpleNamespace(model_runner=runner))

    def held(self, slot: int) -> float:
        """The state in `slot`; its window stands at the same token."""
        state, window = (float(pool[0, slot, 0]) for pool in (self.layers.temporal, self.layers.conv[0]))
        assert window == -state
        return state


@pytest.fixture(autouse=True)
def _sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server's settings, and the scatter of states on a CPU."""
    spec = SimpleNamespace(speculative_eagle_topk=1)
    for module in ("dspark_components.dspark_worker_v2", "dflash_worker_v2"):
        monkeypatch.setattr(f"sglang.srt.speculative.{module}.mamba_track_grid", lambda _: 8)
    monkeypatch.setattr("sglang.srt.speculative.dspark_components.dspark_worker_v2.get_spec", lambda: spec)
    for module in (mamba_state_scatter_triton, hybrid_linear_attn_backend):
        monkeypatch.setattr(module, "scatter_mamba_states_after_mtp_verify", scatter_mamba_states_after_mtp_verify)


SAID = [[8, 9, 8, 8], [8, 8, 8, 7], [8, 8, 7, 8], [9, 8, 8, 8]]
"""Accepted are 2, 4, 3 and 1 nodes: drafts that are said, and the one that was sampled last."""
REQUESTS = (lambda: request(), lambda: request(), lambda: request(stop_strings=("end",)), lambda: request(None))
"""One that ends with 9; one that goes on; one that may end by what only the host knows; one without slots."""


@pytest.mark.parametrize("algorithm", COMMITS)
def test_a_step_of_a_chain_leaves_the_states_at_ends(algorithm: str) -> None:
    chain = Chain([make() for make in REQUESTS], SAID, EndStateSource.LEFT)
    step = chain.run(algorithm)
    assert [chain.held(slot) for slot in range(4)] == [2, 8, 11, 13], "each goes on from its last accepted node"
    assert [chain.held(slot) for slot in (10, 20, 30, 40)] == [2, 0, 9, 0]
    assert step.left.tolist() == [NUM_BEFORE + 2, -1, NUM_BEFORE + 1, -1]
    assert chain.batch.mamba_track_indices is None


@pytest.mark.parametrize("algorithm", COMMITS)
def test_sglang_alone_tracks_its_grid_in_place_of_ends(algorithm: str) -> None:
    """Negative control: a grid of 8 lies at the end of the first alone."""
    chain = Chain([make() for make in REQUESTS], SAID, EndStateSource.LEFT)
    assert chain.run(algorithm, around=None) is None
    assert [chain.held(slot) for slot in range(4)] == [2, 8, 11, 13]
    assert [chain.held(slot) for slot in (10, 20, 30, 40)] == [2, 6, 10, 0]


@pytest.mark.parametrize("algorithm", COMMITS)
def test_without_overlap_the_state_is_copied_from_what_the_step_kept(algorithm: str) -> None:
    chain = Chain([request()], [[8, 9, 8, 8]], EndStateSource.STEP)
    step = chain.run(algorithm)
    assert step.left is None
    assert [step.node_at(0, NUM_BEFORE + depth) for depth in (0, 1, 2, 3)] == [None, 0, 1, None]
    speculation.copy_state(chain.batch.req_to_token_pool, 0, 0, torch.tensor([30]))
    assert chain.held(30) == 1


@pytest.mark.parametrize("algorithm", COMMITS)
def test_a_hook_that_fails_leaves_no_earlier_step_in_a_buffer_that_sglang_writes_again(algorithm: str) -> None:
    chain = Chain([request()], [[8, 9, 8, 8]], EndStateSource.LEFT)
    assert chain.run(algorithm) is not None
    assert chain.run(algorithm, around=None) is None
