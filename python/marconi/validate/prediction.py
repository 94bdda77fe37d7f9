"""The replay of what a server was sent and answered: pools and policies as its own, and its own steps in their order.

A server reports for every request what its scheduler did with it (`engine/reports/moments.py`), and so in which order
requests waited, began, took memory, left states and ended, and how many steps of decoding lay between. The replay does
the same steps, at the same times of the cache's clock; what each finds, plans, keeps and evicts is its own.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import chain
from typing import NamedTuple

from marconi.engine.launch.policies import ONE_POOL, TWO_POOLS, PolicyChoice, hybrid_cache
from marconi.engine.reports.moments import Moment
from marconi.lifecycle.pools import Amount
from marconi.lifecycle.queue import Queue
from marconi.policy.base import Costs, PrefixFlops
from marconi.policy.eviction.utility import ALPHA
from marconi.policy.request import Request, pack
from marconi.replay.pools import JointPool, Pool, TwoPools
from marconi.replay.scheduling import Scheduling
from marconi.replay.server import ReplayedRequest, ServerReplay
from marconi.tree import Node
from marconi.validate.server import Completion, ServedCache

_WHOLE_PROMPT = 1 << 40


@dataclass(frozen=True, slots=True)
class Sent:
    """A request as the server had it."""

    prompt: Sequence[int]
    namespace: int
    answer: Completion

    @property
    def request(self) -> Request:
        """It, with its answer, at the time at which its prefill began."""
        ids, output = self.prompt, self.answer.output
        num_tokens = len(ids) + len(output)
        began = self.answer.steps.began
        assert began is not None, "it has ended"
        return Request(pack([*ids, *output]), len(ids), len(output), num_tokens, began.at_s, namespace=self.namespace)


class Predicted(NamedTuple):
    """The replay's answer on a request."""

    num_cached_tokens: int
    line: str


