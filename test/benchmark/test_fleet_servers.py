"""The benchmark of rules before real servers, without one: what it asks of the default rule, and its errors."""

from dataclasses import replace

import pytest

from .scripts import load

servers = load("fleet_servers")

ROUND = servers.Round([60, 40], 1_000, 800, 1.1, 2.0, {"confirmed": 1}, [])
FAR_OFF = (replace(ROUND, num_requests=[100, 0], median_s=9.0), replace(ROUND, num_cached_tokens=0))


def figures(router: str = "state-aware", shape: str = "chats", **changed: object) -> object:
    """Of five rounds; a single one in either direction changes no median."""
    return servers.Figures(shape, router, [*[replace(ROUND, **changed)] * 3, *FAR_OFF])


LEAST_LOADED = figures("least-loaded", num_cached_tokens=900, median_s=1.0)
KV_ONLY = figures("kv-only", median_s=0.5)


def test_the_default_may_be_at_every_limit_and_not_beyond_it() -> None:
    assert servers.failures([LEAST_LOADED, KV_ONLY, figures()]) == []
    assert servers.failures([LEAST_LOADED, KV_ONLY, figures(num_requests=[61, 39])]) == [
        "chats, state-aware: the busiest server has 1.22 times an equal share"
    ]
    assert servers.failures([LEAST_LOADED, KV_ONLY, figures(median_s=1.2)]) == [
        "chats, state-aware: the median first token is 1.20 times least-loaded's"
    ]
    assert servers.failures([LEAST_LOADED, KV_ONLY, figures(num_cached_tokens=799)]) == [
        "chats, state-aware: 799 tokens cached, 800 under kv-only, 0.12 % less"
    ]


def test_only_one_shared_prefix_must_be_spread_and_what_was_not_measured_is_not_asked() -> None:
    uneven = [100, 0]
    assert len(servers.failures([figures(num_requests=uneven)])) == 1
    assert servers.failures([figures(shape="documents", num_requests=uneven)]) == []
    assert servers.failures([figures(num_requests=[100, 0, 0])]) == []
    assert servers.failures([LEAST_LOADED, KV_ONLY]) == []


def test_sessions_share_as_many_prefixes_as_their_shape_has_and_none_with_the_warm_up() -> None:
    firsts = {name: {tuple(shape.prefix(each)[:8]) for each in range(24)} for name, shape in servers.SHAPES.items()}
    assert {name: len(found) for name, found in firsts.items()} == {
        "chats": 1,
        "documents": 6,
        "agents": 1,
        "random": 1,
    }
    assert firsts["random"] == {()}
    assert all(servers.WARM_UP[:8] not in found for found in firsts.values())


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("--shape", "chat", "got 'chat'"),
        ("--router", "own-tree", "got 'own-tree'"),
        ("--sessions", "0", "--sessions must be 1 to 83, got 0"),
        ("--rounds", "0", "--rounds must be 1 or more, got 0"),
    ],
)
def test_what_cannot_be_is_one_line(option: str, value: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        servers.main([option, value])
    assert says in capsys.readouterr().err
