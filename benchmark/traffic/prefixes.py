"""Prompts that begin alike."""

import random

from .program import Ask, Program, Scale, Wave
from .text import ids_of, made_up

NUM_GROUPS, NUM_PROMPTS = 4, 12
SYSTEM_TOKENS, USER_TOKENS, OUTPUT_TOKENS = 700, 90, 16


def system_prompts(rng: random.Random, scale: Scale, *, at_once: bool) -> Program:
    """Groups that share a system prompt, twice: all prompts at once, or one after the other."""
    systems = [made_up(rng, scale.tokens(SYSTEM_TOKENS)) for _ in range(scale.times(NUM_GROUPS))]
    for _ in range(2):
        asks = tuple(
            Ask(tuple(ids_of(system + made_up(rng, scale.tokens(USER_TOKENS)))), OUTPUT_TOKENS)
            for _ in range(scale.times(NUM_PROMPTS))
            for system in systems
        )
        if at_once:
            yield Wave(asks)
        else:
            for ask in asks[: len(asks) // 2]:
                yield Wave((ask,))
