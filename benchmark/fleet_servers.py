"""Rules of routing before real servers: sessions of a few shapes, on a few small servers on this machine.

    chats        three questions each under one system prompt of 1,500 tokens
    documents    two questions each about one of six documents of 3,000 tokens
    agents       six calls each, of 100 to 400 tokens, under one system prompt of 400 tokens
    random       one prompt each of 400 to 1,600 tokens, nothing shared

    python benchmark/fleet_servers.py [--workers N] [--shape LIST] [--sessions N] [--rounds N] [--router LIST]
                                      [--json FILE]

Each shape gets servers of its own. In each round each rule gets a router of its own and servers whose caches were
flushed; the rules take turns at being the first. The sessions begin a tenth of a second apart; answers are streamed,
and a session asks again a while after an answer. Counted, as medians over the rounds: requests of the busiest server
over an equal share, prompt tokens that came from a cache, as the servers say, and the median and P95 of the time to
first token, which this machine makes long and which only compare. Guesses are the router's own count, in all rounds.

Exit status 1 if under `state-aware` the median first token is more than 1.1 times that of `least-loaded`, fewer tokens
are cached than under `kv-only`, or of chats one of two servers has more than 60 % of the requests; 2 for bad input. Of
more servers on one machine that is not asked: those that get less of its cores have a slower pace, and fewer requests.
"""

import argparse
import json
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import httpx
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from marconi.cli import interrupt_when_terminated
from marconi.process import GuardedServer, free_ports
from marconi.replay.result import nearest_rank
from marconi.router.routing import ROUTINGS
from marconi_cpu import tiny_model
from marconi_cpu.demo.comparison import MARCONI
from marconi_cpu.demo.server_process import ServerFailed, ServerProcess, environment, scratch_folder

DEFAULT: Final = "state-aware"
ROUTERS: Final = ("least-loaded", "kv-only", DEFAULT)
ANSWER_TOKENS: Final = 48
APART_S: Final = 0.1
READY_S: Final = 120.0
MAX_REQUESTS: Final = 250
"""The router remembers so many, and one more."""
SERVER_ARGS: Final = (
    *("--max-running-requests", "4", "--max-total-tokens", "32768", "--max-mamba-cache-size", "96"),
    *("--random-seed", "0", "--log-level", "warning", "--stream-interval", "1"),
)
TOKENS: Final = range(3, 250)
MORE_THAN_SHARE: Final = 1.2
TIMES_MEDIAN: Final = 1.1
WARM_UP: Final = tuple(reversed(TOKENS)) * 6
"""A prompt's beginning that no session has."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Sessions of one kind."""

    num_turns: int
    num_prefixes: int
    """Prefixes that sessions share, one each."""
    prefix_tokens: int
    added_tokens: range
    """Tokens that a turn adds to its prompt."""
    pause_s: float
    """Time from an answer to the next turn."""

    def prefix(self, session: int) -> list[int]:
        """The beginning of a session's prompts; empty where nothing is shared."""
        rng = random.Random(f"prefix {session % max(self.num_prefixes, 1)}")  # noqa: S311 - a workload, not a secret
        return [rng.choice(TOKENS) for _ in range(self.prefix_tokens)]


SHAPES: Final = MappingProxyType(
    {
        "chats": Shape(3, 1, 1_500, range(20, 80), 1.0),
        "documents": Shape(2, 6, 3_000, range(20, 80), 1.0),
        "agents": Shape(6, 1, 400, range(100, 400), 0.3),
        "random": Shape(1, 0, 0, range(400, 1_600), 0.0),
    }
)


@dataclass(frozen=True, slots=True)
class Round:
    """What a fleet made of the sessions of one shape under one rule, once."""

    num_requests: list[int]
    """By server."""
    num_prompt_tokens: int
    num_cached_tokens: int
    median_s: float
    p95_s: float
    guesses: dict[str, int]
    """The router's, by what ended them."""
    requests: list[dict[str, Any]]
    """The router's records, in order of their ends."""

    @property
    def greatest_share(self) -> float:
        """Requests of the busiest server over an equal share."""
        return max(self.num_requests) * len(self.num_requests) / sum(self.num_requests)


