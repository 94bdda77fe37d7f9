"""The demo's result: each kind of traffic under both backends, as a table, a sentence and JSON."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.box import SIMPLE
from rich.table import Table

from marconi_cpu.demo.endpoint import TimedAnswer

STOCK, MARCONI = "stock", "marconi"
BACKENDS = (STOCK, MARCONI)


@dataclass(frozen=True, slots=True)
class Compared:
    """One request, by backend name."""

    answers: dict[str, TimedAnswer]

    @property
    def kind(self) -> str:
        """The request's kind, the same under every backend."""
        return self.answers[STOCK].kind

    @property
    def name(self) -> str:
        """The request's name, the same under every backend."""
        return self.answers[STOCK].name

    @property
    def num_prompt_tokens(self) -> int:
        """Answer of stock's server; where the other's differs, the request is not equal."""
        return self.answers[STOCK].num_prompt_tokens

    @property
    def equal(self) -> bool:
        """True if prompt and answer are the same tokens under every backend."""
        return len({(a.num_prompt_tokens, a.tokens) for a in self.answers.values()}) == 1

    def to_json(self) -> dict[str, Any]:
        """The request as the demo's JSON holds it."""
        return {
            "kind": self.kind,
            "name": self.name,
            "prompt_tokens": self.num_prompt_tokens,
            "cached_tokens": {backend: a.num_cached_tokens for backend, a in self.answers.items()},
            "ttft_s": {backend: round(a.ttft_s, 6) for backend, a in self.answers.items()},
            "equal": self.equal,
        }


def compare(runs: Mapping[str, Sequence[TimedAnswer]]) -> list[Compared]:
    """Join the requests of every run by their order; raises ValueError if the runs did different work."""
    names = {tuple((answer.kind, answer.name) for answer in answers) for answers in runs.values()}
    if len(names) != 1:
        raise ValueError(f"the runs did different work: {sorted(names)}")
    return [Compared(dict(zip(runs, answers, strict=True))) for answers in zip(*runs.values(), strict=True)]


@dataclass(frozen=True, slots=True)
class Sum:
    """Requests taken together: tokens of their prompts, of those the ones computed, and the median first token."""

    num_requests: int
    num_prompt_tokens: int
    num_computed_tokens: dict[str, int]
    ttft_s: dict[str, float]
    num_different: int

    @classmethod
    def of(cls, requests: Sequence[Compared]) -> "Sum":
        """Sum up at least one request."""
        answers = {backend: [request.answers[backend] for request in requests] for backend in BACKENDS}
        return cls(
            num_requests=len(requests),
            num_prompt_tokens=sum(request.num_prompt_tokens for request in requests),
            num_computed_tokens={
                backend: sum(a.num_prompt_tokens - a.num_cached_tokens for a in some)
                for backend, some in answers.items()
            },
            ttft_s={backend: statistics.median(a.ttft_s for a in some) for backend, some in answers.items()},
            num_different=sum(not request.equal for request in requests),
        )

    def to_json(self) -> dict[str, Any]:
        """Convert to the demo's JSON."""
        return {
            "requests": self.num_requests,
            "prompt_tokens": self.num_prompt_tokens,
            "computed_tokens": self.num_computed_tokens,
            "median_ttft_s": {backend: round(seconds, 6) for backend, seconds in self.ttft_s.items()},
            "different_answers": self.num_different,
        }


def by_kind(requests: Sequence[Compared]) -> dict[str, Sum]:
    """A sum for each kind, in the order in which they come."""
    kinds = dict.fromkeys(request.kind for request in requests)
    return {kind: Sum.of([request for request in requests if request.kind == kind]) for kind in kinds}


def table_of(requests: Sequence[Compared], title: str) -> Table:
    """A row a kind, and all together below."""
    total = Sum.of(requests)
    table = Table(
        title=title,
        caption="median first token in ms, one run each, no benchmark",
        box=SIMPLE,
        collapse_padding=True,
        pad_edge=False,
        show_footer=True,
        footer_style="bold",
    )
    table.add_column("traffic", footer="sum", no_wrap=True)
    for name, footer in (
        ("asked", f"{total.num_requests}"),
        ("prompt\ntokens", f"{total.num_prompt_tokens}"),
        *((f"computed\n{backend}", f"{total.num_computed_tokens[backend]}") for backend in BACKENDS),
        *((f"first\ntoken\n{backend}", f"{total.ttft_s[backend] * 1000:.0f}") for backend in BACKENDS),
    ):
        table.add_column(name, justify="right", footer=footer)
    table.add_column("answers", footer="DIFFER" if total.num_different else "equal")
    for kind, row in by_kind(requests).items():
        table.add_row(
            kind,
            f"{row.num_requests}",
            f"{row.num_prompt_tokens}",
            *(f"{row.num_computed_tokens[backend]}" for backend in BACKENDS),
            *(f"{row.ttft_s[backend] * 1000:.0f}" for backend in BACKENDS),
            "[bold red]DIFFER[/]" if row.num_different else "equal",
        )
    return table


def sentence_of(requests: Sequence[Compared]) -> str:
    """The result in one sentence."""
    total = Sum.of(requests)
    stock, ours = (total.num_computed_tokens[backend] for backend in BACKENDS)
    change = "as many" if ours == stock else f"{abs(stock - ours) / stock:.0%} {'fewer' if ours < stock else 'more'}"
    answers = (
        f"and {total.num_different} of {total.num_requests} answers DIFFER"
        if total.num_different
        else "with the same answers"
    )
    return (
        f"Of {total.num_prompt_tokens:,} prompt tokens stock SGLang computed {stock:,}, Marconi {ours:,}: "
        f"{change}, {answers}."
    )
