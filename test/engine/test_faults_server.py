"""Every hook raises in turn on a real server: no request is lost, no answer differs, and planning stops.

A hook that decides what is scheduled raises on all ranks, as it reads what all of them have; one that runs in a forward
raises on one of two. Hooks of the queue, of prefills and of drafts, and kernels, raise on the servers of the matrix,
among them those above a host tier and in one pool, where evictions, copies and loads are under way (`PLANTED`). Those
beside the cache raise each by the call that meets it (`CALLS`), and hooks around CUDA kernels in `test_fake_cuda.py`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from marconi.engine.plugin import upstream
from marconi.engine.plugin.touch import Group
from marconi_cpu.demo.server_process import ServerProcess

from .breaking import BREAKS, SWITCH, require_broken
from .client import HTTP, generate, random_tokens
from .conftest import FAULT, MARCONI, STANDARD, EntryPoint, Launch, server_args
from .matrix import (
    DATA_PARALLEL,
    HOST,
    IN_TURN,
    MATRIX,
    NONE,
    ONE_POOL,
    OVERLAP,
    SERVER,
    TIGHT_KV_TOKENS,
    TWO_POOLS,
    WHOLE,
    Choice,
)
from .processes import free_ports
from .reference import Reference
from .scenarios import EXTRA_BUFFER, NO_BUFFER, Exchange, one, together

TRUNK = random_tokens(81_000, 250)
BRANCHES = [TRUNK[:208] + random_tokens(81_001 + index, 50 + index) for index in range(4)]
OTHER = random_tokens(81_100, 90)


def named(*groups: Group) -> tuple[str, ...]:
    return tuple(touch.hook for group in groups for touch in group.hooks)


SCHEDULING = tuple(name for name in named(upstream.QUEUE, upstream.PREFILLS) if name.startswith("cache.scheduler."))
FORWARD = tuple(name for name in named(upstream.PREFILLS) if name not in SCHEDULING)
DRAFTS = named(upstream.DRAFTS)
OF_LFM2, *OF_OTHER_CONVOLUTIONS = named(upstream.SHORT_CONVOLUTIONS)
BESIDE = ("plugin.backend.clean_logits", "reports.idle.after_idle_metrics", "http.details.on_get_cached_tokens_details")
"""They serve no state, and any request meets them."""
TIGHT = ("--max-total-tokens", "600", "--max-mamba-cache-size", "16", "--max-running-requests", "3")
TIGHT += ("--chunked-prefill-size", "128")
LONG = [random_tokens(82_000 + index, 190 + index) for index in range(TIGHT_KV_TOKENS // 190 + 2)]
"""More than a server of one pool, or above a host tier, holds."""
AT_THE_END = "cache.speculation.around_can_cache"
"""Of a request: it decides what is kept, by what every rank has."""
BOTH = ("after", "before")
"""A hook's work; the first is harder. `test_faults.py` raises in place of each hook, without a server."""


def faults_of(choice: Choice) -> list[str]:
    """The hooks and kernels that a server meets."""
    if choice.family == "short-conv":
        return [OF_LFM2]
    hybrid, linear = ("around_mamba2", "mamba2") if choice.family == "gdn" else ("around_hybrid", "gated_delta_rule")
    met = [*SCHEDULING, *FORWARD, "short_conv.checkpoint", "state_copy.copy"]
    met += ["gated_delta_rule.checkpoint" if choice.family == "gdn" else "mamba2.checkpoint"]
    if choice.strategy == NO_BUFFER:
        met.remove("cache.scheduler.around_track")
        met += BESIDE
    if choice.drafts != NONE:
        met = [*DRAFTS, *met[:1], *met[-3:]]
    return [each for each in met if hybrid not in each and linear not in each]


