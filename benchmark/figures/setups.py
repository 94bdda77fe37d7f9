"""The papers' experiments in terms of this project: hosts, workloads, amounts of memory and systems.

Marconi (section 5): a 7B hybrid of 4 attention, 24 SSM and 28 MLP layers in half precision; times of Jamba-1.5-Mini
with a state width of 128 on four A100-40GB; sessions at several rates, 5 to 10 s from request to request in the mean.
In place of its LMSys, ShareGPT and SWE-Bench traces, workloads of the same shape are drawn
(`marconi.replay.trace.presets`, which says what was calibrated to what).

T-LRU (section 5): Vicuna-7B on one A100, whole turns of WildChat, capacities counted in tokens of KV.
"""

import math
from dataclasses import replace
from functools import cache
from types import MappingProxyType
from typing import Final

from marconi.model import Layer, PrefillLatency, catalog, huggingface, load, paper, profile_of
from marconi.model.device import device
from marconi.model.profile import ModelProfile
from marconi.replay.trace import Demand, preset
from marconi.replay.trace.arrivals import Pace
from marconi_lab.traffic import budget_tokens

from .base import Scale
from .cells import Host, Scene

LABELS: Final = MappingProxyType(
    {
        "vllm+": "vLLM+",
        "lru-joint": "SGLang+",
        "marconi": "Marconi",
        "marconi-tuned": "Marconi, tuned",
        "static": "Marconi, best fixed alpha",
        "best": "best (this project)",
        "belady": "Belady (hindsight)",
    }
)
"""Systems of the Marconi figures, by policy where one stands for them."""

STATIC: Final = tuple(f"marconi-static:{alpha}" for alpha in (0, 10, 50, 200))
"""Policies of which `static` is the best in hindsight, setting by setting: a perfect choice of the paper's alpha."""

STANDS_FOR: Final = MappingProxyType(
    {
        "chat-short": "LMSys",
        "chat-long": "ShareGPT",
        "agent-append": "SWE-Bench, append-only",
        "agent-drop": "SWE-Bench, five observations",
    }
)
"""Workloads of the Marconi figures, and the paper's that they stand for."""

MEMORY_GB: Final = MappingProxyType(
    {
        "chat-short": (1, 2, 5, 10),
        "chat-long": (2, 5, 10, 20),
        "agent-append": (20, 40, 60, 100),
        "agent-drop": (20, 40, 60, 100),
    }
)
"""From a cache that holds a few sessions to one that holds most, for 100 sessions."""

SESSION_RATES: Final = (0.5, 1.0, 2.0)
RESPONSE_TIMES_S: Final = (5.0, 7.5, 10.0)

_CONTEXT_TOKENS: Final = 4096
"""Vicuna-7B's."""
CHAT_BLOCK_TOKENS: Final = 16
"""vLLM's block."""


def policies_of(system: str) -> tuple[str, ...]:
    """What is replayed for a system; where several, the best counts."""
    return STATIC if system == "static" else (system,)


def session_scene(workload: str, session_rate: float, response_s: float, num_sessions: int, seed: int) -> Scene:
    """Sessions of a Marconi figure; their contents do not depend on rate and response time."""
    drawn = preset(workload)
    pace = replace(drawn.pace, think_time_s=response_s, answer_tokens_per_s=math.inf)
    drawn = replace(drawn, pace=pace)
    return Scene(drawn, Demand(num_sessions, session_rate, seed))


def hybrid_host(num_attention: int = 4, num_ssm: int = 24, num_mlp: int = 28, *, state_size: int = 128) -> Host:
    """The paper's 7B model, or one of other layers, with Jamba's times."""
    layers = paper.hybrid(num_attention, num_ssm, num_mlp, state_size=state_size)
    return Host(seven_billion(layers), _jamba(), "a100-40gb")


def seven_billion(layers: tuple[Layer, ...]) -> ModelProfile:
    """A profile of the paper's layers in half precision."""
    return profile_of(catalog.MARCONI_7B, layers, paper.STORAGE)


@cache
def _jamba() -> ModelProfile:
    fields = {**catalog.CONFIGS["jamba-1.5-mini"], "mamba_d_state": 128}
    return huggingface.profile(huggingface.from_mapping(fields, "jamba-1.5-mini"), "jamba-1.5-mini", tensor_parallel=4)


@cache
def chat_host() -> Host:
    """Vicuna-7B on one A100."""
    vicuna = load("vicuna-7b")
    return Host(vicuna, vicuna, "a100")


def chat_scene(scale: Scale) -> Scene:
    """WildChat within Vicuna's context: a conversation every 10 s, a minute between an answer and the next prompt.

    The paper takes the dataset's own times; these are chosen so that its capacities are scarce.
    """
    drawn = replace(preset("wildchat"), pace=Pace(60.0), max_context_tokens=_CONTEXT_TOKENS)
    return Scene(drawn, Demand(scale.num_chats, 0.1, scale.seed), CHAT_BLOCK_TOKENS)


@cache
def chat_budget_tokens(budget_ms: int) -> int:
    """Uncached tokens that the chat host computes within a budget: T-LRU's xi."""
    host = chat_host()
    return budget_tokens(PrefillLatency(host.timed, device(host.device_name)), budget_ms / 1e3)
