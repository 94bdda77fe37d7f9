"""The same model without a prefix cache: what every answer has to equal.

In fp32, so that equality is meant literally: token ids equal, log-probabilities within 1e-5.
"""

import hashlib
import json
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import marconi_cpu
import sgl_kernel_ext

from .client import NUM_TOKENS, Completion, generate, likeliest_along
from .scenarios import Exchange, Scenario

MAX_LOGPROB_DIFFERENCE = 1e-5
NUM_AT_ONCE = 8
"""Answers that the reference computes at the same time, where several are missing."""

Asked = tuple[tuple[int, ...], int]
"""A prompt, and the tokens of its answer."""
Answered = tuple[tuple[int, ...], tuple[int, ...]]
"""A prompt, and an answer to it."""


class Reference:
    """The answers of a model without a prefix cache: those of `kept`, and of a server that `start` returns the URL of.

    `kept` is a folder of answers to the same model by the same code (`digest_of`), a file each, which this adds to. The
    server is asked for what is missing: whether an answer is the likeliest all along, which takes one prefill of prompt
    and answer, or for an answer, which takes a step a token.
    """

    def __init__(self, start: Callable[[], str], kept: Path):
        self._start, self._kept = start, kept
        self._answers: dict[Asked, Completion] = {}
        kept.mkdir(parents=True, exist_ok=True)

    @property
    def url(self) -> str:
        """The server's, which runs from now on."""
        return self._start()

    def answer(self, prompt: tuple[int, ...], num_tokens: int = NUM_TOKENS) -> Completion:
        """The answer to `prompt`, computed from its first token."""
        return self.answers([(prompt, num_tokens)])[0]

    def answers(self, asked: Sequence[Asked]) -> list[Completion]:
        """The answer to each of `asked`, several of which are computed at once."""
        missing = [each for each in dict.fromkeys(asked) if self._read(each) is None]
        for each, completion in zip(missing, self._at_once(_answer, missing), strict=True):
            self._keep(each, completion)
        return [self._answers[each] for each in asked]

    def require_same(self, scenario: Scenario, url: str, strategy: str) -> None:
        """Assert that the server at `url` answers `scenario` the same, and reuses states where the scenario says so."""
        exchanges = scenario.ask(url)
        assert self.divergences(exchanges) == []
        if strategy in scenario.hits_under:
            hits = [exchange.completion.num_cached_tokens for exchange in exchanges]
            assert any(hits), "nothing was reused, so nothing was tested"

    def divergences(self, exchanges: list[Exchange]) -> list[str]:
        """What differs between `exchanges` and the reference, a line for each answer that does."""
        given = [(exchange.prompt, exchange.completion.token_ids) for exchange in exchanges]
        expected = {each: found for each in given if (found := self._read((each[0], len(each[1]))))}
        missing = [each for each in dict.fromkeys(given) if each not in expected]
        for each, likeliest in zip(missing, self._at_once(_likeliest_along, missing), strict=True):
            expected[each] = likeliest
            prompt, token_ids = each
            if likeliest.token_ids == token_ids:
                self._keep((prompt, len(token_ids)), likeliest)
        compared = ((exchange.completion, expected[each]) for exchange, each in zip(exchanges, given, strict=True))
        return [
            f"request {index} ({len(given[index][0])} tokens, {got.num_cached_tokens} cached): {difference}"
            for index, (got, right) in enumerate(compared)
            if (difference := _divergence(got, right)) is not None
        ]

    def _at_once(self, ask: Callable[[str, Any], Completion], missing: Sequence[Any]) -> list[Completion]:
        if not missing:
            return []
        with ThreadPoolExecutor(NUM_AT_ONCE) as pool:
            completions = list(pool.map(partial(ask, self.url), missing))
        assert not any(each.num_cached_tokens for each in completions), "the reference must not have a prefix cache"
        return completions

    def _keep(self, asked: Asked, completion: Completion) -> None:
        self._answers[asked] = completion
        path = self._path_of(asked)
        # Whole or not at all: other processes read what is there.
        written = path.with_suffix(f".{os.getpid()}-{threading.get_ident()}")
        written.write_text(json.dumps([completion.token_ids, completion.logprobs]), encoding="utf-8")
        written.rename(path)

    def _read(self, asked: Asked) -> Completion | None:
        if asked not in self._answers:
            try:
                token_ids, logprobs = json.loads(self._path_of(asked).read_text(encoding="utf-8"))
            except FileNotFoundError:
                return None
            self._answers[asked] = Completion(tuple(token_ids), tuple(logprobs), 0)
        return self._answers[asked]

    def _path_of(self, asked: Asked) -> Path:
        return self._kept / hashlib.blake2b(json.dumps(asked).encode(), digest_size=16).hexdigest()


def _answer(url: str, asked: Asked) -> Completion:
    prompt, num_tokens = asked
    return generate(url, prompt, max_new_tokens=num_tokens)


def _likeliest_along(url: str, answered: Answered) -> Completion:
    return likeliest_along(url, *answered)


def _divergence(got: Completion, expected: Completion) -> str | None:
    """What differs, if anything does; tokens after the first that differs are those to another answer."""
    for index, (token, right) in enumerate(zip(got.token_ids, expected.token_ids, strict=True)):
        if token != right:
            return f"token {index} is {token}, not {right}"
    off = max(abs(a - b) for a, b in zip(got.logprobs, expected.logprobs, strict=True))
    return f"a log-probability is off by {off:.1e}" if off > MAX_LOGPROB_DIFFERENCE else None


def digest_of(model: Path) -> str:
    """A digest of all that an answer without a prefix cache hangs on: the model's files, and the code that runs it."""
    digest = hashlib.blake2b(digest_size=16)
    code = [Path(marconi_cpu.__file__).parent, Path(sgl_kernel_ext.__file__).parent]
    files = [*model.iterdir(), *(file for folder in code for file in folder.rglob("*.py")), Path(__file__)]
    for file in sorted(files):
        digest.update(file.read_bytes())
    for package in ("sglang", "torch", "transformers"):
        digest.update(version(package).encode())
    return digest.hexdigest()


def difference(got: Completion, expected: Completion) -> float:
    """The largest of two answers' log-probabilities, up to the first token that differs: of a tie, either is right."""
    pairs = list(zip(got.token_ids, expected.token_ids, strict=True))
    num_compared = next((index for index, (a, b) in enumerate(pairs) if a != b), len(pairs)) + 1
    steps = zip(got.logprobs[:num_compared], expected.logprobs[:num_compared], strict=True)
    return max(abs(a - b) for a, b in steps)
