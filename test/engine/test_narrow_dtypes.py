"""States in bfloat16 and KV in eight bits: what is reused are the bits that a prefill which ends there leaves.

A state that is kept is rounded to its pool's dtype, where a prefill that goes on would not have rounded it. Chunks of a
prompt are rounded likewise. So the reference is a server without a prefix cache whose chunks end where a state is
reused: a state at the end of a prefill is the same to the bit, and one inside a prefill but for single values that fall
to the other side of a rounding. The negative controls: a prompt that the reference does not cut there, and a server
that breaks the state which a hit copies.
"""

import math
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from types import SimpleNamespace

import pytest
import torch

from marconi.engine.plugin.backend import pool_costs
from marconi.process import LAUNCH
from marconi_cpu.demo.server_process import ServerProcess

from .breaking import BREAKS, SWITCH, broken_states
from .client import HTTP, Completion, generate, random_tokens
from .conftest import BROKEN_STATE_SERVER, EntryPoint, server_args
from .reference import MAX_LOGPROB_DIFFERENCE, difference
from .scenarios import EXTRA_BUFFER, NO_BUFFER

CUT = 100
"""Tokens of a chunk of the reference."""
MAX_DIFFERENCE_OF_FLIPS = 5e-3
"""Of log-probabilities, where single values fall to the other side of a rounding; a broken state makes twice that."""
MAX_MEDIAN_DIFFERENCE = 5e-4
"""Few answers have such values, and which ones hangs on the processor; one more rounding of a state changes all."""
BFLOAT16_STATES = ("--mamba-ssm-dtype", "bfloat16")
SETTINGS = {
    "gdn-bfloat16-states": ("gdn", EXTRA_BUFFER, BFLOAT16_STATES),
    "mamba2-bfloat16-states-fp8-kv": ("mamba2", NO_BUFFER, (*BFLOAT16_STATES, "--kv-cache-dtype", "fp8_e4m3")),
    "gdn-fp8-kv": ("gdn", EXTRA_BUFFER, ("--kv-cache-dtype", "fp8_e5m2")),
}


