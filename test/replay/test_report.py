"""The tables of a report: every number and name whole, whatever the width."""

import io
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from marconi.model import DEVICES, PrefillLatency, load
from marconi.plan.advice import Advice
from marconi.plan.plan import render
from marconi.plan.verdict import Plan
from marconi.policy.catalog import PolicySpec
from marconi.replay.report import Column, WideTable, causes, console_for_tables, tables
from marconi.replay.result import Percentiles, PolicyResult, Report
from marconi.replay.task import ReplayInputs, Task

from .worlds import conversations

PLAIN = PolicyResult(
    task=Task(PolicySpec("lru-joint"), 10**9),
    chosen=None,
    num_requests=1_234_567,
    num_prompt_tokens=10_000,
    num_hit_tokens=6_173,
    flops_saved=0.5432,
    flops_total=1.0,
    ttft_s=Percentiles(0.01234, 0.04567, 98.765),
    slo_s=1.0,
    num_slo_violations=1_022_333,
    num_too_large=1_033_444,
    num_states_written=0,
    num_states_kept=1_044_555,
    num_states_hit=1_055_666,
    num_evictions=(("bytes", 1_066_777), ("kv", 0), ("state", 0)),
    num_evicted_tokens=0,
    held_bytes=0,
    prefill_s=1.0,
    num_loads=0,
    num_loaded_tokens=0,
    load_s=0.0,
    requests_per_s=12_345.6,
    num_new_tokens=1_000,
    most_hit_tokens=9_876,
)


def by(policy: str, ratio: float | None = None, **fields: Any) -> PolicyResult:
    return replace(PLAIN, task=Task(PolicySpec.parse(policy), 10**9, ratio), **fields)


RUNS = (
    by("lru", 0.9, num_evictions=(("kv", 1_077_888), ("state", 1_088_999))),
    PLAIN,
    by("marconi", chosen="alpha 0.07594"),
    by("static-oracle", chosen="marconi-static:14.5875"),
    by("s3fifo", final_cache_blocks=7_654_321),
)
NUMBERS = (
    *("61.73 %", "54.32 %", "0.0123 s", "0.0457 s", "98.8 s", "1,022,333", "1,033,444", "1,044,555", "1,055,666"),
    *("1,066,777 bytes", "1,077,888 kv, 1,088,999 state", "12,346"),
    *("98.76 %", "3.83x"),
    *("0.617300", "6173", "10000", "7654321"),
)
LABELS = ("lru, ratio 0.9", "lru-joint", "marconi", "(alpha 0.07594)", "static-oracle", "(marconi-static:14.5875)")
MODEL, H100 = load("nemotron-h-8b"), DEVICES["h100"]
REPORT = Report(ReplayInputs(conversations(), MODEL, H100, PrefillLatency(MODEL, H100)), 2 * 10**9, RUNS)
ADVICE = Advice.of(RUNS, (1, 2))


def printed(what: object, width: int | None) -> str:
    """What a terminal of so many columns shows."""
    out = io.StringIO()
    Console(file=out, width=width, force_terminal=True, no_color=True, _environ={}).print(what)
    return re.sub(r"\x1b\[[0-9;]*m", "", out.getvalue())


def headers(text: str) -> int:
    """Tables in `text`."""
    return sum(line.startswith(" ─") for line in text.splitlines())


def all_whole(text: str, words: Sequence[str]) -> bool:
    return "…" not in text and all(re.search(rf"(?<![\w.,]){re.escape(word)}(?![\w.])", text) for word in words)


@pytest.mark.parametrize("width", [60, 200])
def test_every_name_and_number_is_whole_at_every_width(width: int) -> None:
    text = printed(tables(REPORT, timings=True), width)
    assert max(map(len, text.splitlines())) <= width
    assert all_whole(text, (*NUMBERS, *LABELS))
    for word in ("hit", "bound", "FLOPs", "p50", "p99", "> 1 s", "kept", "evictions", "large", "final_cache_blocks"):
        assert word in text


@pytest.mark.parametrize("width", [60, 200])
def test_a_plan_is_whole_at_every_width(width: int) -> None:
    advice = replace(ADVICE, alone=RUNS[0], best=RUNS[1], ours=RUNS[1])
    plan = Plan(REPORT, (advice,), RUNS[:2], ())
    text = printed(render(plan, has_table=True), width)
    assert max(map(len, text.splitlines())) <= width
    assert all_whole(text, [word for word in (*NUMBERS, *LABELS) if word != "12,346"])
    unwrapped = " ".join(text.split())
    assert len(plan.verdict) == 5
    assert all(sentence in unwrapped for sentence in (*advice.sentences, *plan.verdict))


def test_every_table_of_a_stack_has_the_policies() -> None:
    text = printed(tables(replace(REPORT, runs=RUNS[:4]), timings=True), 60)
    assert headers(text) > 2
    for label in LABELS:
        assert len(re.findall(rf"^ *{re.escape(label)}(?: |$)", text, re.MULTILINE)) == headers(text)


def test_without_a_terminal_there_is_one_table_and_nothing_is_cut(capsys: pytest.CaptureFixture[str]) -> None:
    long = by("static-oracle@chunk-end:1048576:1048576:1048576", 0.123456, chosen=RUNS[3].chosen)
    console_for_tables().print(tables(replace(REPORT, runs=(*RUNS[:4], long)), timings=True))
    text = capsys.readouterr().out
    assert headers(text) == 1
    assert f"{long.task.policy}, ratio 0.123456 (marconi-static:14.5875)" in text
    assert all_whole(text, NUMBERS[:12])


def test_a_name_longer_than_the_console_is_folded_and_its_number_is_not() -> None:
    name = "marconi-static:0.0759375@chunk-end:1024:1024:8192"
    text = printed(WideTable(((name,),), ((Column("evictions", ("1,066,777 bytes",)),),)), 40)
    assert "1,066,777 bytes" in text
    assert name in re.sub(r"1,066,777 bytes|\s", "", text)


def test_causes_are_shares_of_the_prompt_tokens_and_only_those_that_a_run_has() -> None:
    missed = replace(PLAIN, num_missed_tokens=(("no_slot", 827), ("first_seen", 3_000)))
    report = replace(REPORT, runs=(missed, by("best", num_missed_tokens=(("least_gain", 3_827),))))
    text = printed(causes(report), 100)
    for expected in ("no slot", "least gain", "first seen", "8.27 %", "30.00 %", "38.27 %", "0.00 %"):
        assert expected in text
    assert "last token" not in text
