"""Random command lines of `launch_server`: mostly such as an operator would write, some that make no sense.

A line has a model of the catalogue, by its name on the hub, so that quantised ones are among them; the flags of the
table, each group with its own chance; and now and then a value that no server takes. `{draft}` stands for the folder of
a draft model, and `{port}` for a port that nobody listens on.
"""

import random
from collections.abc import Iterator
from typing import Final, NamedTuple

from marconi.model import catalog


class Launch(NamedTuple):
    """A command line, without `--model-path`."""

    model: str
    flags: tuple[str, ...]


class _Group(NamedTuple):
    """Flags of which a line has one alternative, with this chance."""

    chance: float
    alternatives: tuple[str, ...]


_GROUPS: Final = (
    _Group(0.5, ("--tp-size 1", "--tp-size 2", "--tp-size 2", "--tp-size 4", "--tp-size 8")),
    _Group(0.1, ("--dp-size 2", "--attn-dp-size 2", "--dp-size 2 --attn-dp-size 2", "--enable-dp-attention")),
    _Group(0.05, ("--pp-size 2", "--ep-size 2", "--dcp-size 2", "--attn-cp-size 2")),
    _Group(0.35, ("--page-size 1", "--page-size 16", "--page-size 64", "--page-size 64", "--page-size 128")),
    _Group(
        0.3,
        (
            "--mamba-radix-cache-strategy no_buffer",
            "--mamba-radix-cache-strategy no_buffer --disable-overlap-schedule",
            "--mamba-radix-cache-strategy extra_buffer",
            "--mamba-radix-cache-strategy extra_buffer_lazy",
            "--mamba-radix-cache-strategy auto",
        ),
    ),
    _Group(0.15, ("--disable-overlap-schedule",)),
    _Group(0.25, ("--enable-unified-memory", "--mamba-full-memory-ratio 0.9", "--mamba-full-memory-ratio 2")),
    _Group(
        0.25,
        (
            "--enable-hierarchical-cache",
            "--enable-hierarchical-cache --hicache-ratio 2",
            "--enable-hierarchical-cache --hicache-size 10",
            "--enable-hierarchical-cache --hicache-ratio 0",
            "--enable-hierarchical-cache --hicache-write-policy write_back",
            "--enable-hierarchical-cache --hicache-io-backend direct --hicache-mem-layout page_first_direct",
            "--enable-hierarchical-cache --hicache-mem-layout layer_first",
            "--enable-hierarchical-cache --hicache-storage-backend file",
        ),
    ),
    _Group(
        0.35,
        (
            "--speculative-algorithm NEXTN",
            "--speculative-algorithm NEXTN --speculative-num-steps 3 --speculative-eagle-topk 1 "
            "--speculative-num-draft-tokens 4",
            "--speculative-algorithm EAGLE --speculative-num-steps 3 --speculative-eagle-topk 4 "
            "--speculative-num-draft-tokens 8",
            "--speculative-algorithm EAGLE3 --speculative-draft-model-path {draft}",
            "--speculative-algorithm STANDALONE --speculative-draft-model-path {draft}",
            "--speculative-algorithm STANDALONE",
            "--speculative-algorithm NGRAM",
            "--speculative-algorithm DFLASH --speculative-draft-model-path {draft}",
            "--speculative-algorithm DSPARK",
        ),
    ),
    _Group(
        0.1,
        (
            "--disaggregation-mode prefill",
            "--disaggregation-mode decode",
            "--disaggregation-mode decode --disaggregation-decode-enable-radix-cache",
            "--disaggregation-mode prefill --disaggregation-transfer-backend nixl",
        ),
    ),
    _Group(0.25, ("--chunked-prefill-size 4096", "--chunked-prefill-size -1", "--chunked-prefill-size 1000")),
    _Group(0.1, ("--enable-mixed-chunk",)),
    _Group(0.08, ("--enable-streaming-session", "--enable-session-radix-cache")),
    _Group(0.05, ("--enable-int8-mamba-checkpoint", "--enable-linear-replayssm")),
    _Group(0.15, ("--max-mamba-cache-size 100", "--max-mamba-cache-size 4", "--max-mamba-cache-size 1")),
    _Group(0.15, ("--max-total-tokens 100000", "--max-total-tokens 100", "--max-running-requests 32")),
    _Group(0.15, ("--mem-fraction-static 0.8", "--mem-fraction-static 0.95")),
    _Group(
        0.15,
        (
            "--attention-backend triton",
            "--attention-backend flashinfer",
            "--attention-backend fa3",
            "--attention-backend trtllm_mha",
            "--linear-attn-backend flashinfer",
            "--linear-attn-prefill-backend cutedsl",
        ),
    ),
    _Group(0.15, ("--kv-cache-dtype fp8_e4m3", "--kv-cache-dtype bf16", "--mamba-ssm-dtype bfloat16")),
    _Group(0.05, ("--quantization fp8", "--quantization modelopt_fp4")),
    _Group(0.15, ("--cuda-graph-backend-prefill disabled", "--cuda-graph-backend-prefill breakable")),
    _Group(0.05, ("--disable-radix-cache",)),
    _Group(0.05, ("--enable-lmcache", "--enable-two-batch-overlap", "--enable-pdmux", "--enable-hisparse")),
    _Group(
        0.25,
        (
            "--marconi-admission chunk-end",
            "--marconi-eviction lru",
            "--marconi-eviction tail:0.5",
            "--marconi-eviction marconi:2",
            "--marconi-events tcp://127.0.0.1:{port}",
        ),
    ),
    _Group(
        0.08,
        (
            "--marconi-eviction marconi:-1",
            "--marconi-eviction best-of-all",
            "--marconi-ttft-budget-ms 100",
            "--marconi-eviction tail",
            "--tp-size 3",
            "--page-size 0",
            "--tp-size 2 --attn-dp-size 4",
            "--hicache-ratio -1 --enable-hierarchical-cache",
            "--prefill-decode-interval -3",
            "--schedule-conservativeness -1",
            "--served-model-name a:b",
            "--speculative-algorithm NONSENSE",
            "--chunked-prefill-size 100 --page-size 64",
            "--retraction-policy priority",
        ),
    ),
)


def launches(seed: int, num: int) -> Iterator[Launch]:
    """`num` command lines."""
    rng = random.Random(seed)  # noqa: S311 - command lines, no secrets
    models = sorted(catalog.HUB_NAMES)
    for _ in range(num):
        chosen = [rng.choice(group.alternatives) for group in _GROUPS if rng.random() < group.chance / 2]
        yield Launch(rng.choice(models), tuple(" ".join(chosen).split()))
