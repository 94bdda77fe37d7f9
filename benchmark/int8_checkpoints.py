"""What checkpoints in int8 do to answers, and how many there are in the same bytes.

Chats on this project's server in full precision, whose answers are those of a server without a prefix cache, then the
same prompts on one with `--enable-int8-mamba-checkpoint`. Of answers that resume from a checkpoint:

    tokens that differ     of all tokens; greedy answers, so behind the first one that differs most others do, too
    log-probability off    |difference| of each token up to the first that differs, that one left out

A small model with random weights, whose logits lie closer together than a trained model's: its figures say how to
measure yours (`--model-path`), not what you will find.

    python benchmark/int8_checkpoints.py [--family gdn|mamba2] [--model-path FOLDER] [--num-chats N] [--json FILE]
                                         [-- SERVER_ARGS]
"""

import argparse
import json
import random
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from marconi.cli import interrupt_when_terminated
from marconi_cpu import tiny_model
from marconi_cpu.demo.server_process import ServerFailed, ServerProcess, scratch_folder

TURNS = 5
_HTTP = httpx.Client(timeout=600.0, trust_env=False)
ANSWER_TOKENS = 32
TOKENS = range(3, 250)
MARCONI = ("--radix-cache-backend", "marconi")
POOLS = ("--max-mamba-cache-size", "64", "--max-running-requests", "8", "--max-total-tokens", "32000")
INT8 = "--enable-int8-mamba-checkpoint"


@dataclass(frozen=True, slots=True)
class Said:
    """A prompt and the answer to it: token ids, their log-probabilities, and the prompt's tokens from the cache."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    logprobs: tuple[float, ...]
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class Figures:
    """Answers that resume from a checkpoint in int8, against those of full precision."""

    num_answers: int
    num_answers_that_differ: int
    num_tokens: int
    num_tokens_that_differ: int
    errors: tuple[float, ...]
    """|Differences| of log-probabilities, ascending."""
    num_different_anew: int
    """Answers that resume from nothing and differ: 0 unless a live state was rounded."""

    @property
    def share_of_tokens(self) -> float:
        """Tokens that differ, over all."""
        return self.num_tokens_that_differ / self.num_tokens

    def error_at(self, quantile: float) -> float:
        """The error at a quantile from 0 to 1."""
        return self.errors[min(int(quantile * len(self.errors)), len(self.errors) - 1)]


def ask(url: str, prompt: Sequence[int]) -> Said:
    """The greedy answer of the server at `url`."""
    sampling = {"temperature": 0, "max_new_tokens": ANSWER_TOKENS, "ignore_eos": True}
    body = {"input_ids": list(prompt), "sampling_params": sampling, "return_logprob": True}
    response = _HTTP.post(f"{url}/generate", json=body)
    response.raise_for_status()
    meta = response.json()["meta_info"]
    logprobs, token_ids = zip(*(each[:2] for each in meta["output_token_logprobs"]), strict=True)
    return Said(tuple(prompt), token_ids, logprobs, meta["cached_tokens"])


def chat(url: str, seed: int) -> list[Said]:
    """A chat, as the server at `url` answers it."""
    rng = random.Random(seed)  # noqa: S311 - a workload, not a secret
    said, prompt = list[Said](), [rng.choice(TOKENS) for _ in range(rng.randrange(50, 400))]
    for _ in range(TURNS):
        said.append(ask(url, prompt))
        prompt = [*prompt, *said[-1].answer, *(rng.choice(TOKENS) for _ in range(rng.randrange(1, 60)))]
    return said


def figures_of(pairs: Sequence[tuple[Said, Said]]) -> Figures:
    """Figures of pairs of answers: in full precision, and with checkpoints in int8."""
    resumed = [pair for pair in pairs if pair[1].num_cached_tokens]
    errors, num_tokens_that_differ = list[float](), 0
    for exact, rounded in resumed:
        is_same = [a == b for a, b in zip(exact.answer, rounded.answer, strict=True)]
        num_tokens_that_differ += is_same.count(False)
        num_alike = is_same.index(False) if False in is_same else len(is_same)
        each = zip(exact.logprobs[:num_alike], rounded.logprobs[:num_alike], strict=True)
        errors += [abs(a - b) for a, b in each]
    return Figures(
        num_answers=len(resumed),
        num_answers_that_differ=sum(a.answer != b.answer for a, b in resumed),
        num_tokens=sum(len(a.answer) for a, _ in resumed),
        num_tokens_that_differ=num_tokens_that_differ,
        errors=tuple(sorted(errors)),
        num_different_anew=sum(
            a.answer != b.answer for a, b in pairs if not (a.num_cached_tokens or b.num_cached_tokens)
        ),
    )


def state_slots(url: str) -> tuple[int, int]:
    """Slots for states that the cache of the server at `url` lends, and the bytes of one."""
    (rank,) = _HTTP.get(f"{url}/marconi").json()["ranks"]
    return rank["state_slots"]["size"], rank["state_bytes"]


def table_of(figures: Figures, exact: tuple[int, int], rounded: tuple[int, int]) -> Table:
    """The figures as a table."""
    table = Table("", "", box=SIMPLE)
    table.add_row("answers that resume from a checkpoint", f"{figures.num_answers}")
    share = figures.num_answers_that_differ / figures.num_answers
    table.add_row("of them other than in full precision", f"{figures.num_answers_that_differ} ({share:.1%})")
    table.add_row("tokens that differ", f"{figures.num_tokens_that_differ} ({figures.share_of_tokens:.2%})")
    table.add_row(
        "log-probability off: median, 99 of 100, most",
        f"{figures.error_at(0.5):.4f}, {figures.error_at(0.99):.4f}, {figures.error_at(1.0):.4f}",
    )
    table.add_row("answers that resume from nothing and differ", f"{figures.num_different_anew}")
    table.add_row("full precision: slots for requests and checkpoints", f"{exact[0]} of {exact[1]:,} bytes")
    table.add_row("int8: checkpoints in the same bytes", f"{rounded[0]} of {rounded[1]:,} bytes")
    return table


def main(argv: Sequence[str] | None = None) -> int:
    """Run from the command line; exit status 1 if an answer that resumes from nothing differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", type=tiny_model.Family, choices=[*tiny_model.Family], default="gdn")
    parser.add_argument("--model-path", type=Path, metavar="FOLDER", help="a hybrid model of yours")
    parser.add_argument("--num-chats", type=int, default=40, metavar="N")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("server_args", nargs="*", metavar="SERVER_ARGS")
    args = parser.parse_args(argv)
    interrupt_when_terminated()
    with scratch_folder() as folder:
        model: Path = args.model_path or folder / "model"
        if args.model_path is None:
            tiny_model.write(args.family, model)

        def serve(*more: str) -> ServerProcess:
            return ServerProcess(model, [*MARCONI, *POOLS, *more, *args.server_args], log_path=folder / "log")

        try:
            with serve() as server:
                chats = [chat(server.url, seed) for seed in range(args.num_chats)]
                exact = state_slots(server.url)
            with serve(INT8) as server:
                pairs = [(said, ask(server.url, said.prompt)) for each in chats for said in each]
                rounded = state_slots(server.url)
        except ServerFailed as failed:
            print(failed, file=sys.stderr)
            return 2
    figures = figures_of(pairs)
    Console().print(table_of(figures, exact, rounded))
    if args.json is not None:
        document: dict[str, Any] = {**asdict(figures), "slots": {"full precision": exact, "int8": rounded}}
        args.json.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    return int(figures.num_different_anew > 0)


if __name__ == "__main__":
    sys.exit(main())
