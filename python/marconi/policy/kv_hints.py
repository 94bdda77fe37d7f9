"""Actions that an orchestrator sends to the cache with a request (`kv_hints`), and the answer to each.

    retain     {"seconds": 600, "num_tokens": 1200}   others of the name space are evicted in place of these states
    pin        as retain                              the same: nothing is pinned, so it is always clipped
    demote     {"num_tokens": 1200}                   these states are evicted before others of the name space
    prefetch   {}                                     the request has loaded its prefix from the host, as all do

An action concerns the states that its request has left or resumed from, and with `num_tokens` the deepest of its path
within so many tokens. A state from which several paths go on is not demoted. Types may be written with a `kv.` before
them and in any case. An action never fails its request: its answer says *accepted*, *clipped* or *rejected*, and why.
What retaining costs, and whom, is in `retention.py`.
"""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any, Final, NamedTuple, Protocol

from marconi.policy.hybrid_cache import HybridCache
from marconi.policy.retention import MAX_DEMOTED, MAX_RETAIN_S, MAX_RETAINED
from marconi.tree import Node

DEFAULT_RETAIN_S: Final = 600.0
MAX_ACTIONS: Final = 16
"""Actions of a request; later ones are rejected."""
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


class Answer(NamedTuple):
    """The answer to an action."""

    result: Result
    reason: str | None = None
    num_states: int = 0
    """States that it concerns."""
    seconds: float | None = None
    """For how long they are retained."""

    def as_dict(self, action: Action) -> dict[str, Any]:
        """The values for JSON."""
        values = {"action_id": action.action_id[:80], "action_type": action.action_type[:80], **self._asdict()}
        return {key: value for key, value in values.items() if value is not None}


class _Asked(NamedTuple):
    verb: Verb
    seconds: float
    num_tokens: int | None


_KEYS: Final = {
    Verb.RETAIN: ("seconds", "num_tokens"),
    Verb.PIN: ("seconds", "num_tokens"),
    Verb.DEMOTE: ("num_tokens",),
    Verb.PREFETCH: (),
}


def obey(
    cache: HybridCache, actions: Sequence[Action], end: Node, resumed_depth: int, now_s: float
) -> list[dict[str, Any]]:
    """Obey the actions of a request that has ended, in their order, and answer each.

    `end` is the deepest state that the request has left or resumed from, or the root; `resumed_depth` is the depth of
    the state that it resumed from, in tokens.
    """
    answers = []
    for index, action in enumerate(actions):
        if index < MAX_ACTIONS:
            answer = _obey(cache, action, end, resumed_depth, now_s)
        else:
            answer = _rejected(f"actions must be at most {MAX_ACTIONS}, got {len(actions)}")
        answers.append(answer.as_dict(action))
    return answers


def reject(actions: Sequence[Action], reason: str) -> list[dict[str, Any]]:
    """Answer actions of which none can be obeyed."""
    return [_rejected(reason).as_dict(action) for action in actions]


def _obey(cache: HybridCache, action: Action, end: Node, resumed_depth: int, now_s: float) -> Answer:
    try:
        asked = _asked(action)
    except ValueError as error:
        return _rejected(str(error))
    if asked.verb is Verb.PREFETCH:
        if cache.host is None:
            return _rejected("prefetch needs a host tier: start the server with --enable-hierarchical-cache")
        return Answer(Result.ACCEPTED)
    states = _states(end, resumed_depth, asked.num_tokens)
    if not states:
        return _rejected("the request has left no state there")
    clipped = []
    if asked.num_tokens is not None and states[0].depth < asked.num_tokens:
        clipped.append(f"the deepest state within {asked.num_tokens} tokens is at {states[0].depth}")
    return (_demote if asked.verb is Verb.DEMOTE else _retain)(cache, states, asked, clipped, now_s)


def _retain(cache: HybridCache, states: Sequence[Node], asked: _Asked, clipped: list[str], now_s: float) -> Answer:
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
    return Answer(Result.CLIPPED if clipped else Result.ACCEPTED, "; ".join(clipped) or None, num, seconds)


def _demote(cache: HybridCache, states: Sequence[Node], _asked: _Asked, clipped: list[str], _now_s: float) -> Answer:
    own = [node for node in states if node.num_children < 2]
    if not own:
        return _rejected("other prompts continue from the state")
    num = sum(cache.demote(node) for node in own)
    if num < len(own):
        reason = f"{MAX_DEMOTED} states of its name space are demoted already"
        if not num:
            return _rejected(reason)
        clipped.append(reason)
    return Answer(Result.CLIPPED if clipped else Result.ACCEPTED, "; ".join(clipped) or None, num)


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
        raise ValueError(f"action_type must be one of {', '.join(Verb)}, got {_shown(action.action_type)}")
    if action.action_version not in VERSIONS:
        raise ValueError(f"action_version must be {' or '.join(VERSIONS)}, got {_shown(action.action_version)}")
    verb, payload = Verb(name), action.payload
    for key in payload:
        if key not in _KEYS[verb]:
            expected = f"have only {' and '.join(_KEYS[verb])}" if _KEYS[verb] else "be empty"
            raise ValueError(f"payload of {verb} must {expected}, got {_shown(key)}")
    seconds, num_tokens = payload.get("seconds", DEFAULT_RETAIN_S), payload.get("num_tokens")
    # A boolean is an integer to Python, and to nobody who writes one.
    if type(seconds) not in (int, float) or not seconds > 0:
        raise ValueError(f"payload.seconds must be a number above 0, got {_shown(seconds)}")
    if num_tokens is not None and (type(num_tokens) is not int or num_tokens < 1):
        raise ValueError(f"payload.num_tokens must be an integer above 0, got {_shown(num_tokens)}")
    # An integer may be too large for a float.
    return _Asked(verb, float(min(seconds, 1e300)), num_tokens)


def _rejected(reason: str) -> Answer:
    return Answer(Result.REJECTED, reason)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}..."
