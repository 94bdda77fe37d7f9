"""What an orchestrator asks for with a request: obeyed within bounds, and answered with a reason."""

import json
import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest

from marconi.policy.kv_hints import DEFAULT_RETAIN_S, MAX_ACTIONS, EndedRequest, obey, reject
from marconi.policy.retention import MAX_RETAIN_S, MAX_RETAINED
from marconi.tree import Node

from .test_retention import OURS, Served


class Asked(NamedTuple):
    """As SGLang hands it on."""

    action_type: str
    payload: Any = {}  # noqa: RUF012 - never changed
    action_version: str = "1.0"
    action_id: str = "a"


def ask(served: Served, end: Node, *actions: Asked, **ended: Any) -> list[dict[str, Any]]:
    answers = obey(served, actions, EndedRequest(end, **{"resumed_depth": 0, **ended}), served.now_s)
    assert json.loads(json.dumps(answers)) == answers
    return [{key: value for key, value in each.items() if not key.startswith("action_")} for each in answers]


def test_states_are_retained_as_long_as_asked() -> None:
    served = Served()
    node = served.leave(OURS, range(9))
    (answer,) = ask(served, node, Asked("retain", {"seconds": 60}))
    assert answer == {"result": "accepted", "num_states": 1, "seconds": 60.0}
    assert served.retention is not None
    assert served.retention.is_retained(node, served.now_s + 59.0)
    assert not served.retention.is_retained(node, served.now_s + 60.0)


def test_a_pin_is_a_retention() -> None:
    served = Served()
    (answer,) = ask(served, served.leave(OURS, range(9)), Asked("kv.Pin"))
    assert (answer["result"], answer["seconds"]) == ("clipped", DEFAULT_RETAIN_S)
    assert answer["reason"] == "states are retained, never pinned"


def test_seconds_are_clipped() -> None:
    served = Served()
    for seconds in (MAX_RETAIN_S + 1, 10**400):
        (answer,) = ask(served, served.leave(OURS, range(9)), Asked("retain", {"seconds": seconds}))
        assert (answer["result"], answer["seconds"]) == ("clipped", MAX_RETAIN_S)


def test_a_number_of_tokens_names_the_deepest_state_within_them() -> None:
    served = Served()
    upper, end = served.leave(OURS, range(4)), served.leave(OURS, range(9))
    exact, within, none = ask(
        served, end, *(Asked("retain", {"num_tokens": num_tokens}) for num_tokens in (9, 8, 3)), resumed_depth=9
    )
    assert exact["result"] == "accepted"
    assert (within["result"], within["reason"]) == ("clipped", "the deepest state within 8 tokens is at 4")
    assert none == {"result": "rejected", "reason": "the request has left no state there", "num_states": 0}
    assert served.retention is not None
    assert served.retention.is_retained(upper, served.now_s)


def test_more_states_than_a_name_space_may_retain_are_rejected() -> None:
    served = Served()
    nodes = [served.leave(OURS, [index]) for index in range(MAX_RETAINED + 1)]
    results = [ask(served, node, Asked("retain"))[0] for node in nodes]
    assert [each["result"] for each in results] == ["accepted"] * MAX_RETAINED + ["rejected"]
    assert results[-1]["reason"] == "64 states of its name space are retained already"


def test_demoting_spares_what_other_prompts_go_on_from() -> None:
    served = Served()
    shared = served.leave(OURS, range(4))
    served.leave(OURS, [*range(4), 50])
    end = served.leave(OURS, [*range(4), 60])
    own, of_all = ask(served, end, Asked("demote"), Asked("demote", {"num_tokens": 4}))
    assert own == {"result": "accepted", "num_states": 1}
    assert of_all["reason"] == "other prompts continue from the state"
    assert served.victims(1) == [end]
    assert shared.has_state


def test_a_prefetch_needs_a_host_tier() -> None:
    served = Served()
    (answer,) = ask(served, served.leave(OURS, [1]), Asked("prefetch"))
    assert answer["result"] == "rejected"
    assert "--enable-hierarchical-cache" in answer["reason"]


def test_a_prefetch_of_the_request_itself_says_whether_it_has_loaded() -> None:
    served = Served()
    node = served.leave(OURS, range(9))
    facts = {"resumed_depth": 7, "prefetch": no_load}
    assert ask(served, node, Asked("prefetch"), has_loaded=True, **facts) == [
        {"result": "accepted", "num_states": 1, "num_tokens": 7}
    ]
    (answer,) = ask(served, node, Asked("prefetch"), **facts)
    assert answer["reason"] == "the request has loaded nothing from the host: name the next prompt as payload.input_ids"


