"""The demo's work: a shared context forked eight ways, chat turns on two branches, and a chat over OpenAI's API.

The three ways in which a prefix comes back: branches of one context (an input prefix), a branch that goes on (a
conversation), and a chat client that sends the whole history again.
"""

import importlib.metadata
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import openai
import sglang as sgl

from marconi.engine.demo.endpoint import Answer, TimedEndpoint, answer_of

INSTRUCTION = "Answer from the text above.\n"
# No two begin with the same letter: what the branches share ends with the instruction, whatever the tokenizer.
QUESTIONS = (
    "What is a recurrent state?",
    "Can it be rolled back?",
    "How is a prefix found again?",
    "Does the answer change?",
    "Name every touch of upstream.",
    "List the two commands.",
    "Give the licence.",
    "Explain the ledger.",
)
NUM_CHAT_BRANCHES = 2
FOLLOW_UPS = ("And what follows from that?", "Thank you. In one sentence?")
CHAT = ("Hello. Who are you?", "What did I just ask?", "And before that?")
NUM_REQUESTS = 1 + len(QUESTIONS) + NUM_CHAT_BRANCHES * len(FOLLOW_UPS) + len(CHAT)
FLUSH_TIMEOUT_S = 60


@dataclass(frozen=True, slots=True)
class Size:
    """How much work: characters of the shared context, tokens of each answer."""

    num_context_chars: int
    max_new_tokens: int


def project_documents(num_chars: int) -> str:
    """`num_chars` characters of the project's own pages, which travel with its distribution; repeated if need be."""
    from marconi.engine import ledger

    pages = f"{importlib.metadata.metadata('sglang-marconi')['Description']}\n{ledger.render()}"
    return (pages * (num_chars // len(pages) + 1))[:num_chars]


@sgl.function  # type: ignore[untyped-decorator]
def branches(s: Any, context: str, num_answer_tokens: int) -> None:
    """Eight questions to one context; the first two branches go on as conversations."""
    s += sgl.system(context)
    s += sgl.user_begin()
    s += INSTRUCTION
    # A fork prefills its shared prefix only if that prefix is already there when it is asked for.
    s.sync()
    forks = list(s.fork(len(QUESTIONS)))
    for fork, question in zip(forks, QUESTIONS, strict=True):
        fork += question
        fork += sgl.user_end()
        fork += sgl.assistant(sgl.gen("answer", max_tokens=num_answer_tokens, temperature=0))
    for fork in forks:
        _finish(fork)
    for turn, follow_up in enumerate(FOLLOW_UPS, start=2):
        for fork in forks[:NUM_CHAT_BRANCHES]:
            fork += sgl.user(follow_up)
            fork += sgl.assistant(sgl.gen(f"turn {turn}", max_tokens=num_answer_tokens, temperature=0))
            _finish(fork)
    s["forks"] = forks


def _finish(fork: Any) -> None:
    # After an error the fork's worker is gone, and whatever is asked of it next would be waited for without end.
    fork.sync()
    if fork.error() is not None:
        raise fork.error()


def run(url: str, on_answered: Callable[[], None], size: Size) -> list[Answer]:
    """Do all the work against the server at `url`, calling `on_answered` after each request.

    Returns the answers in an order of their own, the same in every run, whatever order they came in.
    """
    documents = project_documents(size.num_context_chars)
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0)
    _warm_up(url, client, size.num_context_chars)
    return [
        *_run_branches(TimedEndpoint(url, on_answered), documents, size.max_new_tokens),
        *_run_chat(client, documents[: size.num_context_chars // 4], size.max_new_tokens, on_answered),
    ]


def _warm_up(url: str, client: openai.OpenAI, num_chars: int) -> None:
    # The first requests pay for what server and client do once; texts of their own, so that no later request hits them.
    long_prompt = {"text": "0 1 " * max(1, num_chars // 4), "sampling_params": {"max_new_tokens": 4}}
    httpx.post(f"{url}/generate", json=long_prompt, timeout=600.0).raise_for_status()
    _chat_turn(client, "warm-up", [{"role": "user", "content": "0"}], 4)
    flush = httpx.post(f"{url}/flush_cache", params={"timeout": FLUSH_TIMEOUT_S}, timeout=2 * FLUSH_TIMEOUT_S)
    flush.raise_for_status()


def _run_branches(endpoint: TimedEndpoint, context: str, max_new_tokens: int) -> list[Answer]:
    state = branches.run(context=context, num_answer_tokens=max_new_tokens, backend=endpoint)
    if state.error() is not None:
        raise state.error()
    forks = state["forks"]
    first = [answer_of(f"branch {i}", fork.get_meta_info("answer")) for i, fork in enumerate(forks, start=1)]
    later = [
        answer_of(f"branch {i}.{turn}", fork.get_meta_info(f"turn {turn}"))
        for i, fork in enumerate(forks[:NUM_CHAT_BRANCHES], start=1)
        for turn in range(2, 2 + len(FOLLOW_UPS))
    ]
    return [*endpoint.contexts, *first, *later]


def _run_chat(
    client: openai.OpenAI, system: str, max_new_tokens: int, on_answered: Callable[[], None]
) -> Iterator[Answer]:
    messages: list[Any] = [{"role": "system", "content": system}]
    for turn, text in enumerate(CHAT, start=1):
        messages.append({"role": "user", "content": text})
        answer, content = _chat_turn(client, f"chat {turn}", messages, max_new_tokens)
        messages.append({"role": "assistant", "content": content})
        on_answered()
        yield answer


def _chat_turn(client: openai.OpenAI, name: str, messages: list[Any], max_new_tokens: int) -> tuple[Answer, str]:
    started_s = time.perf_counter()
    ttft_s, content, usage = 0.0, "", None
    tokens: list[str] = []
    stream = client.chat.completions.create(
        model="default",
        messages=messages,
        temperature=0,
        max_tokens=max_new_tokens,
        logprobs=True,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            ttft_s = ttft_s or time.perf_counter() - started_s
            content += choice.delta.content or ""
            if choice.logprobs and choice.logprobs.content:
                tokens += [bytes(token.bytes or ()).hex() for token in choice.logprobs.content]
    assert usage is not None, "the server was asked for its usage"
    details = usage.prompt_tokens_details
    num_cached_tokens = (details.cached_tokens or 0) if details else 0
    return Answer(name, usage.prompt_tokens, num_cached_tokens, ttft_s, tuple(tokens)), content
