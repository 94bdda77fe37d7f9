"""Whatever is posted, a router answers it, as a client's fault if it is one, and nothing is left of it.

`MARCONI_FUZZ_BODIES` says how many bodies there are.
"""

import asyncio
import gc
import json
import logging
import os
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("tokenizers", reason="the router extra is not installed: pip install '.[router]'")

from marconi.router.gateway.connections import CONNECTIONS
from marconi.router.prompts.reader import TokenizingReader
from router.prompts import folders

from .fuzzed import Whatever, body
from .house import House, house, until

NUM_BODIES = int(os.environ.get("MARCONI_FUZZ_BODIES", "150"))
AT_ONCE = 8


def num_open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


async def post(home: House, seed: int) -> int:
    """The status of what is answered, which is of the form that it must have."""
    route, data = body(seed)
    answer = await home.post(route, data, {"X-Tenant": f"{seed % 3}"})
    assert answer.status in (200, 400, 429), (seed, answer.status, answer.body[:500])
    if answer.status == 400 and b'"object"' in answer.body:
        assert "\n" not in answer.message, seed
        assert json.loads(answer.body)["error"]["code"] == 400, seed
    return answer.status


@pytest.mark.timeout(60 + NUM_BODIES)
@pytest.mark.parametrize("tenant_header", [None, "X-Tenant"], ids=["one name space", "tenants"])
def test_no_body_ends_a_router_or_leaves_anything_behind(
    tenant_header: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    reader = TokenizingReader.of(folders.write("qwen", tmp_path / "model"), lora_paths={"ada": "/ada"})

    async def story() -> Counter[int]:
        workers = Whatever("a"), Whatever("b")
        before = num_open_files()
        statuses: Counter[int] = Counter()
        async with house(*workers, tenant_header=tenant_header) as home:
            home.gateway.reader = reader
            seeds = iter(range(NUM_BODIES))

            async def some() -> None:
                for seed in seeds:
                    statuses[await post(home, seed)] += 1

            await asyncio.gather(*(some() for _ in range(AT_ONCE)))
            loads = home.gateway.dispatcher
            await until(lambda: not any(loads.num_running(worker.url) for worker in workers))
            loads.check_invariants()
            assert not loads._in_flight
            assert not home.gateway._prefill_ends
            assert all(loads.work_ahead_s(worker.url, 0.0) == 0 for worker in workers)
            assert len(home.gateway.up()) == len(workers)
            assert home.app[CONNECTIONS].num_open <= AT_ONCE
            assert (await home.get("/health")).status == 200
        await until(lambda: num_open_files() <= before)
        return statuses

    # What an earlier test left unread is logged when it is collected, which is to be before.
    gc.collect()
    # An earlier test may have made another loop the default, which opens files of its own as it goes.
    with caplog.at_level(logging.WARNING), asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
        statuses = runner.run(story())
    print(dict(statuses))
    assert min(statuses[200], statuses[400]) > NUM_BODIES / 10
    assert [record.getMessage() for record in caplog.records] == []
