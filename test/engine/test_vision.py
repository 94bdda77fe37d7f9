"""A model that takes images: text hits as in the text model, and an image is reused for its content alone.

Servers run the small model of `gdn` behind a vision tower (`tiny_model/vision.py`), which has the text model's own
parameters. Every answer equals that of a server without a prefix cache. The negative controls: broken states, and
images that are keyed without their content.
"""

import base64
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from marconi_cpu.demo.server_process import ServerProcess

from .breaking import BREAKS, SWITCH, broken_states, num_broken, require_broken
from .client import HTTP, Completion, completion_of
from .conftest import REPORTING, VISION, StartServer, server_args
from .reference import MAX_LOGPROB_DIFFERENCE, difference
from .scenarios import EXTRA_BUFFER
from .test_exactness import MAX_DIFFERENCE_TO_TRANSFORMERS

pytestmark = pytest.mark.slow

PLACE = "<|vision_start|><|image_pad|><|vision_end|>"
NUM_IMAGE_TOKENS = 100
SIDE = 320
"""Pixels: an image token is 32x32 of them."""
ALIKE = "alike"
"""While this file stands beside the log of the server, it keys images without their content."""
ALIKE_IMAGES_SERVER = (str(Path(__file__).with_name("alike_images_server.py")),)
TEXT = "What do you see in the picture that comes now? "
QUESTION = "Say which of these it is, and why you think so, in a sentence."


@dataclass(frozen=True, slots=True)
class Asked:
    """A body for `/generate`, or for `/v1/chat/completions`, without how many tokens to answer with."""

    body: dict[str, Any]

    @property
    def is_chat(self) -> bool:
        return "messages" in self.body


@dataclass(frozen=True, slots=True)
class Exchange:
    """What was asked, and the answer: a completion and the length of its prompt."""

    asked: Asked
    completion: Completion
    num_prompt_tokens: int
    text: str


@dataclass(frozen=True, slots=True)
class Servers:
    """Of the model with a cache, without one, and of the text model with a cache."""

    vision: ServerProcess
    uncached: ServerProcess
    text: ServerProcess


@pytest.fixture(scope="module")
def servers(models: dict[str, Path], preload: Any, start_server: StartServer, tmp_path_factory: Any) -> Servers:
    folder = tmp_path_factory.mktemp("vision")
    args = (*server_args(EXTRA_BUFFER), *REPORTING)
    breaking = {
        "entry_point": preload(ALIKE_IMAGES_SERVER),
        "env": {SWITCH: str(folder / BREAKS), "MARCONI_TEST_ALIKE_FILE": str(folder / ALIKE)},
        "log_path": folder / "log",
    }
    return Servers(
        start_server(models[VISION], args, **breaking),
        start_server(models[VISION], ["--disable-radix-cache", "--enable-cache-report"]),
        start_server(models["gdn"], args),
    )


@pytest.fixture(autouse=True)
def flushed(servers: Servers) -> None:
    """Every test begins with empty caches."""
    for each in (servers.vision, servers.text):
        HTTP.post(f"{each.url}/flush_cache?timeout=30", timeout=60.0).raise_for_status()


def picture(seed: int) -> str:
    """An image of noise, as a client sends it."""
    pixels = np.random.default_rng(seed).integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def prompt(text: str, *seeds: int, checkpoints: Sequence[int] = (), **fields: Any) -> Asked:
    """A text in which `PLACE` stands for each of the images of `seeds`."""
    custom = {"custom_params": {"marconi_checkpoints": [*checkpoints]}} if checkpoints else {}
    return Asked({"text": text, "image_data": [picture(seed) for seed in seeds] or None, "custom": custom, **fields})


