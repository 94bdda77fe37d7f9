"""Prefills that decoding requests ride with (`--enable-mixed-chunk`) keep their states, and answer as others do.

The requests that are prefilled come first in such a batch, so a plan's rows stay what they are; a decoding one is a row
of one token, without states to keep. What is right is said by the same server, asked for one request at a time with
the cache flushed before it: nothing is mixed then, and nothing reused. SGLang mixes no request that wants
log-probabilities, so tokens are compared.
"""

import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from marconi_cpu.demo.server_process import ServerProcess

from .breaking import require_broken
from .client import HTTP, random_tokens
from .conftest import MARCONI, POOLS, STRATEGY_ARGS, EntryPoint
from .mixed_step_server import LINE, SHIFTED
from .scenarios import EXTRA_BUFFER, NO_BUFFER

pytestmark = pytest.mark.slow

Start = Callable[..., ServerProcess]
ENTRY_POINT = (str(Path(__file__).with_name("mixed_step_server.py")),)
NUM_REQUESTS = 12
SETTINGS = {
    "mamba2": ("mamba2", NO_BUFFER, "1"),
    "gdn-page-64": ("gdn", EXTRA_BUFFER, "64"),
}


@pytest.fixture
def start(preload: EntryPoint, models: dict[str, Path], tmp_path: Path) -> Start:
    def server(name: str, **env: str) -> ServerProcess:
        family, strategy, page = SETTINGS[name]
        args = [*MARCONI, *POOLS, *STRATEGY_ARGS[strategy], "--page-size", page, "--enable-mixed-chunk"]
        args += ["--chunked-prefill-size", "128"]
        return ServerProcess(models[family], args, log_path=tmp_path / "log", entry_point=preload(ENTRY_POINT), env=env)

    return server


def prompts() -> list[list[int]]:
    """Behind three prefixes, longer than a chunk."""
    shared = [random_tokens(2000 + number, 230) for number in range(3)]
    return [shared[n % 3] + random_tokens(2010 + n, 40 + 17 * n % 90) for n in range(NUM_REQUESTS)]


def ask(url: str, prompt: list[int], max_new_tokens: int) -> tuple[list[int], int]:
    """The answer, and how much of the prompt came from the cache."""
    sampling = {"temperature": 0, "max_new_tokens": max_new_tokens, "ignore_eos": True}
    body = {"input_ids": prompt, "sampling_params": sampling}
    response = HTTP.post(f"{url}/generate", json=body, timeout=300.0)
    response.raise_for_status()
    answer = response.json()
    return answer["output_ids"], answer["meta_info"]["cached_tokens"]


@contextmanager
def decoding(url: str) -> Iterator[None]:
    """A request that is decoded all the while, and again as soon as it has ended: no prefill is without company."""
    is_over, prompt = threading.Event(), random_tokens(1999, 20)

    def keep_on() -> None:
        while not is_over.is_set():
            ask(url, prompt, 100)

    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(keep_on)
        try:
            yield
        finally:
            is_over.set()
    asking.result()


def wrong_answers(url: str) -> tuple[list[int], int]:
    """Which of `prompts` are answered wrongly when they come one after the other, and the tokens that were reused."""
    asked = prompts()

    def late(number: int) -> tuple[list[int], int]:
        time.sleep(0.05 * number)
        return ask(url, asked[number], 20 + number)

    with decoding(url), ThreadPoolExecutor(6) as pool:
        together = [*pool.map(late, range(NUM_REQUESTS)), *pool.map(late, range(NUM_REQUESTS))]
    wrong = []
    for number in range(NUM_REQUESTS):
        assert HTTP.post(f"{url}/flush_cache?timeout=30", timeout=60.0).status_code == 200
        alone, num_cached = ask(url, asked[number], 20 + number)
        assert num_cached == 0
        wrong += [number for ids, _ in (together[number], together[NUM_REQUESTS + number]) if ids != alone]
    return wrong, sum(num_cached for _, num_cached in together)


@pytest.mark.parametrize("name", SETTINGS)
def test_a_prefill_that_decoding_requests_ride_with_keeps_its_states(name: str, start: Start) -> None:
    with start(name) as running:
        wrong, num_reused = wrong_answers(running.url)
        log = running.log_path.read_text(errors="replace")
    assert not wrong
    assert num_reused > 1000
    rode = re.findall(LINE.format(r"(\d+)", r"(\d+)"), log)
    assert sum(int(num_states) > 0 for num_states, _ in rode) > 5, "no prefill with states to keep was mixed"
    assert "were not written" not in log


def test_negative_control_states_of_a_token_earlier_turn_the_answers_wrong(start: Start) -> None:
    with start("gdn-page-64", **{SHIFTED: "1"}) as running:
        wrong, _ = wrong_answers(running.url)
        require_broken(running.log_path)
    assert wrong
