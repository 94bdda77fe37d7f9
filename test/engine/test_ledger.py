"""The contract with upstream: every touch exists in the installed SGLang with the signature that was verified."""

from importlib.resources import files

import pytest

from marconi.engine import ledger
from marconi.engine.touch import Touch, resolve, signature_of

EVERY_TOUCH = [*ledger.PLUGIN_TOUCHES, *ledger.GUARD_TOUCHES, *ledger.DEMO_TOUCHES, *ledger.CPU_TOUCHES]


@pytest.mark.parametrize("touch", EVERY_TOUCH, ids=lambda touch: touch.target.removeprefix("sglang."))
def test_a_touch_is_where_it_was_with_the_signature_it_had(touch: Touch) -> None:
    assert resolve(touch.target) is not None
    assert signature_of(touch.target) == touch.signature


def test_a_target_that_is_gone_or_moved_is_noticed() -> None:
    with pytest.raises(AttributeError):
        resolve("sglang.srt.mem_cache.registry.create_a_cache_that_never_was")
    assert signature_of("sglang.srt.mem_cache.registry.create_tree_cache") == "(ctx)"


def test_every_touch_says_why_and_what_would_let_it_go() -> None:
    assert all(touch.why and touch.until for touch in EVERY_TOUCH)
    assert len({(touch.target, touch.kind) for touch in EVERY_TOUCH}) == len(EVERY_TOUCH)


def test_the_page_is_the_ledger() -> None:
    page = files("marconi.engine").joinpath("UPSTREAM.md").read_text(encoding="utf-8")
    assert page == ledger.render(), "run `make ledger`"
