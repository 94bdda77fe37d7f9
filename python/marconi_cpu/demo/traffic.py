"""Kinds of ordinary traffic, each as its clients' steps: between two steps the other kinds' requests come.

A kind takes a client, asks through it, and yields where time passes. Texts are pieces of a page, no two of which begin
alike.
"""

import importlib.metadata
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from marconi_cpu.demo import forks
from marconi_cpu.demo.client import Client
from marconi_cpu.demo.endpoint import TimedEndpoint
from marconi_cpu.demo.size import Size


class Texts:
    """Pieces of the licence, from its start again where it ends.

    It travels with the distribution, and unlike other pages never changes, so neither do the demo's figures with it.
    """

    def __init__(self) -> None:
        page = importlib.metadata.distribution("sglang-marconi").read_text("licenses/LICENSE")
        assert page is not None, "the distribution has its licence"
        self._page = " ".join(page.split())
        self._num_taken = 0
        self._place = 0

    def take(self, num_chars: int) -> str:
        """The next piece, with a number of its own before it."""
        self._num_taken += 1
        head = f"{self._num_taken}. "
        text = self._page[self._place :] + self._page * (num_chars // len(self._page) + 1)
        self._place = (self._place + num_chars) % len(self._page)
        return head + text[:num_chars]


NUM_CHATS, NUM_TURNS = 4, 5
THINKING_SHARE: Final = 2 / 3


def chats(kind: str, client: Client, texts: Texts, size: Size) -> Iterator[None]:
    """Chats of a model that thinks, over OpenAI's API: each client sends its whole history again."""
    histories: list[list[Any]] = [[] for _ in range(NUM_CHATS)]
    for turn in range(1, NUM_TURNS + 1):
        for number, history in enumerate(histories, start=1):
            history.append({"role": "user", "content": texts.take(size.chars(0.25))})
            said = client.chat(kind, f"chat {number}.{turn}", history, 2 * size.max_new_tokens)
            thought, content = parted(said)
            history.append({"role": "assistant", "content": content, "reasoning_content": thought})
        yield


def parted(said: str) -> tuple[str, str]:
    """Split a text into reasoning and answer; where the model marks no border, the first two thirds are reasoning."""
    if "</think>" in said:
        thought, _, content = said.partition("</think>")
        return thought.removeprefix("<think>").strip(), content.strip()
    end = round(THINKING_SHARE * len(said))
    return said[:end], said[end:]


NUM_SYSTEMS, NUM_USERS, NUM_ROUNDS = 3, 4, 5


def users(kind: str, client: Client, texts: Texts, size: Size) -> Iterator[None]:
    """Users of a few system prompts: of one after the other, all of its users at once."""
    systems = [texts.take(size.chars(0.7)) for _ in range(NUM_SYSTEMS)]
    for step in range(NUM_ROUNDS):
        system = step % NUM_SYSTEMS
        prompts = {
            f"system {system + 1}, user {step + 1}.{user}": systems[system] + texts.take(size.chars(0.1))
            for user in range(1, NUM_USERS + 1)
        }
        client.generate(kind, prompts, size.max_new_tokens // 2 + 1)
        yield


NUM_TASKS, NUM_CASES, NUM_EXAMPLES = 3, 15, 10


def examples(kind: str, client: Client, texts: Texts, size: Size) -> Iterator[None]:
    """Tasks with examples before each case: the same, but for the last, which is one of two."""
    tasks = [texts.take(size.chars(0.9)) for _ in range(NUM_TASKS)]
    last = [[texts.take(size.chars(0.1)) for _ in range(2)] for _ in range(NUM_TASKS)]
    for case in range(NUM_CASES):
        task, turn = case % NUM_TASKS, case // NUM_TASKS
        prompt = tasks[task] + last[task][turn % 2] + texts.take(size.chars(0.05))
        client.generate(kind, {f"task {task + 1}.{turn + 1}": prompt}, size.max_new_tokens // 2 + 1)
        if task == NUM_TASKS - 1:
            yield


NUM_DOCUMENTS, NUM_QUESTIONS = 4, 3


def documents(kind: str, client: Client, texts: Texts, size: Size) -> Iterator[None]:
    """Documents, each asked three times, with other traffic between."""
    read = [texts.take(size.chars(0.9)) for _ in range(NUM_DOCUMENTS)]
    for question in range(1, NUM_QUESTIONS + 1):
        for number, document in enumerate(read, start=1):
            prompt = document + texts.take(size.chars(0.05))
            client.generate(kind, {f"document {number}.{question}": prompt}, size.max_new_tokens // 2 + 1)
            if number % 2 == 0:
                yield


NUM_RETRIED, NUM_AT_A_STEP = 10, 2


def retries(kind: str, client: Client, texts: Texts, size: Size) -> Iterator[None]:
    """Prompts that are sent once more a step later, as after a time-out."""
    prompts = [texts.take(size.chars(0.5)) for _ in range(NUM_RETRIED)]
    for first in range(0, NUM_RETRIED + NUM_AT_A_STEP, NUM_AT_A_STEP):
        for attempt, start in ((2, first - NUM_AT_A_STEP), (1, first)):
            for number in range(start, start + NUM_AT_A_STEP):
                if 0 <= number < NUM_RETRIED:
                    name = f"prompt {number + 1}.{attempt}"
                    client.generate(kind, {name: prompts[number]}, size.max_new_tokens // 2 + 1)
        yield


def forked(kind: str, client: Client, texts: Texts, size: Size) -> Iterator[None]:
    """A program of SGLang's frontend."""
    endpoint = TimedEndpoint(client.url, kind, client.on_answered)
    forks.run(endpoint, texts.take(size.chars(1.0)), size.max_new_tokens)
    client.answers += endpoint.answers
    yield


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of traffic."""

    name: str
    ask: Callable[[str, Client, Texts, Size], Iterator[None]]
    num_requests: int


KINDS = (
    Kind("chats that think", chats, NUM_CHATS * NUM_TURNS),
    Kind("users at once", users, NUM_USERS * NUM_ROUNDS),
    Kind("examples", examples, NUM_CASES),
    Kind("documents", documents, NUM_DOCUMENTS * NUM_QUESTIONS),
    Kind("retries", retries, 2 * NUM_RETRIED),
    Kind("forks", forked, forks.NUM_REQUESTS),
)
