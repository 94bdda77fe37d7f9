"""The pools that `marconi check` tells are those that SGLang would make."""

from dataclasses import replace

import pytest

from marconi.check.pools import Card, RequestSlots, pools_of

GB = 10**9
STATE_BYTES = 50_000_000
KV_BYTES = 6_144


def card(static_fraction: float = 0.9, weight_bytes: int = 60 * GB) -> Card:
    return Card(141 * GB, weight_bytes, static_fraction)


def test_memory_is_divided_as_sglang_divides_it() -> None:
    """Against the rule in words: states get 0.9 of what KV gets, one slot of theirs is padding."""
    rest = int(141 * GB * 0.9) - 60 * GB
    pools = pools_of(RequestSlots(page_tokens=64, num_tracking_slots=2), KV_BYTES, STATE_BYTES, card())
    assert pools.num_bytes == rest
    assert pools.num_slots == int(rest * 0.9 / 1.9) // STATE_BYTES - 1
    assert pools.num_tokens is not None
    assert pools.num_tokens % 64 == 0
    spent = (pools.num_slots + 1) * STATE_BYTES + pools.num_tokens * KV_BYTES
    assert rest - 64 * KV_BYTES < spent <= rest
    assert (pools.num_working_slots, pools.num_slots_per_running) == (3, 5)
    assert pools.max_running == pools.num_slots // 5
    lending = pools_of(RequestSlots(64, 2, lends_tracking_slots=True), KV_BYTES, STATE_BYTES, card())
    assert lending == replace(pools, num_working_slots=1, num_slots_per_running=3, max_running=pools.num_slots // 3)


@pytest.mark.parametrize("ratio", [None, 0.2])
def test_sglangs_own_sizing_gives_as_many_slots(ratio: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sglang", reason="the server extra is not installed: pip install '.[server]'")
    from types import SimpleNamespace

    from sglang.srt.mem_cache import kv_cache_configurator as theirs

    schedule = SimpleNamespace(
        max_mamba_cache_size=None, mamba_full_memory_ratio=ratio or 0.9, max_running_requests=None
    )
    context = SimpleNamespace(override=lambda _, **fields: vars(schedule).update(fields))
    monkeypatch.setattr(theirs, "get_schedule", lambda: schedule)
    monkeypatch.setattr(theirs, "get_context", lambda: context)
    monkeypatch.setattr(theirs, "get_memory", lambda: SimpleNamespace(disable_radix_cache=False))
    no_replay = SimpleNamespace(mamba=SimpleNamespace(enable_linear_replayssm_spec=False))
    monkeypatch.setattr(theirs, "get_exec", lambda: no_replay)
    params = SimpleNamespace(layers=[0, 1], mamba_cache_per_req=STATE_BYTES)
    configurator = SimpleNamespace(
        mambaish_config=SimpleNamespace(mamba2_cache_params=params),
        pp_size=1,
        attn_dp_size=1,
        fused_entry_bytes=lambda _: None,
        spec_algorithm=SimpleNamespace(is_none=lambda: True),
        hybrid_gdn_config=None,
        hybrid_kda_config=None,
        extra_mamba_cache_bytes_per_req=0,
    )
    request = RequestSlots(1, 2) if ratio is None else RequestSlots(1, 2, ratio)
    pools = pools_of(request, KV_BYTES, STATE_BYTES, card())
    assert pools.num_bytes is not None
    left_gib = theirs.KVCacheConfigurator._handle_max_mamba_cache(configurator, pools.num_bytes / 2**30)
    assert pools.num_slots == schedule.max_mamba_cache_size
    assert pools.num_tokens == pytest.approx(left_gib * 2**30 / KV_BYTES, abs=2)


def test_what_the_flags_say_is_taken() -> None:
    request = RequestSlots(page_tokens=64, num_tracking_slots=0, num_slots=100, max_tokens=1000)
    for each in (None, card()):
        pools = pools_of(request, KV_BYTES, STATE_BYTES, each)
        assert (pools.num_slots, pools.num_tokens, pools.max_running) == (100, 960, 33)


def test_one_pool_lends_all_of_it_to_either() -> None:
    request = RequestSlots(page_tokens=1, num_tracking_slots=2, is_one_pool=True)
    pools = pools_of(request, KV_BYTES, STATE_BYTES, card())
    assert pools.num_bytes is not None
    assert (pools.num_slots, pools.num_tokens) == (pools.num_bytes // STATE_BYTES, pools.num_bytes // KV_BYTES)
    two = pools_of(replace(request, is_one_pool=False), KV_BYTES, STATE_BYTES, card())
    assert pools.max_running == two.max_running, "as many requests may run as in two pools"


def test_nothing_is_known_without_a_card() -> None:
    pools = pools_of(RequestSlots(page_tokens=1, num_tracking_slots=2), KV_BYTES, STATE_BYTES, None)
    assert (pools.num_slots, pools.num_tokens, pools.num_bytes, pools.max_running) == (None, None, None, None)


def test_weights_that_do_not_fit_leave_no_pools() -> None:
    pools = pools_of(RequestSlots(1, 2), KV_BYTES, STATE_BYTES, card(static_fraction=0.4))
    assert (pools.num_slots, pools.num_tokens, pools.num_bytes, pools.weight_bytes) == (0, 0, 0, 60 * GB)
