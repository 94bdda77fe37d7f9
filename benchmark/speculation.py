"""Chats with and without speculative decoding, on stock SGLang and on this project: what each computes of the prompts.

A chat's next prompt repeats what was said before, so a cache that keeps the state at an answer's end computes the new
message alone, and one that keeps states on a grid computes what lies behind the grid once more. The chats are those of
a server without drafts and without a prefix cache, whose answers all others must give, token for token: exit status 1
if one does not. A small model with random weights, one server after the other; tokens are counted, no time is taken.

    python benchmark/speculation.py [--family gdn|mamba2] [--strategy extra_buffer|no_buffer] [--num-requests N]
                                    [--json FILE] [-- SERVER_ARGS]
"""

import argparse
import json
import random
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from marconi.cli import interrupt_when_terminated
from marconi_cpu import tiny_model
from marconi_cpu.demo.comparison import MARCONI, STOCK
from marconi_cpu.demo.server_process import ServerFailed, ServerProcess, scratch_folder

TURNS = 5
_HTTP = httpx.Client(timeout=600.0, trust_env=False)
NUM_AT_ONCE = 6
"""Chats that go on beside each other."""
TOKENS = range(3, 250)
NO_DRAFTS = "none"
DRAFTS: dict[str, tuple[str, ...]] = {
    NO_DRAFTS: (),
    "NGRAM": ("--speculative-algorithm", "NGRAM"),
    "MTP": (
        *("--speculative-algorithm", "NEXTN", "--speculative-num-steps", "3"),
        *("--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4"),
    ),
}
CACHES: dict[str, tuple[str, ...]] = {STOCK: (), MARCONI: ("--radix-cache-backend", "marconi")}
STRATEGIES = {
    "extra_buffer": ("--mamba-radix-cache-strategy", "extra_buffer"),
    "no_buffer": ("--mamba-radix-cache-strategy", "no_buffer", "--disable-overlap-schedule"),
}


@dataclass(frozen=True, slots=True)
class Turn:
    """A prompt, and the answer to it: token ids."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Figures:
    """What one server made of the chats."""

    drafts: str
    cache: str
    num_prompt_tokens: int
    num_cached_tokens: int
    num_different: int
    """Answers that are not the reference's."""
    accept_length: float | None
    """Tokens a step, those that were not drafted among them."""

    @property
    def hit_rate(self) -> float:
        """Cached over prompt tokens."""
        return self.num_cached_tokens / self.num_prompt_tokens


def ask(url: str, prompt: Sequence[int], num_tokens: int) -> tuple[tuple[int, ...], dict[str, Any]]:
    """The greedy answer of that length, and what the server says of it."""
    sampling = {"temperature": 0, "max_new_tokens": num_tokens, "ignore_eos": True}
    body = {"input_ids": list(prompt), "sampling_params": sampling}
    response = _HTTP.post(f"{url}/generate", json=body)
    response.raise_for_status()
    answer = response.json()
    return tuple(answer["output_ids"]), answer["meta_info"]


def held(url: str, seed: int) -> list[Turn]:
    """A chat, as the server at `url` answers it."""
    rng = random.Random(seed)  # noqa: S311 - a workload, not a secret
    turns, prompt = [], [rng.choice(TOKENS) for _ in range(rng.randrange(50, 400))]
    for _ in range(TURNS):
        answer, _ = ask(url, prompt, rng.randrange(1, 64))
        turns.append(Turn(tuple(prompt), answer))
        prompt = [*prompt, *answer, *(rng.choice(TOKENS) for _ in range(rng.randrange(1, 60)))]
    return turns


def replayed(url: str, chat: Sequence[Turn]) -> list[tuple[bool, dict[str, Any]]]:
    """Whether each answer of a chat is the same at `url`, and what the server says of it."""
    answers = (ask(url, turn.prompt, len(turn.answer)) for turn in chat)
    return [(answer == turn.answer, told) for turn, (answer, told) in zip(chat, answers, strict=True)]


