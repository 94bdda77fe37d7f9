"""The demo's work: a shared context forked eight ways, chat turns on two branches, and a chat over OpenAI's API.

The three ways in which a prefix comes back: branches of one context (an input prefix), a branch that goes on (a
conversation), and a chat client that sends the whole history again.
"""

import importlib.metadata
import time
from collections.abc import Callable
from typing import Any

import httpx
import openai
import sglang as sgl

from marconi.engine.demo.endpoint import Answer, TimedEndpoint, answer_of

QUESTIONS = (
    "What is a recurrent state?",
    "Why can it not be rolled back?",
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


def project_documents(num_chars: int) -> str:
    """The first `num_chars` characters of the project's own pages, which travel with its distribution."""
    from marconi.engine import ledger

    readme = importlib.metadata.metadata("sglang-marconi")["Description"]
    return f"{readme}\n{ledger.render()}"[:num_chars]


@sgl.function  # type: ignore[untyped-decorator]
def branches(s: Any, context: str, num_answer_tokens: int) -> None:
    """Eight questions to one context; the first two branches go on as conversations."""
    s += sgl.system(context)
    # A fork prefills its shared prefix only if that prefix is already there when it is asked for.
    s.sync()
    forks = s.fork(len(QUESTIONS))
    for fork, question in zip(forks, QUESTIONS, strict=True):
        fork += sgl.user(question)
        fork += sgl.assistant(sgl.gen("answer", max_tokens=num_answer_tokens, temperature=0))
    for fork in forks:
        fork.sync()
    for turn, follow_up in enumerate(FOLLOW_UPS, start=2):
        for fork in list(forks)[:NUM_CHAT_BRANCHES]:
            fork += sgl.user(follow_up)
            fork += sgl.assistant(sgl.gen(f"turn {turn}", max_tokens=num_answer_tokens, temperature=0))
            fork.sync()
    s["forks"] = list(forks)


def run(url: str, on_answer: Callable[[Answer], None], *, num_context_chars: int, max_new_tokens: int) -> None:
    """Do all the work against the server at `url`, telling `on_answer` of each request, in a fixed order."""
    documents = project_documents(num_context_chars)
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0)
    _warm_up(url, client, num_context_chars)
    _run_branches(TimedEndpoint(url, on_answer), documents, max_new_tokens, on_answer)
    _run_chat(client, documents[: num_context_chars // 4], max_new_tokens, on_answer)


def _warm_up(url: str, client: openai.OpenAI, num_chars: int) -> None:
    # The first requests pay for what server and client do once; texts of their own, so that no later request hits them.
    long_prompt = {"text": "0 1 " * (num_chars // 4), "sampling_params": {"max_new_tokens": 4}}
    httpx.post(f"{url}/generate", json=long_prompt, timeout=600.0).raise_for_status()
    _chat_turn(client, "warm-up", [{"role": "user", "content": "0"}], 4)
    httpx.post(f"{url}/flush_cache", timeout=600.0).raise_for_status()


def _run_branches(
    endpoint: TimedEndpoint, context: str, max_new_tokens: int, on_answer: Callable[[Answer], None]
) -> None:
    state = branches.run(context=context, num_answer_tokens=max_new_tokens, backend=endpoint)
    if state.error() is not None:
        raise state.error()
    forks = state["forks"]
    for index, fork in enumerate(forks, start=1):
        if fork.error() is not None:
            raise fork.error()
        on_answer(answer_of(f"branch {index}", fork.get_meta_info("answer")))
    for index, fork in enumerate(forks[:NUM_CHAT_BRANCHES], start=1):
        for turn in range(2, 2 + len(FOLLOW_UPS)):
            on_answer(answer_of(f"branch {index}.{turn}", fork.get_meta_info(f"turn {turn}")))


def _run_chat(client: openai.OpenAI, system: str, max_new_tokens: int, on_answer: Callable[[Answer], None]) -> None:
    messages: list[Any] = [{"role": "system", "content": system}]
    for turn, text in enumerate(CHAT, start=1):
        messages.append({"role": "user", "content": text})
        answer, content = _chat_turn(client, f"chat {turn}", messages, max_new_tokens)
        messages.append({"role": "assistant", "content": content})
        on_answer(answer)


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
