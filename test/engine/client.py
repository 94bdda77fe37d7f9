"""A client of `/generate` that keeps what exactness is judged by: token ids and log-probabilities."""

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np

HTTP = httpx.Client(trust_env=False, limits=httpx.Limits(max_connections=None, max_keepalive_connections=0))
"""Asks for every test: `httpx.post` reads all certificates for each request, which takes longer than an answer."""
VOCABULARY = range(3, 250)
NUM_TOKENS = 6
"""Of an answer, unless a test asks for another number."""


@dataclass(frozen=True, slots=True)
class Completion:
    """A greedy answer: its token ids, their log-probabilities, and how many prompt tokens came from the cache."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    num_cached_tokens: int


def generate(
    url: str, prompt: Sequence[int], *, max_new_tokens: int = NUM_TOKENS, checkpoints: Sequence[int] = ()
) -> Completion:
    """Answer `prompt` (token ids) greedily with exactly `max_new_tokens` tokens; ask for states at `checkpoints`."""
    body = _body(prompt, max_new_tokens)
    if checkpoints:
        body["sampling_params"]["custom_params"] = {"marconi_checkpoints": list(checkpoints)}
    return completion_of(_meta(url, body))


def likeliest_along(url: str, prompt: Sequence[int], token_ids: Sequence[int]) -> Completion:
    """The likeliest token at each place of an answer, by `prompt` and what the answer has before it: one prefill."""
    body = _body([*prompt, *token_ids[:-1]], 1) | {"logprob_start_len": len(prompt) - 1, "top_logprobs_num": 1}
    meta = _meta(url, body)
    places = [*meta["input_top_logprobs"][1:], *meta["output_top_logprobs"]]
    logprobs, likeliest, _ = zip(*(place[0] for place in places), strict=True)
    return Completion(tuple(likeliest), tuple(logprobs), meta["cached_tokens"])


def stream(url: str, prompt: Sequence[int], *, max_new_tokens: int) -> Iterator[Completion]:
    """Answer `prompt` greedily with exactly `max_new_tokens` tokens: what is there of it after each of them."""
    body = _body(prompt, max_new_tokens) | {"stream": True}
    with HTTP.stream("POST", f"{url}/generate", json=body, timeout=300.0) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            data = line.removeprefix("data: ")
            if data and data != "[DONE]":
                yield completion_of(json.loads(data)["meta_info"])


def _body(prompt: Sequence[int], max_new_tokens: int) -> dict[str, Any]:
    sampling = {"temperature": 0, "max_new_tokens": max_new_tokens, "ignore_eos": True}
    return {"input_ids": list(prompt), "sampling_params": sampling, "return_logprob": True}


def _meta(url: str, body: dict[str, Any]) -> dict[str, Any]:
    response = HTTP.post(f"{url}/generate", json=body, timeout=300.0)
    response.raise_for_status()
    return dict(response.json()["meta_info"])


def completion_of(meta: dict[str, Any]) -> Completion:
    """By the `meta_info` of an answer that was asked for with its log-probabilities."""
    logprobs, token_ids, _ = zip(*meta["output_token_logprobs"], strict=True)
    return Completion(tuple(token_ids), tuple(logprobs), meta["cached_tokens"])


def generate_together(
    url: str, prompts: Sequence[Sequence[int]], *, max_new_tokens: int = NUM_TOKENS
) -> list[Completion]:
    """Answer all `prompts` at the same time; the answers in their order."""
    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(lambda prompt: generate(url, prompt, max_new_tokens=max_new_tokens), prompts))


def random_tokens(seed: int, num_tokens: int) -> list[int]:
    """`num_tokens` token ids that no other seed shares a long prefix with."""
    return np.random.default_rng(seed).integers(VOCABULARY.start, VOCABULARY.stop, num_tokens).tolist()
