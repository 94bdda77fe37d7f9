"""Numbers of the papers' figures, at a small scale."""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from .scripts import load

load("figures")

from benchmark_figures.base import Claim, Figure, Scale, verdict
from benchmark_figures.catalog import FIGURES, chosen
from benchmark_figures.cells import Cell, Sample
from benchmark_figures.checkpoints import reuse
from benchmark_figures.measure import measure
from benchmark_figures.microbenchmarks import Contention
from benchmark_figures.setups import (
    MEMORY_GB,
    STATIC,
    hybrid_host,
    session_scene,
)
from benchmark_figures.table import rows
from benchmark_figures.tail import BUDGETS_MS, CAPACITIES, LRU, tail_cell, tail_policy

from marconi.model import Storage, profile_of
from marconi.model import load as load_model
from marconi.model.attention import Attention, SlidingWindowAttention
from marconi.model.recurrent import gated_delta_rule
from marconi.replay.trace import preset

TINY = Scale(num_sessions=3, num_chats=12, num_seeds=1)
PAPERS = (
    *("table-1", "3a", "3b", "5", "7", "8", "9", "10a", "10b", "11", "12a", "12b", "13a", "13b"),
    *("tlru-table-1", "tlru-table-2", "tlru-table-3", "tlru-variants"),
)


@pytest.fixture(scope="module")
def samples() -> Mapping[Cell, Sample]:
    return measure((cell for figure in FIGURES for cell in figure.cells(TINY)), num_processes=2)


@pytest.fixture(scope="module")
def numbers(samples: Mapping[Cell, Sample]) -> dict[str, dict[str, Any]]:
    return {figure.id: figure.numbers(TINY, samples) for figure in FIGURES}


def figure(name: str) -> Figure:
    return chosen(name)[0]


def test_every_figure_that_was_promised_is_there_once() -> None:
    assert tuple(figure.id for figure in FIGURES) == PAPERS


def test_only_selects_figures_in_the_order_of_the_page() -> None:
    assert [figure.id for figure in chosen("8, 3a")] == ["3a", "8"]


def test_an_unknown_figure_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'99' is no figure: give some of table-1, 3a"):
        chosen("7,99")


@pytest.mark.slow
@pytest.mark.parametrize("name", PAPERS)
def test_a_figure_has_numbers_that_are_json_and_one_sentence(name: str, numbers: dict[str, dict[str, Any]]) -> None:
    json.dumps(numbers[name], allow_nan=False)
    said = verdict(figure(name).claims(numbers[name]))
    assert said.endswith(".")
    assert "\n" not in said
    assert said.startswith(("Agrees that ", "Does not agree that "))


def test_processes_and_one_process_measure_the_same() -> None:
    cells = [cell for cell in figure("11").cells(TINY) if cell.policy == "lru-joint"]
    cells += figure("13a").cells(TINY)
    alone, together = measure(cells, num_processes=1), measure(cells, num_processes=2)
    assert set(alone) == set(together) == set(cells)
    for cell, sample in alone.items():
        assert (sample.hit_tokens == together[cell].hit_tokens).all()
        assert (sample.ttft_s == together[cell].ttft_s).all()


def test_table_1_equals_the_papers_formulas() -> None:
    table = figure("table-1").numbers(TINY, {})
    assert table["num_equal"] == table["num_compared"] == 27
    assert [layer["layer"] for layer in table["layers"]] == ["attention", "mlp", "ssm"]
    assert table["convolution_share"] == pytest.approx(0.061, abs=5e-4)


def test_table_1_in_numbers_for_the_papers_model() -> None:
    attention, ssm, mlp = rows(load_model("marconi-7b"))
    assert (attention.kind, attention.num_layers, attention.flops) == ("attention", 4, "16,384 L^2 + 134,217,728 L")
    assert (attention.state_bytes, attention.flops_per_byte) == ("16,384 L", "L + 8,192")
    assert (ssm.kind, ssm.num_layers, ssm.flops) == ("ssm", 24, "209,715,210 L")
    assert (ssm.state_bytes, ssm.convolution_bytes) == ("1,048,576", 67_584)
    assert ssm.flops_per_byte == "200.0000095 L"
    assert (mlp.kind, mlp.num_layers, mlp.flops, mlp.state_bytes) == ("mlp", 28, "268,435,456 L", "0")