SERVERS = (
    *MATRIX,
    Launch(
        "gdn-one-pool-faulty",
        "gdn",
        (*MARCONI, *TIGHT, "--enable-unified-memory"),
        entry_point=SERVER,
        choice=Choice("gdn", EXTRA_BUFFER, NONE, OVERLAP, ONE_POOL, "1", "1", WHOLE),
    ),
    replace(
        STANDARD["mamba2", NO_BUFFER],
        name="mamba2-faulty",
        entry_point=SERVER,
        choice=Choice("mamba2", NO_BUFFER, NONE, IN_TURN, TWO_POOLS, "1", "1", WHOLE),
    ),
    Launch(
        "short-conv-faulty",
        "short-conv",
        server_args(NO_BUFFER),
        NO_BUFFER,
        entry_point=SERVER,
        choice=Choice("short-conv", NO_BUFFER, NONE, IN_TURN, TWO_POOLS, "1", "1", WHOLE),
    ),
)
"""In one pool those of the matrix have room for all that is asked, and of Mamba2 all draft or have larger pages."""


def planted() -> dict[Choice, list[tuple[str, str]]]:
    """Hooks of each server and when they raise: each in both ways, once on one rank, on two, and in each memory.

    Both ways where it takes least, in two pools; then on two ranks, whose memory none on one rank has to meet again.
    Ranks with a cache each are alone, and slow: whichever has nothing to do takes part in every step of the other.
    """
    chosen: dict[Choice, list[tuple[str, str]]] = {}
    met: set[tuple[str, str]] = set()
    whole = [each.choice for each in SERVERS if each.choice and not each.choice.is_prefill]
    whole.sort(key=lambda each: (each.memory != TWO_POOLS, each.ranks == "1"))
    for choice in (each for each in whole if each.ranks != DATA_PARALLEL and each.page == "1"):
        for fault in faults_of(choice):
            ranks = "ranked" if choice.ranks != "1" else "alone"
            for when in BOTH:
                claims = {(fault, when), (fault, ranks), (fault, choice.memory)}
                if not claims <= met:
                    met |= claims
                    chosen.setdefault(choice, []).append((fault, when))
    return chosen


PLANTED = planted()
LAUNCHES = tuple(pytest.param(each, marks=pytest.mark.slow) for each in SERVERS if each.choice in PLANTED)


def ask(url: str) -> list[Exchange]:
    """A prompt twice, others that branch off it, at once and one after the other, and one that continues an answer."""
    # A state at a prefill's end is copied there, others are made inside.
    first = Exchange(tuple(TRUNK), generate(url, TRUNK, checkpoints=(len(TRUNK),)))
    longer = [*first.prompt, *first.completion.token_ids[:-1], *OTHER]
    return [first, one(url, TRUNK), *together(url, BRANCHES), one(url, longer), *together(url, [*BRANCHES[:2], longer])]


def fill(url: str) -> list[Exchange]:
    """Prompts of more than a tight server holds: with a host tier the first are there alone."""
    return together(url, LONG)


def go_on(url: str) -> list[Exchange]:
    """The first of them with more, at once, and what branches off them."""
    more = [prompt + OTHER[: 40 + index] for index, prompt in enumerate(LONG[:4])]
    # A state at a prefill's end is copied there.
    first = Exchange(tuple(more[0]), generate(url, more[0], checkpoints=(len(more[0]),)))
    return [first, *together(url, more), *together(url, [prompt[:150] + OTHER[:50] for prompt in LONG[:3]])]


@contextmanager
def serving(
    launch: Launch, models: dict[str, Path], preload: EntryPoint, tmp_path: Path, **env: str
) -> Iterator[tuple[ServerProcess, Path]]:
    """A server, and the file that says what raises there."""
    file = tmp_path / FAULT
    file.write_text("")
    files = (SWITCH, str(tmp_path / BREAKS)), ("MARCONI_TEST_FAULT_FILE", str(file))
    launch = replace(launch, env=(*launch.env, *files, *env.items()))
    with launch.process(models, tmp_path / "log", entry_point=preload(SERVER)) as server:
        yield server, file


def status(server: ServerProcess) -> dict[str, Any]:
    """Of the cache that is asked: the last, where there are several."""
    return dict(HTTP.get(f"{server.url}/marconi", timeout=30.0).json()["ranks"][-1])


def flush(server: ServerProcess) -> None:
    HTTP.post(f"{server.url}/flush_cache?timeout=30", timeout=60.0).raise_for_status()


def num_moved(there: dict[str, Any]) -> int:
    """Loads of a host tier, and states that one pool has evicted; 0 of a server that has neither."""
    num_loads = 0 if there["host"] is None else there["host"]["num_loads"]
    return int(num_loads + there["evictions"]["bytes"])