def figures_of(url: str, drafts: str, cache: str, chats: Sequence[Sequence[Turn]]) -> Figures:
    """What the server at `url` makes of the chats."""
    with ThreadPoolExecutor(NUM_AT_ONCE) as pool:
        told = [each for chat in pool.map(lambda chat: replayed(url, chat), chats) for each in chat]
    lengths = [meta["spec_accept_length"] for _, meta in told if meta.get("spec_accept_length")]
    return Figures(
        drafts,
        cache,
        num_prompt_tokens=sum(meta["prompt_tokens"] for _, meta in told),
        num_cached_tokens=sum(meta["cached_tokens"] for _, meta in told),
        num_different=sum(not is_same for is_same, _ in told),
        accept_length=sum(lengths) / len(lengths) if lengths else None,
    )


def measured(args: argparse.Namespace, folder: Path) -> list[Figures]:
    """The figures of every server, one after the other."""
    model = folder / "model"
    tiny_model.write(tiny_model.Family(args.family), model, has_mtp=True)
    more = (*STRATEGIES[args.strategy], *args.server_args)

    def server(name: str, server_args: Sequence[str]) -> ServerProcess:
        return ServerProcess(model, [*server_args, *more], log_path=folder / f"{name}.log")

    with server("reference", ("--disable-radix-cache",)) as reference, ThreadPoolExecutor(NUM_AT_ONCE) as pool:
        chats = list(pool.map(lambda seed: held(reference.url, seed), range(max(args.num_requests // TURNS, 1))))
    found = []
    for drafts, draft_args in DRAFTS.items():
        for cache, cache_args in CACHES.items():
            with server(f"{drafts}-{cache}", (*cache_args, *draft_args)) as running:
                found.append(figures_of(running.url, drafts, cache, chats))
    return found


def table_of(found: Sequence[Figures]) -> Table:
    """The figures, each hit rate beside that of the same cache without drafts."""
    without = {each.cache: each.num_cached_tokens for each in found if each.drafts == NO_DRAFTS}
    table = Table(box=SIMPLE)
    for name in (
        "drafts",
        "tokens a step",
        "cache",
        "prompt tokens",
        "cached",
        "hit rate",
        "over none",
        "other answers",
    ):
        table.add_column(name, justify="left" if name in ("drafts", "cache") else "right")
    for each in found:
        table.add_row(
            each.drafts,
            "" if each.accept_length is None else f"{each.accept_length:.2f}",
            each.cache,
            f"{each.num_prompt_tokens:,}",
            f"{each.num_cached_tokens:,}",
            f"{each.hit_rate:.1%}",
            f"{each.num_cached_tokens / max(without[each.cache], 1):.3f}",
            f"{each.num_different:,}",
        )
    return table


def parser() -> argparse.ArgumentParser:
    """Of the command line."""
    made = argparse.ArgumentParser(description="Chats with and without speculative decoding, two caches side by side.")
    made.add_argument("--family", choices=[*map(str, tiny_model.Family)], default="gdn", help="default: gdn")
    made.add_argument("--strategy", choices=[*STRATEGIES], default="extra_buffer", help="default: extra_buffer")
    made.add_argument("--num-requests", type=int, default=250, metavar="N", help="default: 250")
    made.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    made.add_argument("server_args", nargs="*", metavar="SERVER_ARGS", help="behind --: flags of every server")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and write; exit status 1 where an answer differs, or a server fails."""
    args = parser().parse_args(argv)
    interrupt_when_terminated()
    try:
        with scratch_folder() as folder:
            found = measured(args, folder)
    except ServerFailed as failure:
        print(f"speculation.py: error: {failure}", file=sys.stderr)
        return 1
    Console().print(table_of(found))
    if args.json is not None:
        args.json.write_text(json.dumps([asdict(each) for each in found], indent=2) + "\n")
    return int(any(each.num_different for each in found))


if __name__ == "__main__":
    sys.exit(main())
