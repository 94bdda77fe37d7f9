"""Logits that a request's parameters may have made no numbers are made some, and no others are looked at."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang", reason="the server extra is not installed: pip install '.[server]'")

from sglang.srt.environ import envs
from sglang.srt.layers.sampler import Sampler
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.utils.async_probe import sanitize_nan_logits

from marconi.engine.plugin.backend import clean_logits

NO_NUMBERS = (math.nan, math.inf, -math.inf, 3.0)
NUMBERS = (-1e30, 1e30, -1e30, 3.0)
CHANGES: dict[str, dict[str, Any]] = {
    "a bias": {"logit_bias": torch.zeros(1, 4)},
    "penalties that are added": {"acc_additive_penalties": torch.zeros(1, 4)},
    "penalties that scale": {"acc_scaling_penalties": torch.ones(1, 4)},
    "penalties without overlap": {"penalizer_orchestrator": SimpleNamespace(is_required=True)},
    "a grammar": {"grammars": [None, SimpleNamespace()]},
    "a processor of the client's": {
        "has_custom_logit_processor": True,
        "custom_logit_processor": {},
        "custom_params": [None],
    },
}


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operator has said nothing."""
    monkeypatch.delenv("SGLANG_SANITIZE_NAN_LOGITS", raising=False)


def batch(**changed: Any) -> SamplingBatchInfo:
    """SGLang's parameters of one request that asks for nothing, but for what is `changed`."""
    plain: dict[str, Any] = {"penalizer_orchestrator": SimpleNamespace(is_required=False)}
    return SamplingBatchInfo(
        temperatures=torch.ones(1, 1),
        top_ps=torch.ones(1),
        top_ks=torch.ones(1),
        min_ps=torch.zeros(1),
        is_all_greedy=False,
        is_any_greedy=False,
        need_top_p_sampling=False,
        need_top_k_sampling=True,
        need_min_p_sampling=False,
        vocab_size=4,
        **{**plain, **changed},
    )


def sampled_from(sampling_info: SamplingBatchInfo) -> torch.Tensor:
    """What SGLang's sampler makes of `NO_NUMBERS`, and our hook after it."""
    sampler, given = SimpleNamespace(), torch.tensor([NO_NUMBERS])
    logits: torch.Tensor = Sampler._preprocess_logits(sampler, given, sampling_info)
    clean_logits(logits, sampler, given, sampling_info=sampling_info)
    return logits[0]


@pytest.mark.parametrize("change", CHANGES)
def test_what_parameters_may_have_changed_is_made_numbers(change: str) -> None:
    assert torch.equal(sampled_from(batch(**CHANGES[change])), torch.tensor(NUMBERS))


@pytest.mark.parametrize("orchestrator", [None, SimpleNamespace(is_required=False)])
def test_a_batch_without_any_is_not_looked_at(orchestrator: object) -> None:
    found = sampled_from(batch(penalizer_orchestrator=orchestrator))
    assert torch.equal(found.nan_to_num(nan=7.0), torch.tensor(NO_NUMBERS).nan_to_num(nan=7.0))


@pytest.mark.parametrize("says", [True, False])
def test_the_operator_s_word_is_kept(says: bool) -> None:
    with envs.SGLANG_SANITIZE_NAN_LOGITS.override(says):
        changed, plain = sampled_from(batch(**CHANGES["a bias"])), sampled_from(batch())
    assert bool(changed.isfinite().all()) is says
    assert bool(plain.isfinite().all()) is says


def test_the_numbers_are_those_that_sglang_would_make() -> None:
    logits = torch.tensor([NO_NUMBERS])
    with envs.SGLANG_SANITIZE_NAN_LOGITS.override(True):
        sanitize_nan_logits(logits)
    assert torch.equal(logits[0], sampled_from(batch(**CHANGES["a bias"])))
