"""A server in bfloat16 with overlapped scheduling, as a GPU runs it: a reused state answers as the model itself does.

Bfloat16 rounds, and rounds differently where a prefill is cut; so log-probabilities are compared with those of the
model in float32 (`exact_model.py`), and their median over many answers decides: of answers that began at a reused state
no more than of those computed from their first token. The negative control breaks the states that hits copy, on the
same server.

`make cuda-check` runs this file on a GPU, where the gated delta rule has heads of 128 channels, so that SGLang's own
choice of kernels on Hopper serves it; where an answer is wrong, `stock_answers.py` asks stock SGLang the same.
"""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import NamedTuple

import pytest
import torch

from marconi_cpu import tiny_model
from marconi_cpu.demo.server_process import ServerProcess

from .breaking import BREAKS, SWITCH, broken_states
from .client import HTTP
from .conftest import BROKEN_STATE_SERVER, MARCONI, STRATEGY_ARGS, EntryPoint, server_args
from .exact_model import ExactModel
from .matrix import NEXTN
from .scenarios import CHUNKED_PREFILL_SIZE, EXTRA_BUFFER, MAX_KV_TOKENS, SCENARIOS, Exchange
from .test_host_tier_server import ARGS as WITH_HOST_TIER
from .test_host_tier_server import conversations, host_of

pytestmark = pytest.mark.slow

MAX_MEDIAN_ERROR = 0.08
"""Of log-probabilities; bfloat16 makes 0.04 in transformers, a state that is lost more than 1."""
MOST_OF_ANEW = 1.5
"""How much larger the median error of reused states may be than that of what is computed anew."""
ASKED = [
    each for each in SCENARIOS if each.name in {"repeat", "extension", "branch-at-208", "multi-turn", "concurrent"}
]
BRANCH = 208
"""Where prompts of these diverge: a state inside a prefill, and inside a chunk of the recurrent kernels."""
HALF = ("--dtype", "bfloat16")
ON_A_GPU = (
    *("--attention-backend", "triton", "--linear-attn-backend", "triton", "--sampling-backend", "pytorch"),
    *("--grammar-backend", "none", "--mem-fraction-static", "0.3"),
)
"""What needs no kernels but Triton's, but for a prefill that a case names."""
RED_ANSWERS = "MARCONI_RED_ANSWERS"
"""The folder for what was asked where an answer was wrong."""
WIDE = "gdn-wide"


@dataclass(frozen=True, slots=True)
class Case:
    """A server under test, by the name that `make cuda-check` calls it by."""

    name: str
    model: str
    args: tuple[str, ...]
    stock_args: tuple[str, ...] = ()
    """What of them stock SGLang is asked with, beside `HALF` and `ON_A_GPU`."""
    page_size: int = 1
    has_host_tier: bool = False
    has_drafts: bool = False
    has_one_pool: bool = False
    is_flashinfer: bool = False


FLASHINFER = ("--linear-attn-prefill-backend", "flashinfer")
TRITON = ("--linear-attn-prefill-backend", "triton")
PAGES = ("--page-size", "64")
UNDIVIDED = (
    *("--max-total-tokens", str(MAX_KV_TOKENS), "--max-running-requests", "8"),
    *("--chunked-prefill-size", str(CHUNKED_PREFILL_SIZE)),
)
"""No flag divides memory, as where a user gives the backend's flag alone: KV and states share one pool."""
ON_A_CARD = (
    Case("gdn-flashinfer", WIDE, (*server_args(EXTRA_BUFFER), *FLASHINFER), FLASHINFER, is_flashinfer=True),
    Case("gdn-triton-drafts", WIDE, (*server_args(EXTRA_BUFFER), *TRITON, *NEXTN), (*TRITON, *NEXTN), has_drafts=True),
    Case(
        "mamba2-pages-host",
        "mamba2",
        (*WITH_HOST_TIER, *STRATEGY_ARGS[EXTRA_BUFFER], *PAGES),
        PAGES,
        page_size=64,
        has_host_tier=True,
    ),
    Case("gdn-one-pool", WIDE, (*MARCONI, *UNDIVIDED, *TRITON), TRITON, has_one_pool=True),
    Case(
        "gdn-one-pool-drafts",
        WIDE,
        (*MARCONI, *UNDIVIDED, "--enable-unified-memory", *TRITON, *NEXTN),
        (*TRITON, *NEXTN),
        has_drafts=True,
        has_one_pool=True,
    ),
)
CASES = (
    *(Case(family, family, server_args(EXTRA_BUFFER)) for family in ("gdn", "mamba2")),
    *(pytest.param(case, marks=pytest.mark.gpu) for case in ON_A_CARD),
)


