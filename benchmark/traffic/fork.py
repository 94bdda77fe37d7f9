"""A fork of SGLang's frontend whose branches arrive at once, and its requests as our client asks them.

The frontend runs each branch in a thread of its own. Here they wait for each other, so that what arrives together does
not depend on threads. And none runs before the fork has looked at its program, as it is without `s.sync()` on a machine
that does nothing else: what a program has not executed by then is not committed.
"""

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import sglang as sgl
from sglang.lang.backend.base_backend import BaseBackend
from sglang.lang.chat_template import get_chat_template

from .oracle import Asked
from .program import Ask, Wave, Way
from .text import text_of

Send = Callable[[Sequence[Ask]], list[list[Asked]]]


def run(wave: Wave, send: Send) -> list[list[Asked]]:
    """Fork `wave`'s context into its branches: per branch what came of it, the first after what was committed."""
    backend = _Backend(wave, send)
    context = text_of(wave.context.prompt)
    heads = [text_of(branch.prompt[wave.num_shared_tokens :]) for branch in wave.asks]
    with _no_switches():
        state = _program.run(context=context, heads=heads, syncs=wave.way is Way.SYNCED_FORK, backend=backend)
    if state.error() is not None:
        raise state.error()
    answers = [backend.answers[branch.prompt] for branch in wave.asks]
    answers[0] = [*backend.committed, *answers[0]]
    return answers


@sgl.function  # type: ignore[untyped-decorator]
def _program(s: Any, context: str, heads: list[str], syncs: bool) -> None:
    s += context
    if syncs:
        s.sync()
    forks = list(s.fork(len(heads)))
    for fork, head in zip(forks, heads, strict=True):
        fork += head
        fork += sgl.gen("answer")
    for fork in forks:
        fork.sync()
        if fork.error() is not None:
            raise fork.error()


@contextmanager
def _no_switches() -> Iterator[None]:
    """A thread that does not wait goes on."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1.0)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


class _Backend(BaseBackend):  # type: ignore[misc]
    """Sends what the frontend would send, by `send`."""

    def __init__(self, wave: Wave, send: Send) -> None:
        super().__init__()
        self.committed: list[Asked] = []
        self.answers: dict[Sequence[int], list[Asked]] = {}
        self._wave = wave
        self._send = send
        self._error: Exception | None = None
        self._all_there = threading.Barrier(len(wave.asks), action=self._ask)

    def get_chat_template(self) -> Any:
        """The program uses none."""
        return get_chat_template("default")

    def commit_lazy_operations(self, s: Any) -> None:
        """What the branches share is there before the first of them."""
        assert s.text_ == text_of(self._wave.context.prompt), "a fork commits its context"
        (self.committed,) = self._send([self._wave.context])

    def generate(self, s: Any, sampling_params: Any) -> tuple[str, dict[str, Any]]:
        """The answer to one branch, when all have asked."""
        self._all_there.wait()
        if self._error is not None:
            raise self._error
        (branch,) = (each for each in self._wave.asks if text_of(each.prompt) == s.text_)
        return text_of(self.answers[branch.prompt][-1].served.output), {}

    def _ask(self) -> None:
        # Raised here, it would tell the other branches no more than that the barrier broke.
        try:
            asks = self._wave.asks
            self.answers = {ask.prompt: answer for ask, answer in zip(asks, self._send(asks), strict=True)}
        except Exception as error:
            self._error = error