def test_a_prefetch_of_another_prompt_is_retained_for_a_while() -> None:
    served, asked = Served(), []
    node = served.leave(OURS, range(9))

    def load(input_ids: Sequence[int]) -> Node:
        asked.append(input_ids)
        return node

    prefetch = Asked("kv.prefetch", {"input_ids": [*range(12)], "seconds": 30})
    (answer,) = ask(served, node, prefetch, prefetch=load)
    assert answer == {"result": "accepted", "num_states": 1, "num_tokens": 9, "seconds": 30.0}
    assert asked == [[*range(12)]]
    assert served.retention is not None
    assert served.retention.is_retained(node, served.now_s + 29.0)
    assert not served.retention.is_retained(node, served.now_s + 30.0)
    (refused,) = ask(served, node, prefetch, prefetch=no_load)
    assert (refused["result"], refused["reason"]) == ("rejected", "no room")


def test_a_prefetch_beyond_the_states_that_may_be_retained_is_loaded_all_the_same() -> None:
    served = Served()
    for index in range(MAX_RETAINED):
        served.retain(served.leave(OURS, [index]), 1000.0, served.now_s)
    node = served.leave(OURS, [100])
    (answer,) = ask(served, node, Asked("prefetch", {"input_ids": [100, 1]}), prefetch=lambda _: node)
    assert (answer["result"], answer["num_tokens"]) == ("clipped", 1)
    assert answer["reason"] == "loaded, and not retained: 64 states of its name space are retained already"


def no_load(_input_ids: Sequence[int]) -> Node:
    raise ValueError("no room")


@pytest.mark.parametrize(
    ("action", "reason"),
    [
        (Asked("kv.fetch"), "action_type must be one of retain, pin, demote, prefetch, got 'kv.fetch'"),
        (Asked("retain", {}, "2.0"), "action_version must be 1.0 or 0.1, got '2.0'"),
        (Asked("retain", {"blocks": [1]}), "payload of retain must have only seconds and num_tokens, got 'blocks'"),
        (Asked("prefetch", {"blocks": 1}), "payload of prefetch must have only input_ids and seconds, got 'blocks'"),
        (Asked("prefetch", {"input_ids": [1, -1]}), "payload.input_ids must be a list of token ids, got [1, -1]"),
        (Asked("prefetch", {"input_ids": [True]}), "payload.input_ids must be a list of token ids, got [True]"),
        (Asked("prefetch", {"input_ids": "1"}), "payload.input_ids must be a list of token ids, got '1'"),
        (Asked("retain", {"seconds": 0}), "payload.seconds must be a number above 0, got 0"),
        (Asked("retain", {"seconds": True}), "payload.seconds must be a number above 0, got True"),
        (Asked("retain", {"seconds": float("nan")}), "payload.seconds must be a number above 0, got nan"),
        (Asked("demote", {"num_tokens": "4"}), "payload.num_tokens must be an integer above 0, got '4'"),
    ],
)
def test_what_cannot_be_obeyed_is_rejected_with_the_reason(action: Asked, reason: str) -> None:
    served = Served()
    assert ask(served, served.leave(OURS, [1]), action) == [{"result": "rejected", "reason": reason, "num_states": 0}]
    assert not served.retention


def test_actions_are_bounded_and_a_long_name_is_not_repeated() -> None:
    served = Served()
    answers = ask(served, served.leave(OURS, [1]), *[Asked("retain")] * (MAX_ACTIONS + 1))
    assert [each["result"] for each in answers] == ["accepted"] * MAX_ACTIONS + ["rejected"]
    (answer,) = reject([Asked("retain", action_id="x" * 1000)], "the request is served without the cache")
    assert len(answer["action_id"]) == 80


def test_no_payload_of_json_raises() -> None:
    rng = random.Random(1)  # noqa: S311 - a workload, not a secret
    values = (None, True, -1, 0, 1, 2.5, 10**400, 1e308, "1", [], [1], {}, float("inf"))
    served = Served()
    end = served.leave(OURS, range(9))
    for _ in range(500):
        payload = {
            key: rng.choice(values)
            for key in rng.sample(["seconds", "num_tokens", "input_ids", "x"], rng.randint(0, 3))
        }
        verb = rng.choice(["retain", "Pin", "KV.DEMOTE", "prefetch", "", "x" * 99])
        (answer,) = ask(served, end, Asked(verb, payload))
        assert answer["result"] in {"accepted", "clipped", "rejected"}