class Serving(NamedTuple):
    """The server of a case."""

    case: Case
    server: ServerProcess

    @property
    def url(self) -> str:
        return self.server.url


def write_wide(path: Path) -> None:
    """The model with wide heads, and a head for drafts, which a server without drafts leaves alone."""
    tiny_model.write(tiny_model.Family.GDN, path, has_mtp=True, gdn_head_dim=128)


@pytest.fixture(scope="module")
def paths(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The model of each case."""
    wide = tmp_path_factory.mktemp("wide") / WIDE
    write_wide(wide)
    return {**models, WIDE: wide}


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case.name)
def serving(
    request: pytest.FixtureRequest,
    preload: EntryPoint,
    paths: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Serving]:
    case, folder = request.param, tmp_path_factory.mktemp("half")
    args = (*case.args, *HALF, *(ON_A_GPU if torch.cuda.is_available() else ()))
    env = {SWITCH: str(folder / BREAKS)}
    server = ServerProcess(
        paths[case.model], args, log_path=folder / "log", env=env, entry_point=preload(BROKEN_STATE_SERVER)
    )
    with server:
        yield Serving(case, server)


@pytest.fixture(scope="module")
def exact(serving: Serving, paths: dict[str, Path]) -> ExactModel:
    return ExactModel(paths[serving.case.model])


def asked(serving: Serving) -> list[Exchange]:
    # Of answers this short, a median over the scenarios alone is chance.
    return [*(exchange for scenario in ASKED for exchange in scenario.ask(serving.url)), *conversations(serving.url)]


def medians(exchanges: Sequence[Exchange], error: Callable[[Exchange], float]) -> tuple[float, float]:
    """The median error of answers that were computed anew, and of those that began at a reused state."""
    reused = [each for each in exchanges if each.completion.num_cached_tokens]
    anew = [each for each in exchanges if not each.completion.num_cached_tokens]
    assert len(reused) > len(ASKED), "nothing was reused, so nothing was tested"
    assert len(anew) >= len(ASKED), "nothing was computed anew, so there is nothing to compare with"
    return median(map(error, anew)), median(map(error, reused))


def is_right(anew: float, reused: float) -> bool:
    return anew <= MAX_MEDIAN_ERROR and reused <= MOST_OF_ANEW * anew


def leave_for_stock(case: Case, exchanges: Sequence[Exchange], found: tuple[float, float]) -> None:
    """Write down what was asked, where somebody wants to ask it of stock SGLang."""
    if folder := os.environ.get(RED_ANSWERS):
        document = {
            "case": case.name,
            "model": case.model,
            "args": [*case.stock_args, *HALF, *ON_A_GPU],
            "median_errors": found,
            "prompts": [each.prompt for each in exchanges],
        }
        (Path(folder) / f"{case.name}.red.json").write_text(json.dumps(document))


def test_a_reused_state_answers_as_the_model_does(serving: Serving, exact: ExactModel) -> None:
    case = serving.case
    exchanges = asked(serving)
    found = medians(exchanges, exact.error)
    if not is_right(*found):
        leave_for_stock(case, exchanges, found)
    assert is_right(*found), f"median errors (computed anew, reused) are {found}"
    (rank,) = HTTP.get(f"{serving.url}/marconi", timeout=60.0).json()["ranks"]
    assert rank["why_not_planned"] is None
    assert (rank["joint_bytes"] is not None) == case.has_one_pool
    hits = {each.completion.num_cached_tokens for each in exchanges}
    assert all(hit % case.page_size == 0 for hit in hits)
    assert BRANCH in hits or case.page_size > 1, f"no state inside a prefill was reused, only {sorted(hits)}"
    if case.has_host_tier:
        assert host_of(serving)["num_loads"], "nothing came back from the host"
    if case.has_drafts:
        (state,) = HTTP.get(f"{serving.url}/server_info", timeout=60.0).json()["internal_states"]
        assert state["avg_spec_accept_length"] > 1.1, "no draft was accepted"
    log = serving.server.log_path.read_text(errors="replace")
    assert ("Using FlashInfer GDN kernels" in log) == case.is_flashinfer, "the kernels are not those of the case"


def test_negative_control_a_broken_state_is_seen(serving: Serving, exact: ExactModel) -> None:
    with broken_states(serving.server):
        anew, reused = medians(asked(serving), exact.error)
    assert anew <= MAX_MEDIAN_ERROR
    assert reused > 5 * MAX_MEDIAN_ERROR
