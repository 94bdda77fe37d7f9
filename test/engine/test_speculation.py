"""A model that decodes speculatively answers as it does without, and leaves the state at the end of every answer.

Every answer is compared with that of the same model without speculation and without a prefix cache. Where scheduling
overlaps, a step has moved on before the result of the one before it is looked at, as on a device.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from marconi.engine.cache import speculation
from marconi.engine.cache.scheduler import end_state
from marconi.engine.cache.speculation import EndStateSource, LastStops, VerifyStep, around_commit
from marconi.engine.faults import OF_PROCESS, Faults
from marconi.engine.faults import around as failing_open
from marconi_cpu.demo.server_process import ServerProcess

from .breaking import num_broken
from .client import HTTP, VOCABULARY, generate, generate_together, random_tokens
from .conftest import MTP, NEGATIVE_CONTROL, EntryPoint, Launch, server_args
from .matrix import DATA_PARALLEL, MATRIX, NEXTN, NGRAM, NONE, OVERLAP
from .reference import Reference
from .scenarios import EXTRA_BUFFER, NO_BUFFER, Exchange

NUM_DRAFT_TOKENS = 6
"""The most that a step takes."""
LENGTHS = (*range(1, NUM_DRAFT_TOKENS + 2), 17, 32)
"""Of answers: all within a step and one beyond, and some of several steps."""
OVERLAPPING_SERVER = (str(Path(__file__).with_name("overlapping_server.py")),)
BROKEN_DRAFTS_SERVER = (str(Path(__file__).with_name("broken_drafts_server.py")),)
RETRACTING_SERVER = (str(Path(__file__).with_name("retracting_server.py")),)
OVERLAPPED = "overlapped"


def launched(family: str, algorithm: str, schedule: str) -> Launch:
    """A server that drafts."""
    drafts = {"NGRAM": NGRAM, "NEXTN": NEXTN}[algorithm]
    strategy = NO_BUFFER if schedule == NO_BUFFER else EXTRA_BUFFER
    made = Launch("-".join((family, algorithm, schedule)), family + MTP, (*server_args(strategy), *drafts), strategy)
    return replace(made, entry_point=OVERLAPPING_SERVER) if schedule == OVERLAPPED else made


FAST = launched("gdn", "NEXTN", OVERLAPPED)
LAUNCHES = (
    pytest.param(FAST, marks=pytest.mark.slow),
    *(
        pytest.param(each, marks=pytest.mark.slow)
        for each in MATRIX
        if each.choice and each.choice.drafts != NONE and each.choice.keeps_ends
    ),
)


def is_asked(launch: Launch, name: str, scenario: None) -> bool:
    """Ranks with a cache each take part in every step of the others: what is slow there is asked once."""
    return launch.choice is None or launch.choice.ranks != DATA_PARALLEL or "any_length" in name


def chats_of_many_lengths(url: str) -> list[Exchange]:
    """Answers of up to 32 tokens, long enough for n-grams to recur, and a second turn of each; the turns alternate."""
    exchanges = []
    for length in LENGTHS:
        # Of two ranks with a cache each, all go to one, which counts drafts now and then.
        prompt = [VOCABULARY.start + 2 * length, *random_tokens(20_000 + length, 29 + length)]
        answer = generate(url, prompt, max_new_tokens=length)
        second = [*prompt, *answer.token_ids, *random_tokens(21_000 + length, 7)]
        exchanges += [
            Exchange(tuple(prompt), answer),
            Exchange(tuple(second), generate(url, second, max_new_tokens=3)),
        ]
    return exchanges


def lost_between(exchanges: Sequence[Exchange]) -> list[int]:
    """Of each chat of two turns, the tokens of the first that the second computes again."""
    return [
        len(first.prompt) + len(first.completion.token_ids) - second.completion.num_cached_tokens
        for first, second in zip(exchanges[::2], exchanges[1::2], strict=True)
    ]


def test_an_answer_of_any_length_is_gone_on_from_where_it_ended(
    launch: Launch, server: ServerProcess, references: Callable[[str], Reference]
) -> None:
    # What others left is worth as much to a small pool.
    HTTP.post(f"{server.url}/flush_cache?timeout=30", timeout=60.0).raise_for_status()
    exchanges = chats_of_many_lengths(server.url)
    assert references(launch.family).divergences(exchanges) == []
    lost = lost_between(exchanges)
    # What was said last is not computed, unless a draft had it right. An overlapped step has begun from a prompt's end.
    assert max(lost[1:]) <= 1
    assert lost[0] <= 2
    # Of ranks that answer in any order, a rank that was asked nothing says nothing of drafts.
    ranks = HTTP.get(f"{server.url}/server_info", timeout=60.0).json()["internal_states"]
    accepted = max(rank.get("avg_spec_accept_length", 0.0) for rank in ranks)
    assert accepted > 1, "no draft was accepted, so nothing was tested"


@pytest.mark.slow
def test_requests_at_once_answer_as_alone(
    launch: Launch, server: ServerProcess, references: Callable[[str], Reference]
) -> None:
    """Prefills in chunks beside steps over drafts, and more requests than run together."""
    prompts = [random_tokens(22_000 + index, 40 + 45 * (index % 9)) for index in range(18)]
    answers = generate_together(server.url, prompts, max_new_tokens=24)
    exchanges = [Exchange(tuple(prompt), answer) for prompt, answer in zip(prompts, answers, strict=True)]
    assert references(launch.family).divergences(exchanges) == []


def stopped(url: str, prompt: Sequence[int], **sampling: object) -> tuple[int, ...]:
    """The tokens of a greedy answer that ends by `sampling`."""
    body = {"input_ids": list(prompt), "sampling_params": {"temperature": 0, "max_new_tokens": 200, **sampling}}
    response = HTTP.post(f"{url}/generate", json=body, timeout=300.0)
    response.raise_for_status()
    return tuple(response.json()["output_ids"])


def lost_after_a_stop(url: str, reference: Reference, seed: int, stop: Callable[[int], dict[str, object]]) -> list[int]:
    """Tokens of each of 9 chats that a second turn computes anew, which end by `stop` ever later."""
    HTTP.post(f"{url}/flush_cache?timeout=30", timeout=60.0).raise_for_status()
    lost, exchanges = [], []
    prompts = [random_tokens(seed + index, 35 + index) for index in range(9)]
    wholes = reference.answers([(tuple(prompt), 30) for prompt in prompts])
    for index, (prompt, completion) in enumerate(zip(prompts, wholes, strict=True)):
        whole = completion.token_ids
        # The first time that the answer says it.
        token = next(each for each in whole[3 + 2 * index :] if whole.index(each) >= 3 + 2 * index)
        expected = whole[: whole.index(token) + 1]
        answer = stopped(url, prompt, **stop(token))
        assert answer == expected
        second = [*prompt, *answer, *random_tokens(seed + 500 + index, 9)]
        found = generate(url, second, max_new_tokens=3)
        exchanges.append(Exchange(tuple(second), found))
        lost.append(len(prompt) + len(answer) - found.num_cached_tokens)
    assert reference.divergences(exchanges) == []
    return lost


@pytest.mark.slow
def test_an_answer_that_stops_at_a_token_is_gone_on_from_there(
    launch: Launch, server: ServerProcess, references: Callable[[str], Reference]
) -> None:
    reference = references(launch.family)
    lost = lost_after_a_stop(server.url, reference, 23_000, lambda token: {"stop_token_ids": [token]})
    assert max(lost) <= 1
    assert not min(lost), "no stop was accepted as a draft, so the state at its end is that of the whole run"


@pytest.mark.slow
def test_an_answer_that_stops_at_a_string_is_gone_on_from_at_most_a_step_before(
    launch: Launch, server: ServerProcess, references: Callable[[str], Reference], tokenizer_of: Callable[[int], str]
) -> None:
    """Where scheduling overlaps, some are gone on from before their end, and counted; so it does overlap there."""
    is_overlapped = launch is FAST or (launch.choice is not None and launch.choice.schedule == OVERLAP)
    before = num_ends_not_kept(server.url)
    reference = references(launch.family)
    lost = lost_after_a_stop(server.url, reference, 24_000, lambda token: {"stop": [tokenizer_of(token)]})
    assert max(lost) <= (NUM_DRAFT_TOKENS if is_overlapped else 1)
    assert (num_ends_not_kept(server.url) > before) == is_overlapped


def num_ends_not_kept(url: str) -> int:
    """What the server counts."""
    rank = HTTP.get(f"{url}/marconi", timeout=60.0).json()["ranks"][-1]
    return int(rank["num_ends_not_kept"])


def test_any_integer_may_be_a_stop_token(launch: Launch, server: ServerProcess) -> None:
    """No tensor holds the last of them, and none ends an answer."""
    answer = stopped(server.url, random_tokens(24_900, 60), stop_token_ids=[-1, 10**6, 2**64 - 1], max_new_tokens=30)
    assert len(answer) == 30


@pytest.fixture(scope="module")
def tokenizer_of(models: dict[str, Path]) -> Callable[[int], str]:
    """The text of a token."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(models["gdn"] / "tokenizer.json"))
    return lambda token: str(tokenizer.decode([token]))


