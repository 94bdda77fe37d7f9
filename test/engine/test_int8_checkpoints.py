"""Checkpoints in int8, without a server: who holds which slot, what rounding changes, and how memory is divided."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang", reason="the server extra is not installed: pip install '.[server]'")

from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateDType, Mamba2StateShape
from sglang.srt.mem_cache.mamba_checkpoint_pool import Int8CheckpointStore, MambaCheckpointPool

from marconi.engine.int8.division import checkpoint_bytes_of
from marconi.engine.int8.pools import Int8DevicePools
from marconi.policy.int8 import Division, PerRequest, divide
from rig.pools import Strategy
from rig.soak import Soak, SoakFailure, SoakPlan, soak_on_marconi, soak_pools

pytestmark = pytest.mark.usefixtures("sglang_configuration")

EXTRA, NO = Strategy.EXTRA_BUFFER, Strategy.NO_BUFFER
NUM_REQUESTS = 150


def soak_of(strategy: Strategy, page_tokens: int, num_checkpoints: int, num_requests: int = NUM_REQUESTS) -> Soak:
    host = replace(soak_pools(strategy, page_tokens), num_checkpoints=num_checkpoints)
    return soak_on_marconi(host, SoakPlan(num_requests, seed=11, check_every_steps=16, drain_every_requests=50))


# Slots


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("strategy", "page_tokens", "num_checkpoints"), [(EXTRA, 1, 60), (EXTRA, 16, 60), (NO, 1, 60), (EXTRA, 1, 3)]
)
def test_every_slot_is_accounted_for_and_every_request_reads_its_own_state(
    strategy: Strategy, page_tokens: int, num_checkpoints: int
) -> None:
    """With many checkpoints and with few; requests are cut in chunks, retracted and aborted."""
    soak = soak_of(strategy, page_tokens, num_checkpoints)
    soak.run()
    cache = soak.scheduler.cache
    assert isinstance(cache.pools, Int8DevicePools)
    assert soak.scheduler.num_hit_tokens > 0
    assert cache.pools.promised == []
    (evictions,) = [sum(cache.tree_core.hybrid.counters.num_evictions.values())]
    assert evictions > 0


def test_control_a_state_that_is_not_rounded_is_read_by_the_wrong_request(monkeypatch: pytest.MonkeyPatch) -> None:
    soak = soak_of(EXTRA, 1, 60)
    monkeypatch.setattr(soak.scheduler.cache.pools, "_round", lambda *_: None)
    with pytest.raises(SoakFailure, match="reads a state of another sequence"):
        soak.run()


def test_control_a_promise_that_is_not_taken_back_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    soak = soak_of(EXTRA, 1, 60)
    pools = soak.scheduler.cache.pools
    monkeypatch.setattr(pools, "free_unkept", pools._free_live)
    with pytest.raises(SoakFailure, match="promised"):
        soak.run()


def test_where_planning_stops_ends_of_answers_are_kept_in_int8() -> None:
    """SGLang's own way of keeping states is not taken up: it ends the scheduler where no checkpoint slot is left."""
    soak = soak_of(EXTRA, 1, 60)
    while soak.num_submitted < NUM_REQUESTS // 3 or soak.scheduler.is_idle:
        soak.advance()
    cache = soak.scheduler.cache
    cache.first_rank.faults.catch("prefill.hook", KeyError())
    num_written = cache.tree_core.hybrid.counters.num_states_written
    soak.run()
    assert not cache.plans
    assert cache.cuts_prefills
    assert cache.tree_core.hybrid.counters.num_states_written > num_written


def test_live_slots_that_are_short_cost_no_checkpoint() -> None:
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    soak = soak_of(EXTRA, 1, 60, num_requests=40)
    soak.run()
    cache = soak.scheduler.cache
    num_states = cache.tree_core.hybrid.tree.num_states
    assert num_states > 1
    cache.evict_for_alloc(EvictParams(num_tokens=0, mamba_num=1000))
    assert cache.tree_core.hybrid.tree.num_states == num_states
    cache.evict(EvictParams(num_tokens=0, mamba_num=1))
    assert cache.tree_core.hybrid.tree.num_states == num_states - 1
    assert cache.status().state_slots.size == 60


# Rounding


def pool_of(num_slots: int, dtype: torch.dtype) -> MambaCheckpointPool:
    return MambaCheckpointPool(
        num_layers=3,
        num_slots=num_slots,
        num_heads=2,
        head_v_dim=16,
        head_k_dim=8,
        conv_shapes=[(24, 3)],
        conv_dtype=torch.bfloat16,
        device="cpu",
        temporal_dtype=dtype,
    )


