"""A server that no flag tells how to divide memory has one pool where SGLang and this cache serve that, and says so."""

import logging
import os
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sglang", reason="the server extra is not installed: pip install '.[server]'")

from sglang.srt.arg_groups.overrides import resolved_view
from sglang.srt.server_args import prepare_server_args

from marconi.check.answer import answer
from marconi.check.line import CommandLine
from marconi.check.machine import Machine, Platform
from marconi.engine.launch import split
from marconi.engine.launch.model import Model

CASES = (
    (),
    ("--max-total-tokens", "4000"),
    ("--tp-size", "2"),
    ("--mamba-radix-cache-strategy", "no_buffer", "--disable-overlap-schedule"),
    ("--enable-hierarchical-cache",),
    ("--speculative-algorithm", "NGRAM"),
    ("--speculative-algorithm", "NEXTN"),
    ("--speculative-algorithm", "NEXTN", "--enable-hierarchical-cache"),
    ("--disaggregation-mode", "prefill"),
    ("--linear-attn-backend", "cutedsl"),
    ("--marconi-admission", "chunk-end"),
    ("--mamba-full-memory-ratio", "0.9"),
    ("--max-mamba-cache-size", "40"),
    ("--enable-unified-memory",),
)


pytestmark = pytest.mark.usefixtures("loaded_plugins")


def record_of(model: Path, *argv: str) -> Any:
    return prepare_server_args(["--model-path", str(model), "--radix-cache-backend", "marconi", *argv])


@pytest.mark.parametrize("argv", CASES, ids=lambda argv: " ".join(argv) or "default")
def test_a_server_divides_memory_as_check_says(models: dict[str, Path], argv: tuple[str, ...]) -> None:
    record = record_of(models["gdn"], *argv)
    line = CommandLine.parse(["--model-path", str(models["gdn"]), *argv])
    found = answer(line, Model.find(line.model_path, None), Machine(Platform.CPU))
    record.resolve_once()
    assert found.is_served
    assert split.memory_note(record) == found.split
    assert found.pools is not None
    assert resolved_view(record).enable_unified_memory == found.pools.is_one_pool


def test_a_launch_with_no_dividing_flag_is_one_pool_and_says_which_flag_keeps_two(models: dict[str, Path]) -> None:
    record = record_of(models["gdn"])
    record.resolve_once()
    assert record.enable_unified_memory
    assert "--mamba-full-memory-ratio 0.9 keeps SGLang's two" in str(split.memory_note(record))


def test_what_sglang_refuses_in_one_pool_is_served_in_two(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A control beside it: the same refusal ends a launch that asked for one pool."""
    from sglang.srt.arg_groups import kv_cache_hook

    def refuse(server_args: Any) -> None:
        if server_args.enable_unified_memory:
            raise AssertionError("no one pool today")

    monkeypatch.setattr(kv_cache_hook, "handle_unified_memory_pool", refuse)
    record = record_of(models["gdn"])
    record.resolve_once()
    assert not record.enable_unified_memory
    assert str(split.memory_note(record)).endswith("not chosen here: no one pool today")
    with pytest.raises(AssertionError, match="no one pool today"):
        record_of(models["gdn"], "--enable-unified-memory").resolve_once()


def test_arguments_that_cannot_be_resolved_end_a_launch_where_they_would_have_without_asking(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang.srt.arg_groups import kv_cache_hook

    def fail(_: Any) -> None:
        raise KeyError("a bug of SGLang")

    monkeypatch.setattr(kv_cache_hook, "handle_unified_memory_pool", fail)
    record = record_of(models["gdn"])
    assert "a bug of SGLang" in str(split.why_two_pools(record))
    with pytest.raises(KeyError, match="a bug of SGLang"):
        record.resolve_once()


def test_asking_leaves_no_trace(models: dict[str, Path]) -> None:
    record = record_of(models["gdn"])
    before, level = dict(os.environ), logging.root.manager.disable
    assert split.why_two_pools(record) is None
    assert (dict(os.environ), logging.root.manager.disable) == (before, level)
    assert not record.enable_unified_memory
    assert not getattr(record, "_resolution_finished", False)


def test_a_model_without_recurrent_layers_keeps_sglangs_memory(attention_model: Path) -> None:
    record = record_of(attention_model)
    record.resolve_once()
    assert not record.enable_unified_memory


def test_another_backend_keeps_sglangs_memory(models: dict[str, Path]) -> None:
    record = prepare_server_args(["--model-path", str(models["gdn"])])
    record.resolve_once()
    assert not record.enable_unified_memory
    assert split.memory_note(record) is None