@pytest.mark.slow
def test_sampled_answers_are_served(launch: Launch, server: ServerProcess) -> None:
    """Of the length that was asked for, and greedy where only the likeliest may come."""
    prompt = random_tokens(25_000, 90)
    free = {"temperature": 1.0, "top_p": 0.9, "top_k": 20, "sampling_seed": 3, "max_new_tokens": 30, "ignore_eos": True}
    assert len(stopped(server.url, prompt, **free)) == 30
    greedy = generate(server.url, prompt, max_new_tokens=30)
    narrow = {**free, "top_k": 1}
    assert stopped(server.url, prompt, **narrow) == greedy.token_ids


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["NGRAM", "NEXTN"])
def test_requests_that_are_retracted_answer_as_if_they_had_not_been(
    algorithm: str, preload: EntryPoint, models: dict[str, Path], references: Callable[[str], Reference], tmp_path: Path
) -> None:
    """Five at once, some given up every 25 steps, in the middle of what was drafted."""
    launch = launched("gdn", algorithm, NO_BUFFER)
    launch = replace(launch, args=(*launch.args, "--max-total-tokens", "1100", "--schedule-conservativeness", "0.1"))
    prompts = [random_tokens(26_000 + index, 150 + index) for index in range(5)]
    with launch.process(models, tmp_path / "log", entry_point=preload(RETRACTING_SERVER)) as server:
        answers = generate_together(server.url, prompts, max_new_tokens=100)
        log = server.log_path.read_text(errors="replace")
        again = [
            generate(server.url, [*p, *a.token_ids], max_new_tokens=3) for p, a in zip(prompts, answers, strict=True)
        ]
    assert re.search(r"#retracted_reqs: [1-9]", log), "nothing was retracted"
    exchanges = [Exchange(tuple(prompt), answer) for prompt, answer in zip(prompts, answers, strict=True)]
    exchanges += [
        Exchange((*prompt, *answer.token_ids), more)
        for prompt, answer, more in zip(prompts, answers, again, strict=True)
    ]
    assert references(launch.family).divergences(exchanges) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "memory", "faults"),
    [
        (OVERLAPPED, (), ("too-far", "rejected")),
        (NO_BUFFER, (), ("too-far", "rejected")),
        (OVERLAPPED, (), ("late",)),
        (OVERLAPPED, ("--enable-unified-memory",), ("too-far",)),
    ],
    ids=["overlapped", "in-turn", "late", "one-pool"],
)
def test_negative_control_a_state_of_another_draft_is_seen(
    schedule: str,
    memory: tuple[str, ...],
    faults: tuple[str, ...],
    preload: EntryPoint,
    models: dict[str, Path],
    references: Callable[[str], Reference],
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    launch, file, blind = launched("gdn", "NEXTN", schedule), tmp_path / "fault", []
    file.write_text(faults[0])
    env = (("MARCONI_TEST_FAULT_FILE", str(file)), *((("OVERLAP", "1"),) if schedule == OVERLAPPED else ()))
    broken = replace(launch, args=(*launch.args, *memory), env=env)
    with broken.process(models, tmp_path / "log", entry_point=preload(BROKEN_DRAFTS_SERVER)) as server:
        before = 0
        for fault in faults:
            file.write_text(fault)
            HTTP.post(f"{server.url}/flush_cache?timeout=30", timeout=60.0).raise_for_status()
            exchanges = chats_of_many_lengths(server.url)
            num = num_broken(server.log_path) - before
            before += num
            assert num, f"{fault}: the negative control broke nothing, so its answers say nothing"
            found = references(launch.family).divergences(exchanges)
            said = f"{len(found)} of {len(exchanges)} answers RED of {num} broken states; first, {found[:1]}"
            record_property(NEGATIVE_CONTROL, f"{launch.name}, {fault}: {said}")
            blind += [] if found else [fault]
    assert blind == [], "a server that leaves the state of another draft answered rightly: these tests cannot see one"


@pytest.mark.parametrize(
    ("algorithm", "is_overlapped", "page_tokens", "num_tracking_slots", "expected"),
    [
        (None, True, 1, 2, EndStateSource.WORKING),
        (None, True, 64, 2, EndStateSource.TRACKED),
        ("EAGLE", False, 1, 0, EndStateSource.STEP),
        ("EAGLE", False, 1, 2, EndStateSource.STEP),
        ("EAGLE3", True, 1, 2, EndStateSource.LEFT),
        ("EAGLE", True, 1, 1, EndStateSource.TRACKED),
        ("EAGLE", False, 64, 2, EndStateSource.TRACKED),
        ("DSPARK", True, 1, 2, EndStateSource.LEFT),
        ("DSPARK", True, 64, 2, EndStateSource.TRACKED),
        ("DFLASH", False, 1, 0, EndStateSource.STEP),
    ],
)
def test_the_state_at_an_end_is_taken_from_where_nothing_has_written_over_it(
    algorithm: str | None, is_overlapped: bool, page_tokens: int, num_tracking_slots: int, expected: EndStateSource
) -> None:
    arguments = SimpleNamespace(
        speculative_algorithm=algorithm,
        disable_overlap_schedule=not is_overlapped,
        disaggregation_mode="null",
        enable_linear_replayssm_spec=False,
    )
    assert EndStateSource.of(arguments, page_tokens, num_tracking_slots) is expected
    arguments.disaggregation_mode = "prefill"
    of_a_prompt = EndStateSource.WORKING if page_tokens == 1 else EndStateSource.PLANNED
    assert EndStateSource.of(arguments, page_tokens, num_tracking_slots) is of_a_prompt


def test_a_state_is_found_by_how_many_tokens_it_stands_after() -> None:
    step = VerifyStep(torch.tensor([7, 3]), torch.tensor([[0, 2, 3], [4, 7, -1]]), torch.tensor([3, 2]), 4)
    assert [step.node_at(0, depth) for depth in (7, 8, 9, 10, 11)] == [None, 0, 2, 3, None]
    assert [step.node_at(1, depth) for depth in (3, 4, 5, 6)] == [None, 0, 3, None]


def request(next_track_index: int | None = 0, stop: int = 9, stop_strings: tuple[str, ...] = ()) -> SimpleNamespace:
    """One of five tokens that may say 90 more."""
    return SimpleNamespace(
        kv=SimpleNamespace(mamba_next_track_idx=next_track_index),
        sampling_params=SimpleNamespace(
            ignore_eos=False, stop_token_ids=[stop], max_new_tokens=90, stop_strs=stop_strings, stop_regex_strs=()
        ),
        eos_token_ids=None,
        tokenizer=None,
        vocab_size=100,
        origin_input_ids=[1] * 5,
        grammar=None,
    )


@dataclass(slots=True, eq=False)
class Steps:
    """Verify steps of a batch whose requests have slots 10 and 11, 20 and 21 and so on."""

    reqs: list[SimpleNamespace]
    waits_for_grammars: bool = False
    copies: list[tuple[int, int, int]] = field(default_factory=list)
    """Row, node and slot of each state that was copied."""

    def run(self, said: list[list[int]]) -> VerifyStep:
        """One in which every request of six tokens accepts what it says, after nodes 0, 2 and 3 of its four."""
        scheduled, accept_lens, prepared, committed = self.commit(around_commit, said)
        ((last, nodes),) = committed
        assert last is prepared[0]
        assert (nodes is prepared[1]) is (scheduled.mamba_track_indices is not None) is self.waits_for_grammars
        step: VerifyStep = vars(accept_lens)["marconi_verify_step"]
        # SGLang goes on with its own.
        scheduled.seq_lens.zero_()
        accept_lens.zero_()
        return step

    def commit(self, around: Callable[..., None], said: list[list[int]]) -> tuple[Any, torch.Tensor, Any, list[Any]]:
        """Such a step's batch, what it accepted, the nodes that were prepared for it, and those that it ran with."""
        batch, num_nodes = len(self.reqs), 4
        tokens_out, accepted = torch.zeros(batch, num_nodes, dtype=torch.int32), torch.tensor([[0, 2, 3]] * batch)
        for row, tokens in enumerate(said):
            tokens_out[row, accepted[row, : len(tokens)]] = torch.tensor(tokens, dtype=torch.int32)
        accepted += num_nodes * torch.arange(batch)[:, None]
        scheduled = SimpleNamespace(
            tree_cache=SimpleNamespace(cuts_prefills=True, end_source=EndStateSource.LEFT, stops=LastStops()),
            reqs=self.reqs,
            req_pool_indices=torch.arange(batch).flip(0),
            seq_lens=torch.full((batch,), 6),
            req_to_token_pool=SimpleNamespace(
                req_index_to_mamba_ping_pong_track_buffer_mapping=10 * torch.arange(batch, 0, -1)[:, None]
                + torch.arange(2),
            ),
            forward_mode=SimpleNamespace(is_idle=lambda: False),
            grammar_needs_sync=lambda: self.waits_for_grammars,
            mamba_track_indices=torch.zeros(batch),
        )
        accept_lens = torch.tensor([len(tokens) for tokens in said], dtype=torch.int32)
        speculation.after_sample((tokens_out.flatten(),), None, scheduled)
        prepared: tuple[torch.Tensor, torch.Tensor] = (torch.zeros(batch), torch.zeros(batch))
        committed: list[Any] = []

        def commit(*_: object, prepared_step_indices: Any) -> None:
            committed.append(prepared_step_indices)
            slots, nodes = scheduled.mamba_track_indices, prepared_step_indices[1]
            found = zip(range(batch), nodes.tolist(), slots.tolist(), strict=True)
            self.copies = [] if nodes is prepared[1] else [each for each in found if each[1] >= 0]

        around(
            commit,
            None,
            scheduled,
            accept_lens,
            accepted.int(),
            num_nodes,
            prepared_step_indices=prepared,
        )
        return scheduled, accept_lens, prepared, committed


def test_a_step_leaves_states_at_ends_in_tracking_slots_in_turns() -> None:
    """Of one that stops at its second token, one that goes on, and one that may end by what only the host knows."""
    steps = Steps([request(), request(), request(stop_strings=("end",))])
    for turn in (0, 1, 0):
        step = steps.run([[8, 9, 8], [8, 8, 8], [8, 8]])
        assert steps.copies == [(0, 3, 10 + turn), (2, 0, 30 + turn)]
        assert step.left is not None
        assert step.left.tolist() == [9, -1, 7]
        assert step.tracking == [turn] * 3


def test_a_request_whose_slots_are_another_s_by_now_leaves_nothing() -> None:
    steps = Steps([request(None), request()])
    step = steps.run([[9], [9]])
    assert steps.copies == [(1, 0, 20)]
    assert step.left is not None
    assert step.left.tolist() == [-1, 7]


def test_a_step_whose_result_is_looked_at_first_copies_what_it_accepted() -> None:
    """Grammars: nothing has been left, and SGLang has written to its own meanwhile."""
    steps = Steps([request(), request()], waits_for_grammars=True)
    step = steps.run([[9, 8, 8], [8]])
    assert step.left is None
    assert not steps.copies
    assert [step.node_at(0, depth) for depth in (6, 7, 8, 9, 10)] == [None, 0, 2, 3, None]
    assert [step.node_at(1, depth) for depth in (7, 8)] == [0, None]


@pytest.mark.parametrize("part", ["_take_turn", "tensor_on"])
def test_where_leaving_states_raises_sglang_commits_and_tracks_as_it_has_prepared(
    part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its commit takes nodes to track and tracking slots together or neither, and of no step is anything kept."""

    def fault(*_: object) -> None:
        raise KeyError("planted")

    monkeypatch.setattr(speculation, part, fault)
    token = OF_PROCESS.set(Faults())
    try:
        steps = Steps([request(), request()])
        around = failing_open("cache.speculation.around_commit", around_commit)
        scheduled, accept_lens, prepared, committed = steps.commit(around, [[9], [8]])
        assert OF_PROCESS.get().first == "cache.speculation.around_commit raised KeyError"
    finally:
        OF_PROCESS.reset(token)
    assert [id(each) for each in committed] == [id(prepared)]
    assert scheduled.mamba_track_indices is not None
    assert not hasattr(scheduled, "mamba_track_buffer_indices")
    assert "marconi_verify_step" not in vars(accept_lens)


@pytest.mark.parametrize("is_past_the_end", [False, True])
def test_a_request_whose_step_a_hook_has_lost_ends_like_that_of_other_ranks(is_past_the_end: bool) -> None:
    """They may know the step, and wait for this rank to agree on what is kept: of a run past the end, nothing."""
    processor = SimpleNamespace(
        tree_cache=SimpleNamespace(cuts_prefills=True, end_source=EndStateSource.STEP),
    )
    req = SimpleNamespace(kv=SimpleNamespace(kv_committed_len=40, mamba_pool_idx=torch.tensor(3)))
    can_cache = speculation.around_can_cache(lambda *_: not is_past_the_end, processor, req, SimpleNamespace(), 0)
    assert can_cache
    end = end_state(req, 40, EndStateSource.STEP, None, None)
    assert (end is None) is is_past_the_end
