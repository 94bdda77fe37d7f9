"""Unsupported settings are refused in one line that names them, and docs/status.md lists the same."""

import inspect
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang", reason="the server extra is not installed: pip install '.[server]'")

from sglang.srt.environ import envs
from sglang.srt.server_args import ServerArgs

from marconi.engine.cache.speculation import CHAIN_ALGORITHMS, TREE_ALGORITHMS
from marconi.engine.launch import support
from marconi.engine.launch.flags import Flags
from marconi.engine.launch.policies import CHUNK_END, JUDICIOUS
from marconi.engine.launch.storage import has_wrong_size, written_bytes_per_day
from marconi.engine.launch.support import NOTED, UNSUPPORTED, Facts, Launch, Setting, Unsupported, notes, require
from marconi.engine.plugin.backend import require_room
from marconi.engine.version import Refusal
from marconi.policy import catalog

STATUS = Path(__file__).parents[2] / "docs" / "status.md"
WANTED: dict[str, Any] = {
    "speculative_algorithm": "UNO",
    "dllm_algorithm": "LowConfidence",
    "pp_size": 2,
    "attn_cp_size": 2,
    "hicache_storage_backend": "hf3fs",
    "hicache_host_memory_mode": "buffer_only",
}
SERVED: dict[str, Any] = {
    "radix_eviction_policy": "priority",
    "mamba_max_states_per_path": 4,
    "kv_events_config": '{"publisher": "zmq"}',
    "hicache_write_policy": "write_back",
    "tokenizer_worker_num": 2,
}


def refusals(server_args: Any) -> Iterator[str]:
    """The lines of settings that no hybrid model is served with."""
    lines = (each.line_for(Launch(server_args, Flags())) for each in UNSUPPORTED)
    return (line for line in lines if line is not None)


def against(facts: Facts, admission: str = JUDICIOUS, **given: Any) -> list[str]:
    """The lines of a hybrid model's cache."""
    server_args = ServerArgs("model", **{"mamba_radix_cache_strategy": "extra_buffer", **given})
    return list(support.against_cache(server_args, Flags(admission=admission), facts))


@pytest.mark.parametrize("unsupported", UNSUPPORTED, ids=lambda each: each.field)
def test_what_does_not_go_is_refused_in_one_line(unsupported: Unsupported) -> None:
    value = WANTED.get(unsupported.field, True)
    with pytest.raises(Refusal) as refused:
        require(refusals(SimpleNamespace(**{unsupported.field: value})))
    line = str(refused.value)
    assert "\n" not in line
    assert line.startswith(unsupported.option)
    assert value is True or str(value) in line


@pytest.mark.parametrize(
    ("text", "is_wrong"),
    [
        (None, False),
        ("{}", False),
        ("no JSON", False),
        ('{"max_size": "2T", "min_free_space": "500Gi", "max_written_per_day": 1000}', False),
        ('{"max_size": 0, "min_free_space": ""}', False),
        ('{"max_size": "2TB"}', True),
        ('{"min_free_space": "a tenth"}', True),
        ('{"max_written_per_day": "-5G"}', True),
    ],
)
def test_a_size_that_sglang_would_take_for_none_is_refused(text: str | None, is_wrong: bool) -> None:
    assert has_wrong_size(text) is is_wrong


def test_what_a_store_may_be_written_a_day_is_bytes() -> None:
    found = [written_bytes_per_day(each) for each in (None, {}, {"max_written_per_day": "500G"})]
    assert found == [None, None, 500_000_000_000]


def test_sglangs_own_defaults_are_served() -> None:
    """Each field is one of `ServerArgs`, and none of its defaults is refused or worth a line."""
    fields = inspect.signature(ServerArgs).parameters
    defaults = SimpleNamespace(**{each.field: fields[each.field].default for each in (*UNSUPPORTED, *NOTED)})
    require(refusals(defaults))
    assert list(notes(defaults)) == []


@pytest.mark.parametrize("noted", NOTED, ids=lambda each: each.field)
def test_what_a_user_had_better_know_is_served_with_one_line(noted: Setting) -> None:
    given = SimpleNamespace(**{noted.field: SERVED.get(noted.field, True)})
    require(refusals(given))
    (line,) = notes(given)
    assert line.startswith(noted.option + " ")
    assert "\n" not in line