def chat(*turns: str | tuple[str, int]) -> Asked:
    """A system prompt, and the user's and the model's turns after it; a user's with the image of a seed before it."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": turns[0]}]
    for number, turn in enumerate(turns[1:]):
        content: Any = turn
        if isinstance(turn, tuple):
            image = {"type": "image_url", "image_url": {"url": picture(turn[1])}}
            content = [image, {"type": "text", "text": turn[0]}]
        messages.append({"role": "assistant" if number % 2 else "user", "content": content})
    return Asked({"model": "any", "messages": messages})


def ask(server: ServerProcess, asked: Asked) -> Exchange:
    if asked.is_chat:
        body = asked.body | {"temperature": 0, "max_tokens": 6, "ignore_eos": True, "return_meta_info": True}
        answer = HTTP.post(f"{server.url}/v1/chat/completions", json=body, timeout=300.0)
        answer.raise_for_status()
        usage, text = answer.json()["usage"], answer.json()["choices"][0]["message"]["content"]
        num_cached = (usage["prompt_tokens_details"] or {}).get("cached_tokens", 0)
        return Exchange(asked, Completion(tuple(text.encode()), (), num_cached), usage["prompt_tokens"], text)
    sampling = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True, **asked.body["custom"]}
    fields = {name: value for name, value in asked.body.items() if name != "custom"}
    answer = HTTP.post(
        f"{server.url}/generate", json=fields | {"sampling_params": sampling, "return_logprob": True}, timeout=300.0
    )
    answer.raise_for_status()
    meta = answer.json()["meta_info"]
    return Exchange(asked, completion_of(meta), meta["prompt_tokens"], answer.json()["text"])


def hits(exchanges: Sequence[Exchange]) -> list[int]:
    return [each.completion.num_cached_tokens for each in exchanges]


def wrong(servers: Servers, exchanges: Sequence[Exchange]) -> list[int]:
    """The numbers of those whose answers are not what the model without a cache says."""
    found = []
    for number, each in enumerate(exchanges):
        right = ask(servers.uncached, each.asked).completion
        got = each.completion
        assert right.num_cached_tokens == 0
        is_off = bool(got.logprobs) and difference(got, right) > MAX_LOGPROB_DIFFERENCE
        if got.token_ids != right.token_ids or is_off:
            found.append(number)
    return found


def test_the_reference_agrees_with_transformers(servers: Servers, models: dict[str, Path]) -> None:
    import torch
    from transformers import AutoModelForImageTextToText, AutoProcessor

    processor = AutoProcessor.from_pretrained(models[VISION])
    model = AutoModelForImageTextToText.from_pretrained(models[VISION], dtype=torch.float32).eval()
    for seeds, text in (((1,), TEXT + PLACE + QUESTION), ((2, 3), PLACE + TEXT * 5 + PLACE)):
        served = ask(servers.uncached, prompt(text, *seeds)).completion
        images = [Image.open(io.BytesIO(base64.b64decode(picture(seed).partition(",")[2]))) for seed in seeds]
        inputs = processor(text=[text], images=images, return_tensors="pt")
        with torch.inference_mode():
            answer = model.generate(
                **inputs,
                max_new_tokens=len(served.token_ids),
                min_new_tokens=len(served.token_ids),
                do_sample=False,
                output_logits=True,
                return_dict_in_generate=True,
            )
        token_ids = answer.sequences[0, inputs["input_ids"].shape[1] :].tolist()
        steps = zip(answer.logits, token_ids, served.logprobs, strict=True)
        assert tuple(token_ids) == served.token_ids
        assert all(
            abs(logits[0].log_softmax(-1)[token].item() - logprob) <= MAX_DIFFERENCE_TO_TRANSFORMERS
            for logits, token, logprob in steps
        )


# Text


def chat_turns(server: ServerProcess) -> list[Exchange]:
    turns, exchanges = ["Be kind, and brief. " * 8], []
    for question in ("What is a state?", "And a checkpoint of one?", "Where is it kept, then?"):
        turns.append(question)
        exchanges.append(ask(server, chat(*turns)))
        turns.append(exchanges[-1].text)
    return exchanges


def shared_system_prompt(server: ServerProcess) -> list[Exchange]:
    system = "You answer questions about the sea and ships. " * 5
    return [ask(server, chat(system, question)) for question in ("How deep?", "Which ship?", "When is the tide?")]


def branches(server: ServerProcess) -> list[Exchange]:
    trunk = "It was a dark and stormy night, and the rain fell in torrents. " * 5
    ends = ("A dog barked.", "Nobody was there.", "She lit a lamp.", "She lit a lamp and waited.")
    return [ask(server, prompt(text)) for text in (trunk, *(trunk[:207] + end for end in ends), trunk)]


@pytest.mark.parametrize("kind", [chat_turns, shared_system_prompt, branches])
def test_text_hits_as_many_tokens_as_in_the_text_model(
    servers: Servers, kind: Callable[[ServerProcess], list[Exchange]]
) -> None:
    with_images, text = kind(servers.vision), kind(servers.text)
    assert hits(with_images) == hits(text)
    assert any(hits(text)), "nothing was reused, so nothing was tested"
    assert [each.text for each in with_images] == [each.text for each in text], "the parameters are the same"
    assert wrong(servers, with_images) == []


# Images


def again(server: ServerProcess) -> list[Exchange]:
    asked = prompt(TEXT + PLACE + QUESTION, 1)
    return [ask(server, asked), ask(server, asked)]


def two_images(server: ServerProcess) -> list[Exchange]:
    return [ask(server, prompt(TEXT + PLACE + QUESTION, seed)) for seed in (1, 2, 3, 1)]


def second_images(server: ServerProcess) -> list[Exchange]:
    text = TEXT + PLACE + "and" + PLACE + QUESTION
    return [ask(server, prompt(text, 1, seed)) for seed in (2, 3, 4, 1)]


def chat_with_images(server: ServerProcess) -> list[Exchange]:
    turns: list[str | tuple[str, int]] = ["You describe pictures, and nothing else. " * 4]
    exchanges = []
    for question in (("What is this?", 1), "In which colours?", ("And is this another?", 2), "Which is larger?"):
        turns.append(question)
        exchanges.append(ask(server, chat(*turns)))
        turns.append(exchanges[-1].text)
    return exchanges


def inside(server: ServerProcess) -> list[Exchange]:
    """States inside an image's tokens, one of which is at the end of a chunk."""
    first = prompt(TEXT + PLACE + QUESTION, 5, checkpoints=(len(TEXT) + 38,))
    other = prompt(TEXT + PLACE + "Nothing of the kind was asked before, or will be asked hereafter.", 5)
    cut = prompt(TEXT * 4 + PLACE + QUESTION, 6)
    return [ask(server, each) for each in (first, other, cut, cut)]


