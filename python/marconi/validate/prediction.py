"""The replay of what a server was sent and answered: pools and policies as its own, and its own steps in their order.

A server tells of every request what its scheduler did with it (`engine/moments.py`), and so in which order requests
waited, began, took memory, left states and ended. The replay does the same steps, at the same times of the cache's
clock; what each finds, plans, keeps and evicts is its own. One thing it is not told: when a token was decoded, which it
takes to be at an even pace.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import chain

from marconi.engine.moments import Moment
from marconi.engine.policies import ONE_POOL, TWO_POOLS, PolicyChoice, hybrid_cache
from marconi.policy.base import Costs, PrefixFlops
from marconi.policy.eviction.utility import ALPHA
from marconi.policy.request import Request, pack
from marconi.policy.waiting import WaitingPrompts
from marconi.replay.pools import Amount, JointPool, Pool, Pools
from marconi.replay.scheduling import Scheduling
from marconi.replay.server import RunningRequest, ServerReplay
from marconi.tree import Node
from marconi.validate.server import Answer, ServedCache

_WHOLE_PROMPT = 1 << 40


@dataclass(frozen=True, slots=True)
class Sent:
    """A request as the server had it."""

    prompt: Sequence[int]
    namespace: int
    answer: Answer

    @property
    def request(self) -> Request:
        """It, with its answer, at the time at which its prefill began."""
        ids, output = self.prompt, self.answer.output
        num_tokens = len(ids) + len(output)
        began = self.answer.steps.began
        assert began is not None, "it has ended"
        return Request(pack([*ids, *output]), len(ids), len(output), num_tokens, began.at_s, namespace=self.namespace)


@dataclass(frozen=True, slots=True)
class Predicted:
    """The replay's answer on a request."""

    num_cached_tokens: int
    line: str


def replay_of(cache: ServedCache, flops: PrefixFlops) -> ServerReplay:
    """Build the replay that stands for a server; `flops` is what a prefix of so many tokens saves."""
    settings, page = cache.settings, cache.settings.page_tokens
    choice = PolicyChoice(
        cache.eviction,
        ALPHA if cache.alpha is None else cache.alpha,
        settings.ttft_budget_s,
        settings.admission,
        settings.max_ghosts,
        settings.max_ghost_tokens,
        settings.step_tokens,
    )
    costs = Costs(cache.kv_bytes_per_token, cache.state_bytes, flops)
    pools: Pool = Pools(cache.num_tokens, cache.num_slots)
    if cache.joint_bytes is not None:
        pools = JointPool(cache.joint_bytes, cache.kv_bytes_per_token, cache.state_bytes, page)
    needs = TWO_POOLS if cache.joint_bytes is None else ONE_POOL
    scheduling = Scheduling(
        settings.chunk_tokens or _WHOLE_PROMPT,
        settings.num_working_slots,
        settings.num_lent_slots,
        cache.track_tokens,
        settings.num_rows,
    )
    return ServerReplay(hybrid_cache(choice, costs, page, page, None, needs=needs), pools, scheduling)


