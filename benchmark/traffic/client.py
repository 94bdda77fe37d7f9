"""A server's client: asks a shape's waves of it, and notes what each request had from the cache."""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import httpx

from marconi.engine.http.hints import KEY as HINTS
from marconi.engine.reports.explain import EXPLAIN
from marconi_cpu.demo.stream import WrongAnswer, chunks, generated

from .figures import Counters
from .oracle import Asked, Served
from .program import Ask, Program, Wave, Way
from .text import ids_of

TIMEOUT_S = 900.0


def ask(url: str, program: Program, *, explains: bool = False) -> list[Asked]:
    """All of `program`, in the order in which it was asked; `WrongAnswer` or `httpx.HTTPError` where it fails.

    With `explains` each asks for its explanation, and the prompt of several samples comes once before them, by itself,
    as SGLang asks for it: what it asks itself is explained to nobody.
    """
    asked: list[Asked] = []
    # The server is on this machine, whatever the environment says of proxies.
    with httpx.Client(base_url=url, timeout=TIMEOUT_S, trust_env=False) as http:
        client = _Client(http, explains)
        http.post("/flush_cache", params={"timeout": 60}).raise_for_status()
        try:
            wave = next(program)
            while True:
                answers = client.wave(wave)
                asked += [each for answer in answers for each in answer]
                wave = program.send([answer[-1].served.output for answer in answers])
        except StopIteration:
            return asked


def counters(url: str) -> Counters:
    """The counts of a server of this project so far: of a host tier if it has one, and of causes if it explains."""
    ranks = httpx.get(f"{url}/marconi", timeout=TIMEOUT_S, trust_env=False).raise_for_status().json()["ranks"]
    hosts = [rank["host"] for rank in ranks if rank["host"] is not None]
    missed = Counter[str]()
    for rank in ranks:
        missed.update(rank["num_missed_tokens"] or {})
    return Counters(*(sum(host[name] for host in hosts) for name in ("num_evictions", "num_waits")), missed)


@dataclass(frozen=True, slots=True)
class _Client:
    http: httpx.Client
    explains: bool

    def wave(self, wave: Wave) -> list[list[Asked]]:
        """Per request of `wave` what came of it; the last one answers it."""
        if wave.way is Way.IDS:
            return self._generate(wave.asks)
        if wave.way is Way.CHAT:
            return [self._chat(each) for each in wave.asks]
        from . import fork

        return fork.run(wave, self._generate)

    def _generate(self, asks: Sequence[Ask]) -> list[list[Asked]]:
        if not self.explains or all(each.num_samples == 1 for each in asks):
            return self._batch(asks)
        answers = []
        for each in asks:
            warm = replace(each, num_output_tokens=0, num_samples=1)
            samples = [replace(each, num_samples=1)] * each.num_samples
            # SGLang's own asks for no state at its end, as a client's would.
            parts = [*self._batch([warm], {HINTS: []}), *self._batch(samples)]
            answers.append([replace(each, is_counted=bool(place)) for place, (each,) in enumerate(parts)])
        return answers

    def _batch(self, asks: Sequence[Ask], custom: Mapping[str, Any] | None = None) -> list[list[Asked]]:
        prompts = [list(each.prompt) for each in asks]
        sampling = [{**self._sampling(each, "max_new_tokens", custom), "n": each.num_samples} for each in asks]
        # One by itself is asked as clients ask one.
        asked = (prompts, sampling) if len(asks) > 1 else (prompts[0], sampling[0])
        body = {"input_ids": asked[0], "sampling_params": asked[1]}
        of_all = iter(generated(self.http, body, sum(each.num_samples for each in asks)))
        answers = []
        for each in asks:
            answer = []
            if each.num_samples > 1:
                answer.append(Asked(Served(each.prompt, ()), 0, 0.0, is_counted=False))
            for first_s, last in islice(of_all, each.num_samples):
                meta = last["meta_info"]
                got = _checked(each, meta["prompt_tokens"], last["output_ids"], meta["cached_tokens"], first_s)
                answer.append(replace(got, explained=meta.get(EXPLAIN)))
            answers.append(answer)
        return answers

    def _chat(self, each: Ask) -> list[Asked]:
        body = {
            "model": "default",
            "messages": [message.to_json() for message in each.messages],
            **self._sampling(each, "max_tokens"),
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_input_ids_in_sglext": self.explains,
        }
        started_s = time.perf_counter()
        first_s, text, usage = 0.0, "", {}
        prompt: Sequence[int] = each.prompt
        explained = None
        for chunk in chunks(self.http, "/v1/chat/completions", body):
            usage = chunk.get("usage") or usage
            explained = (chunk.get("metadata") or {}).get(EXPLAIN, explained)
            prompt = (chunk.get("sglext") or {}).get("input_ids") or prompt
            for choice in chunk["choices"]:
                piece = choice["delta"].get("content") or ""
                first_s = first_s or (time.perf_counter() - started_s if piece else 0.0)
                text += piece
        if list(prompt) != list(each.prompt):
            raise WrongAnswer("the server's template makes other ids of a chat than are counted")
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        got = _checked(each, usage.get("prompt_tokens"), ids_of(text), cached, first_s)
        return [replace(got, explained=explained)]

    def _sampling(self, each: Ask, length: str, custom: Mapping[str, Any] | None = None) -> dict[str, Any]:
        explain = {"custom_params": {EXPLAIN: True, **(custom or {})}} if self.explains else {}
        return {"temperature": 0, "ignore_eos": True, length: each.num_output_tokens, **explain}


def _checked(each: Ask, num_prompt_tokens: int, output: list[int], num_cached_tokens: int, ttft_s: float) -> Asked:
    """What was asked for is what was answered."""
    got, wanted = (num_prompt_tokens, len(output)), (len(each.prompt), each.num_output_tokens)
    if got != wanted:
        raise WrongAnswer(f"a prompt and an answer must have {wanted} tokens, got {got}")
    return Asked(Served(each.prompt, tuple(output)), num_cached_tokens, ttft_s)
