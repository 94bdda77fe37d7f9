"""A server in bfloat16 with overlapped scheduling, as a GPU runs it: a reused state answers as one computed anew.

A prefill that begins at a reused state is cut where none was cut before, and bfloat16 rounds differently there: so
log-probabilities are compared, up to the first token that differs, and their median over many answers decides. The
negative control is a server that breaks the state which a hit copies. `make cuda-check` runs this file on a GPU.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median

import pytest
import torch

from marconi.engine.server_process import ServerProcess
from marconi.router.process import LAUNCH

from .client import generate
from .conftest import BROKEN_STATE_SERVER, EntryPoint, server_args
from .reference import difference
from .scenarios import EXTRA_BUFFER, SCENARIOS

pytestmark = pytest.mark.slow

MAX_MEDIAN_DIFFERENCE = 0.02
"""Of log-probabilities; a bit of bfloat16 is 0.016 of such logits, a broken state makes 0.2."""
ASKED = [
    each for each in SCENARIOS if each.name in {"repeat", "extension", "branch-at-400", "multi-turn", "concurrent"}
]
ON_A_GPU = (
    *("--attention-backend", "triton", "--linear-attn-backend", "triton", "--sampling-backend", "pytorch"),
    *("--grammar-backend", "none", "--mem-fraction-static", "0.3"),
)
"""What needs no kernels but Triton's."""
Serve = Callable[[Sequence[str], Sequence[str]], ServerProcess]


@pytest.fixture(scope="module", params=["gdn", "mamba2"])
def serve(
    request: pytest.FixtureRequest,
    preload: EntryPoint,
    models: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Serve:
    """A server of the module's family, by its arguments and its entry point."""
    logs = tmp_path_factory.mktemp("half")

    def server(args: Sequence[str], entry_point: Sequence[str]) -> ServerProcess:
        more = ("--dtype", "bfloat16", *(ON_A_GPU if torch.cuda.is_available() else ()))
        log_path = logs / f"{len(list(logs.iterdir()))}"
        return ServerProcess(models[request.param], [*args, *more], log_path=log_path, entry_point=preload(entry_point))

    return server


@pytest.fixture(scope="module")
def reference(serve: Serve) -> Iterator[str]:
    with serve(("--disable-radix-cache",), LAUNCH) as running:
        yield running.url


def differences(url: str, reference: str) -> list[float]:
    """Of each answer that began at a reused state."""
    exchanges = [exchange for scenario in ASKED for exchange in scenario.ask(url)]
    reused = [exchange for exchange in exchanges if exchange.completion.num_cached_tokens]
    assert len(reused) > len(ASKED), "nothing was reused, so nothing was tested"
    return [difference(each.completion, generate(reference, each.prompt)) for each in reused]


def test_a_reused_state_answers_as_one_that_is_computed_anew(serve: Serve, reference: str) -> None:
    with serve(server_args(EXTRA_BUFFER), LAUNCH) as server:
        found = differences(server.url, reference)
        assert median(found) <= MAX_MEDIAN_DIFFERENCE


def test_negative_control_a_broken_state_is_seen(serve: Serve, reference: str) -> None:
    with serve(server_args(EXTRA_BUFFER), BROKEN_STATE_SERVER) as server:
        found = differences(server.url, reference)
        assert median(found) > 5 * MAX_MEDIAN_DIFFERENCE
