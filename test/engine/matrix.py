"""The launches that most tests of servers share: every pair of what a server may be is in one of them.

A bug that takes two choices is met where all pairs are, and a dozen launches have all pairs of what has some 1,700
combinations (a covering array: Cohen et al., *The AETG System*, 1997). `MATRIX` is written down and not drawn, so that
a server has the same name in every run. `test_matrix.py` holds that it lacks no pair but those of `REFUSED` and of
`BEYOND`, and that `marconi check` refuses the former.

All of them start by `matrix_server.py`: one server is asked for exactness, breaks states while a file says so, for the
negative control, and has hooks that raise. A test of how a server starts or ends has a server of its own.
"""

from itertools import combinations
from typing import Final, NamedTuple

from .conftest import CONSENSUS, MARCONI, MATRIX_SERVER, MTP, REPORTING, TWO_RANKS, Launch
from .scenarios import CHUNKED_PREFILL_SIZE, EXTRA_BUFFER, MAX_KV_TOKENS, NO_BUFFER

NONE, WHOLE, PREFILL = "none", "whole", "prefill"
ONE_POOL, TWO_POOLS, HOST_TIER, ONE_POOL_HOST = "one-pool", "two-pools", "host", "one-pool-host"
OVERLAP, IN_TURN = "overlap", "in-turn"
DATA_PARALLEL = "dp"
LAZY = "extra_buffer_lazy"

