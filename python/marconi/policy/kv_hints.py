"""Actions that an orchestrator sends to the cache with a request (`kv_hints`), and the answer to each.

    retain     {"seconds": 600, "num_tokens": 1200}   others of the name space are evicted in place of these states
    pin        as retain                              the same: nothing is pinned, so it is always clipped
    demote     {"num_tokens": 1200}                   these states are evicted before others of the name space
    prefetch   {"input_ids": [...], "seconds": 600}   the host's state for that prompt is loaded now, and retained
    prefetch   {}                                     whether the request itself has loaded its prefix from the host

An action but `prefetch` concerns the states that its request has left or resumed from, and with `num_tokens` the
deepest of its path within so many tokens. A state with several paths below it is not demoted. Types may be written
with a `kv.` before them and in any case. An action never fails its request: its answer says *accepted*, *clipped* or
*rejected*, and why. What retaining costs, and whom, is in `retention.py`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

from marconi.policy.admission.hints import shown
from marconi.policy.hybrid_cache import HybridCache
from marconi.policy.retention import MAX_DEMOTED, MAX_RETAIN_S, MAX_RETAINED
from marconi.tree import Node

DEFAULT_RETAIN_S: Final = 600.0
NO_HOST_TIER: Final = "prefetch needs a host tier: start the server with --enable-hierarchical-cache"
MAX_ACTIONS: Final = 16
"""Actions of a request; later ones are rejected."""
MAX_TOKEN_ID: Final = 2**31 - 1
VERSIONS: Final = ("1.0", "0.1")


class Action(Protocol):
    """One action, as SGLang has validated it: texts, and a payload with any values of JSON."""

    @property
    def action_id(self) -> str:
        """Chosen by the client."""
        ...

    @property
    def action_type(self) -> str:
        """The verb."""
        ...

    @property
    def action_version(self) -> str:
        """The version of the verb's payload."""
        ...

    @property
    def payload(self) -> Mapping[str, Any]:
        """The verb's arguments."""
        ...


class Verb(StrEnum):
    """The kinds of actions."""

    RETAIN = "retain"
    PIN = "pin"
    DEMOTE = "demote"
    PREFETCH = "prefetch"


class Result(StrEnum):
    """How far an action was obeyed."""

    ACCEPTED = "accepted"
    CLIPPED = "clipped"
    REJECTED = "rejected"


class HintAnswer(NamedTuple):
    """The answer to an action."""

    result: Result
    reason: str | None = None
    num_states: int = 0
    """States that it concerns."""
    seconds: float | None = None
    """For how long they are retained."""
    num_tokens: int | None = None
    """Prompt tokens that are cached on the device once a prefetch has arrived."""

    def as_dict(self, action: Action) -> dict[str, Any]:
        """The values for JSON."""
        values = {"action_id": action.action_id[:80], "action_type": action.action_type[:80], **self._asdict()}
        return {key: value for key, value in values.items() if value is not None}


Prefetch: TypeAlias = Callable[[Sequence[int]], Node]
"""Begin to load the host's deepest state for a prompt, and return its node; `ValueError`, in one line, if it cannot."""


@dataclass(frozen=True, slots=True)
class EndedRequest:
    """The request that actions came with, at its end."""

    end: Node
    """The deepest state that it has left or resumed from, or the root."""
    resumed_depth: int
    """The depth of the state that it resumed from, in tokens."""
    has_loaded: bool = False
    """Whether that came from the host."""
    prefetch: Prefetch | None = None
    """None without a host tier."""


class _Asked(NamedTuple):
    verb: Verb
    seconds: float
    num_tokens: int | None
    input_ids: Sequence[int] | None


_KEYS: Final = {
    Verb.RETAIN: ("seconds", "num_tokens"),
    Verb.PIN: ("seconds", "num_tokens"),
    Verb.DEMOTE: ("num_tokens",),
    Verb.PREFETCH: ("input_ids", "seconds"),
}


def obey(cache: HybridCache, actions: Sequence[Action], ended: EndedRequest, now_s: float) -> list[dict[str, Any]]:
    """Obey the actions of a request that has ended, in their order, and answer each."""
    answers = []
    for index, action in enumerate(actions):
        if index < MAX_ACTIONS:
            answer = _obey(cache, action, ended, now_s)
        else:
            answer = _rejected(f"actions must be at most {MAX_ACTIONS}, got {len(actions)}")
        answers.append(answer.as_dict(action))
    return answers


def reject(actions: Sequence[Action], reason: str) -> list[dict[str, Any]]:
    """Answer actions of which none can be obeyed."""
    return [_rejected(reason).as_dict(action) for action in actions]


