"""Made-up workers that know what they hold, prompts, and the definition of a hit."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from random import Random

from marconi.events.base import (
    Batch,
    Cleared,
    Event,
    KvRemoved,
    KvStored,
    Snapshot,
    StateRemoved,
    StateStored,
)
from marconi.router.index import Chain, Hit

BLOCK_TOKENS = 4
NAMESPACES = (b"", b"tenant")


def digest(*parts: object) -> int:
    return int.from_bytes(blake2b(repr(parts).encode(), digest_size=8).digest(), "big")


@dataclass(frozen=True)
class Position:
    """A place of a path at which a block ends, full or not."""

    namespace: bytes
    block_hash: int
    parent_hash: int | None
    depth: int
    num_tokens: int


class Prompts:
    """Paths that share what random paths share: a few long stems, branches off them, and partial blocks at ends."""

    def __init__(self, rng: Random, num_paths: int, runs: tuple[int, ...] = (1, 2, 3, 126, 128, 130)) -> None:
        self.paths: list[tuple[bytes, tuple[int, ...]]] = []
        for number in range(num_paths):
            namespace = rng.choice(NAMESPACES)
            same = [tokens for name, tokens in self.paths if name == namespace]
            base = rng.choice(same) if same and rng.random() < 0.8 else ()
            base = base[: rng.randrange(len(base) + 1)]
            length = rng.choice(runs) * BLOCK_TOKENS + rng.randrange(BLOCK_TOKENS)
            self.paths.append((namespace, base + tuple(digest(number, at) for at in range(length))))

    def positions(self, path: int) -> list[Position]:
        """The full blocks of a path, and the partial one at its end."""
        namespace, tokens = self.paths[path]
        found: list[Position] = []
        parent = None
        for depth in [*range(BLOCK_TOKENS, len(tokens) + 1, BLOCK_TOKENS), len(tokens)]:
            start = (depth - 1) // BLOCK_TOKENS * BLOCK_TOKENS
            if (found and found[-1].depth == depth) or not depth:
                continue
            block_hash = self.hash_of(namespace, parent, tokens[start:depth])
            found.append(Position(namespace, block_hash, parent, depth, depth - start))
            parent = block_hash
        return found

    def chain(self, path: int) -> Chain:
        namespace, tokens = self.paths[path]
        hashes = [position.block_hash for position in self.positions(path) if position.num_tokens == BLOCK_TOKENS]

        def tail(depth: int) -> int | None:
            start = depth - depth % BLOCK_TOKENS
            parent = hashes[start // BLOCK_TOKENS - 1] if start else None
            return self.hash_of(namespace, parent, tokens[start:depth]) if depth <= len(tokens) else None

        return Chain(namespace, hashes, tail)

    @staticmethod
    def hash_of(namespace: bytes, parent: int | None, tokens: tuple[int, ...]) -> int:
        return digest(namespace, parent, tokens)


@dataclass
class Worker:
    """A worker, the truth: it holds what it says."""

    name: str
    epoch: int = 1
    sequence: int = -1
    number: int = -1
    kv: dict[int, Position] = field(default_factory=dict)
    states: dict[int, Position] = field(default_factory=dict)

    def change(self, rng: Random, prompts: Prompts) -> list[Event]:
        """Something happens; returns the events of it."""
        positions = prompts.positions(rng.randrange(len(prompts.paths)))
        roll = rng.random()
        if roll < 0.45:  # a prefix is computed, its state kept
            end = rng.choice([len(positions), rng.randint(1, len(positions))])
            return [*self.store(positions[:end]), *self.keep(positions[end - 1])]
        if roll < 0.55:  # a piece from the middle
            start = rng.randrange(len(positions))
            return list(self.store(positions[start : start + rng.randint(1, 3)]))
        if roll < 0.65:
            return list(self.keep(rng.choice(positions)))
        if roll < 0.8 and self.states:
            return list(self.drop(rng.choice(list(self.states))))
        if roll < 0.98 and self.kv:
            hashes = rng.sample(list(self.kv), min(len(self.kv), rng.choice((1, 1, 2, 50))))
            for block_hash in hashes:
                del self.kv[block_hash]
            return [KvRemoved(tuple(hashes))]
        if roll < 0.98:
            return []
        self.kv, self.states = {}, {}
        return [Cleared()]

    def store(self, positions: list[Position]) -> Iterator[Event]:
        for run in _runs(positions):
            self.kv |= {position.block_hash: position for position in run}
            yield _stored(run)

    def keep(self, position: Position) -> Iterator[Event]:
        self.states[position.block_hash] = position
        yield StateStored(position.block_hash, position.depth, position.namespace)

    def drop(self, block_hash: int) -> Iterator[Event]:
        del self.states[block_hash]
        yield StateRemoved(block_hash)

    def batch(self, events: list[Event]) -> Batch:
        self.sequence += 1
        return Batch(self.name, self.epoch, self.sequence, tuple(events))

    def restart(self) -> None:
        self.epoch, self.sequence, self.number, self.kv, self.states = self.epoch + 1, -1, -1, {}, {}

    def all(self, rng: Random | None = None) -> list[Event]:
        """Everything that is held, in any order."""
        events: list[Event] = [_stored([position]) for position in self.kv.values()]
        events += [StateStored(each.block_hash, each.depth, each.namespace) for each in self.states.values()]
        if rng is not None:
            rng.shuffle(events)
        return events

    def snapshot(self, rng: Random | None = None) -> Snapshot:
        self.number += 1
        return Snapshot(self.name, self.epoch, self.sequence, self.number, tuple(self.all(rng)))

    def hit(self, prompts: Prompts, path: int) -> Hit:
        """By definition: block after block."""
        chain = prompts.chain(path)
        num_kv_blocks = 0
        hit = 0
        for block in range(len(chain.hashes) + 1):
            for depth in range(block * BLOCK_TOKENS, (block + 1) * BLOCK_TOKENS):
                assert chain.tail is not None
                tail = chain.hashes[block - 1] if depth == block * BLOCK_TOKENS and block else chain.tail(depth)
                if depth and tail in self.kv and tail in self.states:
                    hit = depth
            if block == len(chain.hashes) or chain.hashes[block] not in self.kv:
                break
            num_kv_blocks += 1
        return Hit(hit, max(hit, num_kv_blocks * BLOCK_TOKENS))


def _stored(run: list[Position]) -> KvStored:
    hashes = tuple(position.block_hash for position in run)
    return KvStored(hashes, run[0].parent_hash, run[0].namespace, run[0].num_tokens)


def _runs(positions: list[Position]) -> Iterator[list[Position]]:
    """What one event can tell: full blocks together, a partial one alone."""
    full = [position for position in positions if position.num_tokens == BLOCK_TOKENS]
    if full:
        yield full
    yield from ([position] for position in positions if position.num_tokens != BLOCK_TOKENS)
