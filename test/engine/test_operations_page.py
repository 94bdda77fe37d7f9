"""`docs/operations.md` as an operator types it: a canary beside stock behind a router, and a rolling restart."""

import re
import shlex
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from marconi.process import GuardedServer
from structure.pages import page, shell

from .client import HTTP
from .conftest import EntryPoint
from .processes import free_ports
from .routers import Router
from .scenarios import CHUNKED_PREFILL_SIZE, MAX_KV_TOKENS

PAGE = page("docs/operations.md")
SIZES = f"--max-total-tokens {MAX_KV_TOKENS} --max-running-requests 4 --chunked-prefill-size {CHUNKED_PREFILL_SIZE}"
"""The same for both workers, as the page asks: this machine has no memory that a fraction could be taken of."""
SESSIONS = [f"session-{number}" for number in range(24)]
"""So many that a hash divides them between both workers, whatever their ports are."""


def command(*parts: str) -> str:
    """The one command of the page that has all of these in it."""
    (found,) = (each for each in shell(PAGE) if all(part in each for part in parts))
    return found.replace("\\\n", " ")


@dataclass(frozen=True)
class Canary:
    """What the page starts: a router in front of stock SGLang and of this cache."""

    router: Router
    stock: GuardedServer
    marconi: GuardedServer
    typed: Callable[[str], str]
    """A command of the page with this machine's ports and model."""


@pytest.fixture(scope="module")
def canary(preload: EntryPoint, models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Canary]:
    logs, first = tmp_path_factory.mktemp("canary"), free_ports(3)

    def typed(text: str) -> str:
        here = re.sub(r"\b3000(\d)\b", lambda port: str(first + int(port[1])), text)
        return here.replace("MODEL", str(models["gdn"]))

    def server(text: str, number: int) -> GuardedServer:
        words = shlex.split(typed(text))
        assert words[:3] == ["python", "-m", "sglang.launch_server"]
        assert words[words.index("--port") + 1] == str(first + number)
        arguments = (*preload(tuple(words[1:3])), *words[3:], *SIZES.split())
        return GuardedServer(arguments, first + number, log_path=logs / str(number))

    stock, marconi = (server(command("launch_server", f"--port 3000{number}"), number) for number in (1, 2))
    program, *words = shlex.split(typed(command("marconi router", "--routing sticky-hash")))
    assert program == "marconi"
    # Its default port is the page's 30000, which another program may have here.
    router = GuardedServer(("-m", "marconi", *words, "--port", str(first)), first, log_path=logs / "router")
    with ExitStack() as stack:
        for each in (stock, marconi):
            stack.callback(each.stop)
            each.start()
        for each in (stock, marconi):
            each.wait_until_ready()
        stack.enter_context(router)
        yield Canary(Router(router.url, ()), stock, marconi, typed)


def conditions_of(state: dict[str, Any]) -> dict[str, str]:
    return {worker["url"]: worker["condition"] for worker in state["workers"]}


def asked(canary: Canary, session: str, text: str) -> tuple[str, str]:
    """The answer, and the worker that gave it."""
    body = {"text": text, "sampling_params": {"temperature": 0, "max_new_tokens": 4}}
    answer = canary.router.post("/generate", body, headers={"X-Session": session})
    answer.raise_for_status()
    return answer.json()["text"], canary.router.latest()["worker"]


def counted(server: GuardedServer, metric: str) -> float:
    text = HTTP.get(f"{server.url}/metrics").text
    return sum(float(value) for value in re.findall(rf"^{metric}{{.*}} (\S+)$", text, re.MULTILINE))


@pytest.mark.slow
def test_the_canary_divides_requests_by_session_and_both_workers_count_the_same_metrics(canary: Canary) -> None:
    canary.router.until(lambda state: set(conditions_of(state).values()) == {"up"})
    workers = {}
    for session in SESSIONS:
        prompt = f"{session}: " + "what did the keeper write down? " * 12
        answer, workers[session] = asked(canary, session, prompt)
        again = asked(canary, session, prompt + answer + " And then?")
        assert again[1] == workers[session], "a conversation that changes servers hits on neither"
    assert set(workers.values()) == {canary.stock.url, canary.marconi.url}
    named = re.findall(r"`(sglang:\w+)`", PAGE.read_text())
    assert len(named) == len({*named}) == 4
    for server in (canary.stock, canary.marconi):
        prompts, cached = (counted(server, f"sglang:{name}_tokens_total") for name in ("prompt", "cached"))
        assert 0 < cached < prompts
        assert counted(server, "sglang:time_to_first_token_seconds_count") > 0
        assert all(name in HTTP.get(f"{server.url}/metrics").text for name in named)
    assert counted(canary.marconi, "marconi_hit_tokens_total") > 0
    assert not counted(canary.stock, "marconi_hit_tokens_total")


@pytest.mark.slow
def test_a_rolling_restart_as_the_page_has_it(canary: Canary) -> None:
    """A removed worker gets no request, an idle one counts none, and an added one is up again, empty."""
    at_worker = f"127.0.0.1:{canary.stock.port}"

    def run(text: str) -> str:
        # The page restarts the first worker, this test the one with the cache.
        line = canary.typed(text).replace(at_worker, f"127.0.0.1:{canary.marconi.port}")
        done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=60, check=True)
        return done.stdout

    canary.router.until(lambda state: set(conditions_of(state).values()) == {"up"})
    run(command("curl -X DELETE"))
    assert list(conditions_of(canary.router.state())) == [canary.stock.url]
    assert {asked(canary, session, "asked while it is away")[1] for session in SESSIONS} == {canary.stock.url}
    assert re.fullmatch(r"sglang:num_running_reqs\{.*\} 0\.0\n", run(command("curl", "num_running_reqs")))
    assert command("systemctl restart").startswith("systemctl restart marconi ")
    canary.marconi.stop()
    canary.marconi.start()
    canary.marconi.wait_until_ready()
    assert not counted(canary.marconi, "marconi_hit_tokens_total")
    run(command("curl -X POST", "/router/workers"))
    canary.router.until(lambda state: conditions_of(state).get(canary.marconi.url) == "up")
    assert {asked(canary, session, "asked afterwards")[1] for session in SESSIONS} == {
        canary.stock.url,
        canary.marconi.url,
    }
