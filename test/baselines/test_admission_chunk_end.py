"""Where SGLang 0.5.23 keeps states: what a client of a server was seen to get, and the positions by hand."""

from collections.abc import Sequence

import numpy as np
import pytest

from marconi.policy.admission.base import Admission
from marconi.policy.base import Costs
from marconi.policy.request import Request, pack
from marconi.replay.admission.chunk_end import ExtraBuffer, NoBuffer
from marconi.tree import RadixTree, check_invariants
from marconi_lab.eviction.joint_lru import JointLru
from rig.budget_cache import BudgetCache, JointBudget


class Client:
    """Sends prompts of made-up tokens to a cache without a limit, and notes how much of each was cached."""

    def __init__(self, admission: Admission) -> None:
        costs = Costs(kv_bytes_per_token=1, state_bytes=1, flops=float)
        self.cache = BudgetCache(RadixTree(), admission, JointLru(), costs, JointBudget(1 << 40))
        self._rng = np.random.default_rng(1)
        self._num_sent = 0

    def tokens(self, count: int) -> list[int]:
        tokens: list[int] = self._rng.integers(1 << 32, size=count).tolist()
        return tokens

    def send(self, prompt: Sequence[int], output: Sequence[int] = ()) -> int:
        answer = list(output) or self.tokens(2)
        path = [*prompt, *answer]
        self._num_sent += 1
        request = Request(pack(path), len(prompt), len(answer), len(path), float(self._num_sent))
        num_cached = self.cache.serve(request)
        check_invariants(self.cache.tree)
        return num_cached

    def depths(self) -> list[int]:
        return sorted(node.depth for node in self.cache.tree.nodes() if node.has_state)


# What a client of SGLang 0.5.23 saw with each strategy.
SEEN = pytest.mark.parametrize(
    ("admission", "repeat", "extension", "branches", "conversation", "short_branches"),
    [
        (ExtraBuffer(), 640, 640, [0, 384, 384], 256, [0, 192]),
        (NoBuffer(), 0, 700, [0, 0, 0], 449, [0, 0]),
    ],
    ids=["extra_buffer", "no_buffer"],
)


@SEEN
def test_a_client_sees_what_it_saw_of_sglang(
    admission: Admission,
    repeat: int,
    extension: int,
    branches: list[int],
    conversation: int,
    short_branches: list[int],
) -> None:
    client = Client(admission)
    prompt = client.tokens(700)
    assert client.send(prompt) == 0
    assert client.send(prompt) == repeat

    client = Client(admission)
    client.send(prompt)
    assert client.send([*prompt, *client.tokens(100)]) == extension

    client = Client(admission)
    client.send(prompt)
    assert [client.send([*prompt[:400], *client.tokens(100)]) for _ in branches] == branches

    client = Client(admission)
    question, answer = client.tokens(150), client.tokens(300)
    client.send(question, answer)
    assert client.send([*question, *answer, *client.tokens(30)]) == conversation

    client = Client(admission)
    document = client.tokens(300)
    client.send(document)
    assert [client.send([*document[:192], *client.tokens(64)]) for _ in short_branches] == short_branches


PREFIXES = (100, 150, 190, 210, 300, 395, 410, 500, 600, 700, 800, 830, 900, 970, 990)


@pytest.mark.parametrize(
    ("admission", "repeats", "forks", "prefixes"),
    [
        (
            ExtraBuffer(),
            [0, 640, 640, 640],
            [0, 384, 384],
            [0, 64, 128, 128, 192, 256, 384, 384, 448, 576, 640, 768, 768, 960, 960],
        ),
        (
            ExtraBuffer(chunk_tokens=256),
            [0, 640, 640, 640],
            [256, 384, 384],
            [0, 64, 128, 128, 256, 256, 384, 384, 512, 576, 768, 768, 768, 960, 960],
        ),
        (
            ExtraBuffer(chunk_tokens=200),
            [0, 664, 664, 664],
            [392, 392, 392],
            [0, 64, 128, 192, 192, 392, 392, 392, 592, 592, 792, 792, 792, 856, 920],
        ),
        (NoBuffer(), [0, 0, 0, 700], [0, 0, 0], [0] * 15),
    ],
    ids=["extra_buffer", "extra_buffer, chunks of 256", "extra_buffer, chunks of 200", "no_buffer"],
)
def test_a_server_of_any_chunk_size_was_seen_to_answer_so(
    admission: Admission, repeats: list[int], forks: list[int], prefixes: list[int]
) -> None:
    """`cached_tokens` of SGLang 0.5.23 with a small model of the gated delta rule, in this order of prompts."""
    client = Client(admission)
    prompt = client.tokens(700)
    one = client.tokens(1)
    assert [client.send(prompt, one), client.send(prompt, one), client.send(prompt)] == repeats[:3]
    assert client.send([*prompt, *client.tokens(100)]) == repeats[3]
    assert [client.send([*prompt[:400], *client.tokens(100)]) for _ in forks] == forks
    text = client.tokens(1000)
    client.send(text)
    assert [client.send([*text[:length], *client.tokens(1)], one) for length in PREFIXES] == prefixes


