"""Chats with and without speculative decoding, on stock SGLang and on this project: what each computes of the prompts.

A chat's next prompt repeats what was said before, so a cache that keeps the state at an answer's end computes the new
message alone, and one that keeps states on a grid computes what lies behind the grid once more. The chats are those of
a server without drafts and without a prefix cache, whose answers all others must give, token for token: exit status 1
if one does not. A small model with random weights, one server after the other; tokens are counted, no time is taken.

    python benchmark/speculation.py [--family gdn|mamba2] [--strategy extra_buffer|no_buffer] [--num-requests N]
                                    [--soak N] [--json FILE] [-- SERVER_ARGS]

With `--soak` one server of this project drafts in one pool that holds a few requests, and is sent N: they share
prefixes, fork, repeat and go on, and some are given up. Between two crowds all bytes of the pool are accounted for,
and SGLang checks its tree; the cache is flushed now and then. Exit status 1 for a byte that is lost.
"""

import argparse
import json
import random
import sys
import time
from collections import Counter
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
from marconi.replay.command import positive
from marconi_cpu import tiny_model
from marconi_cpu.demo.comparison import MARCONI, STOCK
from marconi_cpu.demo.server_process import ServerFailed, ServerProcess, scratch_folder
from rig.workload import Script, Workload

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
CROWD, NUM_OF_A_CROWD_AT_ONCE = 240, 18
FLUSH_EVERY_CROWDS = 4
LONGEST_TOKENS, MAX_NEW_TOKENS = 500, 16
GIVE_UP_RATE, GIVE_UP_S = 0.03, 0.2
IDLE_WITHIN_S = 30.0
STOPS = (5, 77, 130)
SHORT_POOL = (
    *("--enable-unified-memory", "--max-total-tokens", "2400", "--max-mamba-cache-size", "28"),
    *("--max-running-requests", "8", "--chunked-prefill-size", "256"),
)
CHECKED = {"SGLANG_ENABLE_TREE_CACHE_SANITY_CHECK": "1"}


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


class BytesLost(Exception):
    """Bytes of a pool are neither free nor cached, though the server is idle."""


def sent(url: str, script: Script, luck: float) -> Counter[str]:
    """Counts of a request of a soak; by `luck`, from 0 to 1, it is given up soon."""
    sampling = {
        "temperature": 0,
        "max_new_tokens": min(script.max_new_tokens, MAX_NEW_TOKENS),
        "ignore_eos": luck < 0.7,
        "stop_token_ids": STOPS,
    }
    extra_key, salt = script.namespace
    tokens = [TOKENS.start + token for token in script.prompt]
    body = {"input_ids": tokens, "sampling_params": sampling, "extra_key": extra_key, "cache_salt": salt}
    try:
        timeout_s = luck / GIVE_UP_RATE * GIVE_UP_S if luck < GIVE_UP_RATE else 600.0
        response = _HTTP.post(f"{url}/generate", json=body, timeout=max(timeout_s, 1e-3))
    except httpx.TimeoutException:
        return Counter(given_up=1)
    response.raise_for_status()
    told = response.json()["meta_info"]
    names = {"prompt": "prompt_tokens", "cached": "cached_tokens", "generated": "completion_tokens"}
    return Counter(answered=1, verify_steps=told.get("spec_verify_ct", 0)) + Counter(
        {name: told[key] for name, key in names.items()}
    )


def require_nothing_lost(url: str, within_s: float = IDLE_WITHIN_S) -> None:
    """Raise `BytesLost` unless the server's one pool is free or cached throughout, as soon as requests have ended."""
    until_s = time.monotonic() + within_s
    while True:
        (rank,) = _HTTP.get(f"{url}/marconi").json()["ranks"]
        pool = rank["joint_bytes"]
        if pool["free"] + pool["cached"] == pool["size"]:
            return
        if time.monotonic() > until_s:
            raise BytesLost(f"an idle pool must be free or cached throughout, got {pool}")
        time.sleep(0.1)


def soaked(url: str, num_requests: int, seed: int = 1) -> Counter[str]:
    """Counts of a soak of the server at `url`; raises `BytesLost`."""
    rng = random.Random(seed)  # noqa: S311 - a workload, not a secret
    workload, counts = Workload(rng, LONGEST_TOKENS), Counter[str]()
    with ThreadPoolExecutor(NUM_OF_A_CROWD_AT_ONCE) as pool:
        for index, begun in enumerate(range(0, num_requests, CROWD), start=1):
            crowd = [(workload.next(), rng.random()) for _ in range(min(CROWD, num_requests - begun))]
            for each in pool.map(lambda request: sent(url, *request), crowd):
                counts += each
            require_nothing_lost(url)
            counts["checks"] += 1
            if index % FLUSH_EVERY_CROWDS == 0:
                _HTTP.post(f"{url}/flush_cache").raise_for_status()
                counts["flushes"] += 1
    return counts


def soak(args: argparse.Namespace, folder: Path) -> Counter[str]:
    """Counts of a soak of a server that drafts; raises `BytesLost`, and `ServerFailed` where its own check ends it."""
    model = folder / "model"
    tiny_model.write(tiny_model.Family(args.family), model, has_mtp=True)
    server_args = (*CACHES[MARCONI], *SHORT_POOL, *DRAFTS["MTP"], *STRATEGIES[args.strategy], *args.server_args)
    with ServerProcess(model, server_args, log_path=folder / "soak.log", env=CHECKED) as server:
        counts = soaked(server.url, args.soak)
        server.require_running()
    return counts


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
    made.add_argument("--soak", type=positive, metavar="N", help="instead: N requests to one server, none of it lost")
    made.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    made.add_argument("server_args", nargs="*", metavar="SERVER_ARGS", help="behind --: flags of every server")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and write; exit status 1 where an answer differs, or a server fails."""
    args = parser().parse_args(argv)
    interrupt_when_terminated()
    try:
        with scratch_folder() as folder:
            if args.soak is not None:
                counts = soak(args, folder)
                print(json.dumps(counts))
                if args.json is not None:
                    args.json.write_text(json.dumps(counts, indent=2) + "\n")
                return 0
            found = measured(args, folder)
    except (ServerFailed, BytesLost, httpx.HTTPError) as failure:
        print(f"speculation.py: error: {failure}", file=sys.stderr)
        return 1
    Console().print(table_of(found))
    if args.json is not None:
        args.json.write_text(json.dumps([asdict(each) for each in found], indent=2) + "\n")
    return int(any(each.num_different for each in found))


if __name__ == "__main__":
    sys.exit(main())
