"""Options of an application are read once, and what cannot be is named in a line."""

import pickle
from typing import Any

import pytest

from marconi_ray import Call
from marconi_ray.options import Options
from marconi_ray.replicas import reachable


def test_texts_of_a_command_line_and_values_of_a_config_are_read_alike() -> None:
    typed = Options.of({"model": "m", "num_replicas": 2, "server_args": ["--tp-size", "2"], "num_gpus": 2})
    assert Options.of({"model": "m", "num_replicas": "2", "server_args": "--tp-size 2", "num_gpus": "2"}) == typed
    assert typed.server_args == ("--tp-size", "2")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({}, "model must be a folder or a hub name, got none"),
        ({"model": "m", "num_replica": 2}, "an option must be num_replicas, got num_replica"),
        ({"model": "m", "num_replicas": 0}, "num_replicas must be 1 or more, got 0"),
        ({"model": "m", "num_gpus": "two"}, "num_gpus must be a number, got 'two'"),
        ({"model": "m", "num_replicas": True}, "num_replicas must be a number, got True"),
        ({"model": "m", "server_args": 5}, "server_args must be a list of texts, got 5"),
        ({"model": "m", "env": "A=1"}, "env must be an object of texts, got 'A=1'"),
        ({"model": 7}, "model must be a text, got 7"),
        ({"model": "m", "server_args": ["--port", "1"]}, "server_args: --port is not for servers that Ray Serve runs"),
        ({"model": "m", "server_args": "--port=1"}, "server_args: --port=1 is not for servers that Ray Serve runs"),
    ],
)
def test_a_wrong_option_is_named_in_a_line(args: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError) as wrong:
        Options.of(args)
    assert str(wrong.value).startswith(words)
    assert "\n" not in str(wrong.value)


def test_what_concerns_only_router_and_ingress_is_not_sent_and_no_prompt_is_printed() -> None:
    added = {"custom_params": {}}
    call = Call("POST", "/generate", (("a", "b"),), b"what a user wrote", added, frozenset("x"), "x", "", lambda: None)
    sent = pickle.loads(pickle.dumps(call))  # noqa: S301 - our own
    assert (sent.method, sent.path, sent.headers, sent.body) == ("POST", "/generate", (("a", "b"),), call.body)
    assert sent.added == added
    assert (sent.tried, sent.replica, sent.answered) == (frozenset(), None, None)
    assert "wrote" not in repr(call)


@pytest.mark.parametrize(
    ("address", "is_same_node", "is_heard"),
    [
        ("tcp://127.0.0.1:5557", True, True),
        ("tcp://127.0.0.1:5557", False, False),
        ("ipc:///tmp/events", False, False),
        ("tcp://10.0.0.7:5557", False, True),
    ],
)
def test_another_nodes_loopback_is_not_listened_to_on_this_one(
    address: str, is_same_node: bool, is_heard: bool
) -> None:
    said = {"marconi": {"ranks": [{"events": {"events": address}}]}}
    assert ("why_no_events" not in reachable(said, is_same_node=is_same_node)) == is_heard


@pytest.mark.parametrize("said", [{}, {"marconi": None}, {"marconi": {"ranks": 3}}, {"marconi": {"ranks": [None, 5]}}])
def test_what_says_nothing_of_events_is_passed_on(said: dict[str, Any]) -> None:
    assert reachable(said, is_same_node=False) == said
