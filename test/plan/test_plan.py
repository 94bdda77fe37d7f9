"""`marconi plan`: what it advises follows from the runs, and nothing is changed for nothing."""

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from marconi.cli import main, parse
from marconi.model import DEVICES, PrefillLatency, load
from marconi.plan.advice import INT8, ONE_POOL, Advice, Contender, flags
from marconi.plan.plan import INT8_RATIOS, RATIOS, candidates, halves, make_plan, request_bytes
from marconi.plan.verdict import Plan
from marconi.policy.catalog import PolicySpec
from marconi.replay.queueing import Batching
from marconi.replay.result import Percentiles, PolicyResult, Report
from marconi.replay.store import StoreSpec, Traffic
from marconi.replay.task import ReplayInputs, Task
from replay.worlds import conversations

BEST = PolicySpec("best")
LRU = PolicyResult(
    task=Task(PolicySpec("lru"), 10**9, 0.9),
    chosen=None,
    num_requests=10,
    num_prompt_tokens=10_000,
    num_hit_tokens=2_000,
    flops_saved=0.0,
    flops_total=1.0,
    ttft_s=Percentiles(0.1, 2.0, 3.0),
    slo_s=1.0,
    num_slo_violations=0,
    num_too_large=0,
    num_states_written=0,
    num_states_kept=0,
    num_states_hit=0,
    num_evictions=(),
    num_evicted_tokens=0,
    held_bytes=0,
    prefill_s=1.0,
    num_loads=0,
    num_loaded_tokens=0,
    load_s=0.0,
    requests_per_s=1.0,
)


def like(policy: str, ratio: float | None, num_hit_tokens: int) -> PolicyResult:
    return replace(LRU, task=Task(PolicySpec(policy), 10**9, ratio), num_hit_tokens=num_hit_tokens)


NEEDS = 2 * 10**9, 30 * 10**9


def test_stock_sglang_as_it_comes_is_the_first_candidate_and_is_compared_with_every_layout() -> None:
    tasks = candidates(10**9)
    assert (str(tasks[0].policy), tasks[0].mamba_ratio) == ("lru", 0.9)
    assert {task.mamba_ratio for task in tasks if str(task.policy) == "best"} == {None, *RATIOS}


def test_what_a_server_without_planned_states_refuses_is_no_candidate() -> None:
    """It takes no one pool; `test_check.py` holds `marconi check` to the same."""
    assert {task.mamba_ratio for task in candidates(10**9, has_one_pool=False)} == set(RATIOS)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_one_pool_is_advised_over_any_number_of_ranks(num_ranks: int) -> None:
    model = load("nemotron-h-8b", tensor_parallel=num_ranks)
    inputs = ReplayInputs(conversations(), model, DEVICES["h100"], PrefillLatency(model, DEVICES["h100"]))
    (advice,) = make_plan(inputs, [2 * request_bytes(inputs)[1]], None, 1).advice
    assert ONE_POOL in "\n".join(advice.sentences)
    assert advice.to_json()["sglang_flags"] == ONE_POOL


def test_the_best_is_advised_with_its_flags_and_its_gain() -> None:
    runs = (LRU, like("lru", 0.2, 2_500), like("marconi", None, 6_000), like("marconi", 0.4, 5_000))
    advice = Advice.of(runs, NEEDS)
    assert (advice.default, advice.stock, advice.best, advice.split) == runs
    text = "\n".join(advice.sentences)
    assert "1 GB: stock SGLang as it comes hits 20.0 % of the prompt tokens (P95 TTFT 2 s)." in text
    assert "Stock SGLang is best with --mamba-full-memory-ratio 0.2: 25.0 %" in text
    assert "Best: policy marconi in one pool with --enable-unified-memory: 60.0 %" in text
    assert "50.0 % fewer tokens recomputed" in text
    assert "With two pools: policy marconi with --mamba-full-memory-ratio 0.4: 50.0 %" in text
    assert advice.to_json()["sglang_flags"] == "--enable-unified-memory"