@dataclass(frozen=True, slots=True)
class Figures:
    """All rounds of one shape and rule."""

    shape: str
    router: str
    rounds: list[Round]

    def median(self, of: Callable[[Round], float]) -> float:
        """The median over the rounds."""
        return statistics.median(map(of, self.rounds))


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to one question."""

    token_ids: list[int]
    num_prompt_tokens: int
    num_cached_tokens: int
    ttft_s: float


def ask(client: httpx.Client, url: str, prompt: Sequence[int]) -> Answer:
    """The streamed answer to `prompt`, through the router at `url`."""
    sampling = {"temperature": 0, "max_new_tokens": ANSWER_TOKENS, "ignore_eos": True}
    body = {"input_ids": list(prompt), "sampling_params": sampling, "stream": True}
    began_s, ttft_s, last = time.perf_counter(), 0.0, {}
    with client.stream("POST", f"{url}/generate", json=body) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            if line.startswith("data: {"):
                ttft_s = ttft_s or time.perf_counter() - began_s
                last = json.loads(line.removeprefix("data: "))
    meta = last["meta_info"]
    return Answer(last["output_ids"], meta["prompt_tokens"], meta["cached_tokens"], ttft_s)


def session(url: str, shape: Shape, prefix: Sequence[int], index: int) -> list[Answer]:
    """A session's answers."""
    rng = random.Random(index)  # noqa: S311 - a workload, not a secret
    time.sleep(APART_S * index)
    answers: list[Answer] = []
    prompt = list(prefix)
    with httpx.Client(timeout=600.0, trust_env=False) as client:
        for _ in range(shape.num_turns):
            prompt += [rng.choice(TOKENS) for _ in range(rng.choice(shape.added_tokens))]
            answers.append(ask(client, url, prompt))
            prompt += answers[-1].token_ids
            time.sleep(shape.pause_s)
    return answers


def measured(name: str, args: argparse.Namespace, routers: Sequence[str], model: Path, folder: Path) -> list[Figures]:
    """The figures of one shape under each rule, before the same servers."""
    found = {router: Figures(name, router, []) for router in routers}
    with ExitStack() as running:
        servers = []
        for index in range(args.workers):
            events = f"tcp://127.0.0.1:{free_ports(2)}"
            server_args = ["--radix-cache-backend", MARCONI, "--marconi-events", events, *SERVER_ARGS]
            log_path = folder / f"{name}-{index}.log"
            servers.append(running.enter_context(ServerProcess(model, server_args, log_path=log_path)))
        urls = [server.url for server in servers]
        for number in range(args.rounds):
            first = number % len(routers)
            for router in (*routers[first:], *routers[:first]):
                log_path = folder / f"{name}-{number}-{router}.log"
                found[router].rounds.append(one_round(SHAPES[name], router, args.sessions, urls, model, log_path))
    return list(found.values())


def one_round(shape: Shape, router: str, num_sessions: int, urls: Sequence[str], model: Path, log_path: Path) -> Round:
    """Serve all sessions once, before servers at `urls` that hold nothing."""
    for url in urls:
        httpx.post(f"{url}/flush_cache?timeout=30", timeout=60.0, trust_env=False).raise_for_status()
    port = free_ports(1)
    command = ["-m", "marconi", "router", "--workers", ",".join(urls)]
    command += ["--model", str(model), "--port", str(port), "--routing", router]
    with GuardedServer(command, port, log_path=log_path, env=environment()) as front:
        _wait_until_all_are_up(front.url)
        # A prefill is timed before others wait for it, as on a fleet that has run for a while.
        session(front.url, SHAPES["chats"], WARM_UP, 0)
        with ThreadPoolExecutor(num_sessions) as pool:
            asked = pool.map(lambda each: session(front.url, shape, shape.prefix(each), each), range(num_sessions))
            answers = [answer for answers in asked for answer in answers]
        state = httpx.get(f"{front.url}/router", trust_env=False).json()
    requests = state["recent"][: len(answers)][::-1]
    told = Counter(record["worker"] for record in requests)
    times = sorted(each.ttft_s for each in answers)
    return Round(
        [told[url] for url in urls],
        sum(each.num_prompt_tokens for each in answers),
        sum(each.num_cached_tokens for each in answers),
        statistics.median(times),
        nearest_rank(times, 95),
        {name: count for name, count in state["events"]["guesses"].items() if name != "made"},
        requests,
    )


def _wait_until_all_are_up(url: str) -> None:
    give_up_s = time.monotonic() + READY_S
    while True:
        workers = httpx.get(f"{url}/router", trust_env=False).json()["workers"]
        if all(worker["condition"] == "up" for worker in workers):
            return
        if time.monotonic() > give_up_s:
            raise ServerFailed(f"not every server was up after {READY_S:g} s: {[each['why'] for each in workers]}")
        time.sleep(0.2)


