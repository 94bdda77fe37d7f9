"""The replay of what a server was sent and answered: its own cache's pools and policies, the server's clock.

    one by one    each request from its match to its end before the next, as the server had it
    together      the steps of all requests in order of the server's clock: each comes to the queue, begins (locks what
                  it starts from, plans), has its prefill behind it (its states join the tree) and ends

What happened within one tick of the clock is taken in the order of the scheduler's loop: what comes, what begins, what
is done. A request that has no room beside those that run begins once the first of them has ended.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from marconi.engine.policies import ONE_POOL, TWO_POOLS, PolicyChoice, hybrid_cache
from marconi.policy.base import Costs, PrefixFlops
from marconi.policy.eviction.utility import ALPHA
from marconi.policy.request import Request, pack
from marconi.policy.waiting import WaitingPrompts
from marconi.replay.pools import JointPool, Pool, Pools
from marconi.replay.scheduling import Scheduling
from marconi.replay.server import RunningRequest, ServerReplay
from marconi.validate.server import Answer, ServedCache, Times

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
        began_s = self.answer.times.began_s
        return Request(pack([*ids, *output]), len(ids), len(output), num_tokens, began_s, namespace=self.namespace)


@dataclass(frozen=True, slots=True)
class Predicted:
    """What the replay says of a request."""

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


def one_by_one(server: ServerReplay, sent: Sequence[Sent]) -> list[Predicted]:
    """Predict what each of `sent` finds, which was answered before the next was sent."""
    predicted = []
    for each in sent:
        request, times = each.request, each.answer.times
        if not server.fits(request):
            server.refuse(request)
            predicted.append(_too_large(request))
            continue
        run = server.run(request, times.began_s)
        run.begin()
        run.prefill(times.prefilled_s)
        run.now_s = times.ended_s
        run.decode()
        run.finish()
        predicted.append(_predicted(run, times))
    return predicted


def together(server: ServerReplay, sent: Sequence[Sent]) -> list[Predicted]:
    """Predict what each of `sent` finds, some of which were in flight beside each other."""
    return _Loop(server, sent).run()


class _Step(IntEnum):
    """In the order of one pass of the scheduler."""

    COMES = 0
    BEGINS = 1
    IS_PREFILLED = 2
    ENDS = 3


class _Loop:
    def __init__(self, server: ServerReplay, sent: Sequence[Sent]) -> None:
        self._server = server
        self._sent = sent
        self._requests = [each.request for each in sent]
        self._waiting = WaitingPrompts(server.page_tokens)
        self._runs: dict[int, RunningRequest] = {}
        self._has_prefilled: set[int] = set()
        self._predicted: dict[int, Predicted] = {}

    def run(self) -> list[Predicted]:
        steps = sorted(
            (at_s, step, index)
            for index, each in enumerate(self._sent)
            for at_s, step in zip(_in_order(each.answer.times), _Step, strict=True)
        )
        for at_s, step, index in steps:
            match step:
                case _Step.COMES:
                    self._come(index)
                case _Step.BEGINS:
                    self._begin(index, at_s)
                case _Step.IS_PREFILLED:
                    self._prefill(index, at_s)
                case _Step.ENDS:
                    self._end(index, at_s)
        return [self._predicted[index] for index in range(len(self._sent))]

    def _come(self, index: int) -> None:
        hybrid = self._server.hybrid
        if not self._waiting.is_full:
            self._waiting.add(index, self._requests[index])
            hybrid.queue((), [(index, hybrid.match(self._requests[index]).checkpoint)])

    def _begin(self, index: int, at_s: float) -> None:
        server, request = self._server, self._requests[index]
        if index in self._waiting:
            server.hybrid.queue([index], ())
        if server.fits(request):
            while self._runs and not server.has_room(request, server.hybrid.match(request), self._runs.values()):
                self._end(min(self._runs, key=lambda each: self._sent[each].answer.times.ended_s), at_s)
            run = self._runs[index] = server.run(request, at_s)
            plan = run.begin(self._waiting.shared(index, run.num_hit_tokens))
            self._waiting.expect(index, run.lease.request, plan.depths)
            self._predicted[index] = _predicted(run, self._sent[index].answer.times)
        else:
            server.refuse(request)
            self._predicted[index] = _too_large(request)
        if index in self._waiting:
            self._waiting.remove(index)

    def _prefill(self, index: int, at_s: float) -> None:
        if index in self._runs and index not in self._has_prefilled:
            self._runs[index].now_s = at_s
            self._runs[index].prefill()
            self._has_prefilled.add(index)
            self._waiting.expect_nothing(index)

    def _end(self, index: int, at_s: float) -> None:
        self._prefill(index, at_s)
        run = self._runs.pop(index, None)
        if run is not None:
            run.now_s = at_s
            run.decode()
            run.finish()


def _in_order(times: Times) -> tuple[float, float, float, float]:
    return times.came_s, times.began_s, times.prefilled_s, times.ended_s


def _predicted(run: RunningRequest, times: Times) -> Predicted:
    assert run.explanation is not None, "it has begun"
    return Predicted(run.num_hit_tokens, run.explanation.describe(times.began_s))


def _too_large(request: Request) -> Predicted:
    return Predicted(0, f"hit 0 of {request.num_prompt_tokens:,}; does not fit into the pools")
