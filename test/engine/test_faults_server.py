"""Every hook raises in turn on a real server: no request is lost, no answer differs, and planning stops.

A hook that decides what is scheduled raises on all ranks, as it reads what all of them have; one that runs in a forward
raises on one of two.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from marconi.demo.server_process import ServerProcess
from marconi.engine import upstream
from marconi.engine.touch import Group

from .client import generate, random_tokens
from .conftest import CONSENSUS, STANDARD, TWO_RANKS, EntryPoint, Launch
from .reference import Reference
from .scenarios import EXTRA_BUFFER, NO_BUFFER, Exchange, one, together
from .test_speculation import OVERLAPPED, launched

FAULTY_SERVER = (str(Path(__file__).with_name("faulty_server.py")),)
TRUNK = random_tokens(81_000, 500)
BRANCHES = [TRUNK[:400] + random_tokens(81_001 + index, 80 + index) for index in range(4)]
OTHER = random_tokens(81_100, 90)


def named(*groups: Group) -> tuple[str, ...]:
    return tuple(touch.hook for group in groups for touch in group.hooks)


MAMBA2 = "prefill.hooks.around_mamba2_forward"
SCHEDULING = tuple(name for name in named(upstream.QUEUE, upstream.PREFILLS) if name.startswith("scheduler."))
FORWARD = tuple(name for name in named(upstream.PREFILLS) if name not in SCHEDULING)
DRAFTS = named(upstream.DRAFTS)
BESIDE = ("backend.clean_logits", "idle.after_idle_metrics", "scheduler.on_get_cached_tokens_details")
"""They serve no state, and any request meets them."""
AT_THE_END = "speculation.around_can_cache"
"""Of a request: it decides what is kept, by what every rank has."""
LAUNCHES = {
    "gdn": replace(STANDARD["gdn", EXTRA_BUFFER], name="gdn-faulty"),
    "mamba2-no_buffer": replace(STANDARD["mamba2", NO_BUFFER], name="mamba2-faulty"),
    "gdn-drafts-overlapped": replace(launched("gdn", "NEXTN", OVERLAPPED), env=(("MARCONI_TEST_OVERLAPS", "1"),)),
    "mamba2-drafts-no_buffer": launched("mamba2", "NGRAM", NO_BUFFER),
}


def faults_of(name: str) -> list[str]:
    """The hooks and kernels that a launch meets."""
    family = name.partition("-")[0]
    hybrid, linear = ("around_mamba2", "mamba2") if family == "gdn" else ("around_hybrid", "gated_delta_rule")
    met = [*SCHEDULING, *FORWARD, "short_conv.checkpoint", "state_copy.copy"]
    met += ["gated_delta_rule.checkpoint" if family == "gdn" else "mamba2.checkpoint"]
    if "no_buffer" in name:
        met.remove("scheduler.around_track")
        met += BESIDE
    if "drafts" in name:
        met = [*DRAFTS, *met[:1], *met[-3:]]
    return [each for each in met if hybrid not in each and linear not in each]


def ask(url: str) -> list[Exchange]:
    """A prompt twice, others that branch off it, at once and one after the other, and one that continues an answer."""
    # A state at a prefill's end is copied there, others are made inside.
    first = Exchange(tuple(TRUNK), generate(url, TRUNK, checkpoints=(len(TRUNK),)))
    longer = [*first.prompt, *first.completion.token_ids[:10], *OTHER]
    return [first, one(url, TRUNK), *together(url, BRANCHES), one(url, longer), *together(url, [*BRANCHES[:2], longer])]


@contextmanager
def serving(
    launch: Launch, models: dict[str, Path], preload: EntryPoint, tmp_path: Path, **env: str
) -> Iterator[tuple[ServerProcess, Path]]:
    """A server, and the file that says what raises there."""
    file = tmp_path / "fault"
    file.write_text("")
    launch = replace(launch, env=(*launch.env, ("MARCONI_TEST_FAULT_FILE", str(file)), *env.items()))
    with launch.process(models, tmp_path / "log", entry_point=preload(FAULTY_SERVER)) as server:
        yield server, file


def status(server: ServerProcess) -> dict[str, Any]:
    (rank,) = httpx.get(f"{server.url}/marconi", timeout=30.0).json()["ranks"]
    return dict(rank)


def flush(server: ServerProcess) -> None:
    httpx.post(f"{server.url}/flush_cache?timeout=30", timeout=60.0).raise_for_status()


def wrong_with(server: ServerProcess, file: Path, reference: Reference, fault: str, when: str, ranks: str) -> list[str]:
    """What was lost, differs, or was not noticed when a hook raised, and afterwards."""
    flush(server)
    file.write_text(f"{fault} {when} {ranks}")
    found = reference.divergences(ask(server.url))
    there = status(server)
    # What follows meets no fault, and no plan.
    file.write_text("")
    found += reference.divergences(ask(server.url))
    if there["why_not_planned"] is None:
        found.append("planning went on")
    return [f"{fault} raises {when}: {each}" for each in found]


BOTH = ("before", "after")
CASES = {
    ("gdn", 1): (("after",), ("before",)),
    ("gdn", 2): (BOTH,),
    ("mamba2-no_buffer", 1): (BOTH,),
    ("gdn-drafts-overlapped", 1): (BOTH,),
    ("gdn-drafts-overlapped", 2): (("before",),),
    ("mamba2-drafts-no_buffer", 1): (BOTH,),
}
"""When hooks raise, before or after they have worked, a server each: by launch and number of ranks."""
QUICK = ("gdn", 1, ("after",))
"""The harder one: work is done when it raises. `test_faults.py` raises in place of each hook, without a server."""


@pytest.mark.parametrize(
    ("name", "num_ranks", "whens"),
    [
        pytest.param(
            *case,
            whens,
            id="-".join([case[0], str(case[1]), *whens]),
            marks=() if (*case, whens) == QUICK else pytest.mark.slow,
        )
        for case, servers in CASES.items()
        for whens in servers
    ],
)
def test_a_hook_that_raises_loses_no_request_and_changes_no_answer(
    name: str,
    num_ranks: int,
    whens: tuple[str, ...],
    models: dict[str, Path],
    preload: EntryPoint,
    references: Callable[[str], Reference],
    tmp_path: Path,
) -> None:
    launch = LAUNCHES[name]
    if num_ranks == 2:
        launch = replace(launch, args=(*launch.args, *TWO_RANKS), env=(*launch.env, *CONSENSUS))
    reference, wrong = references(launch.family), []
    with serving(launch, models, preload, tmp_path) as (server, file):
        assert reference.divergences(ask(server.url)) == []
        assert status(server)["why_not_planned"] is None
        for fault in faults_of(name):
            alone = num_ranks == 2 and fault not in SCHEDULING and fault != AT_THE_END
            for when in whens:
                wrong += wrong_with(server, file, reference, fault, when, "1" if alone else "all")
    assert wrong == []


@pytest.mark.slow
def test_control_a_hook_whose_error_is_not_caught_ends_the_server(
    models: dict[str, Path], preload: EntryPoint, tmp_path: Path
) -> None:
    with serving(LAUNCHES["gdn"], models, preload, tmp_path, MARCONI_TEST_CONTROL="unguarded") as (server, file):
        file.write_text("prefill.hooks.on_init_new before all")
        with pytest.raises(httpx.HTTPError):
            one(server.url, TRUNK)


@pytest.mark.slow
def test_control_states_that_nobody_wrote_are_seen_in_the_answers(
    models: dict[str, Path], preload: EntryPoint, references: Callable[[str], Reference], tmp_path: Path
) -> None:
    reference = references("gdn")
    with serving(LAUNCHES["gdn"], models, preload, tmp_path, MARCONI_TEST_CONTROL="trusting") as (server, file):
        file.write_text("gated_delta_rule.checkpoint before all")
        assert reference.divergences([*ask(server.url), *ask(server.url)])
