"""Rules of routing before real servers: chats under one system prompt, on a few small servers on this machine.

    python benchmark/fleet_servers.py [--workers N] [--chats N] [--router LIST] [--json FILE]

Each rule gets servers of its own, started anew. The chats begin a tenth of a second apart; each asks three questions
under the same system prompt of 1,500 tokens, streamed, the next one second after an answer. Counted: requests a server,
prompt tokens that came from a cache, as the servers say, and the median and P95 of the time to first token, which this
machine makes long and which only compare. Guesses are the router's own count.

Exit status 1 if under `state-aware` a server has more than its share of requests by a fifth, the median first token is
more than 1.1 times that of `least-loaded`, or fewer tokens are cached than under `kv-only`, by more than chance: a
two-hundredth of the prompt tokens.
"""

import argparse
import json
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import httpx
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from marconi.cli import interrupt_when_terminated
from marconi.demo import tiny_model
from marconi.demo.comparison import MARCONI
from marconi.demo.server_process import ServerFailed, ServerProcess, environment, scratch_folder
from marconi.process import GuardedServer, free_ports
from marconi.replay.result import nearest_rank

DEFAULT: Final = "state-aware"
ROUTERS: Final = ("least-loaded", "kv-only", DEFAULT)
TURNS: Final = 3
SYSTEM_TOKENS: Final = 1_500
ANSWER_TOKENS: Final = 48
APART_S: Final = 0.1
READY_S: Final = 120.0
MAX_CHATS: Final = 80
"""The router remembers so many requests, and a chat makes three."""
PAUSE_S: Final = 1.0
SERVER_ARGS: Final = (
    *("--max-running-requests", "4", "--max-total-tokens", "32768", "--max-mamba-cache-size", "96"),
    *("--random-seed", "0", "--log-level", "warning", "--stream-interval", "1"),
)
TOKENS: Final = range(3, 250)
MORE_THAN_SHARE: Final = 1.2
TIMES_MEDIAN: Final = 1.1
FEWER_CACHED: Final = 0.005


@dataclass(frozen=True, slots=True)
class Figures:
    """What a fleet made of the chats under one rule."""

    router: str
    num_requests: list[int]
    """By server."""
    num_prompt_tokens: int
    num_cached_tokens: int
    median_s: float
    p95_s: float
    guesses: dict[str, int]
    """The router's, by what ended them."""

    @property
    def greatest_share(self) -> float:
        """Requests of the busiest server over an equal share."""
        return max(self.num_requests) * len(self.num_requests) / sum(self.num_requests)


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


def chat(url: str, system: Sequence[int], index: int) -> list[Answer]:
    """A chat's answers."""
    rng = random.Random(index)  # noqa: S311 - a workload, not a secret
    time.sleep(APART_S * index)
    answers: list[Answer] = []
    prompt = list(system)
    with httpx.Client(timeout=600.0, trust_env=False) as client:
        for _ in range(TURNS):
            prompt += [rng.choice(TOKENS) for _ in range(rng.randrange(20, 80))]
            answers.append(ask(client, url, prompt))
            prompt += answers[-1].token_ids
            time.sleep(PAUSE_S)
    return answers