def wrong_with(
    server: ServerProcess, file: Path, reference: Reference, fault: str, when: str, ranks: str, is_tight: bool
) -> list[str]:
    """What was lost, differs, or was not noticed when a hook raised, and afterwards."""
    flush(server)
    before = fill(server.url) if is_tight else []
    num_before, ask_now = num_moved(status(server)), go_on if is_tight else ask
    file.write_text(f"{fault} {when} {ranks}")
    exchanges = ask_now(server.url)
    found = reference.divergences([*before, *exchanges])
    there = status(server)
    # What follows meets no fault, and no plan.
    file.write_text("")
    prompts = dict.fromkeys(each.prompt for each in exchanges)
    found += reference.divergences(together(server.url, [list(prompt) for prompt in [*prompts][::2]]))
    if there["why_not_planned"] is None:
        found.append("planning went on")
    if is_tight and num_moved(there) == num_before:
        found.append("nothing was loaded or evicted meanwhile")
    return [f"{fault} raises {when}: {each}" for each in found]


def test_a_hook_that_raises_loses_no_request_and_changes_no_answer(
    launch: Launch, server: ServerProcess, references: Callable[[str], Reference]
) -> None:
    choice, reference, wrong = launch.choice, references(launch.family), []
    assert choice is not None
    file = server.log_path.parent / FAULT
    flush(server)
    assert reference.divergences(ask(server.url)) == []
    assert status(server)["why_not_planned"] is None
    for fault, when in PLANTED[choice]:
        alone = choice.ranks != "1" and fault not in SCHEDULING and fault != AT_THE_END
        ranks, is_tight = "1" if alone else "all", choice.memory != TWO_POOLS
        wrong += wrong_with(server, file, reference, fault, when, ranks, is_tight)
    flush(server)
    assert wrong == []


def takes_turn(url: str) -> None:
    """A turn of a session; of one that replaces others SGLang's own scheduler may end, with no hook to mend that."""
    session = HTTP.post(f"{url}/open_session", json={"capacity_of_str_len": 10_000}, timeout=60.0).json()
    sampling = {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True}
    body = {"input_ids": OTHER, "session_params": {"id": session}, "sampling_params": sampling}
    HTTP.post(f"{url}/generate", json=body, timeout=60.0).raise_for_status()
    HTTP.post(f"{url}/close_session", json={"session_id": session}, timeout=60.0).raise_for_status()


def release_and_resume(url: str) -> None:
    for verb in ("release", "resume"):
        path, tags = f"{verb}_memory_occupation", {"tags": ["kv_cache"]}
        HTTP.post(f"{url}/{path}", json=tags, timeout=60.0).raise_for_status()


def chat(url: str) -> None:
    """A stream, and an answer in one piece."""
    for is_streamed in (True, False):
        body = {"model": "m", "max_tokens": 4, "stream": is_streamed, "messages": [{"role": "user", "content": "a"}]}
        response = HTTP.post(f"{url}/v1/chat/completions", json=body, timeout=60.0).raise_for_status()
        assert response.text.rstrip().endswith("data: [DONE]" if is_streamed else "}")


def update_weights(url: str) -> None:
    """The weights that are served, once more."""
    model = HTTP.get(f"{url}/model_info", timeout=60.0).raise_for_status().json()["model_path"]
    body = {"model_path": model}
    HTTP.post(f"{url}/update_weights_from_disk", json=body, timeout=60.0).raise_for_status()


CALLS: dict[str, Callable[[str], object]] = {
    "guards.session.around_create_req": takes_turn,
    "guards.memory.around_release": release_and_resume,
    "guards.memory.around_resume": release_and_resume,
    "guards.memory.before_flush_cache": lambda url: HTTP.post(
        f"{url}/flush_cache?timeout=30", timeout=60.0
    ).raise_for_status(),
    "guards.memory.before_weights_count": update_weights,
    "http.endpoint.on_get_internal_state": lambda url: HTTP.get(f"{url}/server_info", timeout=60.0).raise_for_status(),
    "reports.idle.after_idle_metrics": ask,
    "events.load.before_run_batch": ask,
    "plugin.backend.clean_logits": ask,
    "http.details.on_get_cached_tokens_details": ask,
    "http.hints.around_wait_one_response": ask,
    "http.hints.on_build_metadata": chat,
    "http.streams.around_stream": chat,
}
"""What meets each hook that is beside the cache; those of the last three are in the process that answers HTTP."""
AT_THE_START = {"launch.sizing.after_calculate_mamba_ratio"}