NGRAM: Final = ("--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "6")
_NEXTN: Final = ("--speculative-algorithm", "NEXTN", "--speculative-num-steps", "3", "--speculative-eagle-topk")
NEXTN: Final = (*_NEXTN, "1", "--speculative-num-draft-tokens", "4")
TREE: Final = (*_NEXTN, "2", "--speculative-num-draft-tokens", "5")
HOST: Final = ("--enable-hierarchical-cache", "--hicache-ratio", "6")
ONE: Final = ("--enable-unified-memory",)
TIGHT_KV_TOKENS: Final = 1_280
"""Of the device in one pool and above a host tier, where requests are to evict each other's."""
_TIGHT: Final = ("--max-total-tokens", str(TIGHT_KV_TOKENS))
SERVER: Final = MATRIX_SERVER


class Choice(NamedTuple):
    """A server: one value of each factor, by its name in `FLAGS`."""

    family: str
    strategy: str
    drafts: str
    schedule: str
    memory: str
    ranks: str
    page: str
    role: str

    @property
    def name(self) -> str:
        """Such as `gdn-no_buffer-NEXTN-in-turn-one-pool-1-1-whole`."""
        return "-".join(self)

    @property
    def pairs(self) -> frozenset[tuple[str, str]]:
        """What it has together, each `factor=value`."""
        return frozenset(combinations((f"{name}={value}" for name, value in self._asdict().items()), 2))

    def asks_every_second(self, index: int) -> bool:
        """Whether a launch of the matrix has the question with this number: half of them, of each factor's values."""
        return ([each.choice for each in MATRIX].index(self) + index) % 2 == 0

    @property
    def is_prefill(self) -> bool:
        """Whether a prefill server and a decode server answer as one."""
        return self.role == PREFILL

    @property
    def keeps_ends(self) -> bool:
        """Whether the state at the end of any answer is kept, and not the last that SGLang tracked alone."""
        is_tracked = self.drafts != NONE and (self.page != "1" or (self.strategy == LAZY and self.schedule == OVERLAP))
        return not self.is_prefill and not is_tracked

    @property
    def has_host_tier(self) -> bool:
        """Whether the host's memory is below the device's."""
        return self.memory in (HOST_TIER, ONE_POOL_HOST)

    @property
    def prefill_flags(self) -> tuple[str, ...]:
        """Flags of the prefill server alone; what the decode server has no room for waits there without end."""
        return (*HOST, *_TIGHT) if self.is_prefill and self.has_host_tier else ()

    @property
    def flags(self) -> tuple[str, ...]:
        """On the command line of one server, but for the model and the role."""
        chosen = self._asdict()
        return tuple(flag for factor, values in FLAGS.items() for flag in values[chosen[factor]])

    def launch(self) -> Launch:
        """Start it so; the role is its pair's (`disaggregated.py`)."""
        beside = ["overlapping_server.py"] if self.schedule == OVERLAP and self.drafts != NONE else []
        beside += ["late_copies_server.py"] if self.has_host_tier else []
        beside += ["disaggregated_server.py"] if self.role == PREFILL else []
        ranks = CONSENSUS if self.ranks != "1" else ()
        # Ranks with caches of their own share a server's slots and rows.
        num = 2 if self.ranks == DATA_PARALLEL else 1
        is_tight = self.memory != TWO_POOLS and not self.is_prefill
        pools = _TIGHT if is_tight else ("--max-total-tokens", str(MAX_KV_TOKENS))
        # The bytes of more slots would hold all that is to be evicted.
        pools += ("--max-mamba-cache-size", str((20 if self.memory == ONE_POOL_HOST else 48) * num))
        pools += ("--max-running-requests", str(8 * num), "--chunked-prefill-size", str(CHUNKED_PREFILL_SIZE))
        family = self.family if self.drafts == NONE else self.family + MTP
        env = (*ranks, ("MARCONI_TEST_BESIDE", " ".join(beside)))
        flags = [flag for flag in self.flags if not self.is_prefill or flag not in HOST]
        strategy = NO_BUFFER if self.strategy == NO_BUFFER else EXTRA_BUFFER
        return Launch(self.name, family, (*MARCONI, *pools, *flags, *REPORTING), strategy, env, SERVER, self)


FLAGS: Final[dict[str, dict[str, tuple[str, ...]]]] = {
    "family": {"gdn": (), "mamba2": ()},
    "strategy": {name: ("--mamba-radix-cache-strategy", name) for name in (EXTRA_BUFFER, NO_BUFFER, LAZY)},
    "drafts": {NONE: (), "NGRAM": NGRAM, "NEXTN": NEXTN, "TREE": TREE},
    "schedule": {OVERLAP: (), IN_TURN: ("--disable-overlap-schedule",)},
    "memory": {TWO_POOLS: (), ONE_POOL: ONE, HOST_TIER: HOST, ONE_POOL_HOST: (*ONE, *HOST)},
    "ranks": {"1": (), "tp": TWO_RANKS, DATA_PARALLEL: (*TWO_RANKS, "--dp-size", "2", "--enable-dp-attention")},
    "page": {"1": (), "16": ("--page-size", "16")},
    "role": {WHOLE: (), PREFILL: ()},
}
REFUSED: Final = {
    ("strategy=extra_buffer_lazy", "role=prefill"): "extra_buffer_lazy unsupported under PD disaggregation",
    ("strategy=extra_buffer_lazy", "schedule=in-turn"): "must be extra_buffer where scheduling does not overlap",
    ("strategy=no_buffer", "schedule=overlap"): "no_buffer do not support overlap schedule",
    ("strategy=no_buffer", "page=16"): "no_buffer only supports page_size=1",
    ("drafts=NGRAM", "memory=one-pool"): "other speculative algorithms are not yet audited",
    ("drafts=NGRAM", "memory=one-pool-host"): "other speculative algorithms are not yet audited",
    ("drafts=NEXTN", "memory=one-pool-host"): "EAGLE/EAGLE3 does not support --enable-hierarchical-cache",
    ("drafts=TREE", "memory=one-pool-host"): "supports a linear draft chain only",
    ("memory=one-pool-host", "role=prefill"): "no room can be made for what is loaded",
    ("drafts=NGRAM", "ranks=dp"): "ngram speculative decoding does not support dp attention",
    ("drafts=NGRAM", "page=16"): "> 1 with page_size(16) > 1 is unstable",
    ("drafts=TREE", "memory=one-pool"): "supports a linear draft chain only",
    ("drafts=TREE", "page=16"): "> 1 with page_size > 1 is only supported on",
}
"""Pairs that no server has, each with words of its refusal."""
BEYOND: Final = {
    ("family=mamba2", "ranks=dp"): "stock's Nemotron-H ends in a rank that has nothing to do",
    ("drafts=NGRAM", "role=prefill"): "stock's decode server ends at the first request, without a buffer for drafts",
    ("ranks=dp", "role=prefill"): "the tests' front has no rank to send a request to",
}
"""Pairs that are served, and not tested here."""
MATRIX: Final = tuple(
    Choice(*words.split()).launch()
    for words in (
        "gdn    extra_buffer      NGRAM overlap host      1   1  whole",
        "mamba2 no_buffer         TREE  in-turn two-pools 1   1  prefill",
        "gdn    extra_buffer      NEXTN overlap two-pools tp  16 prefill",
        "gdn    no_buffer         NEXTN in-turn one-pool  dp  1  whole",
        "gdn    no_buffer         none  in-turn two-pools 1   1  whole",
        "mamba2 extra_buffer_lazy none  overlap one-pool  1   16 whole",
        "gdn    extra_buffer_lazy TREE  overlap host      tp  1  whole",
        "mamba2 extra_buffer      none  in-turn host      tp  16 prefill",
        "mamba2 extra_buffer_lazy NEXTN overlap host      1   16 whole",
        "mamba2 no_buffer         NGRAM in-turn host      tp  1  whole",
        "gdn    extra_buffer_lazy none  overlap two-pools dp  16 whole",
        "gdn    extra_buffer      TREE  in-turn host      dp  1  whole",
        "mamba2 extra_buffer      none  overlap one-pool  tp  1  prefill",
        "gdn    extra_buffer_lazy NGRAM overlap two-pools 1   1  whole",
        "gdn    extra_buffer      none  in-turn one-pool-host dp 16 whole",
        "mamba2 no_buffer         none  in-turn one-pool-host tp 1  whole",
        "gdn    extra_buffer_lazy none  overlap one-pool-host 1  1  whole",
    )
)
