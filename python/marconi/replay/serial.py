"""Serial replay, the papers' mode: one request after the other, its arrival time as the clock.

A request begins and ends at its arrival, so nothing runs beside it: hits depend on the order of requests and on when
they came, and the time to first token is that of the prefill alone, without waiting.
"""

import time

from marconi.model.latency import LatencyModel
from marconi.policy.request import Trace
from marconi.replay.outcome import PROGRESS_STEP, Outcome, Progress
from marconi.replay.policies import Subject


def replay(trace: Trace, subject: Subject, latency: LatencyModel, progress: Progress | None = None) -> Outcome:
    """Serve every request of `trace` from `subject`."""
    start_s = time.perf_counter()
    serve, served = subject.cache.serve, subject.served
    hit_tokens = []
    for request in trace.requests:
        hit_tokens.append(serve(request))
        if served is not None:
            served(request, request.arrival_s)
        if progress is not None and len(hit_tokens) % PROGRESS_STEP == 0:
            progress(PROGRESS_STEP)
    pairs = zip(hit_tokens, trace.requests, strict=True)
    ttft_s = [latency.seconds(num_hit, request.num_prompt_tokens) for num_hit, request in pairs]
    if progress is not None:
        progress(len(hit_tokens) % PROGRESS_STEP)
    return Outcome(hit_tokens, ttft_s, time.perf_counter() - start_s)
