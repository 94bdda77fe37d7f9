"""Prompts that begin alike."""

import random

from .program import Ask, Program, Scale, Wave, Way
from .text import GENERATED_IDS, ids_of, made_up, text_of

NUM_GROUPS, NUM_PROMPTS = 4, 12
SYSTEM_TOKENS, USER_TOKENS, OUTPUT_TOKENS = 700, 90, 16


def system_prompts(rng: random.Random, scale: Scale, *, at_once: bool) -> Program:
    """Groups that share a system prompt, twice: all prompts at once, or one after the other."""
    systems = [made_up(rng, scale.tokens(SYSTEM_TOKENS)) for _ in range(scale.times(NUM_GROUPS))]
    for _ in range(2):
        asks = tuple(
            _ask(system, made_up(rng, scale.tokens(USER_TOKENS)))
            for _ in range(scale.rounds(NUM_PROMPTS))
            for system in systems
        )
        if at_once:
            yield Wave(asks)
        else:
            for ask in asks[: len(asks) // 2]:
                yield Wave((ask,))


def _ask(*parts: str, num_samples: int = 1) -> Ask:
    return Ask(tuple(ids_of("".join(parts))), OUTPUT_TOKENS, num_samples)


NUM_DOCUMENTS, NUM_ROUNDS, DOCUMENT_TOKENS, QUESTION_TOKENS = 6, 4, 900, 40


def documents(rng: random.Random, scale: Scale, *, in_turn: bool = False) -> Program:
    """Each document is asked a question a round; every round takes them in another order, or all in the same."""
    texts = [made_up(rng, scale.about(rng, DOCUMENT_TOKENS)) for _ in range(scale.times(NUM_DOCUMENTS))]
    for _ in range(scale.rounds(NUM_ROUNDS)):
        for text in texts if in_turn else rng.sample(texts, len(texts)):
            yield Wave((_ask(text, made_up(rng, scale.about(rng, QUESTION_TOKENS))),))


NUM_SOURCES, NUM_QUESTIONS, SOURCE_TOKENS, INSTRUCTION_TOKENS = 4, 20, 500, 150


def retrieved(rng: random.Random, scale: Scale) -> Program:
    """Questions to two of a few documents, behind one instruction, whichever comes first."""
    instruction = made_up(rng, scale.about(rng, INSTRUCTION_TOKENS))
    sources = [made_up(rng, scale.about(rng, SOURCE_TOKENS)) for _ in range(scale.times(NUM_SOURCES))]
    for _ in range(scale.times(NUM_QUESTIONS)):
        first, second = rng.sample(sources, 2)
        yield Wave((_ask(instruction, first, second, made_up(rng, scale.about(rng, QUESTION_TOKENS))),))


NUM_TASKS, NUM_EXAMPLES, NUM_LAST_EXAMPLES, NUM_CASES, EXAMPLE_TOKENS = 3, 15, 3, 24, 80


def few_shot(rng: random.Random, scale: Scale) -> Program:
    """Tasks in turns, each with the same examples but for the last, which is one of a few."""
    num_tasks = scale.times(NUM_TASKS)
    examples, last = (
        [[made_up(rng, scale.about(rng, EXAMPLE_TOKENS)) for _ in range(some)] for _ in range(num_tasks)]
        for some in (NUM_EXAMPLES, NUM_LAST_EXAMPLES)
    )
    for case in range(scale.times(NUM_CASES)):
        task = case % num_tasks
        yield Wave((_ask(*examples[task], rng.choice(last[task]), made_up(rng, scale.about(rng, QUESTION_TOKENS))),))


NUM_SAMPLED, NUM_SAMPLES, SAMPLED_TOKENS = 10, 4, 500


def samples(rng: random.Random, scale: Scale) -> Program:
    """Several answers to each prompt, then several to what goes on from the first of them."""
    prompts = [made_up(rng, scale.about(rng, SAMPLED_TOKENS)) for _ in range(scale.times(NUM_SAMPLED))]
    for _ in range(2):
        for index, prompt in enumerate(prompts):
            (answer,) = yield Wave((_ask(prompt, num_samples=NUM_SAMPLES),))
            prompts[index] = prompt + text_of(answer) + made_up(rng, scale.about(rng, QUESTION_TOKENS))


NUM_CONTEXTS, NUM_BRANCHES, CONTEXT_TOKENS = 3, 8, 1003


def forks(rng: random.Random, scale: Scale, *, syncs: bool) -> Program:
    """A context, and branches that go on from it at once."""
    for _ in range(scale.times(NUM_CONTEXTS)):
        context = made_up(rng, scale.about(rng, CONTEXT_TOKENS))
        # No two begin alike: what is shared is the context.
        heads = text_of(rng.sample(GENERATED_IDS, NUM_BRANCHES))
        branches = (_ask(context, head + made_up(rng, scale.about(rng, QUESTION_TOKENS))) for head in heads)
        yield Wave(tuple(branches), Way.SYNCED_FORK if syncs else Way.FORK, num_shared_tokens=len(context))


NUM_RETRIED, RETRIED_TOKENS = 16, 400


def retries(rng: random.Random, scale: Scale) -> Program:
    """Each prompt again, and later twice at once."""
    asks = [_ask(made_up(rng, scale.about(rng, RETRIED_TOKENS))) for _ in range(scale.times(NUM_RETRIED))]
    for ask in asks:
        yield Wave((ask,))
        yield Wave((ask,))
    for ask in asks:
        yield Wave((ask, ask))


def late_retries(rng: random.Random, scale: Scale) -> Program:
    """Every prompt once, then each again, in the same order."""
    asks = [_ask(made_up(rng, scale.about(rng, RETRIED_TOKENS))) for _ in range(scale.times(NUM_RETRIED))]
    for ask in (*asks, *asks):
        yield Wave((ask,))


NUM_EXTENDED, NUM_EXTENSIONS, EXTENDED_TOKENS, EXTENSION_TOKENS = 8, 3, 800, 20


def extensions(rng: random.Random, scale: Scale) -> Program:
    """Prompts that come again in every round with a little more at their end, as a draft that is edited."""
    drafts = [made_up(rng, scale.about(rng, EXTENDED_TOKENS)) for _ in range(scale.times(NUM_EXTENDED))]
    for _ in range(scale.rounds(NUM_EXTENSIONS)):
        for index, draft in enumerate(drafts):
            yield Wave((_ask(draft),))
            drafts[index] = draft + made_up(rng, scale.about(rng, EXTENSION_TOKENS))


NUM_RANDOM, RANDOM_TOKENS = 20, range(300, 900)


def unrelated(rng: random.Random, scale: Scale) -> Program:
    """Prompts that share nothing, not even their first token."""
    for head in text_of(rng.sample(GENERATED_IDS, scale.times(NUM_RANDOM))):
        yield Wave((_ask(head, made_up(rng, scale.tokens(rng.choice(RANDOM_TOKENS)))),))