def replay_of(cache: ServedCache, flops: PrefixFlops) -> ServerReplay:
    """Build the replay that stands for a server; `flops` returns what a prefix saves, by its number of tokens."""
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
    pools: Pool = TwoPools(cache.kv_tokens.size, cache.state_slots.size)
    if cache.joint_bytes is not None:
        pools = JointPool(cache.joint_bytes.size, cache.kv_bytes_per_token, cache.state_bytes, page)
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
        self._queue = Queue(server.hybrid)
        self._runs: dict[int, ReplayedRequest] = {}
        self._decoding: dict[int, int] = {}
        """Tokens for which those that have been prefilled have memory."""
        self._predicted: dict[int, Predicted] = {}

    def run(self) -> list[Predicted]:
        """Do what the server did, in its order; what each request finds."""
        steps = sorted(chain.from_iterable(map(self._steps, range(len(self._sent)))))
        batch, before = list[tuple[int, int]](), steps[0][0]
        for moment, step, index, end in steps:
            if step is not _Step.TAKEN and batch:
                self._take(batch, before.at_s)
                batch = []
            self._decode(before, moment)
            before = moment
            match step:
                case _Step.QUEUED:
                    self._queue.come([(index, self._requests[index])])
                case _Step.UNQUEUED:
                    self._unqueue(index)
                case _Step.REMATCHED:
                    self._rematch(index)
                case _Step.TRIED:
                    self._try(index, moment.at_s)
                case _Step.MATCHED:
                    self._match(index, moment.at_s)
                case _Step.BEGAN:
                    self._begin(index, moment.at_s)
                case _Step.TAKEN:
                    # Those of one batch follow each other.
                    batch.append((index, end))
                case _Step.LEFT:
                    self._leave(index, end, moment.at_s)
                case _Step.ENDED:
                    self._end(index, moment.at_s)
        return [self._predicted[index] for index in range(len(self._sent))]

    def _steps(self, index: int) -> Iterator[tuple[Moment, "_Step", int, int]]:
        """Each with its moment, and the end of a chunk."""
        steps = self._sent[index].answer.steps
        for moment, step in (
            (steps.queued, _Step.QUEUED),
            (steps.unqueued, _Step.UNQUEUED),
            *((each, _Step.REMATCHED) for each in steps.rematched),
            *((each, _Step.TRIED) for each in steps.tried),
            (steps.matched or steps.began, _Step.MATCHED),
            (steps.began, _Step.BEGAN),
            (steps.ended, _Step.ENDED),
        ):
            if moment is not None:
                yield moment, step, index, 0
        for chunk in steps.chunks:
            yield chunk.taken, _Step.TAKEN, index, chunk.end
            if chunk.left is not None:
                yield chunk.left, _Step.LEFT, index, chunk.end

    # The queue

    def _unqueue(self, index: int) -> None:
        if index in self._queue.prompts:
            self._queue.go([index])

    def _rematch(self, index: int) -> None:
        self._queue.rematch(index, self._server.hybrid.match(self._requests[index]))

    # Running

    def _try(self, index: int, at_s: float) -> None:
        """A slot is made free for a copy of what it would resume from, whether or not it is taken into a prefill."""
        server, request = self._server, self._requests[index]
        source = server.hybrid.match(request).source
        self._make_room([index], Amount(0, 1), at_s, source)
        if source is not None and server.pools.spares(server.evictable(source), Amount(0, 1)):
            server.hybrid.lock(source)
            server.take_slots(1, at_s)
            server.pools.give(0, 1)
            server.hybrid.unlock(source)

    def _match(self, index: int, at_s: float) -> None:
        """Lock the state that it resumes from, and take a slot for a copy."""
        server, request = self._server, self._requests[index]
        self._rematch(index)
        if server.fits(request):
            source = server.hybrid.match(request).checkpoint
            self._make_room([index], Amount(0, 1), at_s, source if source.depth else None)
            self._runs[index] = server.run(request, at_s)

    def _begin(self, index: int, at_s: float) -> None:
        server, request, steps = self._server, self._requests[index], self._sent[index].answer.steps
        run = self._runs.get(index)
        if run is None:
            server.refuse(request)
            line = f"hit 0 of {request.num_prompt_tokens:,}; does not fit into the pools"
            self._predicted[index] = Predicted(0, line)
            return
        run.now_s = at_s
        shared = (*self._queue.prompts.shared(index, run.num_hit_tokens), *steps.elsewhere)
        run.begin(shared, steps.asked, steps.next_turn, steps.system_end)
        assert run.explanation is not None, "it has begun"
        self._predicted[index] = Predicted(run.num_hit_tokens, run.explanation.describe(at_s))

    def _take(self, batch: Sequence[tuple[int, int]], at_s: float) -> None:
        # A request that was retracted is prefilled again, answer included: the replay lets it run on.
        ends = {
            index: end
            for index, end in batch
            if index in self._runs and self._runs[index].num_computed < end <= self._requests[index].num_prompt_tokens
        }
        num_slots = self._server.scheduling.num_working_slots
        num_tokens = sum(end - self._runs[index].num_computed for index, end in ends.items())
        self._make_room([*ends], Amount(num_tokens, num_slots * len(ends)), at_s)
        for index in ends:
            self._runs[index].now_s = at_s
        if ends:
            self._server.take_chunks([(self._runs[index], end) for index, end in ends.items()])
        self._decoding |= {i: end for i, end in ends.items() if end == self._requests[i].num_prompt_tokens}

    def _leave(self, index: int, end: int, at_s: float) -> None:
        run = self._runs.get(index)
        if run is not None and run.num_computed == end:
            run.now_s = at_s
            run.leave_chunk()

    def _decode(self, before: Moment, after: Moment) -> None:
        """Take the memory of the steps of decoding between two moments, at an even pace."""
        num_steps = after.num_decodes - before.num_decodes
        for number in range(num_steps if self._decoding else 0):
            at_s = before.at_s + (after.at_s - before.at_s) * number / num_steps
            # Whoever has all tokens that it may have takes no part, though its end is yet to be noted.
            steps = {
                index: end + 1
                for index, end in self._decoding.items()
                if end < self._requests[index].num_processed_tokens
            }
            self._decoding |= steps
            self._make_room([*steps], Amount(len(steps), 0), at_s)
            self._server.free_tokens(self._server.page_tokens * len(steps), at_s)
            for index, end in steps.items():
                self._runs[index].now_s = at_s
                self._runs[index].decode(end)

    def _end(self, index: int, at_s: float) -> None:
        run = self._runs.pop(index, None)
        self._decoding.pop(index, None)
        if run is not None:
            run.now_s = at_s
            run.finish()

    def _make_room(self, keeping: Sequence[int], needs: Amount, at_s: float, source: Node | None = None) -> None:
        """Where the replay has less room than the server had, requests end before their time."""
        server = self._server
        needed = needs._replace(num_tokens=needs.num_tokens + (server.page_tokens - 1) * len(keeping))
        while not server.pools.spares(server.evictable(source), needed):
            others = [each for each in self._runs if each not in keeping]
            if not others:
                return
            self._end(min(others, key=lambda each: self._requests[each].num_processed_tokens), at_s)


class _Step(IntEnum):
    QUEUED = 0
    UNQUEUED = 1
    REMATCHED = 2
    TRIED = 3
    MATCHED = 4
    BEGAN = 5
    TAKEN = 6
    LEFT = 7
    ENDED = 8
