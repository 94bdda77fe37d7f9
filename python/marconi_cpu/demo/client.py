"""A client of one server: asks, and notes of each request what it had from the cache and how soon it answered.

The time to first token is seen from the client: from sending a request to its first chunk.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import httpx
import openai

from marconi_cpu.demo.endpoint import TimedAnswer
from marconi_cpu.demo.stream import generated

_TIMEOUT_S = 600.0
_FLUSH_TIMEOUT_S = 60


class Client:
    """A client of one server, with the answers so far in `answers`.

    `given` holds what an earlier run's server said, by the requests' names: conversations continue with that, so that
    prompts are the same in both runs whatever this server says.
    """

    def __init__(self, url: str, on_answered: Callable[[], None], given: Mapping[str, str]) -> None:
        self.url = url
        self.answers: list[TimedAnswer] = []
        self.on_answered = on_answered
        self._given = given
        # The server is on this machine, whatever the environment says of proxies.
        self._http = httpx.Client(base_url=url, timeout=_TIMEOUT_S, trust_env=False)
        self._openai = openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0, timeout=_TIMEOUT_S)

    def close(self) -> None:
        """Close its connections."""
        self._http.close()
        self._openai.close()

    def flush(self) -> None:
        """Empty the server's cache, and forget what was asked."""
        flush = self._http.post("/flush_cache", params={"timeout": _FLUSH_TIMEOUT_S})
        flush.raise_for_status()
        self.answers.clear()

    def note(self, answer: TimedAnswer) -> None:
        """Add an answer."""
        self.answers.append(answer)
        self.on_answered()

    def generate(self, kind: str, prompts: Mapping[str, str], num_tokens: int) -> None:
        """Ask all of `prompts`, by their names, at once: one body of ids, so that they arrive together and in order.

        Texts arrive one by one, each when SGLang has tokenized it.
        """
        sampling = {"temperature": 0, "max_new_tokens": num_tokens}
        body = {"input_ids": self._ids_of(list(prompts.values())), "sampling_params": sampling}
        for name, (first_s, last) in zip(prompts, generated(self._http, body, len(prompts)), strict=True):
            meta, tokens = last["meta_info"], tuple(map(str, last["output_ids"]))
            self.note(TimedAnswer(kind, name, meta["prompt_tokens"], meta["cached_tokens"], first_s, tokens))

    def _ids_of(self, texts: list[str]) -> Any:
        response = self._http.post("/tokenize", json={"model": "default", "prompt": texts})
        response.raise_for_status()
        return response.json()["tokens"]

    def chat(self, kind: str, name: str, messages: Sequence[Any], num_tokens: int) -> str:
        """Ask for the next message of a conversation; returns the message to continue with."""
        started_s = time.perf_counter()
        ttft_s, content, usage = 0.0, "", None
        tokens: list[str] = []
        stream = self._openai.chat.completions.create(
            model="default",
            messages=list(messages),
            temperature=0,
            max_tokens=num_tokens,
            logprobs=True,
            stream=True,
            stream_options={"include_usage": True},
        )
        for chunk in stream:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                # The first chunk names the role, and may come before a token.
                if choice.logprobs and choice.logprobs.content:
                    ttft_s = ttft_s or time.perf_counter() - started_s
                    tokens += [bytes(token.bytes or ()).hex() for token in choice.logprobs.content]
                content += choice.delta.content or ""
        if usage is None or not ttft_s:
            raise RuntimeError("the server ended a stream before its usage or its first token")
        details = usage.prompt_tokens_details
        num_cached_tokens = (details.cached_tokens or 0) if details else 0
        answer = TimedAnswer(kind, name, usage.prompt_tokens, num_cached_tokens, ttft_s, tuple(tokens), content)
        self.note(answer)
        return self._given.get(name, content)
