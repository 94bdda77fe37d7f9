"""Ray Serve with two replicas of the small model: second turns hit where the first ones were, killed replica or not."""

from collections.abc import Iterator
from random import Random

import pytest

pytest.importorskip("ray.serve", reason="THE RAY EXTRA IS NOT INSTALLED, this test did not run: pip install '.[ray]'")
pytest.importorskip(
    "sglang", reason="THE SERVER EXTRA IS NOT INSTALLED, this test did not run: pip install '.[server]'"
)

import httpx
import psutil
import ray

from marconi_cpu import tiny_model
from marconi_cpu.demo.server_process import environment
from marconi_ray.ingress import REPLICA

from .cluster import cluster, command_of, descendants, running, until

# Two servers of SGLang are started, and one is killed.
pytestmark = pytest.mark.timeout(1800)

NUM_SESSIONS = 8
WORDS = ("river", "stone", "quiet", "ledger", "amber", "window", "copper", "signal", "garden", "winter", "lantern")
POOLS = ("--max-total-tokens", "12000", "--max-mamba-cache-size", "48", "--max-running-requests", "8")


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    model = tmp_path_factory.mktemp("model") / "gdn"
    tiny_model.write(tiny_model.Family.GDN, model)
    platform = environment().get("SGLANG_PLATFORM")
    env = {} if platform is None else {"SGLANG_PLATFORM": platform}
    with (
        cluster() as url,
        running(
            url,
            model=str(model),
            num_replicas=2,
            num_gpus=0,
            server_args=[*POOLS, "--enable-cache-report"],
            env=env,
        ) as made,
    ):
        yield made


def text(seed: int, num_words: int) -> str:
    rng = Random(seed)  # noqa: S311 - no secret
    return " ".join(rng.choice(WORDS) for _ in range(num_words))


def say(client: httpx.Client, messages: list[dict[str, str]]) -> tuple[str, int, int]:
    """The replica, the prompt's tokens and those of them that it had; the answer joins the messages."""
    body = {"model": "m", "messages": messages, "max_tokens": 8, "temperature": 0}
    answer = client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    said = answer.json()
    messages.append({"role": "assistant", "content": said["choices"][0]["message"]["content"] or ""})
    usage = said["usage"]
    details = usage.get("prompt_tokens_details") or {}
    return answer.headers[REPLICA], usage["prompt_tokens"], details.get("cached_tokens") or 0


def test_chats_go_on_where_their_states_are_and_elsewhere_once_that_replica_is_killed(client: httpx.Client) -> None:
    chats = [[{"role": "user", "content": text(number, 60)}] for number in range(NUM_SESSIONS)]
    first = [say(client, chat) for chat in chats]
    assert len({replica for replica, _, _ in first}) == 2, "cold prefixes spread"
    for turn in range(2):
        for chat, (replica, num_before, _) in zip(chats, first, strict=True):
            chat.append({"role": "user", "content": text(100 + turn, 10)})
            where, _, num_cached = say(client, chat)
            assert where == replica
            assert num_cached >= num_before - 1, "the state before the last token of the prompt, or one after it"

    servers = launched()
    killed = first[0][0]
    ray.kill(ray.get_actor(f"SERVE_REPLICA::app#SGLang#{killed}", namespace="serve"))
    for chat in chats:
        chat.append({"role": "user", "content": text(200, 10)})
        assert say(client, chat)[0] != killed
    until(lambda: len([each for each in servers if each.is_running()]) == len(servers) // 2)


def launched() -> list[psutil.Process]:
    """The processes of all servers, those with a command line of their own."""
    return [
        each
        for each in descendants()
        if "sglang.launch_server" in command_of(each) and "marconi.process" not in command_of(each)
    ]
