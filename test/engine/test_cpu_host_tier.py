"""SGLang's host tier on the CPU platform: what comes back is what went, and answers are those without a cache."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from sglang.srt.mem_cache.hicache_storage import PoolName

from marconi_cpu.host_copies import transfer_kv_all_layer_direct_lf_pf, transfer_kv_per_layer_direct_pf_lf
from rig.pools import Strategy, stock
from rig.soak import soak_pools

from .client import random_tokens
from .conftest import POOLS, STRATEGY_ARGS, EntryPoint, Launch
from .reference import Reference
from .scenarios import CHUNKED_PREFILL_SIZE, EXTRA_BUFFER, MAX_KV_TOKENS, one

NUM_LAYERS, NUM_ROWS, NUM_PAGES = 3, 24, 8


@pytest.mark.parametrize(("page_size", "row"), [(1, (2, 5)), (4, (2, 5)), (1, (7,))], ids=["kv", "pages", "states"])
@pytest.mark.parametrize("num_buffers", [1, 2], ids=["one", "k-and-v"])
def test_rows_come_back_to_where_they_are_loaded_in_every_layer(
    page_size: int, row: tuple[int, ...], num_buffers: int
) -> None:
    draw = torch.Generator().manual_seed(0)
    device = [torch.rand(NUM_ROWS, *row, generator=draw) for _ in range(num_buffers * NUM_LAYERS)]
    host = [torch.full((NUM_PAGES, NUM_LAYERS, page_size, *row), -1.0) for _ in range(num_buffers)]
    num_tokens = 2 * page_size
    taken = torch.arange(page_size, page_size + num_tokens)
    on_host = torch.cat([torch.arange(page_size) + 5 * page_size, torch.arange(page_size) + 2 * page_size])
    transfer_kv_all_layer_direct_lf_pf(device, host, taken, on_host.to(torch.int32), page_size)
    assert all(int((each != -1.0).sum()) == NUM_LAYERS * num_tokens * torch.Size(row).numel() for each in host)
    target = torch.arange(NUM_ROWS - num_tokens, NUM_ROWS)
    for layer in range(NUM_LAYERS):
        loaded = [torch.zeros(NUM_ROWS, *row) for _ in range(num_buffers)]
        transfer_kv_per_layer_direct_pf_lf(host, loaded, on_host, target, layer, page_size)
        for number, each in enumerate(loaded):
            assert torch.equal(each[target], device[number * NUM_LAYERS + layer][taken])
            assert not each[: NUM_ROWS - num_tokens].any()


@pytest.mark.parametrize(("is_broken", "rank"), [(False, 0), (False, 1), (False, 3), (True, 3)])
def test_each_rank_gets_its_rows_of_a_page_back(is_broken: bool, rank: int) -> None:
    """By SGLang's own copies of latent attention's KV: `--dcp-size` 4, pages of 4 tokens for each rank."""
    dcp_size, page = 4, 16
    cache = stock(replace(soak_pools(Strategy.EXTRA_BUFFER, page, host_ratio=3.0), dcp_size=dcp_size))
    host = cache.host_pool_group.get_pool(PoolName.KV)
    host.dcp_rank = rank
    (device,) = host.device_kv_buffers
    device.copy_(torch.arange(device.numel()).view(device.shape) % 100)
    before = device.clone()
    # As paths lie: whole pages, in any order.
    taken, target = (torch.cat([torch.arange(page) + first * page for first in pages]) for pages in ((3, 1), (6, 5)))
    rows = host.alloc(2 * page)
    host.backup_from_device_all_layer(None, rows, taken, "direct")
    device.zero_()
    # The control begins a token behind its page.
    host.load_to_device_per_layer(None, rows, target + is_broken, 0, "direct")
    source, loaded = (each[each % dcp_size == rank] // dcp_size for each in (taken, target))
    assert torch.equal(device[loaded], before[source]) is not is_broken
    if not is_broken:
        device[loaded] = 0
        assert not device.any(), "another rank's rows"


@pytest.mark.slow
def test_stock_answers_from_its_host_tier_as_without_a_cache(
    preload: EntryPoint, models: dict[str, Path], references: Callable[[str], Reference], tmp_path: Path
) -> None:
    """Of prompts that take three times the device's memory all are hit when they come again."""
    args = (*POOLS, *STRATEGY_ARGS[EXTRA_BUFFER], "--chunked-prefill-size", str(CHUNKED_PREFILL_SIZE))
    launch = Launch("stock", "gdn", (*args, "--enable-hierarchical-cache", "--hicache-ratio", "5"))
    prompts = [random_tokens(40_000 + index, 1_000) for index in range(3 * MAX_KV_TOKENS // 1_000)]
    with launch.process(models, tmp_path / "log", entry_point=preload(launch.entry_point)) as server:
        exchanges = [one(server.url, prompt) for _ in range(2) for prompt in prompts]
    assert references("gdn").divergences(exchanges) == []
    hits = [exchange.completion.num_cached_tokens for exchange in exchanges[len(prompts) :]]
    assert min(hits) > 0
