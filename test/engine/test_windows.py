"""A small Inkling model, whose layers attend alternately in a window or in all tokens, by our cache and SGLang's.

The reference is transformers' model of the same parameters: no server has it without a prefix cache, as SGLang's model
asks for one. Servers check windows, pools and tree whenever they are idle.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers.models.inkling.configuration_inkling import InklingTextConfig
from transformers.models.inkling.modeling_inkling import InklingForCausalLM

from marconi_cpu.demo.server_process import ServerProcess
from marconi_cpu.tiny_model import Family
from marconi_cpu.tiny_model.windows import WINDOW

from .client import Completion, generate, generate_together, random_tokens
from .conftest import MARCONI, TWO_RANKS, StartServer

MAX_DIFFERENCE_TO_TRANSFORMERS = 5e-5
NAMES = (
    ("model.llm.embed_norm", "model.embed_tokens.embed_norm"),
    ("model.llm.embed.", "model.embed_tokens."),
    ("model.llm.unembed.", "lm_head."),
    ("model.llm.", "model."),
    (".attn.", ".self_attn."),
    ("wq_du", "q_proj"),
    ("wk_dv", "k_proj"),
    ("wv_dv", "v_proj"),
    ("wr_du", "r_proj"),
    ("wo_ud", "o_proj"),
    ("sconv.weight", "sconv.conv1d.weight"),
    ("mlp_norm", "post_attention_layernorm"),
    ("attn_norm", "input_layernorm"),
    ("w2_md", "down_proj"),
)
"""Of parts of a published parameter's name, and of the same in transformers."""
SERVED = (
    "--attention-backend",
    "torch_native",
    "--mamba-radix-cache-strategy",
    "extra_buffer",
    # SGLang asks for the published tokenizer.
    "--skip-tokenizer-init",
    "--max-total-tokens",
    "4096",
    "--swa-full-tokens-ratio",
    "0.25",
    "--max-mamba-cache-size",
    "24",
    "--max-running-requests",
    "4",
    "--chunked-prefill-size",
    "256",
)
"""With so little memory that what is kept is evicted: KV of 1024 tokens in windows."""


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Operators this small lose far more to waking threads than they gain by them."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="module")
def model(models: dict[str, Path]) -> InklingForCausalLM:
    """In transformers, which finds every parameter and no other."""
    path = models[Family.WINDOWS]
    text = json.loads((path / "config.json").read_text())["text_config"]
    built = InklingForCausalLM(InklingTextConfig(**text)).eval()
    parameters = {}
    for name, values in load_file(path / "model.safetensors").items():
        for published, own in NAMES:
            name = name.replace(published, own)
        if "w13_dn" in name:
            parameters[name.replace("w13_dn", "gate_proj")] = values[::2]
            parameters[name.replace("w13_dn", "up_proj")] = values[1::2]
        else:
            parameters[name] = values
    built.load_state_dict(parameters, strict=True)
    return built


SERVERS = {
    "page-1": (*MARCONI, "--page-size", "1"),
    "page-128": (*MARCONI, "--page-size", "128"),
    "two-ranks-mixed": (*MARCONI, *TWO_RANKS, "--page-size", "16", "--enable-mixed-chunk"),
    "own-cache-one-pool": ("--page-size", "128", "--enable-unified-memory"),
}


OF_EVERY_CHANGE = ("page-1", "page-128")


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=[] if name in OF_EVERY_CHANGE else pytest.mark.slow) for name in SERVERS],
)
def server(request: pytest.FixtureRequest, models: dict[str, Path], start_server: StartServer) -> ServerProcess:
    return start_server(models[Family.WINDOWS], (*SERVED, *SERVERS[request.param]))


def difference(model: InklingForCausalLM, prompt: Sequence[int], got: Completion) -> float:
    """By how much log-probabilities differ at most; infinite where a token is not the likeliest."""
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *got.token_ids[:-1]]])).logits[0, len(prompt) - 1 :]
    best = logits.log_softmax(-1).max(-1)
    if tuple(best.indices.tolist()) != got.token_ids:
        return float("inf")
    return float((best.values - torch.tensor(got.logprobs)).abs().max())


def test_answers_from_the_cache_are_those_of_transformers(server: ServerProcess, model: InklingForCausalLM) -> None:
    asked, got = [], []

    def ask(prompt: list[int], num_tokens: int) -> list[int]:
        completion = generate(server.url, prompt, max_new_tokens=num_tokens)
        asked.append(prompt)
        got.append(completion)
        return [*prompt, *completion.token_ids]

    for length in (90, 200, 400, 900):
        # Answers that are longer than the window.
        first = ask(random_tokens(length, length), 2 * WINDOW)
        second = ask([*first, *random_tokens(length + 1, 30)], WINDOW // 2)
        ask([*second, *random_tokens(length + 2, 140)], 8)
        ask([*first[: length * 3 // 4], *random_tokens(length + 3, 60)], 8)
        ask([*first[: length * 3 // 4], *random_tokens(length + 4, 60)], 8)
        ask(first[:length], 8)
    differences = [difference(model, *each) for each in zip(asked, got, strict=True)]
    assert max(differences) < MAX_DIFFERENCE_TO_TRANSFORMERS, differences
    assert sum(each.num_cached_tokens > 0 for each in got) >= 12


def test_answers_at_the_same_time_with_eviction_are_those_of_transformers(
    server: ServerProcess, model: InklingForCausalLM
) -> None:
    starts = [random_tokens(seed, 300) for seed in range(5)]
    for turn in range(6):
        prompts = [[*starts[(turn + own) % 5], *random_tokens(10 * turn + own, 40)] for own in range(4)]
        got = generate_together(server.url, prompts, max_new_tokens=WINDOW + 8)
        differences = [difference(model, *each) for each in zip(prompts, got, strict=True)]
        assert max(differences) < MAX_DIFFERENCE_TO_TRANSFORMERS, (turn, differences)


@pytest.mark.slow
@pytest.mark.parametrize("lost", ["windows of convolutions", "keys and values in windows", "other keys and values"])
@pytest.mark.parametrize("num_after", [1, 40])
def test_what_is_lost_shows(model: InklingForCausalLM, lost: str, num_after: int) -> None:
    prompt = random_tokens(3, 300 + num_after)

    def logits(*, is_lost: bool) -> torch.Tensor:
        with torch.no_grad():
            cache = model(torch.tensor([prompt[:300]]), use_cache=True).past_key_values
            for layer in cache.layers if is_lost else ():
                spoil(layer)
            return torch.as_tensor(model(torch.tensor([prompt[300:]]), past_key_values=cache).logits[0, -1])

    def spoil(layer: Any) -> None:
        is_window = "Sliding" in type(layer).__name__
        if lost == "windows of convolutions":
            for window in layer.conv_states.values() if isinstance(layer.conv_states, dict) else layer.conv_states:
                window.zero_()
        elif is_window == (lost == "keys and values in windows"):
            layer.keys.zero_()

    assert (logits(is_lost=True) - logits(is_lost=False)).abs().max() > 100 * MAX_DIFFERENCE_TO_TRANSFORMERS
