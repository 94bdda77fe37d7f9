"""A plan in five lines: would this cache help, with which flags, in how much memory, over how many servers, how sure.

    alone     the project's default, as a server has it whose memory no flag divides: `best` in one pool
    sizes     alone in half, twice, four times the memory, and in all that could ever be used
    halves    stock SGLang and alone on either half of the traffic, in half the memory
    stored    alone with a store behind the host, where one is asked about: a sixth line says what it would win

A division is advised for this project's server alone: stock SGLang at another ratio stands in the advice above.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from marconi.model.serving import SERVED, Serving
from marconi.plan.advice import LEAST_GAIN, Advice, fewer, flags
from marconi.replay.memory import format_bytes
from marconi.replay.result import PolicyResult, Report
from marconi.replay.task import ReplayInputs, Task

FLAG: Final = "--radix-cache-backend marconi"
_SHARE: Final = 0.8
"""The share of a card's memory for weights and a request: what SGLang leaves of the smallest cards."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Every candidate's run, the advice for each amount of memory, and the runs beside them."""

    report: Report
    advice: tuple[Advice, ...]
    sizes: tuple[PolicyResult, ...]
    """Rising; the last is in unlimited memory."""
    halves: tuple[tuple[PolicyResult, PolicyResult], ...]
    """Stock SGLang and alone."""
    stored: tuple[PolicyResult, ...] = ()
    """The default alone with a store behind the host, at each amount of memory that is asked about."""
    serving: Serving = SERVED
    num_cards: int | None = None
    """The fewest that hold the weights and a request (`fewest_cards`)."""

    def to_json(self) -> dict[str, Any]:
        """Convert to the result file's JSON: a report's fields, the advice, the runs with storage and the verdict."""
        advice = [each.to_json() for each in self.advice]
        stored = [run.to_json(timings=False) for run in self.stored]
        with_storage = {"with_storage": stored} if stored else {}
        return {**self.report.to_json(), "advice": advice, **with_storage, "verdict": list(self.verdict)}

    @property
    def verdict(self) -> tuple[str, ...]:
        """The five lines, and one of the store if one is asked about; one where there is nothing to gain."""
        if not self.report.inputs.model.state_bytes:
            says = "the model has no recurrent layers, and its cache stays SGLang's own"
            return (f"Would it help? No: {says}.{self._remarks()}",)
        if self.serving.why_not is not None:
            return (f"Would it help? No: {self.serving.why_not}.{self._remarks()}",)
        if not self._points:
            return (f"Would it help? No: in this memory nothing fits.{self._remarks()}",)
        return (
            f"Would it help? {self._gain()}",
            f"Which flags? {self._flags()}",
            f"How much memory? {self._memory()}",
            *self._storage(),
            f"How many servers? {self._servers()}",
            f"How sure is it? {self._sureness()}",
        )

    @property
    def launch_flags(self) -> str | None:
        """Flags of a server in the first memory in which it computes less than stock SGLang; None if in none."""
        helped = (point for point in self._points if fewer(point[1], point[0]) >= LEAST_GAIN)
        if self.serving.why_not is not None or (point := next(helped, None)) is None:
            return None
        _, alone, ours = point
        task, num_ranks = alone.task, max(self.num_cards or 1, self.report.inputs.model.tensor_parallel)
        return " ".join(
            (
                self._flag,
                *((f"--tp-size {num_ranks}",) if num_ranks > 1 else ()),
                *((flags(ours),) if fewer(ours, alone) >= LEAST_GAIN else ()),
                *((_host_flags(task),) if task.host_bytes else ()),
            )
        )

    @property
    def _flag(self) -> str:
        return " ".join(filter(None, (FLAG, self.serving.flags)))

    @property
    def _points(self) -> list[tuple[PolicyResult, PolicyResult, PolicyResult]]:
        """Stock SGLang as it comes, the default alone, and best divided, in each memory in which something fits."""
        return [
            (each.default, each.alone, each.ours or each.alone)
            for each in self.advice
            if each.alone is not None and each.best is not None
        ]

    def _gain(self) -> str:
        texts = [
            f"{_fewer(fewer(alone, stock), 'prompt tokens')} computed in {format_bytes(stock.task.memory_bytes)} "
            f"({_percent(alone.token_hit_rate)} cached, P95 TTFT {alone.ttft_s.p95:.3g} s; stock SGLang "
            f"{_percent(stock.token_hit_rate)}, {stock.ttft_s.p95:.3g} s)"
            for stock, alone, _ in self._points
        ]
        if all(fewer(alone, stock) < LEAST_GAIN for stock, alone, _ in self._points):
            return f"No, stock SGLang is as good: {'; '.join(texts)}."
        return f"Yes, with the flag alone: {'; '.join(texts)}."

    def _flags(self) -> str:
        better = [
            f"{flags(ours)} computes {_percent(fewer(ours, alone))} fewer still in "
            f"{format_bytes(alone.task.memory_bytes)}"
            for _, alone, ours in self._points
            if fewer(ours, alone) >= LEAST_GAIN
        ]
        return "; ".join((self._flag, *better)) + ("." if better else ", and nothing more.")

    def _memory(self) -> str:
        runs = sorted((*(alone for _, alone, _ in self._points), *self.sizes), key=lambda run: run.task.memory_bytes)
        *limited, unlimited = runs
        shown = ", ".join(f"{format_bytes(run.task.memory_bytes)}: {_percent(run.token_hit_rate)}" for run in limited)
        enough = next((run for run in limited if run.token_hit_rate >= unlimited.token_hit_rate - LEAST_GAIN), None)
        most = f"unlimited memory would hit {_percent(unlimited.token_hit_rate)}"
        if enough is None:
            return f"{shown}; {most}: more still helps."
        return f"{shown}; {most}: {format_bytes(enough.task.memory_bytes)} is enough."

    def _storage(self) -> Iterator[str]:
        """The gain of a store behind the host over device and host alone."""
        alone = {each.task.memory_bytes: each for _, each, _ in self._points}
        pairs = [(run, alone[run.task.memory_bytes]) for run in self.stored if run.task.memory_bytes in alone]
        texts = [
            f"{_fewer(fewer(run, than), 'prompt tokens')} computed in {format_bytes(run.task.memory_bytes)} and "
            f"{format_bytes(run.task.host_bytes)} on the host ({_percent(run.token_hit_rate)} cached), "
            f"{run.prefill_s:.3g} s of prefill, reading and loading in place of {than.prefill_s:.3g} s, "
            f"{format_bytes(run.traffic.num_written_bytes)} written and {format_bytes(run.traffic.num_read_bytes)} read"
            for run, than in pairs
            if run.traffic is not None
        ]
        if texts:
            helps = any(fewer(run, than) >= LEAST_GAIN for run, than in pairs)
            yield f"Would a disk help? {'Yes' if helps else 'No'}, {pairs[0][0].task.storage}: {'; '.join(texts)}."

    def _servers(self) -> str:
        inputs, num_cards = self.report.inputs, self.num_cards
        device, num_ranks = inputs.device, inputs.model.tensor_parallel
        if num_cards is not None and num_cards > num_ranks:
            return (
                f"One of {num_cards} ranks or more: {format_bytes(inputs.model.weight_bytes)} of weights (16 bits) do "
                f"not fit fewer cards ({device.name} of {format_bytes(int(device.memory_bytes))}); --tensor-parallel "
                f"{num_cards} plans for them."
            )
        if layouts := " ".join(line for advice in self.advice for line in advice.of_layouts()):
            return layouts
        if num_ranks > 1:
            return f"One of {num_ranks} ranks; with a measured latency others are not compared."
        return "One of one rank; --tensor-parallel N compares one server of N ranks with N servers behind a router."

    def _sureness(self) -> str:
        requests = self.report.inputs.trace.requests
        sessions = {request.session for request in requests} - {-1}
        of_sessions = f" of {len(sessions):,} sessions" if sessions else ""
        minutes = (requests[-1].arrival_s - requests[0].arrival_s) / 60
        span = f"{minutes:.0f} minutes" if minutes < 120 else f"{minutes / 60:.0f} hours"
        seen = f"The trace has {len(requests):,} requests{of_sessions} in {span}"
        if not self.halves:
            return f"{seen}, too few to split.{self._remarks()}"
        gains = " and ".join(_fewer(fewer(ours, stock), "tokens") for stock, ours in self.halves)
        return f"{seen}; on either half of them, in half the memory, the flag alone computes {gains}.{self._remarks()}"

    def _remarks(self) -> str:
        return f" Note: {'; '.join(remarks)}." if (remarks := self.report.inputs.remarks) else ""


def fewest_cards(inputs: ReplayInputs, request_bytes: int) -> int | None:
    """The fewest cards that hold the weights and `request_bytes`; None if their memory is unknown or 64 do not."""
    room = int(_SHARE * inputs.device.memory_bytes) - request_bytes
    return next((num for num in (1, 2, 4, 8, 16, 32, 64) if inputs.model.weight_bytes // num <= room), None)


def _host_flags(task: Task) -> str:
    return f"--enable-hierarchical-cache --hicache-ratio {task.host_bytes / task.memory_bytes:.3g}"


def _fewer(gain: float, what: str) -> str:
    return f"{_percent(gain)} fewer {what}" if gain >= 0 else f"{_percent(-gain)} more {what}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