def test_every_hook_that_fails_open_raises_on_a_server_of_some_kind() -> None:
    """But those around CUDA kernels, and what raises before anything is served (`test_faults.py`)."""
    open_ones = {each.hook for group in upstream.GROUPS for each in group.hooks if group.passes_over(each)}
    met = {fault for faults in PLANTED.values() for fault, _ in faults}
    # No server of ours drafts by DSPARK or DFLASH, or runs a model with side states.
    elsewhere = {*named(upstream.KERNELS, upstream.CHAINS, upstream.SIDE_STATES), *OF_OTHER_CONVOLUTIONS}
    assert open_ones - elsewhere - AT_THE_START == (met | set(CALLS)) & open_ones


@pytest.mark.slow
def test_a_hook_beside_the_cache_that_raises_fails_no_call_and_changes_no_answer(
    models: dict[str, Path], preload: EntryPoint, references: Callable[[str], Reference], tmp_path: Path
) -> None:
    """Each of them before and after its work, and told in the log."""
    launch = STANDARD["gdn", EXTRA_BUFFER]
    launch = replace(launch, args=(*launch.args, "--marconi-events", f"tcp://127.0.0.1:{free_ports(2)}"))
    reference, wrong = references("gdn"), []
    with serving(launch, models, preload, tmp_path) as (server, file):
        assert reference.divergences(ask(server.url)) == []
        for hook, call in CALLS.items():
            for when in BOTH:
                file.write_text(f"{hook} {when} all")
                call(server.url)
                file.write_text("")
                wrong += [f"{hook} raises {when}: {each}" for each in reference.divergences(ask(server.url))]
        log = server.log_path.read_text(errors="replace")
    wrong += [f"{hook}: not told" for hook in CALLS if f"marconi: {hook} failed, and SGLang continues" not in log]
    assert wrong == []


@pytest.mark.slow
def test_control_a_hook_whose_error_is_not_caught_ends_the_server(
    models: dict[str, Path], preload: EntryPoint, tmp_path: Path
) -> None:
    with serving(STANDARD["gdn", EXTRA_BUFFER], models, preload, tmp_path, MARCONI_TEST_CONTROL="unguarded") as (
        server,
        file,
    ):
        file.write_text("prefill.hooks.on_init_new before all")
        with pytest.raises(httpx.HTTPError):
            one(server.url, TRUNK)


@pytest.mark.slow
def test_control_states_that_nobody_wrote_are_seen_in_the_answers(
    models: dict[str, Path], preload: EntryPoint, references: Callable[[str], Reference], tmp_path: Path
) -> None:
    reference = references("gdn")
    with serving(STANDARD["gdn", EXTRA_BUFFER], models, preload, tmp_path, MARCONI_TEST_CONTROL="trusting") as (
        server,
        file,
    ):
        file.write_text("gated_delta_rule.checkpoint before all")
        asked = [*ask(server.url), *ask(server.url)]
        require_broken(server.log_path)
        assert reference.divergences(asked)


@pytest.mark.slow
@pytest.mark.parametrize("memory", [HOST, ("--enable-unified-memory",)], ids=["host", "one-pool"])
def test_control_slots_of_states_that_nobody_wrote_would_end_the_server(
    memory: tuple[str, ...], models: dict[str, Path], preload: EntryPoint, tmp_path: Path
) -> None:
    """What holds that nothing is lost is SGLang's own count of slots and the tree's, whenever a server is idle."""
    launch = Launch("leaking", "gdn", (*MARCONI, *TIGHT, *memory))
    with serving(launch, models, preload, tmp_path, MARCONI_TEST_CONTROL="leaking") as (server, file):
        fill(server.url)
        file.write_text("gated_delta_rule.checkpoint before all")
        with pytest.raises(httpx.HTTPError):
            # It ends as soon as it is idle: between two of these.
            go_on(server.url)
        assert "leak" in server.log_path.read_text(errors="replace")
