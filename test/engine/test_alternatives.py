"""Advice names no division of memory that a start of the same launch would refuse."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("sglang", reason="the server extra is not installed: pip install '.[server]'")

from sglang.srt.server_args import ServerArgs

from marconi.engine import alternatives, split
from marconi.engine.alternatives import Alternatives
from marconi.engine.flags import Flags
from marconi.engine.service import Facts

from .test_split import record_of

pytestmark = pytest.mark.usefixtures("loaded_plugins")

HYBRID = Facts(is_hybrid=True, is_on_cpu=True)
BOTH = Alternatives(one_pool=True, host_tier=True)


def alternatives_of(record: ServerArgs, given: Flags = Flags(), facts: Facts = HYBRID) -> Alternatives:  # noqa: B008
    alternatives.note(record)
    return Alternatives.of(record, given, facts)


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ((), BOTH),
        (("--enable-unified-memory",), replace(BOTH, given=("--enable-unified-memory",))),
        (("--enable-hierarchical-cache",), replace(BOTH, given=("--enable-hierarchical-cache",))),
        (
            ("--mamba-full-memory-ratio", "0.5", "--max-mamba-cache-size", "40", "--hicache-size", "4"),
            replace(BOTH, given=("--mamba-full-memory-ratio", "--max-mamba-cache-size", "--hicache-size")),
        ),
        (("--speculative-algorithm", "NGRAM"), Alternatives(host_tier=True)),
        (("--speculative-algorithm", "DSPARK"), Alternatives()),
        (("--speculative-algorithm", "DFLASH"), Alternatives()),
        (("--disaggregation-mode", "prefill"), Alternatives(host_tier=True)),
        (("--disaggregation-mode", "decode"), Alternatives()),
    ],
    ids=lambda each: " ".join(each) or "default" if isinstance(each, tuple) else "",
)
def test_an_alternative_is_what_a_start_would_serve(
    models: dict[str, Path], argv: tuple[str, ...], expected: Alternatives
) -> None:
    assert alternatives_of(record_of(models["gdn"], *argv)) == expected


def test_a_rule_that_ranks_by_requests_has_no_host_tier(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MARCONI_EVICTION", "tail")
    monkeypatch.setenv("MARCONI_TTFT_BUDGET_MS", "100")
    assert alternatives_of(record_of(models["gdn"])) == Alternatives(one_pool=True)


def test_what_the_loaded_model_does_not_support_is_no_alternative(models: dict[str, Path]) -> None:
    uncut = replace(HYBRID, why_not_planned="its prefills cannot be cut")
    assert alternatives_of(record_of(models["gdn"]), facts=uncut) == Alternatives(host_tier=True)


def test_what_sglang_refuses_is_no_alternative(models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.arg_groups import kv_cache_hook

    def refuse(server_args: ServerArgs) -> None:
        if server_args.enable_unified_memory:
            raise AssertionError("no one pool today")

    monkeypatch.setattr(kv_cache_hook, "handle_unified_memory_pool", refuse)
    assert alternatives_of(record_of(models["gdn"])) == Alternatives(host_tier=True)


@pytest.mark.parametrize("is_advised", [True, False])
def test_a_launch_notes_its_alternatives_only_for_advice(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch, is_advised: bool
) -> None:
    if is_advised:
        monkeypatch.setenv("MARCONI_ADVICE", "on")
    record = record_of(models["gdn"])
    before = dict(os.environ)
    record.resolve_once()
    assert Alternatives.of(record, Flags(), HYBRID) == (BOTH if is_advised else Alternatives())
    assert split.said_of(record) == split.ONE_POOL, "a choice of the backend's is none of the operator's flags"
    assert {name for name in os.environ if name.startswith("MARCONI")} == {
        name for name in before if name.startswith("MARCONI")
    }