IMAGES = (again, two_images, second_images, chat_with_images, inside)


def test_an_image_that_comes_again_is_reused_with_all_behind_it(servers: Servers) -> None:
    exchanges = again(servers.vision)
    assert hits(exchanges) == [0, exchanges[0].num_prompt_tokens - 1]
    assert wrong(servers, exchanges) == []


def test_two_images_under_one_text_share_nothing_behind_the_first_ones_beginning(servers: Servers) -> None:
    first, second, third, repeated = exchanges = two_images(servers.vision)
    begins = len(TEXT) + 1
    assert second.completion.num_cached_tokens <= begins
    assert third.completion.num_cached_tokens == begins, "the second shows where images differ"
    assert repeated.completion.num_cached_tokens == first.num_prompt_tokens - 1
    assert len({each.completion.token_ids for each in exchanges}) == 3, "the model does not see the images"
    assert wrong(servers, exchanges) == []


def test_a_second_image_may_differ_too(servers: Servers) -> None:
    exchanges = second_images(servers.vision)
    begins = len(TEXT) + 1 + NUM_IMAGE_TOKENS + 1 + len("and") + 1
    assert hits(exchanges) == [0, hits(exchanges)[1], begins, begins]
    assert hits(exchanges)[1] <= begins
    assert wrong(servers, exchanges) == []


def test_the_next_turn_of_a_chat_resumes_behind_its_images(servers: Servers) -> None:
    exchanges = chat_with_images(servers.vision)
    for before, after in pairwise(exchanges):
        assert after.completion.num_cached_tokens >= before.num_prompt_tokens
    assert wrong(servers, exchanges) == []


def test_the_second_chat_with_an_image_resumes_from_the_end_of_the_system_prompt(servers: Servers) -> None:
    system = "You look at photographs of birds and name them. " * 4
    exchanges = [ask(servers.vision, chat(system, ("Which bird?", seed))) for seed in (1, 2)]
    head = len("S" + "system\n" + system + "E" + "\n" + "S" + "user\n")
    assert hits(exchanges) == [0, head]
    assert wrong(servers, exchanges) == []


def test_a_state_may_stand_inside_an_image(servers: Servers) -> None:
    exchanges = inside(servers.vision)
    assert hits(exchanges)[1] >= len(TEXT) + 38
    assert wrong(servers, exchanges) == []


def test_an_explanation_names_the_beginning_of_an_image_that_differs(servers: Servers) -> None:
    explained = {"custom_params": {"marconi_explain": True}}
    bodies = [prompt(TEXT + PLACE + QUESTION, seed).body | {"custom": explained} for seed in (7, 8)]
    ask(servers.vision, Asked(bodies[0]))
    fields = {name: value for name, value in bodies[1].items() if name != "custom"}
    answer = HTTP.post(f"{servers.vision.url}/generate", json=fields | {"sampling_params": explained}, timeout=300.0)
    assert f"diverged at token {len(TEXT) + 1}" in answer.json()["meta_info"]["marconi_explain"]["line"]


# Negative controls


@pytest.mark.parametrize("kind", IMAGES)
def test_negative_control_a_broken_state_turns_images_red(
    servers: Servers, kind: Callable[[ServerProcess], list[Exchange]]
) -> None:
    with broken_states(servers.vision):
        exchanges = kind(servers.vision)
    found = wrong(servers, exchanges)
    assert found, "a server that breaks states answered rightly: the tests cannot see a broken state"
    assert set(found) <= {number for number, each in enumerate(hits(exchanges)) if each}


def test_negative_control_images_with_one_key_share_what_they_must_not(servers: Servers) -> None:
    log_path = servers.vision.log_path
    switch, before = log_path.with_name(ALIKE), num_broken(log_path)
    switch.touch()
    try:
        exchanges = two_images(servers.vision)
    finally:
        switch.unlink()
    require_broken(log_path, before)
    assert hits(exchanges) == [0, *[exchanges[0].num_prompt_tokens - 1] * 3]
    assert wrong(servers, exchanges) == [1, 2]
