"""What the demo says: each request under both backends, as a table and as JSON."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from marconi.engine.demo.endpoint import Answer

STOCK, MARCONI = "stock", "marconi"
BACKENDS = (STOCK, MARCONI)


@dataclass(frozen=True, slots=True)
class Compared:
    """One request, by backend name."""

    answers: dict[str, Answer]

    @property
    def name(self) -> str:
        """The request's name, the same under every backend."""
        return self.answers[STOCK].name

    @property
    def equal(self) -> bool:
        """Whether prompt and answer are the same tokens under every backend."""
        return len({(a.num_prompt_tokens, a.tokens) for a in self.answers.values()}) == 1

    def to_json(self) -> dict[str, Any]:
        """The request as the demo's JSON holds it."""
        return {
            "name": self.name,
            "prompt_tokens": self.answers[STOCK].num_prompt_tokens,
            "cached_tokens": {backend: a.num_cached_tokens for backend, a in self.answers.items()},
            "ttft_s": {backend: round(a.ttft_s, 6) for backend, a in self.answers.items()},
            "equal": self.equal,
        }


def compare(runs: Mapping[str, Sequence[Answer]]) -> list[Compared]:
    """Join the requests of every run by their order; raises ValueError if the runs did different work."""
    names = {tuple(answer.name for answer in answers) for answers in runs.values()}
    if len(names) != 1:
        raise ValueError(f"the runs did different work: {sorted(names)}")
    return [Compared(dict(zip(runs, answers, strict=True))) for answers in zip(*runs.values(), strict=True)]


def table_of(requests: Sequence[Compared], title: str) -> Table:
    """The table, with the sums below it."""
    table = Table(
        title=title,
        caption="prompt and cached in tokens; first token in ms, one run each, no benchmark",
        show_footer=True,
        footer_style="bold",
    )
    prompt = sum(r.answers[STOCK].num_prompt_tokens for r in requests)
    table.add_column("request", footer="sum", no_wrap=True)
    table.add_column("prompt", justify="right", footer=f"{prompt}")
    for backend in BACKENDS:
        cached = sum(r.answers[backend].num_cached_tokens for r in requests)
        table.add_column(f"cached\n{backend}", justify="right", footer=f"{cached}")
    for backend in BACKENDS:
        table.add_column(f"first token\n{backend}", justify="right")
    table.add_column("answer", footer="equal" if all(r.equal for r in requests) else "DIFFERS")
    for request in requests:
        answers = [request.answers[backend] for backend in BACKENDS]
        table.add_row(
            request.name,
            str(answers[0].num_prompt_tokens),
            *(str(answer.num_cached_tokens) for answer in answers),
            *(f"{answer.ttft_s * 1000:.0f}" for answer in answers),
            "equal" if request.equal else "[bold red]DIFFERS[/]",
        )
    return table
