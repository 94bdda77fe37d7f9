"""The contract with upstream: every touch exists in the installed SGLang with the signature that was verified."""

import ast
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

import pytest

import marconi.engine
from marconi.engine import ledger
from marconi.engine.touch import Touch, resolve, signature_of
from rig.touches import HOST_TOUCHES

EVERY_TOUCH = [
    *ledger.PLUGIN_TOUCHES,
    *ledger.CORE_TOUCHES,
    *ledger.PREFILL_TOUCHES,
    *ledger.KERNEL_TOUCHES,
    *ledger.joint_touches(),
    *ledger.STATUS_TOUCHES,
    *ledger.EVENT_TOUCHES,
    *ledger.GUARD_TOUCHES,
    *ledger.CHAT_TOUCHES,
    *ledger.SCHEDULER_GUARD_TOUCHES,
    *ledger.DEMO_TOUCHES,
    *ledger.BENCHMARK_TOUCHES,
    *HOST_TOUCHES,
    *ledger.cpu_touches(),
]
ENGINE = Path(marconi.engine.__file__).parent


@pytest.mark.parametrize("touch", EVERY_TOUCH, ids=lambda touch: touch.target.removeprefix("sglang."))
def test_a_touch_is_where_it_was_with_the_signature_it_had(touch: Touch) -> None:
    assert resolve(touch.target) is not None
    if touch.signature is not None:
        assert signature_of(touch.target) == touch.signature


def imported_from_sglang(source: str) -> Iterator[str]:
    """Every name that `source` takes from SGLang, as a dotted path; names that only type checkers see are left out."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sglang."):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_every_name_taken_from_sglang_is_in_the_ledger() -> None:
    targets = [touch.target for touch in EVERY_TOUCH]
    unlisted = {
        f"{path.relative_to(ENGINE)}: {name}"
        for path in ENGINE.rglob("*.py")
        for name in imported_from_sglang(path.read_text(encoding="utf-8"))
        if not any(f"{target}.".startswith(f"{name}.") for target in targets)
    }
    assert not unlisted


def test_a_name_taken_from_sglang_is_seen() -> None:
    source = "def f():\n    from sglang.srt.a import b\nif TYPE_CHECKING:\n    from sglang.srt.c import d"
    assert list(imported_from_sglang(source)) == ["sglang.srt.a.b"]


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