def test_the_verdict_divides_this_projects_memory_where_stock_at_another_ratio_is_as_good() -> None:
    runs = (LRU, like("lru", 0.2, 6_010), like("best", None, 5_000), like("best", 0.2, 6_000))
    advice = Advice.of(runs, NEEDS, Task(PolicySpec("best"), 10**9))
    assert advice.best is runs[1]
    assert (advice.default, advice.alone, advice.ours) == (LRU, runs[2], runs[3])


def in_int8(ratio: float, num_hit_tokens: int) -> PolicyResult:
    run = like("best", ratio, num_hit_tokens)
    return replace(run, task=replace(run.task, int8_checkpoints=True))


def test_checkpoints_in_int8_are_a_candidate_where_a_server_serves_them() -> None:
    def ratios(**fields: Any) -> list[float | None]:
        return [task.mamba_ratio for task in candidates(10**9, **fields) if task.int8_checkpoints]

    assert ratios(has_int8=True) == [*INT8_RATIOS]
    assert ratios() == []


@pytest.mark.slow
def test_a_plan_replays_checkpoints_in_int8_and_tells_what_they_win() -> None:
    model = load("nemotron-h-8b")
    speed = PrefillLatency(model, DEVICES["h100"])
    trace = conversations(num_sessions=80)
    inputs = ReplayInputs(trace, model, DEVICES["h100"], speed, batching=Batching(max_running=1))
    (advice,) = make_plan(inputs, [60 * model.state_bytes], None, 1).advice
    assert advice.int8 is not None
    assert advice.best is not None
    assert not advice.best.task.int8_checkpoints
    assert advice.int8.num_hit_tokens > advice.best.num_hit_tokens
    assert sum(INT8 in line for line in advice.sentences) == 1


def test_checkpoints_in_int8_are_told_where_they_win_and_are_never_the_best() -> None:
    exact = (LRU, like("best", None, 6_000), like("best", 0.4, 5_000))
    for num_hit_tokens, is_told in ((6_030, False), (6_050, True), (9_000, True)):
        advice = Advice.of((*exact, in_int8(0.9, 2_000), in_int8(0.2, num_hit_tokens)), NEEDS, Task(BEST, 10**9))
        assert (advice.best, advice.split, advice.ours) == (exact[1], exact[2], exact[1])
        assert (advice.default, advice.alone) == (LRU, exact[1])
        assert any(INT8 in line for line in advice.sentences) == is_told
    assert advice.sentences[-1] == (
        "With --enable-int8-mamba-checkpoint at --mamba-full-memory-ratio 0.2 it would hit 90.0 % of the prompt tokens "
        "(P95 TTFT 2 s), 75.0 % fewer tokens recomputed than the best that is exact (answers that resume from a "
        "rounded state may differ)."
    )


def test_the_layout_whose_slow_answers_come_sooner_is_named() -> None:
    advice = Advice.of((LRU,), NEEDS)
    for p95, named in ((0.5, "2 servers would answer sooner."), (2.0, "One server would answer sooner.")):
        layouts = tuple(
            Contender(number, 10**9, 0.5, Percentiles(0.1, tail, 3.0)) for number, tail in ((1, 1.0), (2, p95))
        )
        assert replace(advice, layouts=layouts).sentences[-1].endswith(named)


def test_a_tie_goes_to_what_is_there() -> None:
    advice = Advice.of((LRU, like("lru", 0.2, 2_019), like("marconi", None, 2_020)), NEEDS)
    assert advice.best is advice.stock is advice.default
    assert advice.sentences[-1] == "Nothing that was tried is better: keep it."


def test_stock_sglang_at_another_ratio_may_be_the_best() -> None:
    advice = Advice.of((LRU, like("lru", 0.2, 4_000), like("marconi", None, 4_010)), NEEDS)
    assert advice.best is not None
    assert flags(advice.best) == "--mamba-full-memory-ratio 0.2"
    assert advice.best.task.policy == PolicySpec("lru")
    assert len(advice.sentences) == 2


