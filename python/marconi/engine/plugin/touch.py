"""A touch: one place where this project changes what SGLang does (`upstream.toml` lists those of a package).

SGLang only logs a hook that fails, and an internal that moved shows as a wrong answer much later. So a hook must be
found inside its target before anything is served (`require_hooked`), and the contract test holds the signature of each
target. While it serves, a hook without which SGLang could continue fails open (`faults.py`).
"""

import pkgutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

import msgspec
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from marconi.engine import faults
from marconi.engine.version import Refusal


class Kind(StrEnum):
    """How a target is changed."""

    BEFORE = "hook before"
    AFTER = "hook after"
    AROUND = "hook around"
    REPLACE = "replaced"
    ASSIGN = "assigned"
    SUBCLASS = "subclassed"
    OVERRIDE = "overridden"


@dataclass(frozen=True, slots=True)
class Touch:
    """One change of SGLang."""

    kind: Kind
    target: str
    """Dotted path of what is changed."""
    why: str
    hook: str = ""
    """The dotted path of a hook's callable: below `marconi.engine`, or whole where it begins with `marconi`.

    Its module is imported when it is put in, in every process and before SGLang has chosen its platform: what it needs
    of the scheduler, the models and the HTTP server it imports in its functions.
    """
    until: str = ""
    """The upstream change that would remove it; empty if its group names one."""
    fails_open: bool = False
    """True if what its hook raises is caught, in whatever group it is."""

    @property
    def function(self) -> Callable[..., Any]:
        """The callable that `hook` names."""
        path = self.hook if self.hook.startswith("marconi") else f"marconi.engine.{self.hook}"
        function: Callable[..., Any] = resolve(path)
        return function


@dataclass(frozen=True, slots=True)
class Group:
    """Changes that a process takes on together."""

    title: str
    where: str
    """Processes that it changes, and when."""
    until: str
    touches: tuple[Touch, ...]
    fails_open: bool = False
    """True if what its hooks raise is caught (`faults.py`)."""

    def passes_over(self, touch: Touch) -> bool:
        """True if SGLang continues where the hook of `touch`, one of these, raises."""
        return self.fails_open or touch.fails_open

    @property
    def hooks(self) -> tuple[Touch, ...]:
        """Those that are put in by name."""
        return tuple(touch for touch in self.touches if touch.hook)


def groups_of(path: Path) -> dict[str, Group]:
    """The groups that a TOML file lists, by name, in its order; raises `msgspec.ValidationError` for other fields."""
    return msgspec.toml.decode(path.read_bytes(), type=dict[str, Group])


def resolve(target: str) -> Any:
    """The object at the dotted path `target`; raises ImportError or AttributeError when there is none."""
    return pkgutil.resolve_name(target)


def is_hooked(touch: Touch) -> bool:
    """True if the hook of `touch` is part of what its target calls now.

    SGLang chains wrappers by `__wrapped__`, each holding its hook in a closure.
    """
    hook = touch.function
    try:
        found = resolve(touch.target)
    except (ImportError, AttributeError):
        return False
    found = getattr(found, "__func__", found)
    while found is not None:
        if found is hook:
            return True
        held = [cell.cell_contents for cell in getattr(found, "__closure__", None) or ()]
        # One that fails open wraps it.
        if any(each is hook or getattr(each, "__wrapped__", None) is hook for each in held):
            return True
        found = getattr(found, "__wrapped__", None)
    return False


def register(*groups: Group) -> None:
    """Register the hooks of `groups` with SGLang, which puts them in at its next `apply_hooks`."""
    for group in groups:
        for touch in group.hooks:
            HookRegistry.register(touch.target, _put_in(group, touch), HookType[touch.kind.name])


def _put_in(group: Group, touch: Touch) -> Callable[..., Any]:
    """The hook of `touch`, as it stands in `group`."""
    if not group.passes_over(touch):
        return touch.function
    assert touch.kind is not Kind.REPLACE, f"{touch.target}: nothing is left to go on with"
    failing_open = faults.around if touch.kind is Kind.AROUND else faults.beside
    return failing_open(touch.hook, touch.function)


def hook_into(*groups: Group) -> None:
    """Put the hooks of `groups` in now, in this process alone; raises `Refusal` if one does not take effect."""
    for group in groups:
        missing = tuple(touch for touch in group.hooks if not is_hooked(touch))
        register(replace(group, touches=missing))
    HookRegistry.apply_hooks()
    require_hooked(*groups)


def require_hooked(*groups: Group) -> None:
    """Raise `Refusal` naming every hook of `groups` that did not take effect."""
    missing = [touch.target for group in groups for touch in group.hooks if not is_hooked(touch)]
    if missing:
        raise Refusal(
            f"{len(missing)} hook(s) did not take effect: {', '.join(missing)}; "
            "another plugin may have replaced them (SGLANG_PLUGINS=marconi,marconi_cpu_kernels loads ours alone)"
        )
