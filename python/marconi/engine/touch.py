"""A touch: one place where this project depends on an SGLang internal.

Hooks that fail are only logged by SGLang, and an internal that moved shows as a wrong answer much later. So each
touch records what it expects: `signature_of(target)` must equal `signature` (the contract test), and a hook must
be found inside the target at start-up (`require_hooked`).
"""

import inspect
import pkgutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from marconi.engine.version import Refusal


class Kind(StrEnum):
    """How a target is touched."""

    AFTER = "hook after"
    AROUND = "hook around"
    REPLACE = "replaced"
    ASSIGN = "assigned"
    SUBCLASS = "subclassed"
    OVERRIDE = "overridden"
    CALL = "called"
    READ = "read"


HOOKS = (Kind.AFTER, Kind.AROUND, Kind.REPLACE)


@dataclass(frozen=True, slots=True)
class Touch:
    """One dependency on upstream.

    `target` is a dotted path below `sglang`; `signature` is what `signature_of` gives for it, None
    where only its presence matters; `why` is what it is for;
    `until` is what would let it go; `hook` is the callable put in, if any.
    """

    target: str
    kind: Kind
    signature: str | None
    why: str
    until: str
    hook: Callable[..., Any] | None = None


def resolve(target: str) -> Any:
    """The object at the dotted path `target`; raises ImportError or AttributeError when it is gone."""
    return pkgutil.resolve_name(target)


def signature_of(target: str) -> str:
    """Names, kinds and defaults of the parameters of upstream's `target`, looking through our hooks.

    Without annotations, whose text differs between versions of Python; empty for what takes no arguments at all.
    """
    found = resolve(target)
    if not callable(found):
        return ""
    signature = inspect.signature(found)
    bare = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in signature.parameters.values()]
    return str(signature.replace(parameters=bare, return_annotation=inspect.Signature.empty))


def is_hooked(touch: Touch) -> bool:
    """Whether `touch.hook` is part of what `touch.target` calls now.

    SGLang chains wrappers by `__wrapped__`, each holding its hook in a closure.
    """
    found = resolve(touch.target)
    found = getattr(found, "__func__", found)
    while found is not None:
        if found is touch.hook:
            return True
        cells = getattr(found, "__closure__", None) or ()
        if any(cell.cell_contents is touch.hook for cell in cells):
            return True
        found = getattr(found, "__wrapped__", None)
    return False


def hook_into(touches: Iterable[Touch]) -> None:
    """Put the hooks among `touches` in now, in this process alone; raises `Refusal` if one does not take effect."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    types = {Kind.AFTER: HookType.AFTER, Kind.AROUND: HookType.AROUND, Kind.REPLACE: HookType.REPLACE}
    hooks = [touch for touch in touches if touch.kind in HOOKS]
    for touch in hooks:
        if touch.hook is not None and not is_hooked(touch):
            HookRegistry.register(touch.target, touch.hook, types[touch.kind])
    HookRegistry.apply_hooks()
    require_hooked(hooks)


def require_hooked(touches: Iterable[Touch]) -> None:
    """Raise `Refusal` naming every hook among `touches` that did not take effect."""
    missing = [touch.target for touch in touches if touch.kind in HOOKS and not is_hooked(touch)]
    if missing:
        raise Refusal(
            f"{len(missing)} hook(s) did not take effect: {', '.join(missing)}; "
            "another plugin may have replaced them (SGLANG_PLUGINS=marconi,marconi_cpu_kernels loads ours alone)"
        )