def test_a_cap_of_states_per_path_is_taken_and_said_to_have_no_effect() -> None:
    given = SimpleNamespace(mamba_max_states_per_path=4)
    require(refusals(given))
    (line,) = notes(given)
    assert line.startswith("--mamba-max-states-per-path 4 has no effect: ")
    assert "--marconi-eviction decides" in line


@pytest.mark.parametrize(
    ("facts", "given", "expected"),
    [
        (Facts(is_hybrid=True, has_one_pool=True, num_ranks=4), {"disaggregation_mode": "prefill"}, None),
        (
            Facts(is_hybrid=True, why_not_planned="its backend"),
            {"mamba_radix_cache_strategy": "extra_buffer_lazy"},
            "extra_buffer_lazy is only supported with",
        ),
        (Facts(is_hybrid=True), {"mamba_radix_cache_strategy": "extra_buffer_lazy"}, None),
        (Facts(is_hybrid=True, captures_layers=True), {}, "--cuda-graph-backend-prefill must be disabled"),
        (Facts(is_hybrid=False, captures_layers=True), {}, None),
    ],
)
def test_what_hangs_on_the_model_or_the_ranks_is_refused_there_alone(
    facts: Facts, given: dict[str, str], expected: str | None
) -> None:
    defaults = {"mamba_radix_cache_strategy": "auto", "speculative_algorithm": None, "disaggregation_mode": "null"}
    defaults |= {"disable_overlap_schedule": False, "enable_linear_replayssm_spec": False, "dcp_size": 1}
    found = list(support.against_cache(SimpleNamespace(**defaults | given), Flags(), facts))
    assert len(found) == (expected is not None)
    assert all(expected is not None and expected in line for line in found)


@pytest.mark.parametrize("facts", [Facts(is_hybrid=False), Facts(is_hybrid=True, is_cache_disabled=True)])
def test_a_record_is_refused_where_the_cache_is_sglangs_own(facts: Facts) -> None:
    assert list(support.against_cache(SimpleNamespace(), Flags(), facts)) == []
    (line,) = support.against_cache(SimpleNamespace(), Flags(record=Path("served")), facts)
    assert line.startswith("--marconi-record: the cache is SGLang's own here")


def test_drafts_whose_steps_are_not_followed_are_refused_in_one_pool() -> None:
    facts = Facts(is_hybrid=True, has_one_pool=True)
    for algorithm, is_served in (("DSPARK", False), ("EAGLE", True)):
        server_args = SimpleNamespace(
            mamba_radix_cache_strategy="auto",
            speculative_algorithm=algorithm,
            disaggregation_mode="null",
            disable_overlap_schedule=False,
            enable_linear_replayssm_spec=False,
            dcp_size=1,
        )
        assert list(support.against_cache(server_args, Flags(), replace(facts, has_one_pool=False))) == []
        lines = list(support.against_cache(server_args, Flags(), facts))
        assert [line.split(" and ")[0] for line in lines] == [
            "--speculative-algorithm DSPARK is not supported with --enable-unified-memory"
        ] * (not is_served)


@pytest.mark.parametrize("ratio", [-1.0, 0.0, float("nan"), float("inf")])
def test_a_host_tier_of_no_size_is_refused(ratio: float) -> None:
    server_args = ServerArgs("model", enable_hierarchical_cache=True, hicache_ratio=ratio)
    with pytest.raises(Refusal, match=f"^--hicache-ratio must be above 0, such as 2 for .*, got {ratio:g}$"):
        require(support.against_arguments(server_args, Flags()))


@pytest.mark.parametrize(
    "given", [{"hicache_ratio": 0.1}, {"hicache_ratio": None}, {"hicache_ratio": -1.0, "hicache_size": 4}]
)
def test_a_host_tier_of_any_size_is_served(given: dict[str, Any]) -> None:
    require(support.against_arguments(ServerArgs("model", enable_hierarchical_cache=True, **given), Flags()))
    require(support.against_arguments(ServerArgs("model", hicache_ratio=-1.0), Flags()))


