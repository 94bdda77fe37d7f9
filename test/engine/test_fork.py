"""`s.fork(n)` of SGLang's frontend: the prefix is there before the first branch asks for it."""

from typing import Any, NamedTuple

import pytest
import sglang as sgl
from sglang.lang.backend.runtime_endpoint import RuntimeEndpoint

from marconi_cpu.demo.server_process import ServerProcess

from .client import HTTP, generate, random_tokens
from .conftest import STANDARD, Launch, server_args
from .scenarios import EXTRA_BUFFER, NO_BUFFER

NUM_TOKENS = 1003
CONTEXT = ("The state after these words cannot be rolled back. " * 30)[:NUM_TOKENS]
"""The small models' tokenizer makes a token of every byte."""
QUESTIONS = ("What?", "Who?", "Am I?", "Is it?", "Name it.", "List all.", "Give one.", "Explain.")
PAGE_TOKENS = 16
PAGED = Launch("page-16", "gdn", (*server_args(EXTRA_BUFFER), "--page-size", str(PAGE_TOKENS)))
LAUNCHES = (
    STANDARD["gdn", EXTRA_BUFFER],
    pytest.param(STANDARD["mamba2", NO_BUFFER], marks=pytest.mark.slow),
    pytest.param(PAGED, marks=pytest.mark.slow),
)


class Served(NamedTuple):
    """A server, and where it can keep states."""

    url: str
    page_tokens: int

    def depth(self, num_tokens: int) -> int:
        """The last position up to `num_tokens` at which there can be a state."""
        return num_tokens // self.page_tokens * self.page_tokens


@pytest.fixture
def served(server: ServerProcess, launch: Launch) -> Served:
    """With an empty cache."""
    assert HTTP.post(f"{server.url}/flush_cache?timeout=30", timeout=60.0).status_code == 200
    return Served(server.url, PAGE_TOKENS if launch is PAGED else 1)


@sgl.function  # type: ignore[untyped-decorator]
def branches(s: Any) -> None:
    s += CONTEXT
    s.sync()
    forks = list(s.fork(len(QUESTIONS)))
    for fork, question in zip(forks, QUESTIONS, strict=True):
        fork += question
        fork += sgl.gen("answer", max_tokens=4, temperature=0)
    s["cached"] = [fork.get_meta_info("answer")["cached_tokens"] for fork in forks]


def test_all_eight_branches_of_1003_tokens_start_at_the_fork_the_first_as_well(served: Served) -> None:
    assert len(CONTEXT) == NUM_TOKENS
    state = branches.run(backend=RuntimeEndpoint(served.url))
    assert state.error() is None
    assert state["cached"] == [served.depth(NUM_TOKENS)] * len(QUESTIONS)


def test_branches_that_start_at_a_fork_answer_as_those_that_compute_everything(served: Served) -> None:
    prefix = random_tokens(3000, 400)
    prompts = [prefix + random_tokens(3001 + index, 20) for index in range(2)]
    expected = [generate(served.url, prompt) for prompt in prompts[:1]]
    assert HTTP.post(f"{served.url}/flush_cache?timeout=30", timeout=60.0).status_code == 200
    commit(served, prefix)
    got = [generate(served.url, prompt) for prompt in prompts]
    assert [answer.num_cached_tokens for answer in got] == [served.depth(400)] * 2
    assert got[0].token_ids == expected[0].token_ids
    assert max(abs(a - b) for a, b in zip(got[0].logprobs, expected[0].logprobs, strict=True)) <= 1e-5


def commit(served: Served, prompt: list[int], **fields: Any) -> None:
    body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": 0}, **fields}
    HTTP.post(f"{served.url}/generate", json=body, timeout=300.0).raise_for_status()


def num_cached(served: Served, prompt: list[int]) -> int:
    return generate(served.url, prompt, max_new_tokens=2).num_cached_tokens


def test_a_prefix_of_whole_pages_is_kept_to_its_last_token(served: Served) -> None:
    """And the state one token, or page, before it serves a repeat."""
    prefix = random_tokens(3100, 20 * PAGE_TOKENS)
    commit(served, prefix)
    assert num_cached(served, prefix) == served.depth(len(prefix) - 1)
    assert num_cached(served, prefix + random_tokens(3101, 9)) == len(prefix)


def test_a_prefix_that_is_committed_again_is_written_once(served: Served) -> None:
    prefix = random_tokens(3200, 20 * PAGE_TOKENS)
    commit(served, prefix)
    before = num_states_written(served)
    commit(served, prefix)
    assert num_states_written(served) == before
    assert num_cached(served, prefix + random_tokens(3201, 9)) == len(prefix)


def num_states_written(served: Served) -> int:
    (rank,) = HTTP.get(f"{served.url}/marconi", timeout=60.0).json()["ranks"]
    num: int = rank["num_states_written"]
    return num


def test_cache_prefix_of_the_frontend_asks_as_well(served: Served) -> None:
    RuntimeEndpoint(served.url).cache_prefix(CONTEXT)
    body = {"text": f"{CONTEXT}And?", "sampling_params": {"max_new_tokens": 2}}
    meta = HTTP.post(f"{served.url}/generate", json=body, timeout=300.0).json()["meta_info"]
    assert meta["cached_tokens"] == served.depth(NUM_TOKENS)
