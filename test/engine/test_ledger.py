"""The contract with upstream: what is changed and what is used of SGLang is as it was verified, and nothing else is."""

import inspect
import json
import pkgutil
from collections.abc import Iterator
from importlib import import_module

import pytest
from sglang.srt.plugins import load_plugins

import marconi.engine
import marconi_cpu
import marconi_cpu.demo
from marconi.engine.plugin import upstream
from marconi.engine.plugin.touch import Kind, Touch, is_hooked, resolve

from . import ledger

EVERY_TOUCH = [touch for group in ledger.GROUPS for touch in group.touches]
HOOKS = (Kind.BEFORE, Kind.AFTER, Kind.AROUND, Kind.REPLACE)
SEAMS = ("SRTPlatform", "DeviceMixin", "UnifiedTreeCoreInterface")
"""Classes of SGLang whose methods are there to be overridden."""


def test_the_installed_sglang_is_the_one_that_was_verified() -> None:
    lines = list(map(str, ledger.moved(json.loads(ledger.SNAPSHOT.read_text()))))
    assert not lines, "\n".join(["what SGLang is used for has changed:", *lines])


def test_the_snapshot_has_every_name_that_is_used_or_changed_and_no_other() -> None:
    written, found = set(json.loads(ledger.SNAPSHOT.read_text())), set(ledger.users())
    assert written == found, f"run `make ledger`: {sorted(written ^ found)}"


def test_a_target_that_is_gone_or_moved_is_noticed() -> None:
    verified = {
        "sglang.srt.mem_cache.registry.create_tree_cache": "(ctx, clock)",
        "sglang.srt.mem_cache.registry.create_a_cache_that_never_was": "(ctx)",
        "sglang.srt.mem_cache.a_module_that_never_was.create_tree_cache": "(ctx)",
        "sglang.srt.managers.schedule_batch.Req.num_wishes": "attribute",
        "sglang.srt.managers.schedule_batch.Req.reasoning_tokens": "attribute",
    }
    found = list(ledger.moved(verified))
    assert list(map(str, found)) == [
        "sglang.srt.mem_cache.registry.create_tree_cache is (ctx), was (ctx, clock)",
        "sglang.srt.mem_cache.registry.create_a_cache_that_never_was is gone, was (ctx)",
        "sglang.srt.mem_cache.a_module_that_never_was.create_tree_cache is gone, was (ctx)",
        "sglang.srt.managers.schedule_batch.Req.num_wishes is gone, was attribute",
    ]
    assert list(ledger.by_file(found[:2], {found[0].name: {"b.py", "a.py"}, found[1].name: {"b.py"}})) == [
        "a.py",
        "    srt.mem_cache.registry.create_tree_cache",
        "        was  (ctx, clock)",
        "        is   (ctx)",
        "b.py",
        "    srt.mem_cache.registry.create_tree_cache",
        "        was  (ctx, clock)",
        "        is   (ctx)",
        "    srt.mem_cache.registry.create_a_cache_that_never_was",
        "        was  (ctx)",
        "        is   gone",
    ]


def test_a_name_that_moves_is_found_in_the_files_that_use_it() -> None:
    users = ledger.users()
    cache = "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache"
    assert "python/marconi/engine/cache/radix_cache.py" in users[cache]
    (hook,) = (touch for touch in upstream.PLUGIN.touches if touch.kind is Kind.BEFORE)
    assert "python/marconi/engine/plugin/startup.py" in users[hook.target]


def test_every_way_to_use_a_name_of_sglangs_is_seen() -> None:
    source = """
import sglang.version
from marconi.engine.launch.flags import Flags
if TYPE_CHECKING:
    from sglang.srt.c import Params
def f(req: Any, params: "Params", flags: Flags, adder: Flags):
    from sglang.srt.a import b
    b.first.second(req.rid, req.kv.size, params.page_size, flags.events, adder.budget, sglang.version.__version__)
"""
    req = "sglang.srt.managers.schedule_batch.Req"
    assert ledger.names_in(source) == {
        "sglang.srt.a.b",
        "sglang.srt.a.b.first.second",
        f"{req}.rid",
        f"{req}.kv",
        "sglang.srt.c.Params.page_size",
        "sglang.version.__version__",
    }


@pytest.mark.parametrize("touch", EVERY_TOUCH, ids=lambda touch: f"{touch.kind} {touch.target}")
def test_a_change_has_a_hook_if_it_is_one_and_says_why(touch: Touch) -> None:
    assert touch.why
    assert bool(touch.hook) is (touch.kind in HOOKS)
    if touch.hook:
        assert callable(touch.function)


def test_no_change_stands_twice() -> None:
    assert len({(touch.target, touch.kind) for touch in EVERY_TOUCH}) == len(EVERY_TOUCH)
    assert all(group.until and group.where for group in ledger.GROUPS)


def overridden(ours: type) -> Iterator[str]:
    """What a class of ours changes of SGLang's classes that it extends: these themselves, and what it overrides."""
    theirs = [base for base in ours.__mro__ if base.__module__.startswith("sglang.")]
    yield from (f"{base.__module__}.{base.__qualname__}" for base in ours.__bases__ if base in theirs)
    for name, value in vars(ours).items():
        owner = next((base for base in theirs if name in vars(base)), None)
        is_method = inspect.isroutine(value) and not name.startswith("__")
        if owner is not None and owner.__name__ not in SEAMS and is_method:
            yield f"{owner.__module__}.{owner.__qualname__}.{name}"


def test_every_subclass_and_override_is_in_the_ledger() -> None:
    modules = [
        import_module(found.name)
        for package in (marconi.engine, marconi_cpu, marconi_cpu.demo)
        for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
        if not found.name.endswith("__main__")
    ]
    classes = {
        each
        for module in modules
        for each in vars(module).values()
        if inspect.isclass(each) and each.__module__ == module.__name__
    }
    listed = {touch.target for touch in EVERY_TOUCH if touch.kind in (Kind.SUBCLASS, Kind.OVERRIDE)}
    assert {name for each in classes for name in overridden(each)} == listed


def test_an_override_is_found() -> None:
    cache = resolve("sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache")
    ours = type("Ours", (cache,), {"reset": lambda self: None, "rest": lambda self: None})
    path = f"{cache.__module__}.UnifiedRadixCache"
    assert set(overridden(ours)) == {path, f"{path}.reset"}


def test_a_signature_is_seen_through_our_hooks() -> None:
    load_plugins()
    (touch,) = (touch for touch in upstream.PLUGIN.touches if touch.kind is Kind.BEFORE)
    assert is_hooked(touch)
    assert ledger.signature_of(touch.target) == "(self)"


def test_the_page_is_the_ledger() -> None:
    assert ledger.PAGE.read_text(encoding="utf-8") == ledger.page(), "run `make ledger`"
