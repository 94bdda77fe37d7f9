"""Hooks that fail open: what one of ours raises is caught, and SGLang does what it would have done without it.

    after, before    the hook did nothing
    around           what it hooks runs as it was called, or has run: its result stands
    by itself        a step that SGLang's own code calls in the middle (`fails_open`) did nothing

A hook that does nothing but at times (`acts_while`) is not called at others, and what it hooks runs at once: most time
that a hook takes is that of the calls around it, which a recurrent layer pays several times over.

What SGLang itself raises below a hook passes through. A fault is logged once for each hook, with its traceback, and
counted. It leaves states unwritten, never a wrong one; the cache then stops planning on all ranks
(`cache/radix_cache.py`, `cache/tick.py`).

The hooks of a scheduler run on its thread, in whose context its cache has left its `Faults`; those of the process that
answers HTTP have some of their own, which are logged alone. A hook that decides what is scheduled reads what every rank
has, so it fails on all ranks or on none; one that runs in a forward may fail on one rank alone, and what it leaves is
agreed upon before it is kept.

Owner: the thread that runs the hooks: the scheduler's, or that which answers HTTP.
"""

import logging
from collections import Counter
from collections.abc import Callable
from contextvars import ContextVar
from functools import wraps
from typing import Any, ParamSpec, TypeVar

logger = logging.getLogger(__name__)

Arguments = ParamSpec("Arguments")


class Unrecoverable(Exception):
    """Raised where SGLang can no longer do what it would have done: a wrong answer would follow."""


class Faults:
    """Faults of the hooks of one process."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self.first: str | None = None
        """The first one, in a line; None without any."""

    @property
    def num(self) -> int:
        """All that were caught."""
        return self._counts.total()

    def catch(self, hook: str, error: Exception) -> None:
        """Count that `hook` has raised `error`; the first time, log it."""
        if not self._counts[hook]:
            logger.error("marconi: %s failed, and SGLang continues without it", hook, exc_info=error)
        self._counts[hook] += 1
        self.note(f"{hook} raised {type(error).__name__}")

    def note(self, what: str | None) -> None:
        """Planned states cannot be relied on because of `what`; None changes nothing."""
        self.first = self.first or what


OF_PROCESS: ContextVar[Faults] = ContextVar("marconi_faults")
"""The faults of this process, to which its hooks add the errors that they raise."""


def caught(hook: str, error: Exception) -> None:
    """Note that `hook` has raised `error`."""
    faults = OF_PROCESS.get(None)
    (Faults() if faults is None else faults).catch(hook, error)


def fails_open(step: Callable[Arguments, None]) -> Callable[Arguments, None]:
    """A step that does nothing where it raises."""

    @wraps(step)
    def run(*args: Arguments.args, **kwargs: Arguments.kwargs) -> None:
        try:
            step(*args, **kwargs)
        except Exception as error:
            caught(step.__name__, error)

    return run


Hook = TypeVar("Hook", bound=Callable[..., Any])


def acts_while(is_due: Callable[[], object]) -> Callable[[Hook], Hook]:
    """Mark a hook that has something to do only while `is_due`, which must not raise, is true."""

    def mark(hook: Hook) -> Hook:
        setattr(hook, _ACTS_WHILE, is_due)
        return hook

    return mark


_ACTS_WHILE = "marconi_acts_while"
"""On a hook: when it acts, or nothing where it always does."""


def beside(name: str, hook: Callable[..., Any]) -> Callable[..., Any]:
    """`hook`, of SGLang's kinds before and after, failing open as `name`."""
    is_due = getattr(hook, _ACTS_WHILE, None)

    @wraps(hook)
    def run(*args: Any, **kwargs: Any) -> Any:
        if is_due is not None and not is_due():
            return None
        try:
            return hook(*args, **kwargs)
        except Exception as error:
            caught(name, error)
            return None

    return run


def around(name: str, hook: Callable[..., Any]) -> Callable[..., Any]:
    """`hook`, which is given what it hooks and calls it at most once as a whole, failing open as `name`."""
    is_due = getattr(hook, _ACTS_WHILE, None)

    @wraps(hook)
    def run(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if is_due is not None and not is_due():
            return original(*args, **kwargs)
        call = _Call(original)
        try:
            return hook(call, *args, **kwargs)
        except Exception as error:
            # What failed by itself, or was called in parts, has no result to stand.
            if call.has_failed or call.num > 1 or isinstance(error, Unrecoverable):
                raise
            caught(name, error)
            return call.result if call.num else original(*args, **kwargs)

    return run


class _Call:
    """The original of an around hook, with the number of its calls and the last result."""

    __slots__ = ("_original", "has_failed", "num", "result")

    def __init__(self, original: Callable[..., Any]) -> None:
        self._original = original
        self.num = 0
        self.result: Any = None
        self.has_failed = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.num += 1
        self.has_failed = True
        self.result = self._original(*args, **kwargs)
        self.has_failed = False
        return self.result