def test_where_nothing_fits_the_plan_says_what_would() -> None:
    none = [replace(run, num_hit_tokens=0, num_too_large=10) for run in (LRU, like("marconi", None, 0))]
    advice = Advice.of(none, NEEDS)
    assert advice.sentences == (
        "1 GB: nothing fits, whatever the policy: every request is too large.",
        "In one pool the smallest request needs 2 GB (its KV and 4 states), the largest 30 GB.",
    )
    assert advice.to_json()["policy"] is advice.to_json()["sglang_flags"] is None
    one_fits = [none[0], replace(none[1], num_states_written=1)]
    assert "nothing fits" not in Advice.of(one_fits, NEEDS).sentences[0]


def test_what_the_smallest_request_is_said_to_need_keeps_it() -> None:
    model = load("nemotron-h-8b")
    inputs = ReplayInputs(conversations(), model, DEVICES["h100"], PrefillLatency(model, DEVICES["h100"]))
    smallest, largest = request_bytes(inputs)
    for num_bytes, fits in ((smallest - 1, False), (smallest, True)):
        (advice,) = make_plan(inputs, [num_bytes], None, 1).advice
        assert (advice.best is not None) == fits
    plan = make_plan(inputs, [largest - 1, largest], None, 1)
    too_large = {
        run.task.memory_bytes: run.num_too_large
        for run in plan.report.runs
        if run.task.policy == BEST and run.task.mamba_ratio is None
    }
    assert too_large[largest] == 0 < too_large[largest - 1]


def test_a_model_without_states_has_no_split_to_choose() -> None:
    model = load("vicuna-7b")
    inputs = ReplayInputs(conversations(), model, DEVICES["h100"], PrefillLatency(model, DEVICES["h100"]))
    plan = make_plan(inputs, [10**8], None, 1)
    assert [str(run.task.policy) for run in plan.report.runs] == ["lru"]
    (advice,) = plan.advice
    assert "The model keeps no states: there is no split to choose." in advice.sentences
    assert not any("ratio" in line or "unified" in line or "two pools" in line for line in advice.sentences)
    assert advice.to_json()["sglang_flags"] is None


def test_the_command_prints_the_verdict_and_what_is_next_and_on_request_tables_and_advice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "plan.json"
    argv = ["plan", "generate:agent-append", "--max-sessions", "8", "--model", "nemotron-h-8b", "--memory", "0.1x,0.3x"]
    assert main(argv) == 0
    *verdict, following = capsys.readouterr().out.splitlines()
    assert main([*argv, "--table", "--json", str(out)]) == 0
    document = json.loads(out.read_bytes())
    assert verdict == document["verdict"]
    assert following.startswith("Next: marconi check --gpu-memory 80GB -- --model-path nemotron-h-8b --radix-cache-")
    assert parse(shlex.split(following)[2:]).gpu_memory == "80GB"
    assert {"trace", "model", "seed", "runs"} <= set(document)
    assert len(document["runs"]) == 2 * len(candidates(1, has_int8=True))
    printed = capsys.readouterr().out
    lines = printed.splitlines()
    assert lines[: len(verdict)] == verdict
    assert lines[-1] == following
    for advice in document["advice"]:
        runs = [run for run in document["runs"] if run["memory_bytes"] == advice["memory_bytes"]]
        best = max(run["token_hit_rate"] for run in runs if not run["int8_checkpoints"])
        assert best - 0.002 <= advice["token_hit_rate"] <= best
        assert advice["sentences"][0] in printed


