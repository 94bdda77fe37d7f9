"""Caches of whole blocks, without a tree: the peers that the published block replays use.

`base.py` is the contract, its siblings are the variants, `server.py` is what a trace's requests hit.
"""

from marconi_lab.block.base import BlockCache
from marconi_lab.block.lfu import LfuBlockCache
from marconi_lab.block.lru import LruBlockCache
from marconi_lab.block.s3fifo import S3FifoBlockCache

VARIANTS: tuple[type[BlockCache], ...] = (LfuBlockCache, LruBlockCache, S3FifoBlockCache)
"""Every block cache, in order of name."""


def make(name: str, capacity_blocks: int) -> BlockCache:
    """An empty block cache by its name on the command line.

    Raises ValueError for an unknown name, with the known ones, and for a capacity below the variant's least.
    """
    for variant in VARIANTS:
        if variant.name == name:
            return variant(capacity_blocks)
    known = ", ".join(variant.name for variant in VARIANTS)
    raise ValueError(f"a block cache must be one of {known}, got {name!r}")
