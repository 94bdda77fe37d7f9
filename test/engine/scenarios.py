"""The ways in which a prefix comes back, each as a sequence of requests on prompts that no other scenario shares.

A scenario asks a server and returns what it asked and got; whether that was right is for the reference, the same
model without a prefix cache, to say.
"""

from collections.abc import Callable
from dataclasses import dataclass

from .client import HTTP, NUM_TOKENS, VOCABULARY, Completion, generate, generate_together, random_tokens

EXTRA_BUFFER, NO_BUFFER = "extra_buffer", "no_buffer"
CHUNKED_PREFILL_SIZE = 256
MAX_KV_TOKENS = 4_000
NUM_ANSWER_TOKENS = 4
"""Of an answer, what a later turn repeats."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """One prompt and its answer."""

    prompt: tuple[int, ...]
    completion: Completion


@dataclass(frozen=True, slots=True)
class Scenario:
    """A named sequence of requests; `hits_under` names the strategies under which one of them must be a hit."""

    name: str
    ask: Callable[[str], list[Exchange]]
    hits_under: frozenset[str] = frozenset({EXTRA_BUFFER, NO_BUFFER})
    is_long: bool = False
    """Whether it is left to `make test-all`."""


def one(url: str, prompt: list[int]) -> Exchange:
    return Exchange(tuple(prompt), generate(url, prompt))


def together(url: str, prompts: list[list[int]], max_new_tokens: int = NUM_TOKENS) -> list[Exchange]:
    answers = generate_together(url, prompts, max_new_tokens=max_new_tokens)
    return [Exchange(tuple(prompt), answer) for prompt, answer in zip(prompts, answers, strict=True)]


def repeat(url: str) -> list[Exchange]:
    prompt = random_tokens(100, 350)
    return [one(url, prompt), one(url, prompt), one(url, prompt)]


def extension(url: str) -> list[Exchange]:
    prompt = random_tokens(200, 350)
    longer = prompt + random_tokens(201, 60)
    return [one(url, prompt), one(url, longer), one(url, longer + random_tokens(202, 37))]


def branch_at(position: int) -> Callable[[str], list[Exchange]]:
    def branch(url: str) -> list[Exchange]:
        trunk = random_tokens(300 + position, 350)
        branches = [trunk[:position] + random_tokens(10 * position + i, 60) for i in range(3)]
        return [one(url, trunk), *(one(url, prompt) for prompt in branches), one(url, trunk)]

    return branch


def multi_turn(url: str) -> list[Exchange]:
    history, exchanges = random_tokens(400, 100), []
    for turn in range(4):
        exchanges.append(one(url, history))
        history = history + list(exchanges[-1].completion.token_ids) + random_tokens(401 + turn, 31)
    return exchanges


def shared_by_concurrent(url: str) -> list[Exchange]:
    prefix = random_tokens(500, 230)
    cold = [prefix + random_tokens(510 + i, 20 + i) for i in range(6)]
    warm = [prefix + random_tokens(520 + i, 20 + i) for i in range(6)]
    return together(url, cold) + together(url, warm)


def evicted_and_again(url: str) -> list[Exchange]:
    prompt = random_tokens(600, 350)
    exchanges = [one(url, prompt), one(url, prompt + random_tokens(601, 50))]
    num_fillers = 2 * MAX_KV_TOKENS // 350
    for i in range(0, num_fillers, 8):
        # Of two ranks with a cache each, all go to the prompt's: their first tokens are as odd as its own.
        heads = [VOCABULARY.start + (prompt[0] - VOCABULARY.start + 2 * (j + 1)) % 246 for j in range(i, i + 8)]
        fillers = [[head, *random_tokens(610 + j, 349)] for j, head in enumerate(heads, i)]
        # What came once is the first to go; what came twice has proved itself.
        generate_together(url, fillers, max_new_tokens=1)
        generate_together(url, fillers, max_new_tokens=1)
    again = one(url, prompt)
    assert again.completion.num_cached_tokens == 0, "the prefix was to be evicted before it is computed again"
    return [*exchanges, again, one(url, prompt + random_tokens(602, 50))]


def chunked_prefill(url: str) -> list[Exchange]:
    prompt = random_tokens(700, 3 * CHUNKED_PREFILL_SIZE - 55)
    return [
        one(url, prompt),
        one(url, prompt + random_tokens(701, 350)),
        one(url, prompt + random_tokens(702, 9)),
    ]


def aborted(url: str) -> list[Exchange]:
    prompt = random_tokens(800, 250)
    request = {
        "input_ids": prompt,
        "sampling_params": {"temperature": 0, "max_new_tokens": 2000, "ignore_eos": True},
        "stream": True,
    }
    with HTTP.stream("POST", f"{url}/generate", json=request, timeout=300.0) as response:
        chunks = response.iter_lines()
        for _ in range(8):
            next(chunks)
    return [one(url, prompt), one(url, prompt + random_tokens(801, 60)), one(url, prompt)]


def every_position(url: str) -> list[Exchange]:
    """States that a prompt is asked to leave at each of its first 130 tokens, four a prompt; each is hit once."""
    exchanges = []
    for first in range(1, 131, 4):
        trunk, positions = random_tokens(5000 + first, 131), range(first, min(first + 4, 131))
        # The pools are small: what others left is worth as much to them.
        HTTP.post(f"{url}/flush_cache?timeout=30", timeout=60.0).raise_for_status()
        generate(url, trunk, max_new_tokens=1, checkpoints=positions)
        prompts = [trunk[:position] + random_tokens(6000 + position, 9) for position in positions]
        exchanges += together(url, prompts, max_new_tokens=3)
    hits = [exchange.completion.num_cached_tokens for exchange in exchanges]
    assert hits == list(range(1, 131)), f"a state was asked for after each of 130 tokens, and these were hit: {hits}"
    return exchanges


def at_a_prefills_end(url: str) -> list[Exchange]:
    """States asked for after a prompt's last token and after a chunk's, the one hit by few tokens and by many."""
    exchanges = []
    for seed, length, position in ((7000, 150, 150), (7100, CHUNKED_PREFILL_SIZE + 100, CHUNKED_PREFILL_SIZE)):
        trunk = random_tokens(seed, length)
        HTTP.post(f"{url}/flush_cache?timeout=30", timeout=60.0).raise_for_status()
        generate(url, trunk, checkpoints=(position,))
        for num_more in (1, 2, 60):
            prompt = trunk[:position] + random_tokens(seed + num_more, num_more)
            exchanges.append(Exchange(tuple(prompt), generate(url, prompt, max_new_tokens=3)))
            assert exchanges[-1].completion.num_cached_tokens == position, "nothing was kept where it was asked for"
    return exchanges


def thinking_dropped(url: str) -> list[Exchange]:
    """A chat whose prompts end in an invitation that no later prompt repeats, and whose thinking is dropped."""
    history, invitation, exchanges = random_tokens(9000, 150), random_tokens(9001, 8), []
    lost = []
    # What others did has been learned from, too.
    HTTP.post(f"{url}/flush_cache?timeout=30", timeout=60.0).raise_for_status()
    for turn in range(5):
        known = len(history)
        history = history + random_tokens(9010 + turn, 80)
        exchanges.append(one(url, history + invitation))
        if turn:
            lost.append(known - NUM_ANSWER_TOKENS - exchanges[-1].completion.num_cached_tokens)
        history = history + list(exchanges[-1].completion.token_ids[-NUM_ANSWER_TOKENS:])
    assert lost[1:] == [0, 0, 0], f"a state stands where each turn leaves the one before it; tokens lost: {lost}"
    return exchanges


def groups_at_once(url: str) -> list[Exchange]:
    """Prompts of two groups, sent together: the first of each leaves a state that the others wait for."""
    prompts = [random_tokens(9100 + i % 2, 200) + random_tokens(9110 + i, 25 + i) for i in range(10)]
    return together(url, prompts)


SCENARIOS = (
    Scenario("repeat", repeat, frozenset({EXTRA_BUFFER})),
    Scenario("extension", extension),
    *(Scenario(f"branch-at-{p}", branch_at(p), frozenset({EXTRA_BUFFER})) for p in (207, 208, 209)),
    Scenario("multi-turn", multi_turn),
    Scenario("concurrent", shared_by_concurrent, frozenset({EXTRA_BUFFER})),
    Scenario("evicted", evicted_and_again),
    Scenario("chunked-prefill", chunked_prefill),
    Scenario("aborted", aborted),
    Scenario("every-position", every_position, is_long=True),
    Scenario("at-a-prefills-end", at_a_prefills_end),
    Scenario("thinking-dropped", thinking_dropped),
    Scenario("groups-at-once", groups_at_once),
)
