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

import marconi_cpu
import sgl_kernel_ext

from .client import NUM_TOKENS, Completion, generate
from .scenarios import Exchange, Scenario

MAX_LOGPROB_DIFFERENCE = 1e-5
NUM_AT_ONCE = 8
"""Answers that the reference computes at the same time, where several are missing."""

Asked = tuple[tuple[int, ...], int]
"""A prompt, and the tokens of its answer."""


class Reference:
    """The answers of a model without a prefix cache: those of `kept`, and of a server that `start` returns the URL of.

    `kept` is a folder of answers to the same model by the same code (`digest_of`), a file each, which this adds to. The
    server is asked for what is missing.
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
        self._answers |= {each: found for each in asked if each not in self._answers and (found := self._read(each))}
        missing = [each for each in dict.fromkeys(asked) if each not in self._answers]
        if missing:
            url = self.url
            with ThreadPoolExecutor(NUM_AT_ONCE) as pool:
                self._answers |= zip(missing, pool.map(partial(self._generate, url), missing), strict=True)
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
        answers = self.answers([(exchange.prompt, len(exchange.completion.token_ids)) for exchange in exchanges])
        found = []
        for index, (exchange, expected) in enumerate(zip(exchanges, answers, strict=True)):
            got = exchange.completion
            where = f"request {index} ({len(exchange.prompt)} tokens, {got.num_cached_tokens} cached)"
            if got.token_ids != expected.token_ids:
                pairs = enumerate(zip(got.token_ids, expected.token_ids, strict=True))
                first = next(i for i, (a, b) in pairs if a != b)
                found.append(f"{where}: token {first} is {got.token_ids[first]}, not {expected.token_ids[first]}")
                continue
            difference = max(abs(a - b) for a, b in zip(got.logprobs, expected.logprobs, strict=True))
            if difference > MAX_LOGPROB_DIFFERENCE:
                found.append(f"{where}: a log-probability is off by {difference:.1e}")
        return found

    def _generate(self, url: str, asked: Asked) -> Completion:
        prompt, num_tokens = asked
        completion = generate(url, prompt, max_new_tokens=num_tokens)
        assert completion.num_cached_tokens == 0, "the reference must not have a prefix cache"
        path = self._path_of(asked)
        # Whole or not at all: other processes read what is there.
        written = path.with_suffix(f".{os.getpid()}-{threading.get_ident()}")
        written.write_text(json.dumps([completion.token_ids, completion.logprobs]), encoding="utf-8")
        written.rename(path)
        return completion

    def _read(self, asked: Asked) -> Completion | None:
        try:
            token_ids, logprobs = json.loads(self._path_of(asked).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        return Completion(tuple(token_ids), tuple(logprobs), 0)

    def _path_of(self, asked: Asked) -> Path:
        return self._kept / hashlib.blake2b(json.dumps(asked).encode(), digest_size=16).hexdigest()


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
