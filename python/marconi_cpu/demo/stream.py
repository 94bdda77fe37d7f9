"""A streamed answer of a server: its chunks, and of `/generate` the first and the last of each prompt in the body."""

import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import httpx

REASONING_TEMPLATE: Final = Path(__file__).with_name("reasoning.jinja")
"""A chat template of the small models for `--chat-template`: it invites to think, and drops what was thought in earlier
turns, as Qwen3's and others do. A prompt then resumes not where the one before it ended, but a few tokens earlier."""
_DATA: Final = "data: "


class WrongAnswer(Exception):
    """An error in place of an answer, or an answer to something else."""


class Generated(NamedTuple):
    """The answer to one prompt."""

    first_s: float
    """Seconds from sending the request to the first chunk."""
    last: Mapping[str, Any]
    """The last chunk, with `output_ids` and `meta_info`."""


def chunks(client: httpx.Client, path: str, body: Mapping[str, Any]) -> Iterator[Any]:
    """The chunks of the answer to `body`, decoded; `WrongAnswer` for an error in place of one."""
    with client.stream("POST", path, json=body) as response:
        if response.is_error:
            raise WrongAnswer(f"{path}: {response.status_code} {response.read()[:200]!r}")
        for line in response.iter_lines():
            if not line.startswith(_DATA) or line == f"{_DATA}[DONE]":
                continue
            chunk = json.loads(line.removeprefix(_DATA))
            if "error" in chunk:
                raise WrongAnswer(f"{path}: {chunk['error']}")
            yield chunk


def generated(client: httpx.Client, body: Mapping[str, Any], num_answers: int) -> list[Generated]:
    """The answers of `/generate` to a `body` with several prompts, or several samples, in their order.

    Raises `WrongAnswer` for an error, or for fewer answers.
    """
    started_s = time.perf_counter()
    first_s: dict[int, float] = {}
    last: dict[int, Any] = {}
    for chunk in chunks(client, "/generate", {**body, "stream": True}):
        index = chunk.get("index", 0)
        first_s.setdefault(index, time.perf_counter() - started_s)
        last[index] = chunk
    if sorted(last) != [*range(num_answers)]:
        raise WrongAnswer(f"/generate: must answer {num_answers} prompts, got {len(last)} answers")
    return [Generated(first_s[index], last[index]) for index in range(num_answers)]
