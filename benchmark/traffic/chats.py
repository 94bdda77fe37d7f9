"""Conversations: chats that think or not, and agents that use tools."""

import random

from .program import Ask, Program, Scale, Wave, Way
from .text import Message, Thinking, made_up, rendered, text_of

NUM_CHATS, NUM_TURNS = 4, 6
USER_TOKENS, THINKING_TOKENS, ANSWER_TOKENS = 120, 200, 100


def chats(rng: random.Random, scale: Scale, thinking: Thinking, way: Way = Way.IDS) -> Program:
    """Chats that share nothing, a turn of each after the other's."""
    num_thinking = scale.tokens(THINKING_TOKENS) if thinking is not Thinking.NONE else 0
    num_output_tokens = num_thinking + scale.tokens(ANSWER_TOKENS)
    histories: list[list[Message]] = [[] for _ in range(scale.times(NUM_CHATS))]
    for _ in range(scale.times(NUM_TURNS)):
        for history in histories:
            history.append(Message("user", made_up(rng, scale.tokens(USER_TOKENS))))
        asks = [
            Ask(tuple(rendered(history, thinking)), num_output_tokens, messages=tuple(history)) for history in histories
        ]
        answers = yield Wave(tuple(asks), way)
        for history, answer in zip(histories, answers, strict=True):
            history.append(
                Message("assistant", text_of(answer[num_thinking:]), reasoning=text_of(answer[:num_thinking]))
            )
