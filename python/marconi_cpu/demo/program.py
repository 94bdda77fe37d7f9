"""The demo's work: kinds of ordinary traffic in turns, a step of each, until all are done.

So time passes between the turns of a conversation as it does in life: by what others ask.
"""

from collections.abc import Callable, Mapping
from typing import Final

from marconi_cpu.demo.client import Client
from marconi_cpu.demo.endpoint import TimedAnswer
from marconi_cpu.demo.size import Size
from marconi_cpu.demo.traffic import KINDS, Texts

NUM_REQUESTS: Final = sum(kind.num_requests for kind in KINDS)


def run(url: str, on_answered: Callable[[], None], size: Size, given: Mapping[str, str]) -> list[TimedAnswer]:
    """Do all the work against the server at `url`, calling `on_answered` after each request.

    `given` is what an earlier run's answers said, by name; empty for the first. Returns the answers by their kinds, the
    same order in every run.
    """
    _warm_up(url, size)
    client, texts = Client(url, on_answered, given), Texts()
    try:
        running = [kind.ask(kind.name, client, texts, size) for kind in KINDS]
        while running:
            running = [steps for steps in running if next(steps, _DONE) is not _DONE]
    finally:
        client.close()
    order = [kind.name for kind in KINDS]
    return sorted(client.answers, key=lambda answer: order.index(answer.kind))


_DONE: Final = object()


def _warm_up(url: str, size: Size) -> None:
    # The first requests pay for what server and client do once; texts of their own, so that no later request hits them.
    client = Client(url, lambda: None, {})
    try:
        client.generate("warm-up", {"text": "0 1 " * (size.num_context_chars // 4 + 1)}, 4)
        client.chat("warm-up", "chat", [{"role": "user", "content": "0"}], 4)
        client.flush()
    finally:
        client.close()
