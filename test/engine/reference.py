"""The same model without a prefix cache: what every answer has to equal.

In fp32, so that equality is meant literally: token ids equal, log-probabilities within 1e-5.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from .client import NUM_TOKENS, Completion, generate
from .scenarios import Exchange, Scenario

MAX_LOGPROB_DIFFERENCE = 1e-5
NUM_AT_ONCE = 8
"""Answers that the reference computes at the same time, where several are missing."""

Asked = tuple[tuple[int, ...], int]
"""A prompt, and the tokens of its answer."""


class Reference:
    """A server without a prefix cache; remembers what it answered."""

    def __init__(self, url: str):
        self.url = url
        self._answers: dict[Asked, Completion] = {}

    def answer(self, prompt: tuple[int, ...], num_tokens: int = NUM_TOKENS) -> Completion:
        """The answer to `prompt`, computed from its first token."""
        return self.answers([(prompt, num_tokens)])[0]

    def answers(self, asked: Sequence[Asked]) -> list[Completion]:
        """The answer to each of `asked`, several of which are computed at once."""
        missing = [each for each in dict.fromkeys(asked) if each not in self._answers]
        with ThreadPoolExecutor(NUM_AT_ONCE) as pool:
            self._answers |= zip(missing, pool.map(self._generate, missing), strict=True)
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

    def _generate(self, asked: Asked) -> Completion:
        prompt, num_tokens = asked
        completion = generate(self.url, prompt, max_new_tokens=num_tokens)
        assert completion.num_cached_tokens == 0, "the reference must not have a prefix cache"
        return completion


def difference(got: Completion, expected: Completion) -> float:
    """The largest of two answers' log-probabilities, up to the first token that differs: of a tie, either is right."""
    pairs = list(zip(got.token_ids, expected.token_ids, strict=True))
    num_compared = next((index for index, (a, b) in enumerate(pairs) if a != b), len(pairs)) + 1
    steps = zip(got.logprobs[:num_compared], expected.logprobs[:num_compared], strict=True)
    return max(abs(a - b) for a, b in steps)
