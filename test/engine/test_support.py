"""What does not go with the cache is refused in one line that names it, and docs/status.md lists the same."""

import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang", reason="the server extra is not installed: pip install '.[server]'")

from sglang.srt.environ import envs
from sglang.srt.server_args import ServerArgs

from marconi.engine.backend import require_room
from marconi.engine.support import UNSUPPORTED, Unsupported, require_supported, require_whole_locks
from marconi.engine.version import Refusal

STATUS = Path(__file__).parents[2] / "docs" / "status.md"
WANTED: dict[str, Any] = {
    "speculative_algorithm": "EAGLE",
    "dllm_algorithm": "LowConfidence",
    "tp_size": 2,
    "pp_size": 2,
    "attn_cp_size": 2,
    "dcp_size": 2,
    "mamba_max_states_per_path": 4,
    "kv_events_config": '{"publisher": "zmq"}',
    "disaggregation_mode": "prefill",
    "mamba_radix_cache_strategy": "extra_buffer_lazy",
}


@pytest.mark.parametrize("unsupported", UNSUPPORTED, ids=lambda each: each.field)
def test_what_does_not_go_is_refused_in_one_line(unsupported: Unsupported) -> None:
    value = WANTED.get(unsupported.field, True)
    with pytest.raises(Refusal) as refused:
        require_supported(SimpleNamespace(**{unsupported.field: value}), has_sliding_window=False)
    line = str(refused.value)
    assert "\n" not in line
    assert line.startswith(unsupported.option)
    assert value is True or str(value) in line


def test_sglangs_own_defaults_are_served() -> None:
    """Each field is one of `ServerArgs`, and none of its defaults is refused."""
    fields = inspect.signature(ServerArgs).parameters
    defaults = {each.field: fields[each.field].default for each in UNSUPPORTED}
    require_supported(SimpleNamespace(**defaults), has_sliding_window=False)


def test_sliding_windows_beside_recurrent_layers_are_refused() -> None:
    with pytest.raises(Refusal, match="recurrent layers and sliding windows"):
        require_supported(SimpleNamespace(), has_sliding_window=True)


def test_a_lock_that_is_given_back_while_decoding_is_refused() -> None:
    require_whole_locks(envs.SGLANG_OPT_MAMBA_SKIP_DECODE_LOCK.default)
    with pytest.raises(Refusal, match="SGLANG_OPT_MAMBA_SKIP_DECODE_LOCK=1 does not go with"):
        require_whole_locks(True)


def pools(num_slots: int, num_kv_tokens: int, page: int) -> Any:
    """What `CacheInitParams` tells of pools whose requests track in two slots."""
    states = SimpleNamespace(mamba_allocator=SimpleNamespace(size=num_slots), mamba_initial_tracking_slots=2)
    kv = SimpleNamespace(size=num_kv_tokens)
    return SimpleNamespace(req_to_token_pool=states, token_to_kv_pool_allocator=kv, page_size=page)


def test_pools_in_which_no_request_starts_from_a_state_are_refused() -> None:
    require_room(pools(4, 128, 64))
    with pytest.raises(Refusal, match=r"--max-mamba-cache-size must give at least 4 state slots, .*, got 3"):
        require_room(pools(3, 128, 64))
    with pytest.raises(Refusal, match="--max-total-tokens must be at least 2 pages of 64 KV tokens, got 127"):
        require_room(pools(4, 127, 64))


def test_the_readme_names_everything_that_is_refused() -> None:
    page = " ".join(STATUS.read_text(encoding="utf-8").split())
    assert [each.option for each in UNSUPPORTED if f"`{each.option}" not in page] == []