def test_the_table_of_windows_names_their_terms() -> None:
    attention = Attention(64, num_heads=8, num_kv_heads=2, head_dim=8, v_head_dim=8)
    layers = [SlidingWindowAttention(attention, 16), SlidingWindowAttention(attention, 100)]
    window, delta = rows(profile_of("windows", [*layers, gated_delta_rule(64, 2, 8, 4, 8, conv_kernel=4)], Storage()))
    assert "S_16(L)" in window.flops
    assert "min(L, 100)" in window.state_bytes
    assert delta.flops_per_byte.endswith(" L")


@pytest.mark.slow
def test_memory_of_10000_tokens_is_the_papers(numbers: dict[str, dict[str, Any]]) -> None:
    held = numbers["3b"]["gigabytes"]
    assert held["hybrid, block 16"][-1] == pytest.approx(17.4, abs=0.05)
    assert held["hybrid, block 16"][-1] / held["Transformer"][-1] == pytest.approx(3.3, abs=0.05)


@pytest.mark.slow
def test_flop_efficiency_rises_with_length_and_faster_with_more_ssm_layers(
    numbers: dict[str, dict[str, Any]],
) -> None:
    models = numbers["5"]["flops_per_byte"]
    for values in models.values():
        assert values == sorted(values)
    growth = [values[-1] / values[0] for values in models.values()]
    assert growth == sorted(growth)
    # KV alone: (L + 2 D) + 4 D of MLP for each of the 32 layers, over D = 4096.
    assert models["Transformer"][0] == 128 + 6 * 4096


def test_states_are_reused_less_than_kv_and_larger_blocks_help_them() -> None:
    found = figure("3a").numbers(replace(TINY, num_sessions=5), {})
    assert all(0 < state < kv < 1 for kv, state in zip(found["kv_reused"], found["states_reused"], strict=True))
    assert found["states_reused"] == sorted(found["states_reused"])


def test_reuse_counts_by_hand() -> None:
    """Two turns: the second starts from the last full block of the first, and uses the KV of every block before."""
    scene = session_scene("agent-append", 1.0, 5.0, 1, 0)
    trace = scene.trace()
    first, second = trace.requests[:2]
    two = replace(trace, requests=(first, second))
    held = first.num_prompt_tokens + first.num_output_tokens - 1
    blocks_of_first = held // 64
    blocks = (second.num_prompt_tokens + second.num_output_tokens - 1) // 64
    kv, states = reuse(two, hybrid_host(), 64, 1 << 50)
    assert kv == pytest.approx(blocks_of_first / blocks)
    assert states == pytest.approx(1 / blocks)


@pytest.mark.slow
def test_more_memory_gives_more_hits(samples: Mapping[Cell, Sample]) -> None:
    for workload, amounts in MEMORY_GB.items():
        scene = session_scene(workload, 1.0, 5.0, TINY.num_sessions, TINY.seed)
        least, most = (
            samples[Cell(scene, hybrid_host(), "lru-joint", TINY.memory_bytes(gigabytes))].token_hit_rate
            for gigabytes in (amounts[0], amounts[-1])
        )
        assert least < most, workload


@pytest.mark.slow
def test_every_system_hits_more_with_the_most_memory_than_with_the_least(numbers: dict[str, dict[str, Any]]) -> None:
    for values in numbers["11"]["token_hit_rate"].values():
        assert values[0] < values[-1]