class Prediction:
    """A replay of requests that a server has answered, one after the other or beside each other."""

    def __init__(self, server: ServerReplay, sent: Sequence[Sent]) -> None:
        """`server` is new; `sent` are all that its server had since it was flushed, in any order."""
        self._server = server
        self._sent = sent
        self._requests = [each.request for each in sent]
        self._waiting = WaitingPrompts(server.page_tokens)
        self._leaving: list[int] = []
        """Requests that had ended before the server looked at its queue again, as it does when the next one waits."""
        self._runs: dict[int, RunningRequest] = {}
        self._predicted: dict[int, Predicted] = {}

    def run(self) -> list[Predicted]:
        """Do what the server did, in its order; what each request finds."""
        steps = sorted(chain.from_iterable(map(self._steps, range(len(self._sent)))))
        batch, taken_s = list[tuple[int, int]](), 0.0
        for moment, step, index, end in steps:
            if step is not _Step.TAKEN and batch:
                self._take(batch, taken_s)
                batch = []
            match step:
                case _Step.QUEUED:
                    self._queue(index)
                case _Step.UNQUEUED:
                    self._unqueue(index)
                case _Step.BEGAN:
                    self._begin(index, moment.at_s)
                case _Step.TAKEN:
                    # Those of one batch follow each other.
                    batch.append((index, end))
                    taken_s = moment.at_s
                case _Step.LEFT:
                    self._leave(index, end, moment.at_s)
                case _Step.DECODED:
                    self._decode(index, end, moment.at_s)
                case _Step.ENDED:
                    self._end(index, moment.at_s)
        return [self._predicted[index] for index in range(len(self._sent))]

    def _steps(self, index: int) -> Iterator[tuple[Moment, "_Step", int, int]]:
        """Each with its moment, and the end of a chunk."""
        steps = self._sent[index].answer.steps
        for moment, step in (
            (steps.queued, _Step.QUEUED),
            (steps.unqueued, _Step.UNQUEUED),
            (steps.began, _Step.BEGAN),
            (steps.ended, _Step.ENDED),
        ):
            if moment is not None:
                yield moment, step, index, 0
        for chunk in steps.chunks:
            yield chunk.taken, _Step.TAKEN, index, chunk.end
            if chunk.left is not None:
                yield chunk.left, _Step.LEFT, index, chunk.end
        if steps.chunks and steps.chunks[-1].left is not None and steps.ended is not None:
            first, last = steps.chunks[-1].left, steps.ended
            request = self._requests[index]
            num_steps = request.num_processed_tokens - request.num_prompt_tokens
            for number in range(num_steps):
                yield (
                    _between(first, last, number / num_steps),
                    _Step.DECODED,
                    index,
                    request.num_prompt_tokens + number + 1,
                )

    def _queue(self, index: int) -> None:
        hybrid, request = self._server.hybrid, self._requests[index]
        for each in self._leaving:
            self._unqueue(each)
        self._leaving = []
        self._waiting.add(index, request)
        hybrid.queue((), [(index, hybrid.match(request).checkpoint)])

    def _unqueue(self, index: int) -> None:
        if index in self._waiting:
            self._waiting.remove(index)
            self._server.hybrid.queue([index], ())

    def _begin(self, index: int, at_s: float) -> None:
        server, request = self._server, self._requests[index]
        if not server.fits(request):
            server.refuse(request)
            line = f"hit 0 of {request.num_prompt_tokens:,}; does not fit into the pools"
            self._predicted[index] = Predicted(0, line)
            return
        source = server.hybrid.match(request).checkpoint
        if self._sent[index].answer.steps.unqueued is None and index in self._waiting:
            self._leaving.append(index)
        if server.hybrid.awaits(index):
            server.hybrid.queue((), [(index, source)])
        self._make_room([index], Amount(0, 1), at_s, source if source.depth else None)
        run = self._runs[index] = server.run(request, at_s)
        steps = self._sent[index].answer.steps
        plan = run.begin(self._waiting.shared(index, run.num_hit_tokens), steps.asked, steps.next_turn)
        self._waiting.expect(index, run.lease.request, plan.depths)
        assert run.explanation is not None, "it has begun"
        self._predicted[index] = Predicted(run.num_hit_tokens, run.explanation.describe(at_s))

    def _take(self, batch: Sequence[tuple[int, int]], at_s: float) -> None:
        num_slots = self._server.scheduling.num_working_slots
        num_tokens = sum(end - self._runs[index].num_computed for index, end in batch if index in self._runs)
        self._make_room([index for index, _ in batch], Amount(num_tokens, num_slots * len(batch)), at_s)
        runs = [(run, end) for index, end in batch if (run := self._runs.get(index)) and end > run.num_computed]
        for run, _ in runs:
            run.now_s = at_s
        self._server.take_chunks(runs)

    def _leave(self, index: int, end: int, at_s: float) -> None:
        run = self._runs.get(index)
        if run is None or run.num_computed != end:
            return
        run.now_s = at_s
        run.leave_chunk()
        if end == self._requests[index].num_prompt_tokens:
            self._waiting.expect_nothing(index)

    def _decode(self, index: int, end: int, at_s: float) -> None:
        run = self._runs.get(index)
        if run is not None:
            self._make_room([index], Amount(1, 0), at_s)
            run.now_s = at_s
            run.decode(end)

    def _end(self, index: int, at_s: float) -> None:
        run = self._runs.pop(index, None)
        if run is not None:
            run.now_s = at_s
            run.finish()
            self._waiting.expect_nothing(index)

    def _make_room(self, keeping: Sequence[int], needs: Amount, at_s: float, source: Node | None = None) -> None:
        """Where the replay has less room than the server had, requests end before their time."""
        server = self._server
        needed = needs._replace(num_tokens=server.pages(needs.num_tokens) + server.page_tokens)
        while not server.pools.spares(server.evictable(source), needed):
            others = [each for each in self._runs if each not in keeping]
            if not others:
                return
            self._cut_short(min(others, key=lambda each: self._requests[each].num_processed_tokens), at_s)

    def _cut_short(self, index: int, at_s: float) -> None:
        """End a request at once: what it has left stays."""
        run = self._runs.pop(index)
        run.now_s = at_s
        run.finish()
        self._waiting.expect_nothing(index)


class _Step(IntEnum):
    QUEUED = 0
    UNQUEUED = 1
    BEGAN = 2
    TAKEN = 3
    LEFT = 4
    DECODED = 5
    ENDED = 6


def _between(first: Moment, last: Moment, share: float) -> Moment:
    """A moment that nobody has noted."""
    number = first.number + share * (last.number - first.number)
    return Moment(number, first.at_s + share * (last.at_s - first.at_s))
