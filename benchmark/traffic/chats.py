"""Conversations: chats that think or not, and agents that use tools."""

import random

from .program import Ask, Program, Scale, Wave, Way
from .text import Message, Thinking, made_up, rendered, text_of

NUM_CHATS, NUM_AT_ONCE, NUM_TURNS = 4, 2, 6
USER_TOKENS, THINKING_TOKENS, ANSWER_TOKENS = 120, 120, 60


def chats(
    rng: random.Random, scale: Scale, thinking: Thinking, num_chats: int = NUM_CHATS, way: Way = Way.IDS
) -> Program:
    """Chats that share nothing, a turn of each after the other's; a few answer at once."""
    num_thinking = scale.tokens(THINKING_TOKENS) if thinking is not Thinking.NONE else 0
    num_output_tokens = num_thinking + scale.tokens(ANSWER_TOKENS)
    histories: list[list[Message]] = [[] for _ in range(scale.times(num_chats))]
    num_at_once = scale.times(NUM_AT_ONCE)
    for _ in range(scale.rounds(NUM_TURNS)):
        for first in range(0, len(histories), num_at_once):
            some = histories[first : first + num_at_once]
            for history in some:
                history.append(Message("user", made_up(rng, scale.about(rng, USER_TOKENS))))
            answers = yield Wave(tuple(_next(history, thinking, num_output_tokens) for history in some), way)
            for history, answer in zip(some, answers, strict=True):
                thought, said = text_of(answer[:num_thinking]), text_of(answer[num_thinking:])
                history.append(Message("assistant", said, reasoning=thought))


def _next(history: list[Message], thinking: Thinking, num_output_tokens: int) -> Ask:
    return Ask(tuple(rendered(history, thinking)), num_output_tokens, messages=tuple(history))


NUM_AGENTS, NUM_USER_TURNS, NUM_STEPS = 3, 2, 4
TOOLS_TOKENS, TASK_TOKENS, RESULT_TOKENS = 400, 80, 150
PLAN_TOKENS, CALL_TOKENS = 60, 40


def agents(rng: random.Random, scale: Scale) -> Program:
    """Agents under one description of tools that think between calls; the next task drops what they thought.

    Within a task each prompt goes on from the one before. With the next, all steps of the task before lose their
    thinking, so prompts agree to where its first thought began.
    """
    num_plan = scale.tokens(PLAN_TOKENS)
    tools = Message("system", made_up(rng, scale.about(rng, TOOLS_TOKENS)))
    histories = [[tools] for _ in range(scale.times(NUM_AGENTS))]
    for _ in range(scale.rounds(NUM_USER_TURNS)):
        for history in histories:
            history.append(Message("user", made_up(rng, scale.about(rng, TASK_TOKENS))))
        for step in range(scale.rounds(NUM_STEPS)):
            if step:
                for history in histories:
                    history.append(Message("tool", made_up(rng, scale.about(rng, RESULT_TOKENS))))
            num_output = num_plan + scale.tokens(CALL_TOKENS)
            answers = yield Wave(tuple(_next(history, Thinking.IN_THE_LAST_TURN, num_output) for history in histories))
            for history, answer in zip(histories, answers, strict=True):
                thought, said = text_of(answer[:num_plan]), text_of(answer[num_plan:])
                history.append(Message("assistant", said, reasoning=thought))


NUM_OBSERVATIONS, NUM_KEPT = 8, 2
OBSERVATION_TOKENS = 250
LEFT_OUT = Message("tool", "[left out]")


def forgetful_agents(rng: random.Random, scale: Scale) -> Program:
    """Agents whose prompts show the last observations only: each prompt has one less in its middle."""
    tools = Message("system", made_up(rng, scale.about(rng, TOOLS_TOKENS)))
    histories = [
        [tools, Message("user", made_up(rng, scale.about(rng, TASK_TOKENS)))] for _ in range(scale.times(NUM_AGENTS))
    ]
    for _ in range(scale.rounds(NUM_OBSERVATIONS)):
        num_output = scale.tokens(CALL_TOKENS)
        answers = yield Wave(tuple(_next(_shown(history), Thinking.NONE, num_output) for history in histories))
        for history, answer in zip(histories, answers, strict=True):
            history.append(Message("assistant", text_of(answer)))
            history.append(Message("tool", made_up(rng, scale.about(rng, OBSERVATION_TOKENS))))


def _shown(history: list[Message]) -> list[Message]:
    observations = [index for index, message in enumerate(history) if message.role == "tool"]
    old = observations[: max(len(observations) - NUM_KEPT, 0)]
    return [LEFT_OUT if index in old else message for index, message in enumerate(history)]