def test_hindsight_hits_more_than_lru_under_contention() -> None:
    scale = replace(TINY, num_sessions=30)
    lru, bound = (
        measure(cells, 1)[cells[0]].token_hit_rate
        for policy in ("lru-joint", "belady")
        if (cells := [cell for cell in figure("11").cells(scale) if cell.policy == policy][1:2])
    )
    assert lru < bound


def test_wider_states_and_fewer_attention_layers_are_other_hosts() -> None:
    assert hybrid_host(state_size=16).model.state_bytes < hybrid_host().model.state_bytes
    assert hybrid_host(12, 24, 28).model.kv_bytes_per_token == 3 * hybrid_host().model.kv_bytes_per_token
    transformer = next(cell for cell in figure("12a").cells(TINY) if not cell.host.model.state_bytes)
    assert transformer.host.model.kv_bytes_per_token == 32 * 4 * 4096


@pytest.mark.slow
def test_a_win_is_what_the_samples_say(samples: Mapping[Cell, Sample], numbers: dict[str, dict[str, Any]]) -> None:
    lru = samples[tail_cell(TINY, LRU, CAPACITIES[-1])].ttft_percentile(90)
    tlru = samples[tail_cell(TINY, tail_policy("tlru", BUDGETS_MS[0]), CAPACITIES[-1])].ttft_percentile(90)
    assert numbers["tlru-table-1"]["win_percent"][-1][0] == pytest.approx(100 * (1 - tlru / lru), abs=0.06)


def test_a_verdict_names_what_holds_first_and_what_does_not_after() -> None:
    falls, rises = Claim("a falls", "5 %", "3 %", True), Claim("b rises", "", "it falls", False)
    stays = Claim("c stays", "", "it does", True)
    assert verdict([falls, rises, stays]) == (
        "Agrees that a falls (paper: 5 %; here: 3 %) and that c stays (here: it does), "
        "but not that b rises (here: it falls)."
    )
    assert verdict([rises]) == "Does not agree that b rises (here: it falls)."


def test_a_verdict_names_the_cause_of_what_does_not_hold_and_no_other() -> None:
    rises = Claim("b rises", "2 %", "it falls", False, cause="rain")
    assert verdict([rises]) == "Does not agree that b rises (paper: 2 %; here: it falls; cause: rain)."
    assert "rain" not in verdict([replace(rises, holds=True)])


@pytest.mark.slow
def test_the_best_fixed_alpha_is_the_best_at_each_point(
    samples: Mapping[Cell, Sample], numbers: dict[str, dict[str, Any]]
) -> None:
    shown = numbers["11"]["token_hit_rate"]["Marconi, best fixed alpha"]
    scene = session_scene("agent-append", 1.0, 5.0, TINY.num_sessions, TINY.seed)
    for best, gigabytes in zip(shown, Contention.values, strict=True):
        rates = [
            samples[Cell(scene, hybrid_host(), policy, TINY.memory_bytes(gigabytes))].token_hit_rate
            for policy in STATIC
        ]
        assert best == pytest.approx(max(rates), abs=1e-4)


def test_agents_meet_the_hit_rates_they_are_calibrated_to() -> None:
    """What the published artifact's LRU hits with 100 sessions at 1 a second: 26.9 % at 40 GB, 82.2 % at 100 GB."""
    scene = session_scene("agent-append", 1.0, 5.0, 100, 0)
    assert scene.workload == preset("agent-append")
    cells = [Cell(scene, hybrid_host(), "lru-joint", gigabytes * 10**9) for gigabytes in (40, 100)]
    rates = [sample.token_hit_rate for sample in measure(cells, num_processes=1).values()]
    assert rates == pytest.approx([0.269, 0.822], abs=0.05)


@pytest.mark.parametrize("field", ["num_sessions", "num_chats", "num_seeds"])
def test_a_scale_without_sessions_is_refused(field: str) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        replace(TINY, **{field: 0})


def test_a_negative_seed_is_refused() -> None:
    with pytest.raises(ValueError, match="seed must be 0 or more, got -1"):
        Scale(seed=-1)
