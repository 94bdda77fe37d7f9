"""The frontend's connection to a server, noting for each request what it hit and how soon it answered.

The time to first token is seen from the client: from sending a request to its first chunk. Answers are compared token
by token, so every generation asks for log-probabilities, which name them.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sglang.lang.backend.runtime_endpoint import RuntimeEndpoint
from sglang.utils import http_request


@dataclass(frozen=True, slots=True)
class TimedAnswer:
    """One request of a kind: the tokens of its prompt, how many were cached, and the seconds to its first token.

    `tokens` identifies the tokens of the answer: their ids, or the bytes that they stand for. A conversation continues
    from `text`.
    """

    kind: str
    name: str
    num_prompt_tokens: int
    num_cached_tokens: int
    ttft_s: float
    tokens: tuple[str, ...]
    text: str = ""


class TimedEndpoint(RuntimeEndpoint):
    """A `RuntimeEndpoint` that streams every generation and keeps its time to first token in the meta-information.

    Source: `sglang/lang/backend/runtime_endpoint.py`.
    """

    def __init__(self, base_url: str, kind: str, on_answered: Callable[[], None]):
        super().__init__(base_url)
        self.kind = kind
        self.answers: list[TimedAnswer] = []
        self._on_answered = on_answered

    def commit_lazy_operations(self, s: Any) -> None:
        """Prefill the prefix that the branches of a fork share, and keep it in `answers`."""
        started_s = time.perf_counter()
        response = http_request(
            f"{self.base_url}/generate", json={"text": s.text_, "sampling_params": {"max_new_tokens": 0}}
        )
        self._assert_success(response)
        meta = response.json()["meta_info"]
        ttft_s = time.perf_counter() - started_s
        self.answers.append(TimedAnswer(self.kind, "context", meta["prompt_tokens"], meta["cached_tokens"], ttft_s, ()))
        self._on_answered()

    def generate(self, s: Any, sampling_params: Any) -> tuple[str, dict[str, Any]]:
        """Stream one generation to its end; returns its text and meta-information with `ttft_s` added."""
        sampling_params.return_logprob = True
        started_s = time.perf_counter()
        ttft_s, chunks = 0.0, []
        for chunk in self.generate_stream(s, sampling_params):
            ttft_s = ttft_s or time.perf_counter() - started_s
            chunks.append(chunk)
        if not chunks:
            raise RuntimeError("the server ended a stream before its first token")
        self._on_answered()
        text = "".join(text for text, _ in chunks)
        return text, {**chunks[-1][1], "ttft_s": ttft_s}


def answer_of(kind: str, name: str, meta: dict[str, Any]) -> TimedAnswer:
    """The `TimedAnswer` in the meta-information that `TimedEndpoint.generate` returned."""
    tokens = tuple(str(token_id) for _, token_id, _ in meta["output_token_logprobs"])
    return TimedAnswer(kind, name, meta["prompt_tokens"], meta["cached_tokens"], meta["ttft_s"], tokens)