def test_a_plan_without_memory_takes_what_the_weights_leave_of_a_card(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "plan.json"
    argv = ["plan", "generate:agent-append", "--max-sessions", "4", "--model", "nemotron-h-8b", "--json", str(out)]
    assert main(argv) == 0
    model = load("nemotron-h-8b")
    left = int(0.85 * 80e9) - 2 * model.num_parameters
    assert {run["memory_bytes"] for run in json.loads(out.read_text())["runs"]} == {left}
    said = capsys.readouterr().err
    assert "marconi: --memory is 51.8 GB: 85% of an h100's 80 GB, less" in said
    assert main(["plan", "generate:agent-append", "--model", "qwen3-next-80b-a3b"]) == 2
    assert "--memory must be given, or --tensor-parallel more than 1: " in capsys.readouterr().err


# The verdict


def point(num_hit_tokens: int, divided: PolicyResult | None = None) -> Advice:
    alone = like("best", None, num_hit_tokens)
    return Advice(LRU, LRU, None, alone, NEEDS, alone, divided)


def planned(
    *points: Advice,
    sizes: tuple[int, ...] = (5_000, 6_000),
    stored: tuple[PolicyResult, ...] = (),
    model: str = "nemotron-h-8b",
) -> Plan:
    runs = tuple(
        replace(like("best", None, hits), task=Task(BEST, 2 ** (31 + 50 * index))) for index, hits in enumerate(sizes)
    )
    halved = (LRU, like("best", None, 4_000)), (LRU, like("best", None, 6_000))
    profile, on = load(model), DEVICES["h100"]
    report = Report(ReplayInputs(conversations(), profile, on, PrefillLatency(profile, on)), None, (LRU,))
    return Plan(report, points, runs, halved, stored)


def verdict(*points: Advice, **fields: Any) -> tuple[str, ...]:
    return planned(*points, **fields).verdict


def test_a_launch_has_the_flags_of_the_first_memory_in_which_it_helps() -> None:
    assert planned(point(6_000)).launch_flags == "--radix-cache-backend marconi"
    assert planned(point(2_010)).launch_flags is None, "stock SGLang is as good"
    assert planned().launch_flags is None, "nothing fits"
    divided = like("best", 0.2, 7_000)
    assert planned(point(2_010), point(6_000, divided)).launch_flags == (
        "--radix-cache-backend marconi --mamba-full-memory-ratio 0.2"
    )
    above = replace(like("best", None, 6_000), task=Task(BEST, 10**9, host_bytes=4 * 10**9))
    on_ranks = replace(planned(replace(point(6_000), alone=above)), num_cards=2)
    assert on_ranks.launch_flags == (
        "--radix-cache-backend marconi --tp-size 2 --enable-hierarchical-cache --hicache-ratio 4"
    )


def test_the_five_lines_follow_from_the_runs() -> None:
    helps, which, memory, servers, sure = verdict(point(6_000))
    assert helps == (
        "Would it help? Yes, with the flag alone: 50.0 % fewer prompt tokens computed in 1 GB "
        "(60.0 % cached, P95 TTFT 2 s; stock SGLang 20.0 %, 2 s)."
    )
    assert which == "Which flags? --radix-cache-backend marconi, and nothing more."
    assert memory.endswith("unlimited memory would hit 60.0 %: 1 GB is enough.")
    assert servers.startswith("How many servers? One of one rank; --tensor-parallel N compares")
    assert sure.endswith("in half the memory, the flag alone computes 25.0 % fewer tokens and 50.0 % fewer tokens.")


def test_a_division_is_named_where_it_computes_less_than_the_flag_alone() -> None:
    better = verdict(point(6_000, like("best", 0.2, 7_000)))
    assert "--mamba-full-memory-ratio 0.2 computes 25.0 % fewer still in 1 GB." in better[1]
    same = verdict(point(6_000, like("best", 0.2, 6_010)))
    assert same[1].endswith("and nothing more.")


def test_where_nothing_is_won_the_verdict_says_so() -> None:
    assert verdict(point(2_010))[0].startswith("Would it help? No, stock SGLang is as good: 0.1 % fewer")
    assert "25.0 % more prompt tokens computed" in verdict(point(0))[0]
    (line,) = verdict(point(6_000), model="vicuna-7b")
    assert line.startswith("Would it help? No: the model has no recurrent layers")
    assert verdict() == ("Would it help? No: in this memory nothing fits.",)


def test_a_sixth_line_says_what_a_store_behind_the_host_would_win() -> None:
    storage, traffic = StoreSpec(2 * 10**12, 6e9), Traffic(num_written_bytes=10**9, num_read_bytes=2 * 10**9)
    task = Task(BEST, 10**9, host_bytes=4 * 10**9, storage=storage)
    stored = replace(like("best", None, 8_000), task=task, prefill_s=0.5, traffic=traffic)
    *_, disk, _, _ = verdict(point(6_000), stored=(stored,))
    assert disk == (
        "Would a disk help? Yes, 2 TB of storage at 6 GB/s: 50.0 % fewer prompt tokens computed in 1 GB and 4 GB on "
        "the host (80.0 % cached), 0.5 s of prefill, reading and loading in place of 1 s, 1 GB written and 2 GB read."
    )
    same = verdict(point(6_000), stored=(replace(stored, num_hit_tokens=6_000),))
    assert same[3].startswith("Would a disk help? No, 2 TB of storage at 6 GB/s: 0.0 % fewer")
    assert len(same) == 6


def test_a_plan_with_storage_replays_the_default_alone_with_it(tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    argv = ["plan", "generate:agent-append", "--max-sessions", "6", "--block-tokens", "64", "--model", "nemotron-h-8b"]
    argv += ["--memory", "2GB", "--host-memory", "1GB", "--json", str(out), "--jobs", "1"]
    assert main(argv) == 0
    without = json.loads(out.read_text())
    assert main([*argv, "--storage-memory", "1TB", "--storage-bandwidth", "20"]) == 0
    found = json.loads(out.read_text())
    (stored,) = found.pop("with_storage")
    assert (stored["policy"], stored["mamba_full_memory_ratio"]) == ("best", None)
    assert stored["storage_hit_tokens"] > 0
    assert [line for line in found["verdict"] if "disk" not in line] == without["verdict"]
    assert {**found, "verdict": without["verdict"]} == without


def plan_of(name: str, memory_bytes: int) -> Plan:
    model = load(name)
    return make_plan(
        ReplayInputs(conversations(), model, DEVICES["h100"], PrefillLatency(model, DEVICES["h100"])),
        [memory_bytes],
        None,
        1,
    )


@pytest.mark.parametrize("name", ["jamba-1.5-mini", "marconi-7b"])
def test_for_a_model_that_no_server_has_nothing_is_advised(name: str) -> None:
    plan = plan_of(name, 20 * 10**9)
    (line,) = plan.verdict
    assert line.startswith("Would it help? No: ")
    (advice,) = plan.advice
    assert not any("--" in sentence for sentence in advice.sentences)
    assert advice.to_json()["sglang_flags"] is None


def test_weights_that_fit_no_single_card_have_the_ranks_that_they_need() -> None:
    assert plan_of("qwen3-next-80b-a3b", 20 * 10**9).verdict[3] == (
        "How many servers? One of 4 ranks or more: 159 GB of weights (16 bits) do not fit fewer cards (h100 of 80 GB); "
        "--tensor-parallel 4 plans for them."
    )
    assert "One of one rank" in plan_of("nemotron-h-8b", 20 * 10**9).verdict[3], "its weights fit"


def test_flags_that_a_model_needs_stand_beside_the_backends() -> None:
    line = plan_of("falcon-h1-7b", 5 * 10**9).verdict[1]
    assert line.startswith("Which flags? --radix-cache-backend marconi --cuda-graph-backend-prefill disabled")


def test_memory_that_still_helps_is_said_to() -> None:
    memory = verdict(point(6_000), sizes=(6_500, 9_000))[2]
    assert memory.endswith("unlimited memory would hit 90.0 %: more still helps.")


def test_halves_are_every_other_session_and_hold_each_request_once() -> None:
    model = load("nemotron-h-8b")
    inputs = ReplayInputs(conversations(), model, DEVICES["h100"], PrefillLatency(model, DEVICES["h100"]))
    parts = halves(inputs)
    sessions = [{request.session for request in part.trace.requests} for part in parts]
    assert len(parts) == 2
    assert not sessions[0] & sessions[1]
    assert sum(len(part.trace.requests) for part in parts) == len(inputs.trace.requests)
