"""The answer of `marconi check`, as tables and as JSON."""

from dataclasses import asdict
from typing import Any

from rich.box import SIMPLE
from rich.console import Group, RenderableType
from rich.table import Table

from marconi.check.answer import CheckResult
from marconi.replay.memory import format_bytes


def to_json(answer: CheckResult) -> dict[str, Any]:
    """Convert to the result file's JSON; null for what is not known."""
    profile, pools = answer.profile, answer.pools
    return {
        "model_path": answer.model_path,
        "served": answer.is_served,
        "reasons": list(answer.reasons),
        "notes": list(answer.notes),
        "cache": answer.cache,
        "admission": answer.admission,
        "split": answer.split,
        "flags": [
            {"flag": option, "value": str(value), "reason": answer.reason_against(option)}
            for option, value in answer.given.items()
        ],
        "pools": None
        if profile is None or pools is None
        else {
            "attention_ranks": profile.tensor_parallel,
            "kv_bytes_per_token": profile.kv_bytes_per_token,
            "state_bytes": profile.state_bytes,
            **{name: each for name, each in asdict(pools).items() if name not in ("weight_bytes", "warning")},
        },
    }


def render(answer: CheckResult) -> RenderableType:
    """The flags, what else stands against them, the pools, and the verdict."""
    parts: list[RenderableType] = [_flags(answer)]
    if answer.profile is not None and answer.pools is not None:
        parts.append(_pools(answer))
    if answer.split is not None:
        parts.append(f"memory: {answer.split}")
    parts += [f"note: {note}" for note in answer.notes]
    if answer.is_served:
        kept = "" if answer.admission is None else f", states kept by {answer.admission}"
        parts.append(f"served: the cache is {answer.cache}{kept}")
    else:
        plural = "" if len(answer.reasons) == 1 else "s"
        parts.append(f"not served: {len(answer.reasons)} reason{plural}")
    return Group(*parts)


def _flags(answer: CheckResult) -> Table:
    table = Table("flag", "served", "why not", box=SIMPLE)
    told = set()
    table.add_row(f"--model-path {answer.model_path}", "yes", "")
    for option, value in answer.given.items():
        reason = answer.reason_against(option)
        told.add(reason)
        shown = option if value is True else f"{option} {value}"
        table.add_row(shown, "yes" if reason is None else "no", reason or "")
    for reason in answer.reasons:
        if reason not in told:
            table.add_row("(all together)", "no", reason)
    return table


def _pools(answer: CheckResult) -> Table:
    assert answer.profile is not None
    assert answer.pools is not None
    profile, pools = answer.profile, answer.pools
    table = Table("pools of one rank", "", box=SIMPLE)
    table.add_row("attention ranks that share a request", f"{profile.tensor_parallel}")
    table.add_row("KV of a token", f"{profile.kv_bytes_per_token:,} bytes")
    table.add_row("a state", f"{profile.state_bytes:,} bytes")
    table.add_row("state slots of a running request", f"{pools.num_working_slots}")
    if pools.num_bytes is not None:
        table.add_row("one pool" if pools.is_one_pool else "both pools", format_bytes(pools.num_bytes))
    each = "up to " if pools.is_one_pool else ""
    if pools.num_tokens is not None:
        table.add_row("KV", f"{each}{pools.num_tokens:,} tokens")
    if pools.num_slots is not None:
        table.add_row("states", f"{each}{pools.num_slots:,} slots")
        table.add_row("requests that may run, by their states", f"{pools.max_running:,}")
    if pools.num_checkpoints is not None:
        table.add_row("a checkpoint in int8", f"{profile.int8_state_bytes:,} bytes")
        table.add_row("checkpoints in int8", f"{pools.num_checkpoints:,} slots")
    return table
