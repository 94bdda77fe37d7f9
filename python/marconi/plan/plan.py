"""A plan: how to divide memory between KV and states, and by which rule to evict, for one kind of traffic.

Candidates, each replayed on the trace as a server would serve it (`replay/server.py`: the slots that a request works
on, steps and speculative states included), for each amount of memory:

    stock SGLang       `lru`, its two pools at ratios of bytes for states over bytes for KV, 0.9 being its default
    this project       its default rule in one pool, to see what a division costs, and in two at the same ratios
    with int8          that in two pools at fewer ratios, with checkpoints in int8, where a server offers them

A model without states has no two pools, and its cache stays SGLang's own. A host tier has two pools on the host, at the
device's ratio or, below one pool, at 0.9.

The advice (`advice.py`) and a verdict in five lines (`verdict.py`) follow from the runs.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from rich.console import Group, RenderableType

from marconi.plan.advice import DEFAULT, NUM_SLOTS, STOCK, Advice
from marconi.plan.verdict import Plan, fewest_cards
from marconi.policy.catalog import SGLANG_MAMBA_RATIO
from marconi.policy.request import Trace
from marconi.replay.bound import bounded
from marconi.replay.grid import num_replays, run_grids
from marconi.replay.progress import metered
from marconi.replay.report import tables
from marconi.replay.result import Report
from marconi.replay.store import StoreSpec
from marconi.replay.task import UNBOUNDED_BYTES, ReplayInputs, Task

RATIOS: Final = (SGLANG_MAMBA_RATIO, 0.05, 0.1, 0.2, 0.4, 1.8, 3.6)
"""SGLang's default first."""
INT8_RATIOS: Final = (SGLANG_MAMBA_RATIO, 0.1, 0.2, 0.4)
"""With checkpoints in int8, whose states take a half or less of the bytes."""
TIMES: Final = (0.5, 2, 4)
"""Shares of the memory that was asked about, tried as well."""


def request_bytes(inputs: ReplayInputs) -> tuple[int, int]:
    """Bytes that the smallest and the largest request take in one pool: KV and `NUM_SLOTS` states.

    Of the requests that could leave a state; 0 bytes if none could.
    """
    unit, costs = inputs.trace.unit_tokens, inputs.costs
    sizes = [
        -(-request.num_processed_tokens // unit) * unit * costs.kv_bytes_per_token + NUM_SLOTS * costs.state_bytes
        for request in inputs.trace.requests
        if request.last_known_depth(unit)
    ]
    return min(sizes, default=0), max(sizes, default=0)


def make_plan(
    inputs: ReplayInputs,
    memories_bytes: Sequence[int],
    unbounded_bytes: int | None,
    num_processes: int,
    host_bytes: int = 0,
    storage: StoreSpec | None = None,
) -> Plan:
    """Replay every candidate at every amount of memory, with a host tier of `host_bytes` below it unless that is 0.

    With `storage` the default alone is also replayed with that behind the host.
    """
    serving, has_states = inputs.model.serving, inputs.has_states
    planned = serving.has_planned_states
    has_int8 = planned and not host_bytes and inputs.has_int8_checkpoints
    # The project's default, as a server has it without a flag that divides memory.
    default = Task(DEFAULT, 0, None if planned else SGLANG_MAMBA_RATIO, host_bytes)
    alone = [replace(default, memory_bytes=num_bytes) for num_bytes in memories_bytes]
    grids = [
        candidates(num_bytes, has_states, has_one_pool=planned, has_int8=has_int8, host_bytes=host_bytes)
        for num_bytes in memories_bytes
    ]
    grid = [task for tasks in grids for task in tasks]
    amounts = other_amounts(memories_bytes) if has_states else ()
    sizes = [replace(default, memory_bytes=num_bytes) for num_bytes in amounts]
    with_storage = [replace(task, storage=storage) for task in alone if storage is not None]
    parts = halves(inputs) if has_states else ()
    half_bytes, half_host_bytes = min(memories_bytes) // 2, host_bytes // 2
    pair = (
        Task(STOCK, half_bytes, RATIOS[0], half_host_bytes),
        replace(default, memory_bytes=half_bytes, host_bytes=half_host_bytes),
    )
    tasks = [*grid, *sizes, *with_storage]
    num_requests = (num_replays(tasks) + 2 * bool(parts)) * len(inputs.trace.requests)
    with metered("plan", num_requests) as meter:
        runs, *of_halves = run_grids([(inputs, tasks), *((part, pair) for part in parts)], num_processes, meter.advance)
    num_grid, num_sizes, size = len(grid), len(grid) + len(sizes), len(grids[0])
    needed = request_bytes(inputs)
    num_cards = fewest_cards(inputs, needed[0])
    if num_cards is None and inputs.device.memory_bytes and serving.why_not is None:
        serving = replace(serving, why_not=f"its weights (16 bits) do not fit 64 cards ({inputs.device.name})")
    return Plan(
        report=Report(inputs, unbounded_bytes, bounded(inputs, runs[:num_grid], num_processes)),
        advice=tuple(
            Advice.of(runs[index * size : (index + 1) * size], needed, task, serving)
            for index, task in enumerate(alone)
        ),
        sizes=runs[num_grid:num_sizes],
        halves=tuple((stock, ours) for stock, ours in of_halves),
        stored=runs[num_sizes:],
        serving=serving,
        num_cards=num_cards,
    )


def candidates(
    memory_bytes: int,
    has_states: bool = True,
    *,
    has_one_pool: bool = True,
    has_int8: bool = False,
    host_bytes: int = 0,
) -> tuple[Task, ...]:
    """List the candidates that a server supports, in order of preference among equals."""
    if not has_states:
        return (Task(STOCK, memory_bytes, host_bytes=host_bytes),)
    stock = [Task(STOCK, memory_bytes, ratio, host_bytes) for ratio in RATIOS]
    ratios = (None, *RATIOS) if has_one_pool else RATIOS
    ours = [Task(DEFAULT, memory_bytes, ratio, host_bytes) for ratio in ratios]
    of_int8 = INT8_RATIOS if has_int8 else ()
    return (*stock, *ours, *(Task(DEFAULT, memory_bytes, ratio, host_bytes, True) for ratio in of_int8))


def other_amounts(memories_bytes: Sequence[int]) -> tuple[int, ...]:
    """Amounts of memory beside `memories_bytes`, rising; the last is unlimited."""
    smallest, largest = min(memories_bytes), max(memories_bytes)
    others = {int((smallest if times < 1 else largest) * times) for times in TIMES} - set(memories_bytes)
    return (*sorted(others), UNBOUNDED_BYTES)


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


def render(plan: Plan, *, has_table: bool = False) -> RenderableType:
    """The verdict, and below it every run with the advice; without the table no advice but for what does not fit."""
    advice = (each.sentences for each in plan.advice if has_table or each.best is None)
    table = (tables(plan.report),) if has_table else ()
    return Group(*plan.verdict, *(line for sentences in advice for line in ("", *sentences)), *table)
