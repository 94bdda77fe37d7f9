"""What keeps states is compiled before the first request, and a server starts without it if need be."""

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="the server extra is not installed: pip install '.[server]'")
pytest.importorskip("sglang", reason="the server extra is not installed: pip install '.[server]'")

import torch

from marconi.engine.cache.speculation import max_accepted
from marconi.engine.prefill import warm_up
from marconi.engine.prefill.spans import Family
from marconi.engine.prefill.warm_up import num_key_heads, warm_up_drafts, warm_up_prefills

OPERATORS = {
    "GDN by Triton": {"gated_delta_rule.kernel._checkpoint_kernel"},
    "GDN by FlashInfer": {"gated_delta_rule.kernel._advance_kernel"},
    "KDA by Triton": {"kda.kernel._checkpoint_kernel"},
    "Mamba2": {"mamba2.kernel._checkpoint_kernel"},
}
ASKED = {
    "GDN by FlashInfer": {"FlashInfer"},
    "KDA by Triton": {
        "sglang.kernels.ops.attention.fla.chunk_delta_h.chunk_gated_delta_rule_fwd_kernel_h_blockdim64",
    },
}
"""Variants of SGLang's kernels that only states inside a prefill have it compile."""
EVERY_MODEL = {"short_conv.kernel._checkpoint_kernel", "state_copy.kernel._copy_kernel"}
"""Kernels that any model's prefills run."""
DRAFTS = "verify steps"


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """What random batches of each family ran, and what of it a warm-up had not compiled."""
    kept = {name: value for name, value in os.environ.items() if name not in ("SGLANG_PLATFORM", "TRITON_INTERPRET")}
    path = os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
    ended = subprocess.run(
        [sys.executable, "-m", "engine.prefill_warm_up_cases"],
        env=kept | {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert not ended.returncode, ended.stderr
    families: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    assert families.keys() == {*OPERATORS, DRAFTS}
    return families


def kernels_of(family: str) -> set[str]:
    """All that a model of `family` compiles, or what its drafts do."""
    if family == DRAFTS:
        return {"sgl_kernel_ext.draft_ends.kernel._find_kernel"}
    ours = {f"sgl_kernel_ext.{name}" for name in OPERATORS[family] | EVERY_MODEL}
    return ours | ASKED.get(family, set())


@pytest.mark.slow
def test_after_the_warm_up_neither_prefills_nor_verify_steps_compile_anything(found: dict[str, Any]) -> None:
    for family, each in found.items():
        assert each["new"] == {}, family


@pytest.mark.slow
def test_without_it_every_kernel_is_compiled_while_a_request_waits(found: dict[str, Any]) -> None:
    """Negative control; the convolution's twice, with and without windows to continue from."""
    for family, each in found.items():
        assert set(each["new_without"]) == kernels_of(family)
        if family != DRAFTS:
            assert each["new_without"]["sgl_kernel_ext.short_conv.kernel._checkpoint_kernel"] == 2


@pytest.mark.parametrize(
    ("num_channels", "shape", "num"),
    [(8192, (32, 128, 128), 16), (2048, (8, 128, 128), 4), (10_240, (128, 64, 128), 8), (8448, (128, 64, 128), 1)],
)
def test_a_ranks_key_heads_follow_from_its_pools(num_channels: int, shape: tuple[int, ...], num: int) -> None:
    """Qwen3-Next and a quarter of it, Nemotron-H and Granite 4."""
    assert num_key_heads(torch.empty(2, num_channels, 3, device="meta"), torch.empty(2, *shape, device="meta")) == num


def runner(device: str) -> Any:
    """A model's runner with pools on `device`."""
    pools = SimpleNamespace(
        conv=[torch.zeros(1, 4, 64, 3, device=device)], temporal=torch.zeros(1, 4, 2, 16, 16, device=device)
    )
    linear = SimpleNamespace(req_to_token_pool=SimpleNamespace(mamba_pool=SimpleNamespace(mamba_cache=pools)))
    return SimpleNamespace(attn_backend=SimpleNamespace(linear_attn_backend=linear), dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("device", "family", "launched"),
    [
        ("meta", Family.KDA, ("kda_checkpoint", "SGLang's", "short_conv_checkpoint", "state_copies", "state_copies")),
        ("meta", Family.SHORT_CONVOLUTION, ("short_conv_checkpoint",) * 3),
        ("meta", None, ()),
        ("cpu", Family.KDA, ()),
    ],
)
def test_it_runs_where_kernels_of_a_known_family_run(
    device: str,
    family: Family | None,
    launched: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    called: list[str] = []
    for name in ("kda_checkpoint", "short_conv_checkpoint", "state_copies"):
        monkeypatch.setattr(warm_up.warm_up, name, lambda *_, name=name, **__: called.append(name))
    monkeypatch.setattr(warm_up, "_copy_by_kda", lambda *_: called.append("SGLang's"))
    monkeypatch.setattr(warm_up, "family_of", lambda _: family)
    with caplog.at_level(logging.INFO):
        warm_up_prefills(runner(device))
    assert called == [*launched]
    assert len(caplog.messages) == bool(launched)


@pytest.mark.parametrize(("device", "is_warmed"), [("meta", True), ("cpu", False)])
def test_drafts_are_warmed_up_where_kernels_run(device: str, is_warmed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[int] = []
    monkeypatch.setattr(warm_up.warm_up, "find_draft_ends", lambda _, *, max_depth: called.append(max_depth))
    slots = torch.zeros(4, 2, device=device)
    warm_up_drafts(SimpleNamespace(req_index_to_mamba_ping_pong_track_buffer_mapping=slots), 5)
    assert called == [5] * is_warmed


@pytest.mark.parametrize(("algorithm", "num"), [("ngram", 8), ("NEXTN", 4)])
def test_a_tree_of_drafts_accepts_no_more_than_its_depth(algorithm: str, num: int) -> None:
    """One of n-grams may be a chain of all its nodes."""
    arguments = SimpleNamespace(
        speculative_algorithm=algorithm, speculative_num_draft_tokens=8, speculative_num_steps=3
    )
    assert max_accepted(arguments) == num


def test_a_server_starts_without_it_where_it_fails(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("no room")

    monkeypatch.setattr(warm_up, "family_of", lambda _: Family.KDA)
    monkeypatch.setattr(warm_up.warm_up, "kda_checkpoint", fail)
    warm_up_prefills(runner("meta"))
    (message,) = caplog.messages
    assert message == "marconi: warm_up_prefills failed, and SGLang continues without it"
