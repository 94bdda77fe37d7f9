"""The load that a scheduler's worker reports, read as a step begins: what it runs, what waits, and what memory is left.

    prefill tokens  =  of requests that wait, and of a prefill's later chunks (SGLang's own estimate)
                       + of this step's prefill
                       + of the one before it, where steps overlap and its result is not there yet

As a step begins, not as one ends: a long prefill counts from its first moment. Every prefill is reported, as each is
long beside the look at the queue; decoding is every `PERIOD_S`, and an idle scheduler once. The publisher's thread
sends what changed (`marconi.events.publisher`); here it is an assignment.

Owner: the scheduler's thread.
"""

import time
from collections.abc import Callable
from typing import Any, Final

from marconi.events.base import FreeMemory, WorkerLoad

PERIOD_S: Final = 0.1
"""The publisher's own period: a load published sooner would replace one that nobody has received."""


class LoadReporter:
    """Publishes the load of the scheduler that has `cache`."""

    def __init__(
        self, cache: Any, publish: Callable[[WorkerLoad], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._cache = cache
        self._publish = publish
        self._clock = clock
        self._reported_s = -PERIOD_S
        self._num_launched_tokens = 0
        """Prompt tokens of the last step."""
        self._max_running = 0
        """0 before the first step."""
        self._is_idle = False

    def step(self, scheduler: Any, batch: Any) -> None:
        """Publish that `batch` is about to run, if that is due."""
        now_s, is_prefill = self._clock(), batch.forward_mode.is_extend()
        num_tokens = int(batch.extend_num_tokens or 0) if is_prefill else 0
        num_before, self._num_launched_tokens = self._num_launched_tokens, num_tokens
        if not is_prefill and now_s - self._reported_s < PERIOD_S:
            return
        self._reported_s, self._is_idle = now_s, False
        inquirer = scheduler.load_inquirer
        self._max_running = inquirer.max_running_requests
        chunked = scheduler.chunked_req
        if is_prefill and chunked in batch.reqs:
            # Its chunk of this step is among what waits as well.
            num_tokens -= chunked.extend_end - chunked.prefix_len
        if scheduler.enable_overlap and scheduler.result_queue:
            num_tokens += num_before
        num_tokens += inquirer.get_num_waiting_uncached_tokens()
        num_running = len(batch.reqs)
        if is_prefill and not batch.forward_mode.is_mixed():
            num_running += len(scheduler.running_batch.reqs)
        counts = num_running, len(scheduler.waiting_queue), self._max_running, num_tokens
        self._publish(WorkerLoad(*counts, self._memory(), store=self._cache.store_reach))

    def idle(self) -> None:
        """Publish that nothing runs and nothing waits; a second time does nothing."""
        if not self._is_idle and self._max_running:
            self._is_idle, self._num_launched_tokens = True, 0
            load = WorkerLoad(0, 0, self._max_running, 0, self._memory(), store=self._cache.store_reach)
            self._publish(load)

    def _memory(self) -> FreeMemory:
        cache = self._cache
        core, pools = cache.tree_core, cache.pools
        num_free_slots = pools.state_slots.available_size()
        return FreeMemory(pools.num_free_kv_tokens, core.evictable_size(), num_free_slots, core.mamba_evictable_size())


def before_run_batch(scheduler: Any, batch: Any, *_args: Any, **_kwargs: Any) -> None:
    """Before `Scheduler.run_batch`: publish the worker's load."""
    reporter: LoadReporter | None = getattr(scheduler.tree_cache, "load_reporter", None)
    if reporter is not None:
        reporter.step(scheduler, batch)