def measured(router: str, args: argparse.Namespace, model: Path, folder: Path) -> Figures:
    """The figures of one rule, before servers of its own."""
    rng = random.Random(0)  # noqa: S311 - a workload, not a secret
    system = [rng.choice(TOKENS) for _ in range(SYSTEM_TOKENS)]
    with ExitStack() as running:
        servers = []
        for index in range(args.workers):
            events = f"tcp://127.0.0.1:{free_ports(2)}"
            server_args = ["--radix-cache-backend", MARCONI, "--marconi-events", events, *SERVER_ARGS]
            log_path = folder / f"{router}-{index}.log"
            servers.append(running.enter_context(ServerProcess(model, server_args, log_path=log_path)))
        port = free_ports(1)
        command = ["-m", "marconi", "router", "--workers", ",".join(server.url for server in servers)]
        command += ["--model", str(model), "--port", str(port), "--routing", router]
        front = running.enter_context(
            GuardedServer(command, port, log_path=folder / f"{router}.log", env=environment())
        )
        _wait_until_all_are_up(front.url)
        # A prefill is timed before others wait for it, as on a fleet that has run for a while.
        chat(front.url, system[::-1], 0)
        with ThreadPoolExecutor(args.chats) as pool:
            chats = list(pool.map(lambda index: chat(front.url, system, index), range(args.chats)))
        answers = [answer for answers in chats for answer in answers]
        state = httpx.get(f"{front.url}/router", trust_env=False).json()
    told = Counter(record["worker"] for record in state["recent"][: len(answers)])
    times = sorted(each.ttft_s for each in answers)
    return Figures(
        router,
        [told[server.url] for server in servers],
        sum(each.num_prompt_tokens for each in answers),
        sum(each.num_cached_tokens for each in answers),
        statistics.median(times),
        nearest_rank(times, 95),
        {name: count for name, count in state["events"]["guesses"].items() if name != "made"},
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
    """A line a rule."""
    table = Table("rule", box=SIMPLE, title="chats under one system prompt, before real servers")
    for name in ("requests", "prompt tokens", "cached", "median", "P95", "guesses confirmed"):
        table.add_column(name, justify="right")
    for each in found:
        table.add_row(
            each.router,
            " / ".join(map(str, each.num_requests)),
            f"{each.num_prompt_tokens:,}",
            f"{each.num_cached_tokens:,}",
            f"{each.median_s:.3g} s",
            f"{each.p95_s:.3g} s",
            f"{each.guesses['confirmed']} of {sum(each.guesses.values())}",
        )
    return table


def failures(found: Sequence[Figures]) -> list[str]:
    """What is asked of the default rule, beside those that were measured, and does not hold."""
    by_router = {each.router: each for each in found}
    ours = by_router.get(DEFAULT)
    if ours is None:
        return []
    failed = []
    if ours.greatest_share > MORE_THAN_SHARE:
        failed.append(f"{DEFAULT}: the busiest server has {ours.greatest_share:.2f} times an equal share")
    if (least := by_router.get("least-loaded")) is not None and ours.median_s > TIMES_MEDIAN * least.median_s:
        failed.append(f"{DEFAULT}: the median first token is {ours.median_s / least.median_s:.2f} times least-loaded's")
    kv, least_lost = by_router.get("kv-only"), FEWER_CACHED * ours.num_prompt_tokens
    if kv is not None and ours.num_cached_tokens < kv.num_cached_tokens - least_lost:
        failed.append(f"{DEFAULT}: {ours.num_cached_tokens:,} tokens cached, {kv.num_cached_tokens:,} under kv-only")
    return failed


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and write."""
    made = argparse.ArgumentParser(description="Rules of routing before real servers on this machine.")
    made.add_argument("--workers", type=int, default=2, metavar="N", help="servers (default: 2)")
    made.add_argument("--chats", type=int, default=24, metavar="N", help="default: 24")
    made.add_argument("--router", default=",".join(ROUTERS), metavar="LIST", help=f"default: {','.join(ROUTERS)}")
    made.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    args = made.parse_args(argv)
    if not 1 <= args.chats <= MAX_CHATS:
        made.error(f"--chats must be 1 to {MAX_CHATS}, got {args.chats}")
    interrupt_when_terminated()
    try:
        with scratch_folder() as folder:
            model = folder / "model"
            tiny_model.write(tiny_model.Family.GDN, model)
            found = [measured(router, args, model, folder) for router in args.router.split(",")]
    except (ServerFailed, ValueError, OSError, httpx.HTTPError) as error:
        print(f"fleet_servers.py: error: {error}", file=sys.stderr)
        return 2
    console = Console()
    console.print(table_of(found))
    failed = failures(found)
    for line in failed:
        print(line)
    if args.json is not None:
        document: dict[str, Any] = {"benchmark": "fleet-servers", "figures": [asdict(each) for each in found]}
        args.json.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