@pytest.fixture(scope="module", params=SETTINGS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def expected(
    name: str, preload: EntryPoint, models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """The reference: without a cache, in chunks of `CUT` tokens."""
    family, _, dtypes = SETTINGS[name]
    args = ("--disable-radix-cache", "--chunked-prefill-size", str(CUT), *dtypes)
    log_path = tmp_path_factory.mktemp("reference") / "log"
    with ServerProcess(models[family], args, log_path=log_path, entry_point=preload(LAUNCH)) as reference:
        yield reference.url


@pytest.fixture(scope="module")
def serving(
    name: str, preload: EntryPoint, models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    """A setting's server with our cache."""
    family, strategy, dtypes = SETTINGS[name]
    folder = tmp_path_factory.mktemp("serving")
    args, env = [*server_args(strategy), *dtypes], {SWITCH: str(folder / BREAKS)}
    entry_point = preload(BROKEN_STATE_SERVER)
    with ServerProcess(models[family], args, log_path=folder / "log", env=env, entry_point=entry_point) as server:
        yield server


def hits(url: str, seed: int, num_trunk_tokens: int) -> Iterator[tuple[list[int], Completion]]:
    """Prompts that go on from the first `CUT` tokens of a trunk, where it was asked to leave a state."""
    trunk = random_tokens(seed, num_trunk_tokens)
    HTTP.post(f"{url}/flush_cache?timeout=30", timeout=60.0).raise_for_status()
    generate(url, trunk, checkpoints=(CUT,))
    for num_more in (1, 40, CUT):
        prompt = trunk[:CUT] + random_tokens(1000 * num_more + seed, num_more)
        answer = generate(url, prompt)
        assert answer.num_cached_tokens == CUT
        yield prompt, answer


def answered_twice(url: str, seed: int) -> tuple[list[int], Completion]:
    """A prompt, and an answer of which the second half goes on from the state at the end of the first."""
    prompt = random_tokens(seed, CUT - 11)
    first = generate(url, prompt, max_new_tokens=30)
    second = generate(url, [*prompt, *first.token_ids], max_new_tokens=30)
    assert second.num_cached_tokens == len(prompt) + 30 - 1
    return prompt, Completion(first.token_ids + second.token_ids, first.logprobs + second.logprobs, 0)


@pytest.mark.slow
def test_a_rounded_state_is_the_one_that_a_prefill_which_ends_there_leaves(
    name: str, serving: ServerProcess, expected: str
) -> None:
    url = serving.url
    inside = []
    for seed in range(102, 105):
        at_end = [(got, generate(expected, prompt)) for prompt, got in hits(url, seed, CUT)]
        assert [got.token_ids for got, _ in at_end] == [answer.token_ids for _, answer in at_end]
        assert max(difference(*each) for each in at_end) <= MAX_LOGPROB_DIFFERENCE
        inside += [difference(got, generate(expected, prompt)) for prompt, got in hits(url, seed, 3 * CUT)]
        prompt, answer = answered_twice(url, seed + 50)
        inside.append(difference(answer, generate(expected, prompt, max_new_tokens=60)))
    assert max(inside) <= MAX_DIFFERENCE_OF_FLIPS
    assert median(inside) <= MAX_MEDIAN_DIFFERENCE
    # Uncut by the server, and cut by the reference where it rounds.
    uncut = [random_tokens(seed, CUT + 60) for seed in range(200, 204)]
    found = [difference(generate(url, prompt), generate(expected, prompt)) for prompt in uncut]
    assert (median(found) > 4 * MAX_MEDIAN_DIFFERENCE) is (BFLOAT16_STATES[0] in SETTINGS[name][2])


@pytest.mark.slow
def test_negative_control_a_broken_state_is_seen_through_the_rounding(serving: ServerProcess, expected: str) -> None:
    for num_trunk_tokens in (CUT, 3 * CUT):
        with broken_states(serving):
            answers = list(hits(serving.url, 100, num_trunk_tokens))
        assert min(difference(got, generate(expected, prompt)) for prompt, got in answers) > 2 * MAX_DIFFERENCE_OF_FLIPS


@pytest.mark.usefixtures("sglang_configuration")
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float8_e5m2, torch.float8_e4m3fn], ids=str)
def test_costs_are_the_bytes_of_the_dtypes(state_dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateDType, Mamba2StateShape
    from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
    from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool, HybridReqToTokenPool

    shape = Mamba2StateShape.create(
        tp_world_size=1, intermediate_size=32, n_groups=1, num_heads=4, head_dim=8, state_size=16, conv_kernel=4
    )
    dtypes = Mamba2StateDType(conv=torch.bfloat16, temporal=state_dtype)
    states = HybridReqToTokenPool(
        size=2,
        mamba_size=7,
        mamba_spec_state_size=2,
        max_context_len=64,
        device="cpu",
        enable_memory_saver=False,
        cache_params=Mamba2CacheParams(shape=shape, layers=[0, 1, 2], dtype=dtypes),
        mamba_layer_ids=[0, 1, 2],
        enable_mamba_extra_buffer=False,
    )
    kv_pool = HybridLinearKVPool(
        size=50,
        dtype=kv_dtype,
        page_size=1,
        head_num=2,
        head_dim=8,
        full_attention_layer_ids=[3, 4],
        device="cpu",
        mamba_pool=states.mamba_pool,
    )
    kv = TokenToKVPoolAllocator(50, kv_dtype, "cpu", kv_pool, need_sort=False)
    params = SimpleNamespace(
        req_to_token_pool=states, token_to_kv_pool_allocator=kv, page_size=1, swa_retain_window=None
    )
    costs = pool_costs(params, {})  # type: ignore[arg-type]
    num_windows = math.prod(shape.conv[0])
    assert costs.state_bytes == 3 * (4 * 8 * 16 * state_dtype.itemsize + num_windows * 2)
    assert costs.kv_bytes_per_token == 2 * 2 * (2 * 8) * kv_dtype.itemsize