def live_pool(num_slots: int, dtype: torch.dtype) -> Any:
    generator = torch.Generator().manual_seed(0)
    temporal = torch.randn((3, num_slots, 2, 16, 8), generator=generator).to(dtype)
    conv = [torch.randn((3, num_slots, 24, 3), generator=generator).to(torch.bfloat16)]
    return SimpleNamespace(mamba_cache=SimpleNamespace(temporal=temporal, conv=conv))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_state_is_rounded_once_and_the_live_one_stays(dtype: torch.dtype) -> None:
    """Against a reference in torch: within half a step of the largest number of its channel."""
    live, pool = live_pool(6, dtype), pool_of(9, dtype)
    pools = Int8DevicePools(SimpleNamespace(mamba_pool=live, mamba_ckpt_pool=pool), None)
    before = live.mamba_cache.temporal.clone(), live.mamba_cache.conv[0].clone()
    pools._round(torch.tensor([2, 5]), torch.tensor([7, 1]))
    assert torch.equal(live.mamba_cache.temporal, before[0])
    assert torch.equal(live.mamba_cache.conv[0], before[1])
    pool.load_to_active(live, torch.tensor([7, 1]), torch.tensor([0, 3]))
    for source, target in ((2, 0), (5, 3)):
        exact, found = before[0][:, source].float(), live.mamba_cache.temporal[:, target].float()
        step = exact.abs().amax(dim=-2, keepdim=True) / 127
        slack = 1.0 if dtype is torch.float32 else 4.0  # The scale and the result are in the state's dtype.
        assert bool(((found - exact).abs() <= slack * step / 2 * 1.001).all())
        assert not torch.equal(found, exact), "nothing was rounded"
        assert torch.equal(live.mamba_cache.conv[0][:, target], before[1][:, source])
    untouched = [1, 2, 4, 5]
    assert torch.equal(live.mamba_cache.temporal[:, untouched], before[0][:, untouched])


def test_a_state_that_was_rounded_rounds_to_itself() -> None:
    """A chain of turns rounds what each of them computes, and no rounding adds to another's."""
    state = torch.randn((2, 16, 8), generator=torch.Generator().manual_seed(1))
    once = Int8CheckpointStore.dequantize(*Int8CheckpointStore.quantize(state), torch.float32)
    twice = Int8CheckpointStore.dequantize(*Int8CheckpointStore.quantize(once), torch.float32)
    assert torch.allclose(once, twice, rtol=1e-6, atol=0)
    assert not torch.allclose(state, once, rtol=1e-6, atol=0)


# Memory


def cache_params(dtype: torch.dtype) -> Mamba2CacheParams:
    """A gated delta rule as large as Qwen3-Next's: 32 value heads of 128 x 128, windows of 8,192 channels."""
    shape = Mamba2StateShape.create(
        tp_world_size=1, intermediate_size=4096, n_groups=16, num_heads=32, head_dim=128, state_size=128, conv_kernel=4
    )
    return Mamba2CacheParams(
        shape=shape, layers=list(range(36)), dtype=Mamba2StateDType(conv=torch.bfloat16, temporal=dtype)
    )


@pytest.mark.parametrize(("dtype", "least"), [(torch.float32, 3.5), (torch.bfloat16, 1.8)])
def test_the_same_bytes_hold_so_many_times_the_checkpoints(dtype: torch.dtype, least: float) -> None:
    params = cache_params(dtype)
    state_bytes, checkpoint_bytes = params.mamba_cache_per_req, checkpoint_bytes_of(params)
    assert state_bytes / checkpoint_bytes >= least
    found = divide(400, PerRequest(5, 1), 16, state_bytes, checkpoint_bytes)
    assert found.num_live == 16 * 2 + 4
    taken_bytes = (found.num_live + 1) * state_bytes + (found.num_checkpoints + 1) * checkpoint_bytes
    assert 0 <= 401 * state_bytes - taken_bytes < checkpoint_bytes
    assert found.num_checkpoints >= least * (400 - found.num_live) - 1
    assert found.num_checkpoints >= least * (400 - 16) * 0.9, "more than full precision has beside 16 running requests"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_bytes_of_a_checkpoint_are_the_pools(dtype: torch.dtype) -> None:
    params = cache_params(dtype)
    heads, head_v_dim, head_k_dim = params.shape.temporal
    pool = MambaCheckpointPool(
        num_layers=2,
        num_slots=3,
        num_heads=heads,
        head_v_dim=head_v_dim,
        head_k_dim=head_k_dim,
        conv_shapes=list(params.shape.conv),
        conv_dtype=params.dtype.conv,
        device="cpu",
        temporal_dtype=dtype,
    )
    assert pool.mem_usage_bytes() == 4 * checkpoint_bytes_of(replace(params, layers=[0, 1]))


@pytest.mark.parametrize(
    ("num_slots", "max_running", "expected"),
    [
        (100, None, Division(44, 168 - 1, num_exact=80)),  # 20 would run, with 2 slots each and 4 to spare.
        (100, 8, Division(20, 240 - 1, num_exact=92)),
        (2, None, Division(1, 2, num_exact=1)),
        (6, 100, Division(4, 5, num_exact=5)),  # A third of the slots, at most, is spare.
    ],
)
def test_requests_get_what_they_hold_and_checkpoints_the_rest(
    num_slots: int, max_running: int | None, expected: Division
) -> None:
    assert divide(num_slots, PerRequest(5, 1), max_running, 3000, 1000) == expected


@pytest.mark.parametrize(("state_bytes", "least_slots"), [(3700, 5), (1900, 27)])
def test_a_division_that_keeps_no_more_states_than_full_precision_is_warned_of(
    state_bytes: int, least_slots: int
) -> None:
    """States in float32 gain from few slots on, those in bfloat16, of which int8 saves half, from 27."""
    warnings = {num: divide(num, PerRequest(5, 1), None, state_bytes, 1000).warning for num in range(4, 60)}
    assert warnings[least_slots - 1] is not None
    assert [num for num, warning in warnings.items() if warning is not None and num >= least_slots] == []
    assert str(warnings[4]).endswith(
        "where full precision would keep 3: leave it out, or give states more memory (--mamba-full-memory-ratio)"
    )
