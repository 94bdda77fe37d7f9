"""Why requests missed, from the cache to whoever asks: the answer, `GET /marconi/requests`, and the counts by cause.

    "custom_params": {"marconi_explain": true}    the answer's `meta_info` (OpenAI's: `metadata`) explains its request
    GET /marconi/requests                         the latest requests of each scheduler, a line each, newest first,
                                                  with the hash by which the page finds its prefix (`trail.py`)

The causes are those of `policy/causes.py`. An explanation travels to the process that answers HTTP as the other reports
on a request do (`http/hints.py`). Seconds are those of the prefill, as this server learned them
(`model/learned_latency.py`): the parts of a prefill add up to it, and its overhead counts for the last token.

Owner: the scheduler's thread.
"""

import json
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from marconi.engine.http.diverged import FIELD, as_dict
from marconi.engine.reports.moments import Steps
from marconi.engine.reports.trail import Trail
from marconi.model.learned_latency import LearnedLatency
from marconi.policy.base import PrefixFlops
from marconi.policy.causes import Cause
from marconi.policy.divergence import Divergence
from marconi.policy.misses import Explanation, Miss

EXPLAIN: Final = "marconi_explain"
"""In `custom_params`, the wish; in `cached_tokens_details`, the explanation as JSON; in `meta_info`, as a mapping."""
OFF: Final = "requests are not explained here: start the server with --marconi-explain on"
"""In place of an explanation, under `--marconi-explain off`."""
MAX_LATEST: Final = 256
"""Requests that a scheduler remembers."""
MAX_HASHED_TOKENS: Final = 500_000
"""Tokens of prefixes hashed at a time: some two milliseconds."""


class Explained(NamedTuple):
    """A request whose prefill has begun."""

    rid: str
    at_s: float
    explanation: Explanation
    trail: Trail | None = None
    """None for a request that is served uncached."""
    diverged: Divergence | None = None
    """None unless `--marconi-explain text` allows it; never part of `as_dict`."""

    def as_dict(self, now_s: float) -> dict[str, Any]:
        """The values for JSON; ages are in seconds at `now_s`, of the cache's clock."""
        explanation = self.explanation
        return {
            "rid": self.rid,
            "seconds_ago": round(now_s - self.at_s, 3),
            "num_prompt_tokens": explanation.num_prompt_tokens,
            "num_hit_tokens": explanation.num_hit_tokens,
            "line": explanation.describe(self.at_s),
            "missed": [_miss_as_dict(miss, self.at_s) for miss in explanation.misses],
        }


class Explanations:
    """The latest requests of a scheduler, and the seconds that its misses took and its hits saved."""

    def __init__(self, latency: LearnedLatency, flops: PrefixFlops) -> None:
        self._latency = latency
        self._flops = flops
        self._noted: list[Explained] = []
        """The latest, and up to as many that are to be forgotten."""
        self._num_timed = 0
        """The first of them, whose seconds are in `_missed_s`: added up together, each takes a fraction of the time."""
        self._missed_s = dict.fromkeys(Cause, 0.0)
        self._saved_s = 0.0

    def note(self, explained: Explained) -> None:
        """A request begins its prefill."""
        noted = self._noted
        noted.append(explained)
        if not len(noted) % MAX_LATEST:
            self._add_up()
            # Together, too: to free what a request has held for so long takes longer than to note it.
            del noted[:-MAX_LATEST]
            self._num_timed = MAX_LATEST

    @property
    def missed_s(self) -> dict[Cause, float]:
        """Seconds of prefill by cause; 0 until prefills were timed."""
        self._add_up()
        return self._missed_s

    @property
    def saved_s(self) -> float:
        """Seconds of prefill that hits saved; 0 until prefills were timed."""
        self._add_up()
        return self._saved_s

    def _add_up(self) -> None:
        latency, flops, missed_s = self._latency, self._flops, self._missed_s
        untimed = self._noted[self._num_timed :]
        if latency.is_known:
            missed_s[Cause.LAST_TOKEN] += latency.overhead_s * len(untimed)
            s_per_flop = latency.s_per_flop
            for _, _, (_, num_hit_tokens, _, parts), _, _ in untimed:
                # Misses follow each other: one begins with the FLOPs with which the one before it ends.
                before = flops(num_hit_tokens)
                self._saved_s += s_per_flop * before
                for end, cause, _, _ in parts:
                    upto = flops(end)
                    missed_s[cause] += s_per_flop * (upto - before)  # type: ignore[index]
                    before = upto
        self._num_timed = len(self._noted)

    def latest(self, now_s: float) -> list[dict[str, Any]] | None:
        """The latest requests for JSON, newest first; None while prefixes are left to hash: ask again."""
        num_left = MAX_HASHED_TOKENS
        lines = []
        for each in reversed(self._noted[-MAX_LATEST:]):
            if num_left <= 0:
                return None
            trail = each.trail
            num_left -= 0 if trail is None else trail.num_tokens_to_hash
            found = None if trail is None else trail.hash
            line = {**each.as_dict(now_s), "prefix": None if found is None else f"{found:08x}"}
            lines.append(line if each.diverged is None else {**line, FIELD: as_dict(each.diverged)})
        return lines

    def flushed(self) -> None:
        """The tree was flushed: nothing of it is held for its requests."""
        for each in self._noted:
            if each.trail is not None:
                each.trail.forget()


def uncached(num_hit_tokens: int, num_prompt_tokens: int) -> Explanation:
    """Explain a request that is served without the cache, or reads from it and leaves nothing."""
    part = (num_prompt_tokens, Cause.UNCACHED, None, None)
    return Explanation(num_prompt_tokens, num_hit_tokens, num_hit_tokens, (part,))


def is_wanted(custom_params: object) -> bool:
    """True if a request, by its `custom_params`, asks for its explanation."""
    return isinstance(custom_params, Mapping) and custom_params.get(EXPLAIN) is True


def require_wish(custom_params: Mapping[str, Any]) -> None:
    """Raise `ValueError`, in one line, for a wish that is neither true nor false."""
    wish = custom_params.get(EXPLAIN, False)
    if not isinstance(wish, bool):
        raise ValueError(f"custom_params.{EXPLAIN} must be true or false, got {repr(wish)[:40]}")


def dumps(explained: Explained, steps: Steps) -> str:
    """An explanation for its client, as JSON: the values of `cached_tokens_details` are numbers and strings."""
    values = explained._replace(explanation=explained.explanation.for_its_client()).as_dict(explained.at_s)
    del values["rid"], values["seconds_ago"]
    return json.dumps({**values, "steps": steps.as_dict()})


def _miss_as_dict(miss: Miss, now_s: float) -> dict[str, Any]:
    values: dict[str, Any] = {"cause": miss.cause.value, "start": miss.start, "end": miss.end}
    if miss.at_s is not None:
        values["seconds_before"] = round(now_s - miss.at_s, 3)
    if miss.kept is not None:
        values["kept"] = miss.kept._asdict()
    return values