@pytest.mark.parametrize("eviction", catalog.SERVED)
def test_a_rule_that_ranks_by_requests_is_refused_with_a_host_tier_alone(eviction: str) -> None:
    """`tail`, which would else fail at the first copy."""
    server_args = ServerArgs("model", enable_hierarchical_cache=True, mamba_radix_cache_strategy="extra_buffer")
    with_tier = Facts(is_hybrid=True, has_host_tier=True)
    found = list(support.against_cache(server_args, Flags(catalog.PolicySpec(eviction)), with_tier))
    assert len(found) == (eviction == "tail")
    for line in found:
        assert line.startswith("--marconi-eviction tail is not supported with --enable-hierarchical-cache: ")
        assert line.endswith("; it must be one of lru, marconi, best")
    assert (
        list(
            support.against_cache(
                server_args, Flags(catalog.PolicySpec(eviction)), replace(with_tier, has_host_tier=False)
            )
        )
        == []
    )


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"speculative_algorithm": "NGRAM"}, None),
        ({"speculative_algorithm": "NEXTN"}, None),
        ({"speculative_algorithm": "EAGLE"}, None),
        ({"speculative_algorithm": "EAGLE3"}, None),
        ({"speculative_algorithm": "STANDALONE"}, None),
        ({"speculative_algorithm": "DSPARK"}, None),
        ({"speculative_algorithm": "DFLASH"}, None),
        ({"dcp_size": 2}, None),
        ({"dcp_size": 2, "hicache_storage_backend": "file"}, "--dcp-size 2 is not supported with --hicache-storage-"),
        ({"disaggregation_mode": "prefill"}, None),
    ],
)
def test_drafts_and_roles_are_served_with_a_host_tier_where_loads_are_tested_with_them(
    given: dict[str, Any], expected: str | None
) -> None:
    server_args = ServerArgs(
        "model", enable_hierarchical_cache=True, mamba_radix_cache_strategy="extra_buffer", **given
    )
    with_tier = Facts(is_hybrid=True, has_host_tier=True)
    found = list(support.against_cache(server_args, Flags(), with_tier))
    assert len(found) == (expected is not None)
    assert all(line.startswith(str(expected)) for line in found)
    if given == {"dcp_size": 2}:
        (line,) = support.against_cache(server_args, Flags(), replace(with_tier, has_one_pool=True))
        assert line.startswith(
            "--dcp-size 2 is not supported with --enable-hierarchical-cache, --enable-unified-memory"
        )
    assert list(support.against_cache(server_args, Flags(), replace(with_tier, has_host_tier=False))) == []


@pytest.mark.parametrize(("algorithm", "is_served"), [("DSPARK", True), ("DFLASH", True), ("EAGLE", False)])
def test_inputs_in_place_of_states_are_served_where_sglang_folds_them_at_each_step(
    algorithm: str, is_served: bool
) -> None:
    given = {"enable_linear_replayssm_spec": True, "speculative_algorithm": algorithm}
    lines = against(Facts(is_hybrid=True), **given)
    wrong = f"--enable-linear-replayssm-spec: --speculative-algorithm must be DFLASH or DSPARK, got {algorithm}: "
    assert [line.startswith(wrong) for line in lines] == [True] * (not is_served)


@pytest.mark.parametrize(
    ("given", "option"),
    [
        ({"enable_hierarchical_cache": True}, "--enable-hierarchical-cache"),
        ({"disaggregation_mode": "prefill"}, "--disaggregation-mode"),
        ({"dcp_size": 2}, "--dcp-size"),
    ],
)
def test_where_windows_have_not_been_tested_they_are_refused(given: dict[str, Any], option: str) -> None:
    assert against(Facts(is_hybrid=True, has_sliding_window=True)) == []
    assert against(Facts(is_hybrid=True), **given) == []
    (line,) = against(Facts(is_hybrid=True, has_sliding_window=True), **given)
    assert line.startswith(f"{option} is not supported with --radix-cache-backend marconi on a model with sliding ")


def test_a_lock_that_is_given_back_while_decoding_is_refused() -> None:
    assert against(Facts(is_hybrid=True, skips_decode_lock=envs.SGLANG_OPT_MAMBA_SKIP_DECODE_LOCK.default)) == []
    (line,) = against(Facts(is_hybrid=True, skips_decode_lock=True))
    assert line.startswith("SGLANG_OPT_MAMBA_SKIP_DECODE_LOCK=1 is not supported with")


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({}, "a store is read and written through the host's memory: give --enable-hierarchical-cache as well"),
        (
            {"enable_hierarchical_cache": True, "disaggregation_mode": "prefill"},
            "--disaggregation-mode must be null, got prefill",
        ),
    ],
)
def test_a_store_is_refused_without_what_it_needs(given: dict[str, Any], says: str) -> None:
    served = ServerArgs(model_path="m", enable_hierarchical_cache=True, hicache_storage_backend="file")
    assert [*support.against_arguments(served, Flags())] == []
    server_args = ServerArgs(model_path="m", hicache_storage_backend="file")
    for name, value in given.items():
        setattr(server_args, name, value)
    assert [*support.against_arguments(server_args, Flags())] == [f"--hicache-storage-backend: {says}"]


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


