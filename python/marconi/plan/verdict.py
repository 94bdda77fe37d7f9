"""A plan in five lines: would this cache help, with which flags, in how much memory, over how many servers, how sure.

    alone     the project's default, as a server has it whose memory no flag divides: `best` in one pool
    sizes     alone in half, twice, four times the memory, and in all that could ever be used
    halves    stock SGLang and alone on either half of the traffic, in half the memory
    stored    alone with a store behind the host, where one is asked about: a sixth line says what it would win

A division is advised for this project's server alone: stock SGLang at another ratio stands in the advice above.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from marconi.model.serving import SERVED, Serving
from marconi.policy.catalog import SGLANG_MAMBA_RATIO, PolicySpec
from marconi.policy.request import Trace
from marconi.replay.memory import format_bytes
from marconi.replay.result import PolicyResult
from marconi.replay.task import UNBOUNDED_BYTES, ReplayInputs, Task

DEFAULT: Final = PolicySpec("best")
FLAG: Final = "--radix-cache-backend marconi"
TIMES: Final = (0.5, 2, 4)
"""Shares of the memory that was asked about, tried as well."""
LEAST_GAIN: Final = 0.01
"""The least share of tokens that counts as a difference."""
_SHARE: Final = 0.8
"""The share of a card's memory for weights and a request: what SGLang leaves of the smallest cards."""


def alone(memory_bytes: int, host_bytes: int = 0, *, has_planned_states: bool = True) -> Task:
    """The project's default, as a server has it without a flag that divides memory."""
    return Task(DEFAULT, memory_bytes, None if has_planned_states else SGLANG_MAMBA_RATIO, host_bytes)


def sizes(memories_bytes: Sequence[int], host_bytes: int = 0, *, has_planned_states: bool = True) -> tuple[Task, ...]:
    """List runs of the default alone in other amounts of memory than `memories_bytes`, rising."""
    smallest, largest = min(memories_bytes), max(memories_bytes)
    others = {int((smallest if times < 1 else largest) * times) for times in TIMES} - set(memories_bytes)
    amounts = (*sorted(others), UNBOUNDED_BYTES)
    return tuple(alone(num_bytes, host_bytes, has_planned_states=has_planned_states) for num_bytes in amounts)


def halves(inputs: ReplayInputs) -> tuple[ReplayInputs, ...]:
    """The traffic of every other session, or without sessions the earlier and the later half; none of too little."""
    requests = inputs.trace.requests
    sessions = dict.fromkeys(request.session for request in requests)
    if 1 < len(sessions) < len(requests):
        parity = {session: index % 2 for index, session in enumerate(sessions)}
        parts = [[each for each in requests if parity[each.session] == half] for half in (0, 1)]
    else:
        middle = len(requests) // 2
        parts = [list(requests[:middle]), list(requests[middle:])]
    if not all(parts):
        return ()
    return tuple(
        replace(inputs, trace=Trace(inputs.trace.name, inputs.trace.unit_tokens, tuple(part))) for part in parts
    )


@dataclass(frozen=True, slots=True)
class Point:
    """One amount of memory that is asked about."""

    stock: PolicyResult
    """Stock SGLang as it comes."""
    alone: PolicyResult
    best: PolicyResult
    """The project's default, however its memory is divided."""
    best_flags: str
    """SGLang's flags for its memory."""

    @property
    def num_bytes(self) -> int:
        """Its memory."""
        return self.stock.memory_bytes