def test_each_chunk_keeps_one_state_counted_from_its_own_start() -> None:
    client = Client(ExtraBuffer(chunk_tokens=200))
    client.send(client.tokens(500))
    assert client.depths() == [192, 392, 464]


def test_the_branch_point_displaces_the_end_of_its_own_chunk_only() -> None:
    client = Client(ExtraBuffer(chunk_tokens=256))
    prompt = client.tokens(700)
    client.send(prompt)
    assert client.depths() == [256, 512, 640]
    client.send([*prompt[:400], *client.tokens(500)])
    # The hit is 256; the chunk to 512 keeps 384 in place of 512, those to 768 and 900 their ends.
    assert client.depths() == [256, 384, 512, 640, 768, 896]


def test_a_chunk_shorter_than_the_grid_keeps_nothing() -> None:
    client = Client(ExtraBuffer())
    prompt = client.tokens(640)
    client.send(prompt)
    client.send([*prompt, *client.tokens(63)])
    assert client.depths() == [640]


def test_a_branch_point_in_a_chunk_shorter_than_the_grid_is_not_kept() -> None:
    client = Client(ExtraBuffer(chunk_tokens=100))
    prompt = client.tokens(300)
    client.send(prompt)
    assert client.depths() == [64, 164, 264]
    # Held up to 264, so the branch point of the next is 192; its chunks are 164 to 264 and on: off the grid there.
    client.send([*prompt[:250], *client.tokens(50)])
    assert client.depths() == [64, 164, 228, 264]


def test_of_the_states_of_decoding_the_last_one_stays() -> None:
    client = Client(ExtraBuffer())
    client.send(client.tokens(100), client.tokens(1000))
    assert client.depths() == [64, 1024]


def test_a_boundary_at_the_last_sampled_token_is_not_reached() -> None:
    client = Client(ExtraBuffer())
    client.send(client.tokens(100), client.tokens(156))
    assert client.depths() == [64]
    client.send(client.tokens(100), client.tokens(157))
    assert client.depths() == [64, 64, 256]


def test_a_boundary_at_the_end_of_the_prompt_is_the_prefills() -> None:
    client = Client(ExtraBuffer())
    client.send(client.tokens(256), client.tokens(2))
    assert client.depths() == [256]


def test_decoding_keeps_multiples_of_interval_and_grid() -> None:
    client = Client(ExtraBuffer(grid_tokens=96, interval_tokens=64))
    client.send(client.tokens(100), client.tokens(200))
    assert client.depths() == [96, 192]


def test_held_kv_beyond_the_prompt_moves_no_branch_point_past_it() -> None:
    client = Client(ExtraBuffer())
    prompt = client.tokens(700)
    client.send(prompt)
    assert client.send(prompt[:300]) == 0
    assert client.depths() == [256, 640]


def test_no_buffer_keeps_the_end_of_each_chunk_and_of_the_request() -> None:
    client = Client(NoBuffer(chunk_tokens=300))
    client.send(client.tokens(700), client.tokens(10))
    assert client.depths() == [300, 600, 700, 709]


def test_one_output_token_leaves_no_buffer_the_end_of_the_prompt_alone() -> None:
    client = Client(NoBuffer())
    client.send(client.tokens(700), client.tokens(1))
    assert client.depths() == [700]


@pytest.mark.parametrize("admission", [ExtraBuffer(grid_tokens=512, chunk_tokens=1024), NoBuffer(512, 1024)])
def test_positions_on_a_block_trace_end_at_its_blocks(admission: Admission) -> None:
    request = Request(pack(range(6)), 2900, 300, num_known_tokens=2560, arrival_s=0.0)
    tree = RadixTree(512)
    depths = admission.depths(request, tree.match(request.path, 2899))
    assert list(depths) == [1024, 2048, 2560]
    tree.insert(request.path, depths)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ExtraBuffer(grid_tokens=0), "grid_tokens must be 1 or more, got 0"),
        (lambda: ExtraBuffer(interval_tokens=-1), "interval_tokens must be 1 or more, got -1"),
        (lambda: NoBuffer(chunk_tokens=0), "chunk_tokens must be 1 or more, got 0"),
    ],
)
def test_lengths_below_one_token_are_refused(make: object, message: str) -> None:
    assert callable(make)
    with pytest.raises(ValueError, match=message):
        make()
