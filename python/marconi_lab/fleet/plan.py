"""`marconi plan` for several ranks: one server of N ranks, or N servers of one rank behind a router, on the same cards.

    card = memory + weights / N      what `--memory`, of one rank, and the weights take of a card
    card - weights                   what one rank has left that holds all weights

Both serve the trace by the clock, as a simulated fleet does: the one as it is advised, the N by the same policy, in one
pool where it is not stock SGLang's, behind the rule of routing `state-aware`. Ranks are taken to share their work
without a loss, which favours the one server.
"""

import argparse
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from marconi.model import PrefillLatency, load
from marconi.plan.advice import STOCK, Advice, Contender
from marconi.plan.verdict import Plan
from marconi.policy.catalog import PolicySpec
from marconi.policy.request import Trace
from marconi.replay.parallel import num_usable_cores, run_all
from marconi.replay.progress import metered
from marconi.replay.task import ReplayInputs
from marconi_lab.fleet.result import FleetRun
from marconi_lab.fleet.task import FleetTask, execute
from marconi_lab.fleet.variants import VARIANTS

_ROUTER: Final = VARIANTS["state-aware"]


def with_layouts(args: argparse.Namespace, inputs: ReplayInputs, plan: Plan, blocked: Callable[[Trace], Trace]) -> Plan:
    """`plan`, each advice for several ranks with both layouts; as it is for one rank or a measured latency."""
    if inputs.model.tensor_parallel == 1 or not isinstance(inputs.latency, PrefillLatency):
        return plan
    together = replace(inputs, trace=blocked(inputs.trace))
    model = load(args.model)
    apart = replace(together, model=model, latency=PrefillLatency(model, inputs.device))
    num_processes = args.jobs or num_usable_cores()
    tasks = [_tasks(together, each) for each in plan.advice]
    with metered("compare", sum(map(len, tasks)) * len(inputs.trace.requests)) as meter:
        ones = run_all(execute, together, [pair[0] for pair in tasks if pair], num_processes, meter.advance)
        others = run_all(execute, apart, [pair[1] for pair in tasks if len(pair) == 2], num_processes, meter.advance)
    runs = iter(ones), iter(others)
    layouts = [tuple(_layout(next(one)) for one, _ in zip(runs, pair, strict=False)) for pair in tasks]
    advice = (
        each if each.best is None else replace(each, layouts=found)
        for each, found in zip(plan.advice, layouts, strict=True)
    )
    return replace(plan, advice=tuple(advice))


def _tasks(inputs: ReplayInputs, advice: Advice) -> tuple[FleetTask, ...]:
    """The one server's, and those of N if the model fits one card; none where nothing fits."""
    best, num_ranks = advice.best, inputs.model.tensor_parallel
    if best is None:
        return ()
    asked = best.task
    policy = asked.policy if best.chosen is None else PolicySpec.parse(best.chosen)
    one = FleetTask(policy, asked.memory_bytes, 1, _ROUTER, asked.mamba_ratio, host_bytes=asked.host_bytes)
    weight_bytes = inputs.model.weight_bytes
    left = asked.memory_bytes + weight_bytes // num_ranks - weight_bytes
    # The smallest request of one rank takes what all ranks together take for it, or less.
    if left < num_ranks * advice.request_bytes[0]:
        return (one,)
    ratio = asked.mamba_ratio if asked.policy == STOCK else None
    return one, FleetTask(policy, num_ranks * left, num_ranks, _ROUTER, ratio, host_bytes=num_ranks * asked.host_bytes)


def _layout(run: object) -> Contender:
    assert isinstance(run, FleetRun)
    return Contender(run.num_replicas, run.memory_bytes // run.num_replicas, run.token_hit_rate, run.ttft_s)
