"""Serial replay, the papers' mode: one request after the other, its arrival time as the clock.

A request begins and ends at its arrival, so nothing runs beside it: hits depend on the order of requests and on when
they came, and the time to first token is that of the prefill alone, and of the read and the load before it, without
waiting.
"""

import math
import time

from marconi.model.latency import LatencyModel
from marconi.policy.request import Trace
from marconi.replay.outcome import PROGRESS_STEP, Outcome, Progress
from marconi.replay.server import ServerReplay
from marconi.replay.target import ReplayTarget


def replay(trace: Trace, target: ReplayTarget, latency: LatencyModel, progress: Progress | None = None) -> Outcome:
    """Serve every request of `trace` from `target`."""
    start_s = time.perf_counter()
    hit_tokens, load_s, loaded_before_s = [], [], _loaded_s(target)
    for request in trace.requests:
        hit_tokens.append(target.serve(request))
        loaded_s = _loaded_s(target)
        load_s.append(loaded_s - loaded_before_s)
        loaded_before_s = loaded_s
        if progress is not None and len(hit_tokens) % PROGRESS_STEP == 0:
            progress(PROGRESS_STEP)
    each = zip(hit_tokens, load_s, trace.requests, strict=True)
    ttft_s = [latency.seconds(num_hit, request.num_prompt_tokens) + loading_s for num_hit, loading_s, request in each]
    if progress is not None:
        progress(len(hit_tokens) % PROGRESS_STEP)
    return Outcome(hit_tokens, ttft_s, math.fsum(ttft_s), time.perf_counter() - start_s)


def _loaded_s(target: ReplayTarget) -> float:
    """Seconds of all loads so far, and of the reads before them."""
    store = target.store if isinstance(target, ServerReplay) else None
    return target.counters.load_s + (0.0 if store is None else store.traffic.read_s)
