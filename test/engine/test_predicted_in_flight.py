"""Requests that wait for each other and run beside each other: what the steps of the real cache tell is enough.

A replay that is given them, as `marconi validate` gives it a server's, hits what the real cache hits, request by
request.
"""

from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import pytest

from marconi.engine.cache.scheduler import notes_of
from marconi.engine.launch.policies import PolicyChoice
from marconi.engine.reports.explain import EXPLAIN
from marconi.engine.reports.moments import Chunk, Moment, Steps
from marconi.policy.request import Request, unpack
from marconi.replay.server import ServerReplay
from marconi.validate.prediction import Prediction, Sent
from marconi.validate.server import Completion
from rig.clock import TraceClock
from rig.pools import Division, HostPools, Strategy, marconi
from rig.scheduler import HostScheduler, Outcome
from rig.workload import Origin, Script

from .host_replays import Setting, agents, forks, replayed

pytestmark = pytest.mark.usefixtures("sglang_configuration")

SETTINGS = {
    "extra-buffer": Setting(1, Strategy.EXTRA_BUFFER, 4500, 22, max_running=4),
    "no-buffer": Setting(1, Strategy.NO_BUFFER, 4500, 16, max_running=4),
    "page-16": Setting(16, Strategy.EXTRA_BUFFER, 4800, 26, max_running=4),
}
REQUESTS = (*agents(seed=5, num_sessions=12), *forks(seed=6, num_requests=60))
CHOICE = PolicyChoice("best")
NUM_AT_ONCE = 8
STEP_S = 0.02


def served(setting: Setting, division: Division, requests: Sequence[Request]) -> tuple[ServerReplay, list[Sent]]:
    """All of `requests` by the real cache, and a new replay of it."""
    setting = replace(setting, memory=division)
    cache, asked = asked_of_the_cache(setting.host, requests, {EXPLAIN: True})
    joint_bytes = cache.pools.memory.num_bytes if division is Division.ONE_POOL else 0
    replay = replayed(setting, CHOICE, joint_bytes)
    return replay, [_sent(request, req) for request, req in asked]


def asked_of_the_cache(
    host: HostPools, requests: Sequence[Request], custom_params: dict[str, Any]
) -> tuple[Any, list[tuple[Request, Any]]]:
    """The real cache, once it has served all of `requests`, eight at a time, and SGLang's own of each."""
    clock = TraceClock()
    cache = marconi(host, CHOICE, host.costs, clock)
    scheduler = HostScheduler(cache, host)
    left, asked = deque(requests), list[tuple[Request, Any]]()
    while left or not scheduler.is_idle:
        while left and scheduler.num_there < NUM_AT_ONCE:
            request = left.popleft()
            asked.append((request, scheduler.submit(_script(request), custom_params=custom_params)))
        scheduler.step()
        clock.now_s += STEP_S
    assert set(scheduler.outcomes) == {Outcome.FINISHED}
    return cache, asked


def _script(request: Request) -> Script:
    ids = unpack(request.path)
    prompt, answer = ids[: request.num_prompt_tokens], ids[request.num_prompt_tokens :]
    namespace = (f"{request.namespace}", None)
    return Script(Origin.NEW, array("q", prompt), array("q", answer), len(answer), namespace)


def _sent(request: Request, req: Any) -> Sent:
    answer = Completion(tuple(req.output_ids), req.cached_tokens, "", notes_of(req).steps or Steps())
    return Sent(req.origin_input_ids, request.namespace, answer)


CASES = (
    *((setting, Division.TWO_POOLS) for setting in SETTINGS.values()),
    pytest.param(SETTINGS["extra-buffer"], Division.ONE_POOL, marks=pytest.mark.slow),
    pytest.param(SETTINGS["page-16"], Division.ONE_POOL, marks=pytest.mark.slow),
)


@pytest.mark.parametrize(("setting", "division"), CASES, ids=[*SETTINGS, "one-pool", "one-pool-page-16"])
def test_a_replay_of_the_steps_hits_what_the_real_cache_hits(setting: Setting, division: Division) -> None:
    replay, sent = served(setting, division, REQUESTS)
    assert hits(replay, sent) == [each.answer.num_cached_tokens for each in sent]
    steps = [each.answer.steps for each in sent]
    assert any(each.queued for each in steps), "some waited"
    assert any(each.rematched for each in steps), "and what they would resume from changed meanwhile"
    assert sum(replay.hybrid.counters.num_evictions.values()) > 20


def test_a_replay_that_is_not_told_of_decoding_hits_otherwise() -> None:
    """The control: what is compared above depends on when memory is taken for answers."""
    replay, sent = served(SETTINGS["extra-buffer"], Division.TWO_POOLS, REQUESTS)
    untold = [replace(each, answer=replace(each.answer, steps=without_decodes(each.answer.steps))) for each in sent]
    assert hits(replay, untold) != [each.answer.num_cached_tokens for each in sent]


def test_of_a_request_that_asks_for_nothing_no_step_is_recorded_and_the_same_is_hit() -> None:
    num_cached = {}
    for explains in (True, False):
        host = replace(SETTINGS["extra-buffer"].host, explains=explains)
        _, asked = asked_of_the_cache(host, REQUESTS, {EXPLAIN: explains})
        assert {notes_of(req).steps is not None for _, req in asked} == {explains}
        num_cached[explains] = [req.cached_tokens for _, req in asked]
    assert num_cached[True] == num_cached[False]


def without_decodes(steps: Steps) -> Steps:
    def untold(value: Any) -> Any:
        match value:
            case Moment():
                return value._replace(num_decodes=0)
            case Chunk():
                return replace(value, taken=untold(value.taken), left=untold(value.left))
            case list():
                return [untold(each) for each in value]
        return value

    return replace(steps, **{each.name: untold(getattr(steps, each.name)) for each in fields(steps)})


def hits(replay: ServerReplay, sent: Sequence[Sent]) -> list[int]:
    return [each.num_cached_tokens for each in Prediction(replay, sent).run()]
