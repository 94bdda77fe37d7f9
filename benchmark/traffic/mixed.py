"""Everything at the same time, as a server has it."""

import random
from collections import deque
from functools import partial

from . import chats, prefixes
from .program import Program, Scale, Wave
from .text import Thinking

KINDS = (
    partial(chats.chats, thinking=Thinking.IN_THE_LAST_TURN),
    chats.agents,
    partial(prefixes.system_prompts, at_once=False),
    prefixes.documents,
    prefixes.few_shot,
    prefixes.retries,
    prefixes.unrelated,
)


def mixed(rng: random.Random, scale: Scale) -> Program:
    """Chats, agents, system prompts, documents, examples, retries and random prompts, a wave of each in turn."""
    running: deque[tuple[Program, Wave]] = deque()
    for kind in KINDS:
        program = kind(rng, scale)
        running.append((program, next(program)))
    while running:
        program, wave = running.popleft()
        answers = yield wave
        try:
            running.append((program, program.send(answers)))
        except StopIteration:
            continue