def _obey(cache: HybridCache, action: Action, ended: EndedRequest, now_s: float) -> HintAnswer:
    try:
        asked = _asked(action)
        if asked.verb is Verb.PREFETCH:
            return _prefetch(cache, asked, ended, now_s)
    except ValueError as error:
        return _rejected(str(error))
    states = _states(ended.end, ended.resumed_depth, asked.num_tokens)
    if not states:
        return _rejected("the request has left no state there")
    clipped = []
    if asked.num_tokens is not None and states[0].depth < asked.num_tokens:
        clipped.append(f"the deepest state within {asked.num_tokens} tokens is at {states[0].depth}")
    return (_demote if asked.verb is Verb.DEMOTE else _retain)(cache, states, asked, clipped, now_s)


def _prefetch(cache: HybridCache, asked: _Asked, ended: EndedRequest, now_s: float) -> HintAnswer:
    """Answer a prefetch; `ValueError` for one that loads nothing."""
    if ended.prefetch is None:
        raise ValueError(NO_HOST_TIER)
    if asked.input_ids is None:
        if not ended.has_loaded:
            raise ValueError("the request has loaded nothing from the host: name the next prompt as payload.input_ids")
        return HintAnswer(Result.ACCEPTED, num_states=1, num_tokens=ended.resumed_depth)
    node = ended.prefetch(asked.input_ids)
    retained = _retain(cache, [node], asked, [], now_s)
    if retained.result is not Result.REJECTED:
        return retained._replace(num_tokens=node.depth)
    return HintAnswer(Result.CLIPPED, f"loaded, and not retained: {retained.reason}", 1, num_tokens=node.depth)


def _retain(cache: HybridCache, states: Sequence[Node], asked: _Asked, clipped: list[str], now_s: float) -> HintAnswer:
    seconds = min(asked.seconds, MAX_RETAIN_S)
    if asked.verb is Verb.PIN:
        clipped.append("states are retained, never pinned")
    if seconds < asked.seconds:
        clipped.append(f"seconds must be at most {MAX_RETAIN_S:g}, got {asked.seconds:g}")
    num = sum(cache.retain(node, now_s + seconds, now_s) for node in states)
    if num < len(states):
        reason = f"{MAX_RETAINED} states of its name space are retained already"
        if not num:
            return _rejected(reason)
        clipped.append(reason)
    return HintAnswer(Result.CLIPPED if clipped else Result.ACCEPTED, "; ".join(clipped) or None, num, seconds)


def _demote(
    cache: HybridCache, states: Sequence[Node], _asked: _Asked, clipped: list[str], _now_s: float
) -> HintAnswer:
    own = [node for node in states if node.num_children < 2]
    if not own:
        return _rejected("other prompts continue from the state")
    num = sum(cache.demote(node) for node in own)
    if num < len(own):
        reason = f"{MAX_DEMOTED} states of its name space are demoted already"
        if not num:
            return _rejected(reason)
        clipped.append(reason)
    return HintAnswer(Result.CLIPPED if clipped else Result.ACCEPTED, "; ".join(clipped) or None, num)


def _states(end: Node, resumed_depth: int, num_tokens: int | None) -> list[Node]:
    """The states on the path to `end` that an action concerns, the deepest first."""
    states, node = [], end
    while node.parent is not None and (num_tokens is not None or node.depth >= resumed_depth):
        if node.has_state and (num_tokens is None or node.depth <= num_tokens):
            states.append(node)
            if num_tokens is not None:
                break
        node = node.parent
    return states


def _asked(action: Action) -> _Asked:
    """Read an action; `ValueError` in one line for one that cannot be obeyed."""
    name = action.action_type.lower().removeprefix("kv.")
    if name not in set(Verb):
        raise ValueError(f"action_type must be one of {', '.join(Verb)}, got {shown(action.action_type)}")
    if action.action_version not in VERSIONS:
        raise ValueError(f"action_version must be {' or '.join(VERSIONS)}, got {shown(action.action_version)}")
    verb, payload = Verb(name), action.payload
    for key in payload:
        if key not in _KEYS[verb]:
            raise ValueError(f"payload of {verb} must have only {' and '.join(_KEYS[verb])}, got {shown(key)}")
    seconds, num_tokens = payload.get("seconds", DEFAULT_RETAIN_S), payload.get("num_tokens")
    # A boolean is an integer to Python, and to nobody who writes one.
    if type(seconds) not in (int, float) or not seconds > 0:
        raise ValueError(f"payload.seconds must be a number above 0, got {shown(seconds)}")
    if num_tokens is not None and (type(num_tokens) is not int or num_tokens < 1):
        raise ValueError(f"payload.num_tokens must be an integer above 0, got {shown(num_tokens)}")
    input_ids = payload.get("input_ids")
    if input_ids is not None and not _are_token_ids(input_ids):
        raise ValueError(f"payload.input_ids must be a list of token ids, got {shown(input_ids)}")
    # An integer may be too large for a float.
    return _Asked(verb, float(min(seconds, 1e300)), num_tokens, input_ids)


def _are_token_ids(value: object) -> bool:
    return isinstance(value, list) and all(type(each) is int and 0 <= each <= MAX_TOKEN_ID for each in value)


def _rejected(reason: str) -> HintAnswer:
    return HintAnswer(Result.REJECTED, reason)
