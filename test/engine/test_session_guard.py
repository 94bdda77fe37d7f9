"""Turns that replace others of their session: the session goes on, and those that are replaced end."""

from array import array
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.schedule_batch import FINISH_ABORT
from sglang.srt.session.session_controller import Session

from marconi.engine.guards.session import around_create_req


class Turns:
    """A session of SGLang's own, without a scheduler: what its turns become is what they were given."""

    def __init__(self) -> None:
        self.session = Session(1000, "s")

    def take(self, rid: str, *, after: str | None = None, replace: bool = False) -> Any:
        """The turn `rid`, as the scheduler would make it of a request."""
        params = SimpleNamespace(rid=after, replace=replace, offset=None, drop_previous_output=None)
        request = SimpleNamespace(rid=rid, session_params=params, input_ids=array("q", [len(rid)]))
        make = Session.create_req
        return around_create_req(
            getattr(make, "__wrapped__", make), self.session, _Anything(request), None, 100, req_factory=_turn
        )

    @property
    def rids(self) -> set[str]:
        return set(self.session.req_nodes)


class _Anything(SimpleNamespace):
    """A request whose other fields say nothing."""

    def __init__(self, told: SimpleNamespace):
        super().__init__(**vars(told))

    def __getattr__(self, name: str) -> None:
        return None


def _turn(*, rid: str, origin_input_ids: Any, **_others: Any) -> Any:
    turn = SimpleNamespace(
        rid=rid,
        origin_input_ids=origin_input_ids,
        origin_input_ids_unpadded=origin_input_ids,
        output_ids=array("q", [7]),
        sampling_params=SimpleNamespace(max_new_tokens=1),
        multimodal_inputs=None,
        finished_reason=None,
        to_finish=None,
        finished=lambda: True,
        inherit_mm_token_counts=lambda _last: None,
    )
    turn.set_finish_with_abort = lambda message: setattr(turn, "to_finish", FINISH_ABORT(message))
    return turn


def is_ended(turn: Any) -> bool:
    return isinstance(turn.to_finish, FINISH_ABORT)


@pytest.mark.parametrize("num_turns", [1, 2, 5])
def test_a_turn_replaces_all_others(num_turns: int) -> None:
    turns = Turns()
    taken = [turns.take(f"r{i}", after=f"r{i - 1}" if i else None) for i in range(num_turns)]
    turns.take("new", replace=True)
    assert turns.rids == {"new"}
    assert all(is_ended(turn) for turn in taken)


def test_a_turn_replaces_those_that_went_on_from_one_even_of_the_same_id() -> None:
    turns = Turns()
    first, other = turns.take("first"), turns.take("other")
    again = [turns.take("again", after="first") for _ in range(2)]
    deeper = turns.take("deeper", after="again")
    new = turns.take("new", after="first", replace=True)
    assert turns.rids == {"first", "other", "new"}
    assert all(is_ended(turn) for turn in (first, *again, deeper))
    assert not is_ended(other)
    assert new.origin_input_ids == array("q", [5, 7, 3]), "it goes on from the one that it replaces"
    turns.take("last", replace=True)
    assert turns.rids == {"last"}


def test_a_turn_that_has_ended_is_not_ended_again() -> None:
    turns = Turns()
    first = turns.take("first")
    first.finished_reason = "length"
    turns.take("new", replace=True)
    assert first.to_finish is None


def test_a_turn_that_replaces_an_unknown_one_ends_and_leaves_the_others() -> None:
    turns = Turns()
    turns.take("first")
    assert is_ended(turns.take("new", after="unknown", replace=True))
    assert turns.rids == {"first"}
