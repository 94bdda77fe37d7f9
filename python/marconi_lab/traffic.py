"""Traffic statistics for the rules that assume some: as an operator would know them, measured on the trace.

    added tokens    mean of prompt(t + 1) - prompt(t) - output(t) over the turns of all sessions, at least 1
    turns a second  1 / mean time between two turns of a session
    ends a second   the rate that makes sessions as long in the mean as they are: with k turns a session, 1 / (k - 1) of
                    the turns' rate
    budget          the most tokens that a prompt without any cached may have and still be in time

They are means over the whole trace, so a rule that is given them knows more than it could at its start.
"""

from bisect import bisect_right

from marconi.model.latency import LatencyModel
from marconi.policy.request import Request, Trace
from marconi_lab.eviction.et_lru import TurnModel

_LONGEST_PROMPT = 1 << 22
_MIN_GAP_S = 1e-3


def added_tokens(trace: Trace) -> int:
    """Tokens that a next prompt adds in the mean; 0 where no session has a second turn."""
    turns = _turns(trace)
    added = [next_.num_prompt_tokens - turn.num_prompt_tokens - turn.num_output_tokens for turn, next_ in turns]
    return max(1, round(sum(added) / len(added))) if added else 0


def turn_model(trace: Trace) -> TurnModel:
    """Rates of turns and of ends; `ValueError` where no session has a second turn."""
    turns = _turns(trace)
    if not turns:
        raise ValueError(f"trace {trace.name!r} must have a session of 2 turns or more for et-lru, got none")
    gap_s = max(sum(next_.arrival_s - turn.arrival_s for turn, next_ in turns) / len(turns), _MIN_GAP_S)
    num_sessions = len({request.session for request in trace.requests if request.session >= 0})
    return TurnModel(1 / gap_s, num_sessions / len(turns) / gap_s, added_tokens(trace))


def budget_tokens(latency: LatencyModel, slo_s: float) -> int:
    """The longest prompt that is computed within `slo_s` from nothing, in tokens; 0 if not one token is.

    Of a given prompt, how much must be cached is another question: `LatencyModel.smallest_cached_tokens`.
    """
    lengths = range(1, _LONGEST_PROMPT)
    return bisect_right(lengths, slo_s, key=lambda num_tokens: latency.seconds(0, num_tokens))


def _turns(trace: Trace) -> list[tuple[Request, Request]]:
    """Each turn of a session and the one after it."""
    latest: dict[int, Request] = {}
    pairs: list[tuple[Request, Request]] = []
    for request in trace.requests:
        if request.session >= 0:
            if request.session in latest:
                pairs.append((latest[request.session], request))
            latest[request.session] = request
    return pairs
