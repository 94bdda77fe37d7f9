"""The same model without a prefix cache: what every answer has to equal.

In fp32, so that equality is meant literally: token ids equal, log-probabilities within 1e-5.
"""

from .client import Completion, generate
from .scenarios import Exchange, Scenario

MAX_LOGPROB_DIFFERENCE = 1e-5


class Reference:
    """A server without a prefix cache; remembers what it answered."""

    def __init__(self, url: str):
        self.url = url
        self._answers: dict[tuple[tuple[int, ...], int], Completion] = {}

    def answer(self, prompt: tuple[int, ...], num_tokens: int = 24) -> Completion:
        """The answer to `prompt`, computed from its first token."""
        asked = prompt, num_tokens
        if asked not in self._answers:
            completion = generate(self.url, prompt, max_new_tokens=num_tokens)
            assert completion.num_cached_tokens == 0, "the reference must not have a prefix cache"
            self._answers[asked] = completion
        return self._answers[asked]

    def require_same(self, scenario: Scenario, url: str, strategy: str) -> None:
        """Assert that the server at `url` answers `scenario` the same, and reuses states where the scenario says so."""
        exchanges = scenario.ask(url)
        assert self.divergences(exchanges) == []
        if strategy in scenario.hits_under:
            hits = [exchange.completion.num_cached_tokens for exchange in exchanges]
            assert any(hits), "nothing was reused, so nothing was tested"

    def divergences(self, exchanges: list[Exchange]) -> list[str]:
        """What differs between `exchanges` and the reference, a line for each answer that does."""
        found = []
        for index, exchange in enumerate(exchanges):
            got = exchange.completion
            expected = self.answer(exchange.prompt, len(got.token_ids))
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


def difference(got: Completion, expected: Completion) -> float:
    """The largest of two answers' log-probabilities, up to the first token that differs: of a tie, either is right."""
    pairs = list(zip(got.token_ids, expected.token_ids, strict=True))
    num_compared = next((index for index, (a, b) in enumerate(pairs) if a != b), len(pairs)) + 1
    steps = zip(got.logprobs[:num_compared], expected.logprobs[:num_compared], strict=True)
    return max(abs(a - b) for a, b in steps)
