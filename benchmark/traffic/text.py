"""Prompts: made-up text, and conversations as a chat template renders them, in the small models' tokens.

A token is a byte, so a prompt's ids are known without a tokenizer, and what the model generates, printable ASCII, is
what a client sends back. `</think>` is no token of these models: a client cuts an answer in two where it would stand.
"""

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from marconi_cpu.tiny_model.tokenizer import GENERATED_IDS, NUM_SPECIAL, SPECIAL_TOKENS, TURN_END, TURN_START

THINK = "<think>\n"


@dataclass(frozen=True, slots=True)
class Message:
    """One of a conversation."""

    role: str
    content: str
    reasoning: str = ""
    """Of the assistant, what it thought before `content`."""

    def to_json(self) -> dict[str, str]:
        """As OpenAI's API takes it."""
        reasoning = {"reasoning_content": self.reasoning} if self.reasoning else {}
        return {"role": self.role, "content": self.content, **reasoning}


class Thinking(Enum):
    """What a template renders of earlier thinking; all but `NONE` invite the model to think."""

    NONE = "none"
    ALL = "all"
    IN_THE_LAST_TURN = "in the last turn"
    """Since the last message of the user's, as Qwen3's template has it, and `REASONING_TEMPLATE`."""


def rendered(messages: Sequence[Message], thinking: Thinking) -> list[int]:
    """The ids of a prompt that asks for the next message."""
    ids: list[int] = []
    last_user = max((index for index, message in enumerate(messages) if message.role == "user"), default=-1)
    for index, message in enumerate(messages):
        keeps = thinking is Thinking.ALL or (thinking is Thinking.IN_THE_LAST_TURN and index > last_user)
        thought = f"{THINK}{message.reasoning}" if message.reasoning and keeps else ""
        ids += [_TURN_START_ID, *ids_of(f"{message.role}\n{thought}{message.content}"), _TURN_END_ID, *ids_of("\n")]
    return [*ids, _TURN_START_ID, *ids_of("assistant\n" + (THINK if thinking is not Thinking.NONE else ""))]


_TURN_START_ID, _TURN_END_ID = SPECIAL_TOKENS.index(TURN_START), SPECIAL_TOKENS.index(TURN_END)


def ids_of(text: str) -> list[int]:
    """The tokens of a text without special ones."""
    return [NUM_SPECIAL + byte for byte in text.encode("ascii")]


def text_of(ids: Iterable[int]) -> str:
    """The text of tokens that are not special."""
    return bytes(token - NUM_SPECIAL for token in ids).decode("ascii")


def made_up(rng: random.Random, num_tokens: int) -> str:
    """A text that nothing else begins like."""
    return text_of(rng.choices(GENERATED_IDS, k=num_tokens))
