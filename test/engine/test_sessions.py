"""`--enable-session-radix-cache` in our cache on SGLang's pools and requests: closing demotes what a session left."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("sglang", reason="the server extra is not installed: pip install '.[server]'")

from marconi.engine.launch.policies import CHUNK_END, PolicyChoice
from marconi.policy.request import Request
from rig.clock import TraceClock
from rig.driver import HostReplay
from rig.pools import COSTS, Strategy, marconi

from .host_replays import Setting, agents

pytestmark = pytest.mark.usefixtures("sglang_configuration")

HOST = Setting(1, Strategy.EXTRA_BUFFER, 16_000, 40).host


class Closing(HostReplay):
    """Requests name their sessions, as SGLang's scheduler writes it on them, and clients close them."""

    def __init__(self, choice: PolicyChoice, *, closes_sessions: bool = True) -> None:
        clock = TraceClock()
        host = replace(HOST, closes_sessions=closes_sessions)
        super().__init__(marconi(host, choice, COSTS, clock), host, 1, clock)
        self._closes = closes_sessions

    def _req(self, request: Request) -> Any:
        req = super()._req(request)
        req.session_id = f"{request.namespace}-{request.session}"
        if self._closes:
            req.session_generation = self.cache.ensure_session_generation(req.session_id)
        return req

    def num_hit_tokens(self, requests: Sequence[Request], *, closes_early: bool = False) -> int:
        """Hit tokens of `requests`, each session of which is closed after its last, or after each of them."""
        last = {request.session: request for request in requests}
        num = 0
        for request in requests:
            num += self.serve(request) or 0
            if closes_early or request is last[request.session]:
                self.cache.release_radix_session(f"{request.namespace}-{request.session}")
        self.check_invariants()
        return num


def test_closed_sessions_leave_their_room_to_open_ones() -> None:
    """And a client that closes sessions which go on pays for it."""
    requests = agents(seed=1, num_sessions=60)
    without = Closing(PolicyChoice("best"), closes_sessions=False).num_hit_tokens(requests)
    assert Closing(PolicyChoice("best")).num_hit_tokens(requests) > without + 2000
    assert Closing(PolicyChoice("best")).num_hit_tokens(requests, closes_early=True) < without


@pytest.mark.parametrize("admission", [None, CHUNK_END])
def test_a_session_that_is_closed_demotes_what_only_it_left(admission: str | None) -> None:
    choice = PolicyChoice("lru") if admission is None else PolicyChoice("lru", admission=admission)
    replay = Closing(choice)
    for request in (one := agents(seed=1, num_sessions=3)):
        replay.serve(request)
    hybrid = replay.cache.tree_core.hybrid
    assert hybrid.retention is None, "nothing is demoted while they are open"
    for session in {request.session for request in one}:
        replay.cache.release_radix_session(f"0-{session}")
    assert hybrid.retention is not None
    assert [*hybrid.retention.demoted(hybrid.tree.root(0))]
    replay.cache.reset()
    assert replay.cache.ensure_session_generation("0-0") > 3, "names come again as other sessions"


def test_the_scheduler_finds_a_cache_that_keeps_sessions() -> None:
    """`create_tree_cache` asks for the attribute, and without the flag SGLang's own tracker stays."""
    kept, plain = (Closing(PolicyChoice("lru"), closes_sessions=closes).cache for closes in (True, False))
    assert kept.enable_session_radix_cache
    assert kept.open_radix_session("a") == kept.ensure_session_generation("a")
    assert not plain.enable_session_radix_cache
    assert plain.tree_core.hybrid.sessions is None
    assert plain.release_radix_session("a") == 0
