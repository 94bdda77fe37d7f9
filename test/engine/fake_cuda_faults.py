"""Hooks around SGLang's CUDA kernels, and operators of ours, that raise in a prefill on a card that is not there.

All are planted before any is put in, and raise nothing until a case names one: a hook by what it hooks, as several
functions may have the same one, an operator by itself.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from types import SimpleNamespace
from typing import Any, Final

from .fake_cuda_models import Model, gated_delta_net, kimi_delta_attention, mamba2

OPERATORS: Final = (
    "short_conv.checkpoint",
    "gated_delta_rule.checkpoint",
    "gated_delta_rule.advance",
    "kda.checkpoint",
    "mamba2.checkpoint",
    "state_copy.copy",
)


class Planted(Exception):
    """Raised where a case asks for it."""


@dataclass(slots=True)
class Fault:
    """What raises now, and whether `before` or `after` its work."""

    where: str = ""
    when: str = ""

    def planted(self, where: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, which raises if `where` is named."""

        @wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            if (self.where, self.when) == (where, "before"):
                raise Planted(where)
            result = function(*args, **kwargs)
            if (self.where, self.when) == (where, "after"):
                raise Planted(where)
            return result

        return run

    def plant(self) -> None:
        """Plant it in every hook that is put in from now on, and in every operator."""
        from marconi.engine.plugin import touch as touches
        from marconi.engine.prefill import operands, spans

        put_in = touches._put_in

        def put_in_planted(group: touches.Group, touch: touches.Touch) -> Callable[..., Any]:
            raising: Any = SimpleNamespace(
                kind=touch.kind,
                hook=touch.hook,
                function=self.planted(touch.target, touch.function),
                fails_open=touch.fails_open,
            )
            made: Any = put_in(group, raising)
            # By this it is found inside its target.
            made.__wrapped__ = touch.function
            found: Callable[..., Any] = made
            return found

        touches._put_in = put_in_planted
        for name in OPERATORS:
            operator, _, function = name.partition(".")
            module = getattr(spans if operator == "state_copy" else operands, operator)
            setattr(module, function, self.planted(name, getattr(module, function)))

    @contextmanager
    def raised(self, where: str, when: str) -> Iterator[dict[str, Any]]:
        """Raise there meanwhile; gives what was noticed."""
        from marconi.engine import faults

        noticed: dict[str, Any] = {"lines": []}
        listener = logging.Handler()
        listener.emit = lambda record: noticed["lines"].append(record.getMessage())  # type: ignore[method-assign]
        faults.logger.addHandler(listener)
        caught = faults.Faults()
        token = faults.OF_PROCESS.set(caught)
        self.where, self.when = where, when
        try:
            yield noticed
        finally:
            self.where = self.when = ""
            faults.OF_PROCESS.reset(token)
            faults.logger.removeHandler(listener)
            noticed["num"] = caught.num


def model_of(where: str) -> tuple[str, Model]:
    """A case whose prefill meets what stands at `where`, by its name, and its model."""
    if "kda" in where:
        return "KDA by Triton", kimi_delta_attention()
    if any(each in where for each in ("mamba2", "chunk_state_varlen", "causal_conv1d_triton")):
        return "Mamba2", mamba2()
    if any(each in where for each in ("flashinfer", "l2norm", "advance")):
        return "GDN by FlashInfer", gated_delta_net("FlashInferGDNKernel")
    return "GDN by Triton", gated_delta_net("TritonGDNKernel")


def places() -> list[tuple[str, str]]:
    """Every (place, when): hooks before and after their work, operators before theirs."""
    from marconi.engine.plugin import upstream

    hooks = [each.target for each in upstream.KERNELS.hooks]
    return [(where, when) for where in hooks for when in ("before", "after")] + [(name, "before") for name in OPERATORS]