@dataclass(frozen=True, slots=True)
class Cards:
    """The fewest cards of a device that hold a model's weights and a request."""

    num_cards: int
    card: str
    """Whose, and its memory."""
    weight_bytes: int

    @classmethod
    def of(cls, inputs: ReplayInputs, request_bytes: int) -> "Cards | None":
        """For requests of `request_bytes`; None for a device whose memory is not known, and where 64 are too few."""
        device, weights = inputs.device, inputs.model.num_parameters * inputs.model.storage.weight_itemsize
        room = int(_SHARE * device.memory_bytes) - request_bytes
        found = next((num for num in (1, 2, 4, 8, 16, 32, 64) if weights // num <= room), None)
        card = f"{device.name} of {format_bytes(int(device.memory_bytes))}"
        return None if found is None else cls(found, card, weights)


@dataclass(frozen=True, slots=True)
class Beside:
    """The trace of a plan, and its runs beside the candidates."""

    trace: Trace
    has_states: bool
    """True if the model has recurrent layers."""
    num_ranks: int
    sizes: tuple[PolicyResult, ...]
    """Rising; the last is in unlimited memory."""
    halves: tuple[tuple[PolicyResult, PolicyResult], ...]
    """Stock SGLang and alone."""
    serving: Serving = SERVED
    cards: Cards | None = None
    remarks: tuple[str, ...] = ()
    """Differences between the trace and what was served."""
    stored: tuple[PolicyResult, ...] = ()
    """The default alone with a store behind the host, at each amount of memory that is asked about."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The facts behind the five lines."""

    beside: Beside
    points: tuple[Point, ...]
    layouts: tuple[str, ...]
    """A sentence for each amount of memory that compares one server of several ranks with several servers."""

    @property
    def lines(self) -> tuple[str, ...]:
        """The five lines, and one of the store if one is asked about; one where there is nothing to gain."""
        if not self.beside.has_states:
            says = "the model has no recurrent layers, and its cache stays SGLang's own"
            return (f"Would it help? No: {says}.{self._remarks()}",)
        if self.beside.serving.why_not is not None:
            return (f"Would it help? No: {self.beside.serving.why_not}.{self._remarks()}",)
        if not self.points:
            return (f"Would it help? No: in this memory nothing fits.{self._remarks()}",)
        return (
            f"Would it help? {self._gain()}",
            f"Which flags? {self._flags()}",
            f"How much memory? {self._memory()}",
            *self._storage(),
            f"How many servers? {self._servers()}",
            f"How sure is it? {self._sureness()}",
        )

    def _gain(self) -> str:
        gains = [fewer(point.alone, point.stock) for point in self.points]
        texts = [
            f"{_fewer(gain, 'prompt tokens')} computed in {format_bytes(point.num_bytes)} "
            f"({_percent(point.alone.token_hit_rate)} cached, stock SGLang {_percent(point.stock.token_hit_rate)})"
            for gain, point in zip(gains, self.points, strict=True)
        ]
        if max(gains) < LEAST_GAIN:
            return f"No, stock SGLang is as good: {'; '.join(texts)}."
        return f"Yes, with the flag alone: {'; '.join(texts)}."

    def _flags(self) -> str:
        better = [
            f"{point.best_flags} computes {_percent(fewer(point.best, point.alone))} fewer still in "
            f"{format_bytes(point.num_bytes)}"
            for point in self.points
            if fewer(point.best, point.alone) >= LEAST_GAIN
        ]
        flag = " ".join(filter(None, (FLAG, self.beside.serving.flags)))
        return "; ".join((flag, *better)) + ("." if better else ", and nothing more.")

    def _memory(self) -> str:
        runs = sorted((*(point.alone for point in self.points), *self.beside.sizes), key=lambda run: run.memory_bytes)
        *limited, unlimited = runs
        shown = ", ".join(f"{format_bytes(run.memory_bytes)}: {_percent(run.token_hit_rate)}" for run in limited)
        enough = next((run for run in limited if run.token_hit_rate >= unlimited.token_hit_rate - LEAST_GAIN), None)
        most = f"unlimited memory would hit {_percent(unlimited.token_hit_rate)}"
        if enough is None:
            return f"{shown}; {most}: more still helps."
        return f"{shown}; {most}: {format_bytes(enough.memory_bytes)} is enough."

    def _storage(self) -> Iterator[str]:
        """The gain of a store behind the host over device and host alone."""
        alone = {point.num_bytes: point.alone for point in self.points}
        pairs = [(run, alone[run.memory_bytes]) for run in self.beside.stored if run.memory_bytes in alone]
        texts = [
            f"{_fewer(fewer(run, than), 'prompt tokens')} computed in {format_bytes(run.memory_bytes)} and "
            f"{format_bytes(run.host_bytes)} on the host ({_percent(run.token_hit_rate)} cached), "
            f"{run.prefill_s:.3g} s of prefill, reading and loading in place of {than.prefill_s:.3g} s, "
            f"{format_bytes(run.traffic.num_written_bytes)} written and {format_bytes(run.traffic.num_read_bytes)} read"
            for run, than in pairs
            if run.traffic is not None
        ]
        if texts:
            helps = any(fewer(run, than) >= LEAST_GAIN for run, than in pairs)
            yield f"Would a disk help? {'Yes' if helps else 'No'}, {pairs[0][0].storage}: {'; '.join(texts)}."

    def _servers(self) -> str:
        cards = self.beside.cards
        if cards is not None and cards.num_cards > self.beside.num_ranks:
            return (
                f"One of {cards.num_cards} ranks or more: {format_bytes(cards.weight_bytes)} of weights (16 bits) do "
                f"not fit fewer cards ({cards.card}); --tensor-parallel {cards.num_cards} plans for them."
            )
        if self.layouts:
            return " ".join(self.layouts)
        if self.beside.num_ranks > 1:
            return f"One of {self.beside.num_ranks} ranks; with a measured latency others are not compared."
        return "One of one rank; --tensor-parallel N compares one server of N ranks with N servers behind a router."

    def _sureness(self) -> str:
        requests = self.beside.trace.requests
        sessions = {request.session for request in requests} - {-1}
        of_sessions = f" of {len(sessions):,} sessions" if sessions else ""
        minutes = (requests[-1].arrival_s - requests[0].arrival_s) / 60
        span = f"{minutes:.0f} minutes" if minutes < 120 else f"{minutes / 60:.0f} hours"
        seen = f"The trace has {len(requests):,} requests{of_sessions} in {span}"
        if not self.beside.halves:
            return f"{seen}, too few to split.{self._remarks()}"
        gains = " and ".join(_fewer(fewer(ours, stock), "tokens") for stock, ours in self.beside.halves)
        return f"{seen}; on either half of them, in half the memory, the flag alone computes {gains}.{self._remarks()}"

    def _remarks(self) -> str:
        return f" Note: {'; '.join(self.beside.remarks)}." if self.beside.remarks else ""


def fewer(run: PolicyResult, than: PolicyResult) -> float:
    """Share of the tokens that `than` computes which `run` need not."""
    before = than.num_prompt_tokens - than.num_hit_tokens
    return 1 - (run.num_prompt_tokens - run.num_hit_tokens) / before if before else 0.0


def _fewer(gain: float, what: str) -> str:
    return f"{_percent(gain)} fewer {what}" if gain >= 0 else f"{_percent(-gain)} more {what}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