def table_of(found: Sequence[Figures]) -> Table:
    """A line a shape and rule."""
    table = Table("shape", "rule", box=SIMPLE)
    for name in ("busiest", "prompt tokens", "cached", "median", "P95", "guesses confirmed"):
        table.add_column(name, justify="right")
    for each in found:
        guesses = sum((Counter(one.guesses) for one in each.rounds), Counter[str]())
        table.add_row(
            each.shape,
            each.router,
            f"{each.median(lambda one: one.greatest_share):.2f}",
            f"{each.median(lambda one: one.num_prompt_tokens):,.0f}",
            f"{each.median(lambda one: one.num_cached_tokens):,.0f}",
            f"{each.median(lambda one: one.median_s):.3g} s",
            f"{each.median(lambda one: one.p95_s):.3g} s",
            f"{guesses['confirmed']} of {guesses.total()}",
        )
    return table


def failures(found: Sequence[Figures]) -> list[str]:
    """What is asked of the default rule at one shape, beside those that were measured, and does not hold."""
    by_router = {each.router: each for each in found}
    ours = by_router.get(DEFAULT)
    if ours is None:
        return []
    failed, who = [], f"{ours.shape}, {DEFAULT}"
    share = ours.median(lambda one: one.greatest_share)
    if ours.shape == "chats" and len(ours.rounds[0].num_requests) == 2 and share > MORE_THAN_SHARE:
        failed.append(f"{who}: the busiest server has {share:.2f} times an equal share")
    if (least := by_router.get("least-loaded")) is not None:
        times = ours.median(lambda one: one.median_s) / least.median(lambda one: one.median_s)
        if times > TIMES_MEDIAN:
            failed.append(f"{who}: the median first token is {times:.2f} times least-loaded's")
    if (kv := by_router.get("kv-only")) is not None:
        cached, theirs = (each.median(lambda one: one.num_cached_tokens) for each in (ours, kv))
        if cached < theirs:
            lost = 100 * (1 - cached / theirs)
            failed.append(f"{who}: {cached:,.0f} tokens cached, {theirs:,.0f} under kv-only, {lost:.2f} % less")
    return failed


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and write."""
    made = argparse.ArgumentParser(description="Rules of routing before real servers on this machine.")
    made.add_argument("--workers", type=int, default=2, metavar="N", help="servers (default: 2)")
    made.add_argument("--shape", default="chats", metavar="LIST", help=f"of {','.join(SHAPES)} (default: chats)")
    made.add_argument("--sessions", type=int, default=24, metavar="N", help="default: 24")
    made.add_argument("--rounds", type=int, default=5, metavar="N", help="default: 5")
    chosen = ",".join(ROUTERS)
    made.add_argument("--router", default=chosen, metavar="LIST", help=f"of {','.join(ROUTINGS)} (default: {chosen})")
    made.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    args = made.parse_args(argv)
    shapes, routers = args.shape.split(","), args.router.split(",")
    for option, names, known in (("shape", shapes, SHAPES), ("router", routers, ROUTINGS)):
        if missing := [name for name in names if name not in known]:
            made.error(f"--{option} must be some of {', '.join(known)}, got {missing[0]!r}")
    max_sessions = MAX_REQUESTS // max(SHAPES[name].num_turns for name in shapes)
    if not 1 <= args.sessions <= max_sessions:
        made.error(f"--sessions must be 1 to {max_sessions}, got {args.sessions}")
    if args.rounds < 1:
        made.error(f"--rounds must be 1 or more, got {args.rounds}")
    interrupt_when_terminated()
    try:
        with scratch_folder() as folder:
            model = folder / "model"
            tiny_model.write(tiny_model.Family.GDN, model)
            found = {name: measured(name, args, routers, model, folder) for name in shapes}
    except (ServerFailed, ValueError, OSError, httpx.HTTPError) as error:
        print(f"fleet_servers.py: error: {error}", file=sys.stderr)
        return 2
    every = [figures for figures_of_one in found.values() for figures in figures_of_one]
    Console().print(table_of(every))
    failed = [line for figures_of_one in found.values() for line in failures(figures_of_one)]
    for line in failed:
        print(line)
    if args.json is not None:
        document: dict[str, Any] = {"benchmark": "fleet-servers", "figures": [asdict(each) for each in every]}
        args.json.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