def test_troubleshooting_says_what_to_do_about_each_refused_setting() -> None:
    page = STATUS.with_name("troubleshooting.md").read_text(encoding="utf-8")
    rows = [
        line for line in page.partition("### Flags that")[2].partition("\n## ")[0].splitlines() if line[:3] == "| `"
    ]
    listed = {option for row in rows for option in re.findall(r"`(--[a-z0-9-]+)`", row.split("|")[1])}
    assert listed == {each.option for each in UNSUPPORTED}
    (drafts,) = (row for row in rows if "`--speculative-algorithm`" in row)
    supported = {*TREE_ALGORITHMS, *CHAIN_ALGORITHMS}
    assert set(re.findall(r"\b[A-Z][A-Z0-9]+\b", drafts)) == supported


def test_the_page_names_everything_that_is_refused_or_worth_a_line() -> None:
    page = " ".join(STATUS.read_text(encoding="utf-8").split())
    refused, _, served = page.partition("in a line that says why: ")[2].partition(". ")
    assert [each.option for each in UNSUPPORTED if f"`{each.option}" not in refused] == []
    assert [each.option for each in NOTED if f"`{each.option}" not in served] == []
    both = {each.option for each in UNSUPPORTED} & {each.option for each in NOTED}
    assert [each.option for each in NOTED if f"`{each.option}" in refused and each.option not in both] == []


def test_a_lazy_second_slot_is_refused_where_scheduling_does_not_overlap() -> None:
    facts, lazy = Facts(is_hybrid=True), {"mamba_radix_cache_strategy": "extra_buffer_lazy"}
    assert against(facts, **lazy) == against(facts, disable_overlap_schedule=True) == []
    (line,) = against(facts, disable_overlap_schedule=True, **lazy)
    assert "must be extra_buffer where scheduling does not overlap, got extra_buffer_lazy" in line


def test_where_sglang_keeps_states_itself_a_lazy_second_slot_is_refused() -> None:
    facts = Facts(is_hybrid=True)
    assert against(facts, CHUNK_END) == []
    (line,) = against(facts, CHUNK_END, mamba_radix_cache_strategy="extra_buffer_lazy")
    assert "extra_buffer_lazy is only supported with --marconi-admission judicious" in line


@pytest.mark.parametrize(
    ("given", "option"),
    [
        ({}, None),
        ({"enable_unified_memory": True}, "--enable-unified-memory"),
        ({"enable_hierarchical_cache": True}, "--enable-hierarchical-cache"),
        ({"speculative_algorithm": "NEXTN"}, None),
        ({"disaggregation_mode": "prefill"}, None),
        ({"mamba_radix_cache_strategy": "extra_buffer_lazy"}, "--mamba-radix-cache-strategy extra_buffer_lazy"),
        ({"admission": CHUNK_END}, "--marconi-admission chunk-end"),
    ],
)
def test_what_knows_nothing_of_a_pool_of_checkpoints_is_refused_in_one_line(
    given: dict[str, Any], option: str | None
) -> None:
    lines = against(Facts(is_hybrid=True, has_int8_checkpoints=True), **given)
    assert [line.partition(" and ")[0] for line in lines] == (
        [] if option is None else [f"--enable-int8-mamba-checkpoint is not supported with {option}"]
    )
    assert not any("\n" in line for line in lines)


def test_one_pool_wants_planned_states() -> None:
    facts = Facts(is_hybrid=True, has_one_pool=True)
    assert against(facts) == against(replace(facts, has_one_pool=False), CHUNK_END) == []
    (line,) = against(facts, CHUNK_END)
    assert line.startswith("--enable-unified-memory is only supported with --marconi-admission judicious")


def test_no_line_has_a_field_that_is_not_filled_in() -> None:
    rows = (
        *support.REFUSED_ARGUMENTS,
        *support.REFUSED_WITHOUT_CACHE,
        *support.REFUSED_CACHES,
    )
    launch = Launch(ServerArgs("model", hicache_ratio=0.0), Flags(), Facts(is_hybrid=True))
    lines = [row._replace(when=lambda _: True).line_for(launch) for row in rows if isinstance(row, support.Refused)]
    assert len(lines) > 25
    assert not [line for line in lines if line is None or re.search(r"[{}]", line)]
